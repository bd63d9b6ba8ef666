from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HBM: _ClassVar[Tier]
    TIER_DRAM: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]
    TIER_SHARED: _ClassVar[Tier]

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_ACTIVE: _ClassVar[NodeState]
    NODE_STATE_SUSPECT: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_DEAD: _ClassVar[NodeState]
TIER_UNSPECIFIED: Tier
TIER_HBM: Tier
TIER_DRAM: Tier
TIER_SSD: Tier
TIER_SHARED: Tier
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_ACTIVE: NodeState
NODE_STATE_SUSPECT: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_DEAD: NodeState

class Endpoints(_message.Message):
    __slots__ = ("grpc_target", "tcp_host", "tcp_port", "unix_path", "tls")
    GRPC_TARGET_FIELD_NUMBER: _ClassVar[int]
    TCP_HOST_FIELD_NUMBER: _ClassVar[int]
    TCP_PORT_FIELD_NUMBER: _ClassVar[int]
    UNIX_PATH_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    grpc_target: str
    tcp_host: str
    tcp_port: int
    unix_path: str
    tls: bool
    def __init__(self, grpc_target: _Optional[str] = ..., tcp_host: _Optional[str] = ..., tcp_port: _Optional[int] = ..., unix_path: _Optional[str] = ..., tls: _Optional[bool] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("id", "tier", "capacity_bytes", "kind")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    id: int
    tier: Tier
    capacity_bytes: int
    kind: str
    def __init__(self, id: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class RdmaRail(_message.Message):
    __slots__ = ("device", "port", "address", "link_layer", "numa_node", "megabits_per_s", "mtu_bytes", "up", "connections", "grants", "granted_bytes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LINK_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    MEGABITS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MTU_BYTES_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    device: str
    port: int
    address: str
    link_layer: str
    numa_node: int
    megabits_per_s: int
    mtu_bytes: int
    up: bool
    connections: int
    grants: int
    granted_bytes: int
    def __init__(self, device: _Optional[str] = ..., port: _Optional[int] = ..., address: _Optional[str] = ..., link_layer: _Optional[str] = ..., numa_node: _Optional[int] = ..., megabits_per_s: _Optional[int] = ..., mtu_bytes: _Optional[int] = ..., up: _Optional[bool] = ..., connections: _Optional[int] = ..., grants: _Optional[int] = ..., granted_bytes: _Optional[int] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("index", "node_id", "host_id", "incarnation", "endpoints", "state", "capacity_bytes", "free_bytes", "weight", "software_version", "rails", "segments", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    RAILS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    index: int
    node_id: str
    host_id: str
    incarnation: int
    endpoints: Endpoints
    state: NodeState
    capacity_bytes: int
    free_bytes: int
    weight: float
    software_version: str
    rails: _containers.RepeatedCompositeFieldContainer[RdmaRail]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    labels: _containers.ScalarMap[str, str]
    def __init__(self, index: _Optional[int] = ..., node_id: _Optional[str] = ..., host_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., endpoints: _Optional[_Union[Endpoints, _Mapping]] = ..., state: _Optional[_Union[NodeState, str]] = ..., capacity_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., weight: _Optional[float] = ..., software_version: _Optional[str] = ..., rails: _Optional[_Iterable[_Union[RdmaRail, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ClusterMap(_message.Message):
    __slots__ = ("epoch", "term", "leader", "nodes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    term: int
    leader: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    def __init__(self, epoch: _Optional[int] = ..., term: _Optional[int] = ..., leader: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ...) -> None: ...

class TenantLimits(_message.Message):
    __slots__ = ("tenant", "memory_quota_bytes", "memory_share_bytes", "disk_quota_bytes", "disk_share_bytes", "bytes_per_s", "ttl_ms", "replicas", "encrypted")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    memory_quota_bytes: int
    memory_share_bytes: int
    disk_quota_bytes: int
    disk_share_bytes: int
    bytes_per_s: int
    ttl_ms: int
    replicas: int
    encrypted: int
    def __init__(self, tenant: _Optional[str] = ..., memory_quota_bytes: _Optional[int] = ..., memory_share_bytes: _Optional[int] = ..., disk_quota_bytes: _Optional[int] = ..., disk_share_bytes: _Optional[int] = ..., bytes_per_s: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., replicas: _Optional[int] = ..., encrypted: _Optional[int] = ...) -> None: ...

class TenantTable(_message.Message):
    __slots__ = ("version", "tenants")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantLimits]
    def __init__(self, version: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantLimits, _Mapping]]] = ...) -> None: ...

class QuarantineEntry(_message.Message):
    __slots__ = ("writer_id", "instance", "build", "changed_wall_ms", "released", "verifiers", "reason")
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    CHANGED_WALL_MS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    writer_id: int
    instance: str
    build: str
    changed_wall_ms: int
    released: bool
    verifiers: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, writer_id: _Optional[int] = ..., instance: _Optional[str] = ..., build: _Optional[str] = ..., changed_wall_ms: _Optional[int] = ..., released: _Optional[bool] = ..., verifiers: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class QuarantineTable(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[QuarantineEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[QuarantineEntry, _Mapping]]] = ...) -> None: ...

class TenantFigures(_message.Message):
    __slots__ = ("tenant", "figures")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    figures: _containers.ScalarMap[str, int]
    def __init__(self, tenant: _Optional[str] = ..., figures: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TenantPurge(_message.Message):
    __slots__ = ("node_id", "code", "blocks", "bytes", "disk_blocks", "disk_bytes", "held_blocks", "failed_blocks", "ended_wall_ms", "keys_erased", "erased_key_ids")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENDED_WALL_MS_FIELD_NUMBER: _ClassVar[int]
    KEYS_ERASED_FIELD_NUMBER: _ClassVar[int]
    ERASED_KEY_IDS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    code: int
    blocks: int
    bytes: int
    disk_blocks: int
    disk_bytes: int
    held_blocks: int
    failed_blocks: int
    ended_wall_ms: int
    keys_erased: bool
    erased_key_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., code: _Optional[int] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., disk_blocks: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., held_blocks: _Optional[int] = ..., failed_blocks: _Optional[int] = ..., ended_wall_ms: _Optional[int] = ..., keys_erased: _Optional[bool] = ..., erased_key_ids: _Optional[_Iterable[str]] = ...) -> None: ...

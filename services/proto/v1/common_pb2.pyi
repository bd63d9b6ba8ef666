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
    __slots__ = ("index", "node_id", "host_id", "incarnation", "endpoints", "state", "capacity_bytes", "free_bytes", "weight", "software_version", "rails", "segments")
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
    def __init__(self, index: _Optional[int] = ..., node_id: _Optional[str] = ..., host_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., endpoints: _Optional[_Union[Endpoints, _Mapping]] = ..., state: _Optional[_Union[NodeState, str]] = ..., capacity_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., weight: _Optional[float] = ..., software_version: _Optional[str] = ..., rails: _Optional[_Iterable[_Union[RdmaRail, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ...) -> None: ...

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

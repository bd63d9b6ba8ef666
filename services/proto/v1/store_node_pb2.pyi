from mooncache.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DropReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DROP_REASON_UNSPECIFIED: _ClassVar[DropReason]
    DROP_REASON_REMOVED: _ClassVar[DropReason]
    DROP_REASON_DRAINED: _ClassVar[DropReason]
DROP_REASON_UNSPECIFIED: DropReason
DROP_REASON_REMOVED: DropReason
DROP_REASON_DRAINED: DropReason

class Fence(_message.Message):
    __slots__ = ("term", "incarnation")
    TERM_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    term: int
    incarnation: int
    def __init__(self, term: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class CopyBlocksRequest(_message.Message):
    __slots__ = ("tenant_id", "tenant", "keys", "source", "timeout_ms", "fence", "spare")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    tenant_id: int
    tenant: str
    keys: bytes
    source: _common_pb2.NodeInfo
    timeout_ms: int
    fence: Fence
    spare: bool
    def __init__(self, tenant_id: _Optional[int] = ..., tenant: _Optional[str] = ..., keys: _Optional[bytes] = ..., source: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., spare: _Optional[bool] = ...) -> None: ...

class CopyBlocksResponse(_message.Message):
    __slots__ = ("codes", "copied_bytes")
    CODES_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[int]
    copied_bytes: int
    def __init__(self, codes: _Optional[_Iterable[int]] = ..., copied_bytes: _Optional[int] = ...) -> None: ...

class DropBlocksRequest(_message.Message):
    __slots__ = ("tenant_id", "keys", "reason", "fence")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    tenant_id: int
    keys: bytes
    reason: DropReason
    fence: Fence
    def __init__(self, tenant_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., reason: _Optional[_Union[DropReason, str]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class DropBlocksResponse(_message.Message):
    __slots__ = ("codes",)
    CODES_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, codes: _Optional[_Iterable[int]] = ...) -> None: ...

class NodePinBlocksRequest(_message.Message):
    __slots__ = ("tenant_id", "keys", "ttl_ms", "fence")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    tenant_id: int
    keys: bytes
    ttl_ms: int
    fence: Fence
    def __init__(self, tenant_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class NodePinBlocksResponse(_message.Message):
    __slots__ = ("codes",)
    CODES_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, codes: _Optional[_Iterable[int]] = ...) -> None: ...

class NodeUnpinBlocksRequest(_message.Message):
    __slots__ = ("tenant_id", "keys", "fence")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    tenant_id: int
    keys: bytes
    fence: Fence
    def __init__(self, tenant_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class NodeUnpinBlocksResponse(_message.Message):
    __slots__ = ("codes",)
    CODES_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, codes: _Optional[_Iterable[int]] = ...) -> None: ...

class SetDrainingRequest(_message.Message):
    __slots__ = ("draining", "fence")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    fence: Fence
    def __init__(self, draining: _Optional[bool] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class SetDrainingResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: _common_pb2.NodeState
    def __init__(self, state: _Optional[_Union[_common_pb2.NodeState, str]] = ...) -> None: ...

class NodeSetTenantsRequest(_message.Message):
    __slots__ = ("table", "fence")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    table: _common_pb2.TenantTable
    fence: Fence
    def __init__(self, table: _Optional[_Union[_common_pb2.TenantTable, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class NodeSetTenantsResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class NodeGetTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeGetTenantsResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[_common_pb2.TenantFigures]
    def __init__(self, tenants: _Optional[_Iterable[_Union[_common_pb2.TenantFigures, _Mapping]]] = ...) -> None: ...

class NodePurgeTenantRequest(_message.Message):
    __slots__ = ("tenant", "fence", "erase_keys")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ERASE_KEYS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    fence: Fence
    erase_keys: bool
    def __init__(self, tenant: _Optional[str] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., erase_keys: _Optional[bool] = ...) -> None: ...

class NodePurgeTenantResponse(_message.Message):
    __slots__ = ("purge",)
    PURGE_FIELD_NUMBER: _ClassVar[int]
    purge: _common_pb2.TenantPurge
    def __init__(self, purge: _Optional[_Union[_common_pb2.TenantPurge, _Mapping]] = ...) -> None: ...

class GetNodeStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetNodeStatusResponse(_message.Message):
    __slots__ = ("node_id", "incarnation", "host_id", "software_version", "state", "endpoints", "segments", "used_bytes", "pinned_bytes", "block_count", "last_seq", "acked_seq", "master_id", "uptime_ms", "counters", "wall_ms", "formats")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FormatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    ACKED_SEQ_FIELD_NUMBER: _ClassVar[int]
    MASTER_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    WALL_MS_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    host_id: str
    software_version: str
    state: _common_pb2.NodeState
    endpoints: _common_pb2.Endpoints
    segments: _containers.RepeatedCompositeFieldContainer[_common_pb2.Segment]
    used_bytes: int
    pinned_bytes: int
    block_count: int
    last_seq: int
    acked_seq: int
    master_id: str
    uptime_ms: int
    counters: _containers.ScalarMap[str, int]
    wall_ms: int
    formats: _containers.ScalarMap[str, int]
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., host_id: _Optional[str] = ..., software_version: _Optional[str] = ..., state: _Optional[_Union[_common_pb2.NodeState, str]] = ..., endpoints: _Optional[_Union[_common_pb2.Endpoints, _Mapping]] = ..., segments: _Optional[_Iterable[_Union[_common_pb2.Segment, _Mapping]]] = ..., used_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., last_seq: _Optional[int] = ..., acked_seq: _Optional[int] = ..., master_id: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., wall_ms: _Optional[int] = ..., formats: _Optional[_Mapping[str, int]] = ...) -> None: ...

class DiagnoseRequest(_message.Message):
    __slots__ = ("peers", "timeout_ms")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeInfo]
    timeout_ms: int
    def __init__(self, peers: _Optional[_Iterable[_Union[_common_pb2.NodeInfo, _Mapping]]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class PeerReach(_message.Message):
    __slots__ = ("node_id", "control_code", "control_message", "data_code", "data_message", "data_ms")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_CODE_FIELD_NUMBER: _ClassVar[int]
    CONTROL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_CODE_FIELD_NUMBER: _ClassVar[int]
    DATA_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_MS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    control_code: int
    control_message: str
    data_code: int
    data_message: str
    data_ms: float
    def __init__(self, node_id: _Optional[str] = ..., control_code: _Optional[int] = ..., control_message: _Optional[str] = ..., data_code: _Optional[int] = ..., data_message: _Optional[str] = ..., data_ms: _Optional[float] = ...) -> None: ...

class DiagnoseResponse(_message.Message):
    __slots__ = ("node_id", "host_json", "peers")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_JSON_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    host_json: bytes
    peers: _containers.RepeatedCompositeFieldContainer[PeerReach]
    def __init__(self, node_id: _Optional[str] = ..., host_json: _Optional[bytes] = ..., peers: _Optional[_Iterable[_Union[PeerReach, _Mapping]]] = ...) -> None: ...

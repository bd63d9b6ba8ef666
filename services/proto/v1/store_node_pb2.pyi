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
    __slots__ = ("tenant_id", "tenant", "keys", "source", "timeout_ms", "fence", "spare", "bytes_per_s")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    tenant_id: int
    tenant: str
    keys: bytes
    source: _common_pb2.NodeInfo
    timeout_ms: int
    fence: Fence
    spare: bool
    bytes_per_s: int
    def __init__(self, tenant_id: _Optional[int] = ..., tenant: _Optional[str] = ..., keys: _Optional[bytes] = ..., source: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., spare: _Optional[bool] = ..., bytes_per_s: _Optional[int] = ...) -> None: ...

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

class NodeSetQuarantineRequest(_message.Message):
    __slots__ = ("table", "fence")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    table: _common_pb2.QuarantineTable
    fence: Fence
    def __init__(self, table: _Optional[_Union[_common_pb2.QuarantineTable, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class NodeSetQuarantineResponse(_message.Message):
    __slots__ = ("mark",)
    MARK_FIELD_NUMBER: _ClassVar[int]
    mark: int
    def __init__(self, mark: _Optional[int] = ...) -> None: ...

class NodeGetTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeGetTenantsResponse(_message.Message):
    __slots__ = ("tenants", "sampled_found", "sampled_unlimited")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FOUND_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_UNLIMITED_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[_common_pb2.TenantFigures]
    sampled_found: int
    sampled_unlimited: int
    def __init__(self, tenants: _Optional[_Iterable[_Union[_common_pb2.TenantFigures, _Mapping]]] = ..., sampled_found: _Optional[int] = ..., sampled_unlimited: _Optional[int] = ...) -> None: ...

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

class GetWritersRequest(_message.Message):
    __slots__ = ("tenant", "keys")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: bytes
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[bytes] = ...) -> None: ...

class WriterFigures(_message.Message):
    __slots__ = ("writer_id", "instance", "build", "started_unix_s", "block_count", "memory_bytes", "disk_block_count", "disk_bytes", "first_unix_s", "last_unix_s")
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    LAST_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    writer_id: int
    instance: str
    build: str
    started_unix_s: int
    block_count: int
    memory_bytes: int
    disk_block_count: int
    disk_bytes: int
    first_unix_s: int
    last_unix_s: int
    def __init__(self, writer_id: _Optional[int] = ..., instance: _Optional[str] = ..., build: _Optional[str] = ..., started_unix_s: _Optional[int] = ..., block_count: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., disk_block_count: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., first_unix_s: _Optional[int] = ..., last_unix_s: _Optional[int] = ...) -> None: ...

class BlockOrigin(_message.Message):
    __slots__ = ("writer_id", "written_unix_s")
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    writer_id: int
    written_unix_s: int
    def __init__(self, writer_id: _Optional[int] = ..., written_unix_s: _Optional[int] = ...) -> None: ...

class GetWritersResponse(_message.Message):
    __slots__ = ("writers", "origins", "refused_count")
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    writers: _containers.RepeatedCompositeFieldContainer[WriterFigures]
    origins: _containers.RepeatedCompositeFieldContainer[BlockOrigin]
    refused_count: int
    def __init__(self, writers: _Optional[_Iterable[_Union[WriterFigures, _Mapping]]] = ..., origins: _Optional[_Iterable[_Union[BlockOrigin, _Mapping]]] = ..., refused_count: _Optional[int] = ...) -> None: ...

class RecallWritersRequest(_message.Message):
    __slots__ = ("writer_ids", "since_unix_s", "until_unix_s", "dry_run", "refuse_s", "fence")
    WRITER_IDS_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    REFUSE_S_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    writer_ids: _containers.RepeatedScalarFieldContainer[int]
    since_unix_s: int
    until_unix_s: int
    dry_run: bool
    refuse_s: int
    fence: Fence
    def __init__(self, writer_ids: _Optional[_Iterable[int]] = ..., since_unix_s: _Optional[int] = ..., until_unix_s: _Optional[int] = ..., dry_run: _Optional[bool] = ..., refuse_s: _Optional[int] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class RecallReceipt(_message.Message):
    __slots__ = ("node_id", "code", "block_count", "memory_bytes", "held_block_count", "disk_block_count", "disk_bytes", "failed_block_count", "ended_wall_ms")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    ENDED_WALL_MS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    code: int
    block_count: int
    memory_bytes: int
    held_block_count: int
    disk_block_count: int
    disk_bytes: int
    failed_block_count: int
    ended_wall_ms: int
    def __init__(self, node_id: _Optional[str] = ..., code: _Optional[int] = ..., block_count: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., held_block_count: _Optional[int] = ..., disk_block_count: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., failed_block_count: _Optional[int] = ..., ended_wall_ms: _Optional[int] = ...) -> None: ...

class RecallWritersResponse(_message.Message):
    __slots__ = ("receipt",)
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    receipt: RecallReceipt
    def __init__(self, receipt: _Optional[_Union[RecallReceipt, _Mapping]] = ...) -> None: ...

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

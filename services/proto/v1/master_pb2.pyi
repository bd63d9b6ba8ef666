from mooncache.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeCommand(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_COMMAND_UNSPECIFIED: _ClassVar[NodeCommand]
    NODE_COMMAND_DRAIN_ON: _ClassVar[NodeCommand]
    NODE_COMMAND_DRAIN_OFF: _ClassVar[NodeCommand]

class ReportKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPORT_KIND_UNSPECIFIED: _ClassVar[ReportKind]
    REPORT_KIND_DELTA: _ClassVar[ReportKind]
    REPORT_KIND_FULL_BEGIN: _ClassVar[ReportKind]
    REPORT_KIND_FULL_PART: _ClassVar[ReportKind]
    REPORT_KIND_FULL_END: _ClassVar[ReportKind]

class TaskKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_KIND_UNSPECIFIED: _ClassVar[TaskKind]
    TASK_KIND_REPLICATE: _ClassVar[TaskKind]
    TASK_KIND_DRAIN: _ClassVar[TaskKind]

class TaskState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_STATE_UNSPECIFIED: _ClassVar[TaskState]
    TASK_STATE_QUEUED: _ClassVar[TaskState]
    TASK_STATE_RUNNING: _ClassVar[TaskState]
    TASK_STATE_DONE: _ClassVar[TaskState]
    TASK_STATE_FAILED: _ClassVar[TaskState]
    TASK_STATE_CANCELLED: _ClassVar[TaskState]

class RepairState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPAIR_STATE_UNSPECIFIED: _ClassVar[RepairState]
    REPAIR_STATE_OFF: _ClassVar[RepairState]
    REPAIR_STATE_WHOLE: _ClassVar[RepairState]
    REPAIR_STATE_WAITING: _ClassVar[RepairState]
    REPAIR_STATE_REPAIRING: _ClassVar[RepairState]
    REPAIR_STATE_BLOCKED: _ClassVar[RepairState]

class RebalanceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REBALANCE_STATE_UNSPECIFIED: _ClassVar[RebalanceState]
    REBALANCE_STATE_OFF: _ClassVar[RebalanceState]
    REBALANCE_STATE_AT_REST: _ClassVar[RebalanceState]
    REBALANCE_STATE_WAITING: _ClassVar[RebalanceState]
    REBALANCE_STATE_MOVING: _ClassVar[RebalanceState]
NODE_COMMAND_UNSPECIFIED: NodeCommand
NODE_COMMAND_DRAIN_ON: NodeCommand
NODE_COMMAND_DRAIN_OFF: NodeCommand
REPORT_KIND_UNSPECIFIED: ReportKind
REPORT_KIND_DELTA: ReportKind
REPORT_KIND_FULL_BEGIN: ReportKind
REPORT_KIND_FULL_PART: ReportKind
REPORT_KIND_FULL_END: ReportKind
TASK_KIND_UNSPECIFIED: TaskKind
TASK_KIND_REPLICATE: TaskKind
TASK_KIND_DRAIN: TaskKind
TASK_STATE_UNSPECIFIED: TaskState
TASK_STATE_QUEUED: TaskState
TASK_STATE_RUNNING: TaskState
TASK_STATE_DONE: TaskState
TASK_STATE_FAILED: TaskState
TASK_STATE_CANCELLED: TaskState
REPAIR_STATE_UNSPECIFIED: RepairState
REPAIR_STATE_OFF: RepairState
REPAIR_STATE_WHOLE: RepairState
REPAIR_STATE_WAITING: RepairState
REPAIR_STATE_REPAIRING: RepairState
REPAIR_STATE_BLOCKED: RepairState
REBALANCE_STATE_UNSPECIFIED: RebalanceState
REBALANCE_STATE_OFF: RebalanceState
REBALANCE_STATE_AT_REST: RebalanceState
REBALANCE_STATE_WAITING: RebalanceState
REBALANCE_STATE_MOVING: RebalanceState

class RegisterNodeRequest(_message.Message):
    __slots__ = ("node_id", "incarnation", "host_id", "software_version", "protocol_minor", "endpoints", "segments", "started_ms", "rails", "labels", "host_name", "pid")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    RAILS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    host_id: str
    software_version: str
    protocol_minor: int
    endpoints: _common_pb2.Endpoints
    segments: _containers.RepeatedCompositeFieldContainer[_common_pb2.Segment]
    started_ms: int
    rails: _containers.RepeatedCompositeFieldContainer[_common_pb2.RdmaRail]
    labels: _containers.ScalarMap[str, str]
    host_name: str
    pid: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., host_id: _Optional[str] = ..., software_version: _Optional[str] = ..., protocol_minor: _Optional[int] = ..., endpoints: _Optional[_Union[_common_pb2.Endpoints, _Mapping]] = ..., segments: _Optional[_Iterable[_Union[_common_pb2.Segment, _Mapping]]] = ..., started_ms: _Optional[int] = ..., rails: _Optional[_Iterable[_Union[_common_pb2.RdmaRail, _Mapping]]] = ..., labels: _Optional[_Mapping[str, str]] = ..., host_name: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class RegisterNodeResponse(_message.Message):
    __slots__ = ("node_index", "master_id", "term", "epoch", "heartbeat_interval_ms", "lease_ms", "want_full_report")
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MASTER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    WANT_FULL_REPORT_FIELD_NUMBER: _ClassVar[int]
    node_index: int
    master_id: str
    term: int
    epoch: int
    heartbeat_interval_ms: int
    lease_ms: int
    want_full_report: bool
    def __init__(self, node_index: _Optional[int] = ..., master_id: _Optional[str] = ..., term: _Optional[int] = ..., epoch: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., want_full_report: _Optional[bool] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node_id", "incarnation", "master_term", "capacity_bytes", "used_bytes", "pinned_bytes", "block_count", "state", "tenant_names", "last_seq", "rails", "arena_gone", "tenants_version", "tenants", "quarantine_mark", "quarantine", "trial")
    class TenantNamesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MASTER_TERM_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_NAMES_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    RAILS_FIELD_NUMBER: _ClassVar[int]
    ARENA_GONE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_MARK_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    master_term: int
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    block_count: int
    state: _common_pb2.NodeState
    tenant_names: _containers.ScalarMap[int, str]
    last_seq: int
    rails: _containers.RepeatedCompositeFieldContainer[_common_pb2.RdmaRail]
    arena_gone: bool
    tenants_version: int
    tenants: _common_pb2.TenantTable
    quarantine_mark: int
    quarantine: _common_pb2.QuarantineTable
    trial: PeerTrial
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., master_term: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., state: _Optional[_Union[_common_pb2.NodeState, str]] = ..., tenant_names: _Optional[_Mapping[int, str]] = ..., last_seq: _Optional[int] = ..., rails: _Optional[_Iterable[_Union[_common_pb2.RdmaRail, _Mapping]]] = ..., arena_gone: _Optional[bool] = ..., tenants_version: _Optional[int] = ..., tenants: _Optional[_Union[_common_pb2.TenantTable, _Mapping]] = ..., quarantine_mark: _Optional[int] = ..., quarantine: _Optional[_Union[_common_pb2.QuarantineTable, _Mapping]] = ..., trial: _Optional[_Union[PeerTrial, _Mapping]] = ...) -> None: ...

class PeerTrial(_message.Message):
    __slots__ = ("node_id", "round_trip_us")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_US_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    round_trip_us: int
    def __init__(self, node_id: _Optional[str] = ..., round_trip_us: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("epoch", "want_full_report", "commands", "lease_ms", "term", "tenants", "want_tenants", "quarantine", "want_quarantine", "try_peer")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WANT_FULL_REPORT_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    WANT_TENANTS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    WANT_QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    TRY_PEER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    want_full_report: bool
    commands: _containers.RepeatedScalarFieldContainer[NodeCommand]
    lease_ms: int
    term: int
    tenants: _common_pb2.TenantTable
    want_tenants: bool
    quarantine: _common_pb2.QuarantineTable
    want_quarantine: bool
    try_peer: _common_pb2.NodeInfo
    def __init__(self, epoch: _Optional[int] = ..., want_full_report: _Optional[bool] = ..., commands: _Optional[_Iterable[_Union[NodeCommand, str]]] = ..., lease_ms: _Optional[int] = ..., term: _Optional[int] = ..., tenants: _Optional[_Union[_common_pb2.TenantTable, _Mapping]] = ..., want_tenants: _Optional[bool] = ..., quarantine: _Optional[_Union[_common_pb2.QuarantineTable, _Mapping]] = ..., want_quarantine: _Optional[bool] = ..., try_peer: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ...) -> None: ...

class ReportBlocksRequest(_message.Message):
    __slots__ = ("node_id", "incarnation", "kind", "report_id", "first_seq", "last_seq", "part_index", "records")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REPORT_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    PART_INDEX_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    kind: ReportKind
    report_id: int
    first_seq: int
    last_seq: int
    part_index: int
    records: bytes
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., kind: _Optional[_Union[ReportKind, str]] = ..., report_id: _Optional[int] = ..., first_seq: _Optional[int] = ..., last_seq: _Optional[int] = ..., part_index: _Optional[int] = ..., records: _Optional[bytes] = ...) -> None: ...

class ReportBlocksResponse(_message.Message):
    __slots__ = ("acked_seq", "need_full", "next_part_index")
    ACKED_SEQ_FIELD_NUMBER: _ClassVar[int]
    NEED_FULL_FIELD_NUMBER: _ClassVar[int]
    NEXT_PART_INDEX_FIELD_NUMBER: _ClassVar[int]
    acked_seq: int
    need_full: bool
    next_part_index: int
    def __init__(self, acked_seq: _Optional[int] = ..., need_full: _Optional[bool] = ..., next_part_index: _Optional[int] = ...) -> None: ...

class GetClusterMapRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterMapResponse(_message.Message):
    __slots__ = ("map",)
    MAP_FIELD_NUMBER: _ClassVar[int]
    map: _common_pb2.ClusterMap
    def __init__(self, map: _Optional[_Union[_common_pb2.ClusterMap, _Mapping]] = ...) -> None: ...

class WatchClusterMapRequest(_message.Message):
    __slots__ = ("known_epoch", "wait_ms", "known_term")
    KNOWN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TERM_FIELD_NUMBER: _ClassVar[int]
    known_epoch: int
    wait_ms: int
    known_term: int
    def __init__(self, known_epoch: _Optional[int] = ..., wait_ms: _Optional[int] = ..., known_term: _Optional[int] = ...) -> None: ...

class WatchClusterMapResponse(_message.Message):
    __slots__ = ("changed", "map")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    map: _common_pb2.ClusterMap
    def __init__(self, changed: _Optional[bool] = ..., map: _Optional[_Union[_common_pb2.ClusterMap, _Mapping]] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("keys", "tenant")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    tenant: str
    def __init__(self, keys: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("locations", "epoch", "term")
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    locations: bytes
    epoch: int
    term: int
    def __init__(self, locations: _Optional[bytes] = ..., epoch: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("keys", "tenant")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    tenant: str
    def __init__(self, keys: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class NodeMatch(_message.Message):
    __slots__ = ("node_index", "leading_block_count")
    NODE_INDEX_FIELD_NUMBER: _ClassVar[int]
    LEADING_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    node_index: int
    leading_block_count: int
    def __init__(self, node_index: _Optional[int] = ..., leading_block_count: _Optional[int] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("leading_block_count", "nodes", "epoch", "term")
    LEADING_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    leading_block_count: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeMatch]
    epoch: int
    term: int
    def __init__(self, leading_block_count: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeMatch, _Mapping]]] = ..., epoch: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class PinBlocksRequest(_message.Message):
    __slots__ = ("keys", "ttl_ms", "tenant")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    ttl_ms: int
    tenant: str
    def __init__(self, keys: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class PinBlocksResponse(_message.Message):
    __slots__ = ("codes",)
    CODES_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, codes: _Optional[_Iterable[int]] = ...) -> None: ...

class UnpinBlocksRequest(_message.Message):
    __slots__ = ("keys", "tenant")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    tenant: str
    def __init__(self, keys: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class UnpinBlocksResponse(_message.Message):
    __slots__ = ("codes",)
    CODES_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, codes: _Optional[_Iterable[int]] = ...) -> None: ...

class RemoveBlocksRequest(_message.Message):
    __slots__ = ("keys", "tenant")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    tenant: str
    def __init__(self, keys: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class RemoveBlocksResponse(_message.Message):
    __slots__ = ("codes",)
    CODES_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, codes: _Optional[_Iterable[int]] = ...) -> None: ...

class ReplicateBlocksRequest(_message.Message):
    __slots__ = ("keys", "replica_count", "target_node_ids", "tenant", "spare", "conductor_term")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_COUNT_FIELD_NUMBER: _ClassVar[int]
    TARGET_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    CONDUCTOR_TERM_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    replica_count: int
    target_node_ids: _containers.RepeatedScalarFieldContainer[str]
    tenant: str
    spare: bool
    conductor_term: int
    def __init__(self, keys: _Optional[bytes] = ..., replica_count: _Optional[int] = ..., target_node_ids: _Optional[_Iterable[str]] = ..., tenant: _Optional[str] = ..., spare: _Optional[bool] = ..., conductor_term: _Optional[int] = ...) -> None: ...

class ReplicateBlocksResponse(_message.Message):
    __slots__ = ("task_id",)
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    def __init__(self, task_id: _Optional[str] = ...) -> None: ...

class TrimBlocksRequest(_message.Message):
    __slots__ = ("keys", "replica_count", "tenant", "node_id", "keep_node_ids", "conductor_term")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_COUNT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    CONDUCTOR_TERM_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    replica_count: int
    tenant: str
    node_id: str
    keep_node_ids: _containers.RepeatedScalarFieldContainer[str]
    conductor_term: int
    def __init__(self, keys: _Optional[bytes] = ..., replica_count: _Optional[int] = ..., tenant: _Optional[str] = ..., node_id: _Optional[str] = ..., keep_node_ids: _Optional[_Iterable[str]] = ..., conductor_term: _Optional[int] = ...) -> None: ...

class TrimBlocksResponse(_message.Message):
    __slots__ = ("codes", "dropped_count")
    CODES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[int]
    dropped_count: int
    def __init__(self, codes: _Optional[_Iterable[int]] = ..., dropped_count: _Optional[int] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("node_id", "cancel", "move_blocks")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    MOVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    cancel: bool
    move_blocks: bool
    def __init__(self, node_id: _Optional[str] = ..., cancel: _Optional[bool] = ..., move_blocks: _Optional[bool] = ...) -> None: ...

class DrainNodeResponse(_message.Message):
    __slots__ = ("task_id",)
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    def __init__(self, task_id: _Optional[str] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("task_id", "kind", "state", "node_id", "block_count", "done_block_count", "failed_block_count", "copied_bytes", "code", "message", "age_ms", "tenant")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DONE_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    kind: TaskKind
    state: TaskState
    node_id: str
    block_count: int
    done_block_count: int
    failed_block_count: int
    copied_bytes: int
    code: int
    message: str
    age_ms: int
    tenant: str
    def __init__(self, task_id: _Optional[str] = ..., kind: _Optional[_Union[TaskKind, str]] = ..., state: _Optional[_Union[TaskState, str]] = ..., node_id: _Optional[str] = ..., block_count: _Optional[int] = ..., done_block_count: _Optional[int] = ..., failed_block_count: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., age_ms: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class GetTaskRequest(_message.Message):
    __slots__ = ("task_id",)
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    def __init__(self, task_id: _Optional[str] = ...) -> None: ...

class GetTaskResponse(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: Task
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ...) -> None: ...

class ListTasksRequest(_message.Message):
    __slots__ = ("kind", "active_only", "page_size", "page_token")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_ONLY_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    kind: TaskKind
    active_only: bool
    page_size: int
    page_token: str
    def __init__(self, kind: _Optional[_Union[TaskKind, str]] = ..., active_only: _Optional[bool] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTasksResponse(_message.Message):
    __slots__ = ("tasks", "next_page_token")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[Task]
    next_page_token: str
    def __init__(self, tasks: _Optional[_Iterable[_Union[Task, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant_id", "tenant", "used_bytes", "block_count")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    tenant_id: int
    tenant: str
    used_bytes: int
    block_count: int
    def __init__(self, tenant_id: _Optional[int] = ..., tenant: _Optional[str] = ..., used_bytes: _Optional[int] = ..., block_count: _Optional[int] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ...) -> None: ...

class SetTenantRequest(_message.Message):
    __slots__ = ("limits",)
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: _common_pb2.TenantLimits
    def __init__(self, limits: _Optional[_Union[_common_pb2.TenantLimits, _Mapping]] = ...) -> None: ...

class SetTenantResponse(_message.Message):
    __slots__ = ("version", "node_ids")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    version: int
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., node_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeTenants(_message.Message):
    __slots__ = ("node_id", "tenants", "sampled_found", "sampled_unlimited")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FOUND_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_UNLIMITED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    tenants: _containers.RepeatedCompositeFieldContainer[_common_pb2.TenantFigures]
    sampled_found: int
    sampled_unlimited: int
    def __init__(self, node_id: _Optional[str] = ..., tenants: _Optional[_Iterable[_Union[_common_pb2.TenantFigures, _Mapping]]] = ..., sampled_found: _Optional[int] = ..., sampled_unlimited: _Optional[int] = ...) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("table", "nodes")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    table: _common_pb2.TenantTable
    nodes: _containers.RepeatedCompositeFieldContainer[NodeTenants]
    def __init__(self, table: _Optional[_Union[_common_pb2.TenantTable, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeTenants, _Mapping]]] = ...) -> None: ...

class PurgeTenantRequest(_message.Message):
    __slots__ = ("tenant", "erase_keys")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ERASE_KEYS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    erase_keys: bool
    def __init__(self, tenant: _Optional[str] = ..., erase_keys: _Optional[bool] = ...) -> None: ...

class PurgeTenantResponse(_message.Message):
    __slots__ = ("purges",)
    PURGES_FIELD_NUMBER: _ClassVar[int]
    purges: _containers.RepeatedCompositeFieldContainer[_common_pb2.TenantPurge]
    def __init__(self, purges: _Optional[_Iterable[_Union[_common_pb2.TenantPurge, _Mapping]]] = ...) -> None: ...

class ReportWrongBlocksRequest(_message.Message):
    __slots__ = ("tenant", "keys", "verifier_id", "verifier", "dtype", "distance", "tolerance")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: bytes
    verifier_id: int
    verifier: str
    dtype: str
    distance: float
    tolerance: float
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[bytes] = ..., verifier_id: _Optional[int] = ..., verifier: _Optional[str] = ..., dtype: _Optional[str] = ..., distance: _Optional[float] = ..., tolerance: _Optional[float] = ...) -> None: ...

class AccusedWriter(_message.Message):
    __slots__ = ("writer_id", "instance", "build", "quarantined")
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    writer_id: int
    instance: str
    build: str
    quarantined: bool
    def __init__(self, writer_id: _Optional[int] = ..., instance: _Optional[str] = ..., build: _Optional[str] = ..., quarantined: _Optional[bool] = ...) -> None: ...

class ReportWrongBlocksResponse(_message.Message):
    __slots__ = ("codes", "writers")
    CODES_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[int]
    writers: _containers.RepeatedCompositeFieldContainer[AccusedWriter]
    def __init__(self, codes: _Optional[_Iterable[int]] = ..., writers: _Optional[_Iterable[_Union[AccusedWriter, _Mapping]]] = ...) -> None: ...

class SetQuarantineRequest(_message.Message):
    __slots__ = ("writer_id", "instance", "build", "released", "reason")
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    writer_id: int
    instance: str
    build: str
    released: bool
    reason: str
    def __init__(self, writer_id: _Optional[int] = ..., instance: _Optional[str] = ..., build: _Optional[str] = ..., released: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class SetQuarantineResponse(_message.Message):
    __slots__ = ("node_ids",)
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class GetQuarantineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetQuarantineResponse(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: _common_pb2.QuarantineTable
    def __init__(self, table: _Optional[_Union[_common_pb2.QuarantineTable, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("with_latencies",)
    WITH_LATENCIES_FIELD_NUMBER: _ClassVar[int]
    with_latencies: bool
    def __init__(self, with_latencies: _Optional[bool] = ...) -> None: ...

class PeerLatency(_message.Message):
    __slots__ = ("node_id", "median_us", "least_us", "tries", "failures", "age_ms")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_US_FIELD_NUMBER: _ClassVar[int]
    LEAST_US_FIELD_NUMBER: _ClassVar[int]
    TRIES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    median_us: int
    least_us: int
    tries: int
    failures: int
    age_ms: int
    def __init__(self, node_id: _Optional[str] = ..., median_us: _Optional[int] = ..., least_us: _Optional[int] = ..., tries: _Optional[int] = ..., failures: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class MasterInfo(_message.Message):
    __slots__ = ("master_id", "grpc_target", "leader", "software_version", "host_id", "host_name", "started_ms", "pid")
    MASTER_ID_FIELD_NUMBER: _ClassVar[int]
    GRPC_TARGET_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    master_id: str
    grpc_target: str
    leader: bool
    software_version: str
    host_id: str
    host_name: str
    started_ms: int
    pid: int
    def __init__(self, master_id: _Optional[str] = ..., grpc_target: _Optional[str] = ..., leader: _Optional[bool] = ..., software_version: _Optional[str] = ..., host_id: _Optional[str] = ..., host_name: _Optional[str] = ..., started_ms: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "used_bytes", "pinned_bytes", "block_count", "directory_block_count", "acked_seq", "last_seq", "heartbeat_age_ms", "full_report_pending", "arena_gone", "host_name", "started_ms", "pid", "peers")
    NODE_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACKED_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    FULL_REPORT_PENDING_FIELD_NUMBER: _ClassVar[int]
    ARENA_GONE_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeInfo
    used_bytes: int
    pinned_bytes: int
    block_count: int
    directory_block_count: int
    acked_seq: int
    last_seq: int
    heartbeat_age_ms: int
    full_report_pending: bool
    arena_gone: bool
    host_name: str
    started_ms: int
    pid: int
    peers: _containers.RepeatedCompositeFieldContainer[PeerLatency]
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., used_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., directory_block_count: _Optional[int] = ..., acked_seq: _Optional[int] = ..., last_seq: _Optional[int] = ..., heartbeat_age_ms: _Optional[int] = ..., full_report_pending: _Optional[bool] = ..., arena_gone: _Optional[bool] = ..., host_name: _Optional[str] = ..., started_ms: _Optional[int] = ..., pid: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerLatency, _Mapping]]] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("master_id", "term", "epoch", "leading", "masters", "nodes", "software_version", "uptime_ms", "block_count", "directory_memory_bytes", "directory_complete", "active_task_count", "wall_ms")
    MASTER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEADING_FIELD_NUMBER: _ClassVar[int]
    MASTERS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_TASK_COUNT_FIELD_NUMBER: _ClassVar[int]
    WALL_MS_FIELD_NUMBER: _ClassVar[int]
    master_id: str
    term: int
    epoch: int
    leading: bool
    masters: _containers.RepeatedCompositeFieldContainer[MasterInfo]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    software_version: str
    uptime_ms: int
    block_count: int
    directory_memory_bytes: int
    directory_complete: bool
    active_task_count: int
    wall_ms: int
    def __init__(self, master_id: _Optional[str] = ..., term: _Optional[int] = ..., epoch: _Optional[int] = ..., leading: _Optional[bool] = ..., masters: _Optional[_Iterable[_Union[MasterInfo, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., software_version: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., block_count: _Optional[int] = ..., directory_memory_bytes: _Optional[int] = ..., directory_complete: _Optional[bool] = ..., active_task_count: _Optional[int] = ..., wall_ms: _Optional[int] = ...) -> None: ...

class GetRepairRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRepairResponse(_message.Message):
    __slots__ = ("state", "wait_ms", "short_block_count", "left_bytes", "close_block_count", "queued_block_count", "steps_in_flight", "resting_block_count", "resting_code", "bytes_per_s", "limit_bytes_per_s", "estimate_ms", "copied_bytes", "copied_block_count", "trimmed_count", "default_replicas", "tenant_replicas", "spread_over", "rebalance")
    class TenantReplicasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    SHORT_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLOSE_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RESTING_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESTING_CODE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_MS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TENANT_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SPREAD_OVER_FIELD_NUMBER: _ClassVar[int]
    REBALANCE_FIELD_NUMBER: _ClassVar[int]
    state: RepairState
    wait_ms: int
    short_block_count: int
    left_bytes: int
    close_block_count: int
    queued_block_count: int
    steps_in_flight: int
    resting_block_count: int
    resting_code: int
    bytes_per_s: int
    limit_bytes_per_s: int
    estimate_ms: int
    copied_bytes: int
    copied_block_count: int
    trimmed_count: int
    default_replicas: int
    tenant_replicas: _containers.ScalarMap[str, int]
    spread_over: str
    rebalance: RebalanceStatus
    def __init__(self, state: _Optional[_Union[RepairState, str]] = ..., wait_ms: _Optional[int] = ..., short_block_count: _Optional[int] = ..., left_bytes: _Optional[int] = ..., close_block_count: _Optional[int] = ..., queued_block_count: _Optional[int] = ..., steps_in_flight: _Optional[int] = ..., resting_block_count: _Optional[int] = ..., resting_code: _Optional[int] = ..., bytes_per_s: _Optional[int] = ..., limit_bytes_per_s: _Optional[int] = ..., estimate_ms: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., copied_block_count: _Optional[int] = ..., trimmed_count: _Optional[int] = ..., default_replicas: _Optional[int] = ..., tenant_replicas: _Optional[_Mapping[str, int]] = ..., spread_over: _Optional[str] = ..., rebalance: _Optional[_Union[RebalanceStatus, _Mapping]] = ...) -> None: ...

class RebalanceStatus(_message.Message):
    __slots__ = ("state", "wait_ms", "left_bytes", "bytes_per_s", "limit_bytes_per_s", "estimate_ms", "moved_bytes", "moved_block_count", "skipped_block_count", "steps_in_flight", "fullest_percent", "emptiest_percent")
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_MS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOVED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    FULLEST_PERCENT_FIELD_NUMBER: _ClassVar[int]
    EMPTIEST_PERCENT_FIELD_NUMBER: _ClassVar[int]
    state: RebalanceState
    wait_ms: int
    left_bytes: int
    bytes_per_s: int
    limit_bytes_per_s: int
    estimate_ms: int
    moved_bytes: int
    moved_block_count: int
    skipped_block_count: int
    steps_in_flight: int
    fullest_percent: int
    emptiest_percent: int
    def __init__(self, state: _Optional[_Union[RebalanceState, str]] = ..., wait_ms: _Optional[int] = ..., left_bytes: _Optional[int] = ..., bytes_per_s: _Optional[int] = ..., limit_bytes_per_s: _Optional[int] = ..., estimate_ms: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., moved_block_count: _Optional[int] = ..., skipped_block_count: _Optional[int] = ..., steps_in_flight: _Optional[int] = ..., fullest_percent: _Optional[int] = ..., emptiest_percent: _Optional[int] = ...) -> None: ...

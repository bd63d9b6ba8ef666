from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InstanceRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSTANCE_ROLE_UNSPECIFIED: _ClassVar[InstanceRole]
    INSTANCE_ROLE_PREFILL: _ClassVar[InstanceRole]
    INSTANCE_ROLE_DECODE: _ClassVar[InstanceRole]
    INSTANCE_ROLE_BOTH: _ClassVar[InstanceRole]

class InstanceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSTANCE_STATE_UNSPECIFIED: _ClassVar[InstanceState]
    INSTANCE_STATE_STARTING: _ClassVar[InstanceState]
    INSTANCE_STATE_READY: _ClassVar[InstanceState]
    INSTANCE_STATE_DRAINING: _ClassVar[InstanceState]
    INSTANCE_STATE_SUSPECT: _ClassVar[InstanceState]

class AdmissionReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADMISSION_REASON_UNSPECIFIED: _ClassVar[AdmissionReason]
    ADMISSION_REASON_ADMITTED: _ClassVar[AdmissionReason]
    ADMISSION_REASON_TTFT: _ClassVar[AdmissionReason]
    ADMISSION_REASON_TBT: _ClassVar[AdmissionReason]
    ADMISSION_REASON_CAPACITY: _ClassVar[AdmissionReason]
    ADMISSION_REASON_NO_INSTANCE: _ClassVar[AdmissionReason]
    ADMISSION_REASON_UNKNOWN_MODEL: _ClassVar[AdmissionReason]
    ADMISSION_REASON_TOO_LONG: _ClassVar[AdmissionReason]
    ADMISSION_REASON_OFFLINE: _ClassVar[AdmissionReason]

class RequestPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_PHASE_UNSPECIFIED: _ClassVar[RequestPhase]
    REQUEST_PHASE_PREFILLED: _ClassVar[RequestPhase]
    REQUEST_PHASE_PREFILL_FAILED: _ClassVar[RequestPhase]
    REQUEST_PHASE_FIRST_TOKEN: _ClassVar[RequestPhase]
    REQUEST_PHASE_FINISHED: _ClassVar[RequestPhase]
    REQUEST_PHASE_FAILED: _ClassVar[RequestPhase]
    REQUEST_PHASE_ABORTED: _ClassVar[RequestPhase]

class LegRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_ROLE_UNSPECIFIED: _ClassVar[LegRole]
    LEG_ROLE_PREFILL: _ClassVar[LegRole]
    LEG_ROLE_DECODE: _ClassVar[LegRole]

class CacheOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_OUTCOME_UNSPECIFIED: _ClassVar[CacheOutcome]
    CACHE_OUTCOME_HIT: _ClassVar[CacheOutcome]
    CACHE_OUTCOME_PARTIAL: _ClassVar[CacheOutcome]
    CACHE_OUTCOME_MISS: _ClassVar[CacheOutcome]
    CACHE_OUTCOME_TIMEOUT: _ClassVar[CacheOutcome]
    CACHE_OUTCOME_FAILED: _ClassVar[CacheOutcome]
    CACHE_OUTCOME_POOL_ABSENT: _ClassVar[CacheOutcome]
    CACHE_OUTCOME_OFF: _ClassVar[CacheOutcome]
    CACHE_OUTCOME_COMPUTED_FASTER: _ClassVar[CacheOutcome]
    CACHE_OUTCOME_LOAD_CUT: _ClassVar[CacheOutcome]

class ConductorRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONDUCTOR_ROLE_UNSPECIFIED: _ClassVar[ConductorRole]
    CONDUCTOR_ROLE_LEADER: _ClassVar[ConductorRole]
    CONDUCTOR_ROLE_STANDBY: _ClassVar[ConductorRole]
    CONDUCTOR_ROLE_SEEKING: _ClassVar[ConductorRole]
    CONDUCTOR_ROLE_UNREACHABLE: _ClassVar[ConductorRole]

class MemberKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_KIND_UNSPECIFIED: _ClassVar[MemberKind]
    MEMBER_KIND_GATEWAY: _ClassVar[MemberKind]
    MEMBER_KIND_ENDPOINT_PICKER: _ClassVar[MemberKind]
    MEMBER_KIND_CONDUCTOR: _ClassVar[MemberKind]
    MEMBER_KIND_WORKER: _ClassVar[MemberKind]
    MEMBER_KIND_MASTER: _ClassVar[MemberKind]
    MEMBER_KIND_STORE_NODE: _ClassVar[MemberKind]

class MemberPresence(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_PRESENCE_UNSPECIFIED: _ClassVar[MemberPresence]
    MEMBER_PRESENCE_PRESENT: _ClassVar[MemberPresence]
    MEMBER_PRESENCE_SILENT: _ClassVar[MemberPresence]
    MEMBER_PRESENCE_GONE: _ClassVar[MemberPresence]
    MEMBER_PRESENCE_STOPPED: _ClassVar[MemberPresence]

class LimitKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIMIT_KIND_UNSPECIFIED: _ClassVar[LimitKind]
    LIMIT_KIND_REQUESTS: _ClassVar[LimitKind]
    LIMIT_KIND_TOKENS: _ClassVar[LimitKind]
    LIMIT_KIND_CONCURRENCY: _ClassVar[LimitKind]
    LIMIT_KIND_TOKENS_UNDER_WAY: _ClassVar[LimitKind]
    LIMIT_KIND_MONEY: _ClassVar[LimitKind]
INSTANCE_ROLE_UNSPECIFIED: InstanceRole
INSTANCE_ROLE_PREFILL: InstanceRole
INSTANCE_ROLE_DECODE: InstanceRole
INSTANCE_ROLE_BOTH: InstanceRole
INSTANCE_STATE_UNSPECIFIED: InstanceState
INSTANCE_STATE_STARTING: InstanceState
INSTANCE_STATE_READY: InstanceState
INSTANCE_STATE_DRAINING: InstanceState
INSTANCE_STATE_SUSPECT: InstanceState
ADMISSION_REASON_UNSPECIFIED: AdmissionReason
ADMISSION_REASON_ADMITTED: AdmissionReason
ADMISSION_REASON_TTFT: AdmissionReason
ADMISSION_REASON_TBT: AdmissionReason
ADMISSION_REASON_CAPACITY: AdmissionReason
ADMISSION_REASON_NO_INSTANCE: AdmissionReason
ADMISSION_REASON_UNKNOWN_MODEL: AdmissionReason
ADMISSION_REASON_TOO_LONG: AdmissionReason
ADMISSION_REASON_OFFLINE: AdmissionReason
REQUEST_PHASE_UNSPECIFIED: RequestPhase
REQUEST_PHASE_PREFILLED: RequestPhase
REQUEST_PHASE_PREFILL_FAILED: RequestPhase
REQUEST_PHASE_FIRST_TOKEN: RequestPhase
REQUEST_PHASE_FINISHED: RequestPhase
REQUEST_PHASE_FAILED: RequestPhase
REQUEST_PHASE_ABORTED: RequestPhase
LEG_ROLE_UNSPECIFIED: LegRole
LEG_ROLE_PREFILL: LegRole
LEG_ROLE_DECODE: LegRole
CACHE_OUTCOME_UNSPECIFIED: CacheOutcome
CACHE_OUTCOME_HIT: CacheOutcome
CACHE_OUTCOME_PARTIAL: CacheOutcome
CACHE_OUTCOME_MISS: CacheOutcome
CACHE_OUTCOME_TIMEOUT: CacheOutcome
CACHE_OUTCOME_FAILED: CacheOutcome
CACHE_OUTCOME_POOL_ABSENT: CacheOutcome
CACHE_OUTCOME_OFF: CacheOutcome
CACHE_OUTCOME_COMPUTED_FASTER: CacheOutcome
CACHE_OUTCOME_LOAD_CUT: CacheOutcome
CONDUCTOR_ROLE_UNSPECIFIED: ConductorRole
CONDUCTOR_ROLE_LEADER: ConductorRole
CONDUCTOR_ROLE_STANDBY: ConductorRole
CONDUCTOR_ROLE_SEEKING: ConductorRole
CONDUCTOR_ROLE_UNREACHABLE: ConductorRole
MEMBER_KIND_UNSPECIFIED: MemberKind
MEMBER_KIND_GATEWAY: MemberKind
MEMBER_KIND_ENDPOINT_PICKER: MemberKind
MEMBER_KIND_CONDUCTOR: MemberKind
MEMBER_KIND_WORKER: MemberKind
MEMBER_KIND_MASTER: MemberKind
MEMBER_KIND_STORE_NODE: MemberKind
MEMBER_PRESENCE_UNSPECIFIED: MemberPresence
MEMBER_PRESENCE_PRESENT: MemberPresence
MEMBER_PRESENCE_SILENT: MemberPresence
MEMBER_PRESENCE_GONE: MemberPresence
MEMBER_PRESENCE_STOPPED: MemberPresence
LIMIT_KIND_UNSPECIFIED: LimitKind
LIMIT_KIND_REQUESTS: LimitKind
LIMIT_KIND_TOKENS: LimitKind
LIMIT_KIND_CONCURRENCY: LimitKind
LIMIT_KIND_TOKENS_UNDER_WAY: LimitKind
LIMIT_KIND_MONEY: LimitKind

class Instance(_message.Message):
    __slots__ = ("instance_id", "incarnation", "role", "state", "engine", "engine_version", "url", "model", "tokenizer_path", "max_model_tokens", "kv_capacity_tokens", "block_tokens", "passport_json", "kv_bytes_per_token", "host_id", "max_sequences", "pool", "software_version", "engine_token", "orders_by_priority", "stages", "ranks", "replicas")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_PATH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PASSPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ORDERS_BY_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    incarnation: int
    role: InstanceRole
    state: InstanceState
    engine: str
    engine_version: str
    url: str
    model: str
    tokenizer_path: str
    max_model_tokens: int
    kv_capacity_tokens: int
    block_tokens: int
    passport_json: str
    kv_bytes_per_token: int
    host_id: str
    max_sequences: int
    pool: bool
    software_version: str
    engine_token: str
    orders_by_priority: bool
    stages: int
    ranks: int
    replicas: int
    def __init__(self, instance_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[InstanceRole, str]] = ..., state: _Optional[_Union[InstanceState, str]] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., url: _Optional[str] = ..., model: _Optional[str] = ..., tokenizer_path: _Optional[str] = ..., max_model_tokens: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., passport_json: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., host_id: _Optional[str] = ..., max_sequences: _Optional[int] = ..., pool: _Optional[bool] = ..., software_version: _Optional[str] = ..., engine_token: _Optional[str] = ..., orders_by_priority: _Optional[bool] = ..., stages: _Optional[int] = ..., ranks: _Optional[int] = ..., replicas: _Optional[int] = ...) -> None: ...

class InstanceLoad(_message.Message):
    __slots__ = ("waiting", "running", "kv_usage", "ttft_ms", "tbt_ms", "prompt_tokens_total", "output_tokens_total", "local_hit_tokens_total", "pool_hit_tokens_total")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_HIT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    POOL_HIT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    kv_usage: float
    ttft_ms: float
    tbt_ms: float
    prompt_tokens_total: int
    output_tokens_total: int
    local_hit_tokens_total: int
    pool_hit_tokens_total: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., kv_usage: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., tbt_ms: _Optional[float] = ..., prompt_tokens_total: _Optional[int] = ..., output_tokens_total: _Optional[int] = ..., local_hit_tokens_total: _Optional[int] = ..., pool_hit_tokens_total: _Optional[int] = ...) -> None: ...

class CacheChanges(_message.Message):
    __slots__ = ("full", "stored", "removed", "sequence")
    FULL_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    full: bool
    stored: bytes
    removed: bytes
    sequence: int
    def __init__(self, full: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., sequence: _Optional[int] = ...) -> None: ...

class RegisterInstanceRequest(_message.Message):
    __slots__ = ("instance", "worker_run", "drain", "role_pinned", "known_term")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    WORKER_RUN_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ROLE_PINNED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TERM_FIELD_NUMBER: _ClassVar[int]
    instance: Instance
    worker_run: int
    drain: bool
    role_pinned: bool
    known_term: int
    def __init__(self, instance: _Optional[_Union[Instance, _Mapping]] = ..., worker_run: _Optional[int] = ..., drain: _Optional[bool] = ..., role_pinned: _Optional[bool] = ..., known_term: _Optional[int] = ...) -> None: ...

class RegisterInstanceResponse(_message.Message):
    __slots__ = ("report_interval_ms", "lease_ms", "role", "role_pinned", "term")
    REPORT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_PINNED_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    report_interval_ms: int
    lease_ms: int
    role: InstanceRole
    role_pinned: bool
    term: int
    def __init__(self, report_interval_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., role: _Optional[_Union[InstanceRole, str]] = ..., role_pinned: _Optional[bool] = ..., term: _Optional[int] = ...) -> None: ...

class ReportInstanceRequest(_message.Message):
    __slots__ = ("instance_id", "incarnation", "state", "load", "changes", "reason", "ended_legs", "known_term")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENDED_LEGS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TERM_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    incarnation: int
    state: InstanceState
    load: InstanceLoad
    changes: CacheChanges
    reason: str
    ended_legs: _containers.RepeatedCompositeFieldContainer[EndedLeg]
    known_term: int
    def __init__(self, instance_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., state: _Optional[_Union[InstanceState, str]] = ..., load: _Optional[_Union[InstanceLoad, _Mapping]] = ..., changes: _Optional[_Union[CacheChanges, _Mapping]] = ..., reason: _Optional[str] = ..., ended_legs: _Optional[_Iterable[_Union[EndedLeg, _Mapping]]] = ..., known_term: _Optional[int] = ...) -> None: ...

class EndedLeg(_message.Message):
    __slots__ = ("decision_id", "cache")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    cache: CacheReport
    def __init__(self, decision_id: _Optional[str] = ..., cache: _Optional[_Union[CacheReport, _Mapping]] = ...) -> None: ...

class ReportInstanceResponse(_message.Message):
    __slots__ = ("role", "drain", "want_full", "role_pinned", "report_interval_ms", "term")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    WANT_FULL_FIELD_NUMBER: _ClassVar[int]
    ROLE_PINNED_FIELD_NUMBER: _ClassVar[int]
    REPORT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    role: InstanceRole
    drain: bool
    want_full: bool
    role_pinned: bool
    report_interval_ms: int
    term: int
    def __init__(self, role: _Optional[_Union[InstanceRole, str]] = ..., drain: _Optional[bool] = ..., want_full: _Optional[bool] = ..., role_pinned: _Optional[bool] = ..., report_interval_ms: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class ScheduleRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "model", "prompt_tokens", "keys", "content_keys", "max_output_tokens", "ttft_slo_ms", "tbt_slo_ms", "sequence_count", "exclude", "attempt", "no_prefill", "session", "priority", "passport_root", "pool_tenant", "known_term", "gateway_id", "offline", "gateway_run")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_KEYS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NO_PREFILL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PASSPORT_ROOT_FIELD_NUMBER: _ClassVar[int]
    POOL_TENANT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TERM_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    OFFLINE_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_RUN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    model: str
    prompt_tokens: int
    keys: bytes
    content_keys: bytes
    max_output_tokens: int
    ttft_slo_ms: int
    tbt_slo_ms: int
    sequence_count: int
    exclude: _containers.RepeatedScalarFieldContainer[str]
    attempt: int
    no_prefill: bool
    session: str
    priority: int
    passport_root: bytes
    pool_tenant: str
    known_term: int
    gateway_id: str
    offline: bool
    gateway_run: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., keys: _Optional[bytes] = ..., content_keys: _Optional[bytes] = ..., max_output_tokens: _Optional[int] = ..., ttft_slo_ms: _Optional[int] = ..., tbt_slo_ms: _Optional[int] = ..., sequence_count: _Optional[int] = ..., exclude: _Optional[_Iterable[str]] = ..., attempt: _Optional[int] = ..., no_prefill: _Optional[bool] = ..., session: _Optional[str] = ..., priority: _Optional[int] = ..., passport_root: _Optional[bytes] = ..., pool_tenant: _Optional[str] = ..., known_term: _Optional[int] = ..., gateway_id: _Optional[str] = ..., offline: _Optional[bool] = ..., gateway_run: _Optional[int] = ...) -> None: ...

class Leg(_message.Message):
    __slots__ = ("instance_id", "url", "wait_tokens", "wait_ms", "handover_ms", "expected_ms", "orders_by_priority")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    WAIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_MS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_MS_FIELD_NUMBER: _ClassVar[int]
    ORDERS_BY_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    url: str
    wait_tokens: int
    wait_ms: int
    handover_ms: int
    expected_ms: int
    orders_by_priority: bool
    def __init__(self, instance_id: _Optional[str] = ..., url: _Optional[str] = ..., wait_tokens: _Optional[int] = ..., wait_ms: _Optional[int] = ..., handover_ms: _Optional[int] = ..., expected_ms: _Optional[int] = ..., orders_by_priority: _Optional[bool] = ...) -> None: ...

class ScheduleResponse(_message.Message):
    __slots__ = ("decision_id", "admitted", "retry_after_ms", "reason", "message", "prefill", "decode", "local_hit_tokens", "pool_hit_tokens", "expected_ttft_ms", "summary", "store_node", "shard_blocks", "term")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    STORE_NODE_FIELD_NUMBER: _ClassVar[int]
    SHARD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    admitted: bool
    retry_after_ms: int
    reason: AdmissionReason
    message: str
    prefill: Leg
    decode: Leg
    local_hit_tokens: int
    pool_hit_tokens: int
    expected_ttft_ms: int
    summary: str
    store_node: str
    shard_blocks: int
    term: int
    def __init__(self, decision_id: _Optional[str] = ..., admitted: _Optional[bool] = ..., retry_after_ms: _Optional[int] = ..., reason: _Optional[_Union[AdmissionReason, str]] = ..., message: _Optional[str] = ..., prefill: _Optional[_Union[Leg, _Mapping]] = ..., decode: _Optional[_Union[Leg, _Mapping]] = ..., local_hit_tokens: _Optional[int] = ..., pool_hit_tokens: _Optional[int] = ..., expected_ttft_ms: _Optional[int] = ..., summary: _Optional[str] = ..., store_node: _Optional[str] = ..., shard_blocks: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class CacheReport(_message.Message):
    __slots__ = ("asked_tokens", "hit_tokens", "local_tokens", "loaded_tokens", "loaded_bytes", "waited_ms", "load_ms", "failed_blocks", "saved_blocks", "held_tokens", "outcome", "hidden_ms", "reason", "staged_bytes", "loaded_from")
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    FAILED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STAGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_FROM_FIELD_NUMBER: _ClassVar[int]
    asked_tokens: int
    hit_tokens: int
    local_tokens: int
    loaded_tokens: int
    loaded_bytes: int
    waited_ms: float
    load_ms: float
    failed_blocks: int
    saved_blocks: int
    held_tokens: int
    outcome: CacheOutcome
    hidden_ms: float
    reason: str
    staged_bytes: int
    loaded_from: _containers.RepeatedCompositeFieldContainer[LoadedFrom]
    def __init__(self, asked_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., local_tokens: _Optional[int] = ..., loaded_tokens: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., waited_ms: _Optional[float] = ..., load_ms: _Optional[float] = ..., failed_blocks: _Optional[int] = ..., saved_blocks: _Optional[int] = ..., held_tokens: _Optional[int] = ..., outcome: _Optional[_Union[CacheOutcome, str]] = ..., hidden_ms: _Optional[float] = ..., reason: _Optional[str] = ..., staged_bytes: _Optional[int] = ..., loaded_from: _Optional[_Iterable[_Union[LoadedFrom, _Mapping]]] = ...) -> None: ...

class LoadedFrom(_message.Message):
    __slots__ = ("store_node", "tier", "blocks")
    STORE_NODE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    store_node: str
    tier: str
    blocks: int
    def __init__(self, store_node: _Optional[str] = ..., tier: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class TokenUsage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class LegReport(_message.Message):
    __slots__ = ("role", "instance_id", "sent_ms", "ended_ms", "code", "usage", "cache")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SENT_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    role: LegRole
    instance_id: str
    sent_ms: float
    ended_ms: float
    code: str
    usage: TokenUsage
    cache: CacheReport
    def __init__(self, role: _Optional[_Union[LegRole, str]] = ..., instance_id: _Optional[str] = ..., sent_ms: _Optional[float] = ..., ended_ms: _Optional[float] = ..., code: _Optional[str] = ..., usage: _Optional[_Union[TokenUsage, _Mapping]] = ..., cache: _Optional[_Union[CacheReport, _Mapping]] = ...) -> None: ...

class ReportProgressRequest(_message.Message):
    __slots__ = ("decision_id", "phase", "elapsed_ms", "output_tokens", "more", "legs", "answer_is_whole", "code", "cached_tokens", "prefill_may_follow", "shard_keys", "known_term", "sequence", "waited_ms")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MAY_FOLLOW_FIELD_NUMBER: _ClassVar[int]
    SHARD_KEYS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TERM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    phase: RequestPhase
    elapsed_ms: float
    output_tokens: int
    more: _containers.RepeatedCompositeFieldContainer[ReportProgressRequest]
    legs: _containers.RepeatedCompositeFieldContainer[LegReport]
    answer_is_whole: bool
    code: str
    cached_tokens: int
    prefill_may_follow: bool
    shard_keys: bytes
    known_term: int
    sequence: int
    waited_ms: int
    def __init__(self, decision_id: _Optional[str] = ..., phase: _Optional[_Union[RequestPhase, str]] = ..., elapsed_ms: _Optional[float] = ..., output_tokens: _Optional[int] = ..., more: _Optional[_Iterable[_Union[ReportProgressRequest, _Mapping]]] = ..., legs: _Optional[_Iterable[_Union[LegReport, _Mapping]]] = ..., answer_is_whole: _Optional[bool] = ..., code: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., prefill_may_follow: _Optional[bool] = ..., shard_keys: _Optional[bytes] = ..., known_term: _Optional[int] = ..., sequence: _Optional[int] = ..., waited_ms: _Optional[int] = ...) -> None: ...

class ReportProgressResponse(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    def __init__(self, term: _Optional[int] = ...) -> None: ...

class GetDecisionRequest(_message.Message):
    __slots__ = ("id", "policy")
    ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    id: str
    policy: str
    def __init__(self, id: _Optional[str] = ..., policy: _Optional[str] = ...) -> None: ...

class GetDecisionResponse(_message.Message):
    __slots__ = ("record_json",)
    RECORD_JSON_FIELD_NUMBER: _ClassVar[int]
    record_json: str
    def __init__(self, record_json: _Optional[str] = ...) -> None: ...

class ListDecisionsRequest(_message.Message):
    __slots__ = ("before", "count")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    before: str
    count: int
    def __init__(self, before: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ListDecisionsResponse(_message.Message):
    __slots__ = ("records_json", "kept_max")
    RECORDS_JSON_FIELD_NUMBER: _ClassVar[int]
    KEPT_MAX_FIELD_NUMBER: _ClassVar[int]
    records_json: _containers.RepeatedScalarFieldContainer[str]
    kept_max: int
    def __init__(self, records_json: _Optional[_Iterable[str]] = ..., kept_max: _Optional[int] = ...) -> None: ...

class ListInstancesRequest(_message.Message):
    __slots__ = ("known_version", "wait_ms", "known_run", "passports_apart", "gateway", "known_term", "known_gateways")
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_RUN_FIELD_NUMBER: _ClassVar[int]
    PASSPORTS_APART_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TERM_FIELD_NUMBER: _ClassVar[int]
    KNOWN_GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    known_version: int
    wait_ms: int
    known_run: int
    passports_apart: bool
    gateway: Gateway
    known_term: int
    known_gateways: int
    def __init__(self, known_version: _Optional[int] = ..., wait_ms: _Optional[int] = ..., known_run: _Optional[int] = ..., passports_apart: _Optional[bool] = ..., gateway: _Optional[_Union[Gateway, _Mapping]] = ..., known_term: _Optional[int] = ..., known_gateways: _Optional[int] = ...) -> None: ...

class Gateway(_message.Message):
    __slots__ = ("gateway_id", "url", "software_version", "draining")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    url: str
    software_version: str
    draining: bool
    def __init__(self, gateway_id: _Optional[str] = ..., url: _Optional[str] = ..., software_version: _Optional[str] = ..., draining: _Optional[bool] = ...) -> None: ...

class GatewayView(_message.Message):
    __slots__ = ("gateway", "heard_age_ms")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    HEARD_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    gateway: Gateway
    heard_age_ms: int
    def __init__(self, gateway: _Optional[_Union[Gateway, _Mapping]] = ..., heard_age_ms: _Optional[int] = ...) -> None: ...

class InstanceView(_message.Message):
    __slots__ = ("instance", "load", "assigned", "cached_blocks", "report_age_ms", "reason", "apart", "passport")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    PASSPORT_FIELD_NUMBER: _ClassVar[int]
    instance: Instance
    load: InstanceLoad
    assigned: int
    cached_blocks: int
    report_age_ms: int
    reason: str
    apart: str
    passport: int
    def __init__(self, instance: _Optional[_Union[Instance, _Mapping]] = ..., load: _Optional[_Union[InstanceLoad, _Mapping]] = ..., assigned: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., report_age_ms: _Optional[int] = ..., reason: _Optional[str] = ..., apart: _Optional[str] = ..., passport: _Optional[int] = ...) -> None: ...

class ListInstancesResponse(_message.Message):
    __slots__ = ("version", "instances", "delta", "gone", "passports", "run", "term", "gateway_count")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    PASSPORTS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_COUNT_FIELD_NUMBER: _ClassVar[int]
    version: int
    instances: _containers.RepeatedCompositeFieldContainer[InstanceView]
    delta: bool
    gone: _containers.RepeatedScalarFieldContainer[str]
    passports: _containers.RepeatedScalarFieldContainer[str]
    run: int
    term: int
    gateway_count: int
    def __init__(self, version: _Optional[int] = ..., instances: _Optional[_Iterable[_Union[InstanceView, _Mapping]]] = ..., delta: _Optional[bool] = ..., gone: _Optional[_Iterable[str]] = ..., passports: _Optional[_Iterable[str]] = ..., run: _Optional[int] = ..., term: _Optional[int] = ..., gateway_count: _Optional[int] = ...) -> None: ...

class SetInstanceRequest(_message.Message):
    __slots__ = ("instance_id", "role", "drain")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: InstanceRole
    drain: bool
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[_Union[InstanceRole, str]] = ..., drain: _Optional[bool] = ...) -> None: ...

class SetInstanceResponse(_message.Message):
    __slots__ = ("instance",)
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    instance: Instance
    def __init__(self, instance: _Optional[_Union[Instance, _Mapping]] = ...) -> None: ...

class FindBlocksRequest(_message.Message):
    __slots__ = ("keys", "store_node", "pool_tenant")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    STORE_NODE_FIELD_NUMBER: _ClassVar[int]
    POOL_TENANT_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    store_node: str
    pool_tenant: str
    def __init__(self, keys: _Optional[bytes] = ..., store_node: _Optional[str] = ..., pool_tenant: _Optional[str] = ...) -> None: ...

class FindBlocksResponse(_message.Message):
    __slots__ = ("known", "leading_blocks")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    LEADING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    known: bool
    leading_blocks: int
    def __init__(self, known: _Optional[bool] = ..., leading_blocks: _Optional[int] = ...) -> None: ...

class GetConductorStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConductorStatusResponse(_message.Message):
    __slots__ = ("software_version", "uptime_ms", "policy", "admission", "rebalance_roles", "replicate_bytes_per_s", "pool_connected", "active_request_count", "decisions", "roles", "role_switches", "copied_prefix_count", "trimmed_prefix_count", "trimmed_block_count", "copied_segment_count", "gateways", "conductors")
    class DecisionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RolesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RoleSwitchesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    REBALANCE_ROLES_FIELD_NUMBER: _ClassVar[int]
    REPLICATE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    POOL_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    ROLE_SWITCHES_FIELD_NUMBER: _ClassVar[int]
    COPIED_PREFIX_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_PREFIX_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    COPIED_SEGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    CONDUCTORS_FIELD_NUMBER: _ClassVar[int]
    software_version: str
    uptime_ms: int
    policy: str
    admission: bool
    rebalance_roles: bool
    replicate_bytes_per_s: int
    pool_connected: bool
    active_request_count: int
    decisions: _containers.ScalarMap[str, int]
    roles: _containers.ScalarMap[str, int]
    role_switches: _containers.ScalarMap[str, int]
    copied_prefix_count: int
    trimmed_prefix_count: int
    trimmed_block_count: int
    copied_segment_count: int
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayView]
    conductors: _containers.RepeatedCompositeFieldContainer[ConductorView]
    def __init__(self, software_version: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., policy: _Optional[str] = ..., admission: _Optional[bool] = ..., rebalance_roles: _Optional[bool] = ..., replicate_bytes_per_s: _Optional[int] = ..., pool_connected: _Optional[bool] = ..., active_request_count: _Optional[int] = ..., decisions: _Optional[_Mapping[str, int]] = ..., roles: _Optional[_Mapping[str, int]] = ..., role_switches: _Optional[_Mapping[str, int]] = ..., copied_prefix_count: _Optional[int] = ..., trimmed_prefix_count: _Optional[int] = ..., trimmed_block_count: _Optional[int] = ..., copied_segment_count: _Optional[int] = ..., gateways: _Optional[_Iterable[_Union[GatewayView, _Mapping]]] = ..., conductors: _Optional[_Iterable[_Union[ConductorView, _Mapping]]] = ...) -> None: ...

class ConductorView(_message.Message):
    __slots__ = ("target", "role", "term", "self", "behind_ms")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SELF_FIELD_NUMBER: _ClassVar[int]
    BEHIND_MS_FIELD_NUMBER: _ClassVar[int]
    target: str
    role: ConductorRole
    term: int
    self: bool
    behind_ms: int
    def __init__(self_, target: _Optional[str] = ..., role: _Optional[_Union[ConductorRole, str]] = ..., term: _Optional[int] = ..., self: _Optional[bool] = ..., behind_ms: _Optional[int] = ...) -> None: ...

class WatchLeadershipRequest(_message.Message):
    __slots__ = ("known_term", "known_leading", "wait_ms")
    KNOWN_TERM_FIELD_NUMBER: _ClassVar[int]
    KNOWN_LEADING_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    known_term: int
    known_leading: bool
    wait_ms: int
    def __init__(self, known_term: _Optional[int] = ..., known_leading: _Optional[bool] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class WatchLeadershipResponse(_message.Message):
    __slots__ = ("term", "leading")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEADING_FIELD_NUMBER: _ClassVar[int]
    term: int
    leading: bool
    def __init__(self, term: _Optional[int] = ..., leading: _Optional[bool] = ...) -> None: ...

class FollowConductorRequest(_message.Message):
    __slots__ = ("run", "known_term", "probe", "known_run", "cursor", "wait_ms", "want_full")
    RUN_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TERM_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_RUN_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    WANT_FULL_FIELD_NUMBER: _ClassVar[int]
    run: int
    known_term: int
    probe: bool
    known_run: int
    cursor: int
    wait_ms: int
    want_full: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[int] = ..., known_term: _Optional[int] = ..., probe: _Optional[bool] = ..., known_run: _Optional[int] = ..., cursor: _Optional[int] = ..., wait_ms: _Optional[int] = ..., want_full: _Optional[_Iterable[str]] = ...) -> None: ...

class FollowConductorResponse(_message.Message):
    __slots__ = ("run", "term", "role", "anew", "entries", "cursor", "more")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    run: int
    term: int
    role: ConductorRole
    anew: bool
    entries: _containers.RepeatedCompositeFieldContainer[JournalEntry]
    cursor: int
    more: bool
    def __init__(self, run: _Optional[int] = ..., term: _Optional[int] = ..., role: _Optional[_Union[ConductorRole, str]] = ..., anew: _Optional[bool] = ..., entries: _Optional[_Iterable[_Union[JournalEntry, _Mapping]]] = ..., cursor: _Optional[int] = ..., more: _Optional[bool] = ...) -> None: ...

class JournalEntry(_message.Message):
    __slots__ = ("age_ms", "registered", "reported", "decided", "progress", "wish", "copied", "explained", "gateway", "lost_decision_id", "member", "named")
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WISH_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    EXPLAINED_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    LOST_DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    age_ms: int
    registered: RegisterInstanceRequest
    reported: ReportInstanceRequest
    decided: DecidedRequest
    progress: ReportProgressRequest
    wish: InstanceWish
    copied: CopiedPrefix
    explained: ExplainedDecision
    gateway: Gateway
    lost_decision_id: str
    member: AnnounceMemberRequest
    named: ResumeRequestsRequest
    def __init__(self, age_ms: _Optional[int] = ..., registered: _Optional[_Union[RegisterInstanceRequest, _Mapping]] = ..., reported: _Optional[_Union[ReportInstanceRequest, _Mapping]] = ..., decided: _Optional[_Union[DecidedRequest, _Mapping]] = ..., progress: _Optional[_Union[ReportProgressRequest, _Mapping]] = ..., wish: _Optional[_Union[InstanceWish, _Mapping]] = ..., copied: _Optional[_Union[CopiedPrefix, _Mapping]] = ..., explained: _Optional[_Union[ExplainedDecision, _Mapping]] = ..., gateway: _Optional[_Union[Gateway, _Mapping]] = ..., lost_decision_id: _Optional[str] = ..., member: _Optional[_Union[AnnounceMemberRequest, _Mapping]] = ..., named: _Optional[_Union[ResumeRequestsRequest, _Mapping]] = ...) -> None: ...

class DecidedRequest(_message.Message):
    __slots__ = ("request", "plan", "pool_blocks", "record_head", "branch", "prefix_tokens", "fetch_tokens", "awaited_decision_id", "ttft_s", "queue_s", "ready_s", "compute_s", "handover_s", "wait_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RECORD_HEAD_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    READY_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    request: ScheduleRequest
    plan: ScheduleResponse
    pool_blocks: int
    record_head: bytes
    branch: str
    prefix_tokens: int
    fetch_tokens: int
    awaited_decision_id: str
    ttft_s: float
    queue_s: float
    ready_s: float
    compute_s: float
    handover_s: float
    wait_s: float
    def __init__(self, request: _Optional[_Union[ScheduleRequest, _Mapping]] = ..., plan: _Optional[_Union[ScheduleResponse, _Mapping]] = ..., pool_blocks: _Optional[int] = ..., record_head: _Optional[bytes] = ..., branch: _Optional[str] = ..., prefix_tokens: _Optional[int] = ..., fetch_tokens: _Optional[int] = ..., awaited_decision_id: _Optional[str] = ..., ttft_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., ready_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., handover_s: _Optional[float] = ..., wait_s: _Optional[float] = ...) -> None: ...

class InstanceWish(_message.Message):
    __slots__ = ("request", "pinned")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    request: SetInstanceRequest
    pinned: bool
    def __init__(self, request: _Optional[_Union[SetInstanceRequest, _Mapping]] = ..., pinned: _Optional[bool] = ...) -> None: ...

class CopiedPrefix(_message.Message):
    __slots__ = ("keys", "blocks", "model", "copies", "pool_tenant")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    POOL_TENANT_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    blocks: int
    model: str
    copies: int
    pool_tenant: str
    def __init__(self, keys: _Optional[bytes] = ..., blocks: _Optional[int] = ..., model: _Optional[str] = ..., copies: _Optional[int] = ..., pool_tenant: _Optional[str] = ...) -> None: ...

class ExplainedDecision(_message.Message):
    __slots__ = ("decision_id", "candidates", "misses")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    candidates: bytes
    misses: _containers.RepeatedCompositeFieldContainer[ExplainedMiss]
    def __init__(self, decision_id: _Optional[str] = ..., candidates: _Optional[bytes] = ..., misses: _Optional[_Iterable[_Union[ExplainedMiss, _Mapping]]] = ...) -> None: ...

class ExplainedMiss(_message.Message):
    __slots__ = ("from_token", "to_token", "reason")
    FROM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TO_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    from_token: int
    to_token: int
    reason: str
    def __init__(self, from_token: _Optional[int] = ..., to_token: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("request", "plan", "age_ms", "reports")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    request: ScheduleRequest
    plan: ScheduleResponse
    age_ms: int
    reports: _containers.RepeatedCompositeFieldContainer[ReportProgressRequest]
    def __init__(self, request: _Optional[_Union[ScheduleRequest, _Mapping]] = ..., plan: _Optional[_Union[ScheduleResponse, _Mapping]] = ..., age_ms: _Optional[int] = ..., reports: _Optional[_Iterable[_Union[ReportProgressRequest, _Mapping]]] = ...) -> None: ...

class ResumeRequestsRequest(_message.Message):
    __slots__ = ("known_term", "gateway", "requests", "open_decision_ids", "last", "gateway_run")
    KNOWN_TERM_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_DECISION_IDS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_RUN_FIELD_NUMBER: _ClassVar[int]
    known_term: int
    gateway: Gateway
    requests: _containers.RepeatedCompositeFieldContainer[OpenRequest]
    open_decision_ids: _containers.RepeatedScalarFieldContainer[str]
    last: bool
    gateway_run: int
    def __init__(self, known_term: _Optional[int] = ..., gateway: _Optional[_Union[Gateway, _Mapping]] = ..., requests: _Optional[_Iterable[_Union[OpenRequest, _Mapping]]] = ..., open_decision_ids: _Optional[_Iterable[str]] = ..., last: _Optional[bool] = ..., gateway_run: _Optional[int] = ...) -> None: ...

class ResumeRequestsResponse(_message.Message):
    __slots__ = ("term", "resumed_count", "closed_count")
    TERM_FIELD_NUMBER: _ClassVar[int]
    RESUMED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    term: int
    resumed_count: int
    closed_count: int
    def __init__(self, term: _Optional[int] = ..., resumed_count: _Optional[int] = ..., closed_count: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("kind", "name", "host_id", "host_name", "address", "software_version", "started_ms", "state", "reason", "clock_offset_ms", "clock_bound_ms", "pid")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_MS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_BOUND_MS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    kind: MemberKind
    name: str
    host_id: str
    host_name: str
    address: str
    software_version: str
    started_ms: int
    state: str
    reason: str
    clock_offset_ms: int
    clock_bound_ms: int
    pid: int
    def __init__(self, kind: _Optional[_Union[MemberKind, str]] = ..., name: _Optional[str] = ..., host_id: _Optional[str] = ..., host_name: _Optional[str] = ..., address: _Optional[str] = ..., software_version: _Optional[str] = ..., started_ms: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., clock_offset_ms: _Optional[int] = ..., clock_bound_ms: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class AnnounceMemberRequest(_message.Message):
    __slots__ = ("member", "leaving", "known_term")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TERM_FIELD_NUMBER: _ClassVar[int]
    member: Member
    leaving: bool
    known_term: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., leaving: _Optional[bool] = ..., known_term: _Optional[int] = ...) -> None: ...

class AnnounceMemberResponse(_message.Message):
    __slots__ = ("interval_ms", "wall_ms", "term")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    WALL_MS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    wall_ms: int
    term: int
    def __init__(self, interval_ms: _Optional[int] = ..., wall_ms: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class ListMembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberView(_message.Message):
    __slots__ = ("member", "presence", "heard_age_ms")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    HEARD_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    member: Member
    presence: MemberPresence
    heard_age_ms: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., presence: _Optional[_Union[MemberPresence, str]] = ..., heard_age_ms: _Optional[int] = ...) -> None: ...

class ListMembersResponse(_message.Message):
    __slots__ = ("members", "wall_ms", "role", "pool_reason")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    WALL_MS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POOL_REASON_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberView]
    wall_ms: int
    role: ConductorRole
    pool_reason: str
    def __init__(self, members: _Optional[_Iterable[_Union[MemberView, _Mapping]]] = ..., wall_ms: _Optional[int] = ..., role: _Optional[_Union[ConductorRole, str]] = ..., pool_reason: _Optional[str] = ...) -> None: ...

class LimitUse(_message.Message):
    __slots__ = ("tenant", "kind", "limit", "slice", "used", "used_before", "wanted", "left", "key_id", "month", "ledger", "spent", "spent_all")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    USED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    MONTH_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    SPENT_ALL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    kind: LimitKind
    limit: float
    slice: float
    used: float
    used_before: float
    wanted: float
    left: float
    key_id: str
    month: int
    ledger: str
    spent: float
    spent_all: float
    def __init__(self, tenant: _Optional[str] = ..., kind: _Optional[_Union[LimitKind, str]] = ..., limit: _Optional[float] = ..., slice: _Optional[float] = ..., used: _Optional[float] = ..., used_before: _Optional[float] = ..., wanted: _Optional[float] = ..., left: _Optional[float] = ..., key_id: _Optional[str] = ..., month: _Optional[int] = ..., ledger: _Optional[str] = ..., spent: _Optional[float] = ..., spent_all: _Optional[float] = ...) -> None: ...

class LeaseLimitsRequest(_message.Message):
    __slots__ = ("gateway_id", "gateway_run", "sequence", "uses", "whole", "known_term")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_RUN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TERM_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    gateway_run: int
    sequence: int
    uses: _containers.RepeatedCompositeFieldContainer[LimitUse]
    whole: bool
    known_term: int
    def __init__(self, gateway_id: _Optional[str] = ..., gateway_run: _Optional[int] = ..., sequence: _Optional[int] = ..., uses: _Optional[_Iterable[_Union[LimitUse, _Mapping]]] = ..., whole: _Optional[bool] = ..., known_term: _Optional[int] = ...) -> None: ...

class LimitLease(_message.Message):
    __slots__ = ("slice", "left", "spent_all", "spent_own")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    SPENT_ALL_FIELD_NUMBER: _ClassVar[int]
    SPENT_OWN_FIELD_NUMBER: _ClassVar[int]
    slice: float
    left: float
    spent_all: float
    spent_own: float
    def __init__(self, slice: _Optional[float] = ..., left: _Optional[float] = ..., spent_all: _Optional[float] = ..., spent_own: _Optional[float] = ...) -> None: ...

class LeaseLimitsResponse(_message.Message):
    __slots__ = ("leases", "lease_ms", "run", "gateway_count", "term")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_COUNT_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LimitLease]
    lease_ms: int
    run: int
    gateway_count: int
    term: int
    def __init__(self, leases: _Optional[_Iterable[_Union[LimitLease, _Mapping]]] = ..., lease_ms: _Optional[int] = ..., run: _Optional[int] = ..., gateway_count: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class ListHotPrefixesRequest(_message.Message):
    __slots__ = ("count", "name")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    count: int
    name: int
    def __init__(self, count: _Optional[int] = ..., name: _Optional[int] = ...) -> None: ...

class HotPrefix(_message.Message):
    __slots__ = ("name", "parent", "model", "pool_tenant", "first_block", "block_count", "tokens", "reads", "copies", "hosts", "keys")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POOL_TENANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    name: int
    parent: int
    model: str
    pool_tenant: str
    first_block: int
    block_count: int
    tokens: int
    reads: float
    copies: int
    hosts: _containers.RepeatedScalarFieldContainer[str]
    keys: bytes
    def __init__(self, name: _Optional[int] = ..., parent: _Optional[int] = ..., model: _Optional[str] = ..., pool_tenant: _Optional[str] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., tokens: _Optional[int] = ..., reads: _Optional[float] = ..., copies: _Optional[int] = ..., hosts: _Optional[_Iterable[str]] = ..., keys: _Optional[bytes] = ...) -> None: ...

class ListHotPrefixesResponse(_message.Message):
    __slots__ = ("prefixes", "counted")
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[HotPrefix]
    counted: bool
    def __init__(self, prefixes: _Optional[_Iterable[_Union[HotPrefix, _Mapping]]] = ..., counted: _Optional[bool] = ...) -> None: ...

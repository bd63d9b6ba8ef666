"""Structured logs: JSON lines with stable event codes, a readable console when a person watches.

Every line has `event` (a code of the catalogue below, never a sentence), `level`, `timestamp`, `service` and,
inside a call, `request_id`. Dashboards and alerts may rely on the codes: they are only ever added to.
Anything that looks like a token is blotted out by a processor that runs last before rendering, whatever field
it is in.
"""

from __future__ import annotations

import atexit
import enum
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from functools import cache
from typing import Any, Final, Literal, TextIO, cast

from mooncache.runtime.log_limit import LineLimit
from mooncache.runtime.plain_structlog import structlog

LogFormat = Literal["auto", "json", "console"]


class Event(enum.StrEnum):
    """Catalogue of event codes. Each value is what stands in a log line; the comment says when it is written."""

    LOG_LINES_LEFT_OUT = "log.lines_left_out"  # `lines` info lines of the event `of` were over the limit
    SERVICE_STARTING = "service.starting"  # configuration is read, nothing listens yet
    SERVICE_READY = "service.ready"  # all ports listen
    SERVICE_DRAINING = "service.draining"  # the process was asked to stop, by a signal or a call
    SERVICE_STOPPED = "service.stopped"  # everything is closed
    SERVICE_MANAGER_ABSENT = "service.manager_absent"  # systemd does not take what the process says
    SERVICE_FAILED = "service.failed"  # the process ends because of an error
    RPC_FINISHED = "rpc.finished"  # one control call is over; `code` says how
    RPC_DEFECT = "rpc.defect"  # a call failed with an unexpected exception
    DUTY_FAILED = "duty.failed"  # a background duty raised; it is tried again after a pause
    DUTY_RECOVERED = "duty.recovered"  # a background duty works again
    AUTH_TOKEN_CREATED = "auth.token_created"  # noqa: S105  a cluster token was generated
    AUTH_TOKENS_CHANGED = "auth.tokens_changed"  # the token file was replaced: fingerprints of what `signs`
    AUTH_TOKENS_REFUSED = "auth.tokens_refused"  # it is wrong or gone; the tokens of before stay valid
    CONFIG_RELOADED = "config.reloaded"  # settings were read again; `changed`, and what `needs_restart`
    CONFIG_REFUSED = "config.refused"  # settings were read again and are wrong; the former ones stay in force
    TLS_RELOADED = "tls.reloaded"  # certificate files were replaced; new connections get the new certificate
    TLS_ENABLED = "tls.enabled"  # ports speak TLS
    TRACING_ENABLED = "tracing.enabled"  # spans are recorded and sent to `endpoint`
    TRACING_UNAVAILABLE = "tracing.unavailable"  # tracing.endpoint is set, the extra otel is not installed
    BIND_PUBLIC = "bind.public"  # a port listens beyond loopback
    ELECTION_CAMPAIGN = "election.campaign"  # a master starts a campaign for leadership
    ELECTION_WON = "election.won"  # this master leads; `term` is its fencing number
    ELECTION_LOST = "election.lost"  # this master no longer leads
    ELECTION_LEADER_CHANGED = "election.leader_changed"  # another master leads
    COORDINATION_UNREACHABLE = "coordination.unreachable"  # the coordination backend does not answer
    COORDINATION_RECOVERED = "coordination.recovered"  # the coordination backend answers again
    MASTER_TERM_OLDER = "master.term_older"  # a master leads under an older term and is ignored
    NODE_TENANTS_SET = "node.tenants_set"  # limits of tenants came into force; `version`, `tenants`
    NODE_TENANTS_NOT_READ = "node.tenants_not_read"  # the file of tenants is wrong; `reason` says why
    NODE_TENANTS_NOT_KEPT = "node.tenants_not_kept"  # limits are in force, but not in the node's file
    NODE_KEYS_SET = "node.keys_set"  # keys of a tenant came into force; `tenant`, `key_ids`
    NODE_KEYS_REFUSED = "node.keys_refused"  # a tenant's blocks go to no disk; `reason` says why
    NODE_TENANT_PURGED = "node.tenant_purged"  # a tenant's blocks were overwritten; `blocks`, `disk_blocks`
    NODE_WRITERS_RECALLED = "node.writers_recalled"  # what writers wrote was removed; `blocks`, `code`
    NODE_QUARANTINE_CHANGED = "node.quarantine_changed"  # whose blocks are refused; `writers`
    NODE_QUARANTINE_NOT_KEPT = "node.quarantine_not_kept"  # its file was not read or written; `reason`
    NODE_WRITERS_NOT_KEPT = "node.writers_not_kept"  # writers' names were not read or written; `reason`
    NODE_MAP_REFUSED = "node.map_refused"  # a cluster map that the data plane cannot carry; `reason`
    NODE_REGISTERED = "node.registered"  # a store node registered with the master
    NODE_STATE_CHANGED = "node.state_changed"  # the master moved a node to another state
    NODE_DATA_PLANE = "node.data_plane"  # an event of the native server; `what` names it
    NODE_ARENA = "node.arena"  # the memory of a node's arena; `note` says why without huge pages
    NODE_ARENA_FILLS = "node.arena_fills"  # a node touches the whole arena before it serves
    NODE_ARENA_READY = "node.arena_ready"  # the whole arena has memory
    NODE_DATA_PORT_OPEN = "node.data_port_open"  # a node serves blocks; `phases_s` has the steps to it
    NODE_MEMORY_ADOPTED = "node.memory_adopted"  # blocks of a former process are served again
    NODE_MEMORY_COLD = "node.memory_cold"  # a node that keeps its memory starts empty; `reason` says why
    NODE_MEMORY_KEPT = "node.memory_kept"  # a holder keeps the memory for the next start of the node
    NODE_MEMORY_NOT_KEPT = "node.memory_not_kept"  # no holder keeps the memory: the next start is empty
    NODE_MEMORY_CHECKED = "node.memory_checked"  # all adopted blocks were compared with their checksums
    NODE_OBJECT_STORE_FAILS = "node.object_store_fails"  # a call on it failed, after some that did not
    NODE_OBJECT_STORE_ANSWERS = "node.object_store_answers"  # a call succeeded again
    NODE_MASTER_LOST = "node.master_lost"  # a node cannot reach a leading master
    REPORT_FULL_STARTED = "report.full_started"  # a node sends all its blocks
    REPORT_FULL_FINISHED = "report.full_finished"  # the directory has all blocks of a node
    REPORT_GAP = "report.gap"  # a report of a node shows a gap; a full one is requested
    TASK_STARTED = "task.started"  # a replication or drain task began
    TASK_FINISHED = "task.finished"  # a task is over; `code` says how
    REPAIR_WAITING = "repair.waiting"  # copies are missing; lost nodes have `wait_s` to come back
    REPAIR_STARTED = "repair.started"  # missing copies are made
    REPAIR_BLOCKED = "repair.blocked"  # copies are missing and cannot be made now; `code` says why
    REPAIR_FINISHED = "repair.finished"  # every block has its copies
    REBALANCE_STARTED = "rebalance.started"  # blocks move from the fullest nodes to the emptiest
    REBALANCE_FINISHED = "rebalance.finished"  # nodes are evenly full, or nothing more can move
    BLOCKS_WRONG = "blocks.wrong"  # an engine computed other blocks than the pool held; `writer`, `keys`
    WRITER_QUARANTINED = "writer.quarantined"  # its blocks are removed and refused; `verifiers`, `reason`
    WRITER_RELEASED = "writer.released"  # an operator lifted a quarantine; `writer`
    DRAIN_STARTED = "drain.started"  # a node starts to drain
    DRAIN_FINISHED = "drain.finished"  # a node is drained
    WORKER_ENGINE_STARTED = "worker.engine_started"  # a worker started its engine
    WORKER_ENGINE_READY = "worker.engine_ready"  # the engine is healthy
    WORKER_ENGINE_ENDED = "worker.engine_ended"  # the engine ended or was killed; `log_tail`: its last output
    WORKER_ENGINE_LOST = "worker.engine_lost"  # an attached engine does not answer
    WORKER_GAVE_UP = "worker.gave_up"  # the engine failed too often; the worker ends
    WORKER_PASSPORT_CHANGED = "worker.passport_changed"  # new weights or a reset: block keys change
    WORKER_PASSPORT_MISSING = "worker.passport_missing"  # a healthy engine reported no usable passport
    WORKER_LEG_REPORTS_OFF = "worker.leg_reports_off"  # no socket for reports of ended legs (yet)
    WORKER_REGISTERED = "worker.registered"  # a worker registered its instance with the conductor
    WORKER_CONDUCTOR_LOST = "worker.conductor_lost"  # the conductor is unreachable; the engine continues
    WORKER_CONDUCTOR_FOUND = "worker.conductor_found"  # reports reach the conductor again
    WORKER_NAME_TAKEN = "worker.name_taken"  # another worker serves this name; this one gets no requests
    WORKER_ROLE_SWITCHED = "worker.role_switched"  # the conductor changed the instance's role
    WORKER_DRAINING = "worker.draining"  # the instance takes no new requests and finishes the running ones
    WORKER_DRAIN_ENDED = "worker.drain_ended"  # the instance takes requests again
    WORKER_EVENTS_LOST = "worker.events_lost"  # cache events were missed and could not be replayed
    WORKER_EVENTS_OFF = "worker.events_off"  # the engine publishes no cache events; `reason` says why
    WORKER_EVENTS_INVALID = "worker.events_invalid"  # cache events could not be parsed
    INSTANCE_REGISTERED = "instance.registered"  # an engine registered with the conductor
    INSTANCE_STATE_CHANGED = "instance.state_changed"  # an engine's state changed, as the conductor sees it
    INSTANCE_APART = "instance.apart"  # engines of one model have different passports and share no blocks
    INSTANCE_FORGOTTEN = "instance.forgotten"  # an engine was silent for longer than its lease
    INSTANCE_SET = "instance.set"  # an operator changed the role of an engine, or drains it
    INSTANCE_REBALANCED = "instance.rebalanced"  # an instance's role followed the load; see `needs_*`
    PREFIX_REPLICATED = "prefix.replicated"  # a hot prefix gets more copies in the pool
    SPARES_RELEASED = "spares.released"  # this node dropped copies that were not read for a while
    SPARES_KEPT = "spares.kept"  # spare copies stay: the master did not answer, or refused
    PREFIX_TRIMMED = "prefix.trimmed"  # a prefix with fewer readers lost copies in the pool
    PREFIX_NOT_REPLICATED = "prefix.not_replicated"  # the master refused to change copies; retried later
    CACHE_REPORT_GAP = "cache.report_gap"  # a cache report shows a gap; a full one is requested
    POOL_CONNECTED = "pool.connected"  # the conductor is connected to the pool
    POOL_ABSENT = "pool.absent"  # the conductor cannot reach the pool and keeps trying
    REQUEST_REFUSED = "request.refused"  # admission refused a request; `reason` says why
    CLIENT_RDMA_UNAVAILABLE = "client.rdma_unavailable"  # nodes offer RDMA, but it is not used: `reason`
    CLIENT_GPU_STAGING = "client.gpu_staging"  # a client moves GPU memory; `how` names the kind of copies
    CLIENT_GPU_DIRECT = "client.gpu_direct"  # how RDMA reaches registered GPU memory: by rail, or staged
    DROPIN_CONNECTED = "dropin.connected"  # a program written for Mooncake Store is connected; see `segment`
    DROPIN_FAILED = "dropin.failed"  # a call of that API failed as a whole; `code` is what its caller gets
    DROPIN_REFUSED = "dropin.refused"  # that API was asked for something that is not offered here: `reason`
    DROPIN_IGNORED = "dropin.ignored"  # an argument or variable of that API has no effect here: `reason`
    CONNECTOR_STARTED = "connector.started"  # an engine uses the pool; `passport` is the root of its keys
    CONNECTOR_SAVES = "connector.saves"  # an engine saves layer by layer, or whole blocks because of `reason`
    CONNECTOR_PARTS = "connector.parts"  # blocks are shared over sizes; `reason`: why of equal size only
    CONNECTOR_NEW_GENERATION = "connector.new_generation"  # new weights or a reset: block keys change
    CONNECTOR_PASSPORT_UNTOLD = "connector.passport_untold"  # the passport file cannot be written
    CONNECTOR_OFF = "connector.off"  # an engine serves without the pool; `code` and `reason` say why
    CONNECTOR_ADAPTER_REFUSED = "connector.adapter_refused"  # a LoRA adapter's requests go without the pool
    CONNECTOR_POOL_ABSENT = "connector.pool_absent"  # an engine cannot reach the pool and keeps trying
    CONNECTOR_POOL_CONNECTED = "connector.pool_connected"  # an engine is connected to the pool
    CONNECTOR_TENANT_REFUSED = "connector.tenant_refused"  # a session token cannot be used; `reason` says why
    CONNECTOR_IN_PLACE = "connector.in_place"  # RDMA devices use an engine's KV memory where it lies
    CONNECTOR_STAGED = "connector.staged"  # blocks pass through staging memory over RDMA; `reason` says why
    CONNECTOR_POOL_SICK = "connector.pool_sick"  # calls failed; the circuit breaker opens for `pause_s`
    CONNECTOR_LOAD_FAILED = "connector.load_failed"  # blocks could not be loaded; `reason` says why
    CONNECTOR_BLOCKS_DIFFER = "connector.blocks_differ"  # the pool had others than were computed; `writers`
    CONNECTOR_SHADOW_OFF = "connector.shadow_off"  # hits are not verified as configured; `reason`
    HF_MODEL_LOADED = "hf.model_loaded"  # the small engine has its model; `seconds`, `kv_blocks`, `device`
    HF_STEP_FAILED = "hf.step_failed"  # a forward pass failed; the sequences in it end with an error
    HF_REQUEST_FINISHED = "hf.request_finished"  # one sequence is over; `outcome` says what its lookup found
    HTTP_FINISHED = "http.finished"  # one HTTP request is over; `code` says how
    BATCH_ENDED = "batch.ended"  # a batch has its end; `status` says which
    BATCH_LINE_LOST = "batch.line_lost"  # a crash cut a result off; its request is done again
    BATCH_STOPPED = "batch.stopped"  # a batch cannot go on, often because of a full disk; it is tried again
    BATCH_UNREADABLE = "batch.unreadable"  # what is kept of a file or batch cannot be read; see `path`
    GATEWAY_LISTENING = "gateway.listening"  # the gateway's HTTP port is open at `url`
    GATEWAY_REPORTS_DROPPED = "gateway.reports_dropped"  # reports to the conductor are dropped; see `reason`
    PICKER_LISTENING = "picker.listening"  # the endpoint picker's port for Envoy is open at `target`
    PICKER_UNSUITABLE = "picker.unsuitable"  # the ext_proc filter of Envoy is set wrongly; see `reason`
    INSTANCES_CHANGED = "instances.changed"  # the gateway has a new list of instances
    TOKENIZER_LOADED = "tokenizer.loaded"  # requests of a model get block keys
    TOKENIZER_UNUSABLE = "tokenizer.unusable"  # requests of a model are served without block keys
    CONDUCTOR_LEADS = "conductor.leads"  # this conductor schedules from now on; `term` is its fencing number
    CONDUCTOR_FOLLOWS = "conductor.follows"  # this conductor is a standby of the one named
    CONDUCTOR_LEADER_LOST = "conductor.leader_lost"  # the leading conductor does not answer this standby
    CONDUCTOR_ENTRY_INVALID = "conductor.entry_invalid"  # a standby cannot use what its leader sent
    CONDUCTOR_RESUMED = "conductor.resumed"  # a gateway named its requests under way to a new leader
    MEMBER_NOT_ANNOUNCED = "member.not_announced"  # the conductor did not take this process into its list
    CONDUCTOR_LOST = "conductor.lost"  # the conductor does not answer; requests go round robin
    CONDUCTOR_FOUND = "conductor.found"  # the conductor answers again
    LIMITS_DIVIDED = "limits.divided"  # no conductor: limits of tenants are fair shares of each gateway
    LIMITS_SHARED = "limits.shared"  # the conductor divides limits of tenants again
    BUDGET_NEAR = "budget.near"  # 80 % of a tenant's or a key's money for this month are spent
    BUDGET_SPENT = "budget.spent"  # a tenant's or a key's money for this month is spent; refusals follow
    BUDGET_UNPRICED = "budget.unpriced"  # budgets are set, but gateway.price_file is not: they limit nothing
    CONDUCTOR_REFUSED = "conductor.refused"  # the conductor answers with an error; requests go round robin
    LEG_FAILED = "leg.failed"  # one leg of a request failed; `again` says whether it is retried
    HANDOVER_MISSED = "handover.missed"  # a decode leg is sent again: its blocks will not arrive
    HANDOVER_GIVEN_UP = "handover.given_up"  # blocks will not come: waits for them at store nodes are ended
    ENGINE_DIED = "engine.died"  # an engine process ended during a request
    CONSOLE_ACT_NOT_AUDITED = "console.act_not_audited"  # an act was done, and its entry could not be written
    USAGE_LOST = "usage.lost"  # a gateway ended and could not write what it had counted of tenants' usage
    KEYS_RELOADED = "keys.reloaded"  # API keys or limits were read again, because they had changed
    ACCOUNTS_LOST = "accounts.lost"  # the database of accounts is away: no revocation arrives; `reason`
    ACCOUNTS_FOUND = "accounts.found"  # the database of accounts answers again, after `seconds`
    USAGE_EXPORT_ENABLED = "usage.export_enabled"  # sums of usage are sent to `endpoint` by OpenTelemetry
    USAGE_EXPORT_UNAVAILABLE = "usage.export_unavailable"  # an endpoint is set, nothing can be sent: `reason`
    KEY_ENDED = "key.ended"  # a key ended, and its requests under way with it; `key_id`, `count`
    CAPTURE_STARTED = "capture.started"  # the gateway writes a trace of its requests into a new file
    CAPTURE_FAILED = "capture.failed"  # requests are missing from the trace; `dropped` says why
    CONNECTOR_DEFECT = "connector.defect"  # an error inside the connector; the engine continues without it


_TOKEN: Final = re.compile(
    r"\b(mc[cem]1\.|mct1\.[a-z0-9_.-]{1,63}\.|mca1\.[0-9a-f]{16}\.)[0-9a-fA-F]{8,}|(?i:bearer\s+)\S+"
)
_SECRET_FIELDS: Final = frozenset(
    {"token", "secret", "authorization", "password", "tenant_key", "key_material"}
)
_BLOT: Final = "[redacted]"
_DEPTH_MAX: Final = 6


def redact_text(text: str) -> str:
    """The text without tokens, and without passwords of URLs."""
    text = _TOKEN.sub(_BLOT, text)
    if "://" not in text:
        return text
    from mooncache.config.accounts_place import without_passwords  # not at start: it brings all settings

    return without_passwords(text)


def _redact_value(value: object, depth: int) -> object:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"<{len(value)} bytes>"
    if isinstance(value, (int, float)) or value is None:
        return value
    if depth >= _DEPTH_MAX:
        return _BLOT
    if isinstance(value, dict):
        return {str(k): _redact_field(str(k), v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_redact_value(item, depth + 1) for item in value]
    return redact_text(str(value))


def _redact_field(name: str, value: object, depth: int) -> object:
    return _BLOT if name.lower() in _SECRET_FIELDS and value else _redact_value(value, depth)


def redact(_logger: object, _method: str, event: MutableMapping[str, object]) -> MutableMapping[str, object]:
    """structlog processor: no token and no raw bytes leave the process through a log line."""
    return {name: _redact_field(name, value, 0) for name, value in event.items()}


class Logger:
    """Writes events of the catalogue. Thin, so that an event that is not in the catalogue is a type error.

    Before `setup` (an application that only uses the SDK) warnings and errors go to stderr, and nothing else is made.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, event: Event, **fields: object) -> None:
        if _chosen:
            _chosen[0].debug(event.value, logger=self._name, **fields)

    def info(self, event: Event, **fields: object) -> None:
        if _chosen:
            _chosen[0].info(event.value, logger=self._name, **fields)

    def warning(self, event: Event, **fields: object) -> None:
        _pipeline().warning(event.value, logger=self._name, **fields)

    def error(self, event: Event, **fields: object) -> None:
        _pipeline().error(event.value, logger=self._name, **fields)


def get_logger(name: str) -> Logger:
    """Logger of a module; cheap, may be made at import time and before `setup`."""
    return Logger(name)


class _Lines:
    """The file of a logger. A line that cannot be written is lost and counted: a full disk must fail no request."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failed = False
        self.lost = 0

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except (OSError, ValueError):  # no space, a reader that is gone; a file that was closed
            self._failed = True
        return len(text)

    def flush(self) -> None:
        """The end of a line."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._failed = True
        self.lost = self.lost + 1 if self._failed else 0
        self._failed = False

    def note_lost(
        self, _logger: object, _method: str, fields: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """The next line that can be written says how many are missing before it."""
        if self.lost:
            fields["lines_lost"] = self.lost
        return fields


@cache
def _lines(stream: TextIO) -> _Lines:
    return _Lines(
        stream
    )  # one for each stream, because structlog keeps a lock for each file and never drops it


class _Limited:
    """A processor that drops info lines over the limit, and writes by `tell` what it dropped. For several threads."""

    def __init__(self, limit: LineLimit, tell: Callable[[str, int], None]) -> None:
        self._limit, self._tell = limit, tell
        self._lock = threading.Lock()

    def __call__(
        self, _logger: object, method: str, fields: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        now_s = time.monotonic()
        with self._lock:
            over = self._limit.over(now_s)
            admitted = method != "info" or self._limit.admit(str(fields["event"]), now_s)
        for event, lines in over:
            self._tell(event, lines)
        if not admitted:
            raise structlog.DropEvent
        return fields

    def tell_rest(self) -> None:
        """What was dropped and not reported yet."""
        with self._lock:
            rest = self._limit.rest()
        for event, lines in rest:
            self._tell(event, lines)


def _make(stream: TextIO, level: str, log_format: LogFormat, *before: Any) -> Any:
    """Our own chain of processors, apart from structlog's global one, which belongs to the application.

    `before` are processors that come first.
    """
    human = log_format == "console" or (log_format == "auto" and stream.isatty())
    colors = human and stream.isatty()
    lines = _lines(stream)
    logger = structlog.wrap_logger(
        structlog.PrintLogger(cast("TextIO", lines)),
        processors=[
            *before,
            structlog.processors.add_log_level,
            lines.note_lost,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            redact,
            structlog.dev.ConsoleRenderer(colors=colors) if human else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        cache_logger_on_first_use=False,
    )
    return logger.bind()  # else each line, also one of a level that is off, would make a logger first


_chosen: list[Any] = []  # at most one: what `setup` made
_settings: list[tuple[str, LogFormat, TextIO | None, int]] = []  # at most one: from what
_limited: list[_Limited] = []  # at most one: what `setup` made


def _pipeline() -> Any:
    """What `setup` made; before it, what writes warnings."""
    return (
        _chosen[0]
        if _chosen
        else _make(sys.stderr, "warning", "auto", structlog.contextvars.merge_contextvars)
    )


def setup(
    service: str,
    *,
    level: str = "info",
    log_format: LogFormat = "auto",
    stream: TextIO | None = None,
    info_lines_per_s: int = 0,
) -> None:
    """Configure logging of the process. "auto" means console on a terminal and JSON otherwise."""
    _tell_rest()
    chosen = stream or sys.stderr
    summary = _make(chosen, level, log_format)  # of many calls, so without the request id of one

    def tell(event: str, lines: int) -> None:
        summary.info(Event.LOG_LINES_LEFT_OUT.value, logger=__name__, service=service, of=event, lines=lines)

    _limited[:] = [_Limited(LineLimit(info_lines_per_s), tell)]
    _settings[:] = [(service, log_format, stream, info_lines_per_s)]
    _chosen[:] = [_make(chosen, level, log_format, _limited[0], structlog.contextvars.merge_contextvars)]
    structlog.contextvars.bind_contextvars(service=service)


@atexit.register
def _tell_rest() -> None:
    """Lines that were left out in the last second of a process are reported, too."""
    for limited in _limited:
        limited.tell_rest()


def set_level(level: str) -> None:
    """Write lines of another level from now on; does nothing before `setup`."""
    if _settings:
        service, log_format, stream, limit = _settings[0]
        setup(service, level=level, log_format=log_format, stream=stream, info_lines_per_s=limit)


def reset() -> None:
    """Back to how it was before `setup`."""
    _tell_rest()
    _limited.clear()
    _chosen.clear()
    _settings.clear()
    structlog.contextvars.unbind_contextvars("service")

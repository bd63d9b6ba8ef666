"""What goes into a decision and what comes out of it, as plain values; how a decision becomes a record and a
summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from mooncache.conductor.core.differences import PlannedCache
from mooncache.conductor.core.handover_node import NO_NODE, NodesByHost
from mooncache.conductor.core.holder_rates import BlockHolder
from mooncache.conductor.core.placed import PlacedRun
from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import NO_ROW, Branch, Choice, Reason, Request, Rules
from mooncache.conductor.core.records import DecisionRecord, DecisionState, milliseconds, pack


class PoolState(StrEnum):
    """How the pool answered."""

    OK = "ok"
    ABSENT = "absent"
    TIMEOUT = "timeout"
    NO_KEYS = "no_keys"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Limits and rules of the scheduler; times are seconds. What can be configured has its default there."""

    policy: str
    rules: Rules
    report_interval_s: float
    suspect_after_s: float
    lease_s: float
    request_timeout_s: float
    handover_margin_s: float
    ttft_slo_s: float
    tbt_slo_s: float
    instance_count_max: int = 4096
    decision_count_max: int = 10_000
    seen_block_count_max: int = 1_000_000
    snapshot_bytes_max: int = 64 << 20


@dataclass(frozen=True, slots=True)
class SchedulingRequest:
    """One request to schedule, checked."""

    request_id: str
    model: str
    prompt_tokens: int
    tenant: str = ""
    keys: bytes = b""
    content_keys: bytes = b""
    group: int = 0  # passport group of the keys, 0 when the caller did not say
    max_output_tokens: int = 0
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0
    sequences: int = 1
    exclude: frozenset[str] = frozenset()
    attempt: int = 1
    no_prefill: bool = False
    session: str = ""
    priority: int = 0
    offline: bool = False  # takes what is idle, and has no promise
    pool_tenant: str = ""  # whose blocks the keys name at the pool's nodes; "" = the engines' own
    gateway_run: int = 0  # number of the process that asks; 0: not said

    @property
    def lengths_class(self) -> str:
        """Whose answers this one's length is expected to be like: the tenant's, long and short limits apart."""
        return f"{self.tenant} {self.max_output_tokens.bit_length()}"


@dataclass(frozen=True, slots=True)
class PoolAnswer:
    """What the pool said: leading blocks that it holds."""

    state: PoolState = PoolState.NO_KEYS  # ok, absent, timeout or no_keys
    blocks: int = 0
    elapsed_s: float = 0.0
    unreachable_nodes: int = 0
    nodes: NodesByHost = field(default_factory=dict)  # through which instances of a host may hand over
    runs: tuple[PlacedRun, ...] = ()  # where the leading blocks lie, as far as known
    holders: tuple[tuple[BlockHolder, ...], ...] = ()  # who holds the blocks of each run


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is to be scheduled now: what it says, and what the pool holds of it."""

    request: SchedulingRequest
    pool: PoolAnswer
    now_s: float
    wall_s: float


@dataclass(slots=True)
class PlannedRequest:
    """An arrival with what a policy saw of it and chose for it; records and decisions are made of this."""

    arrival: Arrival
    policy_request: Request
    choice: Choice
    fleet: Fleet | None = None
    """What the policy chose from, None when it was not asked. Its columns are the book's own, which change with the
    next event."""
    block_tokens: int = 0  # 0 when no instance serves the model
    store_node: str = NO_NODE  # through which the legs hand over

    @property
    def pool_tokens(self) -> int:
        """The leading tokens that the pool holds."""
        return min(self.arrival.pool.blocks * self.block_tokens, self.policy_request.cacheable_tokens)


@dataclass(slots=True)
class Decision:
    """A decision that was made and recorded, with names instead of rows."""

    decision_id: str
    choice: Choice
    policy_request: Request
    record: DecisionRecord
    pool: PoolAnswer
    prefiller: str = ""  # the instance that computes the prompt, "" when none was chosen
    prefill: str = ""  # the same, "" when the decode instance computes it itself
    decode: str = ""
    pool_tokens: int = 0  # leading tokens in the pool
    local_tokens: int = 0  # leading tokens in the prefiller's own cache
    wait_s: float = 0.0  # how long the decode leg waits for the prefill leg's blocks
    handover_s: float = 0.0  # how long it waits once that leg has ended
    expected_wait_s: float = 0.0  # how long the leg that waits is expected to, as learnt
    ready_wait_s: float = 0.0  # how long the computing instance waits for another request's blocks
    avoided: bool = False  # the decode instance computes the prompt because blocks did not come the other way
    store_node: str = NO_NODE  # through which the legs hand over

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens left to compute."""
        return self.policy_request.prompt_tokens - self.choice.prefix_tokens if self.decode else 0

    def computing(self, block_tokens: int) -> PlannedCache:
        """What the leg that computes the prompt is expected to find."""
        prefix_tokens = self.choice.prefix_tokens
        local_tokens = min(self.local_tokens, prefix_tokens)
        return self._planned(prefix_tokens, local_tokens, block_tokens, self.ready_wait_s)

    def decoding(self, block_tokens: int, local_tokens: int) -> PlannedCache | None:
        """What the decode leg is expected to find; None when it computes the prompt. local_tokens: what it holds."""
        if not self.prefill:
            return None
        return self._planned(self.policy_request.cacheable_tokens, local_tokens, block_tokens, self.wait_s)

    def _planned(
        self, prefix_tokens: int, local_tokens: int, block_tokens: int, wait_s: float
    ) -> PlannedCache:
        usable = (self.policy_request.prompt_tokens - 1) // max(1, block_tokens) * block_tokens
        return PlannedCache(prefix_tokens, local_tokens, self.pool_tokens, usable, block_tokens, wait_s)

    def summary(self) -> str:
        """The text of the response header: about this request only."""
        choice = self.choice
        if not choice.admitted or not self.decode:
            return f"refused={choice.reason};retry_ms={int(choice.retry_after_s * 1e3)}"
        parts = {
            "prefill": self.prefill or "-",
            "decode": self.decode,
            "branch": choice.branch if self.prefill else f"inline-{choice.branch}",
            "local": self.local_tokens,
            # Awaited blocks count too: on the same instance they need no transfer.
            "pool": choice.prefix_tokens - min(self.local_tokens, choice.prefix_tokens),
            "computed": self.computed_tokens,
            "ttft_ms": int(choice.ttft_s * 1e3),
        }
        return ";".join(f"{name}={value}" for name, value in parts.items())


def new_decision(planned: PlannedRequest, record: DecisionRecord) -> Decision:
    """The decision with names for rows."""
    choice, request, fleet = planned.choice, planned.policy_request, planned.fleet
    found = Decision(
        record.decision_id,
        choice,
        request,
        record,
        planned.arrival.pool,
        pool_tokens=record.pool_tokens,
        store_node=planned.store_node,
    )
    if fleet is not None and choice.decode != NO_ROW:
        found.prefiller, found.decode = fleet.names[choice.prefiller_row], fleet.names[choice.decode]
        found.prefill = found.prefiller if choice.prefill != NO_ROW else ""
        found.local_tokens = min(int(request.local[choice.prefiller_row]), request.prompt_tokens)
    return found


def sentence(choice: Choice, request: Request, fleet: Fleet | None) -> str:
    """The decision in one sentence for people."""
    if choice.reason is Reason.NO_INSTANCE:
        return "No instance of this model takes requests now."
    if choice.reason is Reason.OFFLINE:
        return f"Nothing is idle for an offline request; it is tried again in {choice.retry_after_s:.2f} s."
    if fleet is None or choice.decode == NO_ROW:
        return "The request was refused."
    wait = f"try again in {choice.retry_after_s:.1f} s"
    if choice.reason is Reason.TTFT:
        would = f"The first token would take {choice.ttft_s:.1f} s, {request.ttft_slo_s:g} s are promised"
        if choice.ttft_s <= request.ttft_slo_s:
            would += f" and {choice.ttft_limit_s:.1f} s of them are free for a request of its size, share and priority"
        return f"{would}; {wait}."
    if choice.reason is Reason.TBT:
        tbt_ms, promised_ms = choice.tbt_s * 1e3, request.tbt_slo_s * 1e3
        return f"A token would take {tbt_ms:.0f} ms, {promised_ms:g} ms are promised; {wait}."
    if choice.reason is Reason.CAPACITY:
        return f"No decode instance has room for {choice.wait_s:.1f} s; {wait}."
    left = request.prompt_tokens - choice.prefix_tokens
    where = fleet.names[choice.decode]
    if choice.prefill == NO_ROW:
        return f"{where} computes {left} of {request.prompt_tokens} prompt tokens itself and generates."
    how = {
        Branch.LOCAL: "",
        Branch.FETCH: f" after fetching {choice.fetch_tokens}",
        Branch.WAIT: " after waiting for another request",
    }
    who = " and ".join(fleet.names[row] for row in choice.members) or fleet.names[choice.prefill]
    verb = "compute" if len(choice.members) > 1 else "computes"
    return f"{who} {verb} {left} of {request.prompt_tokens} prompt tokens{how[choice.branch]}, {where} generates."


def new_record(planned: PlannedRequest, decision_id: str, earlier: list[str]) -> DecisionRecord:
    """The record of a decision. earlier: decisions for the same request."""
    arrival, choice, fleet = planned.arrival, planned.choice, planned.fleet
    request, policy_request, pool = arrival.request, planned.policy_request, arrival.pool
    pool_tokens = planned.pool_tokens
    head: dict[str, object] = {
        "decision_id": decision_id,
        "request_id": request.request_id,
        "tenant": request.tenant,
        "model": request.model,
        "made_at_s": round(arrival.wall_s, 3),
        "attempt": request.attempt,
        "earlier": earlier,
        "excluded": sorted(request.exclude),
        "admitted": choice.admitted,
        "reason": choice.reason,
        "retry_after_ms": milliseconds(choice.retry_after_s),
        "prompt_tokens": request.prompt_tokens,
        "cacheable_tokens": policy_request.cacheable_tokens,
        "block_tokens": planned.block_tokens,
        "sequences": policy_request.sequences,
        "max_output_tokens": request.max_output_tokens,
        "expected_output_tokens": round(policy_request.output_tokens, 1),
        "priority": request.priority,
        "offline": request.offline,
        "tenant_share": round(policy_request.tenant_share, 3),
        "session": request.session,
        "promised": {
            "ttft_ms": milliseconds(policy_request.ttft_slo_s),
            "tbt_ms": milliseconds(policy_request.tbt_slo_s),
        },
        "pool": {
            "state": pool.state,
            "tokens": pool_tokens,
            "lookup_ms": milliseconds(pool.elapsed_s),
            "unreachable_nodes": pool.unreachable_nodes,
        },
        "chosen": _placed(chosen_fields(policy_request, choice, fleet), planned.store_node),
        "expected": priced_fields(policy_request, choice, fleet),
        "odd_costs": choice.invalid_costs,
    }
    return DecisionRecord(
        decision_id=decision_id,
        request_id=request.request_id,
        head=pack(head),
        made_s=arrival.now_s,
        message=sentence(choice, policy_request, fleet),
        cacheable_tokens=policy_request.cacheable_tokens,
        pool_tokens=pool_tokens,
        block_tokens=planned.block_tokens,
        state=DecisionState.RUNNING if choice.admitted else DecisionState.REFUSED,
        planned_prefix=choice.prefix_tokens,
    )


def _placed(chosen: dict[str, object] | None, store_node: str) -> dict[str, object] | None:
    """The chosen fields with the store node of the hand-over, which no policy chooses."""
    if chosen is not None:
        chosen["store_node"] = store_node
    return chosen


def chosen_fields(request: Request, choice: Choice, fleet: Fleet | None) -> dict[str, object] | None:
    """The chosen instances and their plan, as JSON fields; None without a choice."""
    if fleet is None or choice.decode == NO_ROW:
        return None
    return {
        "prefill": fleet.names[choice.prefill] if choice.prefill != NO_ROW else "",
        "decode": fleet.names[choice.decode],
        "inline": choice.prefill == NO_ROW,
        "inlining": inlining_fields(choice),
        "branch": choice.branch,
        "together": [fleet.names[row] for row in choice.members],
        "chunk_tokens": choice.chunk_tokens,
        "local_tokens": min(int(request.local[choice.prefiller_row]), request.prompt_tokens),
        "fetched_tokens": choice.fetch_tokens,
        "awaited_tokens": choice.prefix_tokens if choice.branch == Branch.WAIT else 0,
        "awaited_decision_id": choice.awaited.decision_id if choice.awaited is not None else "",
        "computed_tokens": request.prompt_tokens - choice.prefix_tokens,
    }


def inlining_fields(choice: Choice) -> dict[str, object] | None:
    """Why the prompt has a prefill leg or none, with both scores, as JSON fields; None: the policy does not compare."""
    if choice.inlining is None:
        return None
    verdict, here_s, apart_s = choice.inlining
    return {"verdict": verdict, "here_ms": milliseconds(here_s), "apart_ms": milliseconds(apart_s)}


def expected_fields(choice: Choice, fleet: Fleet | None) -> dict[str, float] | None:
    """The expected times of the choice, in milliseconds; None without a choice."""
    if fleet is None or choice.decode == NO_ROW:
        return None
    return {
        "ttft_ms": milliseconds(choice.ttft_s),
        "tbt_ms": milliseconds(choice.tbt_s),
        "queue_ms": milliseconds(float(fleet.queue_s[choice.prefiller_row])),
        "ready_ms": milliseconds(choice.ready_s),
        "prefill_ms": milliseconds(choice.compute_s),
        "handover_ms": milliseconds(choice.handover_s),
        "decode_wait_ms": milliseconds(choice.wait_s),
        "ttft_limit_ms": milliseconds(choice.ttft_limit_s),
    }


def priced_fields(request: Request, choice: Choice, fleet: Fleet | None) -> dict[str, float] | None:
    """`expected_fields` with what prices of a request are made of, as it was when it was scheduled.

    `without_cache_ms`: what its instance would compute if no token of the prompt were cached anywhere.
    `decode_sequences`: all sequences of the decode instance, its own among them.
    """
    fields = expected_fields(choice, fleet)
    if fields is None or fleet is None:
        return None
    cost = fleet.prefill_cost(choice.prefiller_row)
    fields["without_cache_ms"] = milliseconds(cost.seconds(request.prompt_tokens, 0))
    fields["decode_sequences"] = round(float(fleet.sequences[choice.decode]) + request.sequences, 2)
    return fields

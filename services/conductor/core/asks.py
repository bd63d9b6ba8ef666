"""What goes into a decision and what comes out of it, as plain values; how a decision becomes a record and a
summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mooncache.conductor.core.policy.facts import Choice, Request, Rules
from mooncache.conductor.core.records import REFUSED, RUNNING, Record, encode_candidates, milliseconds, pack

POOL_OK, POOL_ABSENT, POOL_TIMEOUT, POOL_NO_KEYS = "ok", "absent", "timeout", "no_keys"


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits and rules of the scheduler; times are seconds."""

    rules: Rules = field(default_factory=Rules)
    suspect_after_s: float = 2.0
    lease_s: float = 10.0
    instance_count_max: int = 4096
    request_timeout_s: float = 900.0
    decision_count_max: int = 10_000
    seen_block_count_max: int = 1_000_000
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to schedule, checked. group: passport group of the keys, 0 when the caller did not say."""

    request_id: str
    model: str
    prompt_tokens: int
    tenant: str = ""
    keys: bytes = b""
    content_keys: bytes = b""
    group: int = 0
    max_output_tokens: int = 0
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0
    sequences: int = 1
    exclude: frozenset[str] = frozenset()
    attempt: int = 1
    no_prefill: bool = False
    session: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PoolAnswer:
    """What the pool said: leading blocks that it holds. state: ok, absent, timeout or no_keys."""

    state: str = POOL_NO_KEYS
    blocks: int = 0
    elapsed_s: float = 0.0
    unreachable_nodes: int = 0


@dataclass(slots=True)
class Decision:
    """A decision that was made and recorded."""

    decision_id: str
    choice: Choice
    request: Request
    record: Record
    pool: PoolAnswer

    @property
    def local_tokens(self) -> int:
        """Leading tokens in the own cache of the instance that computes the prompt."""
        option = self.choice.prefill or self.choice.inline
        return min(option.facts.local_tokens, self.request.prompt_tokens) if option is not None else 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens left to compute."""
        branch = self.choice.branch
        return self.request.prompt_tokens - branch.prefix_tokens if branch is not None else 0

    def summary(self) -> str:
        """Return the text of the response header: about this request only."""
        choice, branch = self.choice, self.choice.branch
        if not choice.admitted or branch is None or choice.decode is None:
            return f"refused={choice.reason};retry_ms={int(choice.retry_after_s * 1e3)}"
        prefill = choice.prefill.facts.instance_id if choice.prefill is not None else "-"
        parts = {
            "prefill": prefill,
            "decode": choice.decode.facts.instance_id,
            "branch": branch.kind if choice.prefill is not None else f"inline-{branch.kind}",
            "local": self.local_tokens,
            # Awaited blocks count too: on the same instance they need no transfer.
            "pool": branch.prefix_tokens - min(self.local_tokens, branch.prefix_tokens),
            "computed": self.computed_tokens,
            "ttft_ms": int(choice.ttft_s * 1e3),
        }
        return ";".join(f"{name}={value}" for name, value in parts.items())


def sentence(choice: Choice, request: Request) -> str:
    """Return the decision in one sentence for people."""
    branch = choice.branch
    if choice.reason == "no_instance":
        return "No instance of this model takes requests now."
    if branch is None or choice.decode is None:
        return "The request was refused."
    wait = f"come back in {choice.retry_after_s:.1f} s"
    if choice.reason == "ttft":
        return f"The first token would take {choice.ttft_s:.1f} s, {request.ttft_slo_s:g} s are promised; {wait}."
    if choice.reason == "tbt":
        tbt_ms, promised_ms = choice.decode.tbt_s * 1e3, request.tbt_slo_s * 1e3
        return f"A token would take {tbt_ms:.0f} ms, {promised_ms:g} ms are promised; {wait}."
    if choice.reason == "capacity":
        return f"No decode instance has room for {choice.decode.wait_s:.1f} s; {wait}."
    left = request.prompt_tokens - branch.prefix_tokens
    where = choice.decode.facts.instance_id
    if choice.prefill is None:
        return f"{where} computes {left} of {request.prompt_tokens} prompt tokens itself and generates."
    how = {
        "local": "",
        "fetch": f" after fetching {branch.fetch_tokens}",
        "wait": " after waiting for another request",
    }
    return (
        f"{choice.prefill.facts.instance_id} computes {left} of {request.prompt_tokens} prompt tokens"
        f"{how[branch.kind]}, {where} generates."
    )


def new_record(
    ask: Ask,
    pool: PoolAnswer,
    request: Request,
    choice: Choice,
    decision_id: str,
    earlier: list[str],
    block_tokens: int,
    now_s: float,
    wall_s: float,
) -> Record:
    """Return the record of a decision."""
    head: dict[str, Any] = {
        "decision_id": decision_id,
        "request_id": ask.request_id,
        "tenant": ask.tenant,
        "model": ask.model,
        "made_at_s": round(wall_s, 3),
        "attempt": ask.attempt,
        "earlier": earlier,
        "excluded": sorted(ask.exclude),
        "admitted": choice.admitted,
        "reason": choice.reason,
        "retry_after_ms": milliseconds(choice.retry_after_s),
        "prompt_tokens": ask.prompt_tokens,
        "cacheable_tokens": request.cacheable_tokens,
        "block_tokens": block_tokens,
        "sequences": request.sequences,
        "max_output_tokens": ask.max_output_tokens,
        "priority": ask.priority,
        "session": ask.session,
        "promised": {
            "ttft_ms": milliseconds(request.ttft_slo_s),
            "tbt_ms": milliseconds(request.tbt_slo_s),
        },
        "pool": {
            "state": pool.state,
            "tokens": request.pool_tokens,
            "lookup_ms": milliseconds(pool.elapsed_s),
            "unreachable_nodes": pool.unreachable_nodes,
        },
        "chosen": _chosen(request, choice),
        "expected": _expected(choice),
    }
    branch = choice.branch
    return Record(
        decision_id=decision_id,
        request_id=ask.request_id,
        head=pack(head),
        candidates=encode_candidates(choice),
        made_s=now_s,
        message=sentence(choice, request),
        cacheable_tokens=request.cacheable_tokens,
        pool_tokens=request.pool_tokens,
        block_tokens=block_tokens,
        state=RUNNING if choice.admitted else REFUSED,
        planned_prefix=branch.prefix_tokens if branch is not None else 0,
    )


def _chosen(request: Request, choice: Choice) -> dict[str, Any] | None:
    branch, option = choice.branch, choice.prefill or choice.inline
    if branch is None or option is None or choice.decode is None:
        return None
    local = min(option.facts.local_tokens, request.prompt_tokens)
    return {
        "prefill": choice.prefill.facts.instance_id if choice.prefill is not None else "",
        "decode": choice.decode.facts.instance_id,
        "inline": choice.prefill is None,
        "branch": branch.kind,
        "local_tokens": local,
        "fetched_tokens": branch.fetch_tokens,
        "awaited_tokens": branch.prefix_tokens if branch.kind == "wait" else 0,
        "awaited_decision_id": branch.awaited.decision_id if branch.awaited is not None else "",
        "computed_tokens": request.prompt_tokens - branch.prefix_tokens,
    }


def _expected(choice: Choice) -> dict[str, float] | None:
    branch, option = choice.branch, choice.prefill or choice.inline
    if branch is None or option is None or choice.decode is None:
        return None
    return {
        "ttft_ms": milliseconds(choice.ttft_s),
        "tbt_ms": milliseconds(choice.decode.tbt_s),
        "queue_ms": milliseconds(option.facts.queue_s),
        "ready_ms": milliseconds(branch.ready_s),
        "prefill_ms": milliseconds(branch.compute_s),
        "handover_ms": milliseconds(choice.decode.handover_s),
        "decode_wait_ms": milliseconds(choice.decode.wait_s),
    }

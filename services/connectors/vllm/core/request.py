"""One request of vLLM as the connector's book knows it, and what is ordered and reported of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mooncache.connectors.vllm.core.chain import KeyChain
from mooncache.connectors.vllm.core.refusals import PoolRefusal
from mooncache.kvcache.core.break_even import Pace
from mooncache.kvcache.core.streaming import WaitPlace
from mooncache.kvcache.core.weighing import LoadChoice
from mooncache.kvcache.leg_hint import CacheOutcome, CacheReport, LegHint


@dataclass(frozen=True, slots=True)
class PoolQuery:
    """Ask the pool about these keys; wait for the first `awaited` of them until `deadline_s`."""

    request_id: str
    keys: bytes
    awaited: int
    deadline_s: float
    node: str = ""  # where the awaited blocks will be, when that is known
    limit_s: float | None = None  # for the answer, if it is worth no more
    session_token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Matched:
    """`tokens` that can be loaded; None means ask again later. `query` has to be done first. `spared`: tokens that the
    pool has and that are computed, because that is faster; said once. `waits`: where awaited blocks are waited for;
    said once.
    """

    tokens: int | None
    query: PoolQuery | None = None
    spared: int = 0
    waits: WaitPlace | None = None


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """`keys[shard]` are the packed keys of the engine's `blocks`. The rest is as in kvcache/transfers.py."""

    name: str
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    traceparent: str = ""  # of the request, if it has one
    pace: Pace | None = None
    awaited: tuple[int, ...] = ()
    await_s: float = 0.0
    node: str = ""
    is_awaited: bool = False
    session_token: str = field(default="", repr=False)


@dataclass(slots=True)
class RequestState:
    """What the book knows of one request."""

    request_id: str
    prompt_tokens: int
    hint: LegHint
    reports: bool
    refusal: PoolRefusal | None = None  # why it does not use the pool
    chain: KeyChain | None = None
    asked: bool = False
    pending: bool = False
    known: bytearray = field(default_factory=bytearray)
    known_as_of: int = 0
    choice: LoadChoice = field(default_factory=LoadChoice)
    answered_s: float | None = None
    load_end: int | None = None  # block before which loading ends, once it was weighed against computing
    loads_off: bool = False
    saves_off: bool = False
    wait_until_s: float = 0.0
    matched_s: float = 0.0
    promise_end: int = 0  # blocks before it are promised, also if they are not there yet; 0: no promise
    streams: bool = False  # the promise was taken; it is not made again
    loading: tuple[int, int] | None = None
    local_blocks: int = 0
    local_tokens: int = 0
    next_save: int = 0
    running: bool = False
    outcome: CacheOutcome = CacheOutcome.UNKNOWN  # of the lookup; UNKNOWN when it was answered
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    staged_bytes: int = 0
    waited_s: float = 0.0
    load_s: float = 0.0
    hidden_s: float = 0.0
    failed_blocks: int = 0
    saved_blocks: int = 0
    unsaved: set[int] = field(default_factory=set)  # blocks before `next_save` that the pool does not get


def report_of(request: RequestState, block_tokens: int) -> CacheReport:
    """What to tell the gateway."""
    asked = request.prompt_tokens // block_tokens * block_tokens if block_tokens else 0
    hit = request.local_tokens + request.loaded_tokens
    return CacheReport(
        asked_tokens=asked,
        hit_tokens=hit,
        local_tokens=request.local_tokens,
        loaded_tokens=request.loaded_tokens,
        loaded_bytes=request.loaded_bytes,
        staged_bytes=request.staged_bytes,
        waited_ms=round(request.waited_s * 1e3, 3),
        load_ms=round(request.load_s * 1e3, 3),
        hidden_ms=round(request.hidden_s * 1e3, 3),
        failed_blocks=request.failed_blocks,
        saved_blocks=request.saved_blocks,
        held_tokens=min(asked, min(request.unsaved, default=request.next_save) * block_tokens),
        outcome=_outcome(request, asked, hit, block_tokens),
        reason=str(request.refusal) if request.refusal else request.choice.reason,
        loaded_from=request.choice.loaded_from,
    )


def _outcome(request: RequestState, asked: int, hit: int, block_tokens: int) -> CacheOutcome:
    if request.refusal is not None:
        return CacheOutcome.OFF
    if request.failed_blocks:
        return CacheOutcome.FAILED
    if hit < asked and request.choice.load_cut:
        return CacheOutcome.LOAD_CUT
    if hit < asked and request.choice.computed_faster:
        return CacheOutcome.COMPUTED_FASTER
    if request.outcome is not CacheOutcome.UNKNOWN and hit < asked:
        return request.outcome
    if not hit:
        return CacheOutcome.MISS
    # A stream leaves the last token of a prompt to be computed, and with it its block.
    whole = min(asked, request.prompt_tokens - 1) if request.streams else asked
    return CacheOutcome.HIT if hit > whole - block_tokens else CacheOutcome.PARTIAL

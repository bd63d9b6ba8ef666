"""One request of vLLM as the connector's book knows it, and what is ordered and reported of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncache.connectors.vllm.core.chain import KeyChain
from mooncache.connectors.vllm.core.groups import BlockRange
from mooncache.connectors.vllm.core.refusals import PoolRefusal
from mooncache.kvcache.core.break_even import Pace
from mooncache.kvcache.core.streaming import WaitPlace
from mooncache.kvcache.core.weighing import LoadChoice
from mooncache.kvcache.leg_hint import CacheOutcome, CacheReport, LegHint, LegRole
from mooncache.kvcache.media import Medium


class RequestContent(NamedTuple):
    """What the KV of a request depends on beside its tokens."""

    lora: str = ""  # what its adapter is
    media: tuple[Medium, ...] = ()


TOKENS_ALONE = RequestContent()


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
    """`keys[shard]` are the packed keys of the engine's `blocks`. The rest is as in kvcache/transfers.py.

    Attributes:
        groups: of each block the group of KV cache; empty: the engine has one.
        tokens: of a load: for how many tokens it is, when all of it comes.
        verifies: of a save: the pool has the blocks, and they are compared with these.
    """

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
    groups: tuple[int, ...] = ()
    tokens: int = 0
    verifies: bool = False


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
    order: list[int] = field(
        default_factory=list
    )  # of the keys that were asked for; empty: that of the chain
    known: list[bytearray] = field(default_factory=list)  # for each group which blocks the pool has
    known_as_of: int = 0
    choice: LoadChoice = field(default_factory=LoadChoice)
    answered_s: float | None = None
    load_end: int | None = None  # block before which loading ends, once it was weighed against computing
    verify_end: int = 0  # blocks before it are computed although the pool has them, and compared
    loads_off: bool = False
    saves_off: bool = False
    wait_until_s: float = 0.0
    matched_s: float = 0.0
    promise_end: int = 0  # blocks before it are promised, also if they are not there yet; 0: no promise
    streams: bool = False  # the promise was taken; it is not made again
    loading: tuple[int, int] | None = None
    load_parts: list[BlockRange] = field(default_factory=list)  # in the order of the load
    limit: int = 0  # block before which loads end
    local_blocks: int = 0
    local_tokens: int = 0
    next_save: int = 0
    states: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # of a (group, block) the place where the engine keeps the state behind it
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

    @property
    def trusts_saves(self) -> bool:
        """Whether blocks that were saved before are not offered again."""
        return self.hint.role is not LegRole.PREFILL

    def keeps(self, states: Iterable[tuple[int, int, int]], block_tokens: int) -> None:
        """It runs, and the engine keeps these states of it: (group, place, tokens before it)."""
        self.running = True
        for group, place, tokens in states:
            if tokens % block_tokens == 0:
                self.states[group, tokens // block_tokens - 1] = place

    def note(self, blocks: Sequence[tuple[int, int]], there: int) -> None:
        """The pool has these (group, block), or not."""
        for group, block in blocks:
            if self.known and block < len(self.known[group]):
                self.known[group][block] = there


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
    # Some loads leave the last token of a prompt to be computed, and with it its block.
    leaves = request.streams or 0 < request.limit * block_tokens < asked
    whole = min(asked, request.prompt_tokens - 1) if leaves else asked
    return CacheOutcome.HIT if hit > whole - block_tokens else CacheOutcome.PARTIAL

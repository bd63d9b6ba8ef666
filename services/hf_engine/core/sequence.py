"""One sequence: a prompt that grows token by token, the blocks that hold its KV, and what the cache did for it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncache.client.keys import split_keys
from mooncache.kvcache.core.weighing import LoadChoice
from mooncache.kvcache.keys import request_keys
from mooncache.kvcache.leg_hint import CacheOutcome, CacheReport, LegHint
from mooncache.kvcache.passport import Passport

if TYPE_CHECKING:
    from mooncache.runtime.tracing import TraceContext


class State(enum.Enum):
    """Where a sequence is in its life."""

    LOOKUP = "lookup"  # the pool is being asked, or blocks of another instance are awaited
    WAITING = "waiting"  # may start as soon as there is room
    LOADING = "loading"  # has blocks; the pool's bytes are on their way into them
    RUNNING = "running"  # takes part in steps
    DONE = "done"


class FinishReason(enum.StrEnum):
    """Why a sequence is over, in the words of OpenAI's answers."""

    STOP = "stop"  # a token or a string that ends the answer
    LENGTH = "length"  # as many tokens as were asked for
    ABORT = "abort"  # its client has left, or the engine ends
    ERROR = "error"  # a step failed


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy, top_k 0 and top_p 1 are off, logprobs -1 wants none."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    logprobs: int = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence and its KV blocks."""

    tokens: list[int]
    sampling: Sampling
    passport: Passport
    block_tokens: int
    salt: str = ""
    priority: int = 0  # a lower one goes first
    hint: LegHint = field(default_factory=LegHint)
    trace: TraceContext | None = None  # the request's trace context, if it has one
    sink: object = None  # where its outputs go; it belongs to the caller, see engine.Deliver
    name: str = ""  # by which lookups and the mover know it
    index: int = 0
    prompt_count: int = 0
    state: State = State.LOOKUP
    cancelled: bool = False
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # leading tokens whose KV is in `blocks`
    keys: list[bytes] = field(default_factory=list)
    present: tuple[bool, ...] = ()  # for each key whether the pool has it, as far as known
    load: range = range(0)  # block numbers that have to be fetched before the first step
    promise_end: int = 0  # blocks before it are loaded as they come, also if they are not there yet; 0: none
    verify_end: int = 0  # blocks before it are computed although the pool has them, and compared
    wait_until_s: float = 0.0  # for blocks of another instance
    saved: int = 0  # complete blocks that were handed to the mover or need not be
    preemptions: int = 0
    random: object = None  # a generator of torch, once a token was sampled
    # what is reported of the cache
    outcome: CacheOutcome = CacheOutcome.UNKNOWN
    local_tokens: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    staged_bytes: int = 0
    failed_blocks: int = 0
    choice: LoadChoice = field(default_factory=LoadChoice)
    saved_blocks: int = 0
    unsaved: set[int] = field(default_factory=set)  # those of the saved blocks that the pool does not get
    waited_ms: float = 0.0
    load_ms: float = 0.0
    hidden_ms: float = 0.0
    # times of the caller's clock, seconds
    arrived_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_count = self.prompt_count or len(self.tokens)
        self.extend_keys()

    @property
    def left(self) -> int:
        """Tokens whose KV has to be computed before the next token can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens chosen so far."""
        return len(self.tokens) - self.prompt_count

    @property
    def reusable_blocks(self) -> int:
        """Complete blocks that may come from a cache: one token at least is computed, or nothing could be chosen."""
        return (len(self.tokens) - 1) // self.block_tokens

    @property
    def awaited_blocks(self) -> int:
        """Leading blocks that another instance is computing."""
        return min(self.hint.wait_tokens // self.block_tokens, self.reusable_blocks)

    def in_pool(self, number: int) -> bool:
        """True when the pool's answer had this block."""
        return number < len(self.present) and self.present[number]

    def learned(self, numbers: range, there: int) -> None:
        """Of these blocks the pool has the first `there`; the others it has not."""
        present = [*self.present, *[False] * (numbers.stop - len(self.present))]
        for at, number in enumerate(numbers):
            present[number] = at < there
        self.present = tuple(present)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def extend_keys(self) -> None:
        """Name the complete blocks that have no key yet. The rule for keys is the gateway's own."""
        complete = len(self.tokens) // self.block_tokens
        if complete > len(self.keys):
            self.keys = split_keys(
                request_keys(
                    self.passport,
                    self.tokens[: complete * self.block_tokens],
                    salt=self.salt,
                    public_tokens=self.hint.public_tokens if self.hint.public_salt else 0,
                    public_salt=self.hint.public_salt,
                )
            )


def cache_report_of(sequence: Sequence) -> CacheReport:
    """What the cache did for a sequence so far."""
    asked = sequence.prompt_count // sequence.block_tokens * sequence.block_tokens
    usable = (sequence.prompt_count - 1) // sequence.block_tokens * sequence.block_tokens
    hit = sequence.local_tokens + sequence.loaded_tokens
    outcome = sequence.outcome
    if outcome is CacheOutcome.UNKNOWN or (outcome is CacheOutcome.OFF and hit):
        whole = CacheOutcome.HIT if hit >= usable else CacheOutcome.PARTIAL
        outcome = whole if hit else CacheOutcome.MISS
        if hit < usable and sequence.choice.load_cut:
            outcome = CacheOutcome.LOAD_CUT
        elif hit < usable and sequence.choice.computed_faster:
            outcome = CacheOutcome.COMPUTED_FASTER
    return CacheReport(
        asked_tokens=asked,
        hit_tokens=hit,
        local_tokens=sequence.local_tokens,
        loaded_tokens=sequence.loaded_tokens,
        loaded_bytes=sequence.loaded_bytes,
        staged_bytes=sequence.staged_bytes,
        waited_ms=round(sequence.waited_ms, 3),
        load_ms=round(sequence.load_ms, 3),
        hidden_ms=round(sequence.hidden_ms, 3),
        failed_blocks=sequence.failed_blocks,
        saved_blocks=sequence.saved_blocks,
        held_tokens=min(asked, min(sequence.unsaved, default=sequence.saved) * sequence.block_tokens),
        outcome=outcome,
        reason=sequence.choice.reason,
        loaded_from=sequence.choice.loaded_from,
    )

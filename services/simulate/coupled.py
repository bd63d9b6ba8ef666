"""Coupled engines: every instance prefills and decodes its own requests, as vLLM 0.5.1 does. The baseline of Mooncake.

Idea: an instance is a loop of iterations. Whole prompts: a waiting prompt runs before anything else, alone in
its iteration, and all that are decoding wait for its end (a long gap). Chunked: an iteration is one token
of every running sequence plus a piece of a prompt, up to a budget. Decode iterations between two changes of
the batch differ only by the growth of the KV, so they are one segment (gap, count), not events; the gaps of a
request are the segments between its first and its last token.
Invariants: an iteration that began ends; a request is on one instance; tokens of running requests never exceed
the KV capacity (room for the whole output is taken at the start, so nothing is ever preempted).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mooncache.errors import InvalidArgument
from mooncache.simulate.cache import make
from mooncache.simulate.profile import ModelProfile

if TYPE_CHECKING:
    from mooncache.traces import Trace

TAIL_SHARE = 0.1  # TBT of a request: mean of this share of its gaps, the longest ones


class _Costs:
    """The profile's formulas without the loading of held blocks: what an instance holds is in its own HBM."""

    def __init__(self, profile: ModelProfile) -> None:
        self.fixed_s, self.per_token_s, self.square_s = profile.prefill[:3]
        self.decode = profile.decode

    def prompt_s(self, tokens: int, held: int) -> float:
        """The time of one prompt, or of one chunk that ends at `tokens`."""
        new, square = tokens - held, tokens * tokens - held * held
        return self.fixed_s + self.per_token_s * new + self.square_s * square

    def batch_s(self, sequences: int, kv_tokens: float) -> float:
        """The time that a batch adds to an iteration, beyond reading the weights."""
        return self.decode.per_sequence_s * sequences + self.decode.per_token_s * kv_tokens


@dataclass(frozen=True, slots=True)
class CoupledOptions:
    """chunk_tokens 0: whole prompts first. Prefix cache: blocks in the instance's own HBM, least recently used go.

    sequences_max 1 is how long prompts are served when no other request's gaps may suffer: one request at a time.
    """

    instances: int = 16
    kv_capacity_tokens: int = 1_330_000
    sequences_max: int = 256
    prefix_cache: bool = False
    chunk_tokens: int = 0


@dataclass(slots=True)
class CoupledResult:
    """Columns per request, in the trace's order. `gpu_s` is the computing time of its prompt."""

    ttft_s: NDArray[np.float64]
    tbt_s: NDArray[np.float64]
    gpu_s: NDArray[np.float64]
    cached_tokens: NDArray[np.int64]


@dataclass(slots=True)
class _CoupledPrompt:
    row: int
    arrival_s: float
    tokens: int
    output: int
    held: int = -1  # tokens whose KV is there; -1: not looked up yet


class _Running(NamedTuple):
    """A sequence that decodes."""

    last_step: int
    row: int
    first_step: int
    kv_tokens: int  # at its end
    stalled_s: float  # how much of the wait before its next token lay before its first


@dataclass(slots=True)
class _Instance:
    """One engine: its clock, its queue, its batch, and the gaps of its decode iterations so far."""

    now_s: float = 0.0
    waiting: deque[_CoupledPrompt] = field(default_factory=deque)
    running: list[_Running] = field(default_factory=list)  # a heap
    steps: int = 0  # decode iterations so far
    kv_tokens: float = 0.0  # of the running sequences
    reserved: int = 0  # tokens that running requests may grow to
    stalled_s: float = 0.0  # time since the last decode iteration that went to prompts
    gap_s: list[float] = field(default_factory=list)
    gap_end: list[int] = field(default_factory=list)  # steps at the end of each segment


def simulate_coupled(
    trace: Trace,
    profile: ModelProfile,
    options: CoupledOptions,
    progress: Callable[[int, int], None] | None = None,
) -> CoupledResult:
    """Run the trace through equal coupled instances; each request goes to the one with the fewest requests.

    `progress(done, total)` is called now and then. Raises InvalidArgument when a request fits no instance.
    """
    cluster = _Cluster(trace, profile, options)
    total = len(trace)
    for row in range(total):
        cluster.arrive(row)
        if progress is not None and row % 500 == 0:
            progress(row, total)
    cluster.drain()
    return cluster.result


class _Cluster:
    def __init__(self, trace: Trace, profile: ModelProfile, options: CoupledOptions) -> None:
        total = len(trace)
        self._trace, self._costs, self._options = trace, _Costs(profile), options
        self._turn = count()
        self._instances = [_Instance() for _ in range(options.instances)]
        blocks = options.kv_capacity_tokens // trace.block_tokens if options.prefix_cache else 0
        self._caches = [make("lru", blocks) for _ in range(options.instances)]
        self.result = CoupledResult(
            np.full(total, np.nan), np.zeros(total), np.zeros(total), np.zeros(total, np.int64)
        )

    def arrive(self, row: int) -> None:
        """The request comes at its time: all instances get there, the one with the fewest requests takes it."""
        trace, options = self._trace, self._options
        now_s, tokens = float(trace.arrival_s[row]), int(trace.input_tokens[row])
        output = max(1, int(trace.output_tokens[row]))
        if tokens + output > options.kv_capacity_tokens:
            raise InvalidArgument(
                f"request {row} needs {tokens + output} tokens of KV, an instance has "
                f"{options.kv_capacity_tokens}: choose a larger kv_capacity_tokens"
            )
        for number, instance in enumerate(self._instances):
            self._advance(number, instance, now_s)
        first = next(self._turn) % options.instances
        order = range(first, first + options.instances)
        chosen = min((n % options.instances for n in order), key=self._requests)
        self._instances[chosen].waiting.append(_CoupledPrompt(row, now_s, tokens, output))

    def drain(self) -> None:
        for number, instance in enumerate(self._instances):
            self._advance(number, instance, math.inf)

    def _requests(self, number: int) -> int:
        return len(self._instances[number].waiting) + len(self._instances[number].running)

    def _advance(self, number: int, instance: _Instance, until_s: float) -> None:
        """Run iterations that begin before `until_s`."""
        while instance.now_s < until_s:
            prompt = self._admissible(instance)
            if prompt is not None:
                if self._options.chunk_tokens:
                    self._mixed(number, instance)
                else:
                    self._whole(number, instance, prompt)
            elif instance.running:
                self._decode(instance, until_s)
            else:
                instance.now_s = max(instance.now_s, until_s) if math.isfinite(until_s) else until_s

    def _admissible(self, instance: _Instance) -> _CoupledPrompt | None:
        """The prompt in front of the queue, when a place and room for all its tokens are free."""
        if not instance.waiting or len(instance.running) >= self._options.sequences_max:
            return None
        prompt = instance.waiting[0]
        room = self._options.kv_capacity_tokens - instance.reserved
        return prompt if prompt.tokens + prompt.output <= room else None

    def _look_up(self, number: int, prompt: _CoupledPrompt, now_s: float) -> None:
        if prompt.held >= 0:
            return
        prompt.held = 0
        if self._options.prefix_cache:
            blocks, size = self._trace.blocks(prompt.row), self._trace.block_tokens
            prompt.held = min(self._caches[number].leading(blocks, now_s) * size, prompt.tokens - 1)
        self.result.cached_tokens[prompt.row] = prompt.held

    def _whole(self, number: int, instance: _Instance, prompt: _CoupledPrompt) -> None:
        instance.waiting.popleft()
        self._look_up(number, prompt, instance.now_s)
        seconds = self._costs.prompt_s(prompt.tokens, prompt.held)
        instance.now_s += seconds
        if instance.running:
            instance.stalled_s += seconds
        self.result.gpu_s[prompt.row] = seconds
        self._first_token(number, instance, prompt)

    def _mixed(self, number: int, instance: _Instance) -> None:
        """One iteration of running sequences and pieces of prompts that fill the budget."""
        costs = self._costs
        batch_s = costs.batch_s(len(instance.running), instance.kv_tokens)
        budget = full = max(1, self._options.chunk_tokens - len(instance.running))
        seconds, decoding = costs.fixed_s, len(instance.running)
        ended: list[_CoupledPrompt] = []
        room = self._options.kv_capacity_tokens - instance.reserved
        while budget > 0 and instance.waiting and decoding + len(ended) < self._options.sequences_max:
            prompt = instance.waiting[0]
            room -= prompt.tokens + prompt.output
            if room < 0:
                break
            self._look_up(number, prompt, instance.now_s)
            piece = min(budget, prompt.tokens - prompt.held)
            compute_s = costs.prompt_s(prompt.held + piece, prompt.held) - costs.fixed_s
            self.result.gpu_s[prompt.row] += compute_s + costs.fixed_s * piece / full
            seconds += compute_s
            budget -= piece
            prompt.held += piece
            if prompt.held < prompt.tokens:
                break
            ended.append(instance.waiting.popleft())
        instance.now_s += seconds + batch_s
        self._step(instance, seconds + batch_s, 1)
        for prompt in ended:
            self._first_token(number, instance, prompt)

    def _first_token(self, number: int, instance: _Instance, prompt: _CoupledPrompt) -> None:
        row = prompt.row
        self.result.ttft_s[row] = instance.now_s - prompt.arrival_s
        if self._options.prefix_cache:
            self._caches[number].use(self._trace.blocks(row), instance.now_s)
        if prompt.output > 1:
            last = instance.steps + prompt.output - 1
            kv = prompt.tokens + prompt.output
            joined = _Running(last, row, instance.steps, kv, instance.stalled_s)
            heapq.heappush(instance.running, joined)
            instance.kv_tokens += prompt.tokens
            instance.reserved += kv

    def _decode(self, instance: _Instance, until_s: float) -> None:
        """Iterations until a request ends, or until one ends at `until_s` or later."""
        costs, sequences = self._costs, len(instance.running)
        step_s = costs.decode.base_s + costs.batch_s(sequences, instance.kv_tokens)
        if instance.stalled_s:
            steps, stalled_s, instance.stalled_s = 1, instance.stalled_s, 0.0
        else:
            steps, stalled_s = instance.running[0].last_step - instance.steps, 0.0
            if math.isfinite(until_s):
                steps = min(steps, math.ceil((until_s - instance.now_s) / step_s))
            step_s += costs.decode.per_token_s * sequences * (steps - 1) / 2  # the KV grows
        instance.now_s += step_s * steps  # the prompts' time has passed already
        self._step(instance, stalled_s + step_s, steps)

    def _step(self, instance: _Instance, gap_s: float, steps: int) -> None:
        if not instance.running:
            return
        instance.steps += steps
        instance.kv_tokens += steps * len(instance.running)
        instance.gap_s.append(gap_s)
        instance.gap_end.append(instance.steps)
        while instance.running and instance.running[0].last_step <= instance.steps:
            ended = heapq.heappop(instance.running)
            instance.kv_tokens -= ended.kv_tokens - 1
            instance.reserved -= ended.kv_tokens
            self.result.tbt_s[ended.row] = tail_gap_s(
                instance.gap_s, instance.gap_end, ended.first_step, ended.last_step, ended.stalled_s
            )


def tail_gap_s(gap_s: list[float], gap_end: list[int], first: int, last: int, before_s: float = 0.0) -> float:
    """The mean of the longest tenth (at least one) of the gaps of steps first+1 ... last.

    gap_s[i] holds for the steps after gap_end[i-1] up to gap_end[i]; `before_s` is taken off the first gap.
    """
    low = bisect_right(gap_end, first)
    counts = np.diff(np.minimum(np.asarray(gap_end[low:], dtype=np.int64), last), prepend=first)
    gaps = np.asarray(gap_s[low:])
    gaps[0] -= before_s
    order = np.argsort(-gaps, kind="stable")
    counts = counts[order]
    wanted = max(1, math.ceil((last - first) * TAIL_SHARE))
    taken = np.clip(wanted - (np.cumsum(counts) - counts), 0, counts)
    return float((gaps[order] * taken).sum() / wanted)

"""The engine's thread: takes requests in, runs step after step, hands tokens out.

Idea: everything that changes the scheduler happens on this one thread. Others (HTTP, pool threads) post functions into
its inbox. One turn is: empty the inbox, let sequences start (and send their loads off), compute a step, choose tokens,
send filled blocks off to be saved, hand out what was chosen in one go.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mooncache import tracing
from mooncache.errors import Overloaded
from mooncache.hf_engine.attention import Span
from mooncache.hf_engine.core.blocks import BlockPool
from mooncache.hf_engine.core.scheduler import Scheduler, Work
from mooncache.hf_engine.core.sequence import Sequence, State
from mooncache.hf_engine.metrics import HfMetrics
from mooncache.hf_engine.model_runner import ModelRunner
from mooncache.hf_engine.pool_link import Found, Loaded, PoolLink
from mooncache.hf_engine.sampling import Chosen, choose
from mooncache.kvcache.params import Told
from mooncache.logs import Event, get_logger

_IDLE_S = 0.5
_JOIN_S = 30.0

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Output:
    """What a sequence gives out: one token, or its end. `finish` is "" while it goes on, else stop, length, abort or
    error; `told` comes with the first token and with the end."""

    index: int
    chosen: Chosen | None = None
    finish: str = ""
    stop_id: int | None = None
    told: Told | None = None
    message: str = ""


Deliver = Callable[[list[tuple[Any, Output]]], None]
"""Takes the outputs of one step: (sink, output). Called on the engine's thread."""


def _deliver_here(outputs: list[tuple[Any, Output]]) -> None:
    for sink, output in outputs:
        sink.put(output)


class Engine:
    """See the module's text.

    Args:
        runner: the model.
        batch_max, chunk_tokens, queue_max: see the section `hf`.
        deliver: how outputs leave; by default each goes to its sink's `put`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        metrics: HfMetrics,
        *,
        batch_max: int,
        chunk_tokens: int,
        queue_max: int,
        save_decode_blocks: bool = True,
        deliver: Deliver = _deliver_here,
    ) -> None:
        self.runner, self.metrics, self.deliver = runner, metrics, deliver
        self.queue_max = queue_max
        self.blocks = BlockPool(runner.memory.blocks)
        self.scheduler = Scheduler(self.blocks, batch_max=batch_max, chunk_tokens=chunk_tokens)
        self.pool: PoolLink | None = None
        self._save_decode_blocks = save_decode_blocks
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._outputs: list[tuple[Any, Output]] = []
        self._cancel_lookup: dict[Sequence, Callable[[], None]] = {}
        self._pinned = 0
        self._unfinished = 0
        self._count_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.running.set_function(lambda: len(self.scheduler.running))
        metrics.waiting.set_function(lambda: len(self.scheduler.waiting))
        metrics.usage.set_function(lambda: 1 - self.blocks.free_count / self.blocks.count)
        metrics.pinned.set_function(lambda: self._pinned)

    # --- for other threads -----------------------------------------------------------------------------------

    def start(self, pool: PoolLink | None = None) -> None:
        """Begin to work, with a pool or without."""
        self.pool = pool
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False when the thread has ended: then the process is of no use."""
        return self._thread.is_alive()

    @property
    def unfinished(self) -> int:
        """Sequences that were taken and are not over."""
        return self._unfinished

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Take sequences in; their outputs go to `sequence.sink`.

        Raises:
            Overloaded: as many sequences as may wait are waiting; none was taken.
        """
        batch = list(sequences)
        with self._count_lock:
            if self._unfinished + len(batch) > self.queue_max + self.scheduler.batch_max:
                raise Overloaded(f"{self._unfinished} sequences are under way or waiting; come back later.")
            self._unfinished += len(batch)
        now_s = time.monotonic()
        for sequence in batch:
            sequence.arrived_s = now_s
            sequence.trace = sequence.trace or tracing.current()
        self.post(lambda: self._take(batch))

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Nobody wants these any more: blocks are freed as soon as nothing is written into them."""
        batch = list(sequences)
        self.post(lambda: self._abort(batch))

    def post(self, action: Callable[[], None]) -> None:
        """Run a function on the engine's thread."""
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread; what is unfinished ends as aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    # --- the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        busy = False
        while not self._stopping:
            with self._wake:
                if not self._inbox and not busy and not self._stopping:
                    self._wake.wait(_IDLE_S)
                actions, self._inbox = self._inbox, deque()
            for action in actions:
                action()
            busy = self._turn()
            self._flush()
        self._abort([*self.scheduler.waiting, *self.scheduler.running])
        self._flush()

    def _flush(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self.deliver(outputs)

    def _turn(self) -> bool:
        """Start what can start and compute a step. False when there was nothing to compute."""
        for sequence in self.scheduler.admit():
            self._begin(sequence)
        before = self.scheduler.preemption_count
        work = self.scheduler.plan()
        self.metrics.preemptions.inc(self.scheduler.preemption_count - before)
        if not work:
            return False
        try:
            self._step(work)
        except Exception as error:  # one bad step must not end the engine
            log.error(Event.HF_STEP_FAILED, error=repr(error), exc_info=error)
            for item in work:
                self._end(item.sequence, "error", message=f"the forward pass failed: {type(error).__name__}")
        return True

    def _take(self, batch: list[Sequence]) -> None:
        for sequence in batch:
            self.scheduler.add(sequence)
            if self.pool is None:
                self._looked_up(sequence, Found(trouble="off"))
                continue
            keys = sequence.keys[: sequence.reusable_blocks]
            self._cancel_lookup[sequence] = self.pool.look_up(
                keys,
                sequence.awaited_blocks,
                sequence.ask.wait_ms / 1000 if sequence.awaited_blocks else 0.0,
                lambda found, sequence=sequence: self._looked_up(sequence, found),  # type: ignore[misc]
                sequence.trace,
            )

    def _looked_up(self, sequence: Sequence, found: Found) -> None:
        self._cancel_lookup.pop(sequence, None)
        if sequence.state is not State.LOOKUP:
            return  # aborted meanwhile
        sequence.present = found.present
        sequence.outcome = found.trouble
        sequence.waited_ms = found.waited_s * 1000
        sequence.state = State.WAITING

    def _begin(self, sequence: Sequence) -> None:
        """A sequence got its blocks: fetch those that the pool has, offer those that it lacks."""
        local = sequence.computed // sequence.block_tokens
        if not sequence.preemptions:
            self.metrics.local_queries.inc(sequence.prompt_count)
            self.metrics.local_hits.inc(sequence.computed)
        for number in range(sequence.saved, local):
            if number >= len(sequence.present) or not sequence.present[number]:
                self._save(sequence, number)
        sequence.saved = max(sequence.saved, local)
        if sequence.load:
            assert self.pool is not None
            wanted = list(sequence.load)
            self.pool.load(
                [sequence.keys[number] for number in wanted],
                [sequence.blocks[number] for number in wanted],
                lambda loaded: self._was_loaded(sequence, loaded),
                sequence.trace,
            )

    def _was_loaded(self, sequence: Sequence, loaded: Loaded) -> None:
        failed = len(sequence.load) - loaded.good
        self.scheduler.loaded(sequence, loaded.good)
        tokens = loaded.good * sequence.block_tokens
        if not sequence.preemptions:
            sequence.loaded_tokens += tokens
            sequence.loaded_bytes += loaded.size_bytes
            self.metrics.pool_hits.inc(tokens)
        sequence.failed_blocks += failed
        sequence.load_ms += loaded.elapsed_s * 1000
        sequence.saved = max(sequence.saved, sequence.computed // sequence.block_tokens)
        if failed and not sequence.outcome:
            sequence.outcome = "failed"
        if sequence.cancelled:
            self._end(sequence, "abort")

    def _step(self, work: list[Work]) -> None:
        choosing = [number for number, item in enumerate(work) if item.chooses]
        logits = self.runner.forward(
            [item.sequence.tokens[item.start : item.start + item.count] for item in work],
            [Span(item.sequence.blocks, item.start, item.count) for item in work],
            choosing,
        )
        self.metrics.steps.inc()
        chosen = choose(logits, [work[number].sequence for number in choosing]) if choosing else []
        for item in work:
            for number in self.scheduler.advance(item):
                self._offer(item.sequence, number)
        now_s = time.monotonic()
        for number, token in zip(choosing, chosen, strict=True):
            self._chose(work[number].sequence, token, now_s)

    def _offer(self, sequence: Sequence, number: int) -> None:
        """A block is complete: save it, unless it is known to be there."""
        if number < sequence.saved:
            return
        in_prompt = (number + 1) * sequence.block_tokens <= sequence.prompt_count
        known = number < len(sequence.present) and sequence.present[number] and not sequence.failed_blocks
        if not known and (in_prompt or self._save_decode_blocks):
            self._save(sequence, number)
        sequence.saved = number + 1

    def _save(self, sequence: Sequence, number: int) -> None:
        if self.pool is None:
            sequence.unsaved.add(number)
            return
        block = sequence.blocks[number]

        def done(stored: bool) -> None:
            self._pinned -= 1
            self.blocks.release([block])
            sequence.saved_blocks -= not stored
            if not stored:
                sequence.unsaved.add(number)

        if self.pool.save(sequence.keys[number], block, done, sequence.trace):
            self.blocks.hold(block)
            self._pinned += 1
            sequence.saved_blocks += 1
            sequence.unsaved.discard(number)
        else:
            sequence.unsaved.add(number)

    def _chose(self, sequence: Sequence, chosen: Chosen, now_s: float) -> None:
        sequence.tokens.append(chosen.token)
        self.metrics.generation_tokens.inc()
        told = None
        if sequence.generated == 1:
            sequence.first_token_s = now_s
            self.metrics.ttft.observe(now_s - sequence.arrived_s)
            self.metrics.prompt_tokens.inc(sequence.prompt_count)
            told = told_of(sequence)
        else:
            self.metrics.tbt.observe(now_s - sequence.last_token_s)
        sequence.last_token_s = now_s
        sampling = sequence.sampling
        stopped = chosen.token in sampling.stop_ids and sequence.generated >= sampling.min_tokens
        finish = "stop" if stopped else "length" if sequence.generated >= sampling.max_tokens else ""
        stop_id = chosen.token if stopped else None
        if not finish:
            self._outputs.append((sequence.sink, Output(sequence.index, chosen, told=told)))
        else:
            self._end(sequence, finish, chosen=chosen, stop_id=stop_id)

    def _abort(self, batch: list[Sequence]) -> None:
        for sequence in batch:
            if sequence.state is State.DONE:
                continue
            sequence.cancelled = True
            if cancel := self._cancel_lookup.pop(sequence, None):
                cancel()
            if sequence.state is not State.LOADING:  # then `_was_loaded` ends it
                self._end(sequence, "abort")

    def _end(self, sequence: Sequence, finish: str, message: str = "", **more: Any) -> None:
        if sequence.state is State.DONE:
            return
        self.scheduler.finish(sequence)
        with self._count_lock:
            self._unfinished -= 1
        self.metrics.finished.labels(finish).inc()
        output = Output(sequence.index, finish=finish, told=told_of(sequence), message=message, **more)
        self._outputs.append((sequence.sink, output))


def told_of(sequence: Sequence) -> Told:
    """What the cache did for a sequence so far."""
    asked = sequence.prompt_count // sequence.block_tokens * sequence.block_tokens
    usable = (sequence.prompt_count - 1) // sequence.block_tokens * sequence.block_tokens
    hit = sequence.local_tokens + sequence.loaded_tokens
    outcome = sequence.outcome
    if outcome in {"", "off"} and (hit or not outcome):
        outcome = "hit" if hit and hit >= usable else "partial" if hit else "miss"
    return Told(
        asked_tokens=asked,
        hit_tokens=hit,
        local_tokens=sequence.local_tokens,
        loaded_tokens=sequence.loaded_tokens,
        loaded_bytes=sequence.loaded_bytes,
        waited_ms=round(sequence.waited_ms, 3),
        load_ms=round(sequence.load_ms, 3),
        failed_blocks=sequence.failed_blocks,
        saved_blocks=sequence.saved_blocks,
        held_tokens=min(asked, min(sequence.unsaved, default=sequence.saved) * sequence.block_tokens),
        outcome=outcome,
    )

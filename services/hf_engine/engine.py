"""The engine's thread: takes requests in, runs step after step, hands tokens out.

Idea: everything that changes the scheduler happens on this one thread, and it never waits for the pool. Others post
functions into its inbox; lookups, loads and saves run on threads of mooncache.kvcache, and what ended is taken here.
One turn is: empty the inbox, take what ended, let sequences start (and order their loads), compute a step, order saves
of filled blocks, choose tokens, hand out what was chosen in one go.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from mooncache.errors import Overloaded
from mooncache.hf_engine.attention import TokenSpan
from mooncache.hf_engine.core.blocks import BlockPool
from mooncache.hf_engine.core.jobs import begin_verifying, job_of
from mooncache.hf_engine.core.scheduler import BatchScheduler, Work
from mooncache.hf_engine.core.sequence import FinishReason, Sequence, State, cache_report_of
from mooncache.hf_engine.metrics import HfMetrics
from mooncache.hf_engine.model_runner import ModelRunner
from mooncache.hf_engine.output import Output
from mooncache.hf_engine.sampling import SampledToken, choose
from mooncache.kvcache.core.break_even import BreakEven
from mooncache.kvcache.core.shadow import ShadowSampler
from mooncache.kvcache.core.streaming import EngineMemory, Streaming, WaitPlace
from mooncache.kvcache.core.weighing import LoadWeighing, ShardLoad
from mooncache.kvcache.engine_pool import EnginePool
from mooncache.kvcache.leg_hint import CacheOutcome
from mooncache.kvcache.lookup import TIMEOUT_S, LookupOutcome, LookupRequest
from mooncache.kvcache.transfers import LoadReport, MoveFailure, SaveReport, TransferJob
from mooncache.runtime import tracing
from mooncache.runtime.logs import Event, get_logger

_IDLE_S = 0.1
_JOIN_S = 30.0

log = get_logger(__name__)


Deliver = Callable[[list[tuple[object, Output]]], None]
"""Takes the outputs of one step: (sink, output). Called on the engine's thread."""


def _deliver_here(outputs: list[tuple[Any, Output]]) -> None:
    for sink, output in outputs:
        sink.put(output)


class Engine:
    """Runs the model's steps on one thread.

    Args:
        runner: the model.
        batch_max, chunk_tokens, queue_max: see the section `hf`.
        deliver: how outputs leave; by default each goes to its sink's `put`.
        break_even: weighs loading against computing; None: everything that the pool has is loaded.
        streaming: decides which loads are streamed; None: none is.
        shadow: decides which hits are computed to verify the pool's blocks; None: none is.
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
        break_even: BreakEven | None = None,
        streaming: Streaming | None = None,
        shadow: ShadowSampler | None = None,
        deliver: Deliver = _deliver_here,
    ) -> None:
        self.runner, self.metrics, self.deliver = runner, metrics, deliver
        self.queue_max = queue_max
        self.blocks = BlockPool(runner.memory.blocks)
        self.break_even = break_even
        self.weighing = LoadWeighing(break_even) if break_even is not None else None
        self.streaming = streaming
        self._shadow, self._rng = shadow, random.Random()
        self._streams = 0
        self.scheduler = BatchScheduler(
            self.blocks, batch_max=batch_max, chunk_tokens=chunk_tokens, blocks_to_load=self._blocks_to_load
        )
        self.pool: EnginePool | None = None
        self.changed = threading.Event()
        self._save_decode_blocks = save_decode_blocks
        self._inbox: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._outputs: list[tuple[Any, Output]] = []
        self._numbers = itertools.count()
        self._asking: dict[str, Sequence] = {}
        self._loading: dict[str, Sequence] = {}
        self._saving: dict[str, tuple[Sequence, list[int], TransferJob]] = {}
        self._pinned = 0
        self._unfinished = 0
        self._count_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.running.set_function(lambda: len(self.scheduler.running))
        metrics.waiting.set_function(lambda: len(self.scheduler.waiting))
        metrics.usage.set_function(lambda: 1 - self.blocks.free_count / self.blocks.count)
        metrics.pinned.set_function(lambda: self._pinned)

    # --- for other threads -----------------------------------------------------------------------------------

    def start(self, pool: EnginePool | None = None) -> None:
        """Begin to work, with a pool that sets `changed` or without."""
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
                raise Overloaded(f"{self._unfinished} sequences are running or waiting; try again later.")
            self._unfinished += len(batch)
        now_s = time.monotonic()
        for sequence in batch:
            sequence.arrived_s = now_s
            sequence.trace = sequence.trace or tracing.current()
        self.post(lambda: self._take(batch))

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """These are no longer wanted: blocks are freed as soon as nothing is written into them."""
        batch = list(sequences)
        self.post(lambda: self._abort(batch))

    def abort_all(self) -> None:
        """The process ends: sequences that have not ended are aborted, and their requests get an error."""
        self.post(self._abort_all)

    def post(self, action: Callable[[], None]) -> None:
        """Run a function on the engine's thread."""
        self._inbox.append(action)
        self.changed.set()

    def stop(self) -> None:
        """End the thread; what is unfinished ends as aborted."""
        self._stopping = True
        self.changed.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    # --- the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        busy = False
        while not self._stopping:
            if not busy:
                self.changed.wait(_IDLE_S)
            self.changed.clear()
            for _ in range(len(self._inbox)):
                self._inbox.popleft()()
            self._take_ended()
            busy = self._turn()
            self._flush()
        self._abort_all()
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
                text = f"the forward pass failed: {type(error).__name__}"
                self._end(item.sequence, FinishReason.ERROR, message=text)
        return True

    def _take(self, batch: list[Sequence]) -> None:
        for sequence in batch:
            sequence.name = f"r{next(self._numbers)}"
            self.scheduler.add(sequence)
            if self.pool is None:
                self._looked_up(sequence, (), CacheOutcome.OFF, 0.0)
            elif not self.pool.link.usable and not sequence.awaited_blocks:
                self._looked_up(sequence, (), LookupOutcome.ABSENT.reported(), 0.0)
            else:
                awaited, now_s = sequence.awaited_blocks, time.monotonic()
                if awaited and self.weighing is not None:
                    awaited = self.weighing.worth_awaiting(sequence.choice, sequence.hint, 0, awaited, now_s)
                sequence.wait_until_s = now_s + (sequence.hint.wait_s if awaited else 0.0)
                if awaited and self._streams_load(sequence):
                    sequence.promise_end = sequence.awaited_blocks  # the load waits
                    self._ask(sequence, 0)
                else:
                    self._ask(sequence, awaited)

    def _ask(self, sequence: Sequence, awaited: int) -> None:
        assert self.pool is not None
        limit_s = TIMEOUT_S
        # Who waits for another instance has the time of that wait.
        if self.weighing is not None and not awaited and not sequence.promise_end:
            limit_s = self.weighing.known.ask_s(sequence.reusable_blocks)
        self._asking[sequence.name] = sequence
        question = LookupRequest(
            sequence.name,
            b"".join(sequence.keys[: sequence.reusable_blocks]),
            awaited,
            sequence.wait_until_s,
            sequence.trace,
            node=sequence.hint.store_node if awaited else "",
            limit_s=limit_s,
            with_places=self.weighing is not None,
            session_token=sequence.hint.session_token,
        )
        self.pool.lookups.ask(question)

    def _streams_load(self, sequence: Sequence) -> bool:
        """Whether the load waits for awaited blocks, or the lookup before it."""
        place = self._wait_place(sequence, sequence.awaited_blocks)
        if place is not WaitPlace.STREAMED:
            self.metrics.awaiting.labels(place).inc()
        return place is WaitPlace.STREAMED

    def _wait_place(self, sequence: Sequence, blocks: int) -> WaitPlace:
        if self.streaming is None:
            return WaitPlace.OFF
        if self.pool is None or not self.pool.link.usable:
            return WaitPlace.NO_POOL
        weighing = self.weighing
        if weighing is not None and not weighing.pays(sequence.choice, sequence.hint, 0, blocks):
            return WaitPlace.NO_GAIN
        # A stream also takes a place of the batch. The last one is for sequences that compute.
        has_place = len(self.scheduler.running) + 1 < self.scheduler.batch_max
        memory = EngineMemory(self.blocks.free_count if has_place else 0, self.blocks.count)
        limit_s = sequence.wait_until_s - time.monotonic()
        return self.streaming.place(
            blocks,
            limit_s=limit_s,
            memory=memory,
            streams=self._streams,
            expected_s=sequence.hint.expected_s,
        )

    def _take_ended(self) -> None:
        """Answers of the pool, and loads and saves that ended."""
        if self.pool is None:
            return
        for name, sequence in list(self._asking.items()):
            answer = self.pool.lookups.take(name)
            if answer is not None:
                del self._asking[name]
                sequence.choice.places = tuple((place,) for place in answer.places)
                sequence.choice.reason = answer.reason or sequence.choice.reason
                self._looked_up(sequence, answer.present, answer.outcome.reported(), answer.waited_s)
        for loaded in self.pool.mover.take_loads():
            self._was_loaded(self._loading.pop(loaded.name), loaded)
        for saved in self.pool.mover.take_saves():
            self._was_saved(saved)

    def _looked_up(
        self, sequence: Sequence, present: tuple[bool, ...], outcome: CacheOutcome, waited_s: float
    ) -> None:
        if self.pool is not None:
            self.metrics.lookups.labels(outcome or "answered").inc()
        sequence.present = present
        sequence.outcome = outcome
        sequence.waited_ms += waited_s * 1000
        if sequence.promise_end:
            is_answered = outcome is CacheOutcome.UNKNOWN
            if is_answered and all(map(sequence.in_pool, range(sequence.promise_end))):
                sequence.promise_end = 0
            elif not is_answered or not self._streams_load(sequence):
                sequence.promise_end = 0
                self._ask(sequence, sequence.awaited_blocks)
                return
        sequence.state = State.WAITING

    def _begin(self, sequence: Sequence) -> None:
        """A sequence got its blocks: fetch those that the pool has, offer those that it lacks."""
        local = sequence.computed // sequence.block_tokens
        if not sequence.preemptions:
            self.metrics.local_queries.inc(sequence.prompt_count)
            self.metrics.local_hits.inc(sequence.computed)
        held = range(sequence.saved, local)
        self._save(sequence, [number for number in held if not sequence.in_pool(number)])
        sequence.saved = max(sequence.saved, local)
        if sequence.load:
            assert self.pool is not None
            self._loading[sequence.name] = sequence
            job = job_of(sequence.name, sequence, sequence.load)
            if self.weighing is not None:
                load, hint = sequence.load, sequence.hint
                job = replace(job, pace=self.weighing.pace(sequence.choice, hint, load.start, load.stop))
            if sequence.promise_end:
                awaited = (at for at, number in enumerate(sequence.load) if not sequence.in_pool(number))
                await_s = max(0.0, sequence.wait_until_s - time.monotonic())
                job = replace(job, awaited=tuple(awaited), await_s=await_s)
                self._streams += 1
                self.metrics.awaiting.labels(WaitPlace.STREAMED).inc()
            self.pool.mover.load(job)

    def _blocks_to_load(self, sequence: Sequence, found: int) -> int:
        """How many of the blocks that the pool has to load; what computing gives sooner is computed."""
        first, now_s = sequence.computed // sequence.block_tokens, time.monotonic()
        if self._shadow is not None and begin_verifying(
            sequence, found, self._shadow, now_s, self._rng.random()
        ):
            self.metrics.shadow_tokens.inc(found * sequence.block_tokens)
            return 0
        if self.weighing is None:
            return found
        load_end, spared = self.weighing.weigh(sequence.choice, sequence.hint, first, first + found, now_s)
        if spared:
            label = CacheOutcome.COMPUTED_FASTER
            self.metrics.break_even_tokens.labels(label).inc(spared * sequence.block_tokens)
        return load_end - first

    def _was_loaded(self, sequence: Sequence, report: LoadReport) -> None:
        missing = len(report.blocks) - report.loaded
        cut = report.reason is MoveFailure.TOO_SLOW
        failed = 0 if cut or report.reason in {MoveFailure.CANCELLED, MoveFailure.NOT_COME} else missing
        if self.weighing is not None:
            measured = {0: ShardLoad(report.loaded, report.transfer_s, is_cut=cut)}
            load = sequence.load
            self.weighing.loaded(sequence.choice, sequence.hint, load.start, load.stop, measured)
        if self.streaming is not None and not missing:
            self.streaming.loaded(report.loaded, report.transfer_s)
        if sequence.promise_end:
            self._streams -= 1
            sequence.promise_end = 0
            sequence.learned(sequence.load, report.loaded)
        if cut:
            sequence.choice.was_cut(report.loaded, len(report.blocks), report.transfer_s)
            self.metrics.break_even_tokens.labels(CacheOutcome.LOAD_CUT).inc(missing * sequence.block_tokens)
        self.runner.memory.clear(report.blocks[report.loaded :])
        self.metrics.loaded(failed, report)
        self.scheduler.loaded(sequence, report.loaded)
        tokens = report.loaded * sequence.block_tokens
        if not sequence.preemptions:
            sequence.loaded_tokens += tokens
            sequence.loaded_bytes += report.loaded_bytes
            sequence.staged_bytes += report.staged_bytes
            self.metrics.pool_hits.inc(tokens)
        sequence.failed_blocks += failed
        sequence.load_ms += report.transfer_s * 1000
        sequence.waited_ms += report.waited_s * 1000
        sequence.hidden_ms += report.hidden_s * 1000
        sequence.saved = max(sequence.saved, sequence.computed // sequence.block_tokens)
        if failed and sequence.outcome is CacheOutcome.UNKNOWN:
            sequence.outcome = CacheOutcome.FAILED
        elif report.reason is MoveFailure.NOT_COME and sequence.outcome is CacheOutcome.UNKNOWN:
            sequence.outcome = CacheOutcome.TIMEOUT
        if sequence.cancelled:
            self._end(sequence, FinishReason.ABORT)

    def _step(self, work: list[Work]) -> None:
        begun_s = time.monotonic()
        choosing = [number for number, item in enumerate(work) if item.chooses]
        logits = self.runner.forward(
            [item.sequence.tokens[item.start : item.start + item.count] for item in work],
            [TokenSpan(item.sequence.blocks, item.start, item.count) for item in work],
            choosing,
        )
        self.metrics.steps.inc()
        chosen = choose(logits, [work[number].sequence for number in choosing]) if choosing else []
        for item in work:
            self._offer(item.sequence, self.scheduler.advance(item))
        now_s = time.monotonic()
        if self.break_even is not None:
            ends = [(item.start, min(item.start + item.count, item.sequence.prompt_count)) for item in work]
            self.break_even.computed(sum(max(0, end - start) for start, end in ends), now_s - begun_s)
        for number, token in zip(choosing, chosen, strict=True):
            self._chose(work[number].sequence, token, now_s)

    def _offer(self, sequence: Sequence, completed: range) -> None:
        """Save complete blocks, unless the pool is known to have them."""
        end = completed.stop
        if not self._save_decode_blocks:
            end = min(end, sequence.prompt_count // sequence.block_tokens)
        fresh = range(max(completed.start, sequence.saved), end)
        self._save(sequence, [n for n in fresh if n < sequence.verify_end], verify=True)
        self._save(sequence, [n for n in fresh if sequence.failed_blocks or not sequence.in_pool(n)])
        sequence.saved = max(sequence.saved, completed.stop)

    def _save(self, sequence: Sequence, numbers: list[int], *, verify: bool = False) -> None:
        """Hand blocks to the mover, as many as saves may hold; the pool does not get the others. Or to the verifier."""
        room = 0
        if self.pool is not None and self.pool.link.usable:
            room = max(0, self.pool.saved_blocks_max - self._pinned)
            self.metrics.saves.labels("queue_full").inc(len(numbers[room:]))
        sequence.unsaved.difference_update(numbers[:room])
        sequence.unsaved.update(numbers[room:])
        if self.pool is not None and numbers[room:]:
            self.pool.mover.give_up(job_of("", sequence, numbers[room:]))
        numbers = numbers[:room]
        if self.pool is None or not numbers:
            return
        job = job_of(f"s{next(self._numbers)}", sequence, numbers)
        for block in job.blocks:
            self.blocks.hold(block)
        self._pinned += len(numbers)
        sequence.saved_blocks += len(numbers)
        self._saving[job.name] = (sequence, numbers, job)
        if verify and self.pool.verifier is not None:
            self.pool.verifier.check(job)
        else:
            self.pool.mover.save(job)

    def _was_saved(self, report: SaveReport) -> None:
        sequence, numbers, job = self._saving.pop(report.name)
        self._pinned -= len(numbers)
        self.blocks.release(job.blocks)
        lost = set(numbers) - {numbers[position] for position in report.stored}
        sequence.saved_blocks -= len(lost)
        sequence.unsaved |= lost
        self.metrics.saved(report)
        self.metrics.saves.labels("stored").inc(len(report.stored))
        self.metrics.saves.labels("failed").inc(len(lost))

    def _chose(self, sequence: Sequence, chosen: SampledToken, now_s: float) -> None:
        sequence.tokens.append(chosen.token)
        self.metrics.generation_tokens.inc()
        cache = None
        if sequence.generated == 1:
            sequence.first_token_s = now_s
            self.metrics.first_token(now_s - sequence.arrived_s, sequence.trace)
            self.metrics.prompt_tokens.inc(sequence.prompt_count)
            cache = cache_report_of(sequence)
        else:
            self.metrics.next_token(now_s - sequence.last_token_s, sequence.trace)
        sequence.last_token_s = now_s
        sampling = sequence.sampling
        stopped = chosen.token in sampling.stop_ids and sequence.generated >= sampling.min_tokens
        if stopped:
            self._end(sequence, FinishReason.STOP, chosen=chosen, stop_id=chosen.token)
        elif sequence.generated >= sampling.max_tokens:
            self._end(sequence, FinishReason.LENGTH, chosen=chosen)
        else:
            self._outputs.append((sequence.sink, Output(sequence.index, chosen, cache=cache)))

    def _abort(self, batch: list[Sequence]) -> None:
        for sequence in batch:
            if sequence.state is State.DONE:
                continue
            sequence.cancelled = True
            self._asking.pop(sequence.name, None)
            if self.pool is not None:
                self.pool.lookups.withdraw(sequence.name)
                self.pool.mover.cancel(sequence.name)
            if sequence.state is not State.LOADING:  # then `_was_loaded` ends it
                self._end(sequence, FinishReason.ABORT)

    def _abort_all(self) -> None:
        self._abort([*self.scheduler.waiting, *self.scheduler.running])

    def _end(
        self,
        sequence: Sequence,
        finish: FinishReason,
        *,
        message: str = "",
        chosen: SampledToken | None = None,
        stop_id: int | None = None,
    ) -> None:
        if sequence.state is State.DONE:
            return
        self.scheduler.finish(sequence)
        with self._count_lock:
            self._unfinished -= 1
        self.metrics.finished.labels(finish).inc()
        output = Output(sequence.index, chosen, finish, stop_id, cache_report_of(sequence), message)
        self._outputs.append((sequence.sink, output))

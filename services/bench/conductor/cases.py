"""A conductor with many instances and a full index, and the time of its decisions.

The load: conversations share a system prompt of an eighth of the prompt. Every instance holds the system
prompt and prefixes of conversations drawn at random, each of a length drawn uniformly up to the whole, until
its share of the index is full. Requests ask for conversations in random order; a number of them are in flight
at any time, so that queues, waits and the table of running requests are part of what is measured.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mooncache.client.keys import KEY_BYTES
from mooncache.conductor.core.decisions import PoolAnswer, PoolState, SchedulingRequest
from mooncache.conductor.core.progress import Phase, ProgressReport
from mooncache.conductor.core.records import DecisionState
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.ops import schedule
from mooncache.conductor.shell.pool import PoolLookup
from mooncache.conductor.state import ConductorState
from mooncache.config import Config, load
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.reporting.rows import Report, bar_row, describe_machine, describe_versions
from mooncache.runtime.clock import SystemClock
from mooncache.runtime.metrics import Metrics
from mooncache.runtime.rpc import CallContext

Progress = Callable[[str], None]
MODEL = "bench"
BAR_MS = 1.0  # of the median, with up to a hundred instances
BAR_INSTANCES = 100
BAR_P99_MS = 5.0  # with a thousand


@dataclass(frozen=True, slots=True)
class ConductorBenchOptions:
    """Sizes of the run. A decision is timed alone, `decisions` times."""

    prompt_tokens: int = 128 * 1024
    block_sizes: tuple[int, ...] = (16, 64)
    prefill_instances: int = 48
    decode_instances: int = 16
    index_blocks: int = 1_000_000
    conversations: int = 64
    in_flight: int = 64
    decisions: int = 2000
    seed: int = 1


FINISHED = ProgressReport(Phase.FINISHED, output_tokens=1)


class _Pool(PoolLookup):
    """A pool that answers at once: it holds a fixed share of every prompt."""

    def __init__(self, config: Config, clock: SystemClock, blocks: int) -> None:
        super().__init__(config, "", clock)
        self._blocks = blocks

    async def match(self, keys: bytes, tenant: str = "") -> PoolAnswer:
        return PoolAnswer(PoolState.OK, min(self._blocks, len(keys) // KEY_BYTES), 1e-6)


class Bench:
    """One filled conductor. `chains` are the conversations' keys."""

    def __init__(self, options: ConductorBenchOptions, block_tokens: int, folder: Path) -> None:
        self.options, self.block_tokens = options, block_tokens
        self.rng = random.Random(options.seed)
        config = load(
            env={},
            overrides={
                "cluster.state_dir": str(folder),
                "conductor.admission_enabled": False,
                "conductor.suspect_after_s": 300,
                "conductor.lease_s": 600,
            },
        )
        self.clock = SystemClock()
        self.blocks = options.prompt_tokens // block_tokens
        pool = _Pool(config, self.clock, self.blocks // 2)
        self.state = ConductorState(
            config, clock=self.clock, pool=pool, metrics=Metrics("conductor"), rng=random.Random(2)
        )
        shared = self.rng.randbytes(self.blocks // 8 * KEY_BYTES)
        own = (self.blocks - self.blocks // 8) * KEY_BYTES
        self.chains = [shared + self.rng.randbytes(own) for _ in range(options.conversations)]
        self._fill()

    def _fill(self) -> None:
        options, core = self.options, self.state.core
        total = options.prefill_instances + options.decode_instances
        each = options.index_blocks // total
        for number in range(total):
            prefills = number < options.prefill_instances
            role = InstanceRole.PREFILL if prefills else InstanceRole.DECODE
            info = InstanceInfo(
                f"{role}-{number}",
                1,
                role,
                MODEL,
                block_tokens=self.block_tokens,
                kv_bytes_per_token=131_072,
                kv_capacity_tokens=100 * options.prompt_tokens,
                max_sequences=1024,
                max_model_tokens=4 * options.prompt_tokens,
                group=1,
            )
            instance = core.register(info, InstanceState.READY, self.clock.now_s())
            busy = InstanceLoad(running=self.rng.randrange(32), kv_usage=self.rng.random(), tbt_ms=30.0)
            core.report(instance, InstanceState.READY, busy, "", self.clock.now_s())
            left, parts = each, []
            while left > self.blocks:
                chain = self.rng.choice(self.chains)
                length = self.rng.randrange(1, self.blocks)
                parts.append(chain[: length * KEY_BYTES])
                left -= length
            parts.append(self.rng.randbytes(left * KEY_BYTES))
            core.cache.apply(
                instance, full=True, stored=b"".join(parts), removed=b"", sequence=1, keys_max=1 << 30
            )

    def ask(self, number: int) -> SchedulingRequest:
        """A request for a random conversation. The keys are copied: a real message brings its own."""
        keys = bytes(bytearray(self.rng.choice(self.chains)))
        return SchedulingRequest(f"r{number}", MODEL, self.options.prompt_tokens, "t", keys, group=1)

    def decisions_s(self) -> tuple[list[float], list[float]]:
        """Times of the decision alone (index, policy, counting, record): by the clock, and of the processor."""
        core, now_s = self.state.core, self.clock.now_s
        pool = PoolAnswer(PoolState.OK, self.blocks // 2, 1e-6)
        running: deque[str] = deque()
        times, busy = [], []
        for number in range(self.options.decisions):
            ask = self.ask(number)
            started_s, begun_s = time.perf_counter(), time.thread_time()
            decision = core.schedule(ask, pool, now_s(), 0.0)
            times.append(time.perf_counter() - started_s)
            busy.append(time.thread_time() - begun_s)
            core.keep_candidates(decision.record)
            running.append(decision.decision_id)
            if len(running) > self.options.in_flight:
                core.report_progress(running.popleft(), FINISHED, now_s())
        return times, busy

    async def ops_s(self) -> list[float]:
        """Times of the whole Schedule op: message in, message out, without network and pool."""
        state, times = self.state, []
        running: deque[str] = deque()
        for number in range(self.options.decisions):
            ask = self.ask(number)
            raw = pb.ScheduleRequest(
                request_id=f"o{number}",
                tenant="t",
                model=MODEL,
                prompt_tokens=ask.prompt_tokens,
                keys=ask.keys,
            ).SerializeToString()
            started_s = time.perf_counter()
            now_s = self.clock.now_s()
            context = CallContext("default", True, f"o{number}", now_s + 10, now_s)
            response = await schedule.handle(state, pb.ScheduleRequest.FromString(raw), context)
            response.SerializeToString()
            times.append(time.perf_counter() - started_s)
            await state.work_off()
            running.append(response.decision_id)
            if len(running) > self.options.in_flight:
                state.core.report_progress(running.popleft(), FINISHED, now_s)
        return times

    def afterwards_s(self) -> list[float]:
        """Times of what is done after the answer: explain the misses, remember the blocks."""
        times = []
        pool = PoolAnswer(PoolState.OK, self.blocks // 2, 1e-6)
        for number in range(max(1, self.options.decisions // 10)):
            ask = self.ask(number)
            ask = SchedulingRequest(
                f"e{number}", MODEL, ask.prompt_tokens, "t", ask.keys, ask.keys[::-1], group=1
            )
            decision = self.state.core.schedule(ask, pool, self.clock.now_s(), 0.0)
            started_s = time.perf_counter()
            self.state.core.keep_candidates(decision.record)
            self.state.core.outcomes.explain(decision.record, ask, pool, 1, self.block_tokens)
            self.state.core.seen.learn(ask.keys, ask.content_keys, 1)
            times.append(time.perf_counter() - started_s)
            self.state.core.close(decision.decision_id, DecisionState.FINISHED, self.clock.now_s())
        return times

    def index_s(self) -> tuple[list[float], list[float]]:
        """Times of one report of a prompt's blocks, and of one look-up of a prompt, both of the index of caches."""
        core, updates, lookups = self.state.core, [], []
        instance = core.registry.get("prefill-0")
        assert instance is not None
        for number in range(max(10, self.options.decisions // 10)):
            keys = self.rng.randbytes(self.blocks * KEY_BYTES)
            began_s = time.perf_counter()
            core.cache.apply(
                instance, full=False, stored=keys, removed=b"", sequence=number + 2, keys_max=1 << 30
            )
            middle_s = time.perf_counter()
            core.cache.leading(self.chains[number % len(self.chains)])
            updates.append(middle_s - began_s)
            lookups.append(time.perf_counter() - middle_s)
        return updates, lookups


def quantile_ms(times_s: list[float], share: float) -> float:
    """The value below which this share of the times lies, in milliseconds."""
    ordered = sorted(times_s)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


def run(options: ConductorBenchOptions, progress: Progress) -> Report:
    """Measure; rows for each block size."""
    report = Report("conductor", machine=describe_machine(), versions=describe_versions(["mooncache"]))
    instances = options.prefill_instances + options.decode_instances
    report.notes.append(
        f"{options.prefill_instances} prefill and {options.decode_instances} decode instances, "
        f"{options.index_blocks:,} blocks in their caches, {options.conversations} conversations that share an eighth, "
        f"{options.in_flight} requests in flight, {options.decisions} decisions"
    )
    for block_tokens in options.block_sizes:
        with TemporaryDirectory() as folder:
            keys = options.prompt_tokens // block_tokens
            label = f"{options.prompt_tokens // 1024}k tokens, {keys} keys, {instances} instances"
            progress(f"filling the index, block {block_tokens}")
            bench = Bench(options, block_tokens, Path(folder))
            progress(f"decisions, block {block_tokens}")
            times, busy = bench.decisions_s()
            few = instances <= BAR_INSTANCES
            report.add(
                bar_row(
                    f"decision p50: {label}", quantile_ms(times, 0.5), "ms", at_most=BAR_MS if few else None
                ),
                bar_row(f"decision p99: {label}", quantile_ms(times, 0.99), "ms", at_most=BAR_P99_MS),
                bar_row(f"decision p99, processor time: {label}", quantile_ms(busy, 0.99), "ms"),
            )
            progress(f"whole op, block {block_tokens}")
            times = asyncio.run(bench.ops_s())
            report.add(
                bar_row(f"Schedule op p50: {label}", quantile_ms(times, 0.5), "ms"),
                bar_row(f"Schedule op p99: {label}", quantile_ms(times, 0.99), "ms"),
            )
            updates, lookups = bench.index_s()
            report.add(
                bar_row(f"index update p50, {keys} blocks: {label}", quantile_ms(updates, 0.5), "ms"),
                bar_row(f"index lookup p50: {label}", quantile_ms(lookups, 0.5), "ms"),
            )
            times = bench.afterwards_s()
            report.add(bar_row(f"after the answer p50: {label}", quantile_ms(times, 0.5), "ms"))
    return report

"""What a worker exports beside the engine's own page: read from the state on demand."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mooncache.runtime.supervision import RunState
from mooncache.worker.state import WorkerCounter, WorkerState

PREFIX = "mooncache_worker_"
_COUNTERS = {
    WorkerCounter.REPORTS: "Reports that the conductor took.",
    WorkerCounter.REGISTRATIONS: "Registrations with the conductor.",
    WorkerCounter.CONDUCTOR_CALL_FAILURES: "Calls to the conductor that failed.",
    WorkerCounter.SCRAPE_FAILURES: "Readings of the engine's metrics that failed.",
    WorkerCounter.REPLAY_TIMEOUTS: "Replays of cache events that did not finish in time.",
    WorkerCounter.ENDED_LEGS: "Decode legs of which the engine said what its cache did.",
    WorkerCounter.ENDED_LEGS_LOST: "Those that the conductor never heard of, because too many waited.",
    WorkerCounter.LEG_REPORTS_INVALID: "Reports of legs that could not be read.",
}


class WorkerCollector(Collector):
    """Counters and gauges of one worker, without labels: a worker has one engine."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not ask for values when this collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        state, cache, load = self._state, self._state.cache, self._state.load
        for counter, text in _COUNTERS.items():
            yield CounterMetricFamily(PREFIX + counter, text, value=state.counters[counter])
        counters = (
            ("engine_starts", "Starts of the engine.", state.supervision.starts),
            ("event_batches_seen", "Batches of cache events received.", state.stream.seen),
            ("event_batches_lost", "Batches that were missed and could not be replayed.", state.stream.lost),
            ("event_batches_replayed", "Batches received by replay.", state.stream.replayed),
            ("engine_prompt_tokens", "Prompt tokens of the engine.", load.prompt_tokens_total),
            ("engine_output_tokens", "Tokens that the engine generated.", load.output_tokens_total),
            (
                "engine_local_hit_tokens",
                "Prompt tokens from the engine's own cache.",
                load.local_hit_tokens_total,
            ),
            ("engine_pool_hit_tokens", "Prompt tokens from the pool.", load.pool_hit_tokens_total),
            ("events_invalid", "Cache events that could not be parsed.", state.invalid_events),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        gauges: tuple[tuple[str, str, float], ...] = (
            ("engine_up", "1 while the engine is healthy.", state.supervision.state == RunState.READY),
            ("draining", "1 while the instance takes no new requests.", state.draining),
            ("requests_running", "Requests that the engine runs.", load.running),
            ("requests_waiting", "Requests that wait in the engine.", load.waiting),
            ("kv_usage_ratio", "Share of the engine's KV memory in use.", load.kv_usage),
            ("ttft_seconds", "Mean time to the first token over the last seconds.", load.ttft_ms / 1e3),
            ("tbt_seconds", "Mean time between tokens over the last seconds.", load.tbt_ms / 1e3),
            ("cached_blocks", "Blocks known in the engine's own cache.", len(cache) if cache else 0),
            (
                "blocks_without_parent",
                "Blocks left out because their parent is not known, in this run of the engine.",
                cache.unknown_parent_count if cache else 0,
            ),
            (
                "blocks_without_key",
                "Blocks left out because they depend on more than tokens, in this run of the engine.",
                cache.not_ours_count if cache else 0,
            ),
        )
        for name, text, reading in gauges:
            yield GaugeMetricFamily(PREFIX + name, text, value=float(reading))

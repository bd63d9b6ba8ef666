"""Numbers that the engine publishes at /metrics, under the names that vLLM uses with another prefix.

mooncache_hf_num_requests_running            gauge      sequences that hold KV blocks
mooncache_hf_num_requests_waiting            gauge      sequences that wait for room or for the pool
mooncache_hf_kv_cache_usage_perc             gauge      share of KV blocks in use, 0 to 1
mooncache_hf_time_to_first_token_seconds     histogram  from arrival to the first token
mooncache_hf_inter_token_latency_seconds     histogram  between two tokens of a sequence
mooncache_hf_prompt_tokens_total             counter    prompt tokens of finished prefills, cached ones included
mooncache_hf_generation_tokens_total         counter    tokens chosen
mooncache_hf_prefix_cache_queries_total      counter    prompt tokens that were looked for in the own cache
mooncache_hf_prefix_cache_hits_total         counter    prompt tokens found in the own cache
mooncache_hf_pool_hits_total                 counter    prompt tokens loaded from the pool
mooncache_hf_pool_loaded_bytes_total, _pool_load_seconds, _pool_load_failed_blocks_total
mooncache_hf_pool_load_path_bytes_total{path}, _pool_save_path_bytes_total{path}: in place, or staged
mooncache_hf_pool_lookups_total{outcome}, _pool_saves_total{outcome}, _pool_errors_total{what,code}
mooncache_hf_awaiting_requests_total{place}  counter    that waited for blocks of another instance, by where
mooncache_hf_break_even_tokens_total{reason} counter    tokens that the pool had, computed because loading was slower
mooncache_hf_shadow_blocks_total{outcome}    counter    computed to verify the pool's: same, different, unchecked
mooncache_hf_shadow_tokens_total             counter    prompt tokens of the hits that were verified
mooncache_hf_shadow_distance                 histogram  kvcache/distance.py
mooncache_hf_preemptions_total, _requests_finished_total{reason}, _steps_total
mooncache_hf_client_…                        counter    the pool's client by way, RDMA port and node: client/figures.py
mooncache_hf_kv_blocks_pinned                gauge      blocks held by saves under way
"""

from __future__ import annotations

from prometheus_client import Counter

from mooncache.kvcache.distance import DISTANCES
from mooncache.kvcache.in_place import PATH_TEXT, by_path
from mooncache.kvcache.transfers import LoadReport, SaveReport
from mooncache.kvcache.verifier import ShadowReport
from mooncache.runtime.metrics import Metrics, observe
from mooncache.runtime.tracing import TraceContext

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TBT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)


class HfMetrics:
    """The engine's metrics."""

    def __init__(self) -> None:
        self.registry = make = Metrics("hf")
        self.running = make.gauge("num_requests_running", "Sequences that hold KV blocks.")
        self.waiting = make.gauge("num_requests_waiting", "Sequences that wait for blocks.")
        self.usage = make.gauge("kv_cache_usage_perc", "Share of KV blocks in use.")
        self.pinned = make.gauge("kv_blocks_pinned", "Blocks held by running saves.")
        self.ttft = make.histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", buckets=_TTFT_S
        )
        self.tbt = make.histogram("inter_token_latency_seconds", "Time between two tokens.", buckets=_TBT_S)
        self.prompt_tokens = make.counter("prompt_tokens", "Prompt tokens.")
        self.generation_tokens = make.counter("generation_tokens", "Tokens generated.")
        self.local_queries = make.counter(
            "prefix_cache_queries", "Prompt tokens looked up in the engine's own cache."
        )
        self.local_hits = make.counter("prefix_cache_hits", "Prompt tokens found in the engine's own cache.")
        self.pool_hits = make.counter("pool_hits", "Prompt tokens loaded from the pool.")
        self._load_bytes = make.counter("pool_loaded_bytes", "Bytes loaded from the pool.")
        path = ("path",)
        self._load_path_bytes = make.counter("pool_load_path_bytes", PATH_TEXT.format("loaded from"), path)
        self._save_path_bytes = make.counter("pool_save_path_bytes", PATH_TEXT.format("stored in"), path)
        self._load_failed = make.counter("pool_load_failed_blocks", "Blocks that could not be loaded.")
        self._load_seconds = make.histogram("pool_load_seconds", "Time to move the blocks of one request.")
        self.lookups = make.counter("pool_lookups", "Lookups by outcome.", ("outcome",))
        self.saves = make.counter("pool_saves", "Blocks saved, by outcome.", ("outcome",))
        self.pool_errors = make.counter("pool_errors", "Calls to the pool that failed.", ("what", "code"))
        self.awaiting = make.counter(
            "awaiting_requests",
            "Sequences that waited for blocks of another instance, by where they waited.",
            ("place",),
        )
        self.break_even_tokens = make.counter(
            "break_even_tokens",
            "Tokens that the pool had and that were computed, because loading was slower.",
            ("reason",),
        )
        self._shadow_blocks = make.counter(
            "shadow_blocks",
            "Blocks that were computed to verify the pool's, by what was found.",
            ("outcome",),
        )
        self._shadow_distance = make.histogram(
            "shadow_distance", "Distances of verified blocks from the pool's.", buckets=DISTANCES
        )
        self.shadow_tokens = make.counter(
            "shadow_tokens", "Prompt tokens that the pool had and that were computed to verify it."
        )
        self.preemptions = make.counter("preemptions", "Sequences that were preempted.")
        self.finished = make.counter("requests_finished", "Sequences by how they ended.", ("reason",))
        self.steps = make.counter("steps", "Forward passes.")

    def first_token(self, elapsed_s: float, trace: TraceContext | None) -> None:
        """Count the time to the first token of a sequence that is part of `trace`."""
        observe(self.ttft, elapsed_s, trace)

    def next_token(self, elapsed_s: float, trace: TraceContext | None) -> None:
        """Count the time since the token before."""
        observe(self.tbt, elapsed_s, trace)

    def loaded(self, failed: int, report: LoadReport) -> None:
        """One load is over."""
        self._load_bytes.inc(report.loaded_bytes)
        _by_path(self._load_path_bytes, report.loaded_bytes, report.staged_bytes)
        self._load_failed.inc(failed)
        self._load_seconds.observe(report.transfer_s)
        if failed:
            self.pool_errors.labels("load", "INCOMPLETE").inc()

    def verified(self, report: ShadowReport) -> None:
        """Blocks were compared with the pool's. Called on any thread."""
        for outcome, blocks in report.counts().items():
            self._shadow_blocks.labels(outcome).inc(blocks)
        for distance in report.distances:
            self._shadow_distance.observe(distance)

    def saved(self, report: SaveReport) -> None:
        """One save is over."""
        _by_path(self._save_path_bytes, report.saved_bytes, report.staged_bytes)


def _by_path(counter: Counter, moved_bytes: int, staged_bytes: int) -> None:
    for path, amount in by_path(moved_bytes, staged_bytes):
        counter.labels(path).inc(amount)

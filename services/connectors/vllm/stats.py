"""Counters of the connector, carried by vLLM into its own /metrics.

Idea: each half counts into a plain dictionary; vLLM adds the dictionaries of all halves and steps and hands them to
its metrics process. Labels come from fixed sets only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from mooncache.client.figures import FAMILIES, RAIL_UP
from mooncache.kvcache.distance import DISTANCES
from mooncache.kvcache.in_place import PATH_TEXT, by_path

PREFIX: Final = "mooncache_connector_"
OBSERVATIONS_MAX: Final = 4096
SHADOW_DISTANCE: Final = "shadow_distance"

COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "lookups": ("Lookups in the pool by outcome.", "outcome"),
    "loads": ("Requests that loaded blocks from the pool.", ""),
    "hit_tokens": ("Tokens that were loaded instead of computed.", ""),
    "loaded_blocks": ("Blocks loaded from the pool.", ""),
    "loaded_bytes": ("Bytes loaded from the pool.", ""),
    "load_path_bytes": (PATH_TEXT.format("loaded from"), "path"),
    "load_failures": ("Blocks that could not be loaded, by reason.", "reason"),
    "awaiting_requests": (
        "Requests that waited for blocks of another instance: streamed, or why they waited before the load.",
        "place",
    ),
    "break_even_tokens": (
        "Tokens that the pool had and that were computed, because loading was slower, by reason.",
        "reason",
    ),
    "saved_blocks": ("Blocks stored in the pool.", ""),
    "saved_bytes": ("Bytes stored in the pool.", ""),
    "hooked_layers": (
        "Layers of a step's blocks that vLLM's hook handed over while the step was computed.",
        "",
    ),
    "save_path_bytes": (PATH_TEXT.format("stored in"), "path"),
    "shadow_tokens": ("Prompt tokens that the pool had and that were computed to verify it.", ""),
    "shadow_blocks": ("Blocks that were computed to verify the pool's, by what was found.", "outcome"),
    "present_blocks": ("Blocks that needed no save because the pool held them.", ""),
    "dropped_blocks": ("Blocks that were not saved, by reason.", "reason"),
    "uncached_requests": ("Requests that do not use the pool, by reason.", "reason"),
    "lost_leg_reports": ("Reports of decode legs that did not reach the worker.", ""),
    "defects": ("Errors inside the connector that did not reach the engine.", ""),
    **{name: (family.text, family.label) for name, family in FAMILIES.items() if name != RAIL_UP},
}
HISTOGRAMS: Final[Mapping[str, str]] = {
    "load_seconds": "Time to load the blocks of a request, without waiting for another instance.",
    "save_seconds": "Time to save the blocks of a step.",
    "wait_seconds": "Time of a lookup, with the wait for blocks that another instance computes.",
    SHADOW_DISTANCE: "Distances of verified blocks from the pool's.",
}
GAUGES: Final[Mapping[str, str]] = {
    "pool_up": "1 when the pool is used, 0 while it is absent or its circuit breaker is open.",
    "saving_bytes": "Bytes of blocks that wait to be saved.",
}
BUCKETS_S: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)


@dataclass
class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: {"count": {"name" or "name:label": n}, "seen": {name: [values]}, "gauge": {name: value}}."""

    def __post_init__(self) -> None:
        for part in ("count", "seen", "gauge"):
            self.data.setdefault(part, {})

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        """Add to a counter."""
        assert name in COUNTERS
        key = f"{name}:{label}" if label else name
        self.data["count"][key] = self.data["count"].get(key, 0) + amount

    def count_path(self, name: str, moved_bytes: int, staged_bytes: int) -> None:
        """Add bytes that moved to the counters of their ways."""
        for path, amount in by_path(moved_bytes, staged_bytes):
            if amount > 0:
                self.count(name, amount, path)

    def seen(self, name: str, value: float) -> None:
        """One observation of a histogram; beyond the limit of one interval they are not kept."""
        values = self.data["seen"].setdefault(name, [])
        if len(values) < OBSERVATIONS_MAX:
            values.append(value)

    def gauge(self, name: str, value: float) -> None:
        """The present value."""
        self.data["gauge"][name] = value

    def reset(self) -> None:
        self.data.clear()
        self.__post_init__()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, amount in other.data.get("count", {}).items():
            self.data["count"][key] = self.data["count"].get(key, 0) + amount
        for name, values in other.data.get("seen", {}).items():
            mine = self.data["seen"].setdefault(name, [])
            mine.extend(values[: OBSERVATIONS_MAX - len(mine)])
        for name, value in other.data.get("gauge", {}).items():
            mine_value = self.data["gauge"].get(name)
            # The pool is up for the engine when it is up for all of its parts; bytes add up.
            if mine_value is None:
                self.data["gauge"][name] = value
            else:
                self.data["gauge"][name] = min(mine_value, value) if name == "pool_up" else mine_value + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line shows."""
        counted: dict[str, int | float] = dict(self.data["count"])
        for name, values in self.data["seen"].items():
            if values:
                counted[f"{name}_mean"] = round(sum(values) / len(values), 6)
        return counted

    def is_empty(self) -> bool:
        return not (self.data["count"] or self.data["seen"] or self.data["gauge"])


class ConnectorPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The connector's metrics in vLLM's registry."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._values: dict[int, list[object]] = per_engine_labelvalues
        self._counters = {
            name: self._counter_cls(
                name=PREFIX + name, documentation=text, labelnames=[*labelnames, *([label] if label else [])]
            )
            for name, (text, label) in COUNTERS.items()
        }
        self._histograms = {
            name: self._histogram_cls(
                name=PREFIX + name,
                documentation=text,
                labelnames=labelnames,
                buckets=DISTANCES if name == SHADOW_DISTANCE else BUCKETS_S,
            )
            for name, text in HISTOGRAMS.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=PREFIX + name,
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, text in GAUGES.items()
        }
        for values in per_engine_labelvalues.values():
            for name, (_, label) in COUNTERS.items():
                if not label:
                    self._counters[name].labels(*values)
            for metric in (*self._histograms.values(), *self._gauges.values()):
                metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self._values.get(engine_idx)
        if values is None:
            return
        for key, amount in transfer_stats_data.get("count", {}).items():
            name, _, label = key.partition(":")
            if name in self._counters:
                self._counters[name].labels(*values, *([label] if label else [])).inc(amount)
        for name, seen in transfer_stats_data.get("seen", {}).items():
            if name in self._histograms:
                child = self._histograms[name].labels(*values)
                for value in seen:
                    child.observe(value)
        for name, value in transfer_stats_data.get("gauge", {}).items():
            if name in self._gauges:
                self._gauges[name].labels(*values).set(value)

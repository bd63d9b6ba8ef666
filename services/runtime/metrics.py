"""Prometheus metrics: one registry per service, so that several services live in one process without mixing.

Names begin with "mooncache_"; units are the end of the name (Prometheus' own: seconds, bytes, total). A
counter of events that have a cause carries the cause in a label `reason` or `code`, with values from a
catalogue only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

PREFIX: Final = "mooncache"
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
LATENCY_BUCKETS_S: Final = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


class Metrics:
    """Makes and renders the metrics of one service ("master" -> names begin with mooncache_master_)."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._subsystem = service.replace("-", "_")
        resident = self.gauge("resident_memory_bytes", "Resident memory of the process.")
        resident.set_function(resident_bytes)

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """A counter; Prometheus adds "_total" to its name."""
        return Counter(
            name, text, labels, namespace=PREFIX, subsystem=self._subsystem, registry=self.registry
        )

    def gauge(
        self, name: str, text: str, labels: Sequence[str] = (), function: Callable[[], float] | None = None
    ) -> Gauge:
        """A gauge, read from `function` at scrape time when one is given."""
        gauge = Gauge(name, text, labels, namespace=PREFIX, subsystem=self._subsystem, registry=self.registry)
        if function is not None:
            gauge.set_function(function)
        return gauge

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        """A histogram, by default with buckets for seconds."""
        return Histogram(
            name,
            text,
            labels,
            namespace=PREFIX,
            subsystem=self._subsystem,
            registry=self.registry,
            buckets=tuple(buckets),
        )

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class RpcMetrics:
    """Counts and times control calls; the observer of OpRunner."""

    def __init__(self, metrics: Metrics) -> None:
        self._calls = metrics.counter("rpc_calls", "Control calls by method and outcome.", ("method", "code"))
        self._seconds = metrics.histogram("rpc_duration_seconds", "Duration of control calls.", ("method",))

    def call_finished(self, method: str, code: str, elapsed_s: float) -> None:
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(elapsed_s)

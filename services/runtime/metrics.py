"""Prometheus metrics: one registry per service, so that several services live in one process without mixing.

Names begin with "mooncache_"; units are the end of the name (Prometheus' own: seconds, bytes, total). A
counter of events that have a cause carries the cause in a label `reason` or `code`, with values from a
catalogue only.

Histograms of latencies carry exemplars: the trace id of one request that fell into a bucket, when that trace is
recorded. Exemplars exist in OpenMetrics only, so a page is rendered in the format that its reader accepts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from mooncache.runtime import tracing

PREFIX: Final = "mooncache"
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = openmetrics.CONTENT_TYPE_LATEST
_OPENMETRICS_VERSIONS: Final = ("", "0.0.1", "1.0.0")  # 0.0.1 is what 1.0.0 was called before
_ACCEPT_CHARS_MAX: Final = 2048
LATENCY_BUCKETS_S: Final = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def content_type(accept: str) -> str:
    """OPENMETRICS or TEXT: what the header `Accept` of a scraper prefers; hostile, and TEXT where it makes no sense."""
    weights = {TEXT: 0.0, OPENMETRICS: 0.0}
    for item in accept[:_ACCEPT_CHARS_MAX].lower().split(","):
        media, *rest = (word.strip() for word in item.split(";"))
        asked = dict(word.partition("=")[::2] for word in rest)
        try:
            weight = float(asked.get("q", "1"))
        except ValueError:
            continue
        if media == "application/openmetrics-text" and asked.get("version", "") in _OPENMETRICS_VERSIONS:
            weights[OPENMETRICS] = max(weights[OPENMETRICS], weight)
        elif media == "text/plain":
            weights[TEXT] = max(weights[TEXT], weight)
    return OPENMETRICS if weights[OPENMETRICS] > 0 and weights[OPENMETRICS] >= weights[TEXT] else TEXT


def observe(histogram: Histogram, value: float, trace: tracing.TraceContext | None = None) -> None:
    """Observe a value, with the id of `trace` or of the trace here as exemplar when that is recorded."""
    trace_id = tracing.recorded_id(trace)
    histogram.observe(value, {"trace_id": trace_id} if trace_id else None)


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
        """The page as Prometheus text, without exemplars."""
        return generate_latest(self.registry)

    def page_for(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, for a reader that sends this header `Accept`."""
        if content_type(accept) == OPENMETRICS:
            return openmetrics.generate_latest(self.registry), OPENMETRICS  # type: ignore[no-untyped-call]
        return self.render(), TEXT


class RpcMetrics:
    """Counts and times control calls; the observer of OpRunner."""

    def __init__(self, metrics: Metrics) -> None:
        self._calls = metrics.counter("rpc_calls", "Control calls by method and outcome.", ("method", "code"))
        self._seconds = metrics.histogram("rpc_duration_seconds", "Duration of control calls.", ("method",))

    def call_finished(self, method: str, code: str, elapsed_s: float) -> None:
        self._calls.labels(method, code).inc()
        observe(self._seconds.labels(method), elapsed_s)

"""What the node shows at /metrics: the native server's counters and latencies, read at scrape time.

Names are mooncache_store_node_…; units are the end of the name. Counters that share a cause carry it in a label
(`reason`, `op`). A native counter this file does not know is exported under its own name, so that none is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mooncache.store_node.metric_help import HELP
from mooncache.store_node.state import StoreNodeState
from mooncache.store_node.tenants import largest
from mooncache.topology.counters import trouble_of

if TYPE_CHECKING:
    from mooncache._native import StoreServer

_PREFIX = "mooncache_store_node_"
# family -> (help, label, {native counter: label value})
_LABELLED: dict[str, tuple[str, str, dict[str, str]]] = {
    "misses": (
        "Reads that found no usable block, by reason.",
        "reason",
        {
            "misses_not_found": "not_found",
            "misses_checksum": "checksum",
            "misses_limit": "limit",
            "misses_other": "other",
        },
    ),
    "puts": (
        "Block puts by outcome.",
        "outcome",
        {
            "put_blocks": "stored",
            "put_exists": "exists",
            "put_no_space": "no_space",
            "put_other": "other",
        },
    ),
    "removed_blocks": (
        "Blocks removed, by reason.",
        "reason",
        {
            "store_removed_evicted": "evicted",
            "store_removed_requested": "removed",
            "store_removed_corrupt": "corrupt",
            "store_removed_drained": "drained",
            "store_removed_replaced": "replaced",
            "store_removed_other": "other",
        },
    ),
    "checksum_failures": (
        "Checksums that did not match, by place.",
        "place",
        {"crc_failures_in": "received", "crc_failures_stored": "stored"},
    ),
    "waits": (
        "Waits for blocks that ended, by how.",
        "end",
        {
            "waits_answered": "answered",
            "waits_given_up": "given_up",
            "waits_timed_out": "timed_out",
            "waits_withdrawn": "withdrawn",
            "waits_refused": "refused",
        },
    ),
    "evicted_by_cause": (
        "Evictions by the list the block was in.",
        "cause",
        {
            "store_evicted_probation": "probation",
            "store_evicted_protected": "protected",
            "store_evicted_quota": "quota",
        },
    ),
}
TENANTS_SHOWN = 20
# family -> (help, kind, {figure: labels})
_TENANT_FIELDS: dict[
    str, tuple[str, type[GaugeMetricFamily | CounterMetricFamily], dict[str, dict[str, str]]]
] = {
    "bytes": (
        "Bytes that a tenant holds, by tier.",
        GaugeMetricFamily,
        {"bytes": {"tier": "memory"}, "disk_bytes": {"tier": "ssd"}},
    ),
    "blocks": (
        "Blocks that a tenant holds, by tier.",
        GaugeMetricFamily,
        {"blocks": {"tier": "memory"}, "disk_blocks": {"tier": "ssd"}},
    ),
    "byte_seconds": (
        "Bytes times seconds that a tenant has held, by tier.",
        CounterMetricFamily,
        {"byte_ms": {"tier": "memory"}, "disk_byte_ms": {"tier": "ssd"}},
    ),
    "reads": (
        "Reads of a tenant, by outcome.",
        CounterMetricFamily,
        {"hits": {"outcome": "hit"}, "misses": {"outcome": "miss"}, "throttled": {"outcome": "throttled"}},
    ),
    "stored_bytes": ("Bytes that a tenant has stored.", CounterMetricFamily, {"stored_bytes": {}}),
    "evicted_bytes": ("Bytes of a tenant that were evicted.", CounterMetricFamily, {"evicted_bytes": {}}),
    "moved_bytes": (
        "Bytes of a tenant that moved between memory and disks.",
        CounterMetricFamily,
        {"down_bytes": {"direction": "down"}, "up_bytes": {"direction": "up"}},
    ),
    "refused": ("Puts of a tenant that its quota refused.", CounterMetricFamily, {"refused": {}}),
    "expired_blocks": (
        "Blocks of a tenant that ended with their TTL.",
        CounterMetricFamily,
        {"expired_blocks": {}},
    ),
}
_GAUGES = frozenset(
    {
        "connections_open",
        "connections_lingering",
        "connections_unauthenticated",
        "buffered_bytes",
        "parked_now",
        "waits_open",
        "waited_keys",
        "pins_held",
        "reservations_held",
        "reserved_bytes",
        "arena_lost_bytes",
        "store_capacity_bytes",
        "store_used_bytes",
        "store_free_bytes",
        "store_evictable_bytes",
        "store_pinned_bytes",
        "store_reserved_bytes",
        "store_probation_bytes",
        "store_largest_free_bytes",
        "store_free_extents",
        "store_fragmentation_ppm",
        "store_blocks",
        "store_zombie_blocks",
        "store_pins",
        "store_retained_blocks",
        "store_reservations",
        "store_event_seq",
        "store_events_pending",
        "store_bookkeeping_bytes",
        "store_event_log_bytes",
        "store_draining",
        "store_arena_gone",
        "ssd_capacity_bytes",
        "ssd_blocks",
        "ssd_block_bytes",
        "ssd_index_bytes",
        "ssd_devices_answering",
        "shared_capacity_bytes",
        "shared_blocks",
        "shared_block_bytes",
        "shared_index_bytes",
        "shared_devices_answering",
        "shared_answering",
        "shared_writers",
        "shared_refused_files",
        "shared_other_blocks",
        "shared_other_block_bytes",
        "shared_other_index_bytes",
        "kept_blocks_adopted",
        "kept_bytes_adopted",
        "kept_blocks_unchecked",
        "kept_extents_held",
    }
)

_RAIL_FIELDS: dict[str, tuple[type[GaugeMetricFamily | CounterMetricFamily], str]] = {
    "up": (GaugeMetricFamily, "1 while the RDMA port is active."),
    "connections": (GaugeMetricFamily, "Connections with a queue pair on the RDMA port."),
    "grants": (CounterMetricFamily, "Extents opened to clients on the RDMA port."),
    "granted_bytes": (CounterMetricFamily, "Sizes of the extents opened on the RDMA port."),
    "failures": (
        CounterMetricFamily,
        "Failures on the RDMA port: queue pairs not created or connected, and extents not registered.",
    ),
}


class NodeCollector(Collector):
    """Reads the counters when Prometheus asks."""

    def __init__(self, state: StoreNodeState, core: StoreServer) -> None:
        self._state = state
        self._core = core

    def collect(self) -> Iterator[Metric]:
        stats = self._core.stats()
        yield from families(stats)
        yield from latency_families(self._core.latency_histograms())
        yield from rail_families(self._core.rails())
        if self._state.tenants is not None:
            yield from tenant_families(self._state.tenants.figures)
        yield from self._service()

    def _service(self) -> Iterator[Metric]:
        state = self._state
        for name, value in sorted(state.counters.items()):
            yield CounterMetricFamily(f"{_PREFIX}{name}", "Counter of the node's service.", value=value)
        registered = GaugeMetricFamily(f"{_PREFIX}registered", "1 while registered with a leading master.")
        registered.add_metric([], float(state.membership.registered))
        yield registered
        full = CounterMetricFamily(f"{_PREFIX}full_reports", "Full block reports begun.")
        full.add_metric([], state.planner.full_reports_started)
        yield full
        lag = GaugeMetricFamily(f"{_PREFIX}report_lag_events", "Block changes the master has not confirmed.")
        lag.add_metric([], max(0, self._core.event_seq() - state.planner.acked_seq))
        yield lag


def families(stats: dict[str, int]) -> Iterator[Metric]:
    """The native counters as metric families."""
    left = dict(stats)
    if left.get("store_sampled_unlimited"):
        share = left["store_sampled_found"] / left["store_sampled_unlimited"]
        yield GaugeMetricFamily(
            f"{_PREFIX}hits_of_unlimited",
            "Estimated hits of this node over those of a node with unlimited memory.",
            value=share,
        )
    for name, (text, label, members) in _LABELLED.items():
        family = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=[label])
        for native, value in members.items():
            if native in left:
                family.add_metric([value], left.pop(native))
        yield family
    grouped = (
        ("requests_", "requests", "op", "Requests by operation."),
        ("connections_closed_", "connections_closed", "reason", "Data connections closed, by reason."),
    )
    for prefix, name, label, text in grouped:
        family = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=[label])
        for native in [key for key in left if key.startswith(prefix)]:
            family.add_metric([native.removeprefix(prefix)], left.pop(native))
        yield family
    for native, number in sorted(left.items()):
        text = HELP.get(native, f"Native counter {native}.")
        if native in _GAUGES:
            yield GaugeMetricFamily(f"{_PREFIX}{native}", text, value=number)
        else:
            yield CounterMetricFamily(f"{_PREFIX}{native.removesuffix('_total')}", text, value=number)


def tenant_families(figures: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    """What tenants hold and have done: those that hold most, and the others together."""
    shown = largest(figures, TENANTS_SHOWN)
    for name, (text, make, members) in _TENANT_FIELDS.items():
        labels = list(next(iter(members.values())))
        family = make(f"{_PREFIX}tenant_{name}", text, labels=["tenant", *labels])
        for tenant, row in shown.items():
            for figure, which in members.items():
                value = row.get(figure, 0) / 1e3 if figure.endswith("byte_ms") else row.get(figure, 0)
                family.add_metric([tenant, *which.values()], value)
        yield family


def rail_families(
    rails: list[dict[str, Any]], trouble: Callable[[str, int], dict[str, int]] = trouble_of
) -> Iterator[Metric]:
    """RDMA ports: health, connections, what was opened to clients on each, what failed, and the port's own counters."""
    names = [f"{rail['device']}:{rail['port']}" for rail in rails]
    for field, (make, text) in _RAIL_FIELDS.items():
        family = make(f"{_PREFIX}rail_{field}", text, labels=["rail"])
        for name, rail in zip(names, rails, strict=True):
            family.add_metric([name], float(rail[field]))
        yield family
    counted = CounterMetricFamily(
        f"{_PREFIX}rail_device_events",
        "Error counters of the RDMA device for the port, over all programs of the host.",
        labels=["rail", "counter"],
    )
    for name, rail in zip(names, rails, strict=True):
        for counter, value in trouble(rail["device"], rail["port"]).items():
            counted.add_metric([name, counter], value)
    yield counted


def latency_families(histograms: dict[str, Any]) -> Iterator[Metric]:
    """Time the server spent on requests, by operation, in seconds."""
    family = HistogramMetricFamily(f"{_PREFIX}op_duration_seconds", "Server time of requests.", labels=["op"])
    bounds_us = histograms["bounds_us"]
    for item in histograms["opcodes"]:
        counts = item["buckets"]
        running = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(bounds_us[:-1], counts[:-1], strict=True):
            running += count
            if bound & (bound - 1) == 0:  # every octave is enough for a dashboard
                buckets.append((repr(bound / 1e6), running))
        buckets.append(("+Inf", item["count"]))
        family.add_metric([item["opcode"]], buckets, sum_value=item["sum_us"] / 1e6)
    yield family

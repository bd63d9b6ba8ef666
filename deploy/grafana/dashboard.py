"""The Grafana dashboards, one for each kind of reader, from one vocabulary of panels; writes mooncache*.json beside it.

    python deploy/grafana/dashboard.py            writes
    python deploy/grafana/dashboard.py --check    status 1 when a file is not what this makes

A panel has the same queries wherever it stands, so that two readers talk of the same figure.
It is a title, what it tells, a unit, and its queries with their legends. Every query is checked against live metrics
by tests/deploy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SAMPLED = "mooncache_store_node_store_sampled_%s_total"
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_RATE = "[$__rate_interval]"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


@dataclass(frozen=True)
class Panel:
    """`queries` are (PromQL, legend). Units are Grafana's: s, Bps, reqps, percentunit ..."""

    title: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False


def rate(metric: str, *labels: str) -> str:
    """Growth per second, summed over everything but `labels`."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} (rate({metric}{_RATE}))"


def quantiles(metric: str, *labels: str) -> tuple[tuple[str, str], ...]:
    """Median and 99th percentile of a histogram."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    by = ", ".join((*labels, "le"))
    return tuple(
        (
            f"histogram_quantile({share}, sum by ({by}) (rate({metric}_bucket{_RATE})))",
            f"{name} {legend}".strip(),
        )
        for share, name in ((0.5, "p50"), (0.99, "p99"))
    )


def over(part: str, whole: str) -> str:
    """One query divided by another with the same labels."""
    return f"{part} / {whole}"


def shares(metric: str, label: str) -> str:
    """The part of each value of `label` in the whole."""
    return f"{rate(metric, label)} / ignoring({label}) group_left {rate(metric)}"


_PANELS: tuple[Panel, ...] = (
    Panel(
        "Requests",
        "Answers of all gateways by HTTP status.",
        "reqps",
        ((rate("mooncache_gateway_requests_total", "status"), "{{status}}"),),
        stacked=True,
    ),
    Panel(
        "Time to first token",
        "From the request's arrival at the gateway to the first event of its stream.",
        "s",
        quantiles("mooncache_gateway_ttft_seconds", "model"),
    ),
    Panel(
        "Time between tokens",
        "Mean over each stream, at the gateway.",
        "s",
        quantiles("mooncache_gateway_tbt_seconds", "model"),
    ),
    Panel(
        "Where prompts come from",
        "Prompt tokens by source, as engines reported them: their own cache, the pool, or computed.",
        "percentunit",
        ((shares("mooncache_conductor_observed_tokens_total", "source"), "{{source}}"),),
        stacked=True,
    ),
    Panel(
        "Tokens",
        "Prompt tokens, how many of them came from a cache, and generated tokens.",
        "cps",
        (
            (rate("mooncache_gateway_prompt_tokens_total"), "prompt"),
            (rate("mooncache_gateway_cached_tokens_total"), "cached"),
            (rate("mooncache_gateway_output_tokens_total"), "generated"),
        ),
    ),
    Panel(
        "Under way",
        "Requests in gateways, and prompts being computed.",
        "short",
        (
            ("sum(mooncache_gateway_requests_open)", "requests"),
            ("sum(mooncache_gateway_streams_open)", "streams"),
            ("sum(mooncache_conductor_requests_in_flight)", "prompts in flight"),
        ),
    ),
    Panel(
        "Errors to clients",
        "Error answers by code of the catalogue (docs/reference-errors.md).",
        "reqps",
        ((rate("mooncache_gateway_errors_total", "code"), "{{code}}"),),
        stacked=True,
    ),
    Panel(
        "Legs that failed",
        "Failed requests to engines, and legs that were sent again.",
        "reqps",
        (
            (
                rate('mooncache_gateway_legs_total{code!="OK"}', "leg", "code"),
                "{{leg}} {{code}}",
            ),
            (rate("mooncache_gateway_retries_total", "leg"), "{{leg}} again"),
            (rate("mooncache_gateway_recomputed_total"), "recomputed on decode"),
        ),
    ),
    Panel(
        "Hand-overs from prefill to decode",
        "By outcome; a missed one is computed again by the decode instance after it waited.",
        "reqps",
        (
            (rate("mooncache_conductor_handovers_total", "outcome"), "{{outcome}}"),
            (rate("mooncache_conductor_handovers_avoided_total"), "avoided after misses"),
            (rate("mooncache_gateway_waits_timed_out_total", "model"), "{{model}} timed out waiting"),
            (rate("mooncache_conductor_give_ups_total", "reason"), "given up: {{reason}}"),
        ),
    ),
    Panel(
        "Other than planned",
        "Legs whose engine computed, loaded or waited otherwise than the plan said, and why.",
        "reqps",
        ((rate("mooncache_conductor_plan_differences_total", "kind", "reason"), "{{kind}}: {{reason}}"),),
    ),
    Panel(
        "Served with less",
        "Without a plan of the conductor (round robin), without keys (no cache), over a limit, left by the client.",
        "reqps",
        (
            (rate("mooncache_gateway_unscheduled_total"), "without conductor"),
            (rate("mooncache_gateway_conductor_errors_total", "code"), "conductor erred: {{code}}"),
            (rate("mooncache_gateway_no_keys_total", "reason"), "no keys: {{reason}}"),
            (rate("mooncache_gateway_rate_limited_total", "limit"), "limit: {{limit}}"),
            (rate("mooncache_gateway_aborted_total"), "client left"),
        ),
    ),
    Panel(
        "Engines",
        "1 while the engine of a worker is healthy; 0 while it starts or is restarted.",
        "short",
        (
            ("mooncache_worker_engine_up", "{{instance}}"),
            ("mooncache_worker_draining", "{{instance}} draining"),
        ),
    ),
    Panel(
        "Requests of engines",
        "Running and waiting requests of each engine.",
        "short",
        (
            ("mooncache_worker_requests_running", "{{instance}} running"),
            ("mooncache_worker_requests_waiting", "{{instance}} waiting"),
        ),
    ),
    Panel(
        "KV memory of engines",
        "Share of each engine's own KV blocks in use.",
        "percentunit",
        (("mooncache_worker_kv_usage_ratio", "{{instance}}"),),
    ),
    Panel(
        "Engines: time to first token",
        "Mean over the last seconds, as the engine measures it.",
        "s",
        (("mooncache_worker_ttft_seconds", "{{instance}}"),),
    ),
    Panel(
        "Engines: time between tokens",
        "Mean over the last seconds, as the engine measures it.",
        "s",
        (("mooncache_worker_tbt_seconds", "{{instance}}"),),
    ),
    Panel(
        "Engines: tokens",
        "Prompt tokens, generated tokens, and prompt tokens from caches, of each engine.",
        "cps",
        (
            (rate("mooncache_worker_engine_prompt_tokens_total", "instance"), "{{instance}} prompt"),
            (rate("mooncache_worker_engine_output_tokens_total", "instance"), "{{instance}} generated"),
            (
                rate("mooncache_worker_engine_local_hit_tokens_total", "instance"),
                "{{instance}} own cache",
            ),
            (rate("mooncache_worker_engine_pool_hit_tokens_total", "instance"), "{{instance}} pool"),
        ),
    ),
    Panel(
        "Memory",
        "Share of each node's arena in use. A full node is normal: it evicts.",
        "percentunit",
        (
            (
                "mooncache_store_node_store_used_bytes / mooncache_store_node_store_capacity_bytes",
                "{{instance}}",
            ),
        ),
    ),
    Panel(
        "Blocks that left",
        "Blocks per second by reason: evicted, removed, corrupt, drained, replaced.",
        "ops",
        ((rate("mooncache_store_node_removed_blocks_total", "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Bytes",
        "Over the data ports of the nodes; copies that clients make through shared memory are not seen here.",
        "Bps",
        (
            (rate("mooncache_store_node_bytes_in_total", "instance"), "{{instance}} in"),
            (rate("mooncache_store_node_bytes_out_total", "instance"), "{{instance}} out"),
        ),
    ),
    Panel(
        "Nodes",
        "Nodes by state, as the leading master sees them.",
        "short",
        (
            (
                "max by (state) (mooncache_master_nodes and on (instance) mooncache_master_leading == 1)",
                "{{state}}",
            ),
        ),
    ),
    Panel(
        "Reads and puts",
        "Block reads that hit or missed, and puts by outcome.",
        "ops",
        (
            (rate("mooncache_store_node_hits_total"), "hit"),
            (rate("mooncache_store_node_misses_total", "reason"), "miss: {{reason}}"),
            (rate("mooncache_store_node_puts_total", "outcome"), "put: {{outcome}}"),
        ),
    ),
    Panel(
        "Time of data-plane calls",
        "99th percentile of a node's own time for a call, by operation.",
        "s",
        (
            (
                f"histogram_quantile(0.99, {rate('mooncache_store_node_op_duration_seconds_bucket', 'op', 'le')})",
                "{{op}}",
            ),
        ),
    ),
    Panel(
        "Checksums that did not match",
        "Received: damaged on the way. Stored: damaged in memory. Neither ever reaches an engine.",
        "ops",
        (
            (
                rate("mooncache_store_node_checksum_failures_total", "instance", "place"),
                "{{instance}} {{place}}",
            ),
        ),
    ),
    Panel(
        "Line to the master",
        "Block changes that the master has not confirmed; grows when a node cannot report.",
        "short",
        (("mooncache_store_node_report_lag_events", "{{instance}}"),),
    ),
    Panel(
        "Directory",
        "Distinct blocks that the leading master knows, and whether every node has reported in full.",
        "short",
        (
            ("max(mooncache_master_directory_blocks)", "blocks"),
            ("max(mooncache_master_directory_complete)", "complete"),
        ),
    ),
    Panel(
        "Decisions",
        "Scheduled and refused requests by reason.",
        "reqps",
        ((rate("mooncache_conductor_decisions_total", "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Branches",
        "Source of the KV of admitted prompts: the instance's own cache, fetched, waited for.",
        "reqps",
        ((rate("mooncache_conductor_branches_total", "branch"), "{{branch}}"),),
        stacked=True,
    ),
    Panel(
        "Prediction error",
        "Observed over predicted time to first token; 1 is a perfect prediction.",
        "short",
        quantiles("mooncache_conductor_ttft_observed_over_predicted"),
    ),
    Panel(
        "Time of a decision",
        "Index, policy and record; and the lookup in the pool before it.",
        "s",
        (
            *quantiles("mooncache_conductor_decision_duration_seconds"),
            *(
                (query, f"pool {legend}")
                for query, legend in quantiles("mooncache_conductor_pool_lookup_seconds")
            ),
        ),
    ),
    Panel(
        "Lookups in the pool",
        "By outcome; anything but an answer counts as a miss.",
        "reqps",
        ((rate("mooncache_conductor_pool_lookups_total", "state"), "{{state}}"),),
        stacked=True,
    ),
    Panel(
        "Instances",
        "Known instances by state and role.",
        "short",
        (("sum by (state, role) (mooncache_conductor_instances) > 0", "{{role}} {{state}}"),),
    ),
    Panel(
        "Role switches",
        "Instances that followed the load to another role, by new role; only with conductor.rebalance_roles.",
        "short",
        ((f"sum by (role) (increase(mooncache_conductor_role_switches_total{_RATE}))", "to {{role}}"),),
    ),
    Panel(
        "Copies of hot prefixes",
        "Requests to the master by kind and outcome, and prefix segments that have further copies now.",
        "short",
        (
            (
                f"sum by (kind, outcome) (increase(mooncache_conductor_copy_orders_total{_RATE}))",
                "{{kind}} {{outcome}}",
            ),
            ("sum(mooncache_conductor_copied_segments)", "with copies"),
        ),
    ),
    Panel(
        "Memory of processes",
        "Resident memory of every service; engines are not in it.",
        "bytes",
        (('{__name__=~"mooncache_.+_resident_memory_bytes"}', "{{job}} {{instance}}"),),
    ),
    Panel(
        "Control calls that failed",
        "By service, method and code.",
        "reqps",
        (
            (
                rate('{__name__=~"mooncache_.+_rpc_calls_total", code!="OK"}', "job", "method", "code"),
                "{{job}} {{method}} {{code}}",
            ),
        ),
    ),
    Panel(
        "Background duties that failed",
        "By service and duty; each is tried again after a pause.",
        "ops",
        (
            (
                rate('{__name__=~"mooncache_.+_duty_failures_total"}', "job", "duty"),
                "{{job}} {{duty}}",
            ),
        ),
    ),
    Panel(
        "First token within",
        "Share of requests whose first token came within 1, 5 and 30 s of their arrival at the gateway, by model.",
        "percentunit",
        tuple(
            (
                over(
                    f'sum by (model) (rate(mooncache_gateway_ttft_seconds_bucket{{le="{limit_s}"}}{_RATE}))',
                    rate("mooncache_gateway_ttft_seconds_count", "model"),
                ),
                f"{{{{model}}}} {limit_s} s",
            )
            for limit_s in ("1.0", "5.0", "30.0")
        ),
    ),
    Panel(
        "Promises that could not be made",
        "Requests that admission refused, by the reason: the promised time to the first token, or between tokens, ...",
        "reqps",
        ((rate('mooncache_conductor_decisions_total{reason!="admitted"}', "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Whole requests",
        "From the request's arrival to the end of its answer, by endpoint.",
        "s",
        quantiles("mooncache_gateway_request_duration_seconds", "endpoint"),
    ),
    Panel(
        "Before the engines",
        "99th percentile of what the cluster adds: all until the legs are sent, and in it tokenising and the decision.",
        "s",
        tuple(
            (f"histogram_quantile(0.99, {rate(f'mooncache_gateway_{name}_seconds_bucket', 'le')})", legend)
            for name, legend in (("overhead", "all"), ("tokenise", "tokenise"), ("schedule", "decide"))
        ),
    ),
    Panel(
        "Tokens by model",
        "Prompt tokens and generated tokens of ended requests.",
        "cps",
        (
            (rate("mooncache_gateway_prompt_tokens_total", "model"), "{{model}} prompt"),
            (rate("mooncache_gateway_output_tokens_total", "model"), "{{model}} generated"),
        ),
    ),
    Panel(
        "Prompt tokens from caches",
        "Share of the prompt tokens of each model that no engine had to compute.",
        "percentunit",
        (
            (
                over(
                    rate("mooncache_gateway_cached_tokens_total", "model"),
                    rate("mooncache_gateway_prompt_tokens_total", "model"),
                ),
                "{{model}}",
            ),
        ),
    ),
    Panel(
        "Work that may wait",
        "Requests of batches under way, and batches.",
        "short",
        (
            ("sum(mooncache_gateway_offline_requests_open)", "requests"),
            ("sum(mooncache_gateway_batches_open)", "batches"),
        ),
    ),
    Panel(
        "What lies where",
        "Bytes of blocks by tier, over all nodes and tenants.",
        "bytes",
        (("sum by (tier) (mooncache_store_node_tenant_bytes)", "{{tier}}"),),
        stacked=True,
    ),
    Panel(
        "Between memory and disks",
        "Bytes per second that went down to disks before memory evicted them, and came up again.",
        "Bps",
        ((rate("mooncache_store_node_tenant_moved_bytes_total", "direction"), "{{direction}}"),),
    ),
    Panel(
        "Hits, and what more memory would bring",
        "Of the blocks that were asked for: found; stored once, but no longer here, which more memory would have kept; "
        "never stored, where no memory helps. From a sample of the chains.",
        "percentunit",
        (
            (f"{rate(SAMPLED % 'found')} / {rate(SAMPLED % 'asked')}", "found"),
            (
                f"({rate(SAMPLED % 'unlimited')} - {rate(SAMPLED % 'found')}) / {rate(SAMPLED % 'asked')}",
                "more memory would find",
            ),
            (
                f"({rate(SAMPLED % 'asked')} - {rate(SAMPLED % 'unlimited')}) / {rate(SAMPLED % 'asked')}",
                "never stored",
            ),
        ),
        stacked=True,
    ),
    Panel(
        "Hits over those of unlimited memory",
        "1: more memory would bring nothing. By node.",
        "percentunit",
        (
            (
                f"{rate(SAMPLED % 'found', 'instance')} / {rate(SAMPLED % 'unlimited', 'instance')}",
                "{{instance}}",
            ),
        ),
    ),
    Panel(
        "Evicted bytes",
        "Bytes per second that each node evicted from memory.",
        "Bps",
        ((rate("mooncache_store_node_store_evicted_bytes_total", "instance"), "{{instance}}"),),
    ),
    Panel(
        "Pinned and being written",
        "Share of each node's memory that cannot be evicted now.",
        "percentunit",
        tuple(
            (
                f"mooncache_store_node_store_{name}_bytes / mooncache_store_node_store_capacity_bytes",
                f"{{{{instance}}}} {name}",
            )
            for name in ("pinned", "reserved")
        ),
    ),
    Panel(
        "Tenants that hold most",
        "Bytes in memory and on disks of the ten largest tenants. `mooncache cost` puts prices on them.",
        "bytes",
        (("topk(10, sum by (tenant) (mooncache_store_node_tenant_bytes))", "{{tenant}}"),),
    ),
    Panel(
        "What memory earns",
        "Prompt tokens per second that were not computed, for each GB of blocks in memory. `mooncache cost` "
        "turns both into money, `mooncache cost what-if` says what another size would earn.",
        "cps",
        (
            (
                over(
                    rate("mooncache_gateway_cached_tokens_total"),
                    "(sum(mooncache_store_node_store_used_bytes) / 1e9)",
                ),
                "tokens per GB",
            ),
        ),
    ),
)

PANELS = {panel.title: panel for panel in _PANELS}


@dataclass(frozen=True)
class Dashboard:
    """What one kind of reader asks. `rows` are titles of rows with the titles of their panels."""

    uid: str
    title: str
    text: str
    rows: Mapping[str, tuple[str, ...]]


DASHBOARDS: dict[str, Dashboard] = {
    "mooncache.json": Dashboard(
        "mooncache",
        "Mooncache: operation",
        "Is it healthy, and what is saturated?",
        {
            "Overview": (
                *("Requests", "Time to first token", "Time between tokens"),
                *("Where prompts come from", "Tokens", "Under way"),
            ),
            "Errors": (
                *("Errors to clients", "Legs that failed", "Hand-overs from prefill to decode"),
                *("Other than planned", "Served with less"),
            ),
            "Instances": (
                *("Engines", "Requests of engines", "KV memory of engines"),
                *("Engines: time to first token", "Engines: time between tokens", "Engines: tokens"),
            ),
            "Pool": (
                *("Memory", "Blocks that left", "Bytes"),
                *("Nodes", "Reads and puts", "Time of data-plane calls"),
                *("Checksums that did not match", "Line to the master", "Directory"),
            ),
            "Conductor": (
                *("Decisions", "Branches", "Prediction error"),
                *("Time of a decision", "Lookups in the pool", "Instances"),
                *("Role switches", "Copies of hot prefixes"),
            ),
            "Processes": (
                "Memory of processes",
                "Control calls that failed",
                "Background duties that failed",
            ),
        },
    ),
    "mooncache-capacity.json": Dashboard(
        "mooncache-capacity",
        "Mooncache: capacity",
        "Is there enough memory, what would more bring, and what does it earn?",
        {
            "What it brings": (
                *("Hits, and what more memory would bring", "Hits over those of unlimited memory"),
                *("What memory earns", "Where prompts come from", "Tokens", "Branches"),
            ),
            "Tiers": (
                *("Memory", "What lies where", "Between memory and disks"),
                *("Blocks that left", "Evicted bytes", "Pinned and being written"),
            ),
            "Who holds it": ("Tenants that hold most", "Copies of hot prefixes", "Bytes"),
            "Engines": ("KV memory of engines", "Requests of engines", "Role switches"),
        },
    ),
    "mooncache-serving.json": Dashboard(
        "mooncache-serving",
        "Mooncache: serving",
        "What do clients get, and are promises kept, for each model?",
        {
            "What clients get": (
                *("Time to first token", "Time between tokens", "Whole requests"),
                *("First token within", "Requests", "Errors to clients"),
            ),
            "Promises": (
                *("Promises that could not be made", "Prediction error", "Decisions"),
                *("Served with less", "Hand-overs from prefill to decode", "Other than planned"),
            ),
            "Models": ("Tokens by model", "Prompt tokens from caches", "Work that may wait"),
            "Where the time goes": (
                *("Before the engines", "Time of a decision", "Requests of engines"),
                *("Engines: time to first token", "Engines: time between tokens", "Under way"),
            ),
        },
    ),
}


def document(of: Dashboard) -> dict[str, Any]:
    """What Grafana imports."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, titles in of.rows.items():
        members = [PANELS[title] for title in titles]
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for at, panel in enumerate(members):
            place = {
                "x": at % _COLUMNS * _WIDTH,
                "y": y + at // _COLUMNS * _HEIGHT,
                "w": _WIDTH,
                "h": _HEIGHT,
            }
            panels.append(_panel(panel, len(panels) + 1, place))
        y += -(-len(members) // _COLUMNS) * _HEIGHT
    return {
        "uid": of.uid,
        "title": of.title,
        "description": of.text,
        "tags": ["mooncache"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [{"type": "dashboards", "title": "Mooncache", "tags": ["mooncache"], "keepTime": True}],
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom = {"fillOpacity": 25 if panel.stacked else 0, "showPoints": "never", "lineWidth": 1}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": legend,
                "exemplar": query.startswith("histogram_quantile("),
            }
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }


def main() -> int:
    wrong = 0
    for name, of in DASHBOARDS.items():
        text, path = json.dumps(document(of), indent=1) + "\n", FOLDER / name
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())

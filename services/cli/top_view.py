"""One frame of `mooncache top`: the document, and how it looks."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mooncache.cli.cluster import status_document
from mooncache.cli.conductor_view import conductor_lines
from mooncache.cli.core.activity import gateway_samples, instance_activity, node_activity, summed_activity
from mooncache.cli.member_rows import hosts_of, member_problems
from mooncache.cli.snapshot import ClusterSnapshot, part_problems
from mooncache.conductor.core.members import Presence
from mooncache.conductor.core.registry import InstanceState
from mooncache.proto.v1 import common_pb2
from mooncache.reporting.output import human_age, human_bytes
from mooncache.runtime.enum_words import word_of

_WIDE, _BAR_CELLS, _BAR_CELLS_NARROW = 104, 12, 4
_ENDED = (Presence.GONE, Presence.STOPPED)
_HIGH, _FULL = 0.7, 0.9
_STATE_STYLES = {
    InstanceState.READY: "green",
    word_of(common_pb2.NodeState, common_pb2.NODE_STATE_ACTIVE): "green",
    InstanceState.STARTING: "yellow",
    InstanceState.DRAINING: "yellow",  # a node's state has the same word
}


def frame_document(now: ClusterSnapshot, before: ClusterSnapshot, gateway_url: str) -> dict[str, Any]:
    """What `--json` prints and the frame shows."""
    interval_s = max(1e-3, now.taken_s - before.taken_s)
    gateways, earlier = gateway_samples(now.metrics), gateway_samples(before.metrics)
    status = status_document(now.status) if now.status is not None else {"master": None, "nodes": []}
    return {
        "interval_s": interval_s,
        "gateway_url": gateway_url,
        "gateway": summed_activity(gateways, earlier, interval_s),
        "gateway_count": len(gateways),
        "members": now.members or [],
        "conductor": now.conductor,
        "instances": instance_activity(now.instances or [], before.instances or [], interval_s),
        "master": status["master"],
        "nodes": [
            node_activity(
                node,
                now.metrics.get(node["node_id"], {}),
                before.metrics.get(node["node_id"], {}),
                interval_s,
            )
            for node in status["nodes"]
        ],
        "problems": _problems(now),
    }


def _problems(snapshot: ClusterSnapshot) -> list[str]:
    found = []
    if snapshot.master_error is not None:
        found.append(f"master: {snapshot.master_error.message}")
    if snapshot.conductor_error:
        found.append(f"conductor: {snapshot.conductor_error}")
    if snapshot.gateway_reason:
        found.append(f"gateway: {snapshot.gateway_reason}")
    found += [
        f"{row['instance_id']} is {row['state']}: {row['reason']}"
        for row in snapshot.instances or []
        if row["state"] != InstanceState.READY and row["reason"]
    ]
    found += member_problems(snapshot.members or ())
    return found + part_problems(snapshot.parts)


def frame(document: dict[str, Any], width: int) -> RenderableType:
    """The document as a screen of `width` columns; a narrow one shows less."""
    wide = width >= _WIDE
    parts: list[RenderableType] = [_head(document)]
    if document["gateway"] is not None:
        parts += [Text(), _gateway(document["gateway"])]
    if document["conductor"] is not None:
        parts += [Text(), *(Text(line, style="dim") for line in conductor_lines(document["conductor"]))]
    if document["instances"]:
        parts += [Text(), _instances(document["instances"], wide=wide)]
    if document["nodes"]:
        parts += [Text(), _nodes(document["nodes"], wide=wide)]
    for problem in document["problems"]:
        parts += [Text(problem, style="yellow")]
    return Group(*parts)


def _head(document: dict[str, Any]) -> Text:
    text = Text("mooncache", style="bold")
    if document["gateway_url"]:
        text.append(f"  {document['gateway_url']}/v1", style="cyan")
    if document["master"] is not None:
        text.append(f"  up {human_age(document['master']['uptime_s'])}", style="dim")
    if document.get("members"):
        present = [row for row in document["members"] if row["state"] not in _ENDED]
        hosts = len(hosts_of(present))
        text.append(f"  {len(present)} processes on {hosts} {'host' if hosts == 1 else 'hosts'}", style="dim")
    return text.append(f"  {time.strftime('%H:%M:%S')}  (q quits)", style="dim")


def _gateway(row: dict[str, Any]) -> Table:
    table = _table(
        "requests/s", "open", "streams", "prompt/s", "output/s", "from cache", "TTFT p50", "errors/s"
    )
    errors = Text(f"{row['errors_per_s']:.1f}", style="red" if row["errors_per_s"] else "")
    table.add_row(
        f"{row['requests_per_s']:.1f}",
        str(row["requests_open"]),
        str(row["streams_open"]),
        _count(row["prompt_tokens_per_s"]),
        _count(row["output_tokens_per_s"]),
        _percent(row["cached_share"]),
        _ms(row["ttft_p50_ms"]),
        errors,
    )
    return table


def _instances(rows: list[dict[str, Any]], *, wide: bool) -> Table:
    columns = ["engine", "state", "KV", "run", "wait", "prompt/s", "output/s", "hits", "TTFT", "TBT"]
    table = _table(*columns, *(("blocks", "role") if wide else ()), left=3)
    for row in rows:
        cells: list[str | Text] = [
            Text(row["instance_id"]),
            Text(row["state"], style=_STATE_STYLES.get(row["state"], "red")),
            _bar(row["kv_usage"], wide=wide),
            str(row["running"]),
            str(row["waiting"]),
            _count(row["prompt_tokens_per_s"]),
            _count(row["output_tokens_per_s"]),
            _percent(row["hit_share"]),
            _ms(row["ttft_ms"]),
            _ms(row["tbt_ms"]),
        ]
        table.add_row(*cells, *((str(row["cached_blocks"]), row["role"]) if wide else ()))
    return table


def _nodes(rows: list[dict[str, Any]], *, wide: bool) -> Table:
    disks = any(row["ssd_capacity_bytes"] for row in rows)
    shares = any(row["shared_capacity_bytes"] for row in rows)
    columns = [
        "node",
        "state",
        "used",
        "of",
        "blocks",
        "of max",
        "hits/s",
        "miss/s",
        "puts/s",
        "in/s",
        "out/s",
    ]
    below_memory = ("on disk", "of", "reads/s") if disks else ()
    shared = ("shared", "of", "reads/s") if shares else ()
    table = _table(*columns, *below_memory, *shared, left=3)
    for row in rows:
        below = (
            human_bytes(row["ssd_used_bytes"]),
            human_bytes(row["ssd_capacity_bytes"]),
            _count(row["ssd_reads_per_s"]),
        )
        in_log = (
            human_bytes(row["shared_used_bytes"]),
            human_bytes(row["shared_capacity_bytes"]),
            _count(row["shared_reads_per_s"]),
        )
        table.add_row(
            Text(row["node_id"]),
            Text(row["state"], style=_STATE_STYLES.get(row["state"], "red")),
            _bar(row["used_bytes"] / row["capacity_bytes"] if row["capacity_bytes"] else 0.0, wide=wide),
            human_bytes(row["capacity_bytes"]),
            str(row["block_count"]),
            _percent(row["hits_of_unlimited"]),
            _count(row["hits_per_s"]),
            _count(row["misses_per_s"]),
            _count(row["puts_per_s"]),
            human_bytes(row["bytes_in_per_s"]),
            human_bytes(row["bytes_out_per_s"]),
            *(below if disks else ()),
            *(in_log if shares else ()),
        )
    return table


def _table(*columns: str, left: int = 0) -> Table:
    """A bare table; the first `left` columns are words, the rest numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    return table


def _bar(share: float, *, wide: bool) -> Text:
    cells = _BAR_CELLS if wide else _BAR_CELLS_NARROW
    share = min(1.0, max(0.0, share))
    filled = round(share * cells)
    style = "red" if share >= _FULL else "yellow" if share >= _HIGH else "green"
    text = Text("█" * filled, style=style)
    text.append("░" * (cells - filled), style="dim")
    return text.append(f" {share:4.0%}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _ms(value: float | None) -> str:
    if not value:
        return "-"
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"


def _count(value: float) -> str:
    if value < 10:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.1f}k"

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

import panels
import promises_and_memory
from vocabulary import Panel

FOLDER = Path(__file__).parent
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3

PANELS = {panel.title: panel for panel in (*panels.PANELS, *promises_and_memory.PANELS)}


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
    made: list[dict[str, Any]] = []
    y = 0
    for row, titles in of.rows.items():
        members = [PANELS[title] for title in titles]
        made.append(
            {
                "id": len(made) + 1,
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
            made.append(_panel(panel, len(made) + 1, place))
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
        "panels": made,
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

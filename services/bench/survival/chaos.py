"""Faults in random order in a cluster of the run's own, every answer checked: promises broken, wrong answers.

`mooncache chaos run` does it, with the faults of its profile `quick`; here are its figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from mooncache.errors import EngineFailed
from mooncache.reporting.rows import Row, bar_row

_SEED: Final = 16
_WRONG: Final = ("no wrong token", "no wrong byte")
_SLACK_S: Final = 900.0  # the cluster's start, and the last fault until all is well


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Answers, wrong ones and broken promises. Raises EngineFailed: there was no run."""
    seconds = 20 if quick else 180
    progress(f"faults in a cluster of its own for {seconds} s")
    words = ["chaos", "run", "--own", "--json", "--seed", str(_SEED), "--duration", f"{seconds}s"]
    done = subprocess.run(
        [sys.executable, "-m", "mooncache.cli", *words],
        capture_output=True,
        timeout=seconds + _SLACK_S,
        check=False,
    )
    try:
        return rows_of(json.loads(done.stdout))
    except (ValueError, KeyError, TypeError):
        raise EngineFailed(f"mooncache chaos run: {done.stderr.decode(errors='replace')[-1000:]}") from None


def rows_of(document: Mapping[str, Any]) -> list[Row]:
    """What the command printed, as rows. Raises KeyError, TypeError: it is no such document."""
    promises, requests = document["promises"], document["requests"]
    broken = [row["promise"] for row in promises if not row["kept"]]
    wrong = sum(promise in broken for promise in _WRONG)
    return [
        Row("faults", float(len(document["faults"])), ""),
        Row("right answers", float(requests.get("right", 0)), ""),
        Row("requests that failed on what was hit", float(requests.get("failed", 0)), ""),
        Row("blocks read", float(document["blocks"]["read"]), ""),
        bar_row("wrong answers", float(requests.get("wrong", 0)), "", at_most=0.0),
        bar_row("broken promises that no wrong token or byte is served", float(wrong), "", at_most=0.0),
        bar_row("broken promises, of all", float(len(broken)), "", at_most=0.0),
    ]

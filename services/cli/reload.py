"""`mooncache config reload`: processes of `mooncache up` read their configuration again, and say what came of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from json import loads
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from mooncache.cli.common import AsJson, seconds_of
from mooncache.errors import InvalidArgument
from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, print_json

_POLL_S = 0.05
_LOG_BYTES_MAX = 8 << 20
RELOADED, REFUSED = "config.reloaded", "config.refused"


def reload(
    *,
    state_dir: Annotated[
        Path | None,
        Parameter(help="State folder of the cluster; default $MOONCACHE_STATE_DIR or ~/.mooncache."),
    ] = None,
    timeout: Annotated[str, Parameter(help='Time limit, for example "30s".')] = "10s",
    json: AsJson = False,
) -> int:
    """Have every process that `mooncache up` runs here read its configuration file again, without a restart.

    Log level and the gateway's limits change at once; settings that need a restart are named. Elsewhere send SIGHUP:
    the event config.reloaded in the log says the same. Certificates, API keys and limits of tenants need no command.

    For example:

        MOONCACHE_CONFIG=mooncache.toml mooncache up --detach

        mooncache config reload
    """
    from mooncache.client.state_dir import read_cluster_file
    from mooncache.config import load

    limit_s = seconds_of(timeout, "--timeout", above_0=True)
    folder = load(overrides={"cluster.state_dir": state_dir}).cluster.state_dir
    cluster = read_cluster_file(folder)
    if cluster is None or not cluster.parts:
        raise InvalidArgument(
            f"No cluster runs in {folder}. Send SIGHUP to processes that something else started."
        )
    logs = {part.name: folder / "logs" / f"{part.name}.log" for part in cluster.parts}
    begins = {name: _size(path) for name, path in logs.items()}
    for part in cluster.parts:
        if part.state == "ready" and part.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(part.pid, signal.SIGHUP)
    answers = _await(logs, begins, limit_s)
    rows = [{"name": name, **answers.get(name, {"outcome": "no answer"})} for name in logs]
    if json:
        print_json({"processes": rows})
    else:
        for row in rows:
            console.print(f"{row['name']}: {_sentence(row)}", markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK if all(row["outcome"] == "reloaded" for row in rows) else EXIT_MISS


def _await(logs: dict[str, Path], begins: dict[str, int], limit_s: float) -> dict[str, dict[str, Any]]:
    """What each process logged about it, of those that did in time."""
    found: dict[str, dict[str, Any]] = {}
    deadline_s = time.monotonic() + limit_s
    while len(found) < len(logs) and time.monotonic() < deadline_s:
        for name, path in logs.items():
            if name not in found and (answer := _answer(path, begins[name])) is not None:
                found[name] = answer
        time.sleep(_POLL_S)
    return found


def _answer(path: Path, begin: int) -> dict[str, Any] | None:
    for line in _lines(path, begin):
        with contextlib.suppress(ValueError, AttributeError):
            row = loads(line)
            if row.get("event") == RELOADED:
                return {
                    "outcome": "reloaded",
                    "changed": list(row.get("changed", [])),
                    "needs_restart": list(row.get("needs_restart", [])),
                }
            if row.get("event") == REFUSED:
                return {"outcome": "refused", "reason": str(row.get("reason", ""))}
    return None


def _lines(path: Path, begin: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(_LOG_BYTES_MAX).split(b"\n")
    except OSError:
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _sentence(row: dict[str, Any]) -> str:
    if row["outcome"] == "no answer":
        return "did not say in time whether it read its configuration; see its log"
    if row["outcome"] == "refused":
        return f"refused, nothing changed: {row['reason']}"
    changed = ", ".join(row["changed"]) or "nothing changed"
    waiting = f"; after a restart: {', '.join(row['needs_restart'])}" if row["needs_restart"] else ""
    return changed + waiting

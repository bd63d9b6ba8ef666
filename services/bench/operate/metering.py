"""What metering of usage costs a gateway: requests a second with it over those without; and whether it counts right.

Two gateways of one conductor, before an engine that computes nothing, differ in `gateway.usage_enabled` alone. They
have turns, and each round is on, off, off, on, so that what changes slowly on the machine is the same for both.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from mooncache.accounts.place import opened
from mooncache.accounts.usage_store import UsageStore, has_usage
from mooncache.bench.gateway.stack import Stack, Target, start_stack, wait_ready
from mooncache.bench.worker import Worker, WorkerError
from mooncache.cluster.ports import PortPicker
from mooncache.cluster.processes import Part, ServiceKind, stop_all
from mooncache.config import load as load_config
from mooncache.reporting.rows import Report, Row, bar_row

if TYPE_CHECKING:
    from mooncache.bench.operate.options import OperateBenchOptions

_RATIO: Final = 0.98
_PROMPT_TOKENS: Final = 100
_OUTPUT_TOKENS: Final = 16
_CLIENTS: Final = 16
_LIMIT_S: Final = 300.0
_STOP_S: Final = 8.0
_CALL_S: Final = 10.0
_WRITTEN_S: Final = 60.0
_LOOK_S: Final = 0.2


def rows(report: Report, options: OperateBenchOptions, progress: Callable[[str], None]) -> None:
    """Measure, and add the rows. Raises WorkerError."""
    progress("starting conductor, a gateway that meters and one that does not")
    with (
        start_stack() as stack,
        PortPicker("127.0.0.1") as ports,
        Worker("mooncache.bench.operate.load", [str(options.seed)]) as load,
    ):
        port = ports.any()
        env = {"MOONCACHE_GATEWAY_PORT": str(port), "MOONCACHE_GATEWAY_USAGE_ENABLED": "false"}
        name = "gateway-unmetered"
        part = Part(name, ServiceKind.GATEWAY, {**stack.env, **env}, stack.state_dir / f"{name}.log")
        try:
            part.start()
            wait_ready(port, stack.gateway.key, [part], {stack.gateway.model})
            _measure(report, options, progress, stack, load, port)
        finally:
            stop_all([part], _STOP_S)


def _measure(
    report: Report,
    options: OperateBenchOptions,
    progress: Callable[[str], None],
    stack: Stack,
    load: Worker,
    port: int,
) -> None:
    _compare_tokens(report, options, progress, stack, load)
    ways = {True: _way(stack, stack.gateway.port), False: _way(stack, port)}
    for way in ways.values():
        _rate(load, way, max(_CLIENTS, options.metered_requests // 4))  # caches, and the list of instances
    rates: dict[bool, list[float]] = {True: [], False: []}
    ratios: list[float] = []
    for number in range(1, options.metered_rounds + 1):
        progress(f"metering on and off, round {number} of {options.metered_rounds}")
        found: dict[bool, list[float]] = {True: [], False: []}
        for is_on in (True, False, False, True):
            found[is_on].append(_rate(load, ways[is_on], options.metered_requests))
        for is_on, measured in found.items():
            rates[is_on] += measured
        ratios.append(sum(found[True]) / sum(found[False]))
    off = median(rates[False])
    report.rows.append(Row("metering off: gateway throughput", off, "1/s"))
    report.rows.append(
        bar_row(
            "metering on over off: gateway throughput",
            off * median(ratios),
            "1/s",
            against="metering off",
            reference=off,
            at_least=_RATIO,
        )
    )
    report.rows.append(Row("metering on over off: lowest round", min(ratios), "x"))
    report.rows.append(Row("metering on over off: highest round", max(ratios), "x"))


def _compare_tokens(
    report: Report, options: OperateBenchOptions, progress: Callable[[str], None], stack: Stack, load: Worker
) -> None:
    """All requests so far, which went through the gateway that meters: its tokens beside those of the engine."""
    progress("what is metered, and what the engine counts")
    requests = options.metered_requests
    _rate(load, _way(stack, stack.gateway.port), requests)
    counted, metered = _counted_tokens(stack.engine), _metered_tokens(stack, requests)
    name = f"tokens counted by the engine, {requests} requests"
    report.rows.append(Row(name, counted, "tokens"))
    ratio, is_equal = metered / counted, metered == counted
    over = "metered tokens over tokens counted by the engines"
    report.rows.append(Row(over, metered, "tokens", ratio, "counted by the engine", "equal", is_equal))


def _counted_tokens(engine: Target) -> int:
    """What the engine says of all answers that it gave."""
    address = f"http://127.0.0.1:{engine.port}/counted"
    request = urllib.request.Request(address, headers={"authorization": f"Bearer {engine.key}"})
    with urllib.request.urlopen(request, timeout=_CALL_S) as answer:
        return sum(json.load(answer).values())


def _metered_tokens(stack: Stack, requests: int) -> int:
    """What is written of so many requests, once they are: gateways write every few seconds. Raises WorkerError."""
    deadline_s = time.monotonic() + _WRITTEN_S
    place = load_config(overrides={"cluster.state_dir": str(stack.state_dir)}).cluster.accounts_place
    written = 0
    with opened(place) as accounts:
        while time.monotonic() < deadline_s:
            if has_usage(accounts):
                with UsageStore(accounts) as store:
                    sums = [each.counts for each in store.sums(())]
                written = sum(counts.requests for counts in sums)
                if written >= requests:
                    return sum(counts.input_tokens + counts.output_tokens for counts in sums)
            time.sleep(_LOOK_S)
    raise WorkerError(f"{written} of {requests} requests were metered")


def _rate(load: Worker, way: dict[str, Any], requests: int) -> float:
    """Requests a second."""
    answer = load.ask(
        "all_at_once",
        way=way,
        requests=requests,
        clients=_CLIENTS,
        tokens=_PROMPT_TOKENS,
        output=_OUTPUT_TOKENS,
        timeout_s=_LIMIT_S,
    )
    return requests / float(answer["s"])


def _way(stack: Stack, port: int) -> dict[str, Any]:
    return {"port": port, "key": stack.gateway.key, "model": stack.gateway.model}

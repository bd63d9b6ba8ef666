"""A batch beside online load: what online requests lose by it, and how long it takes over what is idle.

The engine computes nothing, but takes its time for prompts, one after another. So what is idle is known: the ideal is
the batch alone, straight at the engine, over the share of time that online prompts leave.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from mooncache.bench.gateway.stack import Stack, Target, start_stack
from mooncache.bench.operate.load import arrivals, ids_body
from mooncache.bench.worker import Worker, WorkerError, processor_s
from mooncache.reporting.rows import Report, Row, bar_row, p99

if TYPE_CHECKING:
    from mooncache.bench.operate.options import OperateBenchOptions

_TTFT_RATIO: Final = 1.05
_TIME_RATIO: Final = 1.3
_OUTPUT_TOKENS: Final = 16
_EVENTS_PER_S: Final = 200.0
_CLIENTS: Final = 64
_LIMIT_S: Final = 300.0
_LOOK_S: Final = 0.05
_WARM_UP_S: Final = 8.0
_BOUNDARY: Final = "mooncache-bench"


@dataclass(frozen=True, slots=True)
class _BatchRound:
    """Times of the same online requests without and with a batch, of those that came while it ran; its seconds."""

    alone_ms: list[float]
    beside_ms: list[float]
    batch_s: float
    processor_s: float
    ideal_s: float


def rows(report: Report, options: OperateBenchOptions, progress: Callable[[str], None]) -> None:
    """Measure, and add the rows. Raises WorkerError."""
    progress("starting conductor, gateway and an engine that takes its time")
    rate = [
        "--prompt-tokens-per-s",
        f"{options.engine_tokens_per_s:g}",
        "--events-per-s",
        f"{_EVENTS_PER_S:g}",
    ]
    with (
        start_stack(engine=tuple(rate)) as stack,
        Worker("mooncache.bench.operate.load", [str(options.seed)]) as load,
    ):
        _online(load, stack.gateway, options, seed=0, seconds=_WARM_UP_S)
        rounds = [_round(stack, load, options, number, progress) for number in range(1, options.rounds + 1)]
    _add(report, options, rounds)


def _round(
    stack: Stack, load: Worker, options: OperateBenchOptions, number: int, progress: Callable[[str], None]
) -> _BatchRound:
    busy = options.online_per_s * options.online_prompt_tokens / options.engine_tokens_per_s
    progress(f"round {number}: {options.batch_prompts} prompts straight at the engine")
    straight = load.ask(
        "all_at_once",
        way=_way(stack.engine),
        requests=options.batch_prompts,
        clients=_CLIENTS,
        tokens=options.batch_prompt_tokens,
        output=_OUTPUT_TOKENS,
        timeout_s=_LIMIT_S,
    )
    ideal_s = straight["s"] / (1.0 - busy)
    lasts_s = 1.5 * ideal_s + 1.0
    progress(f"round {number}: online alone")
    alone = _online(load, stack.gateway, options, seed=number, seconds=lasts_s)
    progress(f"round {number}: online beside a batch")
    found: dict[str, Any] = {}
    before_s = processor_s(stack.gateway_pid)
    batch = Thread(target=_run_batch, args=(stack.gateway, options, number, found), daemon=True)
    batch.start()
    beside = _online(load, stack.gateway, options, seed=number, seconds=lasts_s)
    batch.join(_LIMIT_S)
    if "s" not in found:
        raise WorkerError(f"the batch did not end: {found.get('error', 'too slow')}")
    came = arrivals(number, options.online_per_s, lasts_s)
    count = max(1, sum(at_s < found["s"] for at_s in came))
    return _BatchRound(
        alone[:count], beside[:count], found["s"], processor_s(stack.gateway_pid) - before_s, ideal_s
    )


def _online(
    load: Worker, target: Target, options: OperateBenchOptions, *, seed: int, seconds: float
) -> list[float]:
    answer = load.ask(
        "arriving",
        way=_way(target),
        seed=seed,
        rate_per_s=options.online_per_s,
        seconds=seconds,
        tokens=options.online_prompt_tokens,
        output=_OUTPUT_TOKENS,
        timeout_s=_LIMIT_S,
    )
    times: list[float] = answer["ms"]
    return times


def _way(target: Target) -> dict[str, Any]:
    return {"port": target.port, "key": target.key, "model": target.model}


def _run_batch(target: Target, options: OperateBenchOptions, number: int, found: dict[str, Any]) -> None:
    """Submit a batch and wait for its end: `s` are the seconds that it took."""
    way = _way(target)
    lines = []
    for at in range(options.batch_prompts):
        body = ids_body(
            way, -1 - at - number * options.batch_prompts, options.batch_prompt_tokens, _OUTPUT_TOKENS
        )
        row = {"custom_id": f"{at}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(row))
    form = (
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="b.jsonl"\r\n\r\n'
        + "\n".join(lines)
        + f"\r\n--{_BOUNDARY}--\r\n"
    )
    try:
        file = _call(target, "/v1/files", form.encode(), f"multipart/form-data; boundary={_BOUNDARY}")
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        started_s = time.perf_counter()
        batch = _call(target, "/v1/batches", json.dumps(asked).encode(), "application/json")
        while not batch.get("completed_at") and time.perf_counter() < started_s + _LIMIT_S:
            time.sleep(_LOOK_S)
            batch = _call(target, f"/v1/batches/{batch['id']}", None, "")
        if batch["request_counts"]["completed"] != options.batch_prompts:
            found["error"] = f"{batch['status']}: {batch['request_counts']}"
            return
        found["s"] = time.perf_counter() - started_s
    except (OSError, ValueError, KeyError) as error:
        found["error"] = repr(error)


def _call(target: Target, path: str, body: bytes | None, content_type: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{target.port}{path}",
        data=body,
        headers={"authorization": f"Bearer {target.key}", "content-type": content_type},
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _add(report: Report, options: OperateBenchOptions, rounds: list[_BatchRound]) -> None:
    alone = [ms for each in rounds for ms in each.alone_ms]
    beside = [ms for each in rounds for ms in each.beside_ms]
    what = f"{options.batch_prompts} prompts of {options.batch_prompt_tokens} tokens beside online load"
    online = f"{options.online_per_s:g} a second of {options.online_prompt_tokens} tokens"
    report.add(Row(f"online first token, {online}: no batch, P99 of {len(alone)}", p99(alone), "ms"))
    report.add(Row(f"online first token, {online}: beside a batch, P99", p99(beside), "ms"))
    report.add(bar_row(f"{what}: online P99 over none", p99(beside) / p99(alone), "x", at_most=_TTFT_RATIO))
    mean = sum(beside) / sum(alone)
    report.add(Row(f"{what}: online mean over none", mean, "x"))
    took, ideal = sum(each.batch_s for each in rounds), sum(each.ideal_s for each in rounds)
    report.add(Row(f"{what}: ideal, what is idle is all used", ideal / len(rounds), "s"))
    report.add(bar_row(f"{what}: time over ideal", took / ideal, "x", at_most=_TIME_RATIO))
    used = sum(each.processor_s for each in rounds)
    requests = len(rounds) * options.batch_prompts
    report.add(
        Row("processor time of the gateway for both, for one request of a batch", 1e3 * used / requests, "ms")
    )

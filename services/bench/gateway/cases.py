"""The cases: what each asks the clients' process, and the rows made of its answers.

Added latency is the median through the gateway less the median of the same kind of request sent to the engine directly,
both measured in alternating rounds of one run.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mooncache.bench.gateway import prompts
from mooncache.bench.gateway.stack import Stack
from mooncache.bench.worker import Worker, processor_s
from mooncache.reporting.rows import Report, Row, bar_row, p99

if TYPE_CHECKING:
    from mooncache.bench.gateway.options import GatewayBenchOptions

_ADDED_MS = 5.0
_PROCESSOR_MS = 1.0
_OVER_DIRECT = 0.5
_TIMES_TOKENIZER = 1.2
_EVENTS_PER_S = 20_000
_ROUNDS = 21
_WARM_UP = 16
_TALK_EVENTS, _TALK_RATE = 50, 50.0  # a stream of one second


def start_load(stack: Stack, options: GatewayBenchOptions) -> Worker:
    """The clients' process."""
    return Worker("mooncache.bench.gateway.load", [str(stack.folder), str(options.seed)])


def token_rows(report: Report, options: GatewayBenchOptions) -> None:
    """The tokenising alone, in processor time: a long first turn, and a later turn that adds a little to it."""
    from tokenizers import Tokenizer

    from mooncache.gateway.tokens import PromptReader

    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-") as name:
        folder = Path(name)
        prompts.make_tokenizer(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        reader = PromptReader.load(folder, cache_bytes=256 << 20)
    assert reader is not None
    sample = prompts.text(dice, 100_000)
    per_token = len(sample) / len(tokenizer.encode(sample, add_special_tokens=False).ids)
    seconds: dict[str, list[float]] = {"first own": [], "first": [], "later own": [], "later": []}
    for _ in range(_ROUNDS):
        talk = prompts.conversation(dice, int(options.long_tokens * per_token), 8)
        grown = prompts.next_turn(dice, talk, int(options.added_tokens * per_token))
        for turn, messages, new in (("first", talk, talk), ("later", grown, grown[len(talk) :])):
            text = "".join(message["content"] for message in new)
            seconds[f"{turn} own"].append(_timed(partial(_encode, tokenizer, text)))
            seconds[turn].append(_timed(partial(reader.read, {"messages": messages}, True)))
    reader.close()
    ms = {name: 1e3 * median(values) for name, values in seconds.items()}
    for turn, what in (("first", f"{options.long_tokens}-token prompt"), ("later", _later(options))):
        own = Row(f"tokenizer alone, {what}, processor time", ms[f"{turn} own"], "ms")
        report.add(own)
        report.add(
            bar_row(
                f"prompt reader, {what}, processor time",
                ms[turn],
                "ms",
                against="tokenizer alone",
                reference=own.value,
                at_most=_TIMES_TOKENIZER,
            )
        )


def latency_rows(
    report: Report, stack: Stack, load: Worker, options: GatewayBenchOptions, progress: Callable[[str], None]
) -> None:
    """Time to the first event of short prompts."""
    targets = [asdict(stack.engine), asdict(stack.gateway), asdict(stack.split)]
    common: dict[str, Any] = {"targets": targets, "tokens": options.short_tokens}
    load.ask("first_token", **common, concurrency=4, requests=_WARM_UP, output=2, rate=0)
    progress("latency, one client")
    what = f"{options.short_tokens}-token prompt, 1 client"
    answer = load.ask("first_token", **common, concurrency=1, requests=options.requests, output=2, rate=0)
    _latencies(report, answer, what, bar=True)
    progress("latency, 32 clients")
    what = f"{options.short_tokens}-token prompt, 32 streams of {_TALK_RATE:g} tokens/s"
    answer = load.ask(
        "first_token",
        **common,
        concurrency=32,
        requests=max(64, options.requests // 2),
        output=_TALK_EVENTS,
        rate=_TALK_RATE,
    )
    _latencies(report, answer, what, bar=True)
    before_s = processor_s(stack.gateway_pid)
    alone = {**common, "targets": [asdict(stack.gateway)]}
    load.ask("first_token", **alone, concurrency=1, requests=options.requests, output=2, rate=0)
    used_ms = 1e3 * (processor_s(stack.gateway_pid) - before_s) / options.requests
    what = f"{options.short_tokens}-token prompt"
    name = f"processor time of the gateway for one request, {what}"
    report.add(bar_row(name, used_ms, "ms", at_most=_PROCESSOR_MS))
    progress("requests per second")
    answer = load.ask("first_token", **common, concurrency=32, requests=options.requests, output=1, rate=0)
    _latencies(report, answer, f"{options.short_tokens}-token prompt, 32 clients without pause", bar=False)
    direct, through, split = answer["per_s"]
    report.add(Row("requests, engine directly", direct, "1/s"))
    report.add(
        bar_row(
            "requests through the gateway",
            through,
            "1/s",
            against="engine directly",
            reference=direct,
            at_least=_OVER_DIRECT,
        )
    )
    report.add(Row("requests, prefill and decode", split, "1/s", split / direct, "engine directly"))


def turn_rows(
    report: Report,
    stack: Stack,
    load: Worker,
    options: GatewayBenchOptions,
    progress: Callable[[str], None],
    *,
    times_tokenizer: float = _TIMES_TOKENIZER,
) -> None:
    """Added time to the first event of long conversations, beside the tokenizer's own for the new text."""
    progress("turns of a long conversation")
    targets = [asdict(stack.engine), asdict(stack.gateway), asdict(stack.split)]
    common: dict[str, Any] = {
        "targets": targets,
        "tokens": options.long_tokens,
        "added": options.added_tokens,
    }
    load.ask("turns", **common, requests=1, timeout_s=300)
    answer = load.ask("turns", **common, requests=options.long_requests, timeout_s=600)
    for turn, what in (("first", f"{options.long_tokens}-token prompt"), ("later", _later(options))):
        direct, through, split = (median(values) for values in answer[f"{turn}_ms"])
        own = median(answer[f"own_{turn}_ms"])
        report.add(Row(f"first token, {what}: engine directly", direct, "ms"))
        report.add(Row(f"tokenizer alone, {what}, in the clients' process", own, "ms"))
        added = through - direct
        report.add(
            bar_row(
                f"added by the gateway, {what}",
                added,
                "ms",
                against="tokenizer alone",
                reference=own,
                at_most=times_tokenizer,
            )
        )
        report.add(Row(f"added with prefill and decode, {what}", split - direct, "ms"))


def relay_rows(
    report: Report, stack: Stack, load: Worker, options: GatewayBenchOptions, progress: Callable[[str], None]
) -> None:
    """Events per second through one gateway process, and what one costs when each comes alone."""
    progress("streams without pause")
    gateway, engine = asdict(stack.gateway), asdict(stack.engine)
    count: dict[str, Any] = {"streams": options.streams, "output": options.stream_events, "rate": 0}
    rates: dict[str, list[float]] = {"engine": [], "gateway": []}
    for _ in range(3):
        rates["engine"].append(load.ask("relay", target=engine, **count)["per_s"])
        rates["gateway"].append(load.ask("relay", target=gateway, **count)["per_s"])
    what = f"{options.streams} streams without pause"
    report.add(Row(f"events, {what}: engine directly", median(rates["engine"]), "1/s"))
    row = bar_row(
        f"events, {what}: through the gateway", median(rates["gateway"]), "1/s", at_least=_EVENTS_PER_S
    )
    report.add(row)
    progress("streams at a pace")
    paced: dict[str, object] = {
        "streams": options.paced_streams,
        "output": options.paced_events,
        "rate": options.paced_events_per_s,
    }
    before_s = processor_s(stack.gateway_pid)
    answer = load.ask("relay", target=gateway, **paced, timeout_s=300)
    used_s = processor_s(stack.gateway_pid) - before_s
    what = f"{options.paced_streams} streams of {options.paced_events_per_s:g} events/s"
    report.add(Row(f"events, {what}: through the gateway", answer["per_s"], "1/s"))
    report.add(
        Row(f"processor time of the gateway for one event, {what}", 1e6 * used_s / answer["events"], "us")
    )


def _latencies(report: Report, answer: dict[str, Any], what: str, *, bar: bool) -> None:
    direct, through, split = answer["ms"]
    report.add(Row(f"first token, {what}: engine directly", median(direct), "ms"))
    added = median(through) - median(direct)
    report.add(bar_row(f"added by the gateway, {what}, p50", added, "ms", at_most=_ADDED_MS if bar else None))
    report.add(Row(f"added by the gateway, {what}, p99", p99(through) - p99(direct), "ms"))
    report.add(Row(f"added with prefill and decode, {what}, p50", median(split) - median(direct), "ms"))


def _later(options: GatewayBenchOptions) -> str:
    return f"turn that adds {options.added_tokens} tokens to {options.long_tokens}"


def _timed(work: Callable[[], object]) -> float:
    """Processor time of this thread: a busy machine does not make one of two compared works slower."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids

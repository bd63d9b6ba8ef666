"""Replay: the workload that is made of a trace, the measuring client, and a whole replay before a made-up engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from mooncache.bench.replay import command
from mooncache.bench.replay.calibrate import Points, fit, middle_mean
from mooncache.bench.replay.client import Planned, ReplayTarget, replay
from mooncache.bench.replay.predict import Serving, predict, speed_for
from mooncache.bench.replay.run import ReplayOptions, run, workload
from mooncache.bench.replay.workload import Prompts, ReplayShape, conversations, sample_conversations, shrink
from mooncache.errors import EngineFailed, InvalidArgument, ProfileInvalid
from mooncache.traces import Trace, generate
from mooncache.traces.generator import conversation
from mooncache.traces.stats import stats


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(conversation(requests=3_000), random.Random(1))


def test_conversations_are_told_apart_as_they_were_made(trace: Trace) -> None:
    assert trace.session is not None
    groups = conversations(trace)
    # One group has one conversation's requests; a conversation whose window lost all of its history makes two.
    for group in range(groups.max() + 1):
        assert len(set(trace.session[groups == group].tolist())) == 1
    assert len(set(groups.tolist())) < 1.1 * len(set(trace.session.tolist()))


def test_a_sample_keeps_the_reuse_of_the_whole(trace: Trace) -> None:
    sample = sample_conversations(trace, 800, random.Random(2))
    assert 800 <= len(sample) < 900
    assert (np.diff(sample.arrival_s) >= 0).all()
    assert stats(sample).hit_ratio_blocks == pytest.approx(stats(trace).hit_ratio_blocks, abs=0.08)
    assert stats(trace.first(800)).hit_ratio_blocks < stats(sample).hit_ratio_blocks
    assert sample_conversations(trace, 10_000, random.Random(2)) is trace


def test_small_requests_share_what_the_large_ones_shared(trace: Trace) -> None:
    shape = ReplayShape(tokens_per_block=16, context_tokens=1024, output_tokens_max=64)
    small = shrink(trace, shape)
    assert (small.input_tokens + small.output_tokens).max() <= 1024
    assert small.output_tokens.min() >= 1
    prompts = Prompts(small, shape, seed=1)
    for row in range(0, 300, 7):
        tokens = prompts.tokens(row)
        assert len(tokens) == small.input_tokens[row]
        assert len(small.blocks(row)) == -(-len(tokens) // 16)
        assert trace.blocks(row)[: len(small.blocks(row))] == small.blocks(row)
    by_block: dict[int, list[int]] = {}
    for row in range(200):
        tokens = prompts.tokens(row)
        for number, block in enumerate(small.blocks(row)[:-1]):
            run_of_block = tokens[16 * number : 16 * number + 16]
            assert by_block.setdefault(block, run_of_block) == run_of_block


@pytest.mark.parametrize(
    "shape", [{"tokens_per_block": 0}, {"vocab": 10}, {"context_tokens": 100}, {"output_tokens_max": 0}]
)
def test_shapes_that_cannot_be_are_refused(shape: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        ReplayShape(**shape)


class ModelEngine:
    """An engine that takes the time its formula says: one prompt after the other, then a token every `step_s`."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.seen: set[tuple[int, ...]] = set()
        self.bodies: list[dict[str, Any]] = []
        self.fail_after = 10**9
        self.step_s = 0.004

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if len(self.bodies) > self.fail_after:
            return web.json_response({"error": {"message": "no more"}}, status=503)
        tokens: list[int] = body["prompt"]
        heads = [tuple(tokens[:end]) for end in range(16, len(tokens) + 1, 16)]
        cached = next((len(head) for head in reversed(heads) if head in self.seen), 0)
        async with self.lock:
            await asyncio.sleep(0.004 + 60e-6 * (len(tokens) - cached))
        self.seen.update(heads)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(body["max_tokens"]):
            if number:
                await asyncio.sleep(self.step_s)
            await response.write(b'data: {"choices":[{"index":0,"text":"x"}]}\n\n')
        usage = {
            "prompt_tokens": len(tokens),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        last = {"choices": [], "usage": usage}
        await response.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
        return response


@contextlib.asynccontextmanager
async def serving(engine: ModelEngine) -> AsyncIterator[ReplayTarget]:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", engine.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield ReplayTarget(f"http://127.0.0.1:{runner.addresses[0][1]}", "key", "model", timeout_s=20.0)
    finally:
        await runner.cleanup()


async def test_a_whole_replay_reports_measured_beside_predicted(trace: Trace) -> None:
    engine = ModelEngine()
    options = ReplayOptions(requests=40, shape=ReplayShape(16, 1024, 4096, 8), load=0.3)
    small = workload(trace, options)
    async with serving(engine) as endpoint:
        report = await run(small, endpoint, options, lambda _text: None)
    rows = {row.name: row for row in report.rows}
    assert rows["requests replayed"].value == len(small)
    assert rows["requests that failed"].met
    assert rows["ttft, mean, measured"].value > 4.0
    assert rows["ttft, mean, predicted"].against == "measured"
    # How near they are depends on who else uses this machine; that both are the same kind of number does not.
    ratio = rows["ttft, mean, predicted"].ratio
    assert ratio is not None
    assert 0.1 < ratio < 10
    assert rows["tbt, mean, measured"].value >= 0.5 * engine.step_s * 1e3
    cached = rows["cached share of prompt tokens, measured"].value
    assert 0.1 < cached == pytest.approx(rows["cached share of prompt tokens, predicted"].value, abs=0.1)
    error = rows["error of the predicted mean ttft"]
    assert error.unit == "%" and error.bar == "at most 15 %"
    assert json.loads(report.to_json())["rows"][0]["name"] == "requests replayed"
    body = engine.bodies[-1]
    assert body["stream"] and body["ignore_eos"] and body["min_tokens"] == body["max_tokens"]


async def test_an_endpoint_that_fails_is_said_so(trace: Trace) -> None:
    engine = ModelEngine()
    options = ReplayOptions(requests=12, shape=ReplayShape(16, 1024, 4096, 8), speed=10_000.0)
    small = workload(trace, options)
    async with serving(engine) as endpoint:
        engine.fail_after = 3
        with pytest.raises(EngineFailed, match="no more"):
            await run(small, endpoint, options, lambda _text: None)
        results = await replay(endpoint, [Planned(0.0, [1, 2, 3], 2)], lambda _sent, _ended: None)
        assert "503" in results[0].error
    gone = ReplayTarget(endpoint.url, "key", "model", timeout_s=1.0)
    results = await replay(gone, [Planned(0.0, [1], 1)], lambda _sent, _ended: None)
    assert results[0].error


async def test_requests_are_sent_when_the_trace_says() -> None:
    engine = ModelEngine()
    engine.step_s = 0.2  # the first answer is under way when the second request is sent
    planned = [Planned(0.0, [1] * 16, 3), Planned(0.1, [2] * 16, 1)]
    async with serving(engine) as endpoint:
        results = await replay(endpoint, planned, lambda _sent, _ended: None)
    assert not any(each.error for each in results)
    assert results[1].ttft_s < 0.15
    assert len(results[0].gaps_s) == 2
    assert results[0].output_tokens == 3


def exact_points(scale: float = 1.0) -> Points:
    points = Points(short_s=[0.015] * 5)
    for tokens, cached in (
        (50, 0),
        (100, 48),
        (400, 0),
        (800, 400),
        (1500, 0),
        (3000, 1488),
        (2000, 0),
        (900, 0),
    ):
        seconds = 0.02 + 2e-4 * (tokens - cached) + 5e-8 * (tokens**2 - cached**2)
        points.prefill[tokens, cached] = [seconds + 0.01] * 3
    for count in (1, 2, 4, 8):
        points.decode[count, 400 * count] = [0.004 + 0.001 * count] * 3
    points.prefill[400, 0] = [each * scale for each in points.prefill[400, 0]]
    return points


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_a_profile_comes_from_points_and_one_odd_point_is_left_out(scale: float) -> None:
    calibration = fit(exact_points(scale), "model")
    assert calibration.overhead_s == pytest.approx(0.01, rel=0.05)
    assert calibration.profile.prefill.seconds(1200, 0) == pytest.approx(0.02 + 0.24 + 0.072, rel=0.1)
    assert calibration.profile.decode.per_sequence_s * 3 + calibration.profile.decode.base_s == pytest.approx(
        0.007, rel=0.1
    )


def test_steps_of_a_busy_machine_still_take_time() -> None:
    points = exact_points()
    for (count, _), times in points.decode.items():
        times[:] = [0.004 * count**1.25] * 3  # as if many at once were hit by something else
    decode = fit(points, "model").profile.decode
    assert decode.base_s + decode.per_sequence_s > 0.003


def test_times_without_any_sense_are_no_profile() -> None:
    points = exact_points()
    for number, times in enumerate(points.prefill.values()):
        times[:] = [10.0 ** (number % 3)] * 3
    with pytest.raises(ProfileInvalid):
        fit(points, "model")


def test_hiccups_do_not_count() -> None:
    assert middle_mean([1.0, 1.0, 1.0, 1.0, 50.0]) == 1.0
    assert middle_mean([3.0]) == 3.0


def test_load_sets_the_speed_and_prediction_follows_it(trace: Trace) -> None:
    calibration = fit(exact_points(), "model")
    small = workload(trace, ReplayOptions(requests=300))
    slow, fast = (
        predict(small.speed(speed_for(small, Serving(), calibration, load)), Serving(), calibration, 1)
        for load in (0.1, 0.7)
    )
    assert slow.count(0) == fast.count(0) == len(small)
    assert fast.mean_ttft_s() > 1.2 * slow.mean_ttft_s()
    assert slow.ttft_s.min() > calibration.overhead_s
    divided = predict(small.speed(5.0), Serving(prefill=1, decode=1), calibration, 1)
    assert divided.count(0) == len(small)


@pytest.mark.parametrize("wrong", [{"decode": 0}, {"prefill": -1}, {"batch_max": 0}, {"chunk_tokens": 0}])
def test_clusters_that_cannot_be_are_refused_before_anything_is_sent(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=str(next(iter(wrong.values())))):
        Serving(**wrong)


def test_a_report_that_cannot_be_written_is_said_before_the_replay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncache.bench.replay.command._report", lambda *_: pytest.fail("it was played"))
    assert command.replay(markdown=Path("/nowhere/page.md")) == 2
    assert "there is no folder" in " ".join(capsys.readouterr().err.split())

"""Requests under which engines end, and answers that nobody can take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from mooncache.gateway.core import offenders
from mooncache.gateway.core.offenders import Offenders, digest_of
from mooncache.gateway.shell import engines as shell
from tests.gateway.stand_in import Bench, FakeEngine, good, running
from tests.gateway.test_requests import CHAT, ask


async def dies(_engine: FakeEngine, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    """The connection breaks while the engine has the request."""
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "100"})
    await response.prepare(request)
    assert request.transport is not None
    request.transport.abort()
    return response


def asked(bench: Bench) -> int:
    return sum(len(engine.requests) for engine in bench.engines.values())


async def test_a_request_that_ends_engines_is_not_handed_from_one_to_the_next(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    engines = [FakeEngine(name, behave=dies) for name in "abcd"]
    async with running(tmp_path, engines) as bench:
        bench.conductor.plans = [bench.plan(name) for name in "abcdabcd"]
        status, answer, _ = await ask(bench, http, CHAT)
        assert (status, answer["error"]["code"], asked(bench)) == (502, "engine_failed", 2)
        assert (await ask(bench, http, CHAT))[0] == 502
        assert asked(bench) == 3
        status, answer, headers = await ask(bench, http, CHAT)
        assert (status, answer["error"]["code"], asked(bench)) == (400, "request_ends_engines", 3)
        assert headers["x-should-retry"] == "false"
        for engine in engines:
            engine.behave = good
        other = {**CHAT, "messages": [{"role": "user", "content": "something else"}]}
        assert (await ask(bench, http, other))[0] == 200
        bench.gateway.state.offenders.check()


async def test_a_request_whose_engine_was_killed_is_served_by_another_and_forgotten(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running(tmp_path, [FakeEngine("a", behave=dies), FakeEngine("b")]) as bench:
        for _ in range(2 * offenders.DEATHS_MAX):
            bench.conductor.plans = [bench.plan("a"), bench.plan("b")]
            assert (await ask(bench, http, CHAT))[0] == 200


async def test_an_answer_that_is_too_large_is_not_generated_again_and_is_charged(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "ANSWER_BYTES_MAX", 100)
    engines = [FakeEngine("a"), FakeEngine("b")]
    async with running(tmp_path, engines, gateway__tokens_per_minute=1000) as bench:
        bench.conductor.plans = [bench.plan("a"), bench.plan("b")]
        status, answer, headers = await ask(bench, http, CHAT)
        assert (status, answer["error"]["code"]) == (502, "answer_too_large")
        assert headers["x-should-retry"] == "false"
        assert asked(bench) == 1
        assert 'output_tokens_total{model="test-model"} 25.0' in bench.gateway.metrics.render().decode()


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.floats(0, 400), st.booleans()), max_size=60))
def test_deaths_are_counted_until_a_request_is_served_or_time_has_passed(
    steps: list[tuple[bytes, float, bool]],
) -> None:
    book, expected, now_s = Offenders(), dict[bytes, tuple[float, int]](), 0.0
    for digest, pause_s, is_served in steps:
        now_s += pause_s
        at_s, count = expected.get(digest, (now_s, 0))
        count = count if now_s - at_s < offenders.WINDOW_S else 0
        assert book.deaths(digest, now_s) == count
        if is_served:
            book.served(digest)
            expected.pop(digest, None)
        else:
            assert book.died(digest, now_s) == count + 1
            expected[digest] = (now_s, count + 1)
        book.check()


def test_what_is_remembered_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offenders, "DIGEST_COUNT_MAX", 2)
    book = Offenders()
    for name in (b"a", b"b", b"c"):
        book.died(name, 1.0)
    assert [book.deaths(name, 1.0) for name in (b"a", b"b", b"c")] == [0, 1, 1]


def test_equal_requests_have_equal_digests() -> None:
    long = b"x" * 300_000
    texts = [(b"/a", b"1"), (b"/b", b"1"), (b"/a", long), (b"/a", long + b"x"), (b"/a", long[:-1] + b"y")]
    assert len({digest_of(path.decode(), data) for path, data in texts}) == len(texts)
    assert digest_of("/a", bytes(bytearray(long))) == digest_of("/a", long)

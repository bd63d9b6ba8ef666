"""Info lines over the limit are left out and counted; nothing else is ever lost."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from mooncache.runtime import logs
from mooncache.runtime.log_limit import LineLimit
from mooncache.runtime.logs import Event

log = logs.get_logger(__name__)


def test_each_event_has_a_limit_of_its_own_in_each_second() -> None:
    limit = LineLimit(2)
    assert [limit.admit("a", 10.0 + at / 10) for at in range(5)] == [True, True, False, False, False]
    assert limit.admit("b", 10.4)
    assert limit.over(10.9) == [], "its second is not over"
    assert limit.over(11.0) == [("a", 3)]
    assert limit.over(11.0) == [], "told once"
    assert limit.admit("a", 11.0)
    assert limit.rest() == []


def test_no_limit_leaves_nothing_out() -> None:
    limit = LineLimit(0)
    assert all(limit.admit("a", 1.0) for _ in range(1000))
    assert limit.rest() == []


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 0.5)), max_size=60),
)
def test_every_line_is_written_or_told(lines_per_s: int, lines: list[tuple[str, float]]) -> None:
    limit, now_s = LineLimit(lines_per_s), 0.0
    came, written, told = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    for event, later_s in lines:
        now_s += later_s
        for name, count in limit.over(now_s):
            told[name] += count
        came[event] += 1
        written[event] += limit.admit(event, now_s)
        limit.check()
    for name, count in limit.rest():
        told[name] += count
    assert all(came[event] == written[event] + told[event] for event in "abc")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    made = io.StringIO()
    logs.setup("test", log_format="json", stream=made, info_lines_per_s=3)
    yield made
    logs.reset()


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_what_is_left_out_is_counted_and_trouble_is_not_left_out(stream: io.StringIO) -> None:
    with structlog.contextvars.bound_contextvars(request_id="r"):
        for _ in range(50):
            log.info(Event.HTTP_FINISHED)
            log.warning(Event.LEG_FAILED)
            log.error(Event.DUTY_FAILED)
    logs.reset()
    lines = lines_of(stream)
    counts = {name: sum(line["event"] == name for line in lines) for name in ("leg.failed", "duty.failed")}
    assert counts == {"leg.failed": 50, "duty.failed": 50}
    told = [line for line in lines if line["event"] == "log.lines_left_out"]
    written = sum(line["event"] == "http.finished" for line in lines)
    assert 3 <= written < 50
    assert written + sum(line["lines"] for line in told) == 50
    assert {(line["of"], line["service"], line["level"]) for line in told} == {
        ("http.finished", "test", "info")
    }
    assert all("request_id" not in line for line in told), "it is about many calls"


def test_another_level_keeps_the_limit_and_tells_what_was_left_out(stream: io.StringIO) -> None:
    for _ in range(10):
        log.info(Event.HTTP_FINISHED)
    logs.set_level("debug")
    for _ in range(10):
        log.info(Event.HTTP_FINISHED)
        log.debug(Event.RPC_FINISHED)
    logs.reset()
    lines = lines_of(stream)
    assert sum(line["event"] == "rpc.finished" for line in lines) == 10, "who asks for debug wants all of it"
    told = sum(line["lines"] for line in lines if line["event"] == "log.lines_left_out")
    assert told == 20 - sum(line["event"] == "http.finished" for line in lines) > 0

"""The parts of a request on one line of time, from what gateways and engines reported."""

from __future__ import annotations

from typing import Any

from mooncache.conductor.core.spans import LegSpan, spans

PREFILL: dict[str, Any] = {"leg": "prefill", "instance": "p", "sent_ms": 2.0, "ended_ms": 60.0, "code": "OK"}
DECODE: dict[str, Any] = {"leg": "decode", "instance": "d", "sent_ms": 3.0, "ended_ms": 500.0, "code": "OK"}
OPEN = {**DECODE, "ended_ms": 0.0, "code": ""}


def cache(waited_ms: float = 0.0, load_ms: float = 0.0, **more: float) -> dict[str, Any]:
    return {"waited_ms": waited_ms, "load_ms": load_ms, **more}


def event(phase: str, elapsed_ms: float, *legs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"phase": phase, "elapsed_ms": elapsed_ms, "legs": list(legs), **more}


def served(prefill: dict[str, Any], decode: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        event("prefilled", 60.0, prefill),
        event("first_token", 90.0, OPEN, answer_is_whole=False),
        event("finished", 500.0, prefill, decode),
    ]


def test_both_legs_with_their_parts() -> None:
    events = served({**PREFILL, "cache": cache(1.0, 10.0)}, {**DECODE, "cache": cache(62.0, 15.0)})
    assert spans(events, {"queue_ms": 20.0}) == [
        LegSpan("gateway", "", "plan", 0.0, 2.0),
        LegSpan("prefill", "p", "wait", 2.0, 3.0),
        LegSpan("prefill", "p", "load", 3.0, 13.0),
        LegSpan("prefill", "p", "queue", 13.0, 22.0),
        LegSpan("prefill", "p", "compute", 22.0, 60.0),
        LegSpan("decode", "d", "wait", 3.0, 65.0),
        LegSpan("decode", "d", "load", 65.0, 80.0),
        LegSpan("decode", "d", "compute", 80.0, 90.0),
        LegSpan("decode", "d", "generate", 90.0, 500.0),
    ]


def test_what_was_loaded_while_the_leg_waited_reaches_back() -> None:
    events = served(PREFILL, {**DECODE, "cache": cache(62.0, 15.0, hidden_ms=12.0)})
    found = {(each.leg, each.part): (each.from_ms, each.to_ms) for each in spans(events, {})}
    assert found["decode", "wait"] == (3.0, 65.0)
    assert found["decode", "load"] == (53.0, 68.0)
    assert found["decode", "compute"] == (68.0, 90.0)
    everything = served(PREFILL, {**DECODE, "cache": cache(62.0, 15.0, hidden_ms=99.0)})
    found = {(each.leg, each.part): (each.from_ms, each.to_ms) for each in spans(everything, {})}
    assert found["decode", "load"] == (50.0, 65.0), "no more than all of it was hidden"


def test_what_an_engine_did_not_say_is_unknown() -> None:
    parts = [(each.leg, each.part) for each in spans(served(PREFILL, DECODE), {})]
    assert parts == [
        ("gateway", "plan"),
        ("prefill", "compute"),
        ("decode", "unknown"),
        ("decode", "generate"),
    ]


def test_nothing_lies_behind_the_end_of_its_leg() -> None:
    """Clocks of two machines: an engine may say that it waited longer than the gateway saw the leg last."""
    events = served({**PREFILL, "cache": cache(900.0, 900.0)}, {**DECODE, "cache": cache(900.0, 900.0)})
    found = spans(events, {"queue_ms": 1e6})
    assert all(each.from_ms < each.to_ms for each in found)
    assert max(each.to_ms for each in found if each.leg == "prefill") == 60.0
    assert max(each.to_ms for each in found if each.part != "generate") == 90.0


def test_an_answer_that_is_not_streamed_has_no_first_token() -> None:
    events = [event("first_token", 480.0, OPEN, answer_is_whole=True), event("finished", 500.0, DECODE)]
    assert [each.part for each in spans(events, {})] == ["plan", "unknown"]


def test_a_leg_that_was_replaced_is_shown_too() -> None:
    failed = {**DECODE, "instance": "d0", "sent_ms": 2.0, "ended_ms": 30.0, "code": "ENGINE_FAILED"}
    again = {**DECODE, "sent_ms": 31.0, "cache": cache(1.0, 2.0)}
    events = [
        event("first_token", 90.0, {**again, "ended_ms": 0.0}, answer_is_whole=False),
        event("finished", 500.0, failed, again),
    ]
    assert [(each.instance, each.part) for each in spans(events, {})] == [
        ("", "plan"),
        ("d0", "unknown"),
        ("d", "wait"),
        ("d", "load"),
        ("d", "compute"),
        ("d", "generate"),
    ]


def test_a_request_that_is_still_running_ends_where_it_was_seen_last() -> None:
    running = spans([event("prefilled", 60.0, PREFILL)], {})
    assert running[-1] == LegSpan("prefill", "p", "compute", 2.0, 60.0)
    assert spans([], {}) == [] and spans([event("aborted", 5.0)], {}) == []

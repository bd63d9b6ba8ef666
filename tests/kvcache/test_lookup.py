"""Questions to the pool: each ends with an answer, at its deadline, or because nobody wants it any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache.client.results import MatchResult
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.errors import DeadlineExceeded, MasterUnavailable, NodeUnavailable, NoNodes
from mooncache.kvcache.leg_hint import CacheOutcome
from mooncache.kvcache.lookup import LookupOutcome, LookupRequest, LookupResult, Lookups
from mooncache.kvcache.pool_link import Breaker, PoolLink
from tests.conditions import wait_until
from tests.kvcache.conftest import WAIT_S
from tests.kvcache.faulty import FaultyPool


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def chain(count: int) -> bytes:
    return b"".join(key(number) for number in range(count))


@pytest.fixture
def lookups(faulty_link: PoolLink) -> Iterator[Lookups]:
    made = Lookups(faulty_link, timeout_s=1.0, retry_s=0.001, patience_s=0.05)
    yield made
    made.close()


def answer_of(lookups: Lookups, name: str) -> LookupResult:
    return wait_until(lambda: lookups.take(name), "an answer", every_s=0.002)


def test_the_answer_says_what_is_there(faulty: FaultyPool, lookups: Lookups) -> None:
    faulty.blocks = {key(0): b"", key(1): b"", key(3): b""}
    lookups.ask(LookupRequest("r", chain(4)))
    answer = answer_of(lookups, "r")
    assert (answer.present, answer.outcome) == ((True, True, False, True), LookupOutcome.FOUND)
    assert lookups.take("r") is None
    assert lookups.pending == 0


def test_awaited_blocks_are_waited_for(faulty: FaultyPool, lookups: Lookups) -> None:
    lookups.ask(LookupRequest("r", chain(4), awaited=3, deadline_s=time.monotonic() + WAIT_S))
    wait_until(lambda: "watch" in faulty.calls, "a wait")
    assert lookups.take("r") is None
    assert lookups.pending == 1
    faulty.blocks = {key(2): b""}  # the last one came first
    lookups.ask(LookupRequest("other", chain(1)))
    answer_of(lookups, "other")
    assert lookups.take("r") is None
    faulty.blocks = {key(0): b"", key(1): b"", key(2): b""}
    answer = answer_of(lookups, "r")
    assert (answer.present, answer.outcome) == ((True, True, True, False), LookupOutcome.FOUND)
    assert answer.waited_s > 0


def test_a_wait_costs_one_match_and_one_parked_call_for_what_is_missing(
    faulty: FaultyPool, lookups: Lookups
) -> None:
    faulty.blocks = {key(0): b"", key(2): b""}
    question = LookupRequest("r", chain(9), awaited=6, deadline_s=time.monotonic() + WAIT_S, node="n2")
    lookups.ask(question)
    wait_until(lambda: "watch" in faulty.calls, "a wait")
    faulty.blocks |= {key(number): b"" for number in range(6)}
    assert answer_of(lookups, "r").present == (True,) * 6 + (False,) * 3
    assert faulty.calls == ["match", "watch"]
    assert faulty.watched == [("n2", 4)]


def test_a_writer_that_gives_up_ends_the_wait(faulty: FaultyPool, lookups: Lookups) -> None:
    lookups.ask(LookupRequest("r", chain(5), awaited=5, deadline_s=time.monotonic() + WAIT_S, node="n1"))
    wait_until(lambda: "watch" in faulty.calls, "a wait")
    faulty.blocks = {key(0): b""}
    faulty.give_up([key(number) for number in range(1, 5)], node="n1", timeout_s=1.0)
    answer = answer_of(lookups, "r")
    assert (answer.present, answer.outcome) == ((True, *[False] * 4), LookupOutcome.TIMEOUT)


def test_blocks_before_the_one_that_was_given_up_are_still_awaited(
    faulty: FaultyPool, lookups: Lookups
) -> None:
    lookups.ask(LookupRequest("r", chain(8), awaited=8, deadline_s=time.monotonic() + WAIT_S))
    wait_until(lambda: "watch" in faulty.calls, "a wait")
    faulty.give_up([key(7)], timeout_s=1.0)
    wait_until(lambda: (None, 4) in faulty.watched, "the leading half is awaited")
    assert lookups.take("r") is None
    faulty.blocks = {key(number): b"" for number in range(7)}
    answer = answer_of(lookups, "r")
    assert (answer.present, answer.outcome) == ((True,) * 7 + (False,), LookupOutcome.TIMEOUT)


def test_a_block_that_was_saved_at_another_node_is_found_by_the_last_look(
    faulty: FaultyPool, lookups: Lookups
) -> None:
    faulty.elsewhere = {key(1)}
    lookups.ask(LookupRequest("r", chain(3), awaited=3, deadline_s=time.monotonic() + WAIT_S, node="n1"))
    wait_until(lambda: "watch" in faulty.calls, "a wait")
    faulty.given_up = {key(1)}  # its writer says so at the node that has it not
    faulty.blocks = {key(0): b"", key(1): b""}
    wait_until(lambda: len(faulty.watched) >= 2, "the rest is awaited")
    faulty.blocks[key(2)] = b""
    assert answer_of(lookups, "r").outcome == LookupOutcome.FOUND


def test_when_the_node_cannot_be_reached_blocks_are_awaited_at_any_other(
    faulty: FaultyPool, lookups: Lookups
) -> None:
    faulty.unwatchable = {"n1"}
    lookups.ask(LookupRequest("r", chain(3), awaited=3, deadline_s=time.monotonic() + WAIT_S, node="n1"))
    wait_until(lambda: (None, 3) in faulty.watched, "a wait at any node")
    faulty.blocks = {key(number): b"" for number in range(3)}
    assert answer_of(lookups, "r").outcome == LookupOutcome.FOUND


def test_when_no_node_takes_a_wait_the_pool_is_asked_again(faulty: FaultyPool, lookups: Lookups) -> None:
    faulty.unwatchable = {None}
    lookups.ask(LookupRequest("r", chain(3), awaited=3, deadline_s=time.monotonic() + WAIT_S))
    wait_until(lambda: faulty.calls.count("match") > 3, "it is asked again")
    faulty.blocks = {key(number): b"" for number in range(3)}
    assert answer_of(lookups, "r").outcome == LookupOutcome.FOUND


def test_at_the_deadline_the_answer_is_what_there_is(faulty: FaultyPool, lookups: Lookups) -> None:
    faulty.blocks = {key(0): b""}
    lookups.ask(LookupRequest("r", chain(3), awaited=3, deadline_s=time.monotonic()))
    answer = answer_of(lookups, "r")
    assert (answer.present, answer.outcome) == ((True, False, False), LookupOutcome.TIMEOUT)


def test_many_that_wait_cost_one_call_each(faulty: FaultyPool, lookups: Lookups) -> None:
    for number in range(50):
        lookups.ask(LookupRequest(f"r{number}", chain(3), awaited=3, deadline_s=time.monotonic() + WAIT_S))
    wait_until(lambda: faulty.calls.count("watch") == 50, "all wait")
    faulty.blocks = {key(number): b"" for number in range(3)}
    for number in range(50):
        assert answer_of(lookups, f"r{number}").outcome == LookupOutcome.FOUND
    assert (faulty.calls.count("match"), faulty.calls.count("watch")) == (50, 50)


@pytest.mark.parametrize("error", [NodeUnavailable("gone"), ZeroDivisionError()])
def test_a_failing_pool_is_a_miss(faulty: FaultyPool, lookups: Lookups, error: Exception) -> None:
    faulty.error = error
    lookups.ask(LookupRequest("r", chain(3), awaited=3, deadline_s=time.monotonic() + WAIT_S))
    answer = answer_of(lookups, "r")
    assert (answer.present, answer.outcome) == ((), LookupOutcome.FAILED)
    faulty.error = None
    lookups.ask(LookupRequest("later", chain(3)))
    assert answer_of(lookups, "later").outcome == LookupOutcome.FOUND  # the thread goes on


def test_a_pool_without_nodes_is_absent(faulty: FaultyPool, lookups: Lookups) -> None:
    """Nobody can save what is awaited either."""
    awaiting = LookupRequest("r", chain(3), awaited=3, deadline_s=time.monotonic() + WAIT_S)
    faulty.error = NoNodes("the last one left")
    lookups.ask(awaiting)
    assert answer_of(lookups, "r").outcome == LookupOutcome.ABSENT
    faulty.error, faulty.unreachable_nodes = None, 2
    lookups.ask(awaiting)
    answer = answer_of(lookups, "r")
    assert (answer.present, answer.outcome) == ((False, False, False), LookupOutcome.ABSENT)
    faulty.unreachable_nodes, faulty.blocks = 1, {key(0): b""}
    lookups.ask(LookupRequest("r", chain(3)))
    answer = answer_of(lookups, "r")
    assert (answer.present, answer.outcome) == ((True, False, False), LookupOutcome.FOUND)


@pytest.mark.parametrize("error", [DeadlineExceeded("a second passed"), NodeUnavailable("gone")])
def test_a_pool_that_is_silent_for_a_moment_does_not_end_the_waiting(
    faulty: FaultyPool, error: Exception
) -> None:
    link = PoolLink(lambda: faulty)
    assert link.connected.wait(WAIT_S)
    lookups = Lookups(link, timeout_s=1.0, retry_s=0.001, patience_s=WAIT_S)
    try:
        faulty.blocks = {key(0): b""}
        lookups.ask(LookupRequest("before", chain(1)))
        assert answer_of(lookups, "before").outcome == LookupOutcome.FOUND
        faulty.error = error
        lookups.ask(LookupRequest("r", chain(3), awaited=3, deadline_s=time.monotonic() + WAIT_S))
        lookups.ask(LookupRequest("awaits nothing", chain(3)))
        assert answer_of(lookups, "awaits nothing").outcome in {LookupOutcome.FAILED, LookupOutcome.ABSENT}
        # three failures in a row: the pool is left alone for a while
        wait_until(lambda: link.client() is None, "the link opened its breaker")
        assert lookups.take("r") is None
        faulty.blocks |= {key(1): b"", key(2): b""}
        faulty.error = None
        assert answer_of(lookups, "r").outcome == LookupOutcome.FOUND
    finally:
        lookups.close()
        link.close()


def test_a_pool_that_was_never_reached_is_not_waited_for() -> None:
    def connect() -> FaultyPool:
        raise MasterUnavailable("refused")

    link = PoolLink(connect)
    lookups = Lookups(link, timeout_s=1.0, retry_s=0.001, patience_s=10 * WAIT_S)
    try:
        lookups.ask(LookupRequest("r", chain(3), awaited=3, deadline_s=time.monotonic() + 10 * WAIT_S))
        assert answer_of(lookups, "r").outcome == LookupOutcome.ABSENT
    finally:
        lookups.close()
        link.close()


def test_a_client_that_breaks_while_blocks_are_awaited_ends_no_thread(
    faulty: FaultyPool, lookups: Lookups
) -> None:
    lookups.ask(LookupRequest("r", chain(3), awaited=3, deadline_s=time.monotonic() + 0.5))
    wait_until(lambda: "watch" in faulty.calls or not lookups.pending, "a wait")
    faulty.error = ZeroDivisionError()
    assert answer_of(lookups, "r").outcome in {LookupOutcome.FAILED, LookupOutcome.TIMEOUT}


def test_a_pool_that_goes_away_ends_the_waiting(
    faulty: FaultyPool, faulty_link: PoolLink, lookups: Lookups
) -> None:
    lookups.ask(LookupRequest("r", chain(3), awaited=3, deadline_s=time.monotonic() + WAIT_S))
    assert faulty.entered.wait(WAIT_S)
    faulty_link.close()
    assert answer_of(lookups, "r").outcome == LookupOutcome.ABSENT


def test_questions_behind_one_that_hangs_end_with_their_own_time(
    faulty: FaultyPool, faulty_link: PoolLink
) -> None:
    """One thread asks. With a node that is slow the n-th request must not wait n times the limit."""
    faulty.gate = threading.Event()
    lookups = Lookups(faulty_link, timeout_s=0.05, retry_s=0.001)
    try:
        for number in range(20):
            lookups.ask(LookupRequest(f"r{number}", chain(4)))
        lookups.ask(LookupRequest("waits", chain(4), awaited=2, deadline_s=time.monotonic() + 0.01))
        assert {answer_of(lookups, f"r{number}").outcome for number in range(20)} == {LookupOutcome.FAILED}
        assert answer_of(lookups, "waits").outcome == LookupOutcome.TIMEOUT
        assert faulty.calls == ["match"]  # the first one hangs still
        assert lookups.pending == 0
        faulty.gate.set()
        faulty.blocks = {key(0): b""}

        def found() -> bool:  # asked again, because the time limit is short for a busy machine
            lookups.ask(LookupRequest("later", chain(1)))
            return answer_of(lookups, "later").outcome is LookupOutcome.FOUND

        wait_until(found, "the pool's answer")
    finally:
        faulty.gate.set()
        lookups.close()


def test_a_withdrawn_question_has_no_answer(faulty: FaultyPool, lookups: Lookups) -> None:
    faulty.gate = threading.Event()
    lookups.ask(LookupRequest("gone", chain(1)))
    assert faulty.entered.wait(WAIT_S)
    lookups.withdraw("gone")
    lookups.ask(LookupRequest("kept", chain(1)))
    faulty.gate.set()
    assert answer_of(lookups, "kept").outcome == LookupOutcome.FOUND
    assert lookups.take("gone") is None


def test_asking_again_replaces_the_question(faulty: FaultyPool, lookups: Lookups) -> None:
    faulty.gate = threading.Event()
    lookups.ask(LookupRequest("r", chain(1)))
    assert faulty.entered.wait(WAIT_S)
    lookups.ask(LookupRequest("r", chain(2)))
    faulty.gate.set()
    assert len(answer_of(lookups, "r").present) == 2


# --- what asking may cost, and where blocks lie ------------------------------------------------------------------


class Stalled(FaultyPool):
    """A match takes all the time that it has."""

    def match(self, keys: Any, *, touch: bool = True, timeout_s: float | None = None) -> MatchResult:
        self._enter("match")
        threading.Event().wait(timeout_s)
        raise DeadlineExceeded("late")


def test_a_pool_that_is_late_is_not_waited_for_and_has_not_failed() -> None:
    stalled = Stalled()
    link = PoolLink(lambda: stalled, breaker=Breaker(failures_max=1))
    assert link.connected.wait(WAIT_S)
    lookups = Lookups(link)
    try:
        for number in range(3):
            lookups.ask(LookupRequest(f"r{number}", chain(3), limit_s=0.01))
            answer = answer_of(lookups, f"r{number}")
            assert (answer.outcome, answer.present) == (LookupOutcome.LATE, ())
            assert answer.outcome.reported() is CacheOutcome.FAILED
            assert answer.reason.startswith("not loaded: the pool did not say within ")
        assert link.usable, "it had less time than a failure takes"
        lookups.ask(LookupRequest("slow", chain(3)))
        answer = answer_of(lookups, "slow")
        assert (answer.outcome, answer.reason) == (LookupOutcome.FAILED, "")
        wait_until(lambda: not link.usable, "that counts as a failure")
    finally:
        lookups.close()
        link.close()


def test_the_match_says_where_blocks_lie(faulty: FaultyPool, lookups: Lookups) -> None:
    faulty.blocks = {key(0): b"", key(1): b"", key(3): b""}
    faulty.places = {key(0): ("n2", "dram"), key(1): ("n1", "ssd"), key(3): ("n1", "dram")}
    lookups.ask(LookupRequest("r", chain(4), with_places=True))
    assert answer_of(lookups, "r").places == ("n2 (dram)", "n1 (ssd)"), "of the leading ones"
    lookups.ask(LookupRequest("without", chain(4)))
    assert answer_of(lookups, "without").places == ()
    faulty.blocks = {}
    lookups.ask(LookupRequest("none", chain(4), with_places=True))
    assert answer_of(lookups, "none").places == ()
    assert faulty.calls == ["match"] * 3, "no other call"


def test_a_pool_of_one_node_is_one_place(real_link: PoolLink) -> None:
    client = real_link.client()
    assert client is not None
    client.put_many([key(77)], [b"x"])
    lookups = Lookups(real_link)
    try:
        lookups.ask(LookupRequest("r", key(77) + key(78), with_places=True))
        answer = answer_of(lookups, "r")
        assert (answer.present, answer.places) == ((True, False), ("node-1 (dram)",) * 2)
    finally:
        lookups.close()


def test_each_copy_has_the_place_of_the_node_that_is_read(tmp_path: Path) -> None:
    settings = ClusterSettings(state_dir=tmp_path, nodes=2, capacity_bytes=64 << 20, port=0)
    with EmbeddedCluster(settings) as pair:
        link = PoolLink(lambda: mooncache.connect(**pair.client_settings()))
        assert link.connected.wait(WAIT_S)
        client = link.client()
        assert client is not None
        client.put_many([key(1)], [b"x"], prefer_node="node-2")
        client.put_many([key(2)], [b"x"], prefer_node="node-1")
        lookups = Lookups(link)
        try:
            lookups.ask(LookupRequest("r", key(1) + key(2), with_places=True))
            assert answer_of(lookups, "r").places == ("node-2 (dram)", "node-1 (dram)")
        finally:
            lookups.close()
            link.close()

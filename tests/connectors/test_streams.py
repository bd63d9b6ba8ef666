"""Streamed loads under vLLM's own scheduler: a promise that is kept late, in part or not at all gives the same tokens,
and delays no other request. What vLLM does with it is in the table of traps of docs/vllm-connector.md."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mooncache.connectors.vllm.core.book import RequestBook
from mooncache.errors import ChecksumMismatch, NoSpace
from mooncache.kvcache.core import streaming
from mooncache.kvcache.core.streaming import EngineMemory, Streaming, StreamMode, WaitPlace
from mooncache.kvcache.passport import Passport
from mooncache.kvcache.transfers import MoveFailure
from tests.conditions import wait_until
from tests.connectors.harness import BLOCK_TOKENS, Harness, Make, ask, expected, prompt, warm
from tests.connectors.test_core import PASSPORT, SIZE, add, answer
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

ON = {"mooncache.stream": "on"}
COUNT = 10 * BLOCK_TOKENS + 7
WAITS = ask("decode", wait_tokens=10 * BLOCK_TOKENS, wait_ms=30_000, store_node="n2")


@pytest.fixture
def later(make: Make, faulty: FaultyPool) -> Callable[[list[int]], list[tuple[bytes, bytes]]]:
    """The blocks of a prompt as a prefill engine saves them, taken out of the pool again."""

    def taken(tokens: list[int]) -> list[tuple[bytes, bytes]]:
        engine = make()
        engine.add("p", tokens, max_tokens=1, ask=ask("prefill", store_node="n2"))
        engine.run()
        blocks = list(faulty.blocks.items())
        faulty.blocks = {}
        faulty.calls.clear()
        return blocks

    return taken


class Full(dict[bytes, int]):
    """Every block is refused."""

    def get(self, key: bytes, default: Any = None) -> Any:
        return NoSpace.code


def streaming_request(decode: Harness, tokens: list[int], name: str = "d", **more: Any) -> Any:
    """A decode leg whose load is under way."""
    request = decode.add(name, tokens, ask={**WAITS, **more})
    decode.run_until(lambda: decode.status(name) == "WAITING_FOR_REMOTE_KVS")
    return request


def check(decode: Harness, tokens: list[int], name: str = "d") -> dict[str, Any]:
    """What was reported of a request that is over, with the right tokens and nothing left behind."""
    assert decode.outputs[name] == expected(tokens, 4)
    assert decode.leaked_blocks == 0
    decode.connector._scheduler._book.check()
    reported: dict[str, Any] = decode.reported(name)
    return reported


# --- the promise is kept late, in part, or not -------------------------------------------------------------------


def test_blocks_are_loaded_as_they_are_committed(
    make: Make, faulty: FaultyPool, later: Callable[[list[int]], list[tuple[bytes, bytes]]]
) -> None:
    tokens = prompt(1, COUNT)
    blocks = later(tokens)
    decode = make(ON)
    request = streaming_request(decode, tokens)
    assert request.num_computed_tokens == 10 * BLOCK_TOKENS, "all of it is promised at once"
    for key, data in blocks:
        gets = faulty.calls.count("get")
        faulty.blocks[key] = data
        decode.run_until(lambda gets=gets: faulty.calls.count("get") > gets)
        assert decode.outputs["d"] == [] or key == blocks[-1][0]
    decode.run()
    reported = check(decode, tokens)
    assert (reported["outcome"], reported["loaded_tokens"]) == ("hit", 10 * BLOCK_TOKENS)
    assert reported["waited_ms"] > 0 and reported["failed_blocks"] == 0
    assert 0 < reported["hidden_ms"] <= reported["load_ms"]
    assert decode.counted["awaiting_requests:streamed"] == 1
    assert faulty.watched == [("n2", 10)]
    assert faulty.calls.count("match") == 1 and "put" not in faulty.calls, "what came is not saved again"


def test_prefill_and_decode_work_at_the_same_time(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(2, COUNT)
    decode, prefill = make(ON), make(max_tokens_step=64)
    streaming_request(decode, tokens)
    prefill.add("p", tokens, max_tokens=1, ask=ask("prefill", store_node="n2"))
    while prefill.scheduler.has_requests() or decode.scheduler.has_requests():
        if prefill.scheduler.has_requests():
            prefill.step()
        decode.step()
    reported = check(decode, tokens)
    assert (reported["outcome"], reported["loaded_tokens"]) == ("hit", 10 * BLOCK_TOKENS)
    assert set(faulty.preferred) == {"n2"}


@pytest.mark.parametrize("holes", [range(6, 10), [3], [0], range(10)])
def test_what_does_not_come_is_computed(
    make: Make,
    faulty: FaultyPool,
    later: Callable[[list[int]], list[tuple[bytes, bytes]]],
    holes: Any,
) -> None:
    """The last ones, one in the middle, the first, all of them: vLLM asks again when not one block is valid."""
    tokens = prompt(3, COUNT)
    blocks = later(tokens)
    decode = make(ON)
    streaming_request(decode, tokens)
    faulty.blocks = {key: data for at, (key, data) in enumerate(blocks) if at not in holes}
    faulty.give_up([blocks[at][0] for at in holes], timeout_s=1.0)
    decode.run()
    reported = check(decode, tokens)
    came = min(holes)
    assert (reported["outcome"], reported["loaded_tokens"]) == ("timeout", came * BLOCK_TOKENS)
    assert reported["hit_tokens"] == came * BLOCK_TOKENS, "what was promised and did not come is no hit"
    assert reported["failed_blocks"] == 0
    assert decode.counted["load_failures:not_come"] == 10 - came
    assert decode.counted["awaiting_requests:streamed"] == 1, "it is promised once"
    assert len(faulty.blocks) == 10, "what was computed is saved for others"


def test_at_the_time_limit_the_rest_is_computed(
    make: Make, faulty: FaultyPool, later: Callable[[list[int]], list[tuple[bytes, bytes]]]
) -> None:
    tokens = prompt(4, COUNT)
    blocks = later(tokens)
    decode = make(ON)
    faulty.blocks = dict(blocks[:2])
    decode.add("d", tokens, ask={**WAITS, "wait_ms": 60})
    decode.run()
    reported = check(decode, tokens)
    assert (reported["outcome"], reported["loaded_tokens"]) == ("timeout", 2 * BLOCK_TOKENS)


def test_a_block_that_came_broken_is_computed(
    make: Make, faulty: FaultyPool, later: Callable[[list[int]], list[tuple[bytes, bytes]]]
) -> None:
    tokens = prompt(5, COUNT)
    blocks = later(tokens)
    decode = make(ON)
    streaming_request(decode, tokens)
    faulty.codes = {blocks[4][0]: ChecksumMismatch.code}
    faulty.blocks = dict(blocks)
    decode.run()
    reported = check(decode, tokens)
    assert (reported["outcome"], reported["loaded_tokens"], reported["failed_blocks"]) == (
        "failed",
        4 * BLOCK_TOKENS,
        6,
    )


def test_a_prompt_of_whole_blocks_keeps_its_last_one_to_compute(
    make: Make, faulty: FaultyPool, later: Callable[[list[int]], list[tuple[bytes, bytes]]]
) -> None:
    tokens = prompt(6, 10 * BLOCK_TOKENS)
    blocks = later(tokens)
    decode = make(ON)
    request = streaming_request(decode, tokens)
    assert request.num_computed_tokens == 9 * BLOCK_TOKENS
    faulty.blocks = dict(blocks)
    decode.run()
    assert check(decode, tokens)["outcome"] == "hit"


def test_blocks_that_lie_elsewhere_are_loaded_before_the_others_come(
    make: Make, faulty: FaultyPool, later: Callable[[list[int]], list[tuple[bytes, bytes]]]
) -> None:
    tokens = prompt(7, COUNT)
    blocks = later(tokens)
    faulty.blocks = dict(blocks[:4])
    faulty.elsewhere = {key for key, _ in blocks[:4]}
    decode = make(ON)
    streaming_request(decode, tokens)
    decode.run_until(lambda: "get" in faulty.calls and bool(faulty.watched))
    assert faulty.watched == [("n2", 6)]
    faulty.blocks |= dict(blocks)
    decode.run()
    assert check(decode, tokens)["outcome"] == "hit"


def test_when_all_are_there_already_nothing_is_awaited(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(8, COUNT)
    warm(make, tokens)
    decode = make(ON)
    decode.add("d", tokens, ask=WAITS)
    decode.run()
    assert check(decode, tokens)["outcome"] == "hit"
    assert faulty.watched == []


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_prefill_engine_whose_saves_are_refused_says_so_at_the_node(
    make: Make, faulty: FaultyPool, layerwise: bool
) -> None:
    tokens = prompt(20, COUNT)
    decode, prefill = make(ON), make({"mooncache.layerwise": layerwise}, hooks=layerwise)
    streaming_request(decode, tokens)
    faulty.codes = Full()
    prefill.add("p", tokens, max_tokens=1, ask=ask("prefill", store_node="n2"))
    prefill.run()
    assert prefill.outputs["p"] == expected(tokens, 1)
    wait_until(lambda: len(faulty.given_up) == 10, "all are given up")
    faulty.codes = {}
    decode.run()
    reported = check(decode, tokens)
    assert (reported["outcome"], reported["loaded_tokens"]) == ("timeout", 0)
    assert reported["waited_ms"] < WAITS["wait_ms"] / 2


# --- others meanwhile --------------------------------------------------------------------------------------------


def test_others_are_served_while_loads_stream(
    make: Make, faulty: FaultyPool, later: Callable[[list[int]], list[tuple[bytes, bytes]]]
) -> None:
    tokens = prompt(9, COUNT)
    blocks = later(tokens)
    decode = make(ON)
    streaming_request(decode, tokens)
    other = prompt(10, 3 * BLOCK_TOKENS)
    decode.add("other", other)
    decode.run_until(lambda: "other" in decode.finished)
    assert decode.outputs["other"] == expected(other, 4)
    assert decode.status("d") == "WAITING_FOR_REMOTE_KVS"
    decode.add("same", tokens)  # it computes by itself, because what is promised is in no cache yet
    decode.run()
    assert decode.outputs["same"] == expected(tokens, 4)
    assert check(decode, tokens)["loaded_tokens"] == 10 * BLOCK_TOKENS, "and what it saves serves the stream"
    assert {key for key, _ in blocks} <= set(faulty.blocks)


def test_an_abort_in_mid_stream_frees_the_blocks_and_no_late_byte_comes(
    make: Make, faulty: FaultyPool, later: Callable[[list[int]], list[tuple[bytes, bytes]]]
) -> None:
    from vllm.v1.request import RequestStatus

    tokens = prompt(11, COUNT)
    blocks = later(tokens)
    decode = make(ON, blocks=14)
    faulty.blocks = dict(blocks[:3])
    streaming_request(decode, tokens)
    # Else the gate may shut behind the get of these three, and no other one comes.
    decode.run_until(lambda: len(faulty.given) == 3)
    faulty.gate = threading.Event()
    gets = faulty.calls.count("get")
    faulty.blocks = dict(blocks[:5])
    decode.run_until(lambda: faulty.calls.count("get") > gets)  # bytes are being written
    decode.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    other = prompt(12, 5 * BLOCK_TOKENS)
    decode.add("other", other)
    for _ in range(5):
        decode.step()
    assert decode.outputs["other"] == [], "its blocks are kept"
    faulty.gate.set()
    faulty.blocks |= dict(blocks)
    decode.run()
    assert decode.outputs["other"] == expected(other, 4)
    assert decode.leaked_blocks == 0


def test_steps_that_only_wait_for_a_stream_wait_a_moment(make: Make, faulty: FaultyPool) -> None:
    """vLLM takes empty steps as long as requests load; each costs it part of a core."""

    class Watch:
        def __init__(self) -> None:
            self.seen: list[bool] = []

        def next_s(self, now_s: float, *, waiting: bool) -> float:
            self.seen.append(waiting)
            return 0.0

    decode, watch = make(ON), Watch()
    streaming_request(decode, prompt(21, COUNT))
    decode.run_until(lambda: bool(faulty.watched))
    decode.worker._worker._idle = watch
    for _ in range(4):
        decode.step()
    assert watch.seen == [True] * 4
    decode.add("other", prompt(22, 40))
    decode.run_until(lambda: bool(decode.outputs["other"]))
    assert watch.seen[-1] is False, "what computes is not held up"


def test_a_request_that_streamed_and_is_preempted_comes_back(
    make: Make, faulty: FaultyPool, later: Callable[[list[int]], list[tuple[bytes, bytes]]]
) -> None:
    tokens = prompt(13, 4 * BLOCK_TOKENS + 3)
    blocks = later(tokens)
    decode = make(ON, blocks=12)
    prompts = {"a": prompt(14, 3 * BLOCK_TOKENS), "b": prompt(15, 2 * BLOCK_TOKENS)}
    requests = [decode.add(name, each, max_tokens=90) for name, each in prompts.items()]
    requests.append(decode.add("d", tokens, max_tokens=90, ask={**WAITS, "wait_tokens": 4 * BLOCK_TOKENS}))
    decode.run_until(lambda: decode.status("d") == "WAITING_FOR_REMOTE_KVS")
    faulty.blocks |= dict(blocks)
    decode.run()
    assert sum(request.num_preemptions for request in requests) > 0
    for name, each in (*prompts.items(), ("d", tokens)):
        assert decode.outputs[name] == expected(each, 90)
    assert decode.leaked_blocks == 0


# --- where a request waits ---------------------------------------------------------------------------------------


def test_under_the_policy_fail_nothing_is_promised(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(16, COUNT)
    decode = make(ON, policy="fail")
    decode.add("d", tokens, ask={**WAITS, "wait_ms": 50})
    decode.run()
    assert check(decode, tokens)["outcome"] == "timeout"
    assert decode.counted["awaiting_requests:off"] == 1


def test_by_itself_an_engine_streams_once_it_knows_its_loads(
    make: Make,
    faulty: FaultyPool,
    later: Callable[[list[int]], list[tuple[bytes, bytes]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "GAIN_MIN_S", 0.0)
    known = prompt(17, COUNT)
    warm(make, known)
    tokens = prompt(18, COUNT)
    blocks = later(tokens)
    decode = make()
    decode.add("first", tokens, ask={**WAITS, "wait_ms": 5})
    decode.run()
    assert decode.counted["awaiting_requests:speed_unknown"] == 1
    speed = decode.connector._scheduler._book._streaming
    for _ in range(3):
        speed.loaded(10, 0.01)
    faulty.blocks = {}
    assert decode.scheduler.reset_prefix_cache()
    streaming_request(decode, tokens)
    faulty.blocks = dict(blocks)
    decode.run()
    assert check(decode, tokens)["outcome"] == "hit"


# --- the book ----------------------------------------------------------------------------------------------------


def book(
    passports: list[Passport] | None = None, mode: StreamMode = StreamMode.ON, **more: Any
) -> RequestBook:
    return RequestBook(passports or [PASSPORT], streaming=Streaming(mode, block_bytes=100), **more)


AWAITS = {"wait_tokens": 4 * SIZE, "wait_ms": 1000, "store_node": "n1"}


def test_a_promise_is_made_once() -> None:
    kept = book()
    add(kept, 4 * SIZE + 1, ask=AWAITS)
    first = kept.match("r", 0, 0.0, pool_usable=True)
    assert first.query is not None and first.query.awaited == 0
    answer(kept, [True, False, True, False])
    for _ in range(3):  # until there is room for it
        assert kept.match("r", 0, 0.2, pool_usable=True).tokens == 4 * SIZE
    transfer = kept.allocated("r", [range(5, 20)], 4 * SIZE)
    assert transfer is not None
    assert (transfer.awaited, transfer.node) == ((1, 3), "n1")
    assert transfer.await_s == pytest.approx(0.8)
    assert kept.loaded("r", 0, 0, 0.0, reason=MoveFailure.NOT_COME, waited_s=0.5) == 4
    assert kept.match("r", 0, 0.6, pool_usable=True).tokens == 0, "it is not promised again"
    heard = kept.cache_report("r")
    assert heard is not None
    assert (heard.outcome, heard.hit_tokens, heard.failed_blocks) == ("timeout", 0, 0)
    assert heard.waited_ms == 750.0


def test_what_came_counts_and_is_not_saved_again() -> None:
    kept = book()
    tokens = add(kept, 4 * SIZE + 1, ask=AWAITS)
    kept.match("r", 0, 0.0, pool_usable=True)
    answer(kept, [False] * 4)
    kept.match("r", 0, 0.0, pool_usable=True)
    kept.allocated("r", [range(5, 20)], 4 * SIZE)
    assert kept.loaded("r", 3, 300, 0.2, reason=MoveFailure.NOT_COME, waited_s=0.5, hidden_s=0.1) == 1
    heard = kept.cache_report("r")
    assert heard is not None
    assert (heard.loaded_tokens, heard.load_ms, heard.hidden_ms) == (3 * SIZE, 200.0, 100.0)
    save = kept.plan_save("r", tokens, 4 * SIZE, [range(5, 20)], 99)
    assert save is not None and save.blocks == (8,)


def test_what_is_short_when_the_pool_has_answered_waits_outside_for_the_rest_of_the_time() -> None:
    kept = book()
    add(kept, 4 * SIZE + 1, ask=AWAITS)
    assert kept.match("r", 0, 0.0, pool_usable=True).query is not None
    kept._streaming = Streaming(StreamMode.OFF, block_bytes=100)
    answer(kept, [True, False, False, False])
    outside = kept.match("r", 0, 0.1, pool_usable=True)
    assert outside.tokens is None and outside.query is not None and outside.waits is WaitPlace.OFF
    assert (outside.query.awaited, outside.query.deadline_s, outside.query.node) == (4, 1.0, "n1")
    answer(kept, [True] * 4)
    assert kept.match("r", 0, 0.3, pool_usable=True).tokens == 4 * SIZE
    transfer = kept.allocated("r", [range(5, 20)], 4 * SIZE)
    assert transfer is not None and transfer.awaited == ()


@pytest.mark.parametrize(
    ("pool_usable", "outcome", "now_s", "tokens"),
    [(False, "found", 0.0, None), (True, "failed", 0.0, None), (True, "found", 1.5, 0)],
)
def test_a_pool_that_is_silent_or_a_time_that_is_over_makes_no_promise(
    pool_usable: bool, outcome: str, now_s: float, tokens: int | None
) -> None:
    kept = book()
    add(kept, 4 * SIZE + 1, ask=AWAITS)
    asked = kept.match("r", 0, 0.0, pool_usable=pool_usable).query
    assert asked is not None
    if not pool_usable:
        assert asked.awaited == 4
        return
    kept.answered("r", [False] * 4 if outcome == "found" else [], _outcome(outcome), 0.0, now_s)
    assert kept.match("r", 0, now_s, pool_usable=True).tokens == tokens


def _outcome(text: str) -> Any:
    from mooncache.kvcache.lookup import LookupOutcome

    return LookupOutcome(text).reported()


def test_the_worst_shard_counts() -> None:
    from mooncache.connectors.vllm.messages import LoadEnd, merge_loads

    fast = LoadEnd(3, 300, 0.2, MoveFailure.NONE, waited_s=0.5, hidden_s=0.2)
    slow = LoadEnd(2, 200, 0.3, MoveFailure.NOT_COME, waited_s=0.6, hidden_s=0.1)
    wanted = LoadEnd(2, 500, 0.3, MoveFailure.NOT_COME, shards=2, waited_s=0.6, hidden_s=0.1)
    assert merge_loads(fast, slow) == merge_loads(slow, fast) == wanted
    kept = book([dataclasses.replace(PASSPORT, tp_rank=rank, tp_size=2) for rank in range(2)])
    add(kept, 4 * SIZE + 1, ask=AWAITS)
    kept.match("r", 0, 0.0, pool_usable=True)
    answer(kept, [True, True, True, False, False, False, True, True])
    assert kept.match("r", 0, 0.0, pool_usable=True).tokens == 4 * SIZE
    transfer = kept.allocated("r", [range(5, 20)], 4 * SIZE)
    assert transfer is not None and len(transfer.keys) == 2
    assert transfer.awaited == (1, 2), "a block is there when every shard's part is"


def test_a_wait_ends_also_when_its_limit_is_absurd() -> None:
    kept = book()
    add(kept, 4 * SIZE + 1, ask={**AWAITS, "wait_ms": 1 << 52})
    kept.match("r", 0, 0.0, pool_usable=True)
    answer(kept, [False] * 4)
    kept.match("r", 0, 0.0, pool_usable=True)
    transfer = kept.allocated("r", [range(5, 20)], 4 * SIZE)
    assert transfer is not None and transfer.await_s == 600.0


def test_saves_of_a_leg_that_computes_a_prompt_are_awaited_elsewhere() -> None:
    cases = (("prefill", 0, True), ("decode", 0, True), ("decode", SIZE, False), (None, 0, False))
    for role, wait_tokens, is_awaited in cases:
        kept = book()
        tokens = add(kept, 2 * SIZE, ask={"role": role, "wait_tokens": wait_tokens, "store_node": "n1"})
        save = kept.plan_save("r", tokens, 2 * SIZE, [range(5, 20)], 99)
        assert save is not None
        assert (save.node, save.is_awaited) == ("n1", is_awaited)


def test_memory_is_taken_where_it_is_free() -> None:
    kept = book(mode=StreamMode.AUTO)
    assert kept._streaming is not None
    for _ in range(3):
        kept._streaming.loaded(4, 0.02)
    for free, place in ((100, None), (4, WaitPlace.MEMORY), (3, WaitPlace.MEMORY)):
        add(kept, 4 * SIZE + 1, name=f"r{free}", ask=AWAITS)
        found = kept.match(f"r{free}", 0, 0.0, pool_usable=True, memory=EngineMemory(free, 100))
        assert found.waits is place

"""The connector under vLLM's own scheduler, without a model: what is loaded is right at every step, what fails is
computed, and no block is given away while somebody writes into it or reads from it."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from mooncache.errors import ChecksumMismatch, DeadlineExceeded, NodeUnavailable
from tests.connectors.harness import BLOCK_TOKENS, WAIT_S, Make, ask, expected, prompt, warm
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


# --- loads -------------------------------------------------------------------------------------------------------


def test_a_second_engine_loads_what_the_first_computed(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(1, 10 * BLOCK_TOKENS + 7)
    warm(make, tokens)
    engine = make()
    request = engine.add("r", tokens, ask=ask())
    engine.run_until(lambda: engine.status("r") == "WAITING_FOR_REMOTE_KVS")
    assert request.num_computed_tokens == 10 * BLOCK_TOKENS
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    reported = engine.reported("r")
    assert (reported["outcome"], reported["hit_tokens"], reported["loaded_tokens"]) == ("hit", 320, 320)
    assert reported["loaded_bytes"] == 10 * BLOCK_TOKENS * 4 * 2 * 8 * 4
    assert engine.counted["loaded_blocks"] == 10
    assert engine.counted["lookups:found"] == 1
    assert engine.leaked_blocks == 0


def test_the_engines_own_cache_comes_first(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(2, 8 * BLOCK_TOKENS)
    warm(make, tokens)
    engine = make()
    engine.add("half", tokens[: 4 * BLOCK_TOKENS + 1], ask=ask())
    engine.run()
    engine.add("whole", tokens, ask=ask())
    engine.run()
    reported = engine.reported("whole")
    assert (reported["local_tokens"], reported["loaded_tokens"], reported["outcome"]) == (128, 128, "hit")
    assert engine.outputs["whole"] == expected(tokens, 4)


def test_blocks_filled_while_decoding_serve_the_next_turn(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(3, 3 * BLOCK_TOKENS + 5)
    engine = make()
    engine.add("turn", tokens, max_tokens=80)
    engine.run()
    longer = tokens + engine.outputs["turn"] + prompt(4, 10)
    other = make()
    other.add("next", longer, ask=ask())
    other.run()
    complete = (len(tokens) + 79) // BLOCK_TOKENS * BLOCK_TOKENS  # the last token's KV was never computed
    assert other.reported("next")["loaded_tokens"] == complete
    assert other.outputs["next"] == expected(longer, 4)
    silent = make({"mooncache.save_decode_blocks": False})
    silent.add("turn", prompt(5, 40), max_tokens=80)
    silent.run()
    assert silent.counted["saved_blocks"] == 1


def test_salts_keep_tenants_apart_and_a_public_prefix_is_shared(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(6, 6 * BLOCK_TOKENS)
    engine = make()
    public = {"public_tokens": 2 * BLOCK_TOKENS, "public_salt": "everybody"}
    engine.add("a", tokens, salt="tenant-a", ask=ask(**public))
    engine.run()
    other = make()
    other.add("b", tokens, salt="tenant-b", ask=ask())
    other.add("c", tokens, salt="tenant-c", ask=ask(**public))
    other.add("a", tokens, salt="tenant-a", ask=ask(**public))
    other.run()
    assert [other.reported(name)["loaded_tokens"] for name in "bca"] == [0, 64, 192]


def test_decode_waits_for_the_blocks_that_prefill_computes(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(7, 5 * BLOCK_TOKENS + 3)
    decode = make()
    decode.add("d", tokens, ask=ask("decode", wait_tokens=5 * BLOCK_TOKENS, wait_ms=20_000))
    for _ in range(5):
        decode.step()
    assert decode.status("d") == "WAITING"
    prefill = make()
    prefill.add("p", tokens, max_tokens=1, ask=ask("prefill"))
    prefill.run()
    assert prefill.reported("p")["saved_blocks"] == 5
    decode.run()
    reported = decode.reported("d")
    assert (reported["outcome"], reported["loaded_tokens"]) == ("hit", 160)
    assert reported["waited_ms"] > 0
    assert decode.outputs["d"] == expected(tokens, 4)


def test_blocks_that_never_come_are_computed_at_the_deadline(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(8, 5 * BLOCK_TOKENS)
    decode = make()
    decode.add("d", tokens, ask=ask("decode", wait_tokens=len(tokens), wait_ms=5))
    decode.run()
    assert decode.reported("d")["outcome"] == "timeout"
    assert decode.outputs["d"] == expected(tokens, 4)


def test_prefill_offers_blocks_again_that_the_pool_evicted(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(9, 4 * BLOCK_TOKENS)
    prefill = warm(make, tokens)
    faulty.blocks.clear()
    prefill.add("p", tokens, max_tokens=1, ask=ask("prefill"))
    prefill.run()
    assert prefill.reported("p")["local_tokens"] == 3 * BLOCK_TOKENS
    assert len(faulty.blocks) == 4


# --- failures ----------------------------------------------------------------------------------------------------


def break_block(pool: FaultyPool, position: int, code: int) -> None:
    """Blocks are kept in the order in which they were saved."""
    pool.codes[list(pool.blocks)[position]] = code


@pytest.mark.parametrize("position", [0, 3])
def test_a_block_that_does_not_come_is_computed_again(make: Make, faulty: FaultyPool, position: int) -> None:
    tokens = prompt(10, 6 * BLOCK_TOKENS + 1)
    warm(make, tokens)
    break_block(faulty, position, ChecksumMismatch.code)
    engine = make(policy="recompute")
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    reported = engine.reported("r")
    assert (reported["outcome"], reported["failed_blocks"]) == ("failed", 6 - position)
    assert reported["loaded_tokens"] == position * BLOCK_TOKENS
    assert engine.counted["load_failures:checksum"] == 6 - position
    assert engine.leaked_blocks == 0


def test_under_the_policy_fail_the_request_ends_with_an_error(make: Make, faulty: FaultyPool) -> None:
    from vllm.v1.engine import FinishReason

    tokens = prompt(11, 6 * BLOCK_TOKENS + 1)
    warm(make, tokens)
    break_block(faulty, 2, ChecksumMismatch.code)
    engine = make(policy="fail")
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.finished["r"].finish_reason == FinishReason.ERROR
    assert engine.leaked_blocks == 0
    faulty.codes.clear()
    engine.add("again", tokens, ask=ask())
    engine.run()
    assert engine.outputs["again"] == expected(tokens, 4)
    assert engine.reported("again")["outcome"] == "hit"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_pool_that_dies_is_a_miss(make: Make, faulty: FaultyPool, policy: str) -> None:
    tokens = prompt(12, 6 * BLOCK_TOKENS)
    engine = warm(make, tokens)
    faulty.error = NodeUnavailable("gone")
    for number in range(8):
        engine.add(f"r{number}", prompt(100 + number, 100), ask=ask())
    engine.run()
    for number in range(8):
        assert engine.outputs[f"r{number}"] == expected(prompt(100 + number, 100), 4)
        assert engine.reported(f"r{number}")["outcome"] in {"failed", "pool_absent"}
    assert engine.leaked_blocks == 0


def test_without_a_pool_the_engine_serves(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mooncache.connectors.vllm import connector, scheduler_side

    def refuse() -> Any:
        raise NodeUnavailable("nobody there")

    monkeypatch.setattr(connector, "connect_pool", lambda **_: refuse)
    monkeypatch.setattr(scheduler_side, "CONNECT_WAIT_S", 0.01)
    engine = make()
    tokens = prompt(13, 100)
    engine.add("r", tokens, ask=ask("decode", wait_tokens=96, wait_ms=20_000))
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    assert engine.reported("r")["outcome"] == "pool_absent"
    assert engine.leaked_blocks == 0


def test_a_defect_of_the_connector_does_not_reach_the_engine(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mooncache.connectors.vllm.core.book import RequestBook

    tokens = prompt(14, 100)
    engine = make()
    for name in ("match", "plan_save", "cache_report", "loaded"):
        monkeypatch.setattr(RequestBook, name, lambda *_args, **_more: 1 // 0)
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    assert engine.counted["defects"] >= 2


# --- blocks ------------------------------------------------------------------------------------------------------


def test_blocks_of_an_aborted_load_are_kept_until_nobody_writes(make: Make, faulty: FaultyPool) -> None:
    from vllm.v1.request import RequestStatus

    tokens = prompt(16, 10 * BLOCK_TOKENS)
    warm(make, tokens)
    engine = make(blocks=14)
    engine.add("r", tokens)
    faulty.gate = threading.Event()
    faulty.entered.clear()
    engine.run_until(lambda: faulty.calls[-1] == "match")
    faulty.gate.set()
    faulty.gate = None
    engine.run_until(lambda: engine.status("r") == "WAITING_FOR_REMOTE_KVS" or "r" in engine.finished)
    engine.run()

    faulty.gate = threading.Event()  # now the same with a load that hangs
    engine = make(blocks=14)
    faulty.gate.set()
    engine.add("r", tokens)
    calls = len(faulty.calls)
    closed = threading.Event()
    match = faulty.match
    faulty.match = lambda *a, **k: (match(*a, **k), setattr(faulty, "gate", closed))[0]  # type: ignore[method-assign]
    engine.run_until(lambda: "get" in faulty.calls[calls:])
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    engine.add("other", prompt(17, 5 * BLOCK_TOKENS), ask=ask())
    faulty.match = match  # type: ignore[method-assign]
    for _ in range(5):
        engine.step()
    assert engine.status("r") == "FINISHED_ABORTED"
    assert engine.outputs["other"] == []  # 10 of 13 blocks are still being written
    closed.set()
    engine.run()
    assert engine.outputs["other"] == expected(prompt(17, 5 * BLOCK_TOKENS), 4)
    assert engine.leaked_blocks == 0


def test_an_abort_while_the_pool_is_asked_leaves_nothing_behind(make: Make, faulty: FaultyPool) -> None:
    from vllm.v1.request import RequestStatus

    engine = make()
    faulty.gate = threading.Event()
    engine.add("r", prompt(18, 100))
    engine.step()
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    engine.run()
    faulty.gate.set()
    engine.add("r", prompt(19, 100), ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(prompt(19, 100), 4)
    assert engine.leaked_blocks == 0


def test_blocks_under_a_save_are_pinned_and_requests_are_not_delayed(make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(20, 4 * BLOCK_TOKENS + 1)
    engine = make()
    gate = threading.Event()
    exists = faulty.exists_many

    def slow(*args: Any, **more: Any) -> tuple[bool, ...]:
        assert gate.wait(WAIT_S)
        return exists(*args, **more)

    faulty.exists_many = slow  # type: ignore[method-assign]
    engine.add("r", tokens)
    engine.run_until(lambda: "r" in engine.finished)
    assert engine.status("r") == "gone"
    assert engine.leaked_blocks == 4
    assert engine.scheduler.has_requests()  # so that the pins are released
    assert faulty.blocks == {}
    gate.set()
    engine.run()
    assert engine.leaked_blocks == 0
    assert len(faulty.blocks) == 4


def test_saves_pin_at_most_half_of_the_blocks(make: Make, faulty: FaultyPool) -> None:
    engine = make(blocks=21)
    gate = threading.Event()
    exists = faulty.exists_many
    faulty.exists_many = lambda *a, **k: (gate.wait(WAIT_S), exists(*a, **k))[1]  # type: ignore[method-assign]
    engine.add("r", prompt(21, 16 * BLOCK_TOKENS), max_tokens=2)
    engine.run_until(lambda: "r" in engine.finished)
    assert engine.leaked_blocks == 10
    gate.set()
    engine.run()
    assert engine.leaked_blocks == 0


def test_preempted_requests_come_back_and_their_saves_stay_right(make: Make, faulty: FaultyPool) -> None:
    engine = make(blocks=12)
    prompts = {f"r{number}": prompt(300 + number, 3 * BLOCK_TOKENS) for number in range(3)}
    requests = [engine.add(name, tokens, max_tokens=120, ask=ask()) for name, tokens in prompts.items()]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0
    for name, tokens in prompts.items():
        assert engine.outputs[name] == expected(tokens, 120)
        assert (
            engine.reported(name)["hit_tokens"] == 0
        )  # what came back from the pool after a preemption is no hit
    assert engine.leaked_blocks == 0
    other = make()
    for name, tokens in prompts.items():
        other.add(name, tokens + engine.outputs[name], ask=ask())
    other.run()
    for name, tokens in prompts.items():
        assert other.reported(name)["loaded_tokens"] == (len(tokens) + 119) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_storm(make: Make, faulty: FaultyPool, seed: int, layerwise: bool) -> None:
    """Shared prefixes, aborts, preemptions, blocks that vanish or break: tokens are right and nothing leaks."""
    from vllm.v1.request import RequestStatus

    chooser = random.Random(seed)
    prefixes = [prompt(1000 + number, 6 * BLOCK_TOKENS) for number in range(3)]
    engine = make({"mooncache.layerwise": layerwise}, blocks=28, max_tokens_step=200, hooks=layerwise)
    wanted: dict[str, tuple[list[int], int]] = {}
    for number in range(60):
        kind = chooser.random()
        if kind < 0.5:
            base = chooser.choice(prefixes)[: chooser.randrange(1, 6 * BLOCK_TOKENS)]
            tokens = base + prompt(seed * 1000 + number, chooser.randrange(1, 80))
            name, count = f"r{number}", chooser.randrange(1, 60)
            wanted[name] = (tokens, count)
            engine.add(
                name, tokens, max_tokens=count, ask=ask(wait_tokens=chooser.choice([0, 64]), wait_ms=3)
            )
        elif kind < 0.6 and engine.scheduler.requests:
            name = chooser.choice(sorted(engine.scheduler.requests))
            engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        elif kind < 0.7 and faulty.blocks:
            faulty.blocks.pop(chooser.choice(list(faulty.blocks)), None)
        elif kind < 0.8 and faulty.blocks:
            faulty.codes = {chooser.choice(list(faulty.blocks)): DeadlineExceeded.code}
        elif kind < 0.82:
            assert engine.scheduler.reset_connector_cache()
        for _ in range(chooser.randrange(4)):
            engine.step()
    engine.run()
    assert engine.finished
    for name in engine.finished:
        if engine.finished[name].finish_reason.name == "LENGTH":
            tokens, count = wanted[name]
            assert engine.outputs[name] == expected(tokens, count), name
    assert engine.leaked_blocks == 0
    engine.connector._scheduler._book.check()

    # Whatever the storm left in the pool is right: another engine checks every token of it.
    faulty.codes = {}
    other = make()
    for number, tokens in enumerate(prefixes):
        other.add(f"check{number}", tokens, ask=ask())
    other.run()
    assert all(other.reported(f"check{number}")["outcome"] != "failed" for number in range(3))


# --- the engine's time -------------------------------------------------------------------------------------------


def test_empty_steps_wait_for_the_pool_and_others_do_not(make: Make, faulty: FaultyPool) -> None:
    """Questions and saves under way keep the engine stepping; each empty step costs it part of a core."""

    class Watch:
        def __init__(self) -> None:
            self.seen: list[bool] = []

        def next_s(self, now_s: float, *, waiting: bool) -> float:
            self.seen.append(waiting)
            return 0.0

    engine, watch = make(), Watch()
    engine.connector._scheduler._idle = watch
    faulty.gate = threading.Event()
    engine.add("r", prompt(70, 3 * BLOCK_TOKENS + 1), ask=ask())
    for _ in range(3):
        engine.step()
    assert watch.seen == [True] * 3  # its question is open
    faulty.gate.set()
    engine.run_until(lambda: bool(engine.outputs.get("r")))
    assert not watch.seen[-1]  # it is computed
    faulty.gate = threading.Event()
    engine.run_until(lambda: "r" in engine.finished)
    seen = len(watch.seen)
    assert engine.connector.has_pending_push_work()
    for _ in range(3):
        engine.step()
    assert watch.seen[seen:] == [True] * 3  # nothing but its save is under way
    faulty.gate.set()
    engine.run()
    assert engine.leaked_blocks == 0


def test_block_tables_are_made_only_for_steps_that_fill_a_block(
    make: Make, faulty: FaultyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table has an entry for every block of a request: making it for each token would slow long contexts down."""
    from vllm.v1.core.sched.output import KVConnectorBlockState

    made: list[str] = []
    get = KVConnectorBlockState.get_block_ids

    def counting(self: Any, name: str) -> Any:
        made.append(name)
        return get(self, name)

    monkeypatch.setattr(KVConnectorBlockState, "get_block_ids", counting)
    engine = make()
    tokens = prompt(71, 2 * BLOCK_TOKENS + 1)
    engine.add("r", tokens, max_tokens=2 * BLOCK_TOKENS)
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 2 * BLOCK_TOKENS)
    assert engine.counted["saved_blocks"] == 4
    assert len(made) <= 3

"""Parts of the core one by one: registry histories, cache index, running requests, work, cost models, seen blocks."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache import _native, errors
from mooncache.client.keys import split_keys
from mooncache.conductor.core.cache_index import EXACT_KEYS_MAX, CacheIndex, block_records
from mooncache.conductor.core.in_flight import InFlight, Running, chained_blocks
from mooncache.conductor.core.learning import DecodeLearner, Follower, TransferLearner, prefill_prior
from mooncache.conductor.core.policy.types import Rules
from mooncache.conductor.core.prefill_learner import PrefillLearner
from mooncache.conductor.core.records import (
    EVENT_BYTES_MAX,
    EVENTS_MAX,
    DecisionRecord,
    Records,
    pack,
)
from mooncache.conductor.core.registry import InstanceInfo, InstanceState, Registry
from mooncache.conductor.core.seen import MissRange, MissReason, SeenBlocks
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.kvcache.keys import passport_to_json
from mooncache.kvcache.passport import Passport
from tests.conductor.support import chain

INFO = InstanceInfo("a", 1, "prefill", "m")


def registry(**limits: float) -> Registry:
    return Registry(**{"suspect_after_s": 2.0, "lease_s": 10.0, "count_max": 4, **limits})  # type: ignore[arg-type]


def passport(**change: str) -> Passport:
    usual = dict.fromkeys(
        ("weights_digest", "config_digest", "tokenizer_digest", "engine", "kv_dtype", "kv_layout"), "same"
    )
    return Passport(**{**usual, **change}, block_tokens=16)  # type: ignore[arg-type]


# --- registry -----------------------------------------------------------------------------------------------------


def test_engines_of_one_model_with_other_weights_are_told_apart_by_the_field() -> None:
    book = registry()

    def join(name: str, identity: Passport, group: int) -> str:
        info = InstanceInfo(name, 1, "both", "m", passport_json=passport_to_json(identity), group=group)
        return book.apart(book.register(info, InstanceState.READY, 0.0)[0])

    assert join("a", passport(), 5) == ""
    assert join("b", passport(), 5) == ""
    reported = join("c", passport(weights_digest="other"), 6)
    assert (
        "with a" in reported
        and "weights_digest is other, there same" in reported
        and "config" not in reported
    )


def test_silence_makes_suspect_then_forgotten() -> None:
    book = registry()
    one, lost = book.register(INFO, InstanceState.READY, 0.0)
    assert (one.state, lost) == (InstanceState.READY, None)
    assert book.expire(2.5) == []
    assert one.state == InstanceState.SUSPECT
    book.report(one, InstanceState.READY, InstanceLoad(), "", 3.0)
    assert one.ready
    assert book.expire(13.5) == [one]
    assert book.get("a") is None
    with pytest.raises(errors.InstanceUnknown):
        book.require("a", 1)
    book.check()


def test_time_in_which_the_conductor_was_stopped_is_no_silence() -> None:
    book = registry()
    one, _ = book.register(INFO, InstanceState.READY, 0.0)
    silent, _ = book.register(replace(INFO, instance_id="b"), InstanceState.READY, -5.0)
    assert book.expire(1.0) == []
    assert (one.state, silent.state) == (InstanceState.READY, InstanceState.SUSPECT)
    book.unheard(20.0, 21.0)
    assert book.expire(21.0) == []
    assert (one.state, silent.state) == (InstanceState.READY, InstanceState.SUSPECT)
    assert book.expire(22.5) == []
    assert one.state == InstanceState.SUSPECT, "it says nothing now either"
    book.check()


def test_a_conductor_that_is_late_at_each_look_notices_silence() -> None:
    book = registry()
    silent, _ = book.register(INFO, InstanceState.READY, 0.0)
    heard, _ = book.register(replace(INFO, instance_id="b"), InstanceState.READY, 0.0)
    now_s = 0.0
    while now_s < 9.0:
        now_s += 1.0
        book.report(heard, InstanceState.READY, InstanceLoad(), "", now_s - 0.1)
        book.unheard(0.75, now_s)
        assert book.expire(now_s) == []
        assert (silent.state == InstanceState.READY) == (now_s < 2.75)
        assert heard.ready
    assert book.expire(11.0) == [silent], "the lease and the longest late look"
    book.unheard(5.0, 11.0)  # it was heard 2.1 s ago: no more than that is excused
    book.expire(12.9)
    assert heard.ready
    book.expire(13.1)
    assert heard.state == InstanceState.SUSPECT
    book.check()


def test_another_incarnation_loses_its_cache_and_old_reports_are_refused() -> None:
    book = registry()
    one, _ = book.register(INFO, InstanceState.READY, 0.0)
    one.sequence = 7
    again, lost = book.register(replace(INFO, incarnation=2), InstanceState.STARTING, 1.0)
    assert again is one
    assert (lost, one.sequence, one.state) == (one.holder, 0, InstanceState.STARTING)
    with pytest.raises(errors.InstanceUnknown, match="another incarnation"):
        book.require("a", 1)
    _, lost = book.register(replace(INFO, incarnation=2), InstanceState.READY, 2.0)
    assert lost is None


def test_an_operators_wishes_stay() -> None:
    book = registry()
    one, _ = book.register(INFO, InstanceState.READY, 0.0)
    book.set("a", InstanceRole.DECODE, True, 0.0)
    assert (one.role, one.state) == ("decode", InstanceState.DRAINING)
    one, _ = book.register(replace(INFO, incarnation=2), InstanceState.READY, 1.0)
    assert (one.role, one.state) == ("decode", InstanceState.DRAINING)
    book.set("a", None, False, 1.0)
    assert (one.role, one.state) == ("decode", InstanceState.READY)
    with pytest.raises(errors.InstanceUnknown):
        book.set("b", InstanceRole.DECODE, None, 1.0)


def test_version_grows_with_changes_and_not_with_load() -> None:
    book = registry()
    one, _ = book.register(INFO, InstanceState.READY, 0.0)
    version = book.version
    book.report(one, InstanceState.READY, InstanceLoad(running=3), "", 1.0)
    assert book.version == version
    for change in (
        lambda: book.report(one, InstanceState.SUSPECT, InstanceLoad(), "engine does not answer", 1.0),
        lambda: book.report(one, InstanceState.READY, InstanceLoad(), "", 1.0),
        lambda: book.set("a", InstanceRole.BOTH, None, 1.0),
        lambda: book.expire(100.0),
    ):
        change()
        assert book.version > version
        version = book.version


def test_there_is_a_limit_and_holder_numbers_are_used_again() -> None:
    book = registry()
    for number in range(4):
        book.register(replace(INFO, instance_id=str(number)), InstanceState.READY, 0.0)
    with pytest.raises(errors.LimitExceeded):
        book.register(replace(INFO, instance_id="5"), InstanceState.READY, 0.0)
    book.expire(100.0)
    fresh, _ = book.register(INFO, InstanceState.READY, 100.0)
    assert fresh.holder < 4
    book.check()


# --- cache index --------------------------------------------------------------------------------------------------


def test_records_are_what_the_native_index_takes() -> None:
    index = _native.BlockIndex()
    keys = chain("a", 50)
    index.apply(3, block_records(keys))
    assert index.match(0, keys) == [(3, 50)]
    index.apply(3, block_records(keys[32 * 20 :], remove=True))
    assert index.match(0, keys) == [(3, 20)]
    assert block_records(b"") == b""


def test_changes_need_an_unbroken_sequence() -> None:
    cache, book = CacheIndex(_native.BlockIndex), registry()
    one, _ = book.register(INFO, InstanceState.READY, 0.0)
    keys = chain("a", 10)

    def apply(sequence: int, stored: bytes = b"", removed: bytes = b"", *, full: bool = False) -> str:
        return cache.apply(one, full=full, stored=stored, removed=removed, sequence=sequence, keys_max=1000)

    assert apply(1, keys[: 32 * 4]) == "applied"
    assert apply(1, keys) == "repeated"
    assert cache.leading(keys) == {one.holder: 4}
    assert apply(3, keys) == "gap"
    assert one.want_full
    assert apply(4, keys) == "gap", "nothing but a full report ends a gap"
    assert apply(9, keys[: 32 * 6], full=True) == "full"
    assert not one.want_full
    assert cache.leading(keys) == {one.holder: 6}
    assert apply(10, keys[32 * 6 :], keys[: 32 * 2]) == "applied"
    assert cache.leading(keys) == {}
    assert cache.blocks() == {one.holder: 8}
    for wrong in ({"stored": keys[:-1]}, {"removed": b"x"}):
        with pytest.raises(errors.InvalidArgument, match="multiple of 32"):
            apply(11, **wrong)
    with pytest.raises(errors.TooLarge):
        apply(11, chain("b", 1001))
    cache.drop(one.holder)
    assert cache.blocks().get(one.holder, 0) == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2000), st.lists(st.integers(0, 2000), max_size=12), st.integers(0, 1 << 30))
def test_two_steps_find_what_looking_at_every_key_finds(count: int, lengths: list[int], seed: int) -> None:
    keys = random.Random(seed).randbytes(count * 32)
    index = _native.BlockIndex()
    for holder, length in enumerate(lengths):
        index.apply(holder, block_records(keys[: 32 * length]))
    expected = {holder: min(length, count) for holder, length in enumerate(lengths) if length}
    assert CacheIndex(lambda: index).leading(keys) == expected


def test_exact_and_stepped_search_meet() -> None:
    keys = chain("a", EXACT_KEYS_MAX + 1)
    cache, book = CacheIndex(_native.BlockIndex), registry()
    one, _ = book.register(INFO, InstanceState.READY, 0.0)
    cache.apply(one, full=True, stored=keys[: 32 * 300], removed=b"", sequence=1, keys_max=1 << 20)
    assert cache.leading(keys) == cache.leading(keys[:-32]) == {one.holder: 300}
    assert cache.leading(b"") == {}


# --- running requests ---------------------------------------------------------------------------------------------


def common_blocks(mine: bytes, theirs: bytes) -> int:
    """The number of leading keys that two packed chains share, one after another."""
    pairs = zip(split_keys(mine), split_keys(theirs), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_common_blocks(mine: int, theirs: int, shared: int) -> None:
    shared = min(mine, theirs, shared)
    a, b = chain("a", mine, parent="s", shared=shared), chain("b", theirs, parent="s", shared=shared)
    assert common_blocks(a, b) == chained_blocks(a, b) == shared


def test_chains_that_meet_again_do_not_count() -> None:
    # A public prefix in one request, the private chain in the other: later keys are equal, the first ones are not.
    a, b = chain("private", 64), chain("public", 20) + chain("private", 64)[20 * 32 :]
    assert chained_blocks(a, b) == 64
    assert common_blocks(a, b) == 0
    table = InFlight()
    table.add(Running("d1", "p", b, 1.0))
    assert table.overlaps(a) == []


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 80), st.integers(0, 80)), max_size=8), st.integers(1, 80))
def test_the_longest_overlap_is_found(others: list[tuple[int, int]], blocks: int) -> None:
    table, expected = InFlight(), 0
    for number, (length, wanted) in enumerate(others):
        shared = min(wanted, length, blocks)
        table.add(
            Running(f"d{number}", f"p{number}", chain(f"o{number}", length, parent="m", shared=shared), 1.0)
        )
        expected = max(expected, shared)
        table.check()
    found = table.overlaps(chain("m", blocks))
    assert max((overlap.blocks for overlap in found), default=0) == expected
    for number in range(len(others)):
        assert table.end(f"d{number}")
    table.check()
    assert len(table) == 0
    assert not table.end("d0")


def test_of_equal_overlaps_the_soonest_counts() -> None:
    table = InFlight()
    keys = chain("a", 10)
    table.add(Running("late", "p", keys, 9.0))
    table.add(Running("soon", "p", keys, 2.0))
    assert [overlap.running.decision_id for overlap in table.overlaps(keys)] == ["soon"]


# --- cost models --------------------------------------------------------------------------------------------------


def test_prefill_model_finds_the_truth_from_observations() -> None:
    rng = random.Random(4)
    learner = PrefillLearner(prefill_prior("vllm"))

    def truth(n: int, p: int) -> float:
        return 0.02 + 8e-4 * (n - p) + 4e-8 * (n * n - p * p) + 2e-6 * p

    for _ in range(300):
        n = rng.randrange(64, 8192)
        p = rng.choice((0, n // 2, n - 32))
        assert learner.observe(n, p, truth(n, p) * rng.uniform(0.95, 1.05))
    for n, p in ((512, 0), (4096, 0), (4096, 2048), (8000, 7900)):
        assert learner.cost.seconds(n, p) == pytest.approx(truth(n, p), rel=0.25)


def test_one_odd_observation_moves_little_and_a_lasting_change_is_followed() -> None:
    learner = PrefillLearner(prefill_prior("vllm"))
    for _ in range(50):
        learner.observe(1000, 0, 1.0)
    learner.observe(1000, 0, 300.0)
    assert learner.cost.seconds(1000, 0) < 1.5
    for _ in range(100):
        learner.observe(1000, 0, 5.0)
    assert learner.cost.seconds(1000, 0) == pytest.approx(5.0, rel=0.2)


@pytest.mark.parametrize("speed", [1.0, 0.3, 10.0])
@pytest.mark.parametrize("odd_first", [0, 2])
def test_odd_observations_do_not_spoil_the_prefill_model(speed: float, odd_first: int) -> None:
    """A tenth of them is ten to fifty times too long, and the first ones (a compile) may be."""
    rng = random.Random(1)
    truth = prefill_prior("vllm")
    learner = PrefillLearner(truth)
    for number in range(100):
        n = rng.choice((500, 2000, 8000, 30_000, 100_000))
        p = rng.choice((0, n // 2, n * 9 // 10))
        seconds = truth.seconds(n, p) * speed * rng.uniform(0.97, 1.03)
        odd = number < odd_first or rng.random() < 0.1
        learner.observe(n, p, min(3600.0, seconds * (rng.choice((10, 50)) if odd else 1)))
        if number >= 10:
            for n, p in ((2000, 0), (8000, 4000), (30_000, 0), (100_000, 90_000)):
                assert learner.cost.seconds(n, p) == pytest.approx(speed * truth.seconds(n, p), rel=0.25)


@pytest.mark.parametrize("engine", ["hf", "vllm"])
@pytest.mark.parametrize("long_first", [30, 90])
def test_the_fixed_cost_of_an_engine_is_learnt_after_long_prompts(engine: str, long_first: int) -> None:
    """A small model: long prompts are much quicker than the prior says, and what is cached takes 44 ms all the same."""
    rng = random.Random(1)
    learner = PrefillLearner(prefill_prior(engine))

    def serve(n: int, p: int) -> None:
        assert learner.observe(n, p, (0.044 + 1e-5 * (n - p)) * rng.uniform(0.8, 1.25))

    for _ in range(long_first):
        serve(rng.randint(2000, 8000), 0)
    for _ in range(10):
        serve(rng.randint(2000, 8000), 0)
        serve(811, 800)
    assert learner.cost.seconds(811, 800) == pytest.approx(0.044, rel=0.25)
    assert learner.cost.seconds(4000, 0) == pytest.approx(0.084, rel=0.25)


@given(
    st.lists(st.tuples(st.integers(-5, 300_000), st.integers(-5, 300_000), st.floats()), max_size=40),
    st.integers(2, 300_000),
)
def test_prefill_model_stays_in_range(observations: list[tuple[int, int, float]], n: int) -> None:
    learner = PrefillLearner(prefill_prior("hf"))
    for one in observations:
        learner.observe(*one)
    cost = learner.cost
    assert all(math.isfinite(value) and value >= 0 for value in cost)
    assert cost.d <= cost.b
    assert 0 < cost.seconds(n, n // 2) <= cost.seconds(n, 0) * (1 + 1e-9)


@given(st.lists(st.floats(), max_size=30))
def test_followers_take_nothing_absurd(values: list[float]) -> None:
    follower, transfer, step = Follower(1.0), TransferLearner(), DecodeLearner()
    for value in values:
        follower.observe(value)
        transfer.observe(value, 1.0)
        transfer.observe(1e6, value)
        step.observe(1.0, 100.0, value)
    assert 0 < follower.value < math.inf
    assert 0 < transfer.cost(1024).seconds(100) < math.inf
    assert 0 < step.cost.tbt_s(1, 1) < math.inf


def test_followers_follow() -> None:
    transfer, step = TransferLearner(), DecodeLearner()
    for _ in range(40):
        assert transfer.observe(1e7, 0.105)
        assert step.observe(4, 1000, 0.5)
    assert transfer.cost(1000).seconds(10_000) == pytest.approx(0.105, rel=0.05)
    assert step.cost.tbt_s(4, 1000) == pytest.approx(0.5, rel=0.05)


# --- seen blocks --------------------------------------------------------------------------------------------------


def seen(blocks_max: int = 1000) -> SeenBlocks:
    return SeenBlocks(_native.BlockIndex, blocks_max)


def test_reasons_of_misses() -> None:
    book = seen()
    mine, content = chain("mine", 10), chain("content", 10)
    assert book.explain(mine, content, 1, 0, 16) == [MissRange(0, 160, MissReason.NEVER_SEEN)]
    book.learn(chain("theirs", 8), content[: 32 * 8], 1)
    book.learn(chain("elsewhere", 9), content[: 32 * 9], 2)
    book.learn(mine[: 32 * 4], content[: 32 * 4], 1)
    assert book.explain(mine, content, 1, 0, 16) == [
        MissRange(0, 64, MissReason.EVICTED),
        MissRange(64, 128, MissReason.OTHER_TENANT),
        MissRange(128, 144, MissReason.OTHER_PASSPORT),
        MissRange(144, 160, MissReason.NEVER_SEEN),
    ]
    assert book.explain(mine, content, 1, 9, 16) == [MissRange(144, 160, MissReason.NEVER_SEEN)]
    assert book.explain(mine, b"", 1, 0, 16) == [
        MissRange(0, 64, MissReason.EVICTED),
        MissRange(64, 160, MissReason.NEVER_SEEN),
    ]
    assert book.explain(mine, content, 1, 10, 16) == []


def test_memory_is_bounded_and_old_blocks_go_first() -> None:
    book = seen(100)
    for number in range(20):
        book.learn(chain(f"k{number}", 20), chain(f"c{number}", 20), 1)
        assert book.blocks() <= 2 * 100
    assert book.explain(chain("k0", 20), b"", 1, 0, 1)[0].reason == MissReason.NEVER_SEEN
    assert book.explain(chain("k19", 20), b"", 1, 0, 1) == [MissRange(0, 20, MissReason.EVICTED)]
    book.learn(chain("big", 500), chain("cbig", 500), 1)
    assert book.blocks() <= 200
    nothing = seen(0)
    nothing.learn(chain("a", 5), chain("c", 5), 1)
    assert nothing.blocks() == 0


def test_ranges_are_bounded() -> None:
    book = seen(10_000)
    keys = chain("a", 400)
    book.learn(b"".join(keys[at : at + 32] for at in range(0, len(keys), 64)), b"", 1)
    found = book.explain(keys, b"", 1, 0, 1)
    assert len(found) <= 64
    assert (found[0].begin, found[0].reason) == (0, MissReason.EVICTED)


# --- records ------------------------------------------------------------------------------------------------------


def record(name: str, request_id: str) -> DecisionRecord:
    return DecisionRecord(name, request_id, pack({"decision_id": name}), 0.0)


def test_records_are_bounded_in_number_and_size() -> None:
    book = Records(3)
    for number in range(10):
        book.add(record(f"d{number}", f"r{number % 2}"))
        book.check()
    assert len(book) == 3
    assert book.find("d0") is None
    newest = book.find("r1")
    assert newest is not None
    assert newest.decision_id == "d9"
    assert book.earlier("r1") == ["d7", "d9"]
    leg = {"leg": "decode", "instance": "i", "sent_ms": 0.0, "ended_ms": 0.0, "code": "x" * 10_000}
    for number in range(100):
        newest.note({"phase": "running", "elapsed_ms": float(number), "legs": [leg]})
    assert len(newest.events) <= EVENTS_MAX
    assert len(newest.to_json(Rules())) < 2 * EVENT_BYTES_MAX
    events = json.loads(newest.to_json(Rules()))["events"]
    assert events[0]["legs"] == [leg]
    assert (events[-1]["legs"], events[-1]["dropped"]) == ([], "the record is full")

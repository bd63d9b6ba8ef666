"""A leg's report says where in the pool its blocks lay: made from the places of the lookup, read as hostile text, shown
by `mooncache why`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mooncache.cli.why import timeline
from mooncache.conductor.messages import cache_of
from mooncache.kvcache.core.break_even import BreakEven, node_and_tier, place_name
from mooncache.kvcache.core.weighing import LoadChoice, LoadWeighing, ShardLoad
from mooncache.kvcache.leg_hint import NAME, PLACES_MAX, CacheReport, LegHint, LoadedFrom, most_loaded
from mooncache.kvcache.leg_messages import cache_message

WARM, COLD, NEAR = place_name("n1", "dram"), place_name("n1", "ssd"), place_name("n2 (x)", "dram")


def test_a_place_is_its_node_and_its_tier() -> None:
    assert [node_and_tier(place) for place in (COLD, NEAR, "")] == [
        ("n1", "ssd"),
        ("n2 (x)", "dram"),
        ("", ""),
    ]


def test_the_blocks_that_came_count_where_they_lay() -> None:
    weighing = LoadWeighing(BreakEven(block_tokens=16, block_bytes=1 << 20))
    choice = LoadChoice(places=((WARM,),) * 4 + ((COLD,),) * 3)
    weighing.loaded(choice, LegHint(), 1, 7, {0: ShardLoad(5, 0.1, is_cut=True)})
    assert choice.loaded_from == (LoadedFrom("n1", "dram", 3), LoadedFrom("n1", "ssd", 2))
    weighing.loaded(choice, LegHint(), 6, 9, {0: ShardLoad(3, 0.1, is_cut=False)})
    assert choice.loaded_from == (LoadedFrom("n1", "dram", 3), LoadedFrom("n1", "ssd", 3)), (
        "of others nothing is known"
    )


def test_a_block_with_a_part_on_a_disk_is_on_the_disk() -> None:
    weighing = LoadWeighing(BreakEven(block_tokens=16, block_bytes=1 << 20, shards=2), shards=2)
    choice = LoadChoice(places=((NEAR, COLD), (NEAR, WARM)))
    weighing.loaded(choice, LegHint(), 0, 2, {at: ShardLoad(2, 0.1, is_cut=False) for at in range(2)})
    assert set(choice.loaded_from) == {LoadedFrom("n1", "ssd", 1), LoadedFrom("n2 (x)", "dram", 1)}


def test_a_hint_can_ask_for_a_load_that_does_not_pay() -> None:
    known = BreakEven(block_tokens=16, block_bytes=1 << 20)
    for _ in range(4):
        known.computed(64, 64e-6)
        known.loaded(4, 4, 1.0, ((WARM,),) * 4)
    weighing, always = LoadWeighing(known), LegHint(load_always=True)
    for hint, end in ((LegHint(), 0), (always, 4)):
        choice = LoadChoice(places=((WARM,),) * 4)
        weighing.weigh(choice, hint, 0, 4, 0.0)  # the first one may be a trial
        choice = LoadChoice(places=((WARM,),) * 4)
        assert weighing.weigh(choice, hint, 0, 4, 0.1) == (end, 4 - end)
        assert choice.computed_faster is (end == 0)
        assert weighing.worth_awaiting(LoadChoice(places=choice.places), hint, 0, 4, 0.2) == end
        assert weighing.pays(choice, hint, 0, 4) is (end == 4)
        assert (weighing.pace(choice, hint, 0, 4) is None) is (end == 4), "nor is it cut"
    assert LegHint.from_params(always.to_params()) == always
    wrongs: tuple[object, ...] = (1, "true", None, [])
    for wrong in wrongs:
        assert not LegHint.from_params({NAME: {"load_always": wrong}}).load_always


def test_the_places_with_the_most_blocks_are_told() -> None:
    many = [LoadedFrom(f"n{number}", "dram", number) for number in range(1, 30)]
    kept = most_loaded([*many, *many])
    assert len(kept) == PLACES_MAX
    assert kept[0] == LoadedFrom("n29", "dram", 58)


def test_reports_keep_their_places_on_every_way() -> None:
    report = CacheReport(hit_tokens=64, loaded_tokens=64, loaded_from=(LoadedFrom("n1", "ssd", 4),))
    assert CacheReport.from_params(report.to_params()) == report
    assert CacheReport.from_params(json.loads(json.dumps(report.to_params()))) == report
    assert cache_of(cache_message(report)) == report


@pytest.mark.parametrize(
    "said",
    [
        "n1",
        7,
        {"n1": 4},
        [["n1", "ssd"]],
        [["n1", "ssd", 0]],
        [["n1", "ssd", True]],
        [["n1", "ssd", 1 << 40]],
        [[1, "ssd", 1]],
        [["n" * 300, "ssd", 1]],
        [None],
    ],
)
def test_what_is_no_place_is_left_out(said: Any) -> None:
    report = CacheReport.from_params({NAME: {"loaded_from": said, "hit_tokens": 3}})
    assert report == CacheReport(hit_tokens=3)
    many = CacheReport.from_params({NAME: {"loaded_from": [["n", "dram", 1]] * 100}})
    assert many is not None and len(many.loaded_from) == PLACES_MAX


def test_why_shows_them() -> None:
    cache = {
        "outcome": "hit",
        "local_tokens": 0,
        "loaded_tokens": 64,
        "load_ms": 2.0,
        "waited_ms": 0.0,
        "loaded_from": [["n1", "ssd", 3], ["n2", "dram", 1]],
    }
    leg = {"leg": "decode", "instance": "d", "sent_ms": 1.0, "ended_ms": 9.0, "code": "OK", "cache": cache}
    event = {"phase": "finished", "elapsed_ms": 10.0, "since_decision_ms": 9.0, "legs": [leg]}
    text = "\n".join(what for _, what in timeline({"events": [event]}))
    assert "64 loaded from 3 blocks of n1 (ssd), 1 blocks of n2 (dram) in 2.0 ms" in text

"""Copies over failure domains: where a further one goes, and which one of too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.master.core.placement import (
    Candidate,
    Domains,
    choose_spread,
    copy_to_drop,
    failure_domains,
    rank_nodes,
)

KEY = b"k" * 32


def nodes_of(places: list[Domains]) -> list[Candidate]:
    return [
        Candidate(f"n{index}", where.host, 1.0, index, domains=where) for index, where in enumerate(places)
    ]


# Two zones with two racks of two hosts each.
PLACES = [Domains(f"z{z}", f"r{r}", f"h{z}{r}{h}") for z in range(2) for r in range(2) for h in range(2)]
LAYOUTS = st.lists(st.builds(Domains, *(st.sampled_from(["", "a", "b", "c"]),) * 3), min_size=1, max_size=12)


@pytest.mark.parametrize("first", range(len(PLACES)))
def test_copies_go_to_another_zone_then_to_another_rack_then_to_another_host(first: int) -> None:
    left = [node for node in nodes_of(PLACES) if node.index != first]
    second, third, fourth, fifth = choose_spread(KEY, left, [PLACES[first]], 4)
    assert second.domains.zone != PLACES[first].zone
    racks = {PLACES[first][:2], second.domains[:2], third.domains[:2], fourth.domains[:2]}
    assert len(racks) == 4, "every rack has one before one has two"
    assert fifth.domains.host not in {PLACES[first].host, second.domains.host}


def test_a_rack_of_another_zone_is_another_rack() -> None:
    held, here, there = Domains("a", "r1", "h1"), Domains("a", "r1", "h2"), Domains("b", "r1", "h3")
    assert choose_spread(KEY, nodes_of([here, there]), [held], 1)[0].domains == there


def test_wishes_go_before_spread_and_equals_by_the_ranking() -> None:
    nodes = nodes_of(PLACES)
    assert choose_spread(KEY, nodes[1:], [PLACES[0]], 1, preferred=[1])[0].index == 1
    alike = nodes_of([Domains(host=f"h{n}") for n in range(5)])
    assert choose_spread(KEY, alike, [], 5) == rank_nodes(KEY, alike)


@given(LAYOUTS, st.data())
def test_no_choice_is_closer_to_the_copies_than_it_has_to_be(
    places: list[Domains], data: st.DataObject
) -> None:
    nodes = nodes_of(places)
    holders = data.draw(st.sets(st.sampled_from(range(len(places)))))
    left = [node for node in nodes if node.index not in holders]
    chosen = choose_spread(KEY, left, [places[index] for index in holders], 3)
    assert len(chosen) == min(3, len(left))
    assert len({node.index for node in chosen}) == len(chosen)
    if chosen:
        zones = [places[index].zone for index in holders]
        fewest = min(zones.count(node.domains.zone) for node in left)
        assert zones.count(chosen[0].domains.zone) == fewest


@given(LAYOUTS, st.data())
def test_the_copy_that_goes_leaves_the_others_as_far_apart_as_possible(
    places: list[Domains], data: st.DataObject
) -> None:
    holders = data.draw(st.sets(st.sampled_from(range(len(places))), min_size=1))
    go = copy_to_drop(KEY, {index: places[index] for index in holders}, nodes_of(places))

    def zones_without(index: int) -> int:
        return len({places[other].zone for other in holders if other != index})

    assert go in holders
    assert zones_without(go) == max(map(zones_without, holders))


def test_of_equal_copies_the_one_goes_that_clients_look_at_last() -> None:
    nodes = nodes_of([Domains(host=f"h{n}") for n in range(4)])
    last = rank_nodes(KEY, nodes)[-1].index
    assert copy_to_drop(KEY, {node.index: node.domains for node in nodes}, nodes) == last
    others = [node for node in nodes if node.index != 2]
    assert copy_to_drop(KEY, {node.index: node.domains for node in nodes}, others) == 2, "one takes no blocks"


def test_domains_are_of_the_widest_level_that_differs() -> None:
    def level(*places: Domains) -> tuple[str, int]:
        found = failure_domains(dict(enumerate(places)), range(len(places)))
        return found.level, found.placeable

    assert level(Domains("a", "r", "h"), Domains("b", "r", "h")) == ("zone", 2)
    assert level(Domains("a", "r", "h"), Domains("a", "s", "i"), Domains("a", "s", "j")) == ("rack", 2)
    assert level(Domains("", "", "h"), Domains("", "", "h")) == ("host", 1)
    assert level() == ("host", 0)
    full = failure_domains({0: Domains("a"), 1: Domains("b")}, [1])
    assert (len(full.numbers), full.placeable) == (2, 1), "a zone without room does not ask for copies"

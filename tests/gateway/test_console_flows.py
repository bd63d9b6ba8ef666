"""What moves in the cluster and who holds what, and what was not well and when: the pure parts behind two pages."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mooncache.gateway.console.messages import hits_of_unlimited
from mooncache.gateway.core.console_flows import OTHERS, CounterRates, TenantShare, flows, tenant_view
from mooncache.gateway.core.console_incidents import IncidentBook
from mooncache.proto.v1 import master_pb2

NAMES = st.sampled_from(["a", "b", "c", ""])
SHARES = st.lists(
    st.builds(TenantShare, st.sampled_from(["n1", "n2"]), NAMES, st.integers(0, 9), st.integers(0, 9)),
    max_size=12,
)
STATES = st.sampled_from(["ready", "suspect", "draining", "starting", "dead"])
LOOKS = st.lists(
    st.none() | st.dictionaries(st.sampled_from("abcdef"), STATES, max_size=6), min_size=1, max_size=30
)


def rows_of(states: dict[str, str]) -> list[dict[str, Any]]:
    return [{"id": name, "state": state, "reason": f"{name} is {state}"} for name, state in states.items()]


def test_rates_are_of_a_window_and_of_counters_that_grow() -> None:
    rates = CounterRates(window_s=10.0)
    assert rates.rates() == {}
    for at_s in range(0, 31, 2):
        rates.take(float(at_s), {"n": {"stored_bytes": 100 * at_s}})
    assert rates.rates() == {"n": {"stored_bytes": 100.0}}
    rates.take(30.0, {"n": {"stored_bytes": 0}})  # the same moment again changes nothing
    assert rates.rates() == {"n": {"stored_bytes": 100.0}}
    rates.take(32.0, {"n": {"stored_bytes": 5}, "new": {"stored_bytes": 7}})
    assert rates.rates() == {}  # one was started again, one was not there before
    for at_s in range(34, 60, 2):
        rates.take(float(at_s), {"n": {"stored_bytes": 5 + (at_s - 32) * 50}})
    assert rates.rates() == {"n": {"stored_bytes": 50.0}}


def test_nothing_is_a_rate_of_a_time_without_looks_or_across_a_restart() -> None:
    rates = CounterRates(window_s=10.0)
    rates.take(0.0, {"n": {"stored_bytes": 0}})
    rates.take(2.0, {"n": {"stored_bytes": 20}})
    rates.take(3600.0, {"n": {"stored_bytes": 10**9}})  # the page was closed for an hour
    assert rates.rates() == {}
    rates.take(3602.0, {"n": {"stored_bytes": 10**9 + 20}, "m": {"hit_bytes": 100, "up_bytes": 8}})
    assert rates.rates() == {"n": {"stored_bytes": 10.0}}
    rates.take(3604.0, {"n": {"stored_bytes": 10**9 + 40}, "m": {"hit_bytes": 4, "up_bytes": 8}})
    rates.take(3606.0, {"n": {"stored_bytes": 10**9 + 60}, "m": {"hit_bytes": 300, "up_bytes": 9}})
    assert rates.rates() == {"n": {"stored_bytes": 10.0}}, "m was started again and passed what it had"
    for at_s in range(3608, 3622, 2):
        more = 25 * (at_s - 3606)
        rates.take(float(at_s), {"m": {"hit_bytes": 300 + more, "up_bytes": 9 + more}})
    assert rates.rates() == {"m": {"hit_bytes": 25.0, "up_bytes": 25.0}}


def test_flows_are_sums_by_role() -> None:
    nodes = {"n1": {"stored_bytes": 10.0, "hit_bytes": 5.0}, "n2": {"stored_bytes": 1.0}}
    engines = {
        "p": {"pool_bytes": 7.0, "computed_tokens": 3.0, "output_tokens": 0.0},
        "d1": {"pool_bytes": 4.0, "computed_tokens": 0.0, "output_tokens": 2.0},
        "d2": {"output_tokens": 2.0},
    }
    found = {
        (each.source, each.target): (each.bytes_per_s, each.tokens_per_s)
        for each in flows(nodes, engines, {"p": "prefill", "d1": "decode", "d2": "decode", "gone": "both"})
    }
    assert found == {
        ("gateways", "prefill engines"): (None, 3.0),
        ("pool", "prefill engines"): (7.0, None),
        ("prefill engines", "gateways"): (None, 0.0),
        ("gateways", "decode engines"): (None, 0.0),
        ("pool", "decode engines"): (4.0, None),
        ("decode engines", "gateways"): (None, 4.0),
        ("all writers", "pool"): (11.0, None),
        ("pool", "all readers"): (5.0, None),
        ("memory", "disks"): (None, None),  # not counted is not zero
        ("disks", "memory"): (None, None),
    }


@given(SHARES, st.integers(0, 3))
def test_no_byte_of_a_tenant_is_lost(shares: list[TenantShare], shown: int) -> None:
    found = tenant_view(shares, shown)
    names = found["tenants"]
    assert len(names) <= shown + 1 and OTHERS not in names[:-1]
    assert sum(cell[2] for cell in found["cells"]) == sum(each.memory_bytes for each in shares)
    assert sum(cell[3] for cell in found["cells"]) == sum(each.disk_bytes for each in shares)
    sums = [sum(cell[2] + cell[3] for cell in found["cells"] if cell[1] == at) for at in range(len(names))]
    named = sums[: names.index(OTHERS)] if OTHERS in names else sums
    assert named == sorted(named, reverse=True)
    assert len({(cell[0], cell[1]) for cell in found["cells"]}) == len(found["cells"])


def test_an_incident_has_a_begin_and_an_end() -> None:
    book = IncidentBook(0.0)
    book.take(1.0, "instance", rows_of({"e": "starting", "f": "ready"}))
    assert book.newest() == []
    book.take(2.0, "instance", rows_of({"e": "ready", "f": "suspect"}))
    book.take(3.0, "node", [{"id": "n", "state": "draining", "remark": "its memory does not answer"}])
    book.take(4.0, "instance", None)  # silent: nothing is known of instances
    book.take(4.0, "instance", rows_of({"e": "ready", "f": "dead"}))
    first, second = book.newest()
    assert (first["kind"], first["name"], first["reason"]) == ("node", "n", "its memory does not answer")
    assert (second["state"], second["since_s"], second["until_s"]) == ("dead", 2.0, None)
    book.take(5.0, "instance", rows_of({"e": "ready"}))
    book.take(6.0, "node", [{"id": "n", "state": "active", "remark": ""}])
    assert [(each["name"], each["until_s"], each["gone"]) for each in book.newest()] == [
        ("n", 6.0, False),
        ("f", 5.0, True),
    ]


def test_an_incident_does_not_end_before_its_begin_when_the_clock_is_set_back() -> None:
    book = IncidentBook(0.0)
    book.take(100.0, "instance", rows_of({"e": "suspect"}))
    book.take(40.0, "instance", rows_of({"e": "ready"}))
    book.check()
    assert book.newest()[0]["until_s"] == 100.0


@given(LOOKS)
def test_incidents_are_bounded_and_follow_the_looks(looks: list[dict[str, str] | None]) -> None:
    book, last = IncidentBook(0.0, open_max=3, ended_max=4), None
    for at_s, states in enumerate(looks):
        book.take(float(at_s), "instance", None if states is None else rows_of(states))
        book.check()
        last = states if states is not None else last
    found = book.newest()
    assert len(found) <= 3 + 4
    for each in found:
        if each["until_s"] is None:
            assert last is not None and last[each["name"]] in ("suspect", "dead")


def test_hits_of_nodes_are_summed_before_they_are_compared() -> None:
    nodes = [
        master_pb2.NodeTenants(sampled_found=1, sampled_unlimited=4),
        master_pb2.NodeTenants(sampled_found=8, sampled_unlimited=8),
        master_pb2.NodeTenants(),  # nothing was asked of it, or its version does not say
    ]
    assert hits_of_unlimited(nodes) == 0.75
    assert hits_of_unlimited(nodes[2:]) is None
    assert hits_of_unlimited(()) is None

"""What breaks a promise, and what does not."""

from __future__ import annotations

import pytest

from mooncache.chaos.core.faults import faults_named
from mooncache.chaos.core.records import CheckedAnswer, Injection, Outcome, PoolTally, Record
from mooncache.chaos.core.verdict import judge
from mooncache.chaos.report_page import report_page


def injection(
    name: str, *, begun_s: float = 10.0, well_s: float | None = 14.0, flipped: int = 0
) -> Injection:
    (fault,) = faults_named([name])
    return Injection(
        fault, "a-part", begun_s, begun_s, well_s, well_s and well_s + 1.0, flipped, "it is late"
    )


def record(
    *answers: CheckedAnswer, faults: tuple[Injection, ...] = (), pool: PoolTally | None = None
) -> Record:
    right = CheckedAnswer(1.0, 2.0, Outcome.RIGHT, 0.1, 100, 64)
    return Record(
        1,
        "mooncache up",
        "tiny",
        60.0,
        [right, *answers],
        list(faults) or [injection("kill-master")],
        pool or PoolTally(read=5),
    )


def broken(found: Record) -> list[str]:
    return [check.promise for check in judge(found).checks if not check.kept]


def failed(begun_s: float, ended_s: float, outcome: Outcome = Outcome.FAILED) -> CheckedAnswer:
    return CheckedAnswer(begun_s, ended_s, outcome, detail="<HTTP 502>")


def test_a_good_run() -> None:
    verdict = judge(record())
    assert verdict.kept
    assert verdict.faults[0].failed == 0


@pytest.mark.parametrize(
    ("found", "promise"),
    [
        (record(failed(3, 4, Outcome.WRONG)), "no wrong token"),
        (record(pool=PoolTally(read=5, wrong=["k"])), "no wrong byte"),
        (record(failed(3, 200, Outcome.HUNG)), "no call hangs"),
        (record(pool=PoolTally(read=5, hung=1)), "no call hangs"),
        (record(failed(11, 12)), "requests fail only where the contract says so"),
        (record(faults=(injection("kill-gateway", well_s=None),)), "all is well again after each fault"),
        (record(faults=(injection("flip-store-node"),)), "the run shows something"),
        (record(pool=PoolTally()), "the run shows something"),
    ],
)
def test_what_breaks_a_promise(found: Record, promise: str) -> None:
    assert broken(found) == [promise]
    page = report_page(found, judge(found))
    assert "a promise was broken" in page
    assert "<HTTP" not in page, "texts of servers are escaped"


def test_requests_on_what_was_hit_may_fail_until_all_is_well() -> None:
    gateway = (injection("kill-gateway"),)
    assert broken(record(failed(9, 11), faults=gateway)) == []
    assert broken(record(failed(13, 15), faults=gateway)) == []
    for begun_s, ended_s in ((3, 4), (14.5, 15)):
        assert broken(record(failed(begun_s, ended_s), faults=gateway)) == [
            "requests fail only where the contract says so"
        ]


def test_figures_of_a_fault_count_what_overlapped_it() -> None:
    met = CheckedAnswer(9, 11, Outcome.RIGHT, 1.5)
    (figures,) = judge(record(met, failed(13, 15), CheckedAnswer(20, 21, Outcome.RIGHT, 9.0))).faults
    assert (figures.right, figures.failed, figures.worst_ttft_s) == (1, 1, 1.5)

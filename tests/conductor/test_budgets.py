"""Money of a month over all gateways: the conductor's sums, and gateways that race for a budget and die."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.accounts.core.spending import LedgerRow
from mooncache.conductor.core.budgets import Budgets, Spent
from mooncache.conductor.core.limit_book import LEASE_S, LimitBook, LimitKind, LimitUse
from mooncache.gateway.core.limit_shares import LeaseAnswer, ShareUse
from mooncache.gateway.core.rate_limit import RateLimit
from mooncache.gateway.core.spending import Spending
from mooncache.gateway.core.tenant_slices import FALLBACK_S, TenantSlices

T, MONTH, BUDGET, COST_MAX = "team", 202611, 50.0, 2.0
HOLDER = (T, "")


def said(ledger: str, own: float, everything: float = 0.0, month: int = MONTH) -> Spent:
    return Spent(month, ledger, own, max(own, everything))


def test_the_sum_is_that_of_the_ledgers() -> None:
    budgets = Budgets(10)
    assert budgets.take(HOLDER, said("a", 3.0)).all == 3.0
    assert budgets.take(HOLDER, said("b", 4.0)).all == 7.0
    assert budgets.take(HOLDER, said("a", 2.0)).all == 7.0, "a late report changes nothing"
    assert budgets.take(HOLDER, said("a", 5.0, 9.0)).all == 9.0
    assert budgets.take((T, "key"), said("a", 1.0)).all == 1.0, "a key's sums are its own"


def test_a_new_conductor_knows_of_ledgers_whose_host_is_gone() -> None:
    budgets = Budgets(10)
    assert budgets.take(HOLDER, said("a", 3.0, 10.0)).all == 10.0, "as it heard: 7 of others"
    assert budgets.take(HOLDER, said("b", 5.0, 10.0)).all == 10.0, "5 of these 7 have a name now"
    assert budgets.take(HOLDER, said("b", 6.0, 11.0)).all == 11.0
    assert budgets.take(HOLDER, said("a", 3.5, 10.5)).all == 11.5, "2 of the host that is gone stay"


def test_the_next_month_begins_at_nothing() -> None:
    budgets = Budgets(2)
    budgets.take(HOLDER, said("a", 30.0))
    assert budgets.take(HOLDER, said("b", 1.0, month=202612)).all == 1.0
    assert budgets.take(HOLDER, said("a", 31.0)).all == 31.0, "a clock that is behind keeps its month"
    assert budgets.take(HOLDER, said("b", 1.5, month=202612)).all == 1.5
    for number in range(3):
        budgets.take((f"t{number}", ""), said("a", 1.0))
    assert budgets.take(HOLDER, said("b", 1.0, month=202612)).all == 1.0, "forgotten, and heard again"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 10), st.booleans()), max_size=40))
def test_the_sum_never_falls(steps: list[tuple[str, float, bool]]) -> None:
    """Whatever the order of reports and of conductors that know nothing, once each ledger was heard."""
    budgets, own, heard = Budgets(4), dict.fromkeys("abc", 0.0), dict.fromkeys("abc", 0.0)
    for ledger, amount, restarts in steps:
        own[ledger] += amount
        if restarts:
            budgets.clear()
        before = max(heard.values())
        others = max(0.0, heard[ledger] - own[ledger] + amount)
        total = budgets.take(HOLDER, said(ledger, own[ledger], own[ledger] + others)).all
        heard[ledger] = total
        assert total <= sum(own.values()) + 1e-6, "never more than was spent"
        if not restarts:
            assert total >= min(before, total) and total >= own[ledger]


def test_spending_is_written_once_and_warned_of_once() -> None:
    spending = Spending()
    spending.begin(MONTH, {T: LedgerRow(70.0, 5.0)})
    assert spending.passed(T, 100.0) is None
    spending.spend(T, 6.0)
    assert spending.total(T) == 81.0 and spending.unwritten(T) == 6.0
    assert [spending.passed(T, 100.0), spending.passed(T, 100.0)] == [0.8, None]
    part = spending.next_part()
    assert part is not None and part.rows == {T: LedgerRow(6.0, 0.0)}
    spending.spend(T, 20.0)
    assert spending.next_part() is part, "until it is written"
    assert spending.total(T) == 101.0 and spending.passed(T, 100.0) == 1.0
    spending.written(part, {T: LedgerRow(77.0, 5.0)})  # another gateway of the host added 1
    assert spending.total(T) == 102.0 and spending.row(T) == LedgerRow(77.0, 5.0)
    spending.answered(T, MONTH, 77.0, 90.0)
    assert spending.total(T) == 110.0 and spending.unreported(T) == 20.0
    spending.answered(T, MONTH - 1, 77.0, 900.0)
    assert spending.total(T) == 110.0, "of another month"
    spending.begin(MONTH + 1, {})
    late = spending.next_part()
    assert late is not None and (late.month, late.rows) == (MONTH, {T: LedgerRow(20.0, 0.0)})
    spending.written(late, {T: LedgerRow(97.0, 5.0)})
    assert spending.total(T) == 0 and spending.next_part() is None


@dataclass
class Ledger:
    """A file of one host, or a database of several."""

    name: str
    own: float = 0.0
    others: float = 0.0


@dataclass
class Host:
    """A host with one gateway, and its ledger."""

    name: str
    ledger: Ledger = field(default_factory=lambda: Ledger(""))
    limits: TenantSlices = field(default_factory=TenantSlices)
    running: list[tuple[float, float]] = field(default_factory=list)  # end, cost at most
    lost: float = 0.0  # spent and never written

    def start(self, hosts: int, run: int, now_s: float) -> None:
        self.limits = TenantSlices()
        self.ledger.name = self.ledger.name or self.name
        self.limits.spending.ledger = self.ledger.name
        self.limits.begin_month(MONTH, {T: LedgerRow(self.ledger.own, self.ledger.others)})
        self.limits.hear_count(hosts, run, lambda _: 0, now_s)

    def kill(self) -> None:
        self.lost += self.limits.spending.unwritten(T)
        self.running.clear()

    def flush(self) -> None:
        while (part := self.limits.spending.next_part()) is not None:
            row, ledger = part.rows[T], self.ledger
            ledger.own, ledger.others = ledger.own + row.own, max(ledger.others, row.others)
            self.limits.spending.written(part, {T: LedgerRow(ledger.own, ledger.others)})


def use_of(use: ShareUse) -> LimitUse:
    spent = Spent(use.month, use.ledger, use.spent, use.spent_all)
    return LimitUse(
        use.tenant, LimitKind(use.kind), use.limit, use.slice, use.used, 0.0, use.wanted, spent=spent
    )


@dataclass
class Race:
    """Hosts whose gateways race for one budget."""

    rng: random.Random
    hosts: list[Host]
    book: LimitBook = field(default_factory=LimitBook)
    now_s: float = 1000.0
    run: int = 1
    is_up: bool = True
    spent: float = 0.0
    refused: int = 0
    steps: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.book.begin(0.0)
        for host in self.hosts:
            host.start(len(self.hosts), self.run, self.now_s)

    def restart_conductor(self) -> None:
        self.book, self.run, self.is_up = LimitBook(), self.run + 1, True
        self.book.begin(self.now_s)
        for host in self.hosts:
            host.limits.hear_count(len(self.hosts), self.run, lambda _: 0, self.now_s)

    def pass_time(self, seconds: float, rate: float = 10.0) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.05
            step = next(self.steps)
            for host in self.rng.sample(self.hosts, len(self.hosts)):
                self._end(host)
                if self.rng.random() < rate * 0.05:
                    most = self.rng.uniform(0.1, COST_MAX)
                    if host.limits.hold(T, RateLimit.MONEY, BUDGET, most, self.now_s):
                        host.running.append((self.now_s + self.rng.uniform(0, 2), most))
                    else:
                        self.refused += 1
                if step % 5 == 0:
                    self._report(host)
                if step % 20 == 0:
                    host.flush()

    def _end(self, host: Host) -> None:
        for end_s, most in [each for each in host.running if each[0] <= self.now_s]:
            host.running.remove((end_s, most))
            cost = most * self.rng.uniform(0.2, 1.0)
            host.limits.spending.spend(T, cost)
            self.spent += cost
            host.limits.release(T, RateLimit.MONEY, most)

    def _report(self, host: Host) -> None:
        host.limits.conductor_is(self.is_up, self.now_s)
        if not self.is_up:
            return
        host.limits.tell_spending({T: BUDGET}, self.now_s)
        for uses, is_whole in host.limits.reports(self.now_s):
            leases = [self.book.lease(host.name, use_of(use), self.now_s) for use in uses]
            for use, lease in zip(uses, leases, strict=True):
                host.limits.spending.answered(use.tenant, use.month, *reversed(lease.spent))
            answer = LeaseAnswer([(lease.slice, lease.left) for lease in leases], LEASE_S, self.run)
            host.limits.answered(uses, answer, self.now_s, is_whole=is_whole)
        host.limits.check()


@pytest.mark.parametrize("seed", range(6))
def test_two_gateways_that_race_pass_a_budget_by_a_request_each(seed: int) -> None:
    race = Race(random.Random(seed), [Host("a"), Host("b")])
    race.pass_time(30.0)
    assert race.refused, "the budget was spent, or it was no test"
    assert BUDGET - 4 * COST_MAX < race.spent <= BUDGET + 2 * COST_MAX, f"seed {seed}: {race.spent}"


@pytest.mark.parametrize("seed", range(6))
def test_gateways_that_share_a_ledger_count_nothing_twice(seed: int) -> None:
    """One is idle for a while, so what it knows of the ledger is old when it reports again; conductors come and go."""
    rng, shared = random.Random(seed), Ledger("database")
    hosts = [Host(name, shared) for name in "abc"]
    race = Race(rng, list(hosts))
    for _ in range(3):
        race.hosts = rng.sample(hosts, 2)
        race.pass_time(rng.uniform(0.5, 1.5), rate=4.0)
        if rng.random() < 0.5:
            race.hosts = list(hosts)
            race.restart_conductor()
    race.hosts = list(hosts)
    race.pass_time(30.0)
    assert race.refused, "the budget was spent, or it was no test"
    assert BUDGET - 4 * COST_MAX < race.spent <= BUDGET + 3 * COST_MAX, f"seed {seed}: {race.spent}"
    race.pass_time(5.0, rate=0.0)
    assert shared.own == pytest.approx(race.spent) and shared.others == 0
    assert [host.limits.spending.total(T) for host in hosts] == pytest.approx([race.spent] * 3)


def test_a_ledger_of_several_gateways_is_known_as_the_last_of_them_wrote_it() -> None:
    budgets = Budgets(10)
    budgets.take(HOLDER, said("db", 15.0))
    assert budgets.take(HOLDER, said("db", 10.0)) == (15.0, 15.0), "a gateway that read it before"
    assert budgets.take(HOLDER, said("db", 10.0, 14.0)) == (19.0, 15.0), "4 of other ledgers"
    assert budgets.take(HOLDER, said("file", 4.0, 4.0)) == (19.0, 4.0), "which have a name now"
    spending = Spending()
    spending.begin(MONTH, {T: LedgerRow(10.0, 0.0)})
    spending.answered(T, MONTH, 15.0, 15.0)
    assert spending.row(T) == LedgerRow(15.0, 0.0) and spending.next_part() is None


@pytest.mark.parametrize("seed", range(6))
def test_what_was_spent_outlives_gateways_and_conductors(seed: int) -> None:
    race = Race(random.Random(seed), [Host("a"), Host("b"), Host("c")])
    for _ in range(4):
        race.pass_time(race.rng.uniform(0.5, 2.0), rate=3.0)
        host = race.rng.choice(race.hosts)
        host.kill()
        host.start(len(race.hosts), race.run, race.now_s)
        race.pass_time(race.rng.uniform(0.2, 1.0), rate=3.0)
        race.restart_conductor()
    for host in race.hosts:  # all at once, and the conductor with them
        host.kill()
    race.restart_conductor()
    for host in race.hosts:
        host.start(len(race.hosts), race.run, race.now_s)
    race.pass_time(40.0)
    lost = sum(host.lost for host in race.hosts)
    assert race.refused and race.spent <= BUDGET + 3 * COST_MAX + lost, (
        f"seed {seed}: {race.spent}, {lost} lost"
    )


@pytest.mark.parametrize("seed", range(4))
def test_without_a_conductor_each_gateway_spends_its_part_of_what_was_left(seed: int) -> None:
    race = Race(random.Random(seed), [Host("a"), Host("b")])
    race.pass_time(2.0)
    race.is_up = False
    race.pass_time(FALLBACK_S + 40.0)
    assert all(host.limits.falls_back for host in race.hosts)
    assert race.refused and race.spent <= BUDGET + 2 * COST_MAX + BUDGET / 4, f"seed {seed}: {race.spent}"
    race.restart_conductor()
    before = race.spent
    race.pass_time(20.0)
    assert race.spent <= max(before, BUDGET) + 2 * COST_MAX, f"seed {seed}: {race.spent}"

"""Limits over all gateways: the conductor's book and the gateways' slices, in virtual time with seeded randomness."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest

from mooncache.conductor.core.limit_book import (
    LEASE_S,
    LimitBook,
    LimitKind,
    LimitUse,
    fair_shares,
)
from mooncache.errors import InvalidArgument, LimitExceeded
from mooncache.gateway.core.limit_shares import LeaseAnswer, ShareUse
from mooncache.gateway.core.rate_limit import RateLimit, RateLimits
from mooncache.gateway.core.tenant_slices import (
    CALL_TIMEOUT_S,
    FALLBACK_S,
    INTERVAL_S,
    TenantSlices,
    rates_of,
)

STEP_S = 0.01
T = "team"


@dataclass(eq=False)
class SimGateway:
    """One gateway: its requests, and its calls, which take time and may be lost."""

    name: str
    limits: TenantSlices = field(default_factory=TenantSlices)
    rate: float = 0.0  # requests that come in a second
    ends: list[float] = field(default_factory=list)  # of its running requests
    call: tuple[float, float, Callable[[], None]] | None = None  # when it is at the book, and answered
    next_s: float = 0.0
    is_cut_off: bool = False
    sequence: int = 0


class SimCluster:
    """Gateways that race for one tenant's limits. `admitted` has the moment of each request that was let in."""

    def __init__(
        self, seed: int, rates: RateLimits, concurrency: int, gateways: int, *, losses: float = 0.0
    ) -> None:
        self.rng, self.now_s = random.Random(seed), 1000.0
        self.rates, self.concurrency, self.losses = rates, concurrency, losses
        self.book, self.run, self.is_up = LimitBook(), 1, True
        self.gateways = [SimGateway(f"g{at}") for at in range(gateways)]
        self.admitted: list[float] = []
        self.refused = self.running_most = 0
        self.tokens: list[tuple[float, int]] = []
        self.mean_s = 0.5
        self.prompt_tokens = 0
        self.book.begin(self.now_s - LEASE_S)
        for gateway in self.gateways:
            gateway.limits.hear_count(gateways, 1, lambda _: concurrency, self.now_s)

    def restart_conductor(self) -> None:
        """Another one leads, which knows nothing."""
        self.book, self.run, self.is_up = LimitBook(), self.run + 1, True
        self.book.begin(self.now_s)
        for gateway in self.gateways:
            if not gateway.is_cut_off:
                gateway.limits.hear_count(
                    len(self.gateways), self.run, lambda _: self.concurrency, self.now_s
                )

    def pass_time(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += STEP_S
            for gateway in self.rng.sample(self.gateways, len(self.gateways)):
                self._end_requests(gateway)
                self._talk(gateway)
                for _ in range(self._arrivals(gateway)):
                    self._ask(gateway)
            self.running_most = max(self.running_most, self.running)
            self.book.check()

    @property
    def running(self) -> int:
        return sum(len(gateway.ends) for gateway in self.gateways)

    def most_in(self, window_s: float) -> int:
        """The most requests that were let in within any window of this length."""
        first, most = 0, 0
        for at, moment in enumerate(self.admitted):
            while self.admitted[first] < moment - window_s:
                first += 1
            most = max(most, at - first + 1)
        return most

    def _arrivals(self, gateway: SimGateway) -> int:
        return sum(self.rng.random() < gateway.rate * STEP_S / 20 for _ in range(20))

    def _end_requests(self, gateway: SimGateway) -> None:
        gateway.ends = [end_s for end_s in gateway.ends if end_s > self.now_s]
        gateway.limits.running.clear()
        if gateway.ends:
            gateway.limits.running[T] = len(gateway.ends)

    def _ask(self, gateway: SimGateway) -> None:
        """What the endpoint does, but that no request waits."""
        limits = gateway.limits
        asked = {RateLimit.CONCURRENCY: self.concurrency, **rates_of(self.rates)}
        short = limits.may_wait(T, asked, self.now_s)
        running = len(gateway.ends)
        if running >= limits.running_max(T, self.concurrency, self.now_s):
            limits.refuse(T, RateLimit.CONCURRENCY)
            self.refused += 1
            return
        if limits.ask(T, self.rates, self.now_s).limit is not None:
            self.refused += 1
            return
        assert not short, "a request that is let in has nothing to wait for"
        limits.charge(T, self.rates, self.prompt_tokens, self.now_s)
        gateway.ends.append(self.now_s + self.rng.expovariate(1 / self.mean_s))
        limits.running[T] = running + 1
        self.admitted.append(self.now_s)

    def _talk(self, gateway: SimGateway) -> None:
        limits, now_s = gateway.limits, self.now_s
        if gateway.call is not None:
            due_s, timeout_s, carry = gateway.call
            if now_s >= due_s:
                gateway.call = None
                carry()
            elif now_s >= timeout_s:
                gateway.call = None
                limits.conductor_is(False, now_s)
            return
        if now_s < gateway.next_s or not limits.has_reports():
            return
        gateway.next_s = now_s + INTERVAL_S
        for uses, is_whole in limits.reports(now_s):
            self._send(gateway, uses, is_whole)

    def _send(self, gateway: SimGateway, uses: list[ShareUse], is_whole: bool) -> None:
        sent_s, answers = self.now_s, []
        gateway.sequence += 1
        sequence = gateway.sequence
        reach_s = sent_s + self.rng.uniform(0, 0.05)
        lost = self.rng.random()
        fails = gateway.is_cut_off or not self.is_up

        def reach() -> None:
            """The call is at the conductor; its answer comes later."""
            self.book.open(gateway.name, sequence)
            for use in uses:
                found = self.book.lease(gateway.name, use_of(use), self.now_s)
                answers.append((found.slice, found.left))
            answer = LeaseAnswer(answers, LEASE_S, self.run)
            if lost < self.losses:
                gateway.call = (1e9, sent_s + CALL_TIMEOUT_S, lambda: None)
            else:
                back_s = self.now_s + self.rng.uniform(0, 0.05)
                gateway.call = (back_s, 1e9, lambda: self._back(gateway, uses, answer, sent_s, is_whole))

        due_s = 1e9 if fails or self.losses <= lost < 2 * self.losses else reach_s
        gateway.call = (due_s, sent_s + CALL_TIMEOUT_S, reach)

    def _back(
        self,
        gateway: SimGateway,
        uses: list[ShareUse],
        answer: LeaseAnswer,
        sent_s: float,
        is_whole: bool,
    ) -> None:
        gateway.limits.answered(uses, answer, sent_s, is_whole=is_whole)
        gateway.limits.conductor_is(True, self.now_s)
        gateway.limits.check()


def use_of(use: ShareUse) -> LimitUse:
    """What the conductor hears of it; no limit of these tests is on money."""
    return LimitUse(
        use.tenant, LimitKind(use.kind), use.limit, use.slice, use.used, use.used_before, use.wanted, use.left
    )


def flood(cluster: SimCluster, rounds: int = 12) -> None:
    """Demand that jumps between the gateways, and is far above the limit at times."""
    for _ in range(rounds):
        for gateway in cluster.gateways:
            gateway.rate = cluster.rng.choice([0, 0, 3, 30, 200])
        cluster.pass_time(cluster.rng.choice([0.3, 1.0, 3.0]))


@pytest.mark.parametrize("seed", range(12))
def test_running_requests_of_all_gateways_never_exceed_the_limit(seed: int) -> None:
    gateways, limit = 2 + seed % 3, (1, 3, 8, 40)[seed % 4]
    cluster = SimCluster(seed, RateLimits(), limit, gateways, losses=0.1 * (seed % 2))
    flood(cluster)
    assert cluster.running_most <= limit, f"seed {seed}"
    assert cluster.admitted and cluster.refused, "the limit was reached, or it was no test"


@pytest.mark.parametrize("seed", range(12))
def test_requests_a_minute_of_all_gateways_never_exceed_the_limit(seed: int) -> None:
    limit = (6, 60, 600)[seed % 3]
    cluster = SimCluster(seed, RateLimits(limit), 1 << 20, 2 + seed % 2, losses=0.1 * (seed % 2))
    flood(cluster, 20)
    for window_s in (1.0, 10.0, 60.0):
        most = cluster.most_in(window_s)
        assert most <= limit + limit * (window_s + STEP_S) / 60, f"seed {seed}: {most} within {window_s} s"
    assert cluster.refused


@pytest.mark.parametrize("seed", range(6))
def test_tokens_a_minute_go_below_nothing_by_what_one_step_lets_in(seed: int) -> None:
    cluster = SimCluster(seed, RateLimits(0, 6000), 1 << 20, 2, losses=0.1 * (seed % 2))
    cluster.prompt_tokens = 100
    flood(cluster, 20)
    for window_s in (10.0, 60.0):
        spent = 100 * cluster.most_in(window_s)
        # Each gateway lets a request in while something is left: the last one of each goes below.
        assert spent <= 6000 * (1 + (window_s + STEP_S) / 60) + 2 * 100, f"seed {seed}: {spent}"
    assert cluster.refused


@pytest.mark.parametrize("seed", range(8))
def test_another_conductor_begins_with_what_gateways_report(seed: int) -> None:
    """No slice is given twice, and no bucket is full again."""
    limit, concurrency = 60, (8, 1 << 20)[seed % 2]
    cluster = SimCluster(seed, RateLimits(limit), concurrency, 2)
    cluster.mean_s = 2.0
    for _ in range(6):
        flood(cluster, 3)
        cluster.is_up = False
        for gateway in cluster.gateways:
            gateway.call = None
        cluster.pass_time(cluster.rng.choice([0.0, 0.1, 1.0]))
        cluster.restart_conductor()
    assert cluster.running_most <= concurrency, f"seed {seed}"
    # What was spent out of slices since the last report that was answered: half a second of calls here.
    unheard = 2 * limit * 0.5 / 60 * 6
    assert cluster.most_in(60.0) <= 2 * limit + unheard, f"seed {seed}"


@pytest.mark.parametrize("seed", range(6))
def test_without_a_conductor_each_gateway_has_its_fair_share(seed: int) -> None:
    cluster = SimCluster(seed, RateLimits(120), 9, 3)
    for gateway in cluster.gateways:
        gateway.rate = 100.0
    cluster.pass_time(3.0)
    cluster.is_up = False
    cluster.pass_time(FALLBACK_S + 3 * CALL_TIMEOUT_S)
    assert all(gateway.limits.falls_back for gateway in cluster.gateways)
    cluster.mean_s = 5.0
    cluster.pass_time(20.0)
    begin = len(cluster.admitted)
    cluster.pass_time(30.0)
    assert 30 <= len(cluster.admitted) - begin <= 60 + 3, "two a second over all gateways"
    assert all(len(gateway.ends) <= 3 for gateway in cluster.gateways)
    cluster.restart_conductor()
    cluster.pass_time(3.0)
    assert not any(gateway.limits.falls_back for gateway in cluster.gateways)
    assert cluster.running_most <= 9, f"seed {seed}"


@pytest.mark.parametrize("seed", range(6))
def test_a_cut_off_gateway_adds_at_most_its_slice(seed: int) -> None:
    """The bound: the limit, and of each gateway that only the conductor misses its last slice or its fair share."""
    cluster = SimCluster(seed, RateLimits(), 8, 2)
    cluster.mean_s = 1.0
    cluster.gateways[0].rate = 100.0
    cluster.pass_time(3.0)
    assert len(cluster.gateways[0].ends) == 8, "who alone wants something gets all"
    cluster.gateways[0].is_cut_off = True
    cluster.gateways[1].rate = 100.0
    cluster.pass_time(FALLBACK_S + CALL_TIMEOUT_S + 10.0)
    assert cluster.running_most <= 16
    assert len(cluster.gateways[0].ends) <= 4
    assert len(cluster.gateways[1].ends) >= 6
    cluster.gateways[0].is_cut_off = False
    cluster.pass_time(6.0)
    cluster.running_most = 0
    cluster.pass_time(3.0)
    assert cluster.running_most == 8, f"seed {seed}"


def test_slices_follow_demand_and_come_back() -> None:
    cluster = SimCluster(1, RateLimits(), 8, 2)
    cluster.mean_s = 0.2
    first, second = cluster.gateways
    first.rate = 200.0
    cluster.pass_time(2.0)
    assert len(first.ends) == 8
    second.rate = 200.0
    cluster.pass_time(2.0)
    assert 3 <= len(first.ends) <= 5 and 3 <= len(second.ends) <= 5, "both want it: half each"
    first.rate = 0.0
    cluster.pass_time(2.0)
    assert len(second.ends) == 8, "the share of an idle gateway is back within two seconds"


def test_a_limit_of_one_takes_turns() -> None:
    cluster = SimCluster(3, RateLimits(), 1, 2)
    cluster.mean_s = 0.1
    served = []
    for gateway in cluster.gateways:
        gateway.rate = 50.0
    for _ in range(200):
        cluster.pass_time(0.1)
        served += [gateway.name for gateway in cluster.gateways if gateway.ends]
    assert min(served.count("g0"), served.count("g1")) > len(served) // 5, "neither starves"


def test_a_gateway_that_was_alone_keeps_what_it_uses() -> None:
    """The second gateway gets nothing before the first has told what it has."""
    book, alone, new = LimitBook(), TenantSlices(), TenantSlices()
    book.begin(0.0)
    alone.hear_count(1, 1, lambda _: 8, 100.0)
    alone.running[T] = 7
    for _ in range(50):
        assert alone.ask(T, RateLimits(60), 100.0).limit is None
    book.joined(100.0)
    new.hear_count(2, 1, lambda _: 8, 100.0)
    limits = {RateLimit.CONCURRENCY: 8, RateLimit.REQUESTS: 60.0}
    waits_for = new.may_wait(T, limits, 100.0)
    new.wait(T, waits_for, 1)

    def report(limits: TenantSlices, name: str, now_s: float) -> None:
        [(uses, is_whole)] = limits.reports(now_s)
        leases = [book.lease(name, use_of(use), now_s) for use in uses]
        answers = [(each.slice, each.left) for each in leases]
        limits.answered(uses, LeaseAnswer(answers, LEASE_S, 7), now_s, is_whole=is_whole)
        if is_whole:
            book.reported_all(name, ["a", "b"])

    report(new, "b", 100.0)
    assert new.running_max(T, 8, 100.0) == 0 and new.ask(T, RateLimits(60), 100.0).limit
    alone.hear_count(2, 1, lambda _: 8, 100.1)
    assert alone.running_max(T, 8, 100.1) == 8, "it goes on meanwhile"
    report(alone, "a", 100.1)
    report(alone, "a", 100.2)
    report(new, "b", 100.3)
    new.wait(T, waits_for, -1)
    assert new.running_max(T, 8, 100.3) == 1 and alone.running_max(T, 8, 100.3) == 7
    admitted = sum(new.ask(T, RateLimits(60), 100.3).limit is None for _ in range(60))
    admitted += sum(alone.ask(T, RateLimits(60), 100.3).limit is None for _ in range(60))
    assert admitted <= 10, "the bucket is not full again"


def test_alone_again_the_bucket_goes_on() -> None:
    limits = TenantSlices()
    limits.hear_count(2, 1, lambda _: 8, 0.0)
    limits.may_wait(T, {RateLimit.REQUESTS: 60.0}, 0.0)
    limits.ask(T, RateLimits(60), 0.0)
    [(uses, is_whole)] = limits.reports(0.0)
    limits.answered(uses, LeaseAnswer([(5.0, 20.0)], LEASE_S, 7), 0.0, is_whole=is_whole)
    assert limits.ask(T, RateLimits(60), 0.0).remaining_requests == 19
    limits.hear_count(1, 1, lambda _: 8, 1.0)
    assert limits.ask(T, RateLimits(60), 1.0).remaining_requests == 19, "one came back, one was spent"


def test_refusals_name_the_limit_and_where_it_holds() -> None:
    limits, rates = TenantSlices(), RateLimits(60)
    limits.hear_count(2, 1, lambda _: 8, 0.0)
    verdict = limits.ask(T, rates, 0.0)
    assert verdict.limit is RateLimit.REQUESTS and verdict.wait_s >= 1
    assert "60 requests per minute over all gateways" in limits.refusal(T, verdict, rates)
    assert "8 of your requests may run at the same time over all gateways" in limits.full(T, 8, 0.0)
    limits.conductor_is(False, 0.0)
    assert limits.conductor_is(False, FALLBACK_S) and not limits.conductor_is(False, FALLBACK_S + 1)
    assert "its share of 4" in limits.full(T, 8, FALLBACK_S)


def test_even_shares() -> None:
    assert fair_shares([1, 9, 9], 9, [0, 0, 0]) == [1, 4, 4]
    assert fair_shares([5, 5], 3, [2, 0]) == [1, 2], "the odd one is for who has least"
    assert fair_shares([2, 2], 9, [0, 0]) == [2, 2]
    assert fair_shares([], 9, []) == []
    assert fair_shares([3], -2, [0]) == [0]


def test_old_calls_and_too_many_limits_are_refused() -> None:
    book = LimitBook(count_max=2)
    book.begin(0.0)
    book.open("g", 5)
    with pytest.raises(InvalidArgument):
        book.open("g", 5)
    number = count()

    def use() -> LimitUse:
        return LimitUse(f"t{next(number)}", LimitKind.CONCURRENCY, 8, wanted=1)

    book.lease("g", use(), 10.0)
    book.lease("g", use(), 10.0)
    with pytest.raises(LimitExceeded):
        book.lease("g", use(), 10.0)
    book.lease("g", use(), 10.0 + LEASE_S + 0.1)
    book.check()
    assert len(book) == 2, "one that is silent makes room"


def test_who_knows_all_gateways_need_not_wait_for_the_end_of_leases() -> None:
    book = LimitBook()
    use = LimitUse(T, LimitKind.CONCURRENCY, 8, wanted=4)
    for knows_gateways, granted in ((True, True), (False, False)):
        book.begin(10.0, knows_gateways=knows_gateways)
        book.reported_all("a", ["a", "b"])
        assert book.lease("a", use, 10.0).slice == 0, "b may have a slice"
        book.reported_all("b", ["a", "b"])
        assert (book.lease("a", use, 10.1).slice > 0) is granted


def test_what_a_gateway_that_died_may_have_spent_counts_as_spent() -> None:
    book = LimitBook()
    book.begin(0.0)

    def use(wanted: float) -> LimitUse:
        return LimitUse(T, LimitKind.REQUESTS, 60, wanted=wanted)

    assert book.lease("a", use(40), 10.0).slice >= 40
    later_s = 10.0 + LEASE_S
    lease = book.lease("b", use(100), later_s)
    assert lease.slice <= 20 + LEASE_S and lease.left <= 20 + LEASE_S


@pytest.mark.parametrize("seed", range(6))
def test_tokens_under_way_pass_the_limit_by_one_request_of_each_gateway(seed: int) -> None:
    """A request is let in while there is room for a token, so the last one of each gateway goes beyond."""
    rng, limit, size_max = random.Random(seed), 1000, 400
    kind, gateways, now_s = RateLimit.TOKENS_UNDER_WAY, [TenantSlices() for _ in range(2)], 100.0
    book = LimitBook()
    book.begin(0.0)
    for gateway in gateways:
        gateway.hear_count(2, 1, lambda _: 0, now_s)
    running: list[tuple[TenantSlices, int]] = []
    most = refused = 0
    for step in range(600):
        now_s += 0.05
        for number in rng.sample(range(2), 2):
            gateway = gateways[number]
            for _ in range(rng.choice((0, 0, 1, 4))):
                size = rng.randint(1, size_max)
                if gateway.hold(T, kind, limit, size, now_s):
                    running.append((gateway, size))
                else:
                    refused += 1
            if step % 5 == number:  # the calls of the two take turns
                for uses, is_whole in gateway.reports(now_s):
                    leases = [book.lease(str(number), use_of(use), now_s) for use in uses]
                    answer = LeaseAnswer([(lease.slice, lease.left) for lease in leases], LEASE_S, 1)
                    gateway.answered(uses, answer, now_s, is_whole=is_whole)
            gateway.check()
        most = max(most, sum(size for _, size in running))
        rng.shuffle(running)
        for _ in range(min(len(running), rng.choice((0, 1, 2)))):
            ended, size = running.pop()
            ended.release(T, kind, size)
        book.check()
    assert refused and most > limit // 2, f"seed {seed}"
    assert most <= limit + 2 * size_max, f"seed {seed}: {most} tokens under way"


def test_limits_of_a_key_are_apart_from_its_tenants() -> None:
    book = LimitBook()
    book.begin(0.0)
    lease = book.lease("a", LimitUse(T, LimitKind.REQUESTS, 60.0, wanted=1.0), 10.0)
    of_key = book.lease("a", LimitUse(T, LimitKind.REQUESTS, 6.0, wanted=1.0, key_id="k"), 10.0)
    assert (lease.left, of_key.left, len(book)) == (60.0, 6.0, 2)

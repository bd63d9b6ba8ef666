"""Which of several conductors leads, and the journal by which standbys know what it knows: pure functions and books."""

from __future__ import annotations

import random

import pytest

from mooncache.conductor.core.leadership import (
    NO_ANSWER,
    NOT_THERE,
    PATIENCE_S,
    TERM_MAX,
    LeadershipBook,
    LeadStep,
    PeerView,
    Standing,
    decide,
    next_term,
)
from mooncache.conductor.shell.journal import PAGE_ENTRIES, WHOLE_S, Journal
from mooncache.errors import NotLeader
from mooncache.proto.v1 import conductor_pb2 as pb

ME = PeerView(Standing.SEEKING, is_self=True)
SEEKS = PeerView(Standing.SEEKING)
FOLLOWS = PeerView(Standing.STANDBY, 7)


def leads(term: int) -> PeerView:
    return PeerView(Standing.LEADER, term)


def test_whoever_stands_first_goes_first() -> None:
    assert decide([ME, SEEKS], 0, leading=False).step is LeadStep.LEAD
    assert decide([SEEKS, ME], 0, leading=False).step is LeadStep.WAIT
    assert decide([NOT_THERE, ME, SEEKS], 0, leading=False).step is LeadStep.LEAD


def test_a_leader_is_followed_and_the_newest_of_two() -> None:
    assert decide([ME, leads(5)], 0, leading=False) == (found := decide([ME, leads(5)], 0, leading=False))
    assert (found.step, found.leader, found.term) == (LeadStep.FOLLOW, 1, 5)
    assert decide([leads(4), ME, leads(9)], 0, leading=False).leader == 2


def test_who_follows_a_leader_that_does_not_answer_here_is_not_overtaken() -> None:
    assert decide([ME, NOT_THERE, FOLLOWS], 0, leading=False).step is LeadStep.WAIT


def test_who_is_silent_may_lead_for_a_while_and_who_has_ended_does_not() -> None:
    assert decide([ME, NO_ANSWER], 0, leading=False, patient=True).step is LeadStep.WAIT
    assert decide([ME, NO_ANSWER], 0, leading=False).step is LeadStep.LEAD
    assert decide([ME, NOT_THERE], 0, leading=False, patient=True).step is LeadStep.LEAD
    book = LeadershipBook(("a:1", "b:1"), takeover_s=1.0, now_s=10.0)
    assert book.is_patient(10.9)
    assert not book.is_patient(11.0)
    book.follow(1, 5, 11.0)
    assert book.is_patient(11.9)


def test_of_two_leaders_the_older_one_yields_and_only_that_one() -> None:
    mine = PeerView(Standing.LEADER, 5, is_self=True)
    assert decide([mine, leads(6)], 5, leading=True).step is LeadStep.FOLLOW
    assert decide([mine, leads(4)], 5, leading=True).step is LeadStep.LEAD
    same = [decide([mine, leads(5)], 5, leading=True), decide([leads(5), mine], 5, leading=True)]
    assert [each.step for each in same] == [LeadStep.LEAD, LeadStep.FOLLOW], (
        "equal terms: the first of the list"
    )


@pytest.mark.parametrize("seed", range(200))
def test_conductors_agree_on_one_leader(seed: int) -> None:
    """Whoever is stopped, cut off or comes back: once all answer each other, one leads and the others follow it."""
    rng = random.Random(seed)
    count = rng.randint(2, 5)
    terms, standing, up = [0] * count, [Standing.SEEKING] * count, [True] * count
    newest = [0] * count
    for round_number in range(60):
        calm = round_number >= 30
        if not calm and rng.random() < 0.3:
            at = rng.randrange(count)
            up[at] = not up[at]
        if calm:
            up = [True] * count
        at = rng.randrange(count) if not calm else round_number % count
        if not up[at]:
            continue
        views = [
            PeerView(standing[other], terms[other], other == at)
            if up[other] and (calm or other == at or rng.random() < 0.7)
            else NOT_THERE
            for other in range(count)
        ]
        leading = standing[at] is Standing.LEADER
        verdict = decide(views, terms[at] if leading else 0, leading=leading)
        newest[at] = max(newest[at], verdict.term)
        if verdict.step is LeadStep.FOLLOW:
            standing[at], terms[at] = Standing.STANDBY, views[verdict.leader].term
        elif verdict.step is LeadStep.LEAD and (not leading or newest[at] > terms[at]):
            terms[at] = next_term(newest[at], 0.0)
            newest[at] = terms[at]
            standing[at] = Standing.LEADER
        elif verdict.step is LeadStep.WAIT:
            standing[at] = Standing.SEEKING
    led = [at for at in range(count) if standing[at] is Standing.LEADER]
    assert len(led) == 1, (standing, terms)
    assert {terms[at] for at in range(count)} == {terms[led[0]]}, (standing, terms)


def test_a_leader_serves_only_while_it_may_be_the_only_one() -> None:
    book = LeadershipBook(("a:1", "b:1"), takeover_s=1.0)
    with pytest.raises(NotLeader, match="not known yet"):
        book.require(0, 0.0)
    book.lead(5, 10.0)
    book.require(0, 10.9)
    with pytest.raises(NotLeader, match="silent"):
        book.require(0, 11.1)  # stopped meanwhile: it asks the others first
    book.tick(11.2)
    book.confirm(9.9)  # what the others said before that says nothing
    with pytest.raises(NotLeader, match="silent"):
        book.require(0, 11.2)
    book.confirm(11.2)
    book.require(5, 11.3)
    with pytest.raises(NotLeader, match="term 6"):
        book.require(6, 11.3)  # the caller knows of a newer one
    with pytest.raises(NotLeader):
        book.require(0, 11.3)  # and nobody is served until that is cleared up
    book.follow(1, 6, 11.3)
    with pytest.raises(NotLeader, match="b:1 leads"):
        book.require(0, 11.3)
    book.hear(1 << 63)
    assert book.newest == TERM_MAX


class Granted:
    """A leadership from a third party, until a moment."""

    def __init__(self, term: int, until_s: float) -> None:
        self.term, self.until_s = term, until_s

    def holds(self, now_s: float) -> bool:
        return now_s < self.until_s


def test_only_the_elected_one_leads_where_a_third_party_elects() -> None:
    for views in ([ME, NOT_THERE], [ME, SEEKS], [ME, NO_ANSWER], [ME]):
        assert decide(views, 0, leading=False, granted=False).step is LeadStep.WAIT
        assert decide(views, 0, leading=False, granted=True).step is LeadStep.LEAD
    assert decide([ME, leads(9)], 0, leading=False, granted=False).step is LeadStep.FOLLOW
    assert decide([ME, leads(9)], 10, leading=False, granted=True).step is LeadStep.LEAD, "it leads no longer"


def test_an_elected_leader_serves_only_while_its_lease_lasts() -> None:
    book = LeadershipBook(("a:1",), takeover_s=1.0, elected=True)
    assert not book.alone, "two that do not know each other may exist"
    assert not book.leads_at(0.0)
    book.grant = Granted(7, until_s=10.5)
    assert book.is_granted(10.0)
    book.lead(7, 10.0)
    book.require(0, 10.4)
    assert book.leads_at(10.4)
    with pytest.raises(NotLeader, match="term 7, which is over"):
        book.require(0, 10.5)  # whether or not it has noticed yet
    assert not book.leads_at(10.5)
    book.grant = Granted(7, until_s=20.0)
    book.hear(8)
    assert not book.is_granted(10.5), "another term was heard of"
    book.grant = None
    assert not book.leads_at(10.5)


def test_a_conductor_that_knows_nothing_lets_others_be_elected_for_a_while() -> None:
    book = LeadershipBook(("a:1", "b:1"), takeover_s=1.0, now_s=0.0, elected=True)
    assert not book.may_campaign(0.0), "it has asked no other one yet"
    for others, may in (
        (NOT_THERE, True),
        (NO_ANSWER, True),
        (SEEKS, True),
        (FOLLOWS, False),
        (leads(7), True),
    ):
        book.views = (ME, others)
        assert book.may_campaign(1.0) is may
    book.views = (ME, PeerView(Standing.SEEKING, 7))  # it has followed, or led
    assert not book.may_campaign(1.0)
    assert book.may_campaign(PATIENCE_S + 1.0), "that one may be unable to be elected"
    book.follow(1, 7, 2.0)
    book.seek()
    assert book.may_campaign(2.0)
    book.retire()
    assert not book.may_campaign(2.0)


def test_a_conductor_alone_needs_to_ask_nobody() -> None:
    book = LeadershipBook(("a:1",), takeover_s=1.0)
    book.lead(5, 0.0)
    book.require(9, 1e6)


def test_who_ends_leads_no_more_whatever_it_hears() -> None:
    book = LeadershipBook(("a:1", "b:1"), takeover_s=1.0)
    book.lead(5, 0.0)
    book.retire()
    book.seek()
    book.follow(1, 6, 11.3)
    assert book.standing is Standing.UNREACHABLE, "others do not wait for it"


def report(name: str) -> pb.JournalEntry:
    return pb.JournalEntry(reported=pb.ReportInstanceRequest(instance_id=name))


def decided(name: str, keys: bytes = b"") -> pb.JournalEntry:
    return pb.JournalEntry(decided=pb.DecidedRequest(request=pb.ScheduleRequest(request_id=name, keys=keys)))


def test_a_standby_gets_each_entry_once_and_with_its_age() -> None:
    journal = Journal()
    for number in range(3):
        journal.add(report(f"i{number}"), float(number), float(number))
    page = journal.after(1, 5.0)
    assert [entry.reported.instance_id for entry in page.entries] == ["i1", "i2"]
    assert [entry.age_ms for entry in page.entries] == [4000, 3000]
    assert (page.cursor, page.anew, page.more) == (3, False, False)
    assert journal.after(3, 5.0).entries == []
    assert journal.after(-1, 5.0).anew
    assert journal.after(4, 5.0).anew, "of another life of the leader"
    journal.check()


def test_of_old_entries_only_what_why_needs_is_kept() -> None:
    journal = Journal()
    journal.add(report("i"), 0.0, 0.0)
    journal.add(decided("r", bytes(32 * 100)), 0.0, 0.0)
    before = journal.size_bytes
    journal.add(report("i"), WHOLE_S + 1.0, WHOLE_S + 1.0)
    page = journal.after(0, WHOLE_S + 1.0)
    assert [entry.WhichOneof("happened") for entry in page.entries] == ["decided", "reported"]
    assert not page.entries[0].decided.request.keys
    assert journal.size_bytes < before - 3000
    assert journal.after(2, WHOLE_S + 1.0).entries == [page.entries[1]]
    journal.check()


def test_the_journal_stays_within_its_bytes_and_a_page_within_its_own() -> None:
    journal = Journal(bytes_max=10_000)
    for number in range(5000):
        journal.add(decided(f"request-{number}"), 0.0, 0.0)
        assert journal.size_bytes <= 10_000
    journal.check()
    many = Journal()
    for number in range(PAGE_ENTRIES + 1):
        many.add(decided(f"request-{number}"), 0.0, 0.0)
    page = many.after(0, 0.0)
    assert (len(page.entries), page.more) == (PAGE_ENTRIES, True)
    rest = many.after(page.cursor, 0.0)
    assert (len(rest.entries), rest.more, rest.cursor) == (1, False, PAGE_ENTRIES + 1)

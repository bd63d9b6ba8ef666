"""Everything one conductor has: the pure scheduler, the line to the pool, watchers, and work that can wait.

Ops and duties work on this object. What a prompt's misses mean is found out, and its blocks are remembered,
after the answer has been given: `jobs` holds what is left to do, in order and bounded by count and bytes.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mooncache.client.conductor_link import conductor_targets
from mooncache.conductor.config import JOB_BYTES_MAX, JOBS_MAX, ROLE_SWITCH_S, settings_of
from mooncache.conductor.core.adoption import AdoptedDecisions, CarriedDecisions
from mooncache.conductor.core.decisions import Decision, PoolAnswer, SchedulingRequest
from mooncache.conductor.core.gateways import Gateways
from mooncache.conductor.core.hot_prefixes import HotPrefixes
from mooncache.conductor.core.leadership import LeadershipBook, next_term
from mooncache.conductor.core.limit_book import LimitBook
from mooncache.conductor.core.members import MemberBook
from mooncache.conductor.core.rebalance import RoleKeeper
from mooncache.conductor.core.records import DecisionRecord
from mooncache.conductor.core.scaling import NeedsKeeper
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.core.work import Active
from mooncache.conductor.shell.copies import Copies
from mooncache.conductor.shell.give_up_calls import GiveUpCalls
from mooncache.conductor.shell.instruments import ConductorMetrics
from mooncache.conductor.shell.journal import Journal
from mooncache.conductor.shell.pool import PoolLookup
from mooncache.conductor.shell.prefetch_calls import PrefetchCalls
from mooncache.config import Config
from mooncache.kvcache.block_index import BlockIndex, native_index
from mooncache.kvcache.keys import passport_from_json, shard_count
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.clock import Clock
from mooncache.runtime.metrics import Metrics
from mooncache.runtime.tasks import wait_for_event


@dataclass(slots=True)
class DeferredWork:
    """Work that can wait: explain the misses of a record, or remember the blocks of a computed prompt."""

    keys: bytes
    content_keys: bytes
    group: int
    record: DecisionRecord | None = None
    request: SchedulingRequest | None = None
    pool: PoolAnswer | None = None
    block_tokens: int = 0

    @property
    def size_bytes(self) -> int:
        """Memory that the job's keys may hold."""
        return len(self.keys) + len(self.content_keys)


class ConductorState:
    """The state of one conductor, shared by its ops and duties."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock,
        pool: PoolLookup,
        metrics: Metrics,
        rng: random.Random,
        copies: Copies | None = None,
        make_index: Callable[[], BlockIndex] = native_index,
    ) -> None:
        self.config = config
        self.section = config.conductor
        self.clock = clock
        self.started_s = clock.now_s()
        self.looked_s = self.started_s  # for silent instances
        self.pool = pool
        self.copies = copies
        # Versions grow over restarts too, so that a watcher of the former process is answered at once.
        first_version = max(1, int(clock.wall_s() * 1e3))
        self.core = Scheduler(settings_of(config.conductor), rng, make_index, first_version=first_version)
        self.roles = RoleKeeper(config.conductor.tbt_slo_s, ROLE_SWITCH_S)
        self.needs = NeedsKeeper(config.conductor.tbt_slo_s, config.conductor.scaler_hold_s)
        self.hot = HotPrefixes(config.conductor.replicate_bytes_per_s)
        self.instruments = ConductorMetrics(metrics)
        self.give_up_calls = GiveUpCalls(pool, self.instruments)
        self.prefetch_calls = PrefetchCalls(pool, self.instruments)
        self.run = rng.getrandbits(63) | 1
        self.watchers = 0
        self.gateways = Gateways()
        self.limits = LimitBook()
        self.members = MemberBook()
        self.pool_reason = ""  # why the master did not answer when it was asked last for its members
        targets = conductor_targets(config.cluster.conductor_target)
        section = config.conductor
        self.leadership = LeadershipBook(
            targets, section.takeover_s, clock.now_s(), elected=section.election != "peers"
        )
        self.journal = Journal()
        self.adopted = AdoptedDecisions()
        self.carried = CarriedDecisions()
        self.named_runs: set[int] = set()  # processes of gateways that named their requests in this term
        self.full_wanted: set[str] = set()  # instances whose whole cache a standby has to hear of
        self._noted = asyncio.Event()
        self._led = asyncio.Event()
        self._announced = self.core.registry.version
        self._changed = asyncio.Event()
        self._jobs: deque[DeferredWork] = deque()
        self._job_bytes = 0
        self._at_work = asyncio.Lock()
        if self.leadership.alone:
            self.begin_term()

    # --- instances
    # -----------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Wake the watchers when the instances have a new version."""
        if self.core.registry.version != self._announced:
            self._announced = self.core.registry.version
            self.wake_watchers()

    def wake_watchers(self) -> None:
        """Let those who wait for the instances look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next version, `timeout_s` at most."""
        await wait_for_event(self._changed, timeout_s)

    def give_up(self) -> None:
        """Tell the store nodes of the blocks that are known by now not to come. It waits for nothing."""
        found = self.core.take_give_ups(self.clock.now_s())
        if self.leads:  # else the leader does
            self.give_up_calls.start(found)

    def shards_of(self, model: str) -> int:
        """In how many parts the engines of a model keep a block."""
        for instance in self.core.registry.of_model(model):
            if instance.info.passport_json:
                return shard_count(passport_from_json(instance.info.passport_json))
        return 1

    # --- leadership
    # ------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this conductor leads now: asked by all that only a leader does, and by what it does on its own."""
        return self.leadership.leads_at(self.clock.now_s())

    def begin_term(self) -> None:
        """Lead from now on, in a term that is newer than all that were heard of, or the one that was granted."""
        now_s, grant = self.clock.now_s(), self.leadership.grant
        term = next_term(self.leadership.newest, self.clock.wall_s()) if grant is None else grant.term
        self.leadership.lead(term, now_s)
        self.named_runs.clear()
        self.core.registry.renew(now_s)
        self.limits.begin(now_s, knows_gateways=self.gateways.count(now_s) > 0)
        self.announce_leader()

    def announce_leader(self) -> None:
        """Wake those who wait to hear who leads, or for the instances: who leads no longer answers them so."""
        for waiting in (self._led, self._changed, self._noted):
            waiting.set()
        self._led, self._changed, self._noted = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def limits_run(self) -> int:
        """Number of this process and term: the slices that it has given."""
        return (self.run ^ self.leadership.term) or 1

    async def leader_changed(self, timeout_s: float) -> None:
        """Wait for a change of this conductor's leadership, `timeout_s` at most."""
        await wait_for_event(self._led, timeout_s)

    def note(self, entry: Callable[[], pb.JournalEntry], at_s: float | None = None) -> None:
        """Let the standbys know what happened; without any, the entry is not even made."""
        if self.leadership.alone:
            return
        now_s = self.clock.now_s()
        self.journal.add(entry(), now_s if at_s is None else at_s, now_s)
        self._noted.set()
        self._noted = asyncio.Event()

    async def noted(self, timeout_s: float) -> None:
        """Wait for the next entry of the journal, `timeout_s` at most."""
        await wait_for_event(self._noted, timeout_s)

    # --- what can wait
    # -------------------------------------------------------------------------------------------

    def explain_later(self, decision: Decision, request: SchedulingRequest) -> None:
        """Find out later why the decision's computed tokens were not there."""
        record = decision.record
        block_tokens = record.block_tokens
        if decision.decode and block_tokens:
            job = DeferredWork(
                request.keys,
                request.content_keys,
                decision.policy_request.group,
                record,
                request,
                decision.pool,
                block_tokens,
            )
            self._put(job)

    def remember_later(self, active: Active) -> None:
        """Remember later that the blocks of this prompt were computed."""
        if active.keys:
            self._put(DeferredWork(active.keys, active.content_keys, active.group))

    def _put(self, job: DeferredWork) -> None:
        if len(self._jobs) >= JOBS_MAX or self._job_bytes + job.size_bytes > JOB_BYTES_MAX:
            self.instruments.jobs_dropped.inc()
            return
        self._jobs.append(job)
        self._job_bytes += job.size_bytes

    async def work_off(self) -> None:
        """Do what is left to do, in order, in a thread beside the event loop."""
        async with self._at_work:
            while self._jobs:
                jobs = list(self._jobs)
                self._jobs.clear()
                self._job_bytes = 0
                found, explained = await asyncio.to_thread(self._do_all, jobs)
                for decision_id, packed in found:
                    self.core.snapshots.keep(decision_id, packed)
                for record in explained:
                    self.note(partial(explained_entry, record))

    def _do_all(self, jobs: list[DeferredWork]) -> tuple[list[tuple[str, bytes]], list[DecisionRecord]]:
        """Snapshots to keep, and the records whose misses are explained now.

        The caller stores them on the event loop, since decisions change the store meanwhile.
        """
        found, explained = [], []
        for job in jobs:
            if job.record is not None and job.request is not None and job.pool is not None:
                packed = self.core.pack_candidates(job.record)
                if packed:
                    found.append((job.record.decision_id, packed))
                self.core.outcomes.explain(job.record, job.request, job.pool, job.group, job.block_tokens)
                explained.append(job.record)
            else:
                self.core.seen.learn(job.keys, job.content_keys, job.group)
        return found, explained

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self.core.check()
        self.hot.check()
        self.members.check()
        self.limits.check()
        self.journal.check()
        assert self._job_bytes == sum(job.size_bytes for job in self._jobs), "bytes of waiting jobs are wrong"


def explained_entry(record: DecisionRecord) -> pb.JournalEntry:
    """What was found out about a decision, as standbys hear of it."""
    misses = [
        pb.ExplainedMiss(from_token=miss.begin, to_token=miss.end, reason=miss.reason)
        for miss in record.misses
    ]
    explained = pb.ExplainedDecision(
        decision_id=record.decision_id, candidates=record.candidates, misses=misses
    )
    return pb.JournalEntry(explained=explained)

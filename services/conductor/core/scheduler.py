"""Everything the conductor knows about serving, and the moves that touch several parts of it at once. No I/O.

`schedule` is one decision: what instances hold and how busy they are is in the book of their model, the policy
chooses, the choice is counted at once and recorded. `update` takes in what became of it and teaches the cost models.
Whatever is remembered about a request is released when it ends, fails, is superseded or is no longer heard of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mooncache.client.keys import KEY_BYTES
from mooncache.conductor.core.cache_index import CacheIndex
from mooncache.conductor.core.candidates import Candidates, PolicyView, Snapshots
from mooncache.conductor.core.decisions import (
    Arrival,
    Decision,
    PlannedRequest,
    PoolAnswer,
    SchedulerSettings,
    SchedulingRequest,
    new_decision,
    new_record,
)
from mooncache.conductor.core.fairness import FairShares
from mooncache.conductor.core.fleet_book import Assignment
from mooncache.conductor.core.give_ups import GiveUp, GiveUpReason, GiveUps
from mooncache.conductor.core.handover_node import NO_NODE, handover_node, nodes_of_makers
from mooncache.conductor.core.in_flight import InFlight, Running
from mooncache.conductor.core.models import ModelBooks, ServedModel
from mooncache.conductor.core.outcome import Learned, Outcomes
from mooncache.conductor.core.policy import crowding, find, offline
from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import NO_ROW, Awaited, Branch, Choice, Reason, Request
from mooncache.conductor.core.progress import ProgressReport
from mooncache.conductor.core.records import DecisionRecord, DecisionState, Records
from mooncache.conductor.core.registry import (
    NO_REQUEST,
    Instance,
    InstanceInfo,
    InstanceState,
    Registry,
    RequestedState,
)
from mooncache.conductor.core.seen import SeenBlocks
from mooncache.conductor.core.snapshot import copied, take
from mooncache.conductor.core.work import Active, WorkBook
from mooncache.kvcache.block_index import BlockIndex
from mooncache.kvcache.instance_load import InstanceLoad

if TYPE_CHECKING:
    import random

IDLE_PROOF_S = 2.0  # idle for so long
SHORT_PROOF_S = 5.0
LOST_AFTER_S = 10.0  # and sent so long ago
UNPACKED_MAX = 64  # records whose candidates are made later
_SECONDS_IN_FLIGHT_MAX = 600.0
_AFFINITY_WORDS = (2 ** np.arange(17) - 1) * (
    KEY_BYTES // 8
)  # where the keys of blocks 1, 2, 4, 8, ... begin


class Scheduler:
    """Schedules requests. `rng` breaks ties and names decisions; `make_index` gives empty native
    indices."""

    def __init__(
        self,
        settings: SchedulerSettings,
        rng: random.Random,
        make_index: Callable[[], BlockIndex],
        *,
        first_version: int = 1,
    ) -> None:
        self.settings = settings
        self.policy = find(settings.policy)
        self._rng = rng
        self._number = 0
        self.models = ModelBooks(settings.handover_margin_s)
        self.registry = Registry(
            suspect_after_s=settings.suspect_after_s,
            lease_s=settings.lease_s,
            count_max=settings.instance_count_max,
            report_interval_s=settings.report_interval_s,
            first_version=first_version,
            changed=self.models.changed,
        )
        self.cache = CacheIndex(make_index)
        self.in_flight = InFlight()
        self.give_ups = GiveUps()
        self.work = WorkBook()
        self.shares = FairShares()
        self.records = Records(settings.decision_count_max)
        self.snapshots = Snapshots(settings.snapshot_bytes_max)
        self._unpacked: deque[DecisionRecord] = deque()
        self.seen = SeenBlocks(make_index, settings.seen_block_count_max)
        self.outcomes = Outcomes(
            registry=self.registry,
            models=self.models,
            records=self.records,
            work=self.work,
            in_flight=self.in_flight,
            give_ups=self.give_ups,
            seen=self.seen,
        )

    # --- instances

    def register(
        self, info: InstanceInfo, state: InstanceState, now_s: float, requested: RequestedState = NO_REQUEST
    ) -> Instance:
        """Take an instance in. Raises LimitExceeded, StaleIncarnation."""
        instance, lost = self.registry.register(info, state, now_s, requested)
        if lost is not None:
            self._lose(instance, now_s)
            self.models.restarted(instance)
            # What it generated ended with the former engine.
            for active in self.work.touching(info.instance_id):
                if active.decoder == info.instance_id:
                    self.close(active.decision_id, DecisionState.LOST, now_s)
        return instance

    def report(
        self, instance: Instance, state: InstanceState, load: InstanceLoad, reason: str, now_s: float
    ) -> None:
        """Take in state and load, and learn the speed of decoding from it."""
        self.registry.report(instance, state, load, reason, now_s)
        name = instance.info.instance_id
        model = self.models.of(instance.info.model)
        surplus = max(0, load.running + load.waiting - model.book.assigned(name))
        instance.foreign, instance.surplus = min(surplus, instance.surplus), surplus
        model.reported(instance, load, now_s)
        if instance.idle_since_s is not None and now_s - instance.idle_since_s > IDLE_PROOF_S:
            self._forget_lost(instance, now_s)
        self._forget_surplus(instance, load, now_s)

    def _forget_surplus(self, instance: Instance, load: InstanceLoad, now_s: float) -> None:
        """A busy engine that has fewer requests than were sent there has ended the oldest of them.

        A gateway that died did not report the ends of its requests. Without this, an engine that others keep busy would
        look full until `request_timeout_s`. Requests of the last seconds may still be on their way and do not count.
        """
        name = instance.info.instance_id
        there = load.running + load.waiting
        if not there or self.assigned(instance) <= there:
            instance.short_since_s = None
            return
        if instance.short_since_s is None:
            instance.short_since_s = now_s
        if now_s - instance.short_since_s <= SHORT_PROOF_S:
            return
        instance.short_since_s = now_s
        sent = [
            a for a in self.work.touching(name) if a.decoder == name and a.assigned_s < now_s - LOST_AFTER_S
        ]
        surplus = sum(active.sequences for active in sent) - there
        for active in sent:  # the oldest first
            if active.sequences <= surplus:
                surplus -= active.sequences
                self.close(active.decision_id, DecisionState.LOST, now_s)

    def _forget_lost(self, instance: Instance, now_s: float) -> None:
        """An engine that has nothing to do does not work on what was sent there a while ago.

        Word of its end was lost, with a gateway perhaps. Counting it on would make the instance look busy.
        """
        name = instance.info.instance_id
        if not self.assigned(instance):
            return
        for active in self.work.touching(name):
            if active.assigned_s > now_s - LOST_AFTER_S:
                continue
            if active.decoder == name:
                self.close(active.decision_id, DecisionState.LOST, now_s)
            else:
                self.outcomes.not_computed(active, GiveUpReason.ENDED, now_s)

    def assigned(self, instance: Instance) -> int:
        """The number of requests with a leg on the instance."""
        return self.models.of(instance.info.model).book.assigned(instance.info.instance_id)

    def expire(self, now_s: float) -> tuple[list[Instance], list[str]]:
        """Forget silent instances and requests whose end was not reported; return both."""
        gone = self.registry.expire(now_s)
        for instance in gone:
            self._lose(instance, now_s)
            self.models.gone(instance)
        stale = self.work.expired(now_s - self.settings.request_timeout_s)
        for decision_id in stale:
            self.close(decision_id, DecisionState.EXPIRED, now_s)
        return gone, stale

    def _lose(self, instance: Instance, now_s: float) -> None:
        """Forget what an engine held and what was in flight on it."""
        self.cache.drop(instance.holder)
        for active in self.work.touching(instance.info.instance_id):
            if active.prefiller == instance.info.instance_id:
                self.outcomes.not_computed(active, GiveUpReason.ENDED, now_s)

    # --- decisions

    def schedule(self, request: SchedulingRequest, pool: PoolAnswer, now_s: float, wall_s: float) -> Decision:
        """Decide one request, count it and record it."""
        arrival = Arrival(request, pool, now_s, wall_s)
        # Clients choose request ids and may use one twice: only another attempt makes the first plan void.
        earlier = self.work.of_request(request.tenant, request.request_id) if request.attempt > 1 else None
        kept = "", NO_NODE
        if earlier is not None and earlier.decoder not in request.exclude:
            kept = earlier.decoder, earlier.store_node
        if earlier is not None:
            self.close(earlier.decision_id, DecisionState.SUPERSEDED, now_s)
        model = self.models.known(request.model)
        if model is None:
            text = f"No instance serves {request.model!r}."
            return self._refuse(arrival, Reason.UNKNOWN_MODEL, text)
        group, block_tokens = model.group(request.group, self.registry)
        takes = model.book.takes(request.prompt_tokens)
        all_take = takes.all()
        if not all_take and not takes.any():
            longest = model.longest()
            text = (
                f"The prompt has {request.prompt_tokens} tokens; {request.model!r} takes less than {longest}."
            )
            return self._refuse(arrival, Reason.TOO_LONG, text)
        policy_request = self.policy_request(arrival, model, group, block_tokens, kept[0])
        fleet = model.book.view(now_s)
        if not all_take:
            fleet = replace(fleet, ready=fleet.ready & takes)
        choice = offline.choose(self.policy, policy_request, fleet, self.settings.rules, self._rng)
        if not request.offline:  # no online request gives way to it
            model.offered_load.add(crowding.cost_s(choice), now_s)
        policy_request, choice, avoided = self._avoid_pair(model, policy_request, fleet, choice, now_s)
        planned = PlannedRequest(arrival, policy_request, choice, fleet, block_tokens)
        planned.store_node = self._store_node(planned, kept[1])
        decision = self._record(planned)
        if choice.admitted:
            decision.avoided = avoided
            self.set_waits(model, decision)
            self.take_on(arrival, model, decision, fleet)
            if earlier is not None and decision.prefill and (decision.decode, decision.store_node) == kept:
                self.work.take_over(earlier.decision_id, decision.decision_id)  # the gateway lets it go on
        return decision

    def _avoid_pair(
        self, model: ServedModel, policy_request: Request, fleet: Fleet, choice: Choice, now_s: float
    ) -> tuple[Request, Choice, bool]:
        """Another choice when blocks did not come from the chosen prefill to the chosen decode instance.

        The decode instance computes the prompt itself then; nothing has to come from anywhere.
        """
        if not choice.admitted or choice.prefill == NO_ROW:
            return policy_request, choice, False
        if not model.handover_stats.avoids(fleet.names[choice.prefill], fleet.names[choice.decode], now_s):
            return policy_request, choice, False
        alone = replace(policy_request, no_prefill=True)
        found = offline.choose(self.policy, alone, fleet, self.settings.rules, self._rng)
        return (alone, found, True) if found.admitted else (policy_request, choice, False)

    def _store_node(self, planned: PlannedRequest, kept: str) -> str:
        """The store node through which the legs hand over, or at which the one leg waits for another request.

        kept: the node of the former plan, whose decode leg goes on.
        """
        choice, request, fleet = planned.choice, planned.policy_request, planned.fleet
        if not choice.admitted or fleet is None:
            return NO_NODE
        if choice.prefill == NO_ROW:
            running = self.in_flight.get(choice.awaited.decision_id) if choice.awaited is not None else None
            return running.store_node if running is not None else NO_NODE
        instance = self.registry.get(fleet.names[choice.decode])
        nodes = planned.arrival.pool.nodes
        if instance is None or instance.info.host_id not in nodes:
            return NO_NODE
        others = nodes_of_makers(request.awaited, self.in_flight, planned.pool_tokens, planned.block_tokens)
        keys = planned.arrival.request.keys
        return handover_node(nodes, instance.info.host_id, keys, kept=kept, others=others)

    def set_waits(self, model: ServedModel, decision: Decision) -> None:
        """How long legs wait for blocks."""
        instance = self.registry.get(decision.prefiller)
        if instance is None:
            return
        choice = decision.choice
        decision.handover_s = model.handover_stats.margin_s
        if decision.prefill:
            decision.wait_s = model.wait_s(instance.info, choice.total_s)
            decision.expected_wait_s = choice.total_s * model.waited.value
        if choice.branch == Branch.WAIT:
            decision.ready_wait_s = model.wait_s(instance.info, choice.ready_s)

    def policy_request(
        self, arrival: Arrival, model: ServedModel, group: int, block_tokens: int, kept: str
    ) -> Request:
        """The request as policies see it. kept: the instance that has the decode leg already, "" without one."""
        request, now_s = arrival.request, arrival.now_s
        blocks = len(request.keys) // KEY_BYTES
        cacheable = min(blocks * block_tokens, request.prompt_tokens)
        pool_tokens = min(arrival.pool.blocks * block_tokens, cacheable)
        local = np.zeros(len(model.book), dtype=np.int64)
        if request.keys:
            held, known = self.cache.leading(request.keys), model.row_of_holder
            try:
                rows = [known[holder] for holder in held]
            except KeyError:  # an instance of another model
                held = {holder: held[holder] for holder in held if holder in known}
                rows = [known[holder] for holder in held]
            tokens = np.fromiter(held.values(), np.int64, len(held)) * block_tokens
            local[rows] = np.minimum(tokens, cacheable, out=tokens)
        settings = self.settings
        self._number += 1
        return Request(
            prompt_tokens=request.prompt_tokens,
            local=local,
            cacheable_tokens=cacheable,
            sources=model.sources(arrival.pool, local, block_tokens, pool_tokens, now_s),
            group=group,
            awaited=self._awaited(request, model, block_tokens, cacheable, now_s),
            sequences=request.sequences,
            output_tokens=model.lengths.mean(request.lengths_class, request.max_output_tokens),
            ttft_slo_s=request.ttft_slo_s or settings.ttft_slo_s,
            tbt_slo_s=request.tbt_slo_s or settings.tbt_slo_s,
            ttft_strict=request.ttft_slo_s > 0,
            tbt_strict=request.tbt_slo_s > 0,
            no_prefill=request.no_prefill or not cacheable,
            exclude=frozenset(row for name in request.exclude if (row := model.book.row(name)) != NO_ROW),
            keep_decode=model.book.row(kept),
            priority=request.priority,
            offline=request.offline,
            tenant_share=self.shares.share(request.tenant, now_s),
            lateness=model.lateness.value,
            demand=model.offered_load.lately(now_s),
            number=self._number,
            affinity=affinity(request.keys),
        )

    def _awaited(
        self, request: SchedulingRequest, model: ServedModel, block_tokens: int, cacheable: int, now_s: float
    ) -> tuple[Awaited, ...]:
        """Leading tokens of the prompt that other requests are computing."""
        return tuple(
            Awaited(
                min(overlap.blocks * block_tokens, cacheable),
                # The best guess for an overdue prefill: it will take as long again as it is late.
                abs(overlap.running.end_s - now_s),
                model.book.row(overlap.running.instance_id),
                overlap.running.decision_id,
                overlap.running.pool,
            )
            for overlap in self.in_flight.overlaps(request.keys)
            # Where a leg of this request has just failed, the others may fail too.
            if overlap.running.instance_id not in request.exclude
            and self._working(overlap.running.instance_id)
        )

    def _working(self, instance_id: str) -> bool:
        instance = self.registry.get(instance_id)
        return instance is not None and instance.state in (InstanceState.READY, InstanceState.DRAINING)

    def _record(self, planned: PlannedRequest) -> Decision:
        """The decision, with its record among the others."""
        request, choice = planned.arrival.request, planned.choice
        decision_id = f"d-{self._rng.getrandbits(64):016x}"
        earlier = self.records.earlier(request.request_id) if request.attempt > 1 else []
        record = new_record(planned, decision_id, earlier)
        if request.offline and not choice.admitted:
            return new_decision(planned, record)  # it is asked again soon, and would push others out
        if planned.fleet is not None:
            record.policy_view = PolicyView(
                copied(planned.fleet, choice.total_s), planned.policy_request, choice
            )
            self._unpacked.append(record)
            if len(self._unpacked) > UNPACKED_MAX:
                self.keep_candidates(self._unpacked.popleft())
        self.records.add(record)
        return new_decision(planned, record)

    def keep_candidates(self, record: DecisionRecord) -> None:
        """Make of what the policy saw the record's candidates, which are small; done after the answer."""
        packed = self.pack_candidates(record)
        if packed:
            self.snapshots.keep(record.decision_id, packed)

    def pack_candidates(self, record: DecisionRecord) -> bytes:
        """Make the record's candidates; return its whole snapshot packed, to be kept, b"" without one.

        Touches the record only.
        """
        view, record.policy_view = record.policy_view, None
        kept = Candidates.of(*view) if view is not None else None
        if view is None or kept is None:
            return b""
        record.candidates = kept.packed()
        return b"" if kept.whole else Snapshots.packed(take(view.fleet, view.request, view.choice.total_s))

    def _refuse(self, arrival: Arrival, reason: Reason, message: str) -> Decision:
        """Refuse a request that no policy needs to see."""
        policy_request = Request(
            prompt_tokens=arrival.request.prompt_tokens,
            local=np.zeros(0, dtype=np.int64),
            sequences=arrival.request.sequences,
        )
        decision = self._record(PlannedRequest(arrival, policy_request, Choice(False, reason)))
        decision.record.message = message
        return decision

    def take_on(self, arrival: Arrival, model: ServedModel, decision: Decision, fleet: Fleet) -> None:
        """Count an admitted request as work of its instances."""
        request, now_s = arrival.request, arrival.now_s
        choice, policy_request = decision.choice, decision.policy_request
        block_tokens = max(1, decision.record.block_tokens)
        survival = model.lengths.survival(request.lengths_class, request.max_output_tokens)
        model.book.assign(Assignment(decision.decision_id, choice, policy_request, survival), now_s)
        if not request.offline:
            self.shares.use(request.tenant, float(decision.computed_tokens), now_s)
        self.work.assign(
            Active(
                decision_id=decision.decision_id,
                request_id=request.request_id,
                tenant=request.tenant,
                model=request.model,
                prefiller=decision.prefiller,
                decoder=decision.decode,
                prompt_tokens=request.prompt_tokens,
                prefix_tokens=choice.prefix_tokens,
                sequences=policy_request.sequences,
                assigned_s=now_s,
                expected_ttft_s=choice.ttft_s,
                keys=request.keys,
                content_keys=request.content_keys,
                group=policy_request.group,
                lengths_class=request.lengths_class,
                waiting_s=choice.waiting_s,
                promised_ttft_s=policy_request.ttft_slo_s,
                awaited_tokens=policy_request.cacheable_tokens if decision.prefill else 0,
                wait_s=decision.wait_s,
                expected_wait_s=choice.total_s if decision.prefill else 0.0,
                handover_priced_s=model.handover_stats.without_beside_s(choice) if decision.prefill else 0.0,
                store_node=decision.store_node,
                nodes=arrival.pool.nodes,
                block_tokens=block_tokens,
                awaits=choice.awaited.decision_id if choice.awaited is not None else "",
                computing=decision.computing(block_tokens),
                decoding=decision.decoding(block_tokens, int(policy_request.local[choice.decode])),
                gateway_run=request.gateway_run,
            )
        )
        if choice.prefix_tokens < policy_request.cacheable_tokens:
            self.in_flight.add(
                Running(
                    decision.decision_id,
                    decision.prefiller,
                    request.keys,
                    end_s=now_s + min(choice.total_s, _SECONDS_IN_FLIGHT_MAX),
                    pool=bool(fleet.pool[choice.prefiller_row]),
                    begin=choice.prefix_tokens // block_tokens,
                    store_node=decision.store_node if decision.prefill else NO_NODE,
                    pool_tenant=request.pool_tenant,
                )
            )

    # --- what became of it

    def report_progress(self, decision_id: str, progress: ProgressReport, now_s: float) -> Learned:
        """Take in what happened. Raises DecisionUnknown for decisions that are not kept."""
        return self.outcomes.take_in(decision_id, progress, now_s)

    def close(self, decision_id: str, state: DecisionState, now_s: float) -> None:
        """End a decision: nothing of it is counted or awaited from now on."""
        self.outcomes.close(decision_id, state, now_s)

    def take_give_ups(self, now_s: float) -> list[GiveUp]:
        """Blocks that will not come and that are due to be given up; each once, noted in the record of its request."""
        found = self.give_ups.take(now_s, self.in_flight)
        for each in found:
            record = self.records.find(each.decision_id)
            if record is not None:
                known = record.observed.setdefault("given_up", [])
                known.append({"from_block": each.begin, "to_block": each.end, "reason": str(each.reason)})
        return found

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self.registry.check()
        self.in_flight.check()
        self.give_ups.check()
        self.work.check()
        self.records.check()
        self.models.check()


def affinity(keys: bytes) -> tuple[int, ...]:
    """Numbers that name the prefix after 1, 2, 4, 8, ... blocks and as a whole."""
    words = np.frombuffer(keys or bytes(KEY_BYTES), dtype="<u8")
    return tuple(words[_AFFINITY_WORDS[: (len(keys) // KEY_BYTES).bit_length()]].tolist())

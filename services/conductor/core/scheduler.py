"""Everything the conductor knows about serving, and the moves that touch several parts of it at once. No I/O.

`schedule` is one decision: what instances hold and how busy they are becomes facts, the policy chooses, the
choice is counted at once and recorded. `update` takes in what became of it and teaches the cost models.
Whatever is remembered about a request is released when it ends, fails, is superseded or is not heard of any
more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mooncache.conductor.core import learning, outcome
from mooncache.conductor.core.asks import Ask, Decision, PoolAnswer, Settings, new_record
from mooncache.conductor.core.cache_index import KEY_BYTES, BlockIndex, CacheIndex
from mooncache.conductor.core.in_flight import InFlight, Running
from mooncache.conductor.core.learning import DecodeLearner, Follower, PrefillLearner, TransferLearner
from mooncache.conductor.core.policy import plan
from mooncache.conductor.core.policy.facts import Awaited, Choice, InstanceFacts, PrefillCost, Request
from mooncache.conductor.core.records import REFUSED, Record, Records
from mooncache.conductor.core.registry import DRAINING, READY, Instance, InstanceInfo, Load, Registry
from mooncache.conductor.core.seen import SeenBlocks
from mooncache.conductor.core.work import Active, WorkBook

if TYPE_CHECKING:
    import random

OUTPUT_TOKENS_PRIOR = 128.0
TURNOVER_PRIOR_S = 10.0
MODELS_MAX = 1024  # cost models that are kept
IDLE_PROOF_S = 2.0  # idle for so long
SHORT_PROOF_S = 5.0
LOST_AFTER_S = 10.0  # and sent so long ago
_SECONDS_IN_FLIGHT_MAX = 600.0


class Scheduler:
    """See the module's text. `rng` breaks ties and names decisions; `make_index` gives empty native
    indices."""

    def __init__(
        self,
        settings: Settings,
        rng: random.Random,
        make_index: Callable[[], BlockIndex],
        *,
        first_version: int = 1,
    ) -> None:
        self.settings = settings
        self._rng = rng
        self.registry = Registry(
            suspect_after_s=settings.suspect_after_s,
            lease_s=settings.lease_s,
            count_max=settings.instance_count_max,
            first_version=first_version,
        )
        self.cache = CacheIndex(make_index)
        self.in_flight = InFlight()
        self.work = WorkBook()
        self.records = Records(settings.decision_count_max)
        self.seen = SeenBlocks(make_index, settings.seen_block_count_max)
        self.prefill_models: dict[tuple[str, str], PrefillLearner] = {}
        self.transfers: dict[str, TransferLearner] = {}
        self.decodes: dict[str, DecodeLearner] = {}
        self.output_tokens: dict[str, Follower] = {}
        self.turnovers: dict[str, Follower] = {}

    # --- instances
    # ---------------------------------------------------------------------------------------------

    def register(self, info: InstanceInfo, state: str, now_s: float) -> Instance:
        """Take an instance in. Raises LimitExceeded."""
        instance, lost = self.registry.register(info, state, now_s)
        if lost is not None:
            self._lose(instance, now_s, "the engine was started again")
            self.decodes.pop(info.instance_id, None)
        return instance

    def report(self, instance: Instance, state: str, load: Load, reason: str, now_s: float) -> None:
        """Take in state and load, and learn the speed of decoding from it."""
        self.registry.report(instance, state, load, reason, now_s)
        name = instance.info.instance_id
        surplus = max(0, load.running + load.waiting - self.work.assigned(name))
        instance.foreign, instance.surplus = min(surplus, instance.surplus), surplus
        if load.tbt_ms > 0 and load.running > 0:
            learner = self.decodes.setdefault(name, DecodeLearner())
            kv_tokens = load.kv_usage * instance.info.kv_capacity_tokens
            learner.observe(load.running, kv_tokens, load.tbt_ms / 1e3)
        if instance.idle_since_s is not None and now_s - instance.idle_since_s > IDLE_PROOF_S:
            self._forget_lost(instance, now_s)
        self._forget_surplus(instance, load, now_s)

    def _forget_surplus(self, instance: Instance, load: Load, now_s: float) -> None:
        """A busy engine that has fewer requests than were sent there has ended the oldest of them.

        A gateway that died told of none of its ends; without this an engine that others keep busy would look full
        until `request_timeout_s`. Requests of the last seconds may be on their way and do not count.
        """
        name = instance.info.instance_id
        there = load.running + load.waiting
        if not there or self.work.assigned(name) <= there:
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
                self.close(active.decision_id, "lost", now_s)

    def _forget_lost(self, instance: Instance, now_s: float) -> None:
        """An engine that has nothing to do does not work on what was sent there a while ago.

        Word of its end was lost, with a gateway perhaps. Counting it on would make the instance look busy.
        """
        name = instance.info.instance_id
        if not self.work.assigned(name):
            return
        for active in self.work.touching(name):
            if active.assigned_s > now_s - LOST_AFTER_S:
                continue
            if active.decoder == name:
                self.close(active.decision_id, "lost", now_s)
            else:
                self.in_flight.end(active.decision_id)
                self.work.computed(active.decision_id, now_s)

    def expire(self, now_s: float) -> tuple[list[Instance], list[str]]:
        """Forget silent instances and requests of which nobody reported the end; return both."""
        gone = self.registry.expire(now_s)
        for instance in gone:
            self._lose(instance, now_s, "the instance is gone")
            self.decodes.pop(instance.info.instance_id, None)
            self.transfers.pop(instance.info.instance_id, None)
        stale = self.work.expired(now_s - self.settings.request_timeout_s)
        for decision_id in stale:
            self.close(decision_id, "expired", now_s)
        return gone, stale

    def _lose(self, instance: Instance, now_s: float, _why: str) -> None:
        """Forget what an engine held and what was in flight on it."""
        self.cache.drop(instance.holder)
        for active in self.work.touching(instance.info.instance_id):
            if active.computer == instance.info.instance_id:
                self.in_flight.end(active.decision_id)
                self.work.computed(active.decision_id, now_s)

    # --- decisions
    # -----------------------------------------------------------------------------------------------

    def schedule(self, ask: Ask, pool: PoolAnswer, now_s: float, wall_s: float) -> Decision:
        """Decide one request, count it and record it."""
        model = self.registry.of_model(ask.model)
        # Clients choose request ids and may use one twice: only another attempt makes the first plan void.
        earlier = self.work.of_request(ask.tenant, ask.request_id) if ask.attempt > 1 else None
        kept = ""
        if earlier is not None:
            kept = earlier.decoder if earlier.decoder not in ask.exclude else ""
            self.close(earlier.decision_id, "superseded", now_s)
        if not model:
            return self._refuse(
                ask, pool, "unknown_model", f"No instance serves {ask.model!r}.", now_s, wall_s
            )
        group, block_tokens = self._group(ask, model)
        request = self._request(ask, pool, group, block_tokens, kept, now_s)
        fitting = [i for i in model if self._fits(i, ask)]
        if not fitting:
            longest = max(i.info.max_model_tokens for i in model)
            text = f"The prompt has {ask.prompt_tokens} tokens; {ask.model!r} takes less than {longest}."
            return self._refuse(ask, pool, "too_long", text, now_s, wall_s)
        leading = self.cache.leading(ask.keys) if ask.keys else {}
        facts = self._facts(fitting, leading, block_tokens, now_s)
        choice = plan.choose(request, facts, self.settings.rules, self._rng)
        decision = self._decided(ask, pool, request, choice, block_tokens, now_s, wall_s)
        if choice.admitted:
            self._count(ask, request, choice, decision, now_s)
        return decision

    def _group(self, ask: Ask, model: list[Instance]) -> tuple[int, int]:
        """Return the passport group of the request's keys and the tokens of a block in it."""
        counts: dict[int, int] = {}
        for instance in model:
            counts[instance.info.group] = counts.get(instance.info.group, 0) + (2 if instance.ready else 1)
        group = ask.group or max(counts, key=lambda name: (counts[name], name))
        blocks = [i.info.block_tokens for i in model if i.info.group == group and i.info.block_tokens]
        return group, blocks[0] if blocks else 16

    def _request(
        self, ask: Ask, pool: PoolAnswer, group: int, block_tokens: int, kept: str, now_s: float
    ) -> Request:
        blocks = len(ask.keys) // KEY_BYTES
        cacheable = min(blocks * block_tokens, ask.prompt_tokens)
        expected = self.output_tokens.get(ask.model)
        output = expected.value if expected is not None else OUTPUT_TOKENS_PRIOR
        if ask.max_output_tokens:
            output = min(output, ask.max_output_tokens)
        awaited = tuple(
            Awaited(
                min(overlap.blocks * block_tokens, cacheable),
                # What is overdue takes as long again as it is late, as far as anybody knows.
                abs(overlap.running.end_s - now_s),
                overlap.running.instance_id,
                overlap.running.decision_id,
                overlap.running.pool,
            )
            for overlap in self.in_flight.overlaps(ask.keys)
            if self._working(overlap.running.instance_id)
        )
        settings = self.settings
        return Request(
            prompt_tokens=ask.prompt_tokens,
            cacheable_tokens=cacheable,
            pool_tokens=min(pool.blocks * block_tokens, cacheable),
            group=group,
            awaited=awaited,
            sequences=ask.sequences,
            output_tokens=max(1, int(output)),
            ttft_slo_s=ask.ttft_slo_s or settings.ttft_slo_s,
            tbt_slo_s=ask.tbt_slo_s or settings.tbt_slo_s,
            ttft_strict=ask.ttft_slo_s > 0,
            tbt_strict=ask.tbt_slo_s > 0,
            no_prefill=ask.no_prefill or not cacheable,
            exclude=ask.exclude,
            keep_decode=kept,
            priority=ask.priority,
        )

    def _working(self, instance_id: str) -> bool:
        instance = self.registry.get(instance_id)
        return instance is not None and instance.state in (READY, DRAINING)

    @staticmethod
    def _fits(instance: Instance, ask: Ask) -> bool:
        limit = instance.info.max_model_tokens
        return not limit or ask.prompt_tokens < limit

    def _facts(
        self, instances: list[Instance], leading: dict[int, int], block_tokens: int, now_s: float
    ) -> list[InstanceFacts]:
        """Return what a decision sees of the instances of one model.

        Assignments count at once; reports fill in what others sent.
        """
        shared_transfer = self.transfers.get("", _NO_TRANSFERS)
        turnover = self.turnovers.get(instances[0].info.model)
        turnover_s = turnover.value if turnover is not None else TURNOVER_PRIOR_S
        prefills: dict[str, PrefillCost] = {}
        found = []
        for instance in instances:
            info, load, name = instance.info, instance.load, instance.info.instance_id
            cost = prefills.get(info.engine)
            if cost is None:
                cost = prefills[info.engine] = self.prefill_model(info).cost
            pending, queue_s, sequences, kv_tokens = self.work.load(name, now_s)
            foreign = instance.foreign
            if (
                foreign and load.waiting
            ):  # work that others sent: like what was sent from here, or short prompts
                each_s = queue_s / pending if pending else cost.seconds(512, 0)
                queue_s += min(foreign, load.waiting) * each_s
            reported_kv = load.kv_usage * info.kv_capacity_tokens
            decode = self.decodes.get(name)
            found.append(
                InstanceFacts(
                    name,
                    instance.role,
                    instance.state == READY,
                    cost,
                    self.transfers.get(name, shared_transfer).cost(info.kv_bytes_per_token),
                    decode.cost if decode is not None else learning.DECODE_PRIOR,
                    info.group,
                    info.pool,
                    leading.get(instance.holder, 0) * block_tokens,
                    queue_s,
                    sequences + foreign,
                    info.max_sequences,
                    kv_tokens if kv_tokens > reported_kv else reported_kv,
                    info.kv_capacity_tokens,
                    turnover_s,
                )
            )
        return found

    def prefill_model(self, info: InstanceInfo) -> PrefillLearner:
        """Return the prefill model of an instance's model and engine."""
        name = (info.model, info.engine)
        found = self.prefill_models.get(name)
        if found is None:
            if len(self.prefill_models) >= MODELS_MAX:
                self.prefill_models.pop(next(iter(self.prefill_models)))
            found = self.prefill_models[name] = PrefillLearner.starting(info.engine)
        return found

    def _decided(
        self,
        ask: Ask,
        pool: PoolAnswer,
        request: Request,
        choice: Choice,
        block_tokens: int,
        now_s: float,
        wall_s: float,
    ) -> Decision:
        decision_id = f"d-{self._rng.getrandbits(64):016x}"
        earlier = self.records.earlier(ask.request_id) if ask.attempt > 1 else []
        record = new_record(ask, pool, request, choice, decision_id, earlier, block_tokens, now_s, wall_s)
        self.records.add(record)
        return Decision(decision_id, choice, request, record, pool)

    def _refuse(
        self, ask: Ask, pool: PoolAnswer, reason: str, message: str, now_s: float, wall_s: float
    ) -> Decision:
        choice = Choice(False, reason)
        request = Request(prompt_tokens=ask.prompt_tokens, sequences=ask.sequences)
        decision = self._decided(ask, pool, request, choice, 0, now_s, wall_s)
        decision.record.state = REFUSED
        decision.record.message = message
        return decision

    def _count(self, ask: Ask, request: Request, choice: Choice, decision: Decision, now_s: float) -> None:
        branch, option = choice.branch, choice.prefill or choice.inline
        assert branch is not None
        assert option is not None
        assert choice.decode is not None
        computer = option.facts
        kv_tokens = ask.prompt_tokens + request.sequences * request.output_tokens
        self.work.assign(
            Active(
                decision_id=decision.decision_id,
                request_id=ask.request_id,
                tenant=ask.tenant,
                model=ask.model,
                computer=computer.instance_id,
                decoder=choice.decode.facts.instance_id,
                prompt_tokens=ask.prompt_tokens,
                prefix_tokens=branch.prefix_tokens,
                compute_s=branch.compute_s,
                sequences=request.sequences,
                kv_tokens=kv_tokens,
                assigned_s=now_s,
                expected_ttft_s=choice.ttft_s,
                keys=ask.keys,
                content_keys=ask.content_keys,
                group=request.group,
            )
        )
        if branch.prefix_tokens < request.cacheable_tokens:
            end_s = now_s + min(branch.total_s, _SECONDS_IN_FLIGHT_MAX)
            self.in_flight.add(
                Running(decision.decision_id, computer.instance_id, ask.keys, end_s, computer.pool)
            )

    # --- what became of it
    # ---------------------------------------------------------------------------------------

    def update(
        self,
        decision_id: str,
        phase: str,
        elapsed_s: float,
        output_tokens: int,
        detail: dict[str, Any],
        now_s: float,
    ) -> outcome.Learned:
        """Take in what happened. Raises DecisionUnknown for decisions that are not kept."""
        return outcome.take_in(self, decision_id, phase, elapsed_s, output_tokens, detail, now_s)

    def close(self, decision_id: str, state: str, now_s: float) -> Active | None:
        """End a decision: nothing of it is counted or awaited any more."""
        self.in_flight.end(decision_id)
        active = self.work.end(decision_id, now_s)
        record = self.records.find(decision_id)
        if active is not None and record is not None:
            record.state = state
        return active

    def explain(self, record: Record, ask: Ask, pool: PoolAnswer, group: int, block_tokens: int) -> None:
        """Note in the record why its computed tokens were not there. Touches `seen` and the record only."""
        outcome.explain(self.seen, record, ask, pool, group, block_tokens)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self.registry.check()
        self.in_flight.check()
        self.work.check()
        self.records.check()


_NO_TRANSFERS = TransferLearner()

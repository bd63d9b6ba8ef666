"""What became of a decision: phases into the record, observations into the cost models, misses into reasons.

Gateways report it (core/progress.py); docs/reference-decision.md shows what a record keeps of their reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from mooncache import errors
from mooncache.client.keys import KEY_BYTES
from mooncache.conductor.core.decisions import PoolAnswer, PoolState, SchedulingRequest
from mooncache.conductor.core.differences import Difference, PlannedCache, differences
from mooncache.conductor.core.give_ups import AGAIN_S, GiveUpReason, GiveUps
from mooncache.conductor.core.handover_stats import did_arrive
from mooncache.conductor.core.holder_rates import holder_of
from mooncache.conductor.core.in_flight import InFlight
from mooncache.conductor.core.learning import LoadSource, load_source
from mooncache.conductor.core.models import ModelBooks
from mooncache.conductor.core.progress import LegReport, Phase, ProgressReport
from mooncache.conductor.core.records import DecisionRecord, DecisionState, Records
from mooncache.conductor.core.registry import Registry
from mooncache.conductor.core.seen import MissRange, MissReason, SeenBlocks, miss_reason
from mooncache.conductor.core.work import Active, Stage, WorkBook
from mooncache.kvcache.leg_hint import CacheOutcome, CacheReport, LegRole

# A prefill that is measured takes at least so long, and so much of what was seen.
_LEAST_S, _LEAST_SHARE = 5e-4, 0.1
_HIDDEN_MOST = 0.95  # of a load
_ENDS = {
    Phase.FINISHED: DecisionState.FINISHED,
    Phase.FAILED: DecisionState.FAILED,
    Phase.ABORTED: DecisionState.ABORTED,
}


class HandoverResult(StrEnum):
    """Whether the blocks of a prefill leg reached the decode leg."""

    LANDED = "landed"
    MISSED = "missed"


@dataclass(slots=True)
class Learned:
    """What an update meant, for counters and for remembering blocks."""

    known: bool = True
    ended: bool = False
    ttft_error: float = 0.0  # observed over expected TTFT, 0 when not known
    local_tokens: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    learn: Active | None = None  # the request whose prompt is computed now
    handover: HandoverResult | None = None  # LANDED or MISSED when that is known now
    legs_compared: int = 0  # legs of which it is known now whether they went as planned
    differences: list[Difference] = field(default_factory=list)  # and what did not


class Outcomes:
    """What decisions came to. The books are the scheduler's own; this is who closes entries in them."""

    def __init__(
        self,
        *,
        registry: Registry,
        models: ModelBooks,
        records: Records,
        work: WorkBook,
        in_flight: InFlight,
        give_ups: GiveUps,
        seen: SeenBlocks,
    ) -> None:
        self.registry, self.models, self.records = registry, models, records
        self.work, self.in_flight, self.give_ups, self.seen = work, in_flight, give_ups, seen

    def take_in(self, decision_id: str, progress: ProgressReport, now_s: float) -> Learned:
        """Take in what happened, as of `now_s`; a repeat changes nothing.

        Raises DecisionUnknown for decisions that are not kept.
        """
        active = self.work.get(decision_id)
        record = self.records.find(decision_id)
        if record is None or record.decision_id != decision_id:
            if active is None:
                raise errors.DecisionUnknown(f"decision {decision_id[:64]!r} is not kept; it may be too old")
            # Records are for people and may be dropped while the request runs; what it weighs must still be released.
            record = unkept(active)
        if progress.sequence:
            if progress.sequence <= record.report_sequence:
                return Learned(known=False)
            record.report_sequence = progress.sequence
        now_s = max(now_s, record.made_s)
        record.note({**progress.to_json(), "since_decision_ms": round((now_s - record.made_s) * 1e3, 3)})
        if active is None:
            return Learned(known=False)
        phase = progress.phase
        learned = Learned()
        if phase in (Phase.PREFILLED, Phase.FIRST_TOKEN):
            self._computed(active, record, progress, now_s, learned)
        if phase is Phase.PREFILL_FAILED:
            due_s = now_s + AGAIN_S if progress.prefill_may_follow else now_s
            self.not_computed(active, GiveUpReason.FAILED, now_s, due_s)
        if phase is Phase.FIRST_TOKEN:
            self._first_token(active, record, progress, now_s, learned)
        end = _ENDS.get(phase)
        if end is not None:
            active.decode_cache = active.decode_cache or progress.decode_cache
            if active.decode_cache is not None:
                self._decode_reported(active, record, active.decode_cache, learned, now_s)
            if phase is Phase.FINISHED:
                self._finished(active, record, progress, now_s)
            if active.handover:
                record.observed["handover"] = active.handover
            self.close(decision_id, end, now_s)
            learned.ended = True
        return learned

    def leg_ended(
        self, decision_id: str, instance_id: str, cache: CacheReport, now_s: float
    ) -> Learned | None:
        """Take in what the engine itself said of a decode leg that has ended; None when that says nothing new.

        It comes before or after the gateway's word of the request's end, and is used when both are known.
        """
        active = self.work.reported(decision_id, instance_id, cache)
        if active is None:
            return None
        record = self.records.find(active.decision_id)
        if record is None or record.decision_id != active.decision_id:
            record = unkept(active)
        record.decode_cache = active.decoder, cache
        learned = Learned()
        if self.work.get(active.decision_id) is None:
            self._decode_reported(active, record, cache, learned, now_s)
            if active.handover:
                record.observed["handover"] = active.handover
        return learned

    def _decode_reported(
        self, active: Active, record: DecisionRecord, cache: CacheReport, learned: Learned, now_s: float
    ) -> None:
        """The request has ended, and it is known what the cache did for its decode leg."""
        if active.prefiller == active.decoder and active.compute_seen_s:
            self._prefill_reported(active, record, None, cache, learned, now_s)
            return
        self._loads(active, active.decoder, cache, now_s, handover=True)
        if cache.waited_ms and active.expected_wait_s and cache.outcome is not CacheOutcome.TIMEOUT:
            self.models.of(active.model).waited.observe(cache.waited_ms / 1e3 / active.expected_wait_s)
        self._handed_over(active, cache, learned, now_s)
        _compare(LegRole.DECODE, active.decoding, cache, record, learned)

    def computed(self, active: Active, now_s: float) -> float | None:
        """The prompt is computed; return when its instance could have begun with it, None if known before."""
        return self.models.of(active.model).book.computed(active.decision_id, now_s)

    def not_computed(
        self, active: Active, reason: GiveUpReason, now_s: float, due_s: float | None = None
    ) -> None:
        """The prompt will not be computed by this plan: the waits for its blocks are to end, at `due_s`."""
        self._not_made(active.decision_id, reason, now_s if due_s is None else due_s)
        self.computed(active, now_s)

    def _not_made(self, decision_id: str, reason: GiveUpReason, due_s: float) -> None:
        running = self.in_flight.end(decision_id)
        if running is not None:
            self.give_ups.add(running, running.begin, running.blocks, reason, due_s)

    def close(self, decision_id: str, state: DecisionState, now_s: float) -> Active | None:
        """End a decision: nothing of it is counted or awaited from now on."""
        # Of a request that has ended well only word of its prefill's end was lost.
        if state is not DecisionState.FINISHED and self.work.awaited(decision_id):
            self._not_made(decision_id, GiveUpReason.ENDED, now_s)
        self.in_flight.end(decision_id)
        self.give_ups.ended(decision_id, now_s)
        active = self.work.end(decision_id)
        record = self.records.find(decision_id)
        if active is not None:
            self.models.of(active.model).book.ended(decision_id, now_s)
            if record is not None:
                record.state = state
        return active

    def _first_token(
        self,
        active: Active,
        record: DecisionRecord,
        progress: ProgressReport,
        now_s: float,
        learned: Learned,
    ) -> None:
        model = self.models.of(active.model)
        # Of an answer that is not streamed the gateway sees the first token together with the last.
        model.book.first_token(active.decision_id, now_s)
        if progress.answer_is_whole:
            record.observed["streamed"] = False
            return
        if active.first_token_s:
            return
        active.first_token_s = now_s
        self._first_token_after(active, learned, now_s)
        if active.prefilled_s:
            record.observed["handover_ms"] = round((now_s - active.prefilled_s) * 1e3, 3)
        observed_s = progress.elapsed_s or now_s - active.assigned_s
        record.observed["ttft_ms"] = round(observed_s * 1e3, 3)
        if active.expected_ttft_s > 0:
            learned.ttft_error = observed_s / active.expected_ttft_s
            late_s = observed_s - active.expected_ttft_s
            model.lateness.observe(active.expected_ttft_s, active.waiting_s, late_s, active.promised_ttft_s)

    def _leg_ended(self, active: Active, now_s: float) -> None:
        instance = self.registry.get(active.prefiller)
        if active.prefilled_s or instance is None:
            return
        active.prefilled_s = now_s
        self.models.of(active.model).prefilled(instance.info)

    def _first_token_after(self, active: Active, learned: Learned, now_s: float) -> None:
        """A first token after the decode leg's wait timed out: that is known before the answer has ended."""
        if not active.prefilled_s or not active.awaited_tokens:
            return
        if now_s - active.assigned_s < active.wait_s:
            lag_s = now_s - active.prefilled_s
            self.models.of(active.model).observed_handover(lag_s, active.handover_priced_s, self.registry)
        elif now_s - active.prefilled_s > self.models.of(active.model).handover_stats.margin_s:
            self._judge(active, HandoverResult.MISSED, learned, now_s)

    def _handed_over(self, active: Active, cache: CacheReport, learned: Learned, now_s: float) -> None:
        """The decode leg reports what it found of the blocks that the prefill leg had computed."""
        if active.handover or not active.prefilled_s or not active.awaited_tokens:
            return
        if cache.outcome is CacheOutcome.COMPUTED_FASTER:
            return  # the blocks had come; the engine did not want them
        there = did_arrive(cache.hit_tokens, active.awaited_tokens, cache.outcome)
        self._judge(active, HandoverResult.LANDED if there else HandoverResult.MISSED, learned, now_s)

    def _judge(self, active: Active, handover: HandoverResult, learned: Learned, now_s: float) -> None:
        active.handover = learned.handover = handover
        handover_stats = self.models.of(active.model).handover_stats
        if handover is HandoverResult.LANDED:
            handover_stats.succeeded(active.prefiller, active.decoder)
        else:
            handover_stats.failed(active.prefiller, active.decoder, now_s)

    def _computed(
        self,
        active: Active,
        record: DecisionRecord,
        progress: ProgressReport,
        now_s: float,
        learned: Learned,
    ) -> None:
        """The prompt is computed: release what waited for it and learn how long it took and what was loaded."""
        inline = active.prefiller == active.decoder
        began_s = self.computed(active, now_s)
        active.phase = Stage.GENERATING
        self._made(active, progress, now_s)
        if began_s is None:
            return
        learned.learn = active
        record.observed["queue_ms"] = round(max(0.0, began_s - active.assigned_s) * 1e3, 3)
        if progress.phase is Phase.FIRST_TOKEN and not inline:
            return  # word of the prefill's end was lost; this says nothing of its duration
        if not progress.answer_is_whole:
            active.compute_seen_s = max(1e-4, now_s - began_s)
            record.observed["prefill_ms"] = round(
                active.compute_seen_s * 1e3, 3
            )  # until the engine tells more
        if not inline:
            self._leg_ended(active, now_s)
            leg = progress.prefill
            self._prefill_reported(active, record, leg, leg.cache if leg else None, learned, now_s)

    def _made(self, active: Active, progress: ProgressReport, now_s: float) -> None:
        """The blocks are made; those of which the prefill engine says that the pool did not get them do not come."""
        running = self.in_flight.end(active.decision_id)
        leg = progress.prefill if progress.phase is Phase.PREFILLED else None
        if running is None or leg is None or leg.cache is None or leg.cache.held_tokens < 0:
            return
        if active.sequences != 1 or not active.block_tokens:
            return  # of several prompts it is not known whose blocks were not stored
        begin = max(running.begin, leg.cache.held_tokens // active.block_tokens)
        self.give_ups.add(running, begin, running.blocks, GiveUpReason.NOT_STORED, now_s)

    def _prefill_reported(
        self,
        active: Active,
        record: DecisionRecord,
        leg: LegReport | None,
        cache: CacheReport | None,
        learned: Learned,
        now_s: float,
    ) -> None:
        """The leg that computed the prompt is described: what it found, what it computed, how long it took.

        leg: the prefill leg; None when the decode leg computed the prompt. cache: what its engine said.
        """
        if cache is not None:
            self._loads(active, active.prefiller, cache, now_s, handover=False)
        hit = min(cache.hit_tokens if cache is not None else active.prefix_tokens, active.prompt_tokens)
        computed = active.prompt_tokens - hit
        learned.local_tokens = cache.local_tokens if cache is not None else 0
        learned.loaded_tokens = cache.loaded_tokens if cache is not None else 0
        learned.computed_tokens = computed
        record.observed["computed_tokens"] = computed
        record.observed["local_tokens"] = learned.local_tokens
        record.observed["loaded_tokens"] = learned.loaded_tokens
        if cache is not None:
            role = LegRole.PREFILL if leg is not None else LegRole.DECODE
            _compare(role, active.computing, cache, record, learned)
            record.observed["ready_ms"] = round(cache.waited_ms + cache.load_ms, 3)
        # The time since it could begin, loads and waits taken off.
        idle_s = (cache.waited_ms + cache.load_ms - cache.hidden_ms) / 1e3 if cache is not None else 0.0
        seen_s = active.compute_seen_s
        if leg is not None and leg.ended_ms > leg.sent_ms:
            seen_s = min(seen_s, (leg.ended_ms - leg.sent_ms) / 1e3)
        seconds = max(0.0, seen_s - idle_s)
        if seconds > 0:
            record.observed["prefill_ms"] = round(seconds * 1e3, 3)
        # A small rest of two measurements is their error; taken for a prefill it would teach that prompts cost nothing.
        measured = seconds > max(_LEAST_S, _LEAST_SHARE * seen_s)
        instance = self.registry.get(active.prefiller)
        if instance is not None and computed > 0 and active.sequences == 1 and measured:
            n = active.prompt_tokens
            model = self.models.of(instance.info.model)
            model.observed_prefill(instance.info, n, max(0, min(n - 1, n - computed)), seconds)
        if cache is not None:
            _missing(record, cache)

    def _loads(
        self, active: Active, instance_id: str, cache: CacheReport, now_s: float, *, handover: bool
    ) -> None:
        if not cache.loaded_bytes or not cache.load_ms:
            return
        model = self.models.of(active.model)
        # What is hidden behind the wait costs the request nothing. Some of it counts: the next wait may be shorter.
        hidden_ms = min(cache.hidden_ms, _HIDDEN_MOST * cache.load_ms) if handover else 0.0
        seconds = (cache.load_ms - hidden_ms) / 1e3
        source = LoadSource.HANDOVER if handover else self._load_source(active, instance_id, cache)
        if source is not None:
            model.observed_load(instance_id, cache.loaded_bytes, seconds, self.registry, source)
        holder = holder_of(cache.loaded_from)
        # What came from memory of its own host has a source, and a rate, of its own.
        if holder is not None and source in (LoadSource.REMOTE, LoadSource.SSD):
            model.observed_holder(holder, cache.loaded_bytes, seconds, now_s)

    def _load_source(self, active: Active, instance_id: str, cache: CacheReport) -> LoadSource | None:
        """Where nearly all blocks of a load came from; None: from several places, so it says nothing of one of them."""
        instance = self.registry.get(instance_id)
        nodes = active.nodes.get(instance.info.host_id, ()) if instance is not None else ()
        return load_source(cache.loaded_from, {node.node_id for node in nodes})

    def _finished(
        self,
        active: Active,
        record: DecisionRecord,
        progress: ProgressReport,
        now_s: float,
    ) -> None:
        output_tokens = progress.output_tokens
        record.observed["total_ms"] = round((progress.elapsed_s or now_s - active.assigned_s) * 1e3, 3)
        record.observed["output_tokens"] = output_tokens
        if output_tokens > 0:
            per_sequence = output_tokens / active.sequences
            stayed_s = max(1e-3, now_s - (active.first_token_s or active.assigned_s + active.expected_ttft_s))
            self.models.of(active.model).observed_answer(active.lengths_class, per_sequence, stayed_s)
            if active.first_token_s:
                record.observed["decode_ms"] = round(stayed_s * 1e3, 3)
            if active.first_token_s and per_sequence > 1:
                record.observed["tbt_ms"] = round(stayed_s * 1e3 / (per_sequence - 1), 3)

    def explain(
        self,
        record: DecisionRecord,
        request: SchedulingRequest,
        pool: PoolAnswer,
        group: int,
        block_tokens: int,
    ) -> None:
        """Note in the record why its computed tokens were not there. Touches `seen` and the record only."""
        prefix, cacheable = record.planned_prefix, record.cacheable_tokens
        there = min(max(record.pool_tokens, prefix), cacheable)
        found = [MissRange(prefix, there, MissReason.NOT_FETCHED)] if there > prefix else []
        begin = -(-there // block_tokens)
        ranges = self.seen.explain(
            request.keys[: cacheable // block_tokens * KEY_BYTES],
            request.content_keys,
            group,
            begin,
            block_tokens,
        )
        if pool.state in (PoolState.ABSENT, PoolState.TIMEOUT):
            gone = MissReason.POOL_UNREACHABLE
            ranges = [r._replace(reason=gone) if r.reason is MissReason.EVICTED else r for r in ranges]
        found += ranges
        if request.prompt_tokens > cacheable:
            found.append(MissRange(max(cacheable, prefix), request.prompt_tokens, MissReason.NO_BLOCK))
        record.misses += found


def unkept(active: Active) -> DecisionRecord:
    """A stand-in for a dropped record; it is not kept."""
    return DecisionRecord(
        active.decision_id,
        active.request_id,
        b"",
        active.assigned_s,
        planned_prefix=active.prefix_tokens,
    )


def _compare(
    role: LegRole, planned: PlannedCache | None, cache: CacheReport, record: DecisionRecord, learned: Learned
) -> None:
    """Note and count what the engine of a leg did otherwise than planned."""
    if planned is None:
        return
    found = differences(role, planned, cache)
    learned.legs_compared += 1
    learned.differences += found
    known = record.observed.setdefault("differences", [])
    known += [each.to_json() for each in found]


def _missing(record: DecisionRecord, cache: CacheReport) -> None:
    """What was planned to be there and was not: the engine says why."""
    if cache.hit_tokens >= record.planned_prefix:
        return
    record.misses.insert(0, MissRange(cache.hit_tokens, record.planned_prefix, miss_reason(cache.outcome)))

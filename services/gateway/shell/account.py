"""What became of one request: its legs, the reports to the conductor, metrics, usage, and its tenant's charges."""

from __future__ import annotations

from typing import Final

import msgspec

from mooncache.accounts.core.usage import UsageCounts, tokens_of
from mooncache.gateway.core.answer import StreamEditor, TokenUsage, settled_cached_tokens
from mooncache.gateway.core.body import InferenceRequest
from mooncache.gateway.core.faults import EndCode
from mooncache.gateway.core.plan import LegPlan, LegRecord
from mooncache.gateway.core.recent_requests import RecentRequest
from mooncache.gateway.shell.conductor import RequestPlanner
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState
from mooncache.kvcache.leg_hint import CacheOutcome, LegRole
from mooncache.kvcache.leg_messages import LEG_ROLE_NUMBERS, cache_message
from mooncache.proto.v1 import conductor_pb2 as pb

BYTES_PER_TOKEN: Final = 4


class Account:
    """The outcome of one request, for reports, metrics and charges.

    Attributes: `answering` is the decode leg once its answer has begun; `cached_tokens` what the prefill leg found in
    caches; `lost_bytes` the size of an answer that was too large to be passed on; `shard_keys` what the conductor wants
    to know with the next report.
    """

    def __init__(
        self,
        state: GatewayState,
        exchange: Exchange,
        request: InferenceRequest,
        planner: RequestPlanner,
        *,
        is_tokenized: bool,
    ) -> None:
        self._state, self._exchange, self._request, self._planner = state, exchange, request, planner
        self._records: list[LegRecord] = []
        self._is_tokenized = is_tokenized
        self.answering: LegRecord | None = None
        self.editor = StreamEditor(request.wants_usage)
        self.cached_tokens: int | None = None
        self.lost_bytes = 0
        self.shard_keys = b""

    def begin(self, role: LegRole, to: LegPlan) -> LegRecord:
        """A leg is sent."""
        record = LegRecord(role, to.instance_id, self.elapsed_ms())
        self._records.append(record)
        return record

    def end(self, record: LegRecord, code: str) -> None:
        """A leg is over. Harmless to repeat: the first code stays."""
        if not record.code:
            record.code, record.ended_ms = code, self.elapsed_ms()
            self._state.stats.legs.labels(record.role, code).inc()

    def elapsed_ms(self) -> float:
        """Since the gateway took the request."""
        return (self._state.clock.now_s() - self._exchange.started_s) * 1e3

    def output_tokens(self) -> int:
        """Tokens that were generated; an estimate where no engine said."""
        request, paces = self._request, self._state.paces
        most = request.choices * request.max_output_tokens or 1 << 53
        if self.lost_bytes:
            return min(most, self.lost_bytes // BYTES_PER_TOKEN)
        if self.answering is not None:
            if self.answering.usage is not None:
                return self.answering.usage.completion_tokens
            if request.stream:
                return min(most, paces.of_events(request.model, self.editor.event_count))
        sent = [record for record in self._records if record.role is LegRole.DECODE]
        if not self._exchange.gone or not sent:
            return 0
        elapsed_s = (self.elapsed_ms() - sent[0].sent_ms) / 1e3
        return min(most, request.choices * paces.of_time(request.model, elapsed_s))

    def report(
        self,
        phase: pb.RequestPhase,
        *legs: LegRecord,
        answer_is_whole: bool = False,
        prefill_may_follow: bool = False,
    ) -> None:
        """Tell the conductor."""
        self._send(
            phase,
            pb.ReportProgressRequest(
                legs=[_leg_report(leg) for leg in legs],
                answer_is_whole=answer_is_whole,
                prefill_may_follow=prefill_may_follow,
            ),
        )

    def _send(self, phase: pb.RequestPhase, report: pb.ReportProgressRequest) -> None:
        report.decision_id, report.phase = self._planner.plan.decision_id, phase
        report.elapsed_ms, report.output_tokens = self.elapsed_ms(), self.output_tokens()
        report.shard_keys, self.shard_keys = self.shard_keys, b""
        self._state.conductor.report(self._exchange.request_id, report, at_once=self._exchange.offline)

    def report_end(self, phase: pb.RequestPhase, code: str, planned: int | None) -> None:
        """The request is over: report, log, count and charge it."""
        answering = self.answering or LegRecord(LegRole.DECODE)
        usage = answering.usage
        cached = settled_cached_tokens(answering.cached_tokens, self.cached_tokens, planned)
        legs = [_leg_report(record) for record in self._records]
        self._send(phase, pb.ReportProgressRequest(code=code, legs=legs, cached_tokens=cached))
        self._exchange.notes |= {
            "model": self._request.model,
            "prompt_tokens": usage.prompt_tokens if usage is not None else self._planner.prompt_tokens,
            "output_tokens": self.output_tokens(),
            "cached_tokens": cached,
            "instances": [f"{record.role}:{record.instance}:{record.code}" for record in self._records],
        }
        if answering.cache is not None and answering.cache.outcome is CacheOutcome.TIMEOUT:
            self._state.stats.waits_timed_out.labels(self._request.model).inc()
        self._count(usage, cached or 0, is_whole=code == EndCode.OK)
        if not self._records:
            return
        counts, caller = self._metered(usage, cached or 0, phase), self._exchange.require_caller()
        work_class = self._exchange.work_class
        if self._state.spending is not None:
            self._state.spending.spend(caller, self._request.model, work_class, counts)
        if self._state.meter is not None:
            self._state.meter.count(caller, self._request.model, work_class, counts)
            self._state.recent.add(
                caller.tenant,
                RecentRequest(
                    request_id=self._exchange.request_id,
                    key_id=caller.key_id,
                    model=self._request.model,
                    work_class=work_class,
                    ended_s=self._state.clock.wall_s(),
                    elapsed_ms=self.elapsed_ms(),
                    code=code,
                    input_tokens=counts.input_tokens,
                    cached_tokens=counts.cached_tokens,
                    output_tokens=counts.output_tokens,
                ),
            )

    def _metered(self, usage: TokenUsage | None, cached: int, phase: pb.RequestPhase) -> UsageCounts:
        """What the tenant used: as the engine counted; where it did not, what was sent until then, as an estimate."""
        failed, cancelled = phase == pb.REQUEST_PHASE_FAILED, phase == pb.REQUEST_PHASE_ABORTED
        counts = UsageCounts(requests=1, failed=int(failed), cancelled=int(cancelled))
        if usage is not None:
            counts.input_tokens, counts.output_tokens = usage.prompt_tokens, usage.completion_tokens
        elif cancelled or self.answering is not None:
            counts.input_tokens, counts.output_tokens = (
                self._planner.prompt_tokens,
                tokens_of(self.output_tokens()),
            )
        counts.cached_tokens = min(cached, counts.input_tokens)
        if usage is None:
            counts.estimated_tokens = counts.input_tokens + counts.output_tokens
        return counts

    def _count(self, usage: TokenUsage | None, cached_tokens: int, *, is_whole: bool) -> None:
        """Metrics and the tenant's bucket; prompt tokens were charged when the request was planned."""
        stats, model = self._state.stats, self._request.model
        if usage is not None:
            stats.prompt_tokens.labels(model).inc(usage.prompt_tokens)
            stats.cached_tokens.labels(model).inc(cached_tokens)
            if is_whole and self._is_tokenized:
                self._state.tokenizers.compare(model, self._planner.prompt_tokens, usage.prompt_tokens)
            if is_whole and self._request.choices == 1:
                elapsed_s, events = self.elapsed_ms() / 1e3, self.editor.event_count
                self._state.paces.learn(model, usage.completion_tokens, elapsed_s, events)
        output_tokens = self.output_tokens()
        stats.output_tokens.labels(model).inc(output_tokens)
        self.charge(output_tokens)

    def charge(self, tokens: int) -> None:
        """Take tokens from the buckets of the tenant and of its key."""
        now_s = self._state.clock.now_s()
        for holder, limits in self._exchange.require_caller().holders:
            self._state.limiter.charge(holder, limits, tokens, now_s)


def _leg_report(record: LegRecord) -> pb.LegReport:
    """A leg as it is reported to the conductor."""
    return pb.LegReport(
        role=LEG_ROLE_NUMBERS[record.role],
        instance_id=record.instance,
        sent_ms=record.sent_ms,
        ended_ms=record.ended_ms,
        code=record.code,
        usage=None if record.usage is None else pb.TokenUsage(**msgspec.to_builtins(record.usage)),
        cache=None if record.cache is None else cache_message(record.cache),
    )

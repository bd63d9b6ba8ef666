"""Answers: loading the handed-over KV, the second look at the promise, generating, and prompts inside the batch.

A batch changes at step boundaries only. One event is kept for each instance: the next boundary at which something
can change (a sequence ends, or a newcomer waits for a place).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from mooncache.conductor.core.policy.fleet import PREFILL
from mooncache.conductor.core.policy.types import Reason
from mooncache.simulate.cluster import FirstToken, InlineMode
from mooncache.simulate.decode import worst_gaps_mean
from mooncache.simulate.sim_request import FailureReason, SimOutcome, SimRequest, SimSequence, SimStage

if TYPE_CHECKING:
    from mooncache.simulate.node import SimNode
    from mooncache.simulate.scheduling import SimScheduler
    from mooncache.simulate.world import World


class Decoding:
    """Handlers of everything that happens to a request after its prompt was computed."""

    def __init__(
        self,
        world: World,
        scheduler: SimScheduler,
        begin_prompt: Callable[[SimRequest, SimNode], None],
        finish_prompt: Callable[[SimRequest], None],
    ) -> None:
        self.world, self.scheduler = world, scheduler
        self._begin_prompt, self._finish_prompt = begin_prompt, finish_prompt
        self._early = world.cluster.first_token == FirstToken.PREFILL

    def over_at_prefill(self, request: SimRequest) -> None:
        """The first token was the only one."""
        self._over(request, SimOutcome.DONE)

    def load(self, request: SimRequest) -> None:
        """All KV is in the decode node's memory: bring it onto the GPU."""
        world = self.world
        node = world.nodes[request.decode]
        if request.decode == request.prefill and node.role != PREFILL:
            load_s = 0.0
        else:
            load_s = request.input_tokens * node.profile.kv_bytes_per_token / node.profile.load_bytes_per_s
        if node.group.keep_handover and request.decode != request.prefill:
            node.store(request.blocks, world.now_s, world.index)
        world.push(world.now_s + load_s, self._arrive, request, request.attempt)

    def _arrive(self, request: SimRequest, attempt: int) -> None:
        if request.attempt != attempt or request.state != SimStage.HANDOVER:
            return
        node = self.world.nodes[request.decode]
        sequence = self._admit(request, node)
        if sequence is not None:
            self._queue(sequence, node)
            self.wake(node)

    @staticmethod
    def _queue(sequence: SimSequence, node: SimNode) -> None:
        """Places are given in the order of the decisions: an engine knows of a request before its KV is there."""
        waiting, order = node.batch.waiting, sequence.request.order
        at = len(waiting)
        while at and waiting[at - 1].request.order > order:
            at -= 1
        waiting.insert(at, sequence)

    def _admit(self, request: SimRequest, node: SimNode) -> SimSequence | None:
        """The double check: when all its KV is there, a request is judged once more, with all that came before it."""
        batch = node.batch
        sequence = request.sequence = SimSequence(request, request.input_tokens, request.steps)
        if batch.never_fits(sequence):
            self._over(request, SimOutcome.FAILED, FailureReason.TOO_LARGE)
            return None
        if self.scheduler.double_check and batch.tbt_after_all(sequence) > self.world.tbt_slo_s:
            self._over(request, SimOutcome.REJECTED_AFTER_PREFILL, Reason.TBT)
            return None
        return sequence

    # --- the batch

    def wake(self, node: SimNode) -> None:
        """A newcomer is there: look at the batch at the end of the step that runs."""
        if node.chunk_from or not node.alive:
            return  # the end of the chunk, or of the prompt, looks at the batch
        batch = node.batch
        at_s = max(batch.boundary_s(self.world.now_s), self.world.now_s)
        if at_s < node.batch_event_s:
            self._schedule(node, at_s)

    def _schedule(self, node: SimNode, at_s: float) -> None:
        node.batch_event_s = at_s
        node.batch_version += 1
        if at_s < math.inf:
            self.world.push(at_s, self._boundary, node, node.batch_version)

    def _boundary(self, node: SimNode, version: int) -> None:
        if version != node.batch_version or not node.alive:
            return
        node.batch_event_s = math.inf
        now_s = self.world.now_s
        for sequence in node.batch.advance(now_s):
            self._answered(sequence, node)
        self._turn(node)

    def _turn(self, node: SimNode) -> None:
        """At a boundary: take in who waits, begin or go on with a prompt, and start the next segment."""
        batch, world = node.batch, self.world
        while batch.waiting and batch.fits(batch.waiting[0]):
            self._join(batch.waiting.popleft(), node)
        extra_s = 0.0
        if node.role != PREFILL:
            prompt = node.computing if node.chunk_from else self._next_prompt(node)
            if prompt is not None:
                if node.group.inline == InlineMode.WHOLE:
                    self._compute_whole(prompt, node)
                    return
                extra_s = self._chunk_s(prompt, node)
        if extra_s and not batch.running:
            batch.stall(extra_s)
            self._schedule_chunk(node, world.now_s + extra_s)
            return
        batch.begin(extra_s)
        if extra_s:
            self._schedule_chunk(node, world.now_s + batch.step_s)
        else:
            self._schedule(node, batch.next_leave_s())

    def _join(self, sequence: SimSequence, node: SimNode) -> None:
        request = sequence.request
        now_s = self.world.now_s
        node.batch.join(sequence, request.order, now_s)
        request.state = SimStage.DECODING
        if self._early:
            sequence.first_gap_s += now_s - (request.arrival_s + request.ttft_s)
        self.scheduler.joined(request)

    def _answered(self, sequence: SimSequence, node: SimNode) -> None:
        request = sequence.request
        gaps = node.batch.gaps(sequence)
        if not self._early:
            request.ttft_s = sequence.joined_s + float(gaps[0]) + sequence.first_gap_s - request.arrival_s
            self.world.record.first_token(request)
        tbt_s, mean_s = (
            worst_gaps_mean(gaps, sequence.first_gap_s) if self._early else worst_gaps_mean(gaps[1:], 0.0)
        )
        node.answers += 1
        self._over(request, SimOutcome.DONE, "", tbt_s, mean_s)

    def _over(
        self,
        request: SimRequest,
        outcome: SimOutcome,
        reason: str = "",
        tbt_s: float = math.nan,
        mean_s: float = math.nan,
    ) -> None:
        request.state = SimStage.OVER
        if outcome == SimOutcome.DONE:
            tokens = request.steps + self._early
            self.world.record.totals.output_tokens += tokens
            self.scheduler.answered(request, tokens)
            if tokens == 1:
                tbt_s = mean_s = 0.0
        self.scheduler.ended(request)
        # They point at each other: a million of such pairs are work for the garbage collector.
        request.sequence = None
        del self.world.requests[request.index]
        self.world.record.over(request, outcome, self.world.now_s, reason, tbt_s, mean_s)

    # --- prompts inside the batch

    def _next_prompt(self, node: SimNode) -> SimRequest | None:
        """Begin the next prompt here, if there is one and room for its answer."""
        request = node.head()
        if request is None or node.computing is not None or request.members:
            return None
        sequence = SimSequence(request, request.input_tokens, request.steps)
        if not node.batch.fits(sequence) and not node.batch.never_fits(sequence):
            return None
        self._begin_prompt(request, node)
        return request

    def _compute_whole(self, request: SimRequest, node: SimNode) -> None:
        """The whole prompt is computed before the next step: a boundary that was asked for meanwhile is dropped."""
        node.batch_event_s = math.inf
        node.batch_version += 1
        node.chunk_from = -1
        node.batch.stall(request.compute_s)
        self.world.push(
            self.world.now_s + request.compute_s, self._whole_computed, node, request, request.attempt
        )

    def _whole_computed(self, node: SimNode, request: SimRequest, attempt: int) -> None:
        if request.attempt != attempt or not node.alive:
            return
        node.chunk_from = 0
        self._inlined(request, node)
        self._turn(node)

    def _chunk_s(self, request: SimRequest, node: SimNode) -> float:
        """The time that the next chunk of the prompt adds to a step."""
        cost = node.profile.prefill
        begin = node.chunk_from or request.cached_tokens
        end = min(begin + node.group.chunk_tokens, request.input_tokens)
        seconds = node.profile.chunk_overhead_s
        seconds += cost.b * (end - begin) + cost.c * (float(end) * end - float(begin) * begin)
        if not node.chunk_from:
            seconds += cost.a + cost.d * request.cached_tokens
            request.compute_s = 0.0
        request.compute_s += seconds
        node.chunk_from = end
        return seconds

    def _schedule_chunk(self, node: SimNode, at_s: float) -> None:
        node.batch_event_s = at_s
        node.batch_version += 1
        self.world.push(at_s, self._chunk_ends, node, node.batch_version)

    def _chunk_ends(self, node: SimNode, version: int) -> None:
        if version != node.batch_version or not node.alive:
            return
        node.batch_event_s = math.inf
        for sequence in node.batch.advance(self.world.now_s):
            self._answered(sequence, node)
        request = node.computing
        if request is not None and node.chunk_from >= request.input_tokens:
            node.chunk_from = 0
            self._inlined(request, node)
        self._turn(node)

    def _inlined(self, request: SimRequest, node: SimNode) -> None:
        """A prompt that was computed here goes on in the batch, or elsewhere."""
        self._finish_prompt(request)
        if request.steps <= 0:
            self._over(request, SimOutcome.DONE)
            return
        request.state = SimStage.HANDOVER
        if request.decode != node.row:
            self.load(request)
            return
        sequence = self._admit(request, node)
        if sequence is None:
            return
        if node.batch.fits(sequence):
            self._join(sequence, node)
        else:
            self._queue(sequence, node)

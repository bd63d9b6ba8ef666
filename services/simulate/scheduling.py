"""The conductor in the simulation: what it sees of a request, its decision, and the books it keeps.

Idea: everything here is what a real conductor knows: its own book of assignments, the block index (fed without
delay), the prompts in flight, and lengths learnt from answers that ended. What really happens is in the other
files; the two meet only where an event is reported to the conductor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mooncache.conductor.core.fairness import FairShares
from mooncache.conductor.core.fleet_book import STAY_PRIOR_S, Assignment
from mooncache.conductor.core.lateness import Lateness
from mooncache.conductor.core.learning import FadingMean
from mooncache.conductor.core.offered_load import OfferedLoad
from mooncache.conductor.core.output_lengths import OutputLengths
from mooncache.conductor.core.policy import crowding, find, overload
from mooncache.conductor.core.policy.types import (
    AdmissionMode,
    Awaited,
    Choice,
    Floats,
    Ints,
    PrefixSource,
    Request,
)
from mooncache.errors import SimulationInvalid
from mooncache.simulate.cluster import FirstToken, PoolScope
from mooncache.simulate.index import FEW, rows_of
from mooncache.simulate.options import LengthForecast
from mooncache.simulate.sim_request import SimRequest, SimStage

if TYPE_CHECKING:
    from mooncache.simulate.world import World

_AWAITED_MAX = 3
_LENGTH_PRIOR_TOKENS = 256.0
_RENEW = 16  # answers after which an expectation is made anew
_AFFINITY_DEPTHS = (1, 2, 4, 8, 16, 32, 64)


class SimScheduler:
    """Describes requests for the policy, asks it, and keeps the conductor's books."""

    def __init__(self, world: World) -> None:
        self.world = world
        options = world.options
        try:
            self.policy = find(options.policy)
        except ValueError as error:
            raise SimulationInvalid(f"policy: {error}") from None
        self._rules = world.rules
        self._first = 1 if world.cluster.first_token == FirstToken.PREFILL else 0
        self._forecast = options.output_tokens
        self._learns = self._forecast == LengthForecast.LEARNED
        self._global = world.cluster.pool == PoolScope.GLOBAL
        self._block_tokens = world.trace.block_tokens
        self._lengths = OutputLengths(_LENGTH_PRIOR_TOKENS)
        self._mean = float(world.trace.output_tokens.mean()) if len(world.trace) else _LENGTH_PRIOR_TOKENS
        self._expected: dict[str, tuple[int, float]] = {}  # tenant -> (answers seen, expectation)
        self._shares = FairShares() if world.trace.tenant is not None else None
        self._stay = FadingMean(STAY_PRIOR_S)
        self._lateness = Lateness()
        self._offered_load = OfferedLoad()
        self.double_check = (
            options.rules.admission in overload.PAPERS
            if options.double_check is None
            else options.double_check
        )

    def expected_tokens(self, request: SimRequest, tenant: str) -> float:
        """The conductor's expected length of the answer."""
        if self._forecast == LengthForecast.ORACLE:
            return float(request.steps + self._first)
        if self._forecast == LengthForecast.MEAN:
            return self._mean
        seen, expected = self._expected.get(tenant, (-_RENEW, 0.0))
        if self._lengths.count - seen >= _RENEW:
            expected = self._lengths.mean(tenant)
            self._expected[tenant] = self._lengths.count, expected
        return expected

    def answered(self, request: SimRequest, tokens: int) -> None:
        """Learn from an answer that ended: its length, and how long it stayed."""
        world = self.world
        if self._learns:
            self._lengths.observe(self._tenant(request), float(tokens))
        if request.sequence is not None and self._stay.observe(world.now_s - request.sequence.joined_s):
            world.book.stays(self._stay.value)

    def _tenant(self, request: SimRequest) -> str:
        tenants = self.world.trace.tenant
        return "" if tenants is None else str(int(tenants[request.index]))

    def decide(self, request: SimRequest, exclude: frozenset[int] = frozenset()) -> Choice:
        """Ask the policy; an admitted choice is counted in the conductor's book."""
        world = self.world
        blocks = request.blocks
        local, depth, mask = world.index.leading(
            blocks, len(world.nodes), self._block_tokens, request.input_tokens
        )
        trace, tenant = world.trace, self._tenant(request)
        policy_request = Request(
            prompt_tokens=request.input_tokens,
            cacheable_tokens=request.input_tokens,
            local=local,
            sources=self._sources(request, local, depth, mask) if self._global and depth else (),
            awaited=self._awaited(request, depth),
            output_tokens=self.expected_tokens(request, tenant),
            ttft_slo_s=world.ttft_slo_s,
            tbt_slo_s=world.tbt_slo_s,
            ttft_strict=True,  # the promises of a simulation are what its requests are judged by
            tbt_strict=True,
            exclude=exclude,
            priority=0 if trace.priority is None else int(trace.priority[request.index]),
            tenant_share=1.0 if self._shares is None else self._shares.share(tenant, world.now_s),
            lateness=self._lateness.value,
            demand=self._offered_load.lately(world.now_s),
            number=request.decision,
            affinity=tuple([blocks[at - 1] for at in _AFFINITY_DEPTHS[: len(blocks).bit_length()]]),
        )
        fleet = world.book.view(world.now_s)
        choice = self.policy.choose(policy_request, fleet, self._rules, world.rng)
        self._offered_load.add(crowding.cost_s(choice), world.now_s)
        world.record.totals.decisions += 1
        if world.options.on_decision is not None:
            world.options.on_decision(request.index, policy_request, fleet, choice, world.now_s)
        if choice.admitted:
            survival = self._survival(choice, tenant)
            world.book.assign(Assignment(request.index, choice, policy_request, survival), world.now_s)
            if self._shares is not None:
                self._shares.use(tenant, float(request.input_tokens - choice.prefix_tokens), world.now_s)
        return choice

    def _survival(self, choice: Choice, tenant: str) -> Callable[[Floats], Floats] | None:
        """The share of answers longer than so many tokens; the paper's prediction lets all last equally."""
        if self._rules.admission is AdmissionMode.PREDICTED:
            steps = self._stay.value / max(choice.tbt_s, 1e-4)
            return lambda tokens: (tokens < steps).astype(np.float64)
        if self.world.looks_ahead and self._learns and self._lengths.count:
            return self._lengths.survival(tenant)
        return None

    def _sources(self, request: SimRequest, local: Ints, depth: int, mask: int) -> tuple[PrefixSource, ...]:
        """The holders of the longest prefix, those with the most bandwidth for one more reader."""
        world = self.world
        tokens = min(depth * self._block_tokens, request.input_tokens)
        kv_bytes = world.cluster.profile.kv_bytes_per_token
        count = world.options.sources_max
        rates = world.network.offers()[1::3]  # NIC out of each row
        if mask.bit_count() <= FEW:
            offers = sorted((-float(rates[row]), row) for row in rows_of(mask))
            return tuple(
                self._source(request, local, depth, row, -rate / kv_bytes) for rate, row in offers[:count]
            )
        rows = (local == tokens).nonzero()[0]
        offered = rates[rows]
        found = []
        for _ in range(min(count, len(rows))):
            best = int(offered.argmax())
            found.append(
                self._source(request, local, depth, int(rows[best]), float(offered[best]) / kv_bytes)
            )
            offered[best] = -1.0
        return tuple(found)

    def _source(
        self, request: SimRequest, local: Ints, depth: int, row: int, tokens_per_s: float
    ) -> PrefixSource:
        """A holder of the longest prefix, with what of it lies on its SSD."""
        world, block = self.world, self._block_tokens
        tokens = min(depth * block, request.input_tokens)
        node = world.nodes[row]
        on_ssd = node.on_ssd(request.blocks, 0, depth)
        if not on_ssd:
            return PrefixSource(row, tokens, tokens_per_s)
        before = np.zeros(depth + 1, dtype=np.int64)  # blocks on disks before each one
        np.cumsum([each not in node.dram for each in request.blocks[:depth]], out=before[1:])
        missing: Ints = (on_ssd - before[np.minimum(local // block, depth)]) * block
        rate = world.network.offer(node.ssd_read) / node.profile.kv_bytes_per_token
        return PrefixSource(row, tokens, tokens_per_s, rate, on_ssd=missing)

    def _awaited(self, request: SimRequest, depth: int) -> tuple[Awaited, ...]:
        """The running prefills that extend the longest prefix held anywhere."""
        world, blocks = self.world, request.blocks
        found: list[Awaited] = []
        other: SimRequest | None = None
        for at in range(depth, len(blocks)):
            maker = world.inflight.get(blocks[at])
            if maker is None or maker.state not in (SimStage.QUEUED, SimStage.COMPUTING) or maker is request:
                break
            if maker is not other and other is not None:
                found.append(self._await(other, at, request))
            other = maker
        else:
            at = len(blocks)
        if other is not None:
            found.append(self._await(other, at, request))
        return tuple(found[:_AWAITED_MAX])

    def _await(self, maker: SimRequest, depth: int, request: SimRequest) -> Awaited:
        tokens = min(depth * self._block_tokens, request.input_tokens)
        ready_in_s = max(maker.expected_s - self.world.now_s, 0.01)
        return Awaited(tokens, ready_in_s, maker.prefill, str(maker.index), self._global)

    # what the conductor learns

    def started(self, request: SimRequest) -> None:
        """Its prompt is being computed."""
        self.world.book.started(request.index, self.world.now_s)

    def computed(self, request: SimRequest) -> None:
        """Its prompt is computed."""
        self.world.book.computed(request.index, self.world.now_s)

    def joined(self, request: SimRequest) -> None:
        """Its first token is due; how late it is teaches the model of waiting."""
        world, choice = self.world, request.choice
        assert choice is not None, "only decided requests generate"
        late_s = world.now_s - request.planned_from_s - choice.ttft_s
        self._lateness.observe(choice.ttft_s, choice.waiting_s, late_s, world.ttft_slo_s)
        self.world.book.first_token(request.index, self.world.now_s)

    def ended(self, request: SimRequest) -> None:
        """It is over, one way or another."""
        self.world.book.ended(request.index, self.world.now_s)

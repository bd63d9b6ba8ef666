"""The simulator and the running conductor decide alike: the same small workload through both, request by request.

On one side a simulation of a cluster; on the other the conductor's scheduler as the service runs it, whose engines do
at each moment what those of the simulation did. Compared are the instances, fetch or compute or wait, how much of
the prompt, and whom to refuse. Whatever one side would tell the policy otherwise than the other shows here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from mooncache.conductor.core.decisions import Decision
from mooncache.conductor.core.handover_stats import HandoverStats
from mooncache.conductor.core.learning import (
    DECODE_PRIOR,
    TRANSFER_PRIOR_BYTES_PER_S,
    TransferLearner,
)
from mooncache.conductor.core.output_lengths import OutputLengths
from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import (
    NO_ROW,
    Branch,
    Choice,
    Floats,
    PrefillCost,
    Request,
    Rules,
    TransferCost,
)
from mooncache.conductor.core.prefill_learner import PrefillLearner
from mooncache.conductor.core.progress import Phase, ProgressReport
from mooncache.simulate import ClusterSpec, InstanceGroup, Result, SimOptions, simulate, world
from mooncache.simulate.cluster import FirstToken, Slo
from mooncache.simulate.options import LengthForecast
from mooncache.simulate.profile import ModelProfile
from mooncache.traces import Trace
from tests.conductor.stories import serving
from tests.conductor.stories.serving import BLOCK_TOKENS, MODEL, TBT_SLO_S, Serving
from tests.simulate.small import trace_of

TTFT_SLO_S = 4.0
KV_BYTES_PER_TOKEN = 200
"""Loads are short beside prefills: the conductor does not hear when a load ends and the prefill begins."""
LINK_BYTES_PER_S = TRANSFER_PRIOR_BYTES_PER_S
ANSWER_TOKENS = 20
PREFILL = PrefillCost(0.0, 1 / serving.COMPUTED_TOKENS_PER_S, 0.0, 0.0)
PREFILLERS, DECODERS = 3, 1
SEEDS = (1, 2, 4, 5, 6, 7)
"""Workloads without a choice that hangs on the milliseconds of a load under way (see KV_BYTES_PER_TOKEN)."""


class FirstOfEquals(random.Random):
    """Ties go to the first row on both sides."""

    def randrange(self, *_: Any) -> int:
        return 0


class KnownSpeed(PrefillLearner):
    """The simulation is told how fast its engines are; so is the conductor."""

    def observe(self, *_: Any) -> bool:
        return False


class KnownHandover(TransferLearner):
    """The same of hand-overs: what the conductor does not know of yet it takes for 5 ms longer."""

    def cost(self, kv_bytes_per_token: int) -> TransferCost:
        return TransferCost(0.0, LINK_BYTES_PER_S / kv_bytes_per_token)


class KnownLag(HandoverStats):
    """The same of what passes beside it."""

    def observe_beside(self, seconds: float) -> bool:
        return False


class KnownLengths(OutputLengths):
    """The same of answers."""

    def mean(self, *_: Any) -> float:
        return float(ANSWER_TOKENS)

    def survival(self, *_: Any) -> Callable[[Floats], Floats]:
        return lambda tokens: np.exp(-tokens / ANSWER_TOKENS)


class Seen(NamedTuple):
    """What was decided for one request."""

    prefill: str
    decode: str
    branch: Branch
    prefix_tokens: int
    fetch_tokens: int
    reason: str


def seen(choice: Choice, names: Any) -> Seen:
    if not choice.admitted:
        return Seen("", "", Branch.LOCAL, 0, 0, choice.reason)
    prefill = names[choice.prefill] if choice.prefill != NO_ROW else ""
    return Seen(
        prefill,
        names[choice.decode],
        choice.branch,
        int(choice.prefix_tokens),
        int(choice.fetch_tokens),
        choice.reason,
    )


def workload(seed: int) -> Trace:
    """Conversations that go on, short prompts, two that come together, and a rush."""
    rng = random.Random(seed)
    now_s, fresh, chains = 0.0, 1, [[0]]
    rows = []
    for number in range(80):
        rush = 30 <= number < 60
        together = number in (12, 20, 70)
        now_s += 0.05 if rush or together else rng.uniform(2.0, 3.0)
        blocks = chains[-1] if together else rng.choice(chains)
        more = rng.choice((1, 2, 30, 80, 150))
        blocks = [*blocks, *range(fresh, fresh + more)]
        fresh += more
        if not rush:
            chains.append(blocks)
        rows.append((now_s, len(blocks) * BLOCK_TOKENS, ANSWER_TOKENS, blocks))
    return replace(trace_of(rows), block_tokens=BLOCK_TOKENS)


def spec() -> ClusterSpec:
    gbps = LINK_BYTES_PER_S * 8 / 1e9
    link = {"nic_in_gbps": gbps, "nic_out_gbps": gbps, "nic_efficiency": 1.0}
    rest = {"kv_capacity_tokens": 1_000_000, "sequences_max": 256, "dram_blocks": 100_000, **link}
    return ClusterSpec(
        instances=(
            InstanceGroup("prefill", PREFILLERS, **rest),
            InstanceGroup("decode", DECODERS, keep_handover=False, **rest),
        ),
        profile=ModelProfile(
            "even", PREFILL, DECODE_PRIOR, float(KV_BYTES_PER_TOKEN), load_bytes_per_s=LINK_BYTES_PER_S
        ),
        block_tokens=BLOCK_TOKENS,
        first_token=FirstToken.DECODE,
        slo=Slo(TTFT_SLO_S, TBT_SLO_S),
    )


class Replayed(Serving):
    """The running conductor's scheduler; its engines are as fast as those of the simulation were."""

    def __init__(self, result: Result) -> None:
        super().__init__()
        self.core._rng = FirstOfEquals(1)
        model = self.core.models.of(MODEL)
        model.prefills[serving.ENGINE], model.lengths = KnownSpeed(PREFILL), KnownLengths()
        model.handover_stats = KnownLag(0.25)
        model.transfers[""], model.handovers[""] = TransferLearner(), KnownHandover()
        self._result, self._began_s = result, self.now_s
        self.do_instances("prefill", *(f"prefill-{at}" for at in range(PREFILLERS)))
        self.do_instances("decode", *(f"decode-{at}" for at in range(DECODERS)))
        self._present = 0

    def _follow(self, decision: Decision, keys: bytes, answer_s: float) -> None:
        """The engines do what the simulated ones did."""
        at, result = self._present, self._result
        arrived_s = self._began_s + float(result.arrival_s[at])
        first_s = arrived_s + float(result.ttft_s[at])
        computed_s = arrived_s + float(result.queue_s[at] + result.prefill_s[at])
        end_s = self._began_s + float(result.end_s[at])

        def tell(phase: Phase) -> Callable[[], object]:
            report = ProgressReport(phase, output_tokens=ANSWER_TOKENS)
            return lambda: self.core.report_progress(decision.decision_id, report, self.now_s)

        self._at(computed_s, lambda: self._hold(decision.prefiller, keys))
        if decision.prefill:
            self._at(computed_s, tell(Phase.PREFILLED))
        self._at(first_s, tell(Phase.FIRST_TOKEN))
        self._at(end_s, tell(Phase.FINISHED))

    def decide(self, at: int, trace: Trace) -> Seen:
        """Time passes until the request arrives; what is decided for it."""
        self._present = at
        self._pass(self._began_s + float(self._result.arrival_s[at]) - self.now_s)
        blocks = trace.hash_ids[trace.offsets[at] : trace.offsets[at + 1]].tolist()
        self.blocks = blocks
        tokens = int(trace.input_tokens[at])
        decision = self._request(str(at), "", tokens, ttft=f"{TTFT_SLO_S}s", tbt=f"{TBT_SLO_S}s")
        return seen(decision.choice, self.core.models.of(MODEL).book.names)

    def _keys(self, prompt: str, tokens: int) -> bytes:
        return b"".join(block.to_bytes(32, "big") for block in self.blocks)


def simulated(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Seen], Result]:
    decided: list[Seen] = []

    def note(_: int, __: Request, fleet: Fleet, choice: Choice, ___: float) -> None:
        decided.append(seen(choice, fleet.names))

    monkeypatch.setattr(serving, "KV_BYTES_PER_TOKEN", KV_BYTES_PER_TOKEN)
    monkeypatch.setattr(world, "random", SimpleNamespace(Random=FirstOfEquals))
    options = SimOptions(
        rules=Rules(inline_tokens_max=512),  # as those of `Serving`
        spread_tick_s=0.0,
        on_decision=note,
        output_tokens=LengthForecast.ORACLE,
    )
    return decided, simulate(trace, spec(), options)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_decisions_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = workload(seed)
    decided, result = simulated(trace, monkeypatch)
    assert len(decided) == len(trace)
    assert np.array_equal(result.arrival_s, trace.arrival_s)
    live = Replayed(result)
    for at, expected in enumerate(decided):
        assert live.decide(at, trace) == expected, f"request {at} of seed {seed}"
    live.end()
    kinds = Counter(each.branch for each in decided)
    assert set(kinds) == set(Branch), "computed, fetched and waited for"
    assert len({each.prefill for each in decided}) == PREFILLERS + 1, (
        "each instance, and the decode instance alone"
    )
    assert {each.reason for each in decided} == {"admitted", "ttft"}, "some are refused"

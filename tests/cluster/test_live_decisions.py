"""The simulator and live engine processes under a real conductor: the same small workload, request by request.

Compared are what was decided (handed over or not, waited for or not), and how many blocks were not computed again.
`tests/simulate/test_same_decisions.py` holds simulator and conductor to each other in every number, with engines that
exist on paper; here the engines are processes whose speed the conductor has to learn. So the workload has no choice
that hangs on milliseconds, and each request comes when the conductor has heard that nothing runs: a report that is
late by a moment makes an instance look busy.

There is one prefill instance. The small engine does not report what its own memory holds, so for the conductor the
pool's blocks are equally near to several idle instances, and it draws lots; in the simulator an instance and its part
of the pool are one. For the same reason it is not compared whether blocks are loaded or already there: both are tokens
that nothing computes again.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, Final, NamedTuple

import aiohttp
import pytest

from mooncache.bench.replay.calibrate import Calibration
from mooncache.bench.replay.client import ReplayTarget, complete
from mooncache.bench.replay.predict import Serving, describe
from mooncache.bench.replay.workload import Prompts, ReplayShape
from mooncache.cli.app import run
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.watch import Watch
from mooncache.conductor.core.learning import DECODE_PRIOR, PREFILL_PRIOR_HF
from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import NO_ROW, AdmissionMode, Choice, Request, Rules
from mooncache.simulate import SimOptions, simulate
from mooncache.simulate.profile import ModelProfile
from mooncache.traces import Trace
from tests.cluster.conftest import INLINE_TOKENS_MAX
from tests.conditions import wait_until
from tests.simulate.small import trace_of

pytestmark = pytest.mark.timeout(300)

ANSWER_TOKENS: Final = 4
APART_S: Final = 60.0
BLOCK_TOKENS: Final = 32
VOCABULARY: Final = 256

# Blocks of each request: (conversation, blocks in all). Those of a conversation begin with what was said before.
WORKLOAD: Final = (
    ("a", 24),  # new, long: handed over
    ("b", 20),
    ("c", 3),  # new, short: decode computes it itself
    ("a", 44),  # goes on by much
    ("b", 42),
    ("b", 44),  # goes on by little: decode has its blocks, and computes the rest
    ("c", 25),  # what decode computed is read by prefill
    ("a", 45),
    ("d", 17),
)


class Seen(NamedTuple):
    """What was decided for one request."""

    inline: bool
    reused_blocks: int
    waits: bool


def workload() -> Trace:
    names = sorted({name for name, _ in WORKLOAD})
    rows = []
    for number, (name, blocks) in enumerate(WORKLOAD):
        first = 1000 * (1 + names.index(name))
        # The last block is not full: what comes later in its conversation has another one in its place.
        own = [*range(first, first + blocks), 100_000 + number]
        rows.append((APART_S * number, blocks * BLOCK_TOKENS + 5, ANSWER_TOKENS, own))
    return replace(trace_of(rows), block_tokens=BLOCK_TOKENS)


def simulated(trace: Trace) -> list[Seen]:
    decided: list[Seen] = []

    def note(number: int, _request: Request, fleet: Fleet, choice: Choice, _now_s: float) -> None:
        inline = choice.prefill == NO_ROW
        decided.append(Seen(inline, choice.prefix_tokens // BLOCK_TOKENS, choice.awaited is not None))

    profile = ModelProfile("small", PREFILL_PRIOR_HF, DECODE_PRIOR, 4096.0)
    spec = describe(Serving(1, 1), Calibration(profile, 0.0, 0), BLOCK_TOKENS)
    simulate(
        trace,
        spec,
        SimOptions(
            rules=Rules(admission=AdmissionMode.NONE, inline_tokens_max=INLINE_TOKENS_MAX),
            spread_tick_s=0.0,
            on_decision=note,
        ),
    )
    return decided


async def replayed(cluster: EmbeddedCluster, trace: Trace, capsys: pytest.CaptureFixture[str]) -> list[Seen]:
    """What the running conductor decides, with engines that really compute."""
    found: list[Seen] = []
    model = (await asyncio.to_thread(cluster.describe_instances))[0]["model"]
    key = cluster.demo_key_path.read_text().strip()
    target = ReplayTarget(cluster.layout.gateway_url, key, model, timeout_s=60.0)
    prompts = Prompts(trace, ReplayShape(tokens_per_block=BLOCK_TOKENS, vocab=VOCABULARY), seed=1)
    seen_before = ""
    async with aiohttp.ClientSession() as session:
        for number in range(len(trace)):
            answer = await complete(session, target, prompts.tokens(number), ANSWER_TOKENS)
            assert not answer.error, answer.error
            assert answer.prompt_tokens == trace.input_tokens[number]
            record = await asyncio.to_thread(ended_record, cluster, capsys, seen_before)
            seen_before = record["decision_id"]
            chosen = record["chosen"]
            reused = (answer.prompt_tokens - chosen["computed_tokens"]) // BLOCK_TOKENS
            assert answer.cached_tokens >= reused * BLOCK_TOKENS, "the engines did what was decided"
            found.append(Seen(chosen["inline"], reused, chosen["awaited_tokens"] > 0))
            await asyncio.to_thread(wait_until, lambda: asyncio.run(idle(cluster)), "idle instances")
    return found


async def idle(cluster: EmbeddedCluster) -> bool:
    """Whether the conductor has heard that nothing runs: workers report it after the answer has ended."""
    looking = Watch(cluster.layout, cluster.state_dir, cluster.token_path)
    try:
        loads = [(view.load.running, view.load.waiting, view.assigned) for view in await looking.instances()]
    finally:
        await looking.close()
    return not any(map(any, loads))


def ended_record(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str], seen_before: str
) -> dict[str, Any]:
    """The last decision, another one than before, once the conductor has heard how it ended."""

    def ended() -> dict[str, Any] | None:
        capsys.readouterr()
        if run(["why", "--json", "--state-dir", str(cluster.state_dir)]) != 0:
            return None
        record: dict[str, Any] = json.loads(capsys.readouterr().out)
        return record if record["state"] != "running" and record["decision_id"] != seen_before else None

    return wait_until(ended, "the end of the request") or {}


async def test_live_engines_and_simulator(
    serving: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = workload()
    expected = simulated(trace)
    decided = await replayed(serving, trace, capsys)
    for number, (live, thought) in enumerate(zip(decided, expected, strict=True)):
        assert live == thought, f"request {number}: {WORKLOAD[number]}"
    assert {seen.inline for seen in expected} == {True, False}
    assert sum(seen.reused_blocks > 0 for seen in expected) == 5

"""An engine whose layers lie on several stages: priced as what its worker registers, given the long prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncache.conductor.core import learning
from mooncache.proto.v1 import conductor_pb2 as pb
from tests.conductor.support import PASSPORT, Conductor, instance, serve


def engine(name: str, stages: int) -> pb.Instance:
    passport: dict[str, Any] = {**json.loads(PASSPORT), "pp_size": stages}
    return instance(name, engine="vllm", engine_version="0.32.0", passport_json=json.dumps(passport))


async def goes_to(c: Conductor, name: str, prompt_tokens: int) -> str:
    """The instance that computes such a prompt when all are idle."""
    plan = await c.schedule(name, b"", prompt_tokens=prompt_tokens)
    assert not plan.prefill.instance_id
    await c.progress(plan.decision_id, pb.REQUEST_PHASE_FINISHED, output_tokens=1)
    return str(plan.decode.instance_id)


def test_long_prompts_go_to_the_engine_with_stages(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        await c.register(engine("whole", 1), engine("staged", 2))
        assert await goes_to(c, "short", 200) == "whole", "a chunk passes one stage after the other"
        assert await goes_to(c, "long", 60_000) == "staged"
        model = c.service.state.core.models.of("m")
        staged = c.service.state.core.registry.get("staged")
        assert staged is not None
        for _ in range(8):
            model.observed_prefill(staged.info, 60_000, 0, 30.0)
        assert await goes_to(c, "learnt", 60_000) == "whole", (
            "what it really takes counts, for its kind alone"
        )
        assert await goes_to(c, "still", 200) == "whole"

    serve(tmp_path, scenario)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_more_stages_take_less_for_long_prompts_and_no_less_for_short_ones(stages: int) -> None:
    one, more = learning.prefill_prior("vllm"), learning.prefill_prior("vllm", stages)
    assert more.seconds(128_000, 0) == pytest.approx(one.seconds(128_000, 0) / stages, rel=0.15)
    assert more.seconds(512, 0) >= one.seconds(512, 0)

"""An engine whose layers lie on several stages: priced as what its worker registers, given the long prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncache.conductor.core import learning
from mooncache.conductor.core.models import kind_of
from mooncache.kvcache.engine_size import EngineSize
from mooncache.kvcache.instance_messages import size_of
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


def test_parts_of_blocks_are_no_stages(tmp_path: Path) -> None:
    """An engine that shares its blocks with pipelines, and with other numbers of ranks, has one process."""

    async def scenario(c: Conductor) -> None:
        parts = engine("parts", 4)
        staged = engine("staged", 4)
        parts.stages = parts.ranks = parts.replicas = 1
        staged.stages, staged.ranks, staged.replicas = 2, 1, 1
        await c.register(parts, staged)
        assert await goes_to(c, "short", 200) == "parts"
        assert await goes_to(c, "long", 60_000) == "staged"
        registry, models = c.service.state.core.registry, c.service.state.core.models
        infos = [one.info for one in (registry.get("parts"), registry.get("staged")) if one is not None]
        models.of("m").observed_prefill(infos[1], 60_000, 0, 30.0)
        assert len({kind_of(info) for info in infos}) == 2, "each size has speeds of its own"
        assert c.service.state.shards_of("m") == 4, "and the same parts"
        listed = await c.call("ListInstances", pb.ListInstancesRequest())
        sizes = {view.instance.instance_id: size_of(view.instance) for view in listed.instances}
        assert sizes == {"parts": EngineSize(), "staged": EngineSize(stages=2)}

    serve(tmp_path, scenario)


@pytest.mark.parametrize("said", [{}, {"stages": 2**32 - 1}, {"ranks": 2**32 - 1}, {"replicas": 2**32 - 1}])
def test_a_size_of_any_numbers_is_one(said: dict[str, Any]) -> None:
    size = size_of(pb.Instance(**said))
    assert (size is None) == (not said)
    assert size is None or 1 < size.processes <= 1 << 16


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_more_stages_take_less_for_long_prompts_and_no_less_for_short_ones(stages: int) -> None:
    one, more = learning.prefill_prior("vllm"), learning.prefill_prior("vllm", stages)
    assert more.seconds(128_000, 0) == pytest.approx(one.seconds(128_000, 0) / stages, rel=0.15)
    assert more.seconds(512, 0) >= one.seconds(512, 0)

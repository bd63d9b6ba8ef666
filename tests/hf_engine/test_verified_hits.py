"""Hits that an engine computes all the same: a writer of wrong KV is found and quarantined, an equal one never is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mooncache
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import MooncacheError
from tests.conditions import wait_until
from tests.hf_engine.conftest import BLOCK, Lab, prompt, start_cluster
from tests.hf_engine.test_pool import keys_of
from tests.store_node.questions import asked

SHADOW = {"connector__shadow_share": 1.0, "connector__shadow_tokens_per_s": 1e6}


def connecting(cluster: EmbeddedCluster, name: str) -> Callable[[], mooncache.Client]:
    return lambda: mooncache.connect(**cluster.client_settings(), client_name=name, build=f"{name} 1")


def figure(lab: Lab, name: str, **labels: str) -> float:
    return float(lab.engine.metrics.registry.registry.get_sample_value(f"mooncache_hf_{name}", labels) or 0.0)


def checked(lab: Lab) -> dict[str, float]:
    outcomes = ("same", "different", "unchecked")
    return {outcome: figure(lab, "shadow_blocks_total", outcome=outcome) for outcome in outcomes}


def perturb(lab: Lab) -> None:
    """Other weights than the passport says, as a broken unit of the device has them."""
    layer = lab.parts.runner.model.model.layers[0].self_attn.k_proj.weight
    with torch.no_grad():
        layer[: layer.shape[0] // 4] *= 1.02


def test_equal_engines_agree_however_they_compute(make_lab: Callable[..., Lab], connect: Any) -> None:
    first = make_lab(connect, hf__prefill_chunk_tokens=512)
    second = make_lab(connect, hf__prefill_chunk_tokens=48, **SHADOW)
    prompts = [prompt(length, 900 + length) for length in (40, 100, 333, 500)]
    answers = first.tokens(*prompts)
    first.settled()
    results = second.run(*prompts)
    assert [result.tokens for result in results] == answers
    second.settled()
    expected = sum((length - 1) // BLOCK for length in (40, 100, 333, 500))
    assert checked(second) == {"same": expected, "different": 0, "unchecked": 0}
    assert figure(second, "shadow_tokens_total") == expected * BLOCK
    assert all(result.cache.loaded_tokens == 0 for result in results)
    assert results[0].cache.reason == "computed to verify the pool's blocks"
    again = second.run(prompts[0])[0]
    assert again.cache.local_tokens, "what lies in its own cache is no hit of the pool"
    assert checked(second)["same"] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_of_less_precision_have_their_own_tolerance(
    make_lab: Callable[..., Lab], connect: Any, dtype: str
) -> None:
    first = make_lab(connect, hf__dtype=dtype, hf__prefill_chunk_tokens=512)
    second = make_lab(connect, hf__dtype=dtype, hf__prefill_chunk_tokens=32, **SHADOW)
    one = prompt(300, 77)
    first.run(one)
    first.settled()
    second.run(one)
    second.settled()
    assert checked(second) == {"same": 299 // BLOCK, "different": 0, "unchecked": 0}


def test_a_writer_of_wrong_kv_is_found_quarantined_and_recalled(
    make_lab: Callable[..., Lab], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = start_cluster(tmp_path / "pool")
    try:
        bad, good = make_lab(connecting(cluster, "bad")), make_lab(connecting(cluster, "good"), **SHADOW)
        alone = make_lab()
        perturb(bad)
        prompts = [prompt(120, 1), prompt(200, 2)]
        bad.run(*prompts)
        bad.settled()
        assert good.tokens(prompts[0]) == alone.tokens(prompts[0]), "what is verified is computed"
        good.settled()
        assert checked(good)["different"] == 119 // BLOCK
        code, listed = asked(cluster, capsys, "quarantine", "ls")
        assert (code, [row["instance"] for row in listed["writers"]]) == (0, ["bad"])
        assert listed["writers"][0]["verifiers"] == ["good"]
        with connecting(cluster, "reader")() as reader:
            unverified = keys_of(good, prompts[1])
            wait_until(
                lambda: not held(reader, unverified), "all of it is recalled, not only what was verified"
            )
        assert good.run(prompts[1])[0].cache.outcome == "miss"
        good.settled()
        bad.forget()
        more = bad.run(prompt(100, 3))[0]
        bad.settled()
        assert more.finish == "length", "it serves, without saving"
        assert figure(bad, "pool_saves_total", outcome="failed") >= 100 // BLOCK
        fresh = make_lab(connecting(cluster, "third"))
        assert fresh.run(prompts[1])[0].cache.loaded_tokens == 199 // BLOCK * BLOCK, (
            "the good one's are served"
        )
    finally:
        cluster.stop()


def held(client: mooncache.Client, keys: list[bytes]) -> bool:
    """Whether the pool holds one of the blocks; True while it does not answer."""
    try:
        return any(client.exists_many(keys))
    except MooncacheError:
        return True


def test_without_a_share_nothing_is_verified(make_lab: Callable[..., Lab], connect: Any) -> None:
    first, second = make_lab(connect), make_lab(connect)
    one = prompt(100, 55)
    first.run(one)
    first.settled()
    assert second.run(one)[0].cache.loaded_tokens == 99 // BLOCK * BLOCK
    assert second.parts.pool is not None
    assert second.parts.pool.verifier is None
    assert sum(checked(second).values()) == 0

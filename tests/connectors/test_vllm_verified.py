"""Real vLLM engines that check each other: a writer of wrong KV is found and quarantined, right ones never are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.kvcache.core.shadow import VERIFIED
from mooncache.kvcache.distance import TOLERANCES
from tests.connectors.test_vllm_engine import BLOCK_TOKENS, greedy_by_transformers, prompt
from tests.connectors.vllm_processes import Engines
from tests.store_node.questions import asked

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

SHADOW = {"shadow_share": 1.0, "shadow_tokens_per_s": 1e6}
LENGTHS = (100, 333, 700, 900)
# What a step computes: one engine takes most prompts in one, the other in many. So sums have another order.
WIDE, NARROW = ({"max_num_batched_tokens": count, "max_num_seqs": 4} for count in (1024, 48))
FOUND_ABOVE = 1e-3


def asks(tokens: list[int]) -> dict[str, Any]:
    return {"name": "", "path": "", "tokens": tokens, "wait_tokens": 0}


def blocks_of(tokens: list[int]) -> int:
    """Complete blocks that a lookup may take: a token is left to be computed."""
    return (len(tokens) - 1) // BLOCK_TOKENS


def pool_in(folder: Path) -> EmbeddedCluster:
    return EmbeddedCluster(ClusterSettings(state_dir=folder, nodes=1, capacity_bytes=256 << 20, port=0))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.deep)])
def test_right_engines_agree_whatever_a_step_computes(
    tmp_path: Path, model_dir: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [prompt(400 + length, length) for length in LENGTHS]
    with pool_in(tmp_path / "pool") as cluster:
        engines = Engines(model_dir, cluster, tmp_path)
        engines.answers("wide", *map(asks, prompts), more={"engine_id": "wide"}, dtype=dtype, **WIDE)
        more = {"engine_id": "narrow", "connector": SHADOW}
        answers = engines.answers("narrow", *map(asks, prompts), more=more, dtype=dtype, **NARROW)
        assert asked(cluster, capsys, "quarantine", "ls")[1]["writers"] == []
    for tokens, answer in zip(prompts, answers, strict=True):
        assert answer["reported"]["reason"] == VERIFIED
        assert answer["cached"] == 0
        assert len(answer["distances"]) == blocks_of(tokens)
    distances = [distance for answer in answers for distance in answer["distances"]]
    with capsys.disabled():
        print(f"\n{dtype}: largest distance {max(distances):.2e} of {len(distances)} blocks")
    assert max(distances) <= TOLERANCES[dtype]


def test_a_writer_of_wrong_kv_is_quarantined_and_its_blocks_go(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, verified, unverified = prompt(31, 300), prompt(32, 300), prompt(33, 300)
    oracle = greedy_by_transformers(model_dir)
    with pool_in(tmp_path / "pool") as cluster:
        engines = Engines(model_dir, cluster, tmp_path)
        bad = {"engine_id": "bad", "wrong_keys": True}
        engines.answers("bad", asks(verified), asks(unverified), more=bad, **WIDE)
        wrote = {
            row["instance"]: row["block_count"] for row in asked(cluster, capsys, "writers")[1]["writers"]
        }
        assert wrote["vllm-bad"] == 2 * blocks_of(verified)
        good = {"engine_id": "good", "connector": SHADOW}
        found, own = engines.answers("good", asks(verified), asks(right), more=good, **NARROW)
        with capsys.disabled():
            print(f"\nwrong K: distances {min(found['distances']):.2e} to {max(found['distances']):.2e}")
        # After the first step's report the master removes the writer's blocks, so later steps may find none to compare.
        assert 1 <= len(found["distances"]) <= blocks_of(verified)
        assert min(found["distances"]) > FOUND_ABOVE > TOLERANCES["float32"]
        assert found["tokens"] == oracle(verified), "what is verified is computed, so the answer is right"
        assert own["tokens"] == oracle(right)

        listed = asked(cluster, capsys, "quarantine", "ls")[1]["writers"]
        assert [(row["instance"], row["verifiers"]) for row in listed] == [("vllm-bad", ["vllm-good"])]
        rows = asked(cluster, capsys, "writers")[1]["writers"]
        left = {row["instance"]: row["block_count"] for row in rows}
        assert left.get("vllm-bad", 0) == 0, "all that it wrote is gone, not only what was verified"
        assert left["vllm-good"] >= blocks_of(right), "the blocks of the other one stay"

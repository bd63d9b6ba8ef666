"""Real vLLM engines of one and two tensor parallel ranks on the CPU read each other's blocks by groups of heads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache import tiny_model
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.connectors.vllm.part_memory import CHANGE_MARGIN_NS
from mooncache.kvcache import identity
from tests.connectors.one_vllm import MAX_TOKENS
from tests.connectors.test_vllm_engine import greedy_by_transformers, prompt
from tests.connectors.vllm_processes import Engines

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

LENGTH, WHOLE = 300, 288
ONE_RANK: dict[str, Any] = {}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
SHARED: dict[str, Any] = {"more": {"connector": {"head_groups": 2}}}


def _ask(tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"name": "", "path": "", "tokens": tokens, "wait_tokens": 0, **more}


def _read(tokens: list[int]) -> dict[str, Any]:
    """On a busy machine the first lookup is late: it is waited for."""
    return _ask(tokens, wait_tokens=WHOLE)


def _said(cluster: EmbeddedCluster, *answers: dict[str, Any]) -> str:
    """What connectors report of their requests, and what the pool says of itself."""
    logs = sorted((cluster.state_dir / "logs").iterdir())
    return "\n".join([*(str(answer["reported"]) for answer in answers), *(log.read_text() for log in logs)])


def _model(folder: Path, kv_heads: int) -> Path:
    """Old enough for an engine that begins now to see that its weights are those of the files."""
    model = tiny_model.build(folder, kv_heads=kv_heads)
    age_ns = time.time_ns() - identity.weights_changed_ns(model)
    time.sleep(max(0, CHANGE_MARGIN_NS - age_ns) / 1e9 + 0.1)
    return model


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    settings = ClusterSettings(state_dir=tmp_path / "pool", nodes=1, capacity_bytes=256 << 20, port=0)
    with EmbeddedCluster(settings) as running:
        yield running


def test_engines_of_one_and_two_ranks_read_each_others_blocks(
    tmp_path: Path, cluster: EmbeddedCluster
) -> None:
    model = _model(tmp_path / "model", kv_heads=2)
    first, second = prompt(9100, LENGTH), prompt(9200, LENGTH)
    by_transformers = greedy_by_transformers(model)
    engines = Engines(model, cluster, tmp_path)
    (written,) = engines.answers("one", _ask(first, settle=True), **ONE_RANK, **SHARED)
    read, other = engines.answers("two", _read(first), _ask(second, settle=True), **TWO_RANKS, **SHARED)
    (back,) = engines.answers("one-again", _read(second), **ONE_RANK, **SHARED)
    alone = engines.answers("by-rank", _ask(first), **ONE_RANK)[0]
    assert [one["tokens"] for one in (written, alone, read)] == [by_transformers(first, MAX_TOKENS)] * 3
    assert [one["tokens"] for one in (other, back)] == [by_transformers(second, MAX_TOKENS)] * 2
    cached = (written["cached"], read["cached"], back["cached"])
    assert cached == (WHOLE, WHOLE, WHOLE), _said(cluster, written, read, back)
    assert alone["cached"] == 0, "blocks by rank have other keys"


@pytest.mark.deep
def test_a_head_that_two_ranks_have_is_read_by_one(tmp_path: Path, cluster: EmbeddedCluster) -> None:
    model = _model(tmp_path / "model", kv_heads=1)
    tokens = prompt(9300, LENGTH)
    engines = Engines(model, cluster, tmp_path)
    (written,) = engines.answers("two", _ask(tokens, settle=True), **TWO_RANKS, **SHARED)
    (read,) = engines.answers("one", _read(tokens), **ONE_RANK, **SHARED)
    right = greedy_by_transformers(model)(tokens, MAX_TOKENS)
    assert [(one["tokens"], one["cached"]) for one in (written, read)] == [(right, WHOLE)] * 2

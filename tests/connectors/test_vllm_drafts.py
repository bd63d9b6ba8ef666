"""Real vLLM with drafts and with FP8 KV: a fresh engine loads what one of its kind computed, and goes on like it.

A draft engine that loads has to have as many of its drafts accepted as one that computes: else the KV of the layers
that draft would not be what it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncache import tiny_model
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from tests.connectors import draft_models
from tests.connectors.test_vllm_engine import complete_tokens, greedy_by_transformers, prompt
from tests.connectors.vllm_processes import Engines

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),
]

TOKENS = prompt(4200, 257)
WHOLE = complete_tokens(len(TOKENS))
DRAFTED = 3  # tokens at a time
ASKED = {"name": "r", "path": "", "tokens": TOKENS, "wait_tokens": 0}


def twice(folder: Path, model: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an engine answers that computes the prompt, and a fresh one that finds its blocks in the pool."""
    pool = ClusterSettings(state_dir=folder / "pool", nodes=1, capacity_bytes=256 << 20, port=0)
    with EmbeddedCluster(pool) as cluster:
        engines = Engines(model, cluster, folder)
        (first,) = engines.answers("first", ASKED, **settings)
        (second,) = engines.answers("second", ASKED | {"wait_tokens": WHOLE}, **settings)
    assert first["cached"] == first["reported"]["loaded_tokens"] == 0
    assert second["cached"] == second["reported"]["loaded_tokens"] == WHOLE
    assert second["reported"]["outcome"] == "hit"
    return first, second


def drafting(method: str, **more: Any) -> dict[str, Any]:
    drafts = {"method": method, "num_speculative_tokens": DRAFTED, **more}
    return {"speculative_config": drafts, "async_scheduling": False}


def same_drafts(computed: dict[str, Any], loaded: dict[str, Any]) -> bool:
    """Whether as many drafts were right, of as many.

    A request with one token to compute begins with empty drafts in vLLM, which count as proposed.
    """
    ours = {**loaded["drafts"], "proposed": loaded["drafts"]["proposed"] - DRAFTED}
    return bool(computed["drafts"] == ours)


def test_a_draft_model_finds_its_own_kv(tmp_path: Path) -> None:
    """The model drafts for itself, so all drafts are right as long as the drafting layers have the KV of the prompt."""
    model = tiny_model.build(tmp_path / "model")
    first, second = twice(tmp_path, model, **drafting("draft_model", model=str(model)))
    assert first["tokens"] == second["tokens"] == greedy_by_transformers(model)(TOKENS)
    assert same_drafts(first, second)
    assert first["drafts"]["accepted"] == first["drafts"]["proposed"] > 0


def test_an_eagle_head_finds_its_own_kv(tmp_path: Path) -> None:
    model = draft_models.weakened(tmp_path / "model", tiny_model.build(tmp_path / "strong"))
    head = draft_models.eagle_head(tmp_path / "head", model)
    first, second = twice(tmp_path, model, **drafting("eagle", model=str(head)))
    assert first["tokens"] == second["tokens"] == greedy_by_transformers(model)(TOKENS)
    assert same_drafts(first, second)
    assert first["drafts"]["accepted"] > 0


def test_n_grams_are_accepted_as_often_over_what_a_plain_engine_computed(tmp_path: Path) -> None:
    model = draft_models.weakened(tmp_path / "model", tiny_model.build(tmp_path / "strong"))
    n_grams = drafting("ngram", prompt_lookup_max=3, prompt_lookup_min=1)
    greedy = greedy_by_transformers(model)
    guess = greedy(TOKENS)
    asked = ASKED | {"tokens": guess + TOKENS[len(guess) :]}  # what it will say is in the prompt
    pool = ClusterSettings(state_dir=tmp_path / "pool", nodes=1, capacity_bytes=256 << 20, port=0)
    with EmbeddedCluster(pool) as cluster:
        engines = Engines(model, cluster, tmp_path)
        (alone,) = engines.answers("alone", asked, more={"connector": {"enabled": False}}, **n_grams)
        (plain,) = engines.answers("plain", asked)
        (loaded,) = engines.answers("loaded", asked | {"wait_tokens": WHOLE}, **n_grams)
    assert (alone["cached"], plain["cached"], loaded["cached"]) == (0, 0, WHOLE)
    assert alone["tokens"] == plain["tokens"] == loaded["tokens"] == greedy(asked["tokens"])
    assert same_drafts(alone, loaded)
    assert loaded["drafts"]["accepted"] > 0


def test_fp8_kv_is_loaded_as_it_was_computed(tmp_path: Path) -> None:
    first, second = twice(tmp_path, tiny_model.build(tmp_path / "model"), kv_cache_dtype="fp8")
    assert first["tokens"] == second["tokens"]

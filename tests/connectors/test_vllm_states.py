"""Real vLLM, models with recurrent states: a state is loaded with the KV, and without it the answer is another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from tests.connectors import recurrent_models
from tests.connectors.test_vllm_engine import prompt
from tests.connectors.test_vllm_groups import asks
from tests.connectors.vllm_processes import Engines

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("kind", "dtype", "length", "border"),
    [
        ("qwen3-next", "bfloat16", 554, 544),
        pytest.param("lfm2", "float32", 641, 640, marks=pytest.mark.deep),
    ],
)
def test_a_prefix_is_loaded_with_the_states_at_its_border(
    tmp_path: Path, model_dir: Path, kind: str, dtype: str, length: int, border: int
) -> None:
    model = recurrent_models.build(tmp_path / "model", kind, model_dir)
    tokens = prompt(170 + length, length)
    # No state was kept at a border within the part that this prompt has in common.
    other = [*tokens[: border - 30], *prompt(3, length - border + 30)]
    requests = [asks(tokens, wait_tokens=0), asks(tokens, forget=True), asks(other, wait_tokens=0)]
    requests.append(asks(tokens, forget=True, spoil=True))
    settings = ClusterSettings(state_dir=tmp_path / "pool", nodes=1, capacity_bytes=256 << 20, port=0)
    with EmbeddedCluster(settings) as cluster:
        engines = Engines(model, cluster, tmp_path)
        if kind != "lfm2":
            computed, loaded, apart, spoilt = engines.answers("one", *requests, dtype=dtype)
        else:  # what another engine needs is the same
            (computed,) = engines.answers("first", requests[0], dtype=dtype)
            loaded, apart, spoilt = engines.answers("second", *requests[1:], dtype=dtype)
    assert computed["cached"] == 0
    for answer in (loaded, spoilt):
        assert answer["cached"] == answer["reported"]["loaded_tokens"] == border
        assert answer["reported"]["outcome"] == "hit"
    assert loaded["tokens"] == computed["tokens"]
    # Other states give other tokens: else equal ones would show nothing.
    assert spoilt["tokens"] != computed["tokens"]
    assert (apart["cached"], apart["reported"]["outcome"]) == (0, "miss")


def test_an_engine_that_keeps_no_states_says_so(tmp_path: Path, model_dir: Path) -> None:
    model = recurrent_models.build(tmp_path / "model", "falcon-h1", model_dir)
    settings = ClusterSettings(state_dir=tmp_path / "pool", nodes=1, capacity_bytes=64 << 20, port=0)
    with EmbeddedCluster(settings) as cluster:
        engines = Engines(model, cluster, tmp_path)
        # On a CPU vLLM cannot keep states of this kind: with prefix caching its first request ends it.
        (answer,) = engines.answers("one", asks(prompt(9, 300)), enable_prefix_caching=False)
    reported = answer["reported"]
    assert (answer["cached"], reported["outcome"], reported["saved_blocks"]) == (0, "off", 0)
    assert reported["reason"].startswith("recurrent_state: ")
    assert "mamba_cache_mode is none" in reported["reason"]

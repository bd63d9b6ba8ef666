"""Real vLLM, models with sliding windows: what a window needs is loaded, and without it the answer is another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from tests.connectors import windowed_models
from tests.connectors.test_vllm_engine import BLOCK_TOKENS, prompt
from tests.connectors.vllm_processes import Engines

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

PAGE_BYTES = 2 * 2 * BLOCK_TOKENS * 32 * 4  # of a layer's block: K and V, two heads of 32 numbers
WINDOW_BLOCKS = windowed_models.WINDOW // BLOCK_TOKENS


def asks(tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"name": "", "path": "", "tokens": tokens, "wait_tokens": len(tokens), **more}


@pytest.mark.parametrize(
    ("kind", "length", "layers", "windowed_layers"),
    [
        ("gpt-oss", 640, 4, 2),
        pytest.param("gemma4", 680, 6, 5, marks=pytest.mark.deep),
        pytest.param("gemma3", 680, 6, 5, marks=pytest.mark.deep),
        pytest.param("mistral", 700, 2, 2, marks=pytest.mark.deep),
    ],
)
def test_a_prefix_is_loaded_up_to_the_windows_before_its_border(
    tmp_path: Path, model_dir: Path, kind: str, length: int, layers: int, windowed_layers: int
) -> None:
    model = windowed_models.build(tmp_path / "model", kind, model_dir)
    tokens = prompt(170 + length, length)
    # Of Gemma 4 full attention keeps twice as much of a token, and blocks of windows have twice as many tokens.
    times = 2 if kind == "gemma4" else 1
    # A token is left to be computed, and its block with it.
    blocks = (length - 1) // (times * BLOCK_TOKENS) * times
    settings = ClusterSettings(state_dir=tmp_path / "pool", nodes=1, capacity_bytes=256 << 20, port=0)
    with EmbeddedCluster(settings) as cluster:
        engines = Engines(model, cluster, tmp_path)
        requests = [
            asks(tokens, wait_tokens=0),
            asks(tokens, forget=True),
            asks(tokens, forget=True, spoil=True),
        ]
        if kind not in ("gpt-oss", "gemma4"):
            computed, loaded, spoilt = engines.answers("one", *requests)
        else:  # what another engine needs is the same
            (computed,) = engines.answers("first", requests[0])
            loaded, spoilt = engines.answers("second", *requests[1:])
    assert computed["cached"] == 0
    # Other KV where the window is gives other tokens: else equal ones would show nothing.
    for answer in (loaded, spoilt):
        assert answer["cached"] == answer["reported"]["loaded_tokens"] == blocks * BLOCK_TOKENS
        assert answer["reported"]["outcome"] == "hit"
    assert loaded["tokens"] == computed["tokens"]
    assert spoilt["tokens"] != computed["tokens"]
    full = (layers - windowed_layers) * blocks * times * PAGE_BYTES
    assert loaded["reported"]["loaded_bytes"] == full + windowed_layers * WINDOW_BLOCKS * PAGE_BYTES

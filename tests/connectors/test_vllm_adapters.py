"""Real vLLM with LoRA adapters: blocks follow the content of an adapter, whatever it is called."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from tests.connectors.adapter_files import RANK, make_adapter, merged
from tests.connectors.test_vllm_engine import complete_tokens, greedy_by_transformers, prompt
from tests.connectors.vllm_processes import Engines

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),
]

ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
TOKENS = prompt(4100, 257)
WHOLE = complete_tokens(len(TOKENS))


def asks(name: str, path: Path | None = None, *, wait_tokens: int = 0, **more: Any) -> dict[str, Any]:
    return {"name": name, "path": str(path or ""), "tokens": TOKENS, "wait_tokens": wait_tokens, **more}


def test_engines_share_the_blocks_of_an_adapter_by_its_content(tmp_path: Path) -> None:
    from mooncache import tiny_model

    model = tiny_model.build(tmp_path / "model")
    red = make_adapter(tmp_path / "red", model, 1)
    blue = make_adapter(tmp_path / "blue", model, 2)
    copied = Path(shutil.copytree(red, tmp_path / "elsewhere" / "copied"))
    wanted = [
        greedy_by_transformers(model)(TOKENS),
        greedy_by_transformers(merged(tmp_path / "model+red", model, red))(TOKENS),
        greedy_by_transformers(merged(tmp_path / "model+blue", model, blue))(TOKENS),
    ]
    assert len(set(map(tuple, wanted))) == 3  # else nothing would show whose blocks were used
    settings = ClusterSettings(state_dir=tmp_path / "pool", nodes=1, capacity_bytes=256 << 20, port=0)
    with EmbeddedCluster(settings) as cluster:
        engines = Engines(model, cluster, tmp_path)
        first = engines.answers("first", asks("base"), asks("red", red), asks("blue", blue), **ADAPTERS)
        assert [answer["tokens"] for answer in first] == wanted
        # Each of them computes: no block of another one fits.
        assert [answer["cached"] for answer in first] == [0, 0, 0]
        assert [answer["reported"]["hit_tokens"] for answer in first] == [0, 0, 0]
        other = (blue / "adapter_config.json").read_text() + " "
        second = engines.answers(
            "second",
            asks("base", wait_tokens=WHOLE),
            asks("crimson", copied, wait_tokens=WHOLE),
            asks("azure", blue, wait_tokens=WHOLE),
            # What the engine has of it in memory is as before, but its files no longer say so.
            asks("crimson", copied, wait_tokens=WHOLE, write={str(copied / "adapter_config.json"): other}),
            **ADAPTERS,
        )
        for answer, tokens in zip(second[:3], wanted, strict=True):
            assert answer["tokens"] == tokens
            assert answer["cached"] == answer["reported"]["loaded_tokens"] == WHOLE
            assert answer["reported"]["outcome"] == "hit"
        assert second[3]["reported"]["outcome"] == "off"
        assert second[3]["reported"]["reason"].startswith("lora_changed: the files of the adapter crimson ")
        assert second[3]["reported"]["loaded_tokens"] == 0
        assert second[3]["tokens"] == wanted[1]
        # Without an adapter the blocks are those of an engine that takes none, also of one that drafts from n-grams.
        drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
        (plain,) = engines.answers(
            "plain", asks("base", wait_tokens=WHOLE), speculative_config=drafts, async_scheduling=False
        )
        assert plain["cached"] == plain["reported"]["loaded_tokens"] == WHOLE
        assert plain["tokens"] == wanted[0]

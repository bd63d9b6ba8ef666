"""Real vLLM with two tensor parallel ranks on the CPU: each keeps its part of every block under keys of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from tests.connectors.test_vllm_engine import greedy_by_transformers, prompt
from tests.connectors.vllm_processes import ENGINE_ENVIRONMENT

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = [pytest.mark.vllm, pytest.mark.deep, pytest.mark.timeout(600)]

LENGTH, WHOLE = 300, 288
SCRIPT = Path(__file__).with_name("two_ranks.py")


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_save_and_load_and_follow_their_weights(tmp_path: Path) -> None:
    from mooncache import tiny_model

    model = tiny_model.build(tmp_path / "model")
    other = tiny_model.build(tmp_path / "other", seed=7)
    tokens = prompt(9000, LENGTH)
    asked, answered, log = tmp_path / "prompt.json", tmp_path / "steps.json", tmp_path / "log"
    asked.write_text(json.dumps(tokens))
    settings = ClusterSettings(state_dir=tmp_path / "pool", nodes=1, capacity_bytes=256 << 20, port=0)
    with EmbeddedCluster(settings) as cluster, log.open("wb") as output:
        done = subprocess.run(
            [
                *(sys.executable, str(SCRIPT), str(model), str(other), str(asked), str(answered)),
                *(str(cluster.state_dir), cluster.master_target),
            ],
            env=os.environ | ENGINE_ENVIRONMENT,
            stdout=output,
            stderr=output,
            timeout=500,
            check=False,
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-4000:]
    cold, loaded, trained, again = json.loads(answered.read_text())
    first, second = (greedy_by_transformers(folder)(tokens, 8) for folder in (model, other))
    assert (cold["cached"], cold["tokens"]) == (0, first)
    assert (loaded["cached"], loaded["tokens"]) == (WHOLE, first)
    assert (trained["cached"], trained["tokens"]) == (0, second)
    assert (again["cached"], again["tokens"]) == (WHOLE, second)
    assert "defect" not in log.read_text(errors="replace")

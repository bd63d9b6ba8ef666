"""A whole cluster with real vLLM engines on the CPU, started once for all tests of this folder."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.settings import missing_modules
from tests.groups import stop_after

HERE = Path(__file__).parent
ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
MAX_TOKENS = 6


@pytest.fixture(scope="session")
def model_dir() -> Path:
    missing = missing_modules("vllm")
    if missing:
        pytest.skip(f"vLLM is not installed ({', '.join(missing)}): scripts/install_vllm.sh")
    from mooncache import tiny_model

    return tiny_model.build(Path(tempfile.gettempdir()) / "mooncache-test-models" / "serving")


@pytest.fixture(scope="session")
def vllm_cluster(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("cluster"),
        engine="vllm",
        model=str(model_dir),
        model_name="tiny",
        prefill=1,
        decode=1,
        capacity_bytes=2 << 30,
        port=0,
        conductor_port=0,
        gateway_port=0,
        extra_env=(
            # The machine may be slow: what is tested here are tokens, not promises about time.
            ("MOONCACHE_CONDUCTOR_ADMISSION_ENABLED", "false"),
            ("MOONCACHE_CONNECTOR_BREAK_EVEN", "false"),
            ("MOONCACHE_CONDUCTOR_HANDOVER_MARGIN_S", "60"),
            ("MOONCACHE_CONDUCTOR_SUSPECT_AFTER_S", "60"),
            ("MOONCACHE_CONDUCTOR_LEASE_S", "120"),
            # Short prompts too go through a prefill instance and the pool.
            ("MOONCACHE_CONDUCTOR_INLINE_TOKENS_MAX", "0"),
            ("MOONCACHE_VLLM_TOOL_PARSER", "hermes"),
        ),
    )
    cluster = EmbeddedCluster(settings)
    stop_after("serving", cluster.stop)
    cluster.start(400.0)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def plain_tokens(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[list[list[int]]], list[list[int]]]:
    """Greedy tokens of a plain vLLM for token-id prompts, MAX_TOKENS each."""

    def ask(prompts: list[list[int]]) -> list[list[int]]:
        folder = tmp_path_factory.mktemp("plain")
        asked, answered, log = folder / "prompts.json", folder / "tokens.json", folder / "log"
        asked.write_text(json.dumps(prompts))
        command = [
            sys.executable,
            str(HERE / "plain_vllm.py"),
            str(model_dir),
            str(asked),
            str(answered),
            str(MAX_TOKENS),
        ]
        with log.open("wb") as output:
            done = subprocess.run(
                command,
                env={**os.environ, **ENGINE_ENV},
                stdout=output,
                stderr=output,
                timeout=400,
                check=False,
            )
        assert done.returncode == 0, log.read_text()[-3000:]
        tokens: list[list[int]] = json.loads(answered.read_text())
        return tokens

    return ask

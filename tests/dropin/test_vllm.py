"""vLLM's own connector for Mooncake Store, unchanged, on our pool: one engine's blocks are another one's hits."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pytest

import mooncache
from mooncache import tiny_model
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.dropin.transfer_engine import MooncakeTransferEngine
from tests.conditions import wait_until
from tests.dropin.conftest import COMPAT

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (scripts/install_vllm.sh)", allow_module_level=True)

BLOCK_TOKENS = 32
PROMPT_TOKENS = 257
ENGINE = """
import json, os, sys
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

llm = LLM(
    model=sys.argv[1], dtype="float32", enforce_eager=True, block_size=int(sys.argv[2]), max_model_len=1024,
    disable_log_stats=False,
    kv_transfer_config=KVTransferConfig(kv_connector="MooncakeStoreConnector", kv_role="kv_both"),
)
prompt = {"prompt_token_ids": json.loads(sys.argv[3])}
(answer,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
hits = sum(m.value for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits")
print("RESULT " + json.dumps({"tokens": list(answer.outputs[0].token_ids), "hits": hits}), flush=True)
sys.stdin.read()
os._exit(0)
"""


class Calls:
    """Which calls vLLM's sources make of what they name `owner`."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.calls: dict[str, tuple[int, set[str]]] = {}

    def look(self, path: Path) -> None:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name == self._owner:
                named = {word.arg for word in node.keywords if word.arg}
                self.calls[node.func.attr] = (len(node.args), named)

    def fit(self, ours: type) -> None:
        """Each can be made of our class as it is made there."""
        for name, (count, named) in self.calls.items():
            inspect.signature(getattr(ours, name)).bind(None, *[None] * count, **dict.fromkeys(named))


def test_every_call_that_vllm_makes_is_there(mooncake_store: ModuleType) -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    distributed = Path(str(spec.origin)).parent / "distributed"
    found = Calls("store")
    found.look(distributed / "mooncake_store.py")
    found.look(distributed / "kv_transfer/kv_connector/v1/mooncake/store/worker.py")
    assert found.calls.keys() >= {
        "setup",
        "batch_is_exist",
        "batch_put_from_multi_buffers",
        "remove_all",
        "close",
    }
    found.fit(mooncake_store.MooncakeDistributedStore)
    config = mooncake_store.ReplicateConfig()
    config.group_ids, config.preferred_segment = ["g"], "host:1"


def test_every_call_of_vllms_transfer_connector_is_there() -> None:
    """It asks for an accelerator when it begins, so no engine runs with it here."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    connector = Path(str(spec.origin)).parent / "distributed/kv_transfer/kv_connector/v1/mooncake"
    found = Calls("engine")
    found.look(connector / "mooncake_connector.py")
    assert found.calls.keys() >= {
        "initialize",
        "get_rpc_port",
        "batch_register_memory",
        "batch_transfer_sync_write",
    }
    found.fit(MooncakeTransferEngine)


def _start(
    log: IO[bytes], cluster: EmbeddedCluster, folder: Path, model: Path, prompt: list[int]
) -> subprocess.Popen[str]:
    config = folder / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": cluster.master_target,
                "protocol": "tcp",
                "mode": "standalone-store",
                "global_segment_size": 0,
            }
        )
    )
    paths = os.pathsep.join([str(COMPAT), *(path for path in sys.path if path)])
    return subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(model), str(BLOCK_TOKENS), json.dumps(prompt)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={
            **os.environ,
            "MOONCAKE_CONFIG_PATH": str(config),
            "MOONCACHE_CLUSTER_STATE_DIR": str(cluster.state_dir),
            "PYTHONPATH": paths,
            "PYTHONHASHSEED": "0",  # equal hashes of blocks in all engines
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )


def _answer(engine: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    assert engine.stdout is not None
    for line in engine.stdout:
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return found
    pytest.fail((folder / "log").read_text()[-4000:])


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mooncake_store")
def test_one_engine_computes_and_the_next_one_loads(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    model = tiny_model.build(tmp_path / "tiny", layers=2)
    chooser = random.Random(5)
    prompt = [chooser.randrange(10, 5000) for _ in range(PROMPT_TOKENS)]
    whole = PROMPT_TOKENS // BLOCK_TOKENS
    answers = []
    with mooncache.connect(**cluster.client_settings()) as client, (tmp_path / "log").open("ab") as log:
        for _ in range(2):
            engine = _start(log, cluster, tmp_path, model, prompt)
            try:
                answers.append(_answer(engine, tmp_path))
                wait_until(lambda: sum(1 for _ in client.list()) >= whole, "blocks of the prompt in the pool")
            finally:
                engine.kill()
                engine.communicate()
    first, second = answers
    assert first["hits"] == 0
    assert second["hits"] == whole * BLOCK_TOKENS
    assert second["tokens"] == first["tokens"]

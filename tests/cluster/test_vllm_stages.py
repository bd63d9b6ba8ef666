"""Two pipeline stages of real vLLM beside an engine of one: priced as such, given long prompts, equal tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache.auth import load_cluster_token, tenant_token
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from tests.conditions import wait_until
from tests.connectors.test_vllm_engine import prompt

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = [pytest.mark.vllm, pytest.mark.deep, pytest.mark.timeout(900)]

BLOCK, TOKENS = 128, 8
LONG, SHORT = 3000, 200
START_S = 400.0
# Without compiling anything: in eager mode vLLM does not make what stages pass on, on a CPU.
TWO_STAGES = (
    "--pipeline-parallel-size=2",
    "--distributed-executor-backend=mp",
    "--compilation-config.mode=2",
    "--compilation-config.backend=eager",
)
# A busy machine is slow: tokens and decisions are what is tested.
ENV = {
    "MOONCACHE_CONDUCTOR_ADMISSION_ENABLED": "false",
    "MOONCACHE_CONNECTOR_BREAK_EVEN": "false",
    "MOONCACHE_CONNECTOR_LOAD_TIMEOUT_S": "60",
    "MOONCACHE_CONNECTOR_SAVE_TIMEOUT_S": "60",
    "MOONCACHE_CONDUCTOR_SUSPECT_AFTER_S": "60",
    "MOONCACHE_CONDUCTOR_LEASE_S": "120",
    "MOONCACHE_VLLM_DTYPE": "float32",
    "MOONCACHE_VLLM_KV_CACHE_BYTES": str(1 << 30),
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mooncache import tiny_model

    return tiny_model.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """A cluster with one engine, "decode-1", and a worker of its own for the engine with stages, "staged"."""
    folder = tmp_path_factory.mktemp("stages")
    settings = ClusterSettings(
        state_dir=folder,
        engine="vllm",
        model=str(model),
        model_name="tiny",
        prefill=0,
        decode=1,
        capacity_bytes=512 << 20,
        port=0,
        conductor_port=0,
        gateway_port=0,
        extra_env=(*ENV.items(), ("MOONCACHE_VLLM_ENFORCE_EAGER", "true")),
    )
    running = EmbeddedCluster(settings)
    running.start(START_S)
    command = [sys.executable, "-m", "mooncache.cli", "worker", "--engine", "vllm", "--role", "both"]
    command += ["--model", str(model), "--model-name", "tiny", "--instance-id", "staged"]
    command += ["--conductor", running.layout.conductor_target, "--master", running.master_target]
    command += ["--state-dir", str(folder)]
    env = {**os.environ, **ENV, "MOONCACHE_VLLM_EXTRA_ARGS": ",".join(TWO_STAGES)}
    log = folder / "staged.log"
    with log.open("wb") as output:
        staged = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        try:
            wait_until(
                lambda: staged.poll() is not None or "staged" in ready(running),
                lambda: f"an engine with stages: {log.read_text(errors='replace')[-3000:]}",
                timeout_s=START_S,
                every_s=3.0,  # each look is a process of its own, which takes turns from the engine that starts
            )
            assert staged.poll() is None, log.read_text(errors="replace")[-3000:]
            yield running
        finally:
            staged.terminate()
            staged.wait(60)
            running.stop()


def ready(cluster: EmbeddedCluster) -> set[str]:
    """The instances that take requests."""
    command = [sys.executable, "-m", "mooncache.cli", "status", "--json"]
    command += ["--state-dir", str(cluster.state_dir)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    rows = json.loads(done.stdout)["serving"]["instances"] if done.returncode == 0 else ()
    return {row["instance_id"] for row in rows if row["state"] == "ready"}


def ask(cluster: EmbeddedCluster, tokens: list[int]) -> tuple[list[int], int, dict[str, Any]]:
    """The answer's token ids, the tokens that were not computed, and the decision's record."""
    body = {
        "model": "tiny",
        "prompt": tokens,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    key = tenant_token(load_cluster_token(cluster.token_path), "demo").text
    request = urllib.request.Request(
        f"{cluster.layout.gateway_url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        name, answer = response.headers["X-Request-Id"], json.load(response)
    command = [sys.executable, "-m", "mooncache.cli", "why", name, "--json"]
    command += ["--state-dir", str(cluster.state_dir)]
    record = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], int(cached), record


def computed(model: Path, prompts: list[list[int]], folder: Path) -> list[list[int]]:
    """Greedy tokens of one plain engine without a cache."""
    asked, answered, log = folder / "prompts.json", folder / "tokens.json", folder / "log"
    asked.write_text(json.dumps(prompts))
    script = Path(__file__).parent.parent / "serving" / "plain_vllm.py"
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, str(script), str(model), str(asked), str(answered), str(TOKENS)]
    with log.open("wb") as output:
        done = subprocess.run(command, env=env, stdout=output, stderr=output, timeout=START_S, check=False)
    assert done.returncode == 0, log.read_text(errors="replace")[-3000:]
    found: list[list[int]] = json.loads(answered.read_text())
    return found


def test_long_prompts_go_to_two_real_stages(model: Path, cluster: EmbeddedCluster, tmp_path: Path) -> None:
    long, short = prompt(41, LONG), prompt(42, SHORT)
    more = long + prompt(43, 100)
    for_long, for_short, for_more = computed(model, [long, short, more], tmp_path)
    tokens, cached, record = ask(cluster, long)
    assert (tokens, cached) == (for_long, 0)
    assert record["chosen"]["decode"] == "staged"
    prices = {row["instance_id"]: row["total_ms"] for row in record["inline_candidates"]}
    assert prices["staged"] < prices["decode-1"], "its prior is that of two stages"

    tokens, cached, record = ask(cluster, short)
    assert (tokens, cached) == (for_short, 0)
    assert record["chosen"]["decode"] == "decode-1", "a prompt of one chunk passes one stage after the other"

    # From here on measured speeds decide between the two. What the stages have cached counts when they are asked again.
    drain = [sys.executable, "-m", "mooncache.cli", "instance", "drain", "decode-1"]
    subprocess.run([*drain, "--state-dir", str(cluster.state_dir)], check=True, timeout=60)
    wait_until(lambda: ready(cluster) == {"staged"}, "an instance that takes nothing more")
    tokens, cached, record = ask(cluster, more)
    assert tokens == for_more
    assert record["chosen"]["decode"] == "staged"
    assert LONG // BLOCK * BLOCK <= cached <= (LONG + TOKENS) // BLOCK * BLOCK

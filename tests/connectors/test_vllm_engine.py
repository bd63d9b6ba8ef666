"""Real vLLM with the connector: two servers and one pool. Hits are counted, tokens compared with transformers' own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from tests.conditions import wait_until
from tests.docs.blocks import block
from tests.ports import own_port
from tests.processes import end_with_parent

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK_TOKENS = 32
MAX_TOKENS = 12
LENGTHS = (100, 257, 700, 1024, 2048)
LAYERS = 4  # of the small model
START_S = 400.0


def prompt(seed: int, count: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(10, 8000) for _ in range(count)]


class Server:
    """`vllm serve` with the connector."""

    def __init__(self, model: Path, cluster: EmbeddedCluster, folder: Path, **extra: Any) -> None:
        self.port = own_port()
        self.passport = folder / "passport.json"
        shown = shlex.split(block("docs/vllm-connector.md", "vllm serve").text)
        assert shown[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
        assert shown[-2] == "--kv-transfer-config"
        connector = {
            **json.loads(shown[-1]),
            "kv_connector_extra_config": {
                "mooncache.state_dir": str(cluster.state_dir),
                "mooncache.master_targets": cluster.master_target,
                "mooncache.passport_path": str(self.passport),
                **{f"mooncache.{name}": value for name, value in extra.items()},
            },
        }
        self.log: IO[bytes] = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("vllm")), "serve", str(model)),
                *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)),
                *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_TOKENS)),
                *("--max-model-len", "4096", "--distributed-executor-backend", "uni"),
                *(*shown[3:-1], json.dumps(connector)),
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509
            env={
                **os.environ,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_SERVER_DEV_MODE": "1",  # routes that change weights
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines bound to one core wait for each other
            },
        )

    def wait_healthy(self) -> None:
        def healthy() -> bool:
            assert self.process.poll() is None, self.tail()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return True
            return False

        wait_until(healthy, self.tail, START_S, every_s=0.5)

    def wait_for_pool(self) -> None:
        """Until a lookup is answered: the first one connects, and beside a busy machine's other work it may be late."""

        def answered() -> bool:
            return self.complete(prompt(9000, 100), max_tokens=1)["reported"]["outcome"] in {"hit", "miss"}

        wait_until(answered, self.tail)

    def tail(self) -> str:
        return "\n".join(Path(self.log.name).read_text(errors="replace").splitlines()[-40:])

    def complete(self, tokens: list[int], *, max_tokens: int = MAX_TOKENS, **ask: Any) -> dict[str, Any]:
        body = {
            "model": "tiny",
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": {"mooncache": {"v": 1, "role": "both", **ask}},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            content = json.loads(answer.read())
        details = content["usage"].get("prompt_tokens_details") or {}
        return {
            "tokens": content["choices"][0]["token_ids"],
            "cached": details.get("cached_tokens") or 0,
            "reported": content["kv_transfer_params"]["mooncache"],
        }

    def post(self, path: str, body: Any = None) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body or {}).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=120).read()

    def reload_weights(self, folder: Path) -> None:
        """Other weights into memory, as a trainer does; vLLM's own cache is emptied, as its documentation asks for."""
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self.post("/reset_prefix_cache")

    def metric(self, name: str, label: str = "") -> float:
        """Sum over all labels, or over those with one."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10).read().decode()
        found = re.findall(rf"^{name}(?:\{{[^}}]*{label}[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return sum(map(float, found))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(60)
        self.log.close()


@pytest.fixture(scope="module")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mooncache import tiny_model

    return tiny_model.build(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("pool"), nodes=1, capacity_bytes=512 << 20, port=0
    )
    with EmbeddedCluster(settings) as running:
        yield running


@pytest.fixture(scope="module")
def servers(
    engine_model: Path, cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """One that saves block by block after each step, and one that saves layer by layer."""
    # A busy machine takes the pool's processor away for seconds; what is late must not count as lost here.
    patient = {"load_timeout_s": 60, "save_timeout_s": 60, "break_even": False}
    first = Server(engine_model, cluster, tmp_path_factory.mktemp("first"), layerwise=True, **patient)
    second = Server(engine_model, cluster, tmp_path_factory.mktemp("second"), **patient)
    try:
        for server in (first, second):
            server.wait_healthy()
            server.wait_for_pool()
        yield first, second
    finally:
        first.stop()
        second.stop()


@pytest.fixture(scope="module")
def oracle(engine_model: Path) -> Any:
    """Greedy tokens by transformers, without vLLM and without any cache of ours."""
    return greedy_by_transformers(engine_model)


def greedy_by_transformers(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(tokens: list[int], count: int = MAX_TOKENS) -> list[int]:
        with torch.no_grad():
            made = model.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
            )
        return made[0, len(tokens) :].tolist()

    return greedy


def complete_tokens(count: int) -> int:
    return count // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", LENGTHS)
def test_another_engine_gives_the_same_tokens_from_the_pool(
    servers: tuple[Server, Server], oracle: Any, length: int
) -> None:
    tokens = prompt(length, length)
    first, second = servers
    cold = first.complete(tokens)
    assert (cold["cached"], cold["reported"]["outcome"]) == (0, "miss")
    whole = complete_tokens(length)
    # The first engine's saves may still be under way: the second waits for them as a decode instance does.
    hot = second.complete(tokens, role="decode", wait_tokens=whole, wait_ms=60_000)
    assert hot["reported"]["outcome"] == "hit"
    assert hot["reported"]["loaded_tokens"] == whole
    assert hot["cached"] == whole
    assert hot["tokens"] == cold["tokens"] == oracle(tokens)


@pytest.mark.filterwarnings("ignore")
def test_prefill_and_decode_at_the_same_time(servers: tuple[Server, Server], oracle: Any) -> None:
    first, second = servers
    prompts = [prompt(5000 + number, 300 + 97 * number) for number in range(6)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        legs = [
            (
                pool.submit(second.complete, tokens, role="decode", wait_tokens=len(tokens), wait_ms=60_000),
                pool.submit(first.complete, tokens, max_tokens=1, role="prefill"),
            )
            for tokens in prompts
        ]
        for tokens, (decode, prefill) in zip(prompts, legs, strict=True):
            sent, answer = prefill.result()["reported"], decode.result()
            assert sent["outcome"] in {"miss", "failed"}, (
                sent
            )  # failed: the pool was late to say that it is a miss
            reports = json.dumps({"prefill": sent, "decode": answer["reported"]}, indent=1)
            assert answer["reported"]["loaded_tokens"] == complete_tokens(len(tokens)), reports
            assert answer["cached"] == complete_tokens(len(tokens))
            assert answer["tokens"] == oracle(tokens)


@pytest.mark.filterwarnings("ignore")
def test_blocks_are_loaded_while_others_are_computed(servers: tuple[Server, Server], oracle: Any) -> None:
    """By now the second engine has measured its loads, and streams."""
    first, second = servers
    tokens = prompt(5500, 1510)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        more = {"wait_tokens": len(tokens), "wait_ms": 60_000, "store_node": "node-1"}
        decode = pool.submit(second.complete, tokens, role="decode", **more)
        pool.submit(first.complete, tokens, max_tokens=1, role="prefill", store_node="node-1").result()
        answer = decode.result()
    assert answer["tokens"] == oracle(tokens)
    assert answer["reported"]["loaded_tokens"] == answer["cached"] == complete_tokens(len(tokens))
    assert answer["reported"]["waited_ms"] > 0
    assert second.metric("mooncache_connector_awaiting_requests_total", 'place="streamed"') > 0


@pytest.mark.filterwarnings("ignore")
def test_the_next_turn_finds_what_decoding_made(servers: tuple[Server, Server], oracle: Any) -> None:
    first, second = servers
    tokens = prompt(6000, 150)
    turn = second.complete(tokens, max_tokens=100)
    assert (
        turn["reported"]["saved_blocks"] == 7
    )  # the last token's KV is never computed: 249 tokens are 7 blocks
    longer = tokens + turn["tokens"] + prompt(6001, 20)
    answer = first.complete(longer, wait_tokens=224, wait_ms=60_000)
    assert answer["reported"]["loaded_tokens"] == 224
    assert answer["tokens"] == oracle(longer)


@pytest.mark.filterwarnings("ignore")
def test_weights_that_change_in_a_running_engine_begin_new_keys(
    servers: tuple[Server, Server], oracle: Any, engine_model: Path, tmp_path: Path
) -> None:
    from mooncache import tiny_model

    first, second = servers
    other = tiny_model.build(tmp_path / "other", seed=7)
    trained = greedy_by_transformers(other)
    tokens, whole = prompt(8000, 300), complete_tokens(300)
    assert first.complete(tokens)["tokens"] == oracle(tokens) != trained(tokens)
    hot = second.complete(tokens, wait_tokens=whole, wait_ms=60_000)
    assert (hot["cached"], hot["tokens"]) == (whole, oracle(tokens))
    before = first.passport.read_text()
    for server in servers:
        server.reload_weights(other)
    answer = first.complete(tokens)
    assert answer["tokens"] == trained(tokens)
    assert (answer["cached"], answer["reported"]["hit_tokens"]) == (0, 0)
    shared = second.complete(tokens, wait_tokens=whole, wait_ms=60_000)
    assert shared["tokens"] == trained(tokens)
    assert (shared["cached"], shared["reported"]["loaded_tokens"]) == (whole, whole)
    assert first.passport.read_text() == second.passport.read_text() != before
    for server in servers:
        server.reload_weights(engine_model)
    again = second.complete(tokens)
    assert again["tokens"] == oracle(tokens)
    assert again["reported"]["loaded_tokens"] == whole  # the blocks of these weights are still there
    first.complete(tokens)
    assert first.passport.read_text() == second.passport.read_text() == before


def test_layers_are_saved_while_others_are_computed(servers: tuple[Server, Server], oracle: Any) -> None:
    """The result is the same when vLLM calls no hook: only the count says that it does."""
    first, second = servers
    before = first.metric("mooncache_connector_hooked_layers_total")
    tokens = prompt(8500, 200)
    assert first.complete(tokens)["tokens"] == oracle(tokens)

    def hooked() -> bool:
        return first.metric("mooncache_connector_hooked_layers_total") - before >= LAYERS

    wait_until(hooked, "a call for each layer of the step that computed the prompt")
    assert second.metric("mooncache_connector_hooked_layers_total") == 0
    answer = second.complete(tokens, wait_tokens=192, wait_ms=60_000)
    assert (answer["reported"]["loaded_tokens"], answer["tokens"]) == (192, oracle(tokens))


def test_metrics_tell_what_happened(servers: tuple[Server, Server]) -> None:
    first, second = servers
    assert first.metric("mooncache_connector_saved_blocks_total") > 0
    assert second.metric("mooncache_connector_loaded_bytes_total") > 0
    assert second.metric("mooncache_connector_load_seconds_count") > 0
    assert second.metric("mooncache_connector_pool_up") == 1
    assert second.metric("mooncache_connector_defects_total") == 0
    assert first.metric("mooncache_connector_defects_total") == 0
    assert second.metric("vllm:external_prefix_cache_hits_total") > 0


def test_the_hand_over_file_is_there_and_equal(servers: tuple[Server, Server]) -> None:
    first, second = (json.loads(server.passport.read_text()) for server in servers)
    assert first["passport"] == second["passport"]
    assert first["engine_version"].startswith("0.3")
    assert first["pool"] is True


@pytest.mark.filterwarnings("ignore")
def test_when_the_pool_dies_the_engines_compute(
    servers: tuple[Server, Server], cluster: EmbeddedCluster, oracle: Any
) -> None:
    """Runs last: there is no pool afterwards."""
    _, second = servers
    cluster.kill("node-1")
    for number in range(3):
        tokens = prompt(7000 + number, 200)
        answer = second.complete(tokens, role="decode", wait_tokens=192, wait_ms=500)
        assert answer["tokens"] == oracle(tokens)
        assert answer["reported"]["hit_tokens"] == 0
        assert answer["reported"]["outcome"] in {"pool_absent", "failed", "timeout", "miss"}
    assert second.process.poll() is None

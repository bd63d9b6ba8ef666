"""The small model once for all runs, engines in this process, a real pool, and one engine behind HTTP."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import mooncache
from mooncache import tiny_model
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.config import load
from mooncache.hf_engine.core.sequence import Sampling, Sequence
from mooncache.hf_engine.output import Output
from mooncache.hf_engine.service import HfOptions, Parts, build
from mooncache.kvcache.leg_hint import CacheReport, LegHint
from tests.conditions import wait_until
from tests.ports import own_port

MODEL = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "vocab": 2048, "max_positions": 2048}
BLOCK = 16
WAIT_S = 60.0
API_KEY = "mce1.test"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """Kept in the system's temporary folder under its parameters: other runs find it there."""
    name = "-".join(f"{key[0]}{value}" for key, value in MODEL.items())
    return tiny_model.build(
        Path(tempfile.gettempdir()) / f"mooncache-test-model-{os.getuid()}-{name}", **MODEL
    )


@dataclass
class Collector:
    """A sink: what came for one sequence, and an event for its end."""

    outputs: list[Output] = field(default_factory=list)
    first: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def put(self, output: Output) -> None:
        self.outputs.append(output)
        self.first.set()
        if output.finish:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [output.chosen.token for output in self.outputs if output.chosen]

    @property
    def finish(self) -> str:
        return self.outputs[-1].finish

    @property
    def cache(self) -> CacheReport:
        cache = self.outputs[-1].cache
        assert cache is not None
        return cache


class Lab:
    """One engine in this process and easy ways to use it."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.engine = parts, parts.engine

    def sequence(
        self, prompt: list[int], *, tokens: int = 12, hint: LegHint | None = None, salt: str = "", **more: Any
    ) -> Sequence:
        more.setdefault("temperature", 0.0)
        return Sequence(
            tokens=list(prompt),
            sampling=Sampling(max_tokens=tokens, **more),
            passport=self.parts.passport,
            block_tokens=self.parts.passport.block_tokens,
            salt=salt,
            hint=hint or LegHint(),
            sink=Collector(),
        )

    def submit(self, *prompts: list[int], **more: Any) -> list[Sequence]:
        sequences = [self.sequence(prompt, **more) for prompt in prompts]
        self.engine.submit(sequences)
        return sequences

    def run(self, *prompts: list[int], **more: Any) -> list[Collector]:
        """Generate for all at once and wait for the ends."""
        sequences = self.submit(*prompts, **more)
        for sequence in sequences:
            assert sequence.sink.ended.wait(WAIT_S), "no end in time"
        return [sequence.sink for sequence in sequences]

    def tokens(self, *prompts: list[int], **more: Any) -> list[list[int]]:
        return [collector.tokens for collector in self.run(*prompts, **more)]

    def on_engine(self, call: Callable[[], Any]) -> Any:
        """Run something on the engine's thread and return what it returns."""
        done, found = threading.Event(), []

        def action() -> None:
            found.append(call())
            done.set()

        self.engine.post(action)
        assert done.wait(WAIT_S)
        return found[0]

    def forget(self) -> None:
        """Empty the engine's own cache."""
        self.on_engine(self.engine.blocks.forget)

    def settled(self) -> None:
        """Wait until everything is saved and let go of, then check that nothing leaked."""
        wait_until(
            lambda: self.parts.pool is None or not self.parts.pool.mover.saving_bytes, "saves are done"
        )
        wait_until(lambda: self.on_engine(lambda: self.engine._pinned == 0), "pins are released")
        wait_until(lambda: self.engine.unfinished == 0, "sequences are over")
        self.on_engine(self.engine.scheduler.check)
        assert self.on_engine(lambda: self.engine.blocks.free_count) == self.engine.blocks.count


@pytest.fixture
def make_lab(model_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """Engines of a test, ended with it. `connect` is the pool; settings are those of the sections hf and connector."""
    running: list[Parts] = []

    def make(connect: Callable[[], Any] | None = None, **settings: Any) -> Lab:
        values = {"hf.block_tokens": BLOCK, "hf.kv_cache_bytes": 16 << 20, "cluster.state_dir": str(tmp_path)}
        values |= {"connector.enabled": connect is not None}
        values |= {
            "connector.break_even": False
        }  # a model so small computes faster than a busy machine loads
        values |= {name.replace("__", "."): value for name, value in settings.items()}
        parts = build(load(env={}, overrides=values), HfOptions(model=str(model_folder)), connect)
        parts.start()
        running.append(parts)
        if connect is not None and parts.pool is not None and getattr(connect, "reachable", True):
            assert parts.pool.link.connected.wait(WAIT_S), "the pool is found"
        return Lab(parts)

    yield make
    for parts in running:
        parts.stop()


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    """An engine without a pool."""
    return make_lab()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """A pool that no test of the module may break."""
    running = start_cluster(tmp_path_factory.mktemp("pool"))
    yield running
    running.stop()


@pytest.fixture
def connect(cluster: EmbeddedCluster) -> Callable[[], mooncache.Client]:
    """Makes clients of that pool."""
    return lambda: mooncache.connect(**cluster.client_settings())


@dataclass
class Server:
    """An engine process."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    passport: Path


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One engine behind HTTP for the tests of a module, without a pool."""
    running = start_server(model_folder, tmp_path_factory.mktemp("server"))
    yield running
    end(running.process)


def start_server(model_folder: Path, folder: Path, **env: str) -> Server:
    port = own_port()
    log, passport = folder / "engine.log", folder / "passport.json"
    command = [sys.executable, "-m", "mooncache.hf_engine", "--model", str(model_folder)]
    command += ["--served-model-name", "tiny", "--port", str(port), "--passport-path", str(passport)]
    settings = {
        "OMP_NUM_THREADS": "1",
        "MOONCACHE_STATE_DIR": str(folder / "state"),
        "MOONCACHE_HF_KV_CACHE_BYTES": str(16 << 20),
        "MOONCACHE_HF_BLOCK_TOKENS": str(BLOCK),
        "MOONCACHE_ENGINE_API_KEY": API_KEY,
        "MOONCACHE_CONNECTOR_BREAK_EVEN": "false",  # as above
        **env,
    }
    with log.open("wb") as file:
        process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=file, stderr=file)
    server = Server(f"http://127.0.0.1:{port}", process, log, passport)

    def healthy() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            asked = urllib.request.Request(
                f"{server.url}/health", headers={"Authorization": f"Bearer {API_KEY}"}
            )
            with urllib.request.urlopen(asked, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_until(healthy, "the engine is healthy")
    except BaseException:
        process.kill()
        process.wait(60)
        raise
    return server


def end(process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> int:
    """End by SIGTERM; the exit status."""
    process.terminate()
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(60)
        raise


def start_cluster(folder: Path) -> EmbeddedCluster:
    running = EmbeddedCluster(ClusterSettings(state_dir=folder, nodes=1, capacity_bytes=128 << 20, port=0))
    running.start()
    return running


def prompt(count: int, seed: int = 0) -> list[int]:
    """Random tokens, without the special ones."""
    source = random.Random(f"{count} {seed}")
    return [source.randrange(300, MODEL["vocab"]) for _ in range(count)]

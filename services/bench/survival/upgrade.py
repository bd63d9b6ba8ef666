"""A rolling upgrade of every process under load, to another version and back: failed requests, lost blocks, hits.

Clients ask the same questions over and over, each time on a connection of its own, and compare the answers with those
of an empty cache. Another client reads blocks that have two copies. The other version is this code under another
number, or an older build that `MOONCACHE_TEST_UPGRADE_FROM` names (`mooncache.bench.other_version`).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

import mooncache
from mooncache import tiny_model
from mooncache.bench.other_version import OtherVersion, make_other_version
from mooncache.bench.serving.talk import ask
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.settings import EngineKind
from mooncache.errors import DeadlineExceeded, EngineFailed, Internal, MooncacheError
from mooncache.reporting.rows import Row, bar_row

MODEL: Final = "tiny"
_CLIENTS: Final = 3
_BLOCKS: Final = 200
_BLOCK: Final = 16 << 10
_PAUSE_S: Final = 0.005  # between two reads of blocks: they are watched, not measured
_CALL_S: Final = 120.0
_START_S: Final = 300.0
_STEP: Final = "5min"
_ROUNDS_MAX_S: Final = 300.0
_HIT_RATIO: Final = 0.99
_SHARED: Final = "The pool keeps what was computed once. " * 12
QUESTIONS: Final = tuple(
    f"{_SHARED} Question {number}: what comes after {number * 37}?" for number in range(4)
)


@dataclass
class RepeatedQuestions:
    """Clients that ask the same questions again and again, and compare the answers."""

    url: str
    key: str
    expected: dict[str, str] = field(default_factory=dict)
    right: int = 0
    failed: list[str] = field(default_factory=list)
    stopped: bool = False
    _prompt_tokens: int = 0
    _cached_tokens: int = 0

    async def learn(self) -> None:
        """What is answered when nothing is cached. Raises EngineFailed."""
        async with aiohttp.ClientSession() as session:
            for question in QUESTIONS:
                body = _body(question, cache_salt=f"apart {question[-24:]}")
                found = await ask(session, self.url, self.key, body, _CALL_S)
                if found.error or found.cached_tokens:
                    raise EngineFailed(found.error or "A prompt with a salt of its own was cached.")
                self.expected[question] = found.text

    async def client(self, number: int) -> None:
        """Ask until it is stopped."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            while not self.stopped:
                question, number = QUESTIONS[number % len(QUESTIONS)], number + 1
                found = await ask(session, self.url, self.key, _body(question), _CALL_S)
                if found.error or found.text != self.expected[question]:
                    when = time.strftime("%H:%M:%S", time.gmtime())
                    self.failed.append(f"{when} {found.error or f'other tokens: {found.text!r}'}")
                    continue
                self.right += 1
                self._prompt_tokens += found.prompt_tokens
                self._cached_tokens += found.cached_tokens

    async def answered(self, count: int) -> None:
        """Wait for so many more right answers. Raises DeadlineExceeded."""
        wanted, deadline_s = self.right + count, time.monotonic() + _ROUNDS_MAX_S
        while self.right < wanted:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"Too few answers within {_ROUNDS_MAX_S:g} s; {self.failed[-1:]}")
            await asyncio.sleep(0.05)

    async def hit_ratio(self, count: int) -> float:
        """Cached tokens over prompt tokens of so many answers from now on."""
        self._cached_tokens = self._prompt_tokens = 0
        await self.answered(count)
        return self._cached_tokens / max(1, self._prompt_tokens)


def _body(question: str, **more: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **more}


class WatchedBlocks:
    """Blocks with two copies that are read over and over, and compared, until `end`."""

    def __init__(self, client: mooncache.Client) -> None:
        self._client = client
        self._values = {
            f"watched-{number}": number.to_bytes(4, "little") * (_BLOCK // 4) for number in range(_BLOCKS)
        }
        client.put_many(list(self._values), list(self._values.values()), replicas=2).raise_for_errors()
        self.right = 0
        self.wrong: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="reader")
        self._thread.start()

    def _read(self) -> None:
        while not self._ended.is_set():
            for key, value in self._values.items():
                if self._ended.wait(_PAUSE_S):
                    return
                try:
                    found = self._client.get(key)
                except MooncacheError as error:
                    self.wrong.append(f"{key}: {error.name}")
                    continue
                if found == value:
                    self.right += 1
                else:
                    self.wrong.append(f"{key}: {'a miss' if found is None else 'other bytes'}")

    def end(self) -> None:
        """Stop reading."""
        self._ended.set()
        self._thread.join()

    def lost(self) -> list[str]:
        """Keys of the blocks that are no longer there as they were put."""
        return [key for key, value in self._values.items() if self._client.get(key) != value]


@dataclass(frozen=True, slots=True)
class Upgraded:
    """What was seen on the way there and back."""

    there: dict[str, Any]
    back: dict[str, Any]
    answers: int
    failed: list[str]
    reads: int
    wrong_reads: list[str]
    lost_blocks: list[str]
    hit_ratio_before: float
    hit_ratio_after: float


@contextmanager
def supervised(folder: Path, model: Path, *, prefill: int) -> Iterator[EmbeddedCluster]:
    """All that `mooncache up` starts, with two engines that generate, and its supervisor in a thread."""
    settings = ClusterSettings(
        state_dir=folder,
        nodes=2,
        capacity_bytes=64 << 20,
        keep_memory=True,
        port=0,
        conductor_port=0,
        gateway_port=0,
        engine=EngineKind.HF,
        model=str(model),
        model_name=MODEL,
        prefill=prefill,
        decode=2,
        extra_env=(
            ("OMP_NUM_THREADS", "1"),
            ("MOONCACHE_CONNECTOR_BREAK_EVEN", "false"),
            # An engine that has just started on a busy machine is slower than the usual promises, and a request that
            # is refused for them says nothing about the upgrade.
            ("MOONCACHE_CONDUCTOR_TTFT_SLO_S", "300"),
            ("MOONCACHE_CONDUCTOR_TBT_SLO_S", "30"),
            # Nor does an instance whose report is late because the machine is busy, while the other one starts again.
            ("MOONCACHE_CONDUCTOR_SUSPECT_AFTER_S", "20"),
            ("MOONCACHE_CONDUCTOR_LEASE_S", "60"),
        ),
    )
    cluster, stop = EmbeddedCluster(settings), threading.Event()
    cluster.start(_START_S)
    supervisor = threading.Thread(target=cluster.supervise, args=(lambda _name, _news: None, stop.is_set))
    supervisor.start()
    try:
        yield cluster
    finally:
        stop.set()
        supervisor.join()
        cluster.stop()


def upgrade_with(python: str | Path, folder: Path, *options: str) -> dict[str, Any]:
    """`mooncache upgrade` of the version that an interpreter has; its document. Raises Internal when it fails."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("MOONCACHE_")}
    if str(python) != sys.executable:
        env = {key: value for key, value in env.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    arguments = ["upgrade", "--json", "--state-dir", str(folder), "--timeout", _STEP, *options]
    done = subprocess.run(
        [str(python), "-m", "mooncache.cli", *arguments], env=env, capture_output=True, check=False
    )
    if done.returncode:
        raise Internal(f"mooncache upgrade: {done.stdout.decode()[-2000:]}{done.stderr.decode()[-2000:]}")
    return dict(json.loads(done.stdout))


def there_and_back(
    cluster: EmbeddedCluster, other: OtherVersion, rounds: int, progress: Callable[[str], None]
) -> Upgraded:
    """Upgrade a cluster under load to the other version and back to this one.

    Args:
        rounds: answers to every question for each hit ratio.
    """
    load = RepeatedQuestions(cluster.layout.gateway_url, cluster.demo_key_path.read_text().strip())
    with mooncache.connect(**cluster.client_settings(), timeout_s=20.0) as client:
        blocks = WatchedBlocks(client)
        try:
            found = asyncio.run(_under_load(cluster, other, load, rounds * len(QUESTIONS), progress))
        finally:
            blocks.end()
        there, back, before, after = found
        return Upgraded(
            there, back, load.right, load.failed, blocks.right, blocks.wrong, blocks.lost(), before, after
        )


async def _under_load(
    cluster: EmbeddedCluster,
    other: OtherVersion,
    load: RepeatedQuestions,
    count: int,
    progress: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Any], float, float]:
    await load.learn()
    clients = [asyncio.create_task(load.client(number)) for number in range(_CLIENTS)]
    try:
        await load.answered(count)  # until all is cached
        before = await load.hit_ratio(count)
        progress("to the other version")
        there = await asyncio.to_thread(upgrade_with, other.python, cluster.state_dir)
        progress("and back")
        back = await asyncio.to_thread(upgrade_with, sys.executable, cluster.state_dir)
        after = await load.hit_ratio(count)
    finally:
        load.stopped = True
        await asyncio.gather(*clients)
    return there, back, before, after


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Failed requests, lost blocks, and the hit ratio after the way there and back over the one before."""
    progress("starting a pool of two nodes and three engines")
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-") as made:
        other = make_other_version(Path(made) / "other")
        model = tiny_model.build(Path(made) / "model", layers=2, hidden=128, heads=4, kv_heads=2, vocab=2048)
        with supervised(Path(made) / "state", model, prefill=1) as cluster:
            seen = there_and_back(cluster, other, 3 if quick else 20, progress)
    steps = [step["seconds"] for way in (seen.there, seen.back) for step in way["rolled"]]
    return [
        Row("processes restarted", float(len(steps)), ""),
        Row("longest wait for one", max(steps), "s"),
        Row("requests meanwhile", float(seen.answers), ""),
        bar_row("failed requests", float(len(seen.failed)), "", at_most=0),
        Row("reads of blocks meanwhile", float(seen.reads), ""),
        bar_row("reads that found no block", float(len(seen.wrong_reads)), "", at_most=0),
        bar_row("lost blocks", float(len(seen.lost_blocks)), "", at_most=0),
        bar_row(
            "hit ratio after",
            seen.hit_ratio_after,
            "",
            against="before",
            reference=seen.hit_ratio_before,
            at_least=_HIT_RATIO,
        ),
    ]

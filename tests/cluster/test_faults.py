"""`mooncache up` under load while every process in turn is killed or stopped: no wrong token, and it always comes back.

Every answer is compared with what the same engine says alone, without a pool: a stricter judge than that of
`mooncache chaos run`, which has no engine beside the cluster. The processes are found and looked at in the same way.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mooncache.bench.serving.talk import ChatReply, ask
from mooncache.chaos.shell import processes
from mooncache.chaos.shell.health import not_well
from mooncache.client.state_dir import PartView, read_cluster_file
from mooncache.cluster.processes import processes_of_run
from mooncache.cluster.settings import missing_modules
from tests.cli.test_cluster import Up, environment, read_document
from tests.conditions import until
from tests.hf_engine.conftest import API_KEY, end, model_folder, start_server
from tests.processes import freeze

__all__ = ["model_folder"]  # a fixture

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_modules("hf")), reason="needs the small engine: pip install 'mooncache[hf]'"
    ),
]
CLIENTS = 3
HEAL_S = 120.0
STOPPED_S = 3.0
HANG_S = 10.0
SHARED = "The pool keeps what was computed once. " * 12
QUESTIONS = tuple(f"{SHARED} Question {number}: what comes after {number * 37}?" for number in range(5))
PARTS = ("master", "node-1", "conductor", "gateway", "prefill-1", "decode-1")
ENGINES = ("prefill-1", "decode-1")
# While one of these is away its own streams end, with an error that says so; whoever asks again is served.
MAY_FAIL = {"gateway", "decode-1", "engine of decode-1"}


def body_of(question: str) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 12,
        "temperature": 0,
    }


@pytest.fixture(scope="module")
def expected(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the engine answers when it computes everything itself."""

    async def answers(url: str) -> dict[str, str]:
        async with aiohttp.ClientSession() as session:
            found = {text: await ask(session, url, API_KEY, body_of(text), 60) for text in QUESTIONS}
        assert all(not answer.error and answer.text for answer in found.values()), found
        return {text: answer.text for text, answer in found.items()}

    server = start_server(model_folder, tmp_path_factory.mktemp("alone"))
    try:
        return asyncio.run(answers(server.url))
    finally:
        end(server.process)


@pytest.fixture(scope="module")
def up(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("faults")
    ports = ["--port", "0", "--conductor-port", "0", "--master-port", "0"]
    sizes = ["--prefill", "1", "--decode", "2", "--capacity", "128MiB"]
    engine = ["--engine", "hf", "--model", str(model_folder), "--model-name", "tiny"]
    env = {
        **environment(folder),
        "OMP_NUM_THREADS": "1",
        "MOONCACHE_CLUSTER_HANG_TIMEOUT_S": str(HANG_S),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncache.cli", "up", "--json", *ports, *sizes, *engine],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    running = Up(process, folder, read_document(process, 240))
    run = str(json.loads((folder / "cluster.json").read_text())["run_id"])
    yield running
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert process.stdout is not None
    process.stdout.close()
    assert not processes_of_run(run)


@dataclass
class Load:
    """Clients that ask the same questions again and again while something breaks."""

    up: Up
    key: str
    expected: dict[str, str]
    right: int = 0
    cached_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    stop: bool = False

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        serving = self.up.announced["serving"]
        turn = number
        while not self.stop:
            question = QUESTIONS[turn % len(QUESTIONS)]
            turn += 1
            url = serving["base_url"].removesuffix("/v1")
            self.judge(question, await ask(session, url, self.key, body_of(question), HEAL_S))

    def judge(self, question: str, answer: ChatReply) -> None:
        if answer.error:
            self.errors.append(answer.error)
        elif answer.text == self.expected[question]:
            self.right += 1
            self.cached_tokens += answer.cached_tokens
        else:
            self.wrong.append(f"{question[-40:]!r}: {answer.text!r}, not {self.expected[question]!r}")


def parts_of(up: Up) -> dict[str, PartView]:
    """The processes as the supervisor describes them."""
    found = read_cluster_file(up.folder)
    assert found is not None
    return {part.name: part for part in found.parts}


def pid_of(up: Up, target: str) -> int:
    """Process id of a part, or of the engine below a worker."""
    pid = processes.pid_of(up.folder, target.removeprefix("engine of "))
    return processes.engine_below(pid) if target.startswith("engine of ") else pid


async def well(up: Up) -> bool:
    return not await not_well(up.folder)


async def under_load(up: Up, expected: dict[str, str], breaks: Callable[[], Any]) -> Load:
    """Load before, during and after `breaks`; ends once everything is well and has answered again."""
    key = await asyncio.to_thread(Path(up.announced["serving"]["api_key_file"]).read_text)
    load = Load(up, key.strip(), expected)
    async with aiohttp.ClientSession() as session:
        clients = [asyncio.create_task(load.client(session, number)) for number in range(CLIENTS)]
        try:
            await until(lambda: load.right >= CLIENTS, "answers before the fault", HEAL_S, every_s=0.2)
            await breaks()
            await until(lambda: well(up), "every part is well again", HEAL_S, every_s=0.2)
            answered = load.right
            await until(
                lambda: load.right >= answered + 2 * CLIENTS, "answers after the fault", HEAL_S, every_s=0.2
            )
        finally:
            load.stop = True
            await asyncio.gather(*clients)
    return load


def judge(load: Load, target: str) -> None:
    assert load.wrong == []
    assert load.cached_tokens > 0, "the pool was used"
    if target not in MAY_FAIL:
        assert load.errors == [], target


@pytest.mark.parametrize("target", [*PARTS, *(f"engine of {name}" for name in ENGINES)])
def test_killed(up: Up, expected: dict[str, str], target: str) -> None:
    async def breaks() -> None:
        pid = pid_of(up, target)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: processes.is_gone(pid), f"{target} has ended", HEAL_S, every_s=0.2)
        # The engine is its worker's business; a part's new process is in the list.
        if target in PARTS:
            await until(
                lambda: pid_of(up, target) not in (0, pid), f"{target} runs again", HEAL_S, every_s=0.2
            )

    judge(asyncio.run(under_load(up, expected, breaks)), target)


@pytest.mark.parametrize("target", [*PARTS, *(f"engine of {name}" for name in ENGINES)])
def test_stopped_for_a_moment(up: Up, expected: dict[str, str], target: str) -> None:
    async def breaks() -> None:
        pid = pid_of(up, target)
        await asyncio.to_thread(freeze, pid)
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            os.kill(pid, signal.SIGCONT)

    judge(asyncio.run(under_load(up, expected, breaks)), target)


def test_stopped_for_good(up: Up, expected: dict[str, str]) -> None:
    """Nobody wakes it: the supervisor kills it and starts another one."""

    async def breaks() -> None:
        pid = pid_of(up, "node-1")
        await asyncio.to_thread(freeze, pid)
        await until(
            lambda: pid_of(up, "node-1") != pid, "another process has taken its place", HEAL_S, every_s=0.2
        )

    judge(asyncio.run(under_load(up, expected, breaks)), "node-1")
    assert parts_of(up)["node-1"].last_end.startswith("signal SIGKILL")

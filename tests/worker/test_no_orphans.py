"""However a worker ends, nothing of its engine is left, not even what the engine started in other sessions."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from pathlib import Path

import pytest

from mooncache.worker import guard
from mooncache.worker.adapters.base import section_env
from tests.conditions import until
from tests.worker.support import alive, conductor, marked, settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_the_end_of_a_worker_is_the_end_of_its_engine(tmp_path: Path, how: signal.Signals) -> None:
    mark = f"MOONCACHE_TEST_MARK={secrets.token_hex(8)}"
    async with conductor(settings(tmp_path)) as found:
        config = settings(tmp_path, found.port, worker__drain_timeout_s=0.5)
        env = {key: value for key, value in os.environ.items() if not key.startswith("MOONCACHE_")}
        for name, value in section_env(config, ("cluster", "worker", "conductor")).items():
            env[name] = value or ""
        env |= dict([mark.split("=")]) | {"PYTHONPATH": str(ROOT)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "mooncache.worker", env=env, cwd=ROOT
        )
        try:
            await until(lambda: found.state() == 2, "ready")
            pids = marked(mark)
            assert len(pids) == 4, "worker, guard, engine and its grandchild"
            process.send_signal(how)
            code = await asyncio.wait_for(process.wait(), 60)
            assert code == (-how if how == signal.SIGKILL else 0)
            await until(lambda: not marked(mark), "all processes are gone")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert not any(alive(pid) for pid in pids)


async def test_a_killed_guard_takes_the_engine_along(tmp_path: Path) -> None:
    mark = f"MOONCACHE_TEST_MARK={secrets.token_hex(8)}"
    read_end, lifeline = os.pipe()
    script = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        guard.__file__,
        str(read_end),
        sys.executable,
        "-c",
        script,
        pass_fds=(read_end,),
        env=os.environ | dict([mark.split("=")]),
        process_group=0,
    )
    os.close(read_end)
    try:
        await until(lambda: len(marked(mark)) == 3, "guard, engine, child")
        process.kill()
        await process.wait()
        await until(lambda: len(marked(mark)) <= 1, "the engine is gone")
    finally:
        os.close(lifeline)
        os.killpg(process.pid, signal.SIGKILL)
    await until(lambda: not marked(mark), "the group was killed")


@pytest.mark.parametrize(
    ("script", "code"), [("raise SystemExit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 137)]
)
async def test_the_guard_ends_as_the_engine_did(script: str, code: int) -> None:
    read_end, lifeline = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, guard.__file__, str(read_end), sys.executable, "-c", script, pass_fds=(read_end,)
    )
    os.close(read_end)
    assert await asyncio.wait_for(process.wait(), 60) == code
    os.close(lifeline)


async def test_shared_memory_of_a_killed_engine_is_removed() -> None:
    """Python's tracker of shared memory gets the moment that it needs."""
    script = (
        "import time; from multiprocessing.shared_memory import SharedMemory;"
        "memory = SharedMemory(create=True, size=64); print(memory.name, flush=True); time.sleep(600)"
    )
    read_end, lifeline = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        guard.__file__,
        str(read_end),
        sys.executable,
        "-c",
        script,
        pass_fds=(read_end,),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(read_end)
    assert process.stdout is not None
    name = (await process.stdout.readline()).decode().strip().lstrip("/")
    assert name in os.listdir("/dev/shm")
    os.close(lifeline)
    assert await asyncio.wait_for(process.wait(), 60) == 137
    assert name not in os.listdir("/dev/shm")


async def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    read_end, lifeline = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        guard.__file__,
        str(read_end),
        str(tmp_path / "missing"),
        pass_fds=(read_end,),
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(read_end)
    _, text = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 127
    assert b"cannot be started" in text
    os.close(lifeline)

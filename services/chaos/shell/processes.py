"""The processes of the cluster on this machine: who they are now, and what can be done to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Final

from mooncache.chaos.core.faults import Aim
from mooncache.client.state_dir import ClusterFile, read_cluster_file
from mooncache.errors import ConfigInvalid, EngineUnavailable, PermissionDenied

KILL: Final = signal.SIGKILL
_ARENA: Final = "/memfd:mooncache-arena"
_ENGINES: Final = (b"mooncache.hf_engine", b"vllm")
_PIECE_BYTES: Final = 4096
_TURN_S: Final = 1.0
_RUNS_S: Final = 0.01
"""A slow process runs so long of each turn."""


def cluster_here(state_dir: Path) -> ClusterFile:
    """What `mooncache up` says runs here.

    Raises:
        ConfigInvalid: nothing runs, or it has no gateway.
    """
    found = read_cluster_file(state_dir)
    if found is None or not found.gateway_url:
        raise ConfigInvalid(
            f"No cluster with engines runs in {state_dir}. Start one with `mooncache up`, or let the run have one of "
            "its own: `mooncache chaos run --own`."
        )
    return found


def pid_of(state_dir: Path, part: str) -> int:
    """Process id of a part; 0 while it has none."""
    found = read_cluster_file(state_dir)
    return next((each.pid for each in found.parts if each.name == part), 0) if found is not None else 0


def engine_below(worker_pid: int) -> int:
    """Process id of the engine that a worker started; 0 while there is none."""
    below = [worker_pid]
    for pid in below:
        with contextlib.suppress(OSError):
            if pid != worker_pid and any(name in _command(pid) for name in _ENGINES):
                return pid
            for task in Path(f"/proc/{pid}/task").iterdir():
                below += [int(child) for child in (task / "children").read_text().split()]
    return 0


def target_pid(pid: int, aim: Aim) -> int:
    """Process id of what a fault aims at in a part whose process is `pid`; 0 while there is none."""
    return engine_below(pid) if pid and aim in (Aim.PREFILL_ENGINE, Aim.DECODE_ENGINE) else pid


def is_gone(pid: int) -> bool:
    """Whether a process has ended; also one whose parent has not waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except (OSError, IndexError):
        return True


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal.

    Raises:
        EngineUnavailable: the process has ended by itself.
        PermissionDenied: it belongs to another user.
    """
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise EngineUnavailable(f"Process {pid} ended before the fault could be made.") from None
    except PermissionError:
        raise PermissionDenied(f"Process {pid} belongs to another user.") from None


async def stop_for(pid: int, seconds: float) -> None:
    """SIGSTOP, and SIGCONT in any case."""
    send(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        with contextlib.suppress(EngineUnavailable):
            send(pid, signal.SIGCONT)


async def slow_for(pid: int, seconds: float) -> None:
    """Let a process run a hundredth of the time."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and not is_gone(pid):
        await stop_for(pid, _TURN_S - _RUNS_S)
        await asyncio.sleep(_RUNS_S)


def flip_bits(pid: int, tries: int, rng: random.Random) -> int:
    """Change single bits in the arenas of a store node, where they hold something; returns how many.

    Raises:
        PermissionDenied: its memory files cannot be opened.
    """
    flipped = 0
    for link in list(Path(f"/proc/{pid}/fd").iterdir()):
        try:
            if not str(link.readlink()).startswith(_ARENA):
                continue
            descriptor = os.open(link, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise PermissionDenied(
                f"The memory of process {pid} cannot be opened: {error.strerror}."
            ) from None
        try:
            flipped += flip_file(descriptor, tries, rng)
        finally:
            os.close(descriptor)
    return flipped


def flip_file(descriptor: int, tries: int, rng: random.Random) -> int:
    """Change single bits of a file, where it holds something; returns how many."""
    flipped = 0
    pieces = os.fstat(descriptor).st_size // _PIECE_BYTES
    for _ in range(tries if pieces else 0):
        at = rng.randrange(pieces) * _PIECE_BYTES
        if not any(os.pread(descriptor, _PIECE_BYTES, at)):
            continue
        at += rng.randrange(_PIECE_BYTES)
        (value,) = os.pread(descriptor, 1, at)
        flipped += os.pwrite(descriptor, bytes([value ^ 1 << rng.randrange(8)]), at)
    return flipped


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()

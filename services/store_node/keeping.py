"""What a store node adopts at its start, what it leaves for the next start, and its side of the holder.

Every call has a time limit. Without a holder the node works as one without `store_node.keep_memory`, and says so.
In place of a holder systemd can keep the memory (`descriptor_store`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from mooncache.config import Config
from mooncache.errors import ConfigInvalid
from mooncache.runtime.ports import UNIX_PATH_MAX
from mooncache.store_node.descriptor_store import DescriptorStore
from mooncache.store_node.holder import DETACHED, FILES_MAX, MESSAGE_BYTES_MAX, HolderError, send

_CALL_S: Final = 2.0
_START_S: Final = 10.0
_IN_USE_S: Final = 5.0
_POLL_S: Final = 0.05


class MemoryKeeper(Protocol):
    """Who keeps a node's memory files while the node does not run; the methods as HeldMemory has them."""

    @property
    def place(self) -> str: ...
    def take(self) -> list[int]: ...
    def keep(self, files: Sequence[int]) -> None: ...
    def has(self, count: int) -> bool: ...


class HeldMemory:
    """The memory of one node at its holder. `starts`: whether it starts one where none answers."""

    def __init__(self, path: Path, node_id: str, hold_s: float, *, starts: bool = True) -> None:
        self.path, self._node_id, self._hold_s, self._starts = path, node_id, hold_s, starts

    @property
    def place(self) -> str:
        """Where the holder is."""
        return str(self.path)

    def take(self) -> list[int]:
        """Descriptors of what a former process left, which are the caller's now; none when there is nothing.

        Waits a moment for a former process that is about to end.

        Raises:
            ConfigInvalid: another process runs as this node, or there is no holder and none can be started.
        """
        self.start_holder()
        deadline_s = time.monotonic() + _IN_USE_S
        while True:
            try:
                _, files = ask(self.path, {"op": "take", "node": self._node_id})
                return files
            except HolderError as why:
                if time.monotonic() >= deadline_s:
                    raise ConfigInvalid(
                        f"The memory of {self._node_id} cannot be adopted: {why}. Stop that process, or give this "
                        "node another store_node.node_id."
                    ) from None
                time.sleep(_POLL_S)

    def keep(self, files: Sequence[int]) -> None:
        """Leave descriptors with the holder, instead of those that it has; start one when there is none and it may.

        Raises:
            HolderError: it does not take them.
        """
        if len(files) > FILES_MAX:
            raise HolderError(f"more than {FILES_MAX} files; choose larger arenas")
        if self._starts:
            with contextlib.suppress(ConfigInvalid):
                self.start_holder()
        request = {"op": "keep", "node": self._node_id, "files": len(files), "hold_s": self._hold_s}
        ask(self.path, request, files)

    def has(self, count: int) -> bool:
        """Whether the holder has so many files of this process."""
        try:
            answer, _ = ask(self.path, {"op": "list"})
            row = answer["nodes"][self._node_id]
            return bool(row["pid"] == os.getpid() and row["files"] == count)
        except (HolderError, KeyError, TypeError):
            return False

    def start_holder(self) -> None:
        """Make sure that a holder answers. One that is started here belongs to no service: it outlives who started it.

        Raises:
            ConfigInvalid: none answers in time.
        """
        deadline_s = time.monotonic() + _START_S
        started = False
        while True:
            try:
                ask(self.path, {"op": "list"})
                return
            except HolderError as why:
                if time.monotonic() >= deadline_s:
                    raise ConfigInvalid(
                        f"No process holds memory at {self.path} ({why}). Start `mooncache store-holder`, or set "
                        "store_node.keep_memory to false."
                    ) from None
            if self._starts and not started:
                started = True
                _start(self.path)
            time.sleep(_POLL_S)


def _start(path: Path) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the next question finds none
        subprocess.run(
            [sys.executable, "-m", "mooncache.store_node.holder", str(path), DETACHED],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_START_S,
            check=False,
        )


def end_holder(path: Path) -> None:
    """Let go of everything that is held there; harmless when nothing is."""
    with contextlib.suppress(HolderError):
        ask(path, {"op": "end"})


def ask(path: Path, request: dict[str, Any], files: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
    """One request: the answer, and descriptors that are the caller's now.

    Raises:
        HolderError: it said no, or does not answer.
    """
    taken: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_CALL_S)
            connection.connect(str(path))
            send(connection, request, list(files))
            data, taken, _, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX * 16, FILES_MAX)
        answer = json.loads(data)
        if not answer["ok"]:
            raise HolderError(str(answer["why"]))
    except OSError as error:
        raise HolderError(f"no answer: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        close_all(taken)
        raise HolderError("it does not speak as a holder does") from None
    for file in taken:
        os.set_inheritable(file, False)
    return answer, taken


def close_all(files: list[int]) -> None:
    """Close descriptors that `ask` gave."""
    for file in files:
        os.close(file)


def keeping_of(config: Config, node_id: str) -> MemoryKeeper | None:
    """Who keeps the memory of a node of this configuration; None when it is not kept.

    What systemd has of a node that does not use it any longer is given back.

    Raises:
        ConfigInvalid: settings that contradict each other.
    """
    node = config.store_node
    if not (node.keep_memory and node.descriptor_store):
        with contextlib.suppress(OSError):  # then the end of the unit frees it
            DescriptorStore().drop()
    if not node.keep_memory:
        if node.descriptor_store:
            raise ConfigInvalid("store_node.descriptor_store needs store_node.keep_memory.")
        return None
    if node.arena_path is not None or node.arena_device:
        raise ConfigInvalid(
            "store_node.keep_memory is for host memory: leave out arena_path and arena_device. What lies there is "
            "not adopted by the next start."
        )
    if not node.capacity_bytes:
        raise ConfigInvalid(
            "store_node.keep_memory needs store_node.capacity_bytes: memory of another size is not adopted."
        )
    if node.descriptor_store:
        return DescriptorStore()
    path = holder_path(config)
    if len(os.fsencode(path)) > UNIX_PATH_MAX:
        raise ConfigInvalid(
            f"The holder's path is longer than {UNIX_PATH_MAX} bytes: {path}. Set store_node.holder_path."
        )
    return HeldMemory(path, node_id, node.hold_s, starts=node.start_holder)


def holder_path(config: Config) -> Path:
    """The socket of the holder of this machine's nodes."""
    return config.store_node.holder_path or config.cluster.state_dir / "run" / "holder.sock"

"""The memory that a program contributes with `setup`: a store node of its own, as a child process.

The original keeps the segment in the calling process; here it is a process beside it, because a node must go on
serving while the engine computes. It joins the same master with the same token, and ends with the store, or with the
program, however that ends.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from mooncache.auth import parse_token
from mooncache.client.results import MapNodeState
from mooncache.cluster.processes import Part, ServiceKind, describe_exit, stop_all
from mooncache.dropin.settings import SetupRefusedError
from mooncache.runtime.ports import make_socket_folder

if TYPE_CHECKING:
    from mooncache.client.options import ClientOptions
    from mooncache.client.sync import Client

_FIRST_PORT, _LAST_PORT = 12_300, 14_300  # the original's range for names without a port
_START_S: Final = 60.0
_STOP_S: Final = 8.0
_LOOK_S: Final = 0.02


class SegmentName:
    """A name host:port that is this store's alone on this machine, as long as it is open."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._held: socket.socket | None = None
        if port:
            self.port = port
            return
        for number in range(_FIRST_PORT, _LAST_PORT + 1):
            held = socket.socket()
            try:
                held.bind(("127.0.0.1", number))
            except OSError:
                held.close()
                continue
            self.port, self._held = number, held
            return
        raise SetupRefusedError(f"no port from {_FIRST_PORT} to {_LAST_PORT} is free")

    def __str__(self) -> str:
        return f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"

    def close(self) -> None:
        if self._held is not None:
            self._held.close()


def is_loopback(target: str) -> bool:
    """Whether an address host:port leads to this machine only."""
    host = target.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def incarnation_of(client: Client, name: str) -> int:
    """The incarnation of the active node of this name; 0 when there is none."""
    for node in client.nodes():
        if node.node_id == name and node.state == MapNodeState.ACTIVE:
            return node.incarnation
    return 0


class OwnSegment:
    """A running store node of this program."""

    def __init__(self, part: Part, folder: Path) -> None:
        self._part, self._folder = part, folder
        self._pid = os.getpid()
        self._over = threading.Event()
        failures: list[OSError] = []
        began = threading.Event()

        def own() -> None:
            """The kernel ends a child with the thread that made it: so that is a thread of our own."""
            try:
                part.start()
            except OSError as error:
                failures.append(error)
            finally:
                began.set()
            self._over.wait()

        threading.Thread(target=own, name="mooncache-segment", daemon=True).start()
        began.wait()
        if failures:
            self.stop()
            raise SetupRefusedError(f"the store node cannot be started: {failures[0]}")

    @classmethod
    def start(cls, options: ClientOptions, name: str, host: str, size_bytes: int) -> Self:
        """Start it; `wait` says when it serves.

        Raises:
            SetupRefusedError: the token is not the cluster's, or there is no master.
        """
        if not options.targets:
            raise SetupRefusedError("memory can be contributed to a cluster with a master only")
        if not parse_token(options.token).admin:
            raise SetupRefusedError(
                "memory can be contributed with the cluster token only; set global_segment_size to 0"
            )
        local = all(map(is_loopback, options.targets)) or host == "localhost"
        address = "127.0.0.1" if local else host
        folder = make_socket_folder()
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(options.token + "\n", encoding="ascii")
        env = {
            "MOONCACHE_CLUSTER_STATE_DIR": str(folder),
            "MOONCACHE_CLUSTER_TOKEN_FILE": str(token),
            "MOONCACHE_CLUSTER_MASTER_TARGETS": ",".join(options.targets),
            "MOONCACHE_STORE_NODE_NODE_ID": name,
            "MOONCACHE_STORE_NODE_HOST": address,
            "MOONCACHE_STORE_NODE_DATA_HOST": address,
            "MOONCACHE_STORE_NODE_CAPACITY_BYTES": str(size_bytes),
            "MOONCACHE_STORE_NODE_UNIX_PATH": str(folder / "node.sock"),
        }
        if options.tls.enabled:
            env["MOONCACHE_TLS_ENABLED"] = "true"
            if options.tls.ca_file is not None:
                env["MOONCACHE_TLS_CA_FILE"] = str(options.tls.ca_file)
        return cls(Part(name, ServiceKind.STORE_NODE, env, folder / "node.log"), folder)

    def wait(self, client: Client, former: int) -> None:
        """Return once the client can use it. Raises SetupRefusedError, with its last words, when it does not start.

        `former` is the incarnation of a node of this name that was in the map before: the master may not have noticed
        yet that it ended.
        """
        deadline_s = time.monotonic() + _START_S
        while incarnation_of(client, self._part.name) in {former, 0}:
            code = self._part.exit_code
            if code is not None:
                raise SetupRefusedError(
                    f"the store node ended, {describe_exit(code)}: {self._part.log_tail(3)}"
                )
            if time.monotonic() > deadline_s:
                raise SetupRefusedError(f"the store node is not in the cluster map after {_START_S:g} s")
            time.sleep(_LOOK_S)

    @property
    def pid(self) -> int:
        return self._part.pid

    def stop(self) -> None:
        """End it with what it holds. In a forked child it does nothing: the node is the parent's."""
        if os.getpid() != self._pid:
            return
        stop_all([self._part], _STOP_S)
        self._over.set()
        shutil.rmtree(self._folder, ignore_errors=True)

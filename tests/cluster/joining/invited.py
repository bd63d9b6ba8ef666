"""An invitation that waits in a thread, for tests that join, or try to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mooncache.auth import create_cluster_token, load_cluster_token
from mooncache.cluster.joining.inviting import InvitationServer, InvitingMachine, Joined
from mooncache.cluster.joining.records import InvitationRecords
from mooncache.runtime.certificates import make_certificates
from mooncache.runtime.clock import Clock, SystemClock

HOST = "127.0.0.1"
OWN = "10.0.0.5"
SETTINGS = {"worker.engine": "hf", "worker.model_name": "moon", "hf.block_tokens": "16"}


def first_machine(folder: Path) -> InvitingMachine:
    """What a first machine at OWN hands over, with an authority of its own."""
    authority = folder / "authority"
    made = make_certificates(authority, [OWN])[0]
    token = folder / "cluster.token"
    if not token.exists():
        create_cluster_token(token)
    text = load_cluster_token(token).text
    targets = (f"{OWN}:7700", "10.0.0.4:7700")
    pair = (made / "cert.pem", made / "key.pem")
    return InvitingMachine(authority, *pair, text, targets, f"{OWN}:7800", (OWN,), SETTINGS)


@dataclass
class Waiting:
    """An open invitation."""

    server: InvitationServer
    target: str
    folder: Path
    thread: threading.Thread
    stop: threading.Event
    ended: list[Joined] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.target.rpartition(":")[2])

    def end(self) -> Joined:
        """How it ended, once it has by itself."""
        self.thread.join(30)
        assert self.ended, "it still waits"
        return self.ended[0]


@contextmanager
def invitation(folder: Path, lifetime_s: float = 900.0, clock: Clock | None = None) -> Iterator[Waiting]:
    """Waits until the block ends, or the invitation does."""
    server = InvitationServer(
        first_machine(folder), InvitationRecords(folder), clock or SystemClock(), refused_after_s=0.0
    )
    target = server.open(HOST, 0, lifetime_s, 0)
    stop = threading.Event()
    ended: list[Joined] = []
    thread = threading.Thread(target=lambda: ended.append(asyncio.run(server.wait(stop.is_set))), daemon=True)
    waiting = Waiting(server, target, folder, thread, stop, ended)
    thread.start()
    try:
        yield waiting
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()

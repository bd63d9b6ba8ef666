"""Duty: take what the engine says of decode legs that have ended (kvcache/leg_reports.py), for the next report.

Nothing is waited for but bytes. At most `LEGS_MAX` reports wait for the conductor; when more come, the oldest go.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final

from zmq.asyncio import Context, Socket
from zmq.constants import SocketOption, SocketType
from zmq.error import ZMQError

from mooncache.kvcache.leg_reports import MESSAGE_BYTES_MAX, QUEUE_MAX, decode, reports_path
from mooncache.runtime.logs import Event, get_logger
from mooncache.worker.background import run_engine
from mooncache.worker.state import WorkerCounter, WorkerState

LEGS_MAX: Final = 8192
_BIND_AGAIN_S: Final = 1.0

log = get_logger(__name__)


async def run(state: WorkerState) -> None:
    """Until cancelled; the socket is the same for all runs of the engine."""
    passport = run_engine.said_in(state)
    if passport is None:
        await asyncio.get_running_loop().create_future()  # the engine has no place to send to
        return
    context = Context()
    try:
        socket = await _bound(state, context, reports_path(passport))
        while True:
            take(state, await socket.recv_multipart())
            await asyncio.sleep(0)  # a flood of reports must not stop health checks
    finally:
        context.destroy(linger=0)
        with contextlib.suppress(OSError):
            reports_path(passport).unlink(missing_ok=True)


def take(state: WorkerState, frames: list[bytes]) -> None:
    """One message of the engine."""
    leg = decode(frames[0]) if len(frames) == 1 else None
    if leg is None:
        state.count(WorkerCounter.LEG_REPORTS_INVALID)
        return
    state.count(WorkerCounter.ENDED_LEGS)
    state.ended_legs.append(leg)
    if len(state.ended_legs) > LEGS_MAX:
        state.ended_legs.popleft()
        state.count(WorkerCounter.ENDED_LEGS_LOST)


async def _bound(state: WorkerState, context: Context, path: Path) -> Socket:
    """The socket for the engine, which only this user can reach; its folder may come later than this process."""
    was_told = False
    while True:
        socket = context.socket(SocketType.PULL)
        socket.setsockopt(SocketOption.LINGER, 0)
        socket.setsockopt(SocketOption.RCVHWM, QUEUE_MAX)
        socket.setsockopt(SocketOption.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        try:
            socket.bind(f"ipc://{path}")
            os.chmod(path, 0o600)
            return socket
        except (ZMQError, OSError) as error:
            socket.close(linger=0)
            if not was_told:
                was_told = True
                log.warning(Event.WORKER_LEG_REPORTS_OFF, path=str(path), reason=str(error))
        await state.clock.sleep(_BIND_AGAIN_S)

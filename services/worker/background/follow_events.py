"""Duty: listen to the cache events of the engine (vLLM's ZeroMQ protocol) and keep `state.cache` up to date.

Publisher and replay socket: frames are [topic, number of 8 bytes, payload]. A replay is asked for with the
number to begin at and ends with number -1. The receiving queue is short on purpose: when events come faster
than they can be taken in, the publisher drops some, the numbers show it, and they are had again by replay.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urlsplit

from zmq.asyncio import Context, Socket
from zmq.constants import SocketOption, SocketType

from mooncache.errors import ProtocolError
from mooncache.runtime.logs import Event, get_logger
from mooncache.worker.core.endpoints import reachable, subscriber
from mooncache.worker.core.event_stream import END_OF_REPLAY, SEQUENCE_BYTES, EventAction, sequence_of
from mooncache.worker.core.kv_events import PAYLOAD_BYTES_MAX, decode
from mooncache.worker.core.own_cache import OwnCache
from mooncache.worker.state import WorkerCounter, WorkerState

REPLAY_TIMEOUT_S: Final = 10.0
_QUEUE_BATCHES: Final = 1000
_CHECK_S: Final = 0.5

log = get_logger(__name__)


async def run(state: WorkerState) -> None:
    """Follow one run of the engine after the other, until cancelled."""
    while True:
        state.wake_events.clear()
        if state.cache is None or not state.events[0]:
            await state.wake_events.wait()
            continue
        context = Context()
        try:
            await _follow(state, state.cache, context)
        finally:
            context.destroy(linger=0)


async def _follow(state: WorkerState, cache: OwnCache, context: Context) -> None:
    """One run of the engine; returns when `state.cache` has been replaced."""
    host = urlsplit(state.url).hostname or "127.0.0.1"
    events, replay = state.events
    socket = _socket(context, SocketType.SUB)
    socket.setsockopt(SocketOption.SUBSCRIBE, b"")
    bind, endpoint = subscriber(events, host)
    (socket.bind if bind else socket.connect)(endpoint)
    replay_endpoint = reachable(replay, host) if replay else ""
    await _replay(state, cache, context, replay_endpoint)  # what came before this subscription
    while state.cache is cache:
        if not await socket.poll(_CHECK_S * 1000):
            continue
        frames = await socket.recv_multipart()
        await _take(state, cache, context, replay_endpoint, frames)
        await asyncio.sleep(0)  # a flood of events must not stop health checks and reports


async def _take(
    state: WorkerState, cache: OwnCache, context: Context, replay_endpoint: str, frames: list[bytes]
) -> None:
    """One message of the publisher."""
    sequence = sequence_of(frames[1]) if len(frames) == 3 else None
    if sequence is None:
        _note_invalid(state, 1, f"a message of {len(frames)} frames")
        return
    stream = state.stream
    action = stream.offer(sequence)
    if action is EventAction.RESTARTED:
        stream.restart()
        cache.clear()
        action = stream.offer(sequence)
    lost = stream.lost
    if action is EventAction.REPLAY:
        await _replay(state, cache, context, replay_endpoint)
        action = EventAction.APPLY if stream.after_replay(sequence) else EventAction.OLD
    if stream.lost != lost:
        log.warning(Event.WORKER_EVENTS_LOST, instance_id=state.instance_id, batches=stream.lost - lost)
        # What is known stays: a wrong claim costs one worse choice and heals, forgotten blocks are never reported
        # again.
        cache.want_full()
    if action is EventAction.APPLY:
        _apply(state, cache, frames[2])


async def _replay(state: WorkerState, cache: OwnCache, context: Context, endpoint: str) -> None:
    """Ask for everything from the next expected batch on; what comes is applied as it comes."""
    if not endpoint:
        return
    socket = _socket(context, SocketType.DEALER)
    try:
        socket.connect(endpoint)
        async with asyncio.timeout(REPLAY_TIMEOUT_S):
            await socket.send_multipart([b"", state.stream.expected.to_bytes(SEQUENCE_BYTES, "big")])
            while True:
                frames = (await socket.recv_multipart())[1:]  # the first one is the empty delimiter
                sequence = sequence_of(frames[1]) if len(frames) == 3 else None
                if sequence is None or sequence == END_OF_REPLAY:
                    return
                for _ in state.stream.replay([sequence]):
                    _apply(state, cache, frames[2])
                await asyncio.sleep(0)
    except TimeoutError:
        state.count(WorkerCounter.REPLAY_TIMEOUTS)
    finally:
        socket.close(linger=0)


def _apply(state: WorkerState, cache: OwnCache, payload: bytes) -> None:
    try:
        events, invalid = decode(payload)
    except ProtocolError as error:
        _note_invalid(state, 1, error.message)
        return
    if invalid:
        _note_invalid(state, invalid, "events with wrong fields")
    cache.apply(events)


def _note_invalid(state: WorkerState, count: int, what: str) -> None:
    """Count; log the first and then at every doubling, so that a flood does not fill the log."""
    before = state.invalid_events
    state.invalid_events += count
    if before.bit_length() != state.invalid_events.bit_length():
        log.warning(
            Event.WORKER_EVENTS_INVALID,
            instance_id=state.instance_id,
            count=state.invalid_events,
            reason=what,
        )


def _socket(context: Context, kind: int) -> Socket:
    socket = context.socket(kind)
    socket.setsockopt(SocketOption.LINGER, 0)
    socket.setsockopt(SocketOption.RCVHWM, _QUEUE_BATCHES)
    socket.setsockopt(SocketOption.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
    socket.setsockopt(SocketOption.IPV6, 1)
    return socket

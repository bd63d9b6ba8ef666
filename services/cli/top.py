"""`mooncache top`: what happens in the cluster, live."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import termios
import tty
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mooncache.cli.common import HERE, AsJson, Where, seconds_of
from mooncache.errors import InvalidArgument
from mooncache.reporting.output import EXIT_OK, console, print_json
from mooncache.runtime.tasks import wait_for_event

if TYPE_CHECKING:
    from mooncache.cli.snapshot import ClusterSnapshot

WINDOW = 10
"""Looks that rates are taken over."""


def top(
    *,
    interval: Annotated[str, Parameter(help="Time between two frames.")] = "1s",
    once: Annotated[bool, Parameter(negative=(), help="Show one frame and exit.")] = False,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Watch requests, tokens, engines and the pool, live. q or Ctrl-C ends it.

    Rates cover the last ten frames. So do shares and medians, unless nothing happened in those frames: then they cover
    everything since the start.

    For example:

        mooncache top

        mooncache top --once --json
    """
    interval_s = seconds_of(interval, "--interval")
    if not 0.1 <= interval_s <= 60:
        raise InvalidArgument(f"--interval must be between 100 ms and 60 s; got {interval_s:g} s.")
    if once or json or not console.is_terminal:
        return asyncio.run(_once(where, interval_s, as_json=json))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_live(where, interval_s))
    return EXIT_OK


async def _once(where: Where, interval_s: float, *, as_json: bool) -> int:
    from mooncache.cli.snapshot import ClusterPoller
    from mooncache.cli.top_view import frame, frame_document

    poller = ClusterPoller(where)
    try:
        before = await poller.poll()
        _refuse_nothing(before)
        await asyncio.sleep(interval_s)
        document = frame_document(await poller.poll(), before, poller.gateway_url)
    finally:
        await poller.close()
    if as_json:
        print_json(document)
    else:
        console.print(frame(document, console.width))
    return EXIT_OK


def _refuse_nothing(snapshot: ClusterSnapshot) -> None:
    """When no part answers, the reason is the answer."""
    if (
        snapshot.status is None
        and snapshot.instances is None
        and not snapshot.metrics
        and snapshot.master_error is not None
    ):
        raise snapshot.master_error


async def _live(where: Where, interval_s: float) -> None:
    from rich.live import Live

    from mooncache.cli.snapshot import ClusterPoller
    from mooncache.cli.top_view import frame, frame_document

    poller = ClusterPoller(where)
    snapshots: deque[ClusterSnapshot] = deque(maxlen=WINDOW)
    ended = asyncio.Event()
    try:
        snapshots.append(await poller.poll())
        _refuse_nothing(snapshots[0])
        with _keys(ended), Live(console=console, auto_refresh=False, screen=True) as live:
            while not ended.is_set():
                snapshots.append(await poller.poll())
                document = frame_document(snapshots[-1], snapshots[0], poller.gateway_url)
                live.update(frame(document, console.width), refresh=True)
                await wait_for_event(ended, interval_s)
    finally:
        await poller.close()


@contextlib.contextmanager
def _keys(ended: asyncio.Event) -> Iterator[None]:
    """q ends it, without Enter. The terminal is put back in any case."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        if set(sys.stdin.read(1)) & set("qQ\x1b"):
            ended.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)

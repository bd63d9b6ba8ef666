"""A client's line to the master: keeps the map fresh and answers Locate. Lives on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from mooncache.client.limits import check_timeout
from mooncache.client.map_keeper import MapKeeper
from mooncache.client.master_link import MasterLink
from mooncache.client.options import ClientOptions
from mooncache.client.results import AccusedWriter, ClusterView, Deviation, WrongBlocks
from mooncache.client.writer import writer_number
from mooncache.errors import Unsupported
from mooncache.proto.v1 import master_pb2
from mooncache.runtime.clock import SystemClock

_LOCATE_ATTEMPT_S = 1.0
UNNAMED = "a client without a name"


def with_master(control: Control | None) -> Control:
    """The line to the master. Raises Unsupported for a client that knows its nodes and no master."""
    if control is None:
        raise Unsupported("This client has no master, or acts for a tenant of another one: ask that one.")
    return control


class Control:
    """`start` fetches the first map (or raises), then a task follows the changes until `close`."""

    def __init__(self, options: ClientOptions, apply: Callable[[ClusterView], None]) -> None:
        self._options = options
        self._apply = apply
        self._link: MasterLink | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Fetch the map within the connect timeout and begin to follow it."""
        clock = SystemClock()
        rng = random.Random()
        self._link = MasterLink(self._options.targets, self._options.master_channel, clock, rng)
        keeper = MapKeeper(self._link, self._apply, clock, rng)
        await keeper.fetch(self._options.connect_timeout_s)
        self._task = asyncio.create_task(keeper.run(), name="mooncache-map")

    async def locate(self, keys: bytes, timeout_s: float, tenant: str = "") -> bytes:
        """Which nodes hold the keys, packed as the native core wants it. Only the cluster token may name a tenant."""
        assert self._link is not None
        limit_s = min(timeout_s, 2 * _LOCATE_ATTEMPT_S)
        request = master_pb2.LocateRequest(keys=keys, tenant=tenant)
        response = await self._link.call(
            "Locate", request, master_pb2.LocateResponse, limit_s, attempt_s=_LOCATE_ATTEMPT_S
        )
        return bytes(response.locations)

    async def report_wrong(
        self, keys: bytes, found: Deviation, tenant: str, timeout_s: float | None
    ) -> WrongBlocks:
        """Say that blocks are others than this process computed, as `Client.report_wrong`."""
        assert self._link is not None
        options = self._options
        request = master_pb2.ReportWrongBlocksRequest(
            tenant=tenant or options.tenant,
            keys=keys,
            verifier_id=writer_number(options.client_name, options.build),
            verifier=options.client_name or UNNAMED,
            dtype=found.dtype,
            distance=found.distance,
            tolerance=found.tolerance,
        )
        limit_s = options.timeout_s if timeout_s is None else check_timeout(timeout_s)
        answer = await self._link.call(
            "ReportWrongBlocks", request, master_pb2.ReportWrongBlocksResponse, limit_s
        )
        writers = (
            AccusedWriter(row.writer_id, row.instance, row.build, row.quarantined) for row in answer.writers
        )
        return WrongBlocks(tuple(answer.codes), tuple(writers))

    async def close(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._link is not None:
            await self._link.close()

"""One process of this machine's cluster after the other is ended and started again by another version's interpreter.

The supervisor of `mooncache up` starts what ends; here each end is asked for, and its next process is awaited before
the next one: registered, whole, of the new version. An engine gets no new requests before, where another one can take
them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mooncache.cli.core.upgrade_check import RunningProcess
from mooncache.cli.snapshot import ClusterPoller, ClusterSnapshot
from mooncache.cluster.processes import ServiceKind
from mooncache.conductor.core.registry import InstanceState
from mooncache.errors import DeadlineExceeded, Internal, MooncacheError
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.proto.v1 import common_pb2, conductor_pb2, store_node_pb2
from mooncache.runtime.clock import SystemClock

_POLL_S = 0.25
_CALL_S = 2.0


@dataclass(frozen=True, slots=True)
class RolledProcess:
    """A process that was started again: how long it was from asking it to end until all was well."""

    name: str
    former: str
    version: str
    seconds: float


class Roller:
    """Restarts processes of the cluster that `mooncache up` runs in the poller's state folder.

    Args:
        poller: asks the cluster.
        target: version that each process has to have afterwards.
        timeout_s: for each process.
    """

    def __init__(self, poller: ClusterPoller, target: str, timeout_s: float) -> None:
        self._poller, self._target, self._timeout_s = poller, target, timeout_s
        self._clock = SystemClock()

    async def roll(self, process: RunningProcess) -> RolledProcess:
        """Restart one. Returns when the cluster is as well as before.

        Raises:
            DeadlineExceeded: it was not back in time; the text names what is missing.
            Internal: the supervisor gave it up.
        """
        began_s = time.monotonic()
        before = await self._poller.poll(with_metrics=False)
        drained = await self._drain(process, before)
        try:
            former = pid_of(before, process.name)
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(former, signal.SIGTERM)
            if drained:  # it counts as draining, not as ready, until that is taken back
                await self._until(
                    process.name, lambda look: _not_listed(process.name, look, former), "it is back"
                )
        finally:
            if drained:
                await self._set_drain(process.name, drain=False)
        await self._until(
            process.name, lambda look: self._missing(process, look, before, former), "it is back"
        )
        return RolledProcess(
            process.name, process.version, self._target, round(time.monotonic() - began_s, 3)
        )

    # --- engines ---------------------------------------------------------------------------------------------

    async def _drain(self, process: RunningProcess, before: ClusterSnapshot) -> bool:
        """Send an engine no new requests and wait for those it has; False where no other one could take them."""
        if process.kind != ServiceKind.WORKER or not _has_stand_in(process.name, before):
            return False
        await self._set_drain(process.name, drain=True)
        try:
            await self._until(
                process.name, lambda look: _still_running(process.name, look), "its requests end"
            )
        except MooncacheError:
            await self._set_drain(process.name, drain=False)
            raise
        return True

    async def _set_drain(self, instance_id: str, *, drain: bool) -> None:
        async def ask() -> None:
            channel = self._poller.conductor_channel
            if channel is not None:
                request = conductor_pb2.SetInstanceRequest(instance_id=instance_id, drain=drain)
                await channel.call("SetInstance", request, conductor_pb2.SetInstanceResponse, _CALL_S)

        await self._again(ask)

    async def _again(self, call: Callable[[], Awaitable[None]]) -> None:
        """Repeat a call that fails while something starts, within the time limit. Raises what the last one raised."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                await call()
            except MooncacheError:
                if time.monotonic() >= deadline_s:
                    raise
                await self._clock.sleep(_POLL_S)
                continue
            return

    # --- waiting ---------------------------------------------------------------------------------------------

    async def _until(self, name: str, missing: Callable[[ClusterSnapshot], str], what: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            look = await self._poller.poll(with_metrics=False)
            part = next((part for part in look.parts if part.name == name), None)
            if part is not None and part.state == "given_up":
                raise Internal(f"{name} was given up: {part.reason or part.last_end}. See its log.")
            text = missing(look)
            if not text:
                return
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"{name}: {what} not within {self._timeout_s:g} s; {text}.")
            await self._clock.sleep(_POLL_S)

    def _missing(
        self, process: RunningProcess, look: ClusterSnapshot, before: ClusterSnapshot, former: int
    ) -> str:
        """What is not yet as it was before; "" when all is."""
        part = next((part for part in look.parts if part.name == process.name), None)
        if part is None or part.pid in (0, former):
            return "it has not been started again"
        if part.state != "ready" or part.reason:
            return part.reason or part.state
        if look.status is None or not look.status.directory_complete:
            return "no master answers, or its directory is not whole"
        if process.kind == ServiceKind.MASTER and look.status.software_version != self._target:
            return f"it has version {look.status.software_version}"
        return _nodes_missing(process, look, before, self._target) or _serving_missing(
            process, look, before, self._target
        )


def pid_of(look: ClusterSnapshot, name: str) -> int:
    """Process id of a part. Raises Internal when no supervisor has it."""
    pid = next((part.pid for part in look.parts if part.name == name), 0)
    if not pid:
        raise Internal(f"{name} is no process of `mooncache up` on this machine.")
    return pid


def _nodes_missing(
    process: RunningProcess, look: ClusterSnapshot, before: ClusterSnapshot, target: str
) -> str:
    """Every node that was there is active and reported, and the one that was restarted is another process."""
    assert look.status is not None
    now = {item.node.node_id: item for item in look.status.nodes}
    former = {item.node.node_id: item for item in before.status.nodes} if before.status is not None else {}
    for node_id, was in former.items():
        found = now.get(node_id)
        if found is None or found.node.state != common_pb2.NODE_STATE_ACTIVE or found.full_report_pending:
            return f"{node_id} is not active, or has not reported its blocks"
        if node_id != process.name:
            continue
        if found.node.incarnation == was.node.incarnation:
            return f"{node_id} has not registered again"
        if found.node.software_version != target:
            return f"it has version {found.node.software_version}"
    return ""


def _serving_missing(
    process: RunningProcess, look: ClusterSnapshot, before: ClusterSnapshot, target: str
) -> str:
    """Every engine that was ready is ready, and the gateway, when there are any."""
    if before.instances is None:
        return ""
    if look.instances is None:
        return look.conductor_error or "the conductor does not answer"
    now = {str(row["instance_id"]): row for row in look.instances}
    for was in before.instances:
        name = str(was["instance_id"])
        row = now.get(name)
        if was["state"] == InstanceState.READY and name != process.name:
            if row is None or row["state"] != InstanceState.READY:
                return f"{name} is not ready"
        elif name == process.name:
            if row is None or row["state"] != InstanceState.READY:
                return f"{name} is not ready"
            if row["software_version"] != target:
                return f"it has version {row['software_version']}"
    if look.gateway_reason:
        return f"the gateway {look.gateway_reason}"
    version = look.conductor["software_version"] if look.conductor is not None else ""
    if process.kind == ServiceKind.CONDUCTOR and version != target:
        return f"it has version {version or 'unknown'}"
    return ""


def _has_stand_in(name: str, look: ClusterSnapshot) -> bool:
    """Whether requests of an engine can go elsewhere: to one of its roles, or its prompts to engines that generate."""
    rows = {str(row["instance_id"]): row for row in look.instances or []}
    if name not in rows:
        return False
    model, role = rows[name]["model"], rows[name]["role"]
    others = [
        row["role"]
        for other, row in rows.items()
        if other != name and row["model"] == model and row["state"] == InstanceState.READY
    ]
    if role == InstanceRole.PREFILL:
        return bool(others)
    return any(other in (InstanceRole.DECODE, InstanceRole.BOTH) for other in others)


def _not_listed(name: str, look: ClusterSnapshot, former: int) -> str:
    """Why the next process of an engine's worker cannot be given a wish yet; "" when it can."""
    part = next((part for part in look.parts if part.name == name), None)
    if part is None or part.pid in (0, former):
        return "it has not been started again"
    listed = any(row["instance_id"] == name for row in look.instances or [])
    return "" if listed else "the conductor does not list it"


def _still_running(name: str, look: ClusterSnapshot) -> str:
    """What an engine still does; "" when it does nothing."""
    row = next((row for row in look.instances or [] if row["instance_id"] == name), None)
    if row is None:
        return look.conductor_error or "the conductor does not list it"
    busy = int(str(row["assigned"])) + int(str(row["waiting"])) + int(str(row["running"]))
    return f"{busy} requests are running" if busy else ""


async def node_formats(poller: ClusterPoller, target: str) -> tuple[dict[str, int], str]:
    """What a node says of its formats, and of itself when it does not answer."""
    channel = poller.node_channel(target)
    try:
        answer = await channel.call(
            "GetNodeStatus",
            store_node_pb2.GetNodeStatusRequest(),
            store_node_pb2.GetNodeStatusResponse,
            _CALL_S,
        )
    except MooncacheError as error:
        return {}, error.message
    finally:
        await channel.close()
    return dict(answer.formats), ""

"""Watching a one-machine cluster: is each part ready, what are the engines doing, has something ended by itself?

Every look is bounded and may fail: a part that does not answer yet is simply not ready yet. While everything starts, a
process that ends is a reason to stop (its settings are wrong); later the supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from mooncache.client.conductor_link import ConductorLink
from mooncache.client.map_keeper import view_of_node
from mooncache.client.master_link import MasterLink
from mooncache.client.options import ClientOptions
from mooncache.client.results import NodeView
from mooncache.cluster.http_get import http_get
from mooncache.cluster.layout import ClusterLayout, is_worker
from mooncache.cluster.processes import Part, ServiceKind, describe_exit, last_words
from mooncache.cluster.supervisor import POLL_S, READY, PartNews, PartStage, StartProgress, Supervisor
from mooncache.config import load
from mooncache.errors import (
    Cancelled,
    ConfigInvalid,
    EngineUnavailable,
    Internal,
    MasterUnavailable,
    MooncacheError,
)
from mooncache.proto.v1 import common_pb2, conductor_pb2, master_pb2, worker_pb2
from mooncache.runtime.clock import SystemClock
from mooncache.runtime.entry import EXIT_CONFIG
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import WORKER_SERVICE
from mooncache.runtime.tasks import cancel_all
from mooncache.runtime.tls import channel_credentials, http_client_context

ENGINE_POLL_S = 0.5
_CALL_S = 1.0


def crashed(parts: Mapping[str, Part]) -> Part | None:
    """The first part that has ended without having been asked to."""
    return next((part for part in parts.values() if part.exit_code is not None), None)


class Watch:
    """One look after the other, inside one event loop. `close` it."""

    def __init__(self, layout: ClusterLayout, state_dir: Path, token_path: Path) -> None:
        self._layout = layout
        self._state_dir = state_dir
        config = load(overrides={"cluster.state_dir": str(state_dir)})
        options = ClientOptions.gather(master=layout.master_target, token_file=str(token_path), config=config)
        assert options.followed is not None
        self._token = options.followed
        self._tls, self._credentials = options.tls, channel_credentials(options.tls)
        self._link = MasterLink(options.targets, options.master_channel, SystemClock(), random.Random())
        self._channels: dict[str, GrpcChannel] = {}
        self._conductor: ConductorLink | None = None

    async def close(self) -> None:
        """Close every connection."""
        await self._link.close()
        for channel in self._channels.values():
            await channel.close()
        if self._conductor is not None:
            await self._conductor.close()

    async def until_ready(
        self, timeout_s: float, progress: StartProgress, should_stop: Callable[[], bool]
    ) -> tuple[NodeView, ...]:
        """Wait until every running part works together; returns the nodes of the cluster map.

        Raises:
            ConfigInvalid: a part refused its configuration; the text is its own.
            Internal: a part ended otherwise; the text has its exit code and last lines.
            MasterUnavailable, EngineUnavailable: not ready in time; the text names what is missing.
            Cancelled: `should_stop` said so.
        """
        waits = self._waits(progress)
        tasks = {name: asyncio.create_task(wait) for name, wait in waits.items()}
        deadline_s = time.monotonic() + timeout_s
        try:
            while True:
                self._refuse_crash()
                for task in tasks.values():
                    if task.done():
                        task.result()  # a defect in a wait must not look like slowness
                waiting = [name for name, task in tasks.items() if not task.done()]
                if not waiting:
                    return await self.active_nodes()
                if should_stop():
                    raise Cancelled("The start was cancelled.")
                if time.monotonic() >= deadline_s:
                    raise self._too_late(waiting, timeout_s)
                await asyncio.wait(tasks.values(), timeout=POLL_S, return_when=asyncio.ALL_COMPLETED)
        finally:
            await cancel_all(tasks.values())

    async def supervise(self, supervisor: Supervisor, should_stop: Callable[[], bool]) -> None:
        """Keep every part running and tell what the engines do, until `should_stop` or nothing is left to keep."""
        followers = [
            asyncio.create_task(self._follow_engine(part, supervisor.progress))
            for part in self._layout.parts.values()
            if is_worker(part)
        ]
        try:
            await supervisor.run(should_stop)
        finally:
            await cancel_all(followers)

    async def answers(self, part: Part) -> bool:
        """Whether a part's loop turns. Without a probe port there is nothing to ask: it counts as well."""
        if not part.metrics:
            return True
        status, _ = await http_get(part.metrics, "/health", timeout_s=_CALL_S)
        return status == 200

    async def active_nodes(self) -> tuple[NodeView, ...]:
        """Active nodes of the current map; none while the master does not answer yet."""
        try:
            return await self._map_nodes()
        except MooncacheError:
            return ()

    async def instances(self) -> list[conductor_pb2.InstanceView]:
        """Instances that the conductor knows; none while it does not answer."""
        if self._conductor is None:
            config = load(overrides={"cluster.state_dir": str(self._state_dir)})
            self._conductor = ConductorLink(self._layout.conductor_target, self._token, config, listen=False)
        try:
            answer = await self._conductor.call(
                "ListInstances",
                conductor_pb2.ListInstancesRequest(),
                conductor_pb2.ListInstancesResponse,
                _CALL_S,
            )
        except MooncacheError:
            return []
        return list(answer.instances)

    async def worker_status(self, part: Part) -> worker_pb2.GetWorkerStatusResponse | None:
        """What a worker says; None when it does not answer."""
        channel = self._channel(part.control, WORKER_SERVICE, EngineUnavailable)
        try:
            return await channel.call(
                "GetWorkerStatus",
                worker_pb2.GetWorkerStatusRequest(),
                worker_pb2.GetWorkerStatusResponse,
                _CALL_S,
            )
        except MooncacheError:
            return None

    async def models(self) -> list[str]:
        """Models that the gateway offers."""
        scheme, _, address = self._layout.gateway_url.partition("://")
        context = http_client_context(self._tls) if scheme == "https" else None
        status, body = await http_get(address, "/v1/models", token=self._token.text, tls=context)
        if status != 200:
            return []
        try:
            return [str(item["id"]) for item in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            return []

    # --- waiting for each part -------------------------------------------------------------------------------

    def _waits(self, progress: StartProgress) -> dict[str, Coroutine[Any, Any, None]]:
        waits: dict[str, Coroutine[Any, Any, None]] = {}
        nodes: set[str] = set()
        for name, part in self._layout.parts.items():
            if part.exit_code is not None:
                continue
            if is_worker(part):
                waits[name] = self._wait_worker(part, progress)
            elif part.service == ServiceKind.STORE_NODE:
                nodes.add(name)
            elif part.service != ServiceKind.MASTER:
                waits[name] = self._wait_probe(part, progress)
        waits["the store nodes"] = self._wait_nodes(nodes, progress)
        if self._layout.gateway_url and any(is_worker(part) for part in self._layout.parts.values()):
            waits["models of the gateway"] = self._wait_models()
        return waits

    async def _wait_nodes(self, wanted: set[str], progress: StartProgress) -> None:
        seen: set[str] = set()
        while True:
            try:
                nodes = {node.node_id for node in await self._map_nodes()}
            except MooncacheError:
                await asyncio.sleep(POLL_S)
                continue
            if "master" not in seen and "master" in self._layout.parts:
                seen.add("master")
                progress("master", READY)
            for name in sorted((nodes & wanted) - seen):  # other machines have theirs
                seen.add(name)
                progress(name, READY)
            if wanted <= nodes:
                return
            await asyncio.sleep(POLL_S)

    async def _map_nodes(self) -> tuple[NodeView, ...]:
        """Active nodes of the current map. Raises what the call raises."""
        response = await self._link.call_once(
            "GetClusterMap", master_pb2.GetClusterMapRequest(), master_pb2.GetClusterMapResponse, _CALL_S
        )
        active = (node for node in response.map.nodes if node.state == common_pb2.NODE_STATE_ACTIVE)
        return tuple(view_of_node(node) for node in active)

    async def _wait_probe(self, part: Part, progress: StartProgress) -> None:
        said = ""
        while part.metrics:
            status, body = await http_get(part.metrics, "/ready")
            if status == 200:
                break
            reason = reason_of(body)
            if reason and reason != said:
                said = reason
                progress(part.name, PartNews(PartStage.BUSY, reason))
            await asyncio.sleep(POLL_S)
        progress(part.name, READY)

    async def _wait_worker(self, part: Part, progress: StartProgress) -> None:
        said: PartNews | None = None
        while True:
            for view in await self.instances():
                if (
                    view.instance.instance_id == part.name
                    and view.instance.state == conductor_pb2.INSTANCE_STATE_READY
                ):
                    progress(part.name, READY)
                    return
            news = await self._engine_start(part)
            if news is not None and news != said:
                said = news
                progress(part.name, news)
            await asyncio.sleep(ENGINE_POLL_S)

    async def _engine_start(self, part: Part) -> PartNews | None:
        """What an engine is doing while it starts, with the newest line of its own log."""
        status = await self.worker_status(part)
        if status is None or not status.doing:
            return None
        if status.instance.state == conductor_pb2.INSTANCE_STATE_READY:
            return PartNews(PartStage.BUSY, "registering")
        loads = status.engine_pid and status.instance.state == conductor_pb2.INSTANCE_STATE_STARTING
        words = last_words(part.log_path.with_suffix(".engine.log")) if loads else ""
        return PartNews(PartStage.BUSY, status.doing, words)

    async def _wait_models(self) -> None:
        while True:
            if await self.models():
                return
            await asyncio.sleep(ENGINE_POLL_S)

    async def _follow_engine(self, part: Part, progress: StartProgress) -> None:
        said = READY.text
        while True:
            await asyncio.sleep(ENGINE_POLL_S)
            status = await self.worker_status(part)
            if status is not None and status.doing and status.doing != said:
                said = status.doing
                ready = status.instance.state == conductor_pb2.INSTANCE_STATE_READY
                progress(part.name, PartNews(PartStage.READY if ready else PartStage.BUSY, said))

    # --- inside ----------------------------------------------------------------------------------------------

    def _channel(
        self, target: str, service: ServiceDescriptor, unavailable: type[MooncacheError]
    ) -> GrpcChannel:
        if target not in self._channels:
            self._channels[target] = GrpcChannel(
                target,
                service,
                token=self._token,
                credentials=self._credentials,
                unavailable_error=unavailable,
                server_name=self._tls.server_name,
            )
        return self._channels[target]

    def _refuse_crash(self) -> None:
        part = crashed(self._layout.parts)
        if part is None or part.exit_code is None:
            return
        if part.exit_code == EXIT_CONFIG and (refusal := part.refusal()):
            raise ConfigInvalid(f"{part.name}: {refusal}")
        how = describe_exit(part.exit_code)
        raise Internal(f"{part.name} ended with {how}.\n{part.log_tail()}\nIts log is {part.log_path}")

    def _too_late(self, waiting: list[str], timeout_s: float) -> MooncacheError:
        text = f"Not ready after {timeout_s:g} s: {', '.join(waiting)}. See {self._state_dir}/logs."
        engines = any(is_worker(part) for name, part in self._layout.parts.items() if name in waiting)
        if engines:
            return EngineUnavailable(text)
        return MasterUnavailable(text)


def reason_of(body: bytes) -> str:
    """What a probe answered, as words."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace").strip()[:200]
    return str(found.get("reason", ""))[:200] if isinstance(found, dict) else ""

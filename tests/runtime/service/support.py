"""A small service for tests: the master's RPC table with handlers that answer, wait or break on request."""

from __future__ import annotations

import asyncio
from typing import Any

from mooncache.auth import Identity, Token
from mooncache.config import Config
from mooncache.errors import NotLeader, StaleIncarnation, Unauthenticated
from mooncache.proto.v1 import master_pb2 as pb
from mooncache.runtime import rpc
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import CallContext, RpcTable
from mooncache.runtime.service import Service


async def get_status(
    state: dict[str, Any], _request: pb.GetStatusRequest, context: CallContext
) -> pb.GetStatusResponse:
    state.setdefault("contexts", []).append(context)
    return pb.GetStatusResponse(master_id=context.tenant, leading=context.admin)


async def get_task(
    state: dict[str, Any], request: pb.GetTaskRequest, _context: CallContext
) -> pb.GetTaskResponse:
    """Breaks in the way that the task's name says."""
    if request.task_id == "wait":
        state["waiting"] = True
        await asyncio.sleep(30)
    if request.task_id == "short":
        state["waiting"] = True
        await asyncio.sleep(0.2)
    if request.task_id == "defect":
        raise KeyError("inner secret detail")
    if request.task_id == "timeout":
        raise TimeoutError("of something inside")
    if request.task_id == "stale":
        raise StaleIncarnation("a newer one is there, ümlaut included")
    return pb.GetTaskResponse(task=pb.Task(task_id=request.task_id))


async def report(
    _state: Any, request: pb.ReportBlocksRequest, _context: CallContext
) -> pb.ReportBlocksResponse:
    return pb.ReportBlocksResponse(acked_seq=len(request.records))


async def heartbeat(
    state: dict[str, Any], request: pb.HeartbeatRequest, _context: CallContext
) -> pb.HeartbeatResponse:
    state.setdefault("heartbeats", []).append(request.last_seq)
    return pb.HeartbeatResponse(epoch=request.last_seq)


async def refuse(_state: Any, _request: Any, _context: CallContext) -> Any:
    raise NotLeader("ask 127.0.0.1:1")


def table(state: dict[str, Any]) -> RpcTable:
    handlers: dict[str, rpc.Handler] = dict.fromkeys(rpc.methods_of(rpc.MASTER_SERVICE), refuse)
    handlers |= {"GetStatus": get_status, "GetTask": get_task, "ReportBlocks": report, "Heartbeat": heartbeat}
    return RpcTable(rpc.MASTER_SERVICE, state, handlers, admin_only={"ReportBlocks"})


class PlainAuthenticator:
    """Takes "Bearer admin" and "Bearer tenant"; needs no hash."""

    def identify(self, authorization: str) -> Identity:
        if authorization == "Bearer admin":
            return Identity("default", admin=True)
        if authorization == "Bearer tenant":
            return Identity("t", admin=False)
        raise Unauthenticated("no")


class TestService(Service):
    """The table above, behind real ports."""

    __test__ = False

    def __init__(self, config: Config, **changes: Any) -> None:
        settings = {
            "host": "127.0.0.1",
            "port": 0,
            "metrics_port": 0,
            "call_count_max": 64,
            "drain_timeout_s": 5.0,
        }
        super().__init__("test", config, **(settings | changes))
        self.state: dict[str, Any] = {}
        self.not_ready = ""
        self.steps: list[str] = []

    async def build(self) -> RpcTable:
        self.steps.append("build")
        return table(self.state)

    async def listening(self) -> None:
        self.steps.append("listening")

    def readiness(self) -> str:
        return self.not_ready

    async def drain(self) -> None:
        self.steps.append("drain")

    async def shutdown(self) -> None:
        self.steps.append("shutdown")


def channel(service: Service, token: Token | str | None = None, **changes: Any) -> GrpcChannel:
    text = token if isinstance(token, str) else (token or service.token).text
    return GrpcChannel(service.grpc_target, rpc.MASTER_SERVICE, token=text, **changes)


async def http(service: TestService, path: str, method: str = "GET", extra: str = "") -> tuple[int, str]:
    """Status and body of a request to the probe port."""
    host, port = service.metrics_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n{extra}\r\n".encode())
    answer = (await asyncio.wait_for(reader.read(), 60)).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), body

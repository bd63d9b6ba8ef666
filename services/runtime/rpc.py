"""What a control call is, apart from how it travels: RpcTable (method name -> op) and CallContext.

An op is `async def handle(state, request, context) -> response`. The table's classes come from the proto's
service descriptor, so that no generated servicer is needed and both channels (gRPC, in-memory) dispatch into
the same table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from mooncache.errors import Unsupported
from mooncache.proto.v1 import conductor_pb2, master_pb2, process_pb2, store_node_pb2, worker_pb2

MASTER_SERVICE: Final[ServiceDescriptor] = master_pb2.DESCRIPTOR.services_by_name["MasterService"]
STORE_NODE_SERVICE: Final[ServiceDescriptor] = store_node_pb2.DESCRIPTOR.services_by_name["StoreNodeService"]
CONDUCTOR_SERVICE: Final[ServiceDescriptor] = conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"]
WORKER_SERVICE: Final[ServiceDescriptor] = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
PROCESS_SERVICE: Final[ServiceDescriptor] = process_pb2.DESCRIPTOR.services_by_name["ProcessService"]


@dataclass(frozen=True, slots=True)
class CallContext:
    """Who calls, and until when. `deadline_s` and `now_s` are on the service's Clock.now_s scale."""

    tenant: str
    admin: bool
    request_id: str
    deadline_s: float
    now_s: float

    @property
    def timeout_s(self) -> float:
        """Seconds that the call had when it began."""
        return max(0.0, self.deadline_s - self.now_s)


Handler = Callable[[Any, Any, CallContext], Awaitable[Message]]


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC as the proto describes it; `path` is gRPC's "/package.Service/Method"."""

    name: str
    path: str
    request_class: type[Message]
    response_class: type[Message]


@cache
def methods_of(service: ServiceDescriptor) -> Mapping[str, Method]:
    """The RPCs of a service by name. Made once, as each connection asks for it."""
    return {
        method.name: Method(
            name=method.name,
            path=f"/{service.full_name}/{method.name}",
            request_class=GetMessageClass(method.input_type),
            response_class=GetMessageClass(method.output_type),
        )
        for method in service.methods
    }


def check_method(methods: Mapping[str, Method], name: str, response_class: type[Message]) -> None:
    """Raises Unsupported when a service has no such RPC, TypeError when it answers with another message."""
    if name not in methods:
        raise Unsupported(f"There is no method {name}.")
    if methods[name].response_class is not response_class:
        raise TypeError(f"{name} does not answer with a {response_class.__name__}")


@dataclass(frozen=True, slots=True)
class Op:
    """One entry of the table."""

    method: Method
    handle: Handler
    admin_only: bool


class RpcTable:
    """The RPCs of one service bound to its state.

    `handlers` maps every RPC of `service` to its op's `handle`; a missing or unknown name is a TypeError at
    start. RPCs named in `admin_only` are refused with PERMISSION_DENIED for callers that hold no cluster
    token.
    """

    def __init__(
        self,
        service: ServiceDescriptor,
        state: object,
        handlers: Mapping[str, Handler],
        *,
        admin_only: Collection[str] = (),
    ) -> None:
        methods = methods_of(service)
        wrong = (methods.keys() ^ handlers.keys()) | (set(admin_only) - methods.keys())
        if wrong:
            raise TypeError(f"{service.full_name}: RPCs and handlers differ in {', '.join(sorted(wrong))}")
        self.service_name: str = service.full_name
        self.state = state
        self.ops: dict[str, Op] = {
            name: Op(method, handlers[name], name in admin_only) for name, method in methods.items()
        }

    def op(self, method: str) -> Op:
        """The op of an RPC. Raises Unsupported when there is none."""
        if method not in self.ops:
            raise Unsupported(
                f"{self.service_name} has no method {method}; the caller may be newer than this service"
            )
        return self.ops[method]

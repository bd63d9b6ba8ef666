"""KEDA's external scaler on a port of its own: how many instances a model needs, as a metric whose target is 1.

KEDA has no key to show, so the port only tells numbers, and is open where `conductor.scaler_enabled` says so. At an
error KEDA leaves the number of instances alone, so a conductor that knows nothing removes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from mooncache.conductor.core.models import ServedModel
from mooncache.conductor.state import ConductorState
from mooncache.errors import ConfigInvalid, InvalidArgument, ModelUnknown, MooncacheError
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.proto.keda import external_scaler_pb2 as keda
from mooncache.runtime.grpc_server import address
from mooncache.runtime.grpc_status import to_library
from mooncache.runtime.health import HealthPort

SCALER_SERVICE: Final = "externalscaler.ExternalScaler"
METRIC: Final = "mooncache_instances_needed"
_CALLS_MAX: Final = 256
_WATCHES_MAX: Final = 64
_WATCH_INTERVAL_S: Final = 1.0
_GRACE_S: Final = 1.0
_MESSAGE_BYTES_MAX: Final = 64 << 10
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),
)

ScalerAnswer = Callable[[Any], Message]


class ScalerPort:
    """Answers KEDA from `start` to `stop`; `port` is the real one."""

    def __init__(self, state: ConductorState) -> None:
        self._state = state
        self._closing = asyncio.Event()
        self._watches = 0
        self.port = 0
        self._health = HealthPort(lambda: {"": "", "liveness": "", SCALER_SERVICE: ""})
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_CALLS_MAX)
        answers: dict[str, tuple[ScalerAnswer, type[Message]]] = {
            "IsActive": (self.is_active, keda.ScaledObjectRef),
            "GetMetricSpec": (self.metric_spec, keda.ScaledObjectRef),
            "GetMetrics": (self.metrics, keda.GetMetricsRequest),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                _unary(answer), request.FromString, lambda message: message.SerializeToString()
            )
            for name, (answer, request) in answers.items()
        }
        handlers["StreamIsActive"] = grpc.unary_stream_rpc_method_handler(
            self._watch, keda.ScaledObjectRef.FromString, keda.IsActiveResponse.SerializeToString
        )
        generic = grpc.method_handlers_generic_handler(SCALER_SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic, self._health.handler()))

    async def start(self, host: str, port: int, credentials: grpc.ServerCredentials | None) -> None:
        """Listen. Raises ConfigInvalid when the address cannot be had."""
        where = address(host, port)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(where)
            else:
                self.port = self._server.add_secure_port(where, credentials)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ConfigInvalid(f"conductor.scaler_port {where} cannot be opened; choose another port.")
        await self._server.start()

    async def stop(self) -> None:
        """Close the port; watches end at once."""
        self._closing.set()
        self._health.close()
        await self._server.stop(_GRACE_S)

    def is_active(self, asked: keda.ScaledObjectRef) -> keda.IsActiveResponse:
        """Whether the model had anything to do lately. Raises ModelUnknown, InvalidArgument."""
        model, _ = self._asked(asked)
        return keda.IsActiveResponse(result=self._state.needs.is_active(model.name))

    def metric_spec(self, asked: keda.ScaledObjectRef) -> keda.GetMetricSpecResponse:
        """The metric and its target: one for each instance. Raises ModelUnknown, InvalidArgument."""
        self._asked(asked)
        spec = keda.MetricSpec(metric_name=METRIC, target_size=1, target_size_float=1.0)
        return keda.GetMetricSpecResponse(metric_specs=[spec])

    def metrics(self, asked: keda.GetMetricsRequest) -> keda.GetMetricsResponse:
        """The instances that the role needs now. Raises ModelUnknown, InvalidArgument."""
        if asked.metric_name not in ("", METRIC):
            raise InvalidArgument(f"There is no metric {asked.metric_name[:128]!r}; it is {METRIC}.")
        model, role = self._asked(asked.scaled_object_ref)
        now_s = self._state.clock.now_s()
        need = self._state.needs.need(model.name, role, model.book.view(now_s), now_s)
        value = keda.MetricValue(metric_name=METRIC, metric_value=math.ceil(need), metric_value_float=need)
        return keda.GetMetricsResponse(metric_values=[value])

    def _asked(self, asked: keda.ScaledObjectRef) -> tuple[ServedModel, InstanceRole]:
        """The model and the role that a trigger's metadata name. Raises ModelUnknown, InvalidArgument."""
        name, role = asked.scaler_metadata.get("model", ""), asked.scaler_metadata.get("role", "")
        if not name:
            raise InvalidArgument("The trigger's metadata name no `model`.")
        if role not in set(InstanceRole):
            raise InvalidArgument(
                f"The trigger's metadata name the role {role[:64]!r}; it is prefill, decode or both."
            )
        model = self._state.core.models.known(name)
        if model is None:
            raise ModelUnknown(f"No instance that serves {name[:256]!r} has registered here.")
        return model, InstanceRole(role)

    async def _watch(self, asked: keda.ScaledObjectRef, context: Any) -> AsyncIterator[keda.IsActiveResponse]:
        """The answer of IsActive, now and whenever it changes."""
        if self._watches >= _WATCHES_MAX:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many watches are open; use IsActive."
            )
        self._watches += 1
        try:
            said: bool | None = None
            while not self._closing.is_set():
                found = await _told(context, self.is_active, asked)
                if found.result != said:
                    said = found.result
                    yield found
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), _WATCH_INTERVAL_S)
        finally:
            self._watches -= 1


def _unary(answer: ScalerAnswer) -> Callable[[Any, Any], Awaitable[Message]]:
    async def behave(request: Any, context: Any) -> Message:
        found: Message = await _told(context, answer, request)
        return found

    return behave


async def _told(context: Any, answer: Callable[[Any], Any], request: Any) -> Any:
    """The answer; an error of the catalogue becomes gRPC's."""
    try:
        return answer(request)
    except MooncacheError as error:
        await context.abort(to_library(error.grpc_status), error.message)

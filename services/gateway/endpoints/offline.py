"""One request of a batch: the driver that waits until the conductor finds something idle, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from mooncache.errors import (
    ConductorUnavailable,
    EngineDied,
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    Internal,
    MooncacheError,
    NoInstances,
    Overloaded,
)
from mooncache.gateway.core import faults
from mooncache.gateway.core.batch import BatchUsage
from mooncache.gateway.core.batch_lines import BatchLine
from mooncache.gateway.core.faults import Fault, Refusal
from mooncache.gateway.core.whole_answer import events_of, whole_answer
from mooncache.gateway.endpoints.completions import RequestDriver, infer
from mooncache.gateway.shell.exchange import ClientGone
from mooncache.gateway.shell.offline_exchange import OfflineExchange
from mooncache.gateway.state import GatewayState
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.tasks import wait_for_event

LATER: Final = frozenset(each.name for each in (Overloaded, NoInstances, ConductorUnavailable))
"""Nothing is idle, or nothing is there: the request is tried again for as long as its batch may take."""
AGAIN: Final = frozenset(each.name for each in (EngineDied, EngineFailed, EngineTimeout, EngineUnavailable))
"""It may have been the engine: a request is tried a few times."""
_RETRY_S: Final = 1.0
_WHOLE_ONLY: Final = ("prompt_logprobs", "use_beam_search")  # engines do not stream these

log = get_logger(__name__)


class OfflineDriver(RequestDriver):
    """Asks for a plan until there is one; from then on it is a request like any other."""

    async def run(self) -> None:
        exchange = self._exchange
        assert isinstance(exchange, OfflineExchange)
        while True:
            exchange.freed.clear()
            try:
                await self._planner.first()
                break
            except Refusal as refusal:
                if refusal.fault.name not in LATER:
                    raise
                await wait_for_event(exchange.freed, refusal.fault.retry_after_s or _RETRY_S)
        exchange.started_s = (
            self._state.clock.now_s()
        )  # what it waited for is no part of its time to the first token
        exchange.admitted.set()
        await super().run()

    async def _first_plan(self) -> None:
        """There is one."""


@dataclass(frozen=True, slots=True)
class OfflineAnswer:
    """What came of a request. `fault`: why it was not answered."""

    status: int
    body: dict[str, Any]
    usage: BatchUsage
    fault: Fault | None = None


async def ask(state: GatewayState, exchange: OfflineExchange, *, chat: bool) -> OfflineAnswer:
    """Serve a request of a batch. Never raises, but is cancelled with its batch."""
    try:
        await infer(state, exchange, chat=chat, drives=OfflineDriver)
        return _answer(exchange, chat=chat)
    except Refusal as refusal:
        return _refused(refusal.fault)
    except MooncacheError as error:
        return _refused(faults.of_error(error))
    except (ClientGone, msgspec.DecodeError) as error:
        return _refused(faults.of_error(EngineFailed(f"The answer cannot be read ({type(error).__name__}).")))
    except Exception as error:
        log.error(Event.RPC_DEFECT, error=repr(error), exc_info=error)
        return _refused(
            faults.of_error(Internal("The request failed unexpectedly; the gateway's log says why."))
        )
    finally:
        exchange.unwatch()


def streamed(line: BatchLine) -> bytes:
    """The body as it is sent: with `stream`, since only so it is seen when the prompt is computed."""
    body = msgspec.json.decode(line.body, type=dict[str, msgspec.Raw])
    if any(name in body for name in _WHOLE_ONLY):
        return line.body
    options = msgspec.json.encode({"include_usage": True})
    return msgspec.json.encode({**body, "stream": True, "stream_options": msgspec.Raw(options)})


def _answer(exchange: OfflineExchange, *, chat: bool) -> OfflineAnswer:
    content = bytes(exchange.content)
    if content.lstrip().startswith(b"{"):
        body = msgspec.json.decode(content, type=dict[str, Any])
    else:
        body = whole_answer(events_of(content), chat=chat)
    if "error" in body:
        found = faults.engine_event_fault(body)
        return _refused(found or faults.of_error(EngineFailed("The engine ended the answer with an error.")))
    usage = body.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    counted = BatchUsage(
        int(usage.get("prompt_tokens") or 0),
        int(details.get("cached_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
    )
    return OfflineAnswer(200, body, counted)


def _refused(fault: Fault) -> OfflineAnswer:
    return OfflineAnswer(fault.status, msgspec.json.decode(fault.body()), BatchUsage(), fault)

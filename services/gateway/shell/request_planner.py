"""Plans of one request: the conductor's, or the gateway's own choice when the conductor cannot be asked."""

from __future__ import annotations

from mooncache.errors import MooncacheError, NoInstances
from mooncache.gateway.core import faults
from mooncache.gateway.core.offenders import TRIES_MAX, digest_of
from mooncache.gateway.core.plan import Attempts, LegPlan, RequestPlan
from mooncache.gateway.core.prepared import Prepared
from mooncache.gateway.messages import plan_of, schedule_request
from mooncache.gateway.shell.exchange import Exchange
from mooncache.gateway.state import GatewayState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.logs import Event, get_logger

log = get_logger(__name__)


class RequestPlanner:
    """Asks for plans and counts what was tried.

    Attributes: `attempts` what was tried; `prompt_tokens` an estimate where the prompt is not tokenized.
    """

    def __init__(
        self, state: GatewayState, exchange: Exchange, prepared: Prepared, prompt_tokens: int
    ) -> None:
        self._state, self._exchange = state, exchange
        self._request, self._tokenized = prepared.request, prepared.tokenized
        self._digest = digest_of(prepared.request.path, prepared.forward)
        self.attempts, self.prompt_tokens = Attempts(), prompt_tokens

    async def first(self) -> RequestPlan:
        """The first plan. Raises Refusal: no engine may or can serve the request, or engines ended under it before."""
        self._state.offenders.refuse_offender(self._digest, self._state.clock.now_s())
        return await self._schedule()

    async def another(self) -> RequestPlan | None:
        """A plan for another attempt; None when there is none."""
        try:
            return await self._schedule()
        except (faults.Refusal, MooncacheError):
            return None

    def served(self) -> None:
        """The request has its answer: it is not the kind that ends engines."""
        self._state.offenders.served(self._digest)

    def died(self) -> bool:
        """An engine ended under this request; whether it may have another one."""
        self.attempts.deaths += 1
        total = self._state.offenders.died(self._digest, self._state.clock.now_s())
        log.warning(Event.ENGINE_DIED, deaths=total, model=self._request.model)
        return self.attempts.deaths < TRIES_MAX and total <= TRIES_MAX

    def release(self) -> None:
        """No plan will be asked for any more: forget the prompt."""
        self._tokenized = None

    async def _schedule(self) -> RequestPlan:
        request, caller = self._request, self._exchange.require_caller()
        asked = schedule_request(
            self._exchange.request_id,
            caller.tenant,
            request,
            self._tokenized,
            self.attempts,
            prompt_tokens=self.prompt_tokens,
            is_admin=caller.admin,
        )
        response = await self._state.conductor.schedule(asked)
        # A conductor that was just started knows fewer models than the last list: that is no 404.
        if response is not None and response.reason != pb.ADMISSION_REASON_UNKNOWN_MODEL:
            return plan_of(response, request.model, no_prefill=asked.no_prefill)
        self._state.stats.unscheduled.inc()
        instance = self._state.fleet.next_instance(request.model, self.attempts.exclude)
        if instance is None:
            raise faults.refuse(NoInstances(f"No instance that serves {request.model} can be reached now."))
        return RequestPlan(LegPlan(instance.instance_id, instance.url), summary="unscheduled")

"""Requests that were scheduled and have not ended, by decision and by request.

Who they are is here; what they weigh on their instances is in the book of instances (`FleetBook`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from mooncache.conductor.core.differences import PlannedCache
from mooncache.conductor.core.handover_node import NodesByHost
from mooncache.kvcache.leg_hint import CacheReport

SILENT_MAX = 8192
"""Ended requests whose decode leg may still be reported."""


class Stage(StrEnum):
    """What an admitted request is doing."""

    COMPUTING = "computing"
    GENERATING = "generating"


@dataclass(slots=True)
class Active:
    """A scheduled request that has not ended."""

    decision_id: str
    request_id: str
    tenant: str
    model: str
    prefiller: str  # instance that computes the prompt
    decoder: str  # instance that generates
    prompt_tokens: int
    prefix_tokens: int
    sequences: int
    assigned_s: float
    expected_ttft_s: float
    keys: bytes = b""
    content_keys: bytes = b""
    group: int = 0
    lengths_class: str = ""  # whose answers its answer is expected to be like
    waiting_s: float = 0.0  # of its expected TTFT, and what was promised
    promised_ttft_s: float = 0.0
    phase: Stage = Stage.COMPUTING
    first_token_s: float = 0.0
    compute_seen_s: float = 0.0  # how long the prompt took, as observed
    awaited_tokens: int = 0  # that the decode leg waits for, from the prefill leg of this request
    wait_s: float = 0.0  # how long it does at most
    expected_wait_s: float = 0.0  # and is expected to, before what was learnt of other waits
    handover_priced_s: float = (
        0.0  # from the prefill's end to the first token, without what is learnt of that
    )
    prefilled_s: float = 0.0  # when the prefill leg had ended well
    handover: str = ""  # what became of it, once that is known
    store_node: str = ""  # through which its legs hand over, "" when placement decides
    block_tokens: int = 0
    awaits: str = ""  # the decision whose prompt it waits for instead of computing the same
    computing: PlannedCache | None = None  # what the leg that computes the prompt is expected to find
    decoding: PlannedCache | None = None  # what the decode leg is, when another one computes the prompt
    decode_cache: CacheReport | None = (
        None  # what the engine of the decode leg said, by whichever way it came first
    )
    nodes: NodesByHost = field(default_factory=dict)  # store nodes by host, as they were
    successor: str = ""  # the decision that took over its decode leg
    gateway_run: int = 0  # number of the gateway's process that asked, 0 when it did not say


class WorkBook:
    """Requests that were scheduled and have not ended. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._active: dict[str, Active] = {}
        self._by_request: dict[tuple[str, str], str] = {}
        self._silent: OrderedDict[str, Active] = OrderedDict()  # ended before their decode leg was reported
        self._awaited: Counter[str] = Counter()  # how many active requests wait for a decision's blocks

    def __len__(self) -> int:
        return len(self._active)

    def get(self, decision_id: str) -> Active | None:
        """An active request."""
        return self._active.get(decision_id)

    def of_request(self, tenant: str, request_id: str) -> Active | None:
        """The newest active decision of a tenant's request."""
        return self._active.get(self._by_request.get((tenant, request_id), ""))

    def assign(self, active: Active) -> None:
        """Keep a request from now on."""
        self._active[active.decision_id] = active
        if active.awaits:
            self._awaited[active.awaits] += 1
        self._by_request[active.tenant, active.request_id] = active.decision_id

    def end(self, decision_id: str) -> Active | None:
        """Forget a request; return it, None when it was not active."""
        active = self._active.pop(decision_id, None)
        if active is not None and active.awaits:
            self._awaited[active.awaits] -= 1
            if not self._awaited[active.awaits]:
                del self._awaited[active.awaits]
        if active is not None and self._by_request.get((active.tenant, active.request_id)) == decision_id:
            del self._by_request[active.tenant, active.request_id]
        if active is not None and active.decode_cache is None:
            active.keys = active.content_keys = b""
            self._silent[decision_id] = active
            if len(self._silent) > SILENT_MAX:
                self._silent.popitem(last=False)
        return active

    def take_over(self, decision_id: str, successor: str) -> None:
        """The decode leg of an ended decision goes on, and belongs to another one now."""
        silent = self._silent.get(decision_id)
        if silent is not None:
            silent.successor = successor

    def reported(self, decision_id: str, instance_id: str, cache: CacheReport) -> Active | None:
        """The engine of a decode leg that was sent by this decision said what its cache did.

        Returns the request, active or ended, to which the leg belongs. None when it is not remembered, was reported
        before, or is no leg of that instance.
        """
        active = self._silent.get(decision_id)
        while active is not None and active.successor:
            decision_id = active.successor
            active = self._silent.get(decision_id)
        active = active or self._active.get(decision_id)
        if active is None or active.decoder != instance_id or active.decode_cache is not None:
            return None
        self._silent.pop(decision_id, None)
        active.decode_cache = cache
        return active

    def awaited(self, decision_id: str) -> bool:
        """Whether an active request waits for the blocks of this one."""
        return decision_id in self._awaited

    def expired(self, before_s: float) -> list[str]:
        """Decisions that were assigned before `before_s` (the book is in order of assignment)."""
        found = []
        for decision_id, active in self._active.items():
            if active.assigned_s >= before_s:
                break
            found.append(decision_id)
        return found

    def gateway_runs(self) -> dict[str, int]:
        """Each active decision, and the process of the gateway for which it was made."""
        return {decision_id: active.gateway_run for decision_id, active in self._active.items()}

    def unnamed(self, gateway_run: int, named: frozenset[str], before_s: float) -> list[str]:
        """Decisions for a gateway's process that were assigned before `before_s` and that it does not name."""
        return [
            decision_id
            for decision_id in self.expired(before_s)
            if self._active[decision_id].gateway_run == gateway_run and decision_id not in named
        ]

    def touching(self, instance_id: str) -> list[Active]:
        """Active requests with a leg on the instance, the oldest first."""
        return [a for a in self._active.values() if instance_id in (a.prefiller, a.decoder)]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert set(self._by_request.values()) <= set(self._active), "a request points at an ended decision"
        assert not self._silent.keys() & self._active.keys(), "a decision has ended and has not"
        assert len(self._silent) <= SILENT_MAX
        waiting = Counter(active.awaits for active in self._active.values() if active.awaits)
        assert waiting == self._awaited, "requests that wait are counted wrongly"

"""What was sent where and has not ended: the conductor's own view of load, newer than any report.

Counting assignments at once is what keeps a burst from herding onto the instance that looked best a moment
ago. `queue_s` is the sum of the expected prefill times in front of a newcomer, less what the first of them
has had already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

COMPUTING, GENERATING = "computing", "generating"


@dataclass(slots=True)
class Active:
    """A scheduled request that has not ended.

    computer: instance that computes the prompt; decoder: instance that generates. kv_tokens: KV that it will
    take there.
    """

    decision_id: str
    request_id: str
    tenant: str
    model: str
    computer: str
    decoder: str
    prompt_tokens: int
    prefix_tokens: int
    compute_s: float
    sequences: int
    kv_tokens: int
    assigned_s: float
    expected_ttft_s: float
    keys: bytes = b""
    content_keys: bytes = b""
    group: int = 0
    phase: str = COMPUTING
    first_token_s: float = 0.0
    compute_seen_s: float = 0.0  # how long the prompt took, as observed


@dataclass(slots=True)
class _Load:
    """Work of one instance. `pending` keeps the order of assignment: engines take prompts first come first
    served."""

    pending: dict[str, float] = field(default_factory=dict)
    pending_s: float = 0.0
    begun_s: float = 0.0  # when the first of `pending` began
    sequences: int = 0
    kv_tokens: int = 0


class WorkBook:
    """See the module's text. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._active: dict[str, Active] = {}
        self._by_request: dict[tuple[str, str], str] = {}
        self._loads: dict[str, _Load] = {}

    def __len__(self) -> int:
        return len(self._active)

    def get(self, decision_id: str) -> Active | None:
        """Return an active request."""
        return self._active.get(decision_id)

    def of_request(self, tenant: str, request_id: str) -> Active | None:
        """Return the newest active decision of a tenant's request."""
        return self._active.get(self._by_request.get((tenant, request_id), ""))

    def assign(self, active: Active) -> None:
        """Count a request from now on."""
        self._active[active.decision_id] = active
        self._by_request[active.tenant, active.request_id] = active.decision_id
        computing = self._loads.setdefault(active.computer, _Load())
        if not computing.pending:
            computing.begun_s = active.assigned_s
        computing.pending[active.decision_id] = active.compute_s
        computing.pending_s += active.compute_s
        generating = self._loads.setdefault(active.decoder, _Load())
        generating.sequences += active.sequences
        generating.kv_tokens += active.kv_tokens

    def computed(self, decision_id: str, now_s: float) -> float | None:
        """Note that the prompt is computed; return when its instance could have begun with it, None if known
        before."""
        active = self._active.get(decision_id)
        if active is None or active.phase != COMPUTING:
            return None
        active.phase = GENERATING
        began_s = max(active.assigned_s, self._loads[active.computer].begun_s)
        self._take_off(active, now_s)
        return began_s

    def end(self, decision_id: str, now_s: float) -> Active | None:
        """Forget a request; return it, None when it was not active."""
        active = self._active.pop(decision_id, None)
        if active is None:
            return None
        if active.phase == COMPUTING:
            self._take_off(active, now_s)
        if self._by_request.get((active.tenant, active.request_id)) == decision_id:
            del self._by_request[active.tenant, active.request_id]
        load = self._loads[active.decoder]
        load.sequences -= active.sequences
        load.kv_tokens -= active.kv_tokens
        for name in {active.computer, active.decoder}:
            left = self._loads.get(name)
            if left is not None and not left.pending and not left.sequences:
                del self._loads[name]
        return active

    def expired(self, before_s: float) -> list[str]:
        """Return decisions that were assigned before `before_s` (the book is in order of assignment)."""
        found = []
        for decision_id, active in self._active.items():
            if active.assigned_s >= before_s:
                break
            found.append(decision_id)
        return found

    def touching(self, instance_id: str) -> list[Active]:
        """Return active requests with a leg on the instance."""
        return [a for a in self._active.values() if instance_id in (a.computer, a.decoder)]

    def load(self, instance_id: str, now_s: float) -> tuple[int, float, int, int]:
        """Return what was sent there: prompts not computed yet, their time, sequences to generate, their KV
        tokens."""
        load = self._loads.get(instance_id)
        if load is None:
            return 0, 0.0, 0, 0
        queue_s = 0.0
        if load.pending:
            first_s = next(iter(load.pending.values()))
            queue_s = max(0.0, load.pending_s - min(first_s, max(0.0, now_s - load.begun_s)))
        return len(load.pending), queue_s, load.sequences, load.kv_tokens

    def assigned(self, instance_id: str) -> int:
        """Return how many requests have a leg there."""
        load = self._loads.get(instance_id)
        return max(len(load.pending), load.sequences) if load is not None else 0

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        pending: dict[str, set[str]] = {}
        generating: dict[str, tuple[int, int]] = {}
        for active in self._active.values():  # once: there may be thousands, and requests wait meanwhile
            if active.phase == COMPUTING:
                pending.setdefault(active.computer, set()).add(active.decision_id)
            sequences, kv_tokens = generating.get(active.decoder, (0, 0))
            generating[active.decoder] = sequences + active.sequences, kv_tokens + active.kv_tokens
        assert pending.keys() | generating.keys() <= self._loads.keys(), "an instance with work has no load"
        for name, load in self._loads.items():
            assert pending.get(name, set()) == load.pending.keys(), f"pending work of {name} is wrong"
            assert abs(load.pending_s - sum(load.pending.values())) < 1e-6 * (1 + load.pending_s)
            assert (load.sequences, load.kv_tokens) == generating.get(name, (0, 0)), (
                f"load of {name} is wrong"
            )
        assert set(self._by_request.values()) <= set(self._active), "a request points at an ended decision"

    def _take_off(self, active: Active, now_s: float) -> None:
        load = self._loads[active.computer]
        first = next(iter(load.pending), None)
        load.pending_s -= load.pending.pop(active.decision_id)
        if first == active.decision_id:
            load.begun_s = now_s
        if not load.pending:
            load.pending_s = 0.0

"""The last decisions as the console knows them: short rows, and what they say together.

A row is made from a record of the conductor (docs/reference-decision.md). Records of requests that run change later, so
the book also says where the next look at an old open one begins. What a record does not say is None here; a record of
another version may lack fields, and counts with those that it has.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mooncache.gateway.core.console_money import ConsoleMoney

ROWS_MAX: Final = 4000
_TEXT_MAX: Final = 256
_OPEN: Final = "running"
_ENDED: Final = frozenset({"finished", "failed", "aborted", "expired", "lost"})


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One decision in short. Times in milliseconds but for `made_at_s`; None: not known, or not applicable."""

    decision_id: str
    request_id: str
    tenant: str
    model: str
    made_at_s: float
    state: str
    reason: str
    attempt: int
    prefill: str
    decode: str
    branch: str
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int | None
    ttft_ms: float | None
    tbt_ms: float | None
    total_ms: float | None
    promised_ttft_ms: float | None
    promised_tbt_ms: float | None
    kept: bool | None  # whether the request got what was promised
    saved_ms: float | None  # time of engines that caches saved
    cost: float | None = None  # money; None without a price book
    saved_cost: float | None = None
    saved_dram_cost: float | None = None  # the part of the pool's memory
    saved_ssd_cost: float | None = None  # that of its disks


def row_of(record: Mapping[str, Any], money: ConsoleMoney | None = None) -> DecisionRow | None:
    """The row of a record; None for what is no record. money: what prices it."""
    decision_id = _text(record.get("decision_id"))
    if not decision_id:
        return None
    observed, chosen = _table(record.get("observed")), _table(record.get("chosen"))
    promised = _table(record.get("promised"))
    prompt = int(_number(record.get("prompt_tokens")) or 0)
    cached = _cached_tokens(record, observed, prompt)
    streamed = observed.get("streamed") is not False
    state, output = _text(record.get("state")), _number(observed.get("output_tokens"))
    ttft_ms = _number(observed.get("ttft_ms")) if streamed else None
    tbt_ms = _number(observed.get("tbt_ms")) if streamed else None
    cost = money.price(record) if money is not None else None
    limits = (_number(promised.get("ttft_ms")), _number(promised.get("tbt_ms")))
    return DecisionRow(
        decision_id=decision_id,
        request_id=_text(record.get("request_id")),
        tenant=_text(record.get("tenant")),
        model=_text(record.get("model")),
        made_at_s=_number(record.get("made_at_s")) or 0.0,
        state=state,
        reason=_text(record.get("reason")),
        attempt=int(_number(record.get("attempt")) or 0),
        prefill=_text(chosen.get("prefill")),
        decode=_text(chosen.get("decode")),
        branch=_text(chosen.get("branch")),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=None if output is None else int(output),
        ttft_ms=ttft_ms,
        tbt_ms=tbt_ms,
        total_ms=_number(observed.get("total_ms")),
        promised_ttft_ms=limits[0],
        promised_tbt_ms=limits[1],
        kept=_kept(state, ((ttft_ms, limits[0]), (tbt_ms, limits[1]))),
        saved_ms=_saved_ms(record, cached, streamed=streamed),
        cost=cost.total if cost is not None else None,
        saved_cost=cost.saved if cost is not None else None,
        saved_dram_cost=cost.saved_dram if cost is not None else None,
        saved_ssd_cost=cost.saved_ssd if cost is not None else None,
    )


def _kept(state: str, pairs: Sequence[tuple[float | None, float | None]]) -> bool | None:
    """Whether what was seen is within what was promised; None where that cannot be said."""
    if state == "failed":
        return False
    if state != "finished":
        return None
    judged = [seen <= limit for seen, limit in pairs if seen is not None and limit]
    return all(judged) if judged else None


def _cached_tokens(record: Mapping[str, Any], observed: Mapping[str, Any], prompt: int) -> int | None:
    """Prompt tokens that were not computed for the request."""
    events = record.get("events")
    for event in reversed(events if isinstance(events, list) else []):
        cached = _number(_table(event).get("cached_tokens"))
        if cached is not None:
            return min(int(cached), prompt)
    computed = _number(observed.get("computed_tokens"))
    return None if computed is None else max(0, prompt - int(computed))


def _saved_ms(record: Mapping[str, Any], cached: int | None, *, streamed: bool) -> float | None:
    """What the cost model gave for the whole prompt, less the computing that was seen; below 0: caches cost more."""
    if record.get("state") not in _ENDED or cached is None:
        return None
    if cached == 0:
        return 0.0
    whole = _number(_table(record.get("expected")).get("without_cache_ms"))
    spans = record.get("spans")
    computing = [
        (_number(span.get("to_ms")) or 0.0) - (_number(span.get("from_ms")) or 0.0)
        for span in map(_table, spans if isinstance(spans, list) else [])
        if span.get("part") == "compute"
    ]
    if whole is None or not computing or not streamed:
        return None
    return whole - math.fsum(computing)


class DecisionBook:
    """The newest rows, by decision id. `take` what pages of ListDecisions say; older rows than `rows_max` go."""

    def __init__(self, rows_max: int = ROWS_MAX, money: ConsoleMoney | None = None) -> None:
        self._rows_max, self._money = rows_max, money
        self._rows: dict[str, DecisionRow] = {}
        self._order: list[str] = []  # oldest first
        self._open: OrderedDict[str, None] = OrderedDict()  # the one that was looked at longest ago first

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, records: Iterable[Mapping[str, Any]]) -> int:
        """Take a page in, the newest first; how many of it were not known."""
        fresh: list[DecisionRow] = []
        for record in records:
            row = row_of(record, self._money)
            if row is None:
                continue
            if row.decision_id not in self._rows:
                fresh.append(row)
            self._rows[row.decision_id] = row
            self._open.pop(row.decision_id, None)
            if row.state == _OPEN:
                self._open[row.decision_id] = None
        if fresh:
            self._order += [row.decision_id for row in reversed(fresh)]
            self._order.sort(key=lambda name: self._rows[name].made_at_s)  # nearly sorted, so nearly linear
            for name in self._order[: -self._rows_max]:
                del self._rows[name]
                self._open.pop(name, None)
            del self._order[: -self._rows_max]
        return len(fresh)

    def next_look(self, page: int) -> str:
        """The decision before which the next look at open ones begins; "" when the newest page shows them all.

        page: how many of the newest are looked at anyway. The one that was looked at longest ago is next.
        """
        newest = set(self._order[-page:])
        for name in self._open:
            if name not in newest:
                self._open.move_to_end(name)
                return self._order[self._order.index(name) + 1]
        return ""

    def forget_open(self, before: str) -> None:
        """The decision just older than `before` is no longer kept by the conductor: it stays as it is."""
        at = self._order.index(before) if before in self._rows else 0
        if at > 0:
            self._open.pop(self._order[at - 1], None)

    def newest(self, count: int) -> list[DecisionRow]:
        """The newest rows, the newest first."""
        return [self._rows[name] for name in reversed(self._order[-count:])]

    def within(self, since_s: float) -> list[DecisionRow]:
        """Rows that were made since then, the newest first."""
        found = []
        for name in reversed(self._order):
            row = self._rows[name]
            if row.made_at_s < since_s:
                break
            found.append(row)
        return found

    def begins_s(self) -> float | None:
        """When the oldest row was made; None without a row."""
        return self._rows[self._order[0]].made_at_s if self._order else None

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert sorted(self._order) == sorted(self._rows), "order and rows disagree"
        assert len(self._order) <= self._rows_max, "too many rows"
        assert all(self._rows[name].state == _OPEN for name in self._open), "an open row is not open"
        times = [self._rows[name].made_at_s for name in self._order]
        assert times == sorted(times), "rows out of order"


def figures(rows: Sequence[DecisionRow]) -> dict[str, Any]:
    """What rows say together. Shares are None without anything to judge."""
    counted = [row for row in rows if row.state != "superseded"]
    judged = [row.kept for row in counted if row.kept is not None]
    known = [row for row in counted if row.cached_tokens is not None]
    prompt = sum(row.prompt_tokens for row in known)
    cached = sum(row.cached_tokens or 0 for row in known)
    saved = [row.saved_ms for row in counted if row.saved_ms is not None]
    saved_costs = [row.saved_cost for row in counted if row.saved_cost is not None]
    costs = [row.cost for row in counted if row.cost is not None]
    first = sorted(row.ttft_ms for row in counted if row.ttft_ms is not None)
    between = sorted(row.tbt_ms for row in counted if row.tbt_ms is not None)
    states: dict[str, int] = {}
    for row in counted:
        states[row.state] = states.get(row.state, 0) + 1
    return {
        "requests": len(counted),
        "states": dict(sorted(states.items())),
        "judged": len(judged),
        "kept_share": sum(judged) / len(judged) if judged else None,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_share": cached / prompt if prompt else None,
        "output_tokens": sum(row.output_tokens or 0 for row in counted),
        "saved_s": math.fsum(saved) / 1e3 if saved else None,
        "saved_known": len(saved),
        "cost": math.fsum(costs) if costs else None,
        "saved_cost": math.fsum(saved_costs) if saved_costs else None,
        "saved_dram_cost": math.fsum(row.saved_dram_cost or 0.0 for row in counted) if saved_costs else None,
        "saved_ssd_cost": math.fsum(row.saved_ssd_cost or 0.0 for row in counted) if saved_costs else None,
        "ttft_p50_ms": quantile_of(first, 0.5),
        "ttft_p95_ms": quantile_of(first, 0.95),
        "tbt_p50_ms": quantile_of(between, 0.5),
        "tbt_p95_ms": quantile_of(between, 0.95),
    }


def series(rows: Sequence[DecisionRow], since_s: float, step_s: float, count: int) -> list[dict[str, Any]]:
    """The same in `count` steps of time, the oldest first; what was made later than the last is left out."""
    steps: list[list[DecisionRow]] = [[] for _ in range(count)]
    for row in rows:
        at = math.floor((row.made_at_s - since_s) / step_s)
        if 0 <= at < count:
            steps[at].append(row)
    found = []
    for at, part in enumerate(steps):
        said = figures(part)
        names = ("requests", "kept_share", "hit_share", "ttft_p50_ms", "ttft_p95_ms")
        refused = said["states"].get("refused", 0)
        found.append(
            {"at_s": since_s + at * step_s, "refused": refused, **{name: said[name] for name in names}}
        )
    return found


def quantile_of(ordered: Sequence[float], share: float) -> float | None:
    """The value of that rank of sorted values; None without any."""
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else None


def _text(value: object) -> str:
    return value[:_TEXT_MAX] if isinstance(value, str) else ""


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float | None:
    """A finite number that is not below 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)

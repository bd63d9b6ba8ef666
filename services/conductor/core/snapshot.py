"""What a policy saw, in few bytes, so that it can be asked again: what would another policy have done?

A snapshot holds the columns of some rows as 32-bit numbers, the request, and the decode load that was expected at
three moments ahead. `fleet` and `policy_request` make of it what a policy takes. Costs computed from it differ from the
original ones by rounding only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import NO_ROW, Awaited, Floats, Ints, PrefixSource, Request

_SKIPPED = ("now_s", "names", "predict", "generating_s", "cached_summary")
_COLUMNS = tuple(field.name for field in fields(Fleet) if field.name not in _SKIPPED)
_WHOLE = ("role", "queue_prompts", "pipeline")
_FLAGS = ("ready", "pool", "tail")
_LAST_S = 30.0
_columns_of = attrgetter(*_COLUMNS)
Moments = tuple[float, float, float]
_PLAIN = tuple(
    field.name for field in fields(Request) if field.name not in ("local", "sources", "awaited", "exclude")
)


class Snapshot(msgspec.Struct, frozen=True):
    """The columns that a policy used, compressed."""

    names: list[str]
    rows: list[int]  # the rows of the fleet that are kept, in this order
    columns: bytes
    groups: list[int]
    local: bytes
    ahead_s: tuple[float, float, float]
    ahead: bytes
    request: dict[str, Any]
    sources: list[tuple[int, int, tuple[float, float], list[list[int] | None], list[float] | None]]
    """Of a `PrefixSource` its row, tokens, rates, counts (here, cold, held) and seconds."""
    awaited: list[tuple[int, float, int, str, bool]]

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        return len(self.columns) + len(self.local) + len(self.ahead) + 80 * len(self.names)

    def fleet(self) -> Fleet:
        """The kept rows as a fleet."""
        count = len(self.rows)
        table = np.frombuffer(self.columns, dtype=np.float32).reshape(len(_COLUMNS), count).astype(np.float64)
        values: dict[str, Any] = dict(zip(_COLUMNS, table, strict=True))
        for name in _WHOLE:
            values[name] = values[name].astype(np.int64)
        for name in _FLAGS:
            values[name] = values[name] > 0
        values["group"] = np.array(self.groups, dtype=np.int64)
        ahead = np.frombuffer(self.ahead, dtype=np.float32).reshape(3, 2, count).astype(np.float64)
        return Fleet(now_s=0.0, names=self.names, predict=between(self.ahead_s, ahead), **values)

    def policy_request(self) -> Request:
        """The request, its rows renumbered to those that are kept; others are forgotten."""
        place = {row: at for at, row in enumerate(self.rows)}
        local: Ints = np.frombuffer(self.local, dtype=np.int64)
        sources = tuple(
            PrefixSource(
                place.get(row, NO_ROW),
                tokens,
                *rates,
                on_host=_column(counts[0]),
                on_ssd=_column(counts[1]),
                held=_column(counts[2]),
                held_s=_seconds(held_s),
            )
            for row, tokens, rates, counts, held_s in self.sources
            if row == NO_ROW or row in place
        )
        awaited = tuple(
            Awaited(tokens, ready_in_s, place.get(row, NO_ROW), decision_id, pool)
            for tokens, ready_in_s, row, decision_id, pool in self.awaited
        )
        plain = dict(self.request)
        plain["affinity"] = tuple(plain["affinity"])
        plain["demand"] = tuple(map(tuple, plain["demand"]))
        found = Request(local=local, sources=sources, awaited=awaited, **plain)
        return replace(found, keep_decode=place.get(found.keep_decode, NO_ROW))


def between(times: Moments, table: Floats) -> Callable[[Sequence[float]], Floats]:
    """The decode load ahead as a function of moments, straight between three that are known."""

    def expected(after_s: float) -> Floats:
        at = bisect_right(times, after_s) - 1
        if at >= 2 or at < 0:
            known: Floats = table[max(at, 0)]
            return known
        gap = times[at + 1] - times[at]
        share = (after_s - times[at]) / gap if gap > 0 else 0.0
        found: Floats = table[at] * (1 - share) + table[at + 1] * share
        return found

    def predict(moments_s: Sequence[float]) -> Floats:
        return table if moments_s == times else np.array([expected(after_s) for after_s in moments_s])

    return predict


def _moments(at_s: float) -> Moments:
    """The moments for which the decode load is kept.

    at_s: when the KV of the chosen option would be there; the load is exact for that moment.
    """
    middle_s = min(max(at_s, 0.0), 2 * _LAST_S)
    return 0.0, middle_s, max(_LAST_S, middle_s)


def copied(fleet: Fleet, at_s: float) -> Fleet:
    """The fleet with columns of its own, which the next event does not change. at_s: as for `take`."""
    moments = _moments(at_s)
    columns = dict(zip(_COLUMNS, map(np.ndarray.copy, _columns_of(fleet)), strict=True))
    predict = between(moments, fleet.predict(moments))
    return Fleet(now_s=fleet.now_s, names=list(fleet.names), predict=predict, **columns)


def take(fleet: Fleet, request: Request, at_s: float, rows: Ints | None = None) -> Snapshot:
    """The policy's view of these rows (None: of all that are not excluded).

    at_s: when the KV of the chosen option would be there; the decode load is kept exactly for that moment.
    """
    if rows is None:
        rows = np.flatnonzero(fleet.ready)
        if request.exclude:
            rows = rows[~np.isin(rows, list(request.exclude))]
    table = np.empty((len(_COLUMNS), len(rows)), dtype=np.float32)
    for at, name in enumerate(_COLUMNS):
        table[at] = getattr(fleet, name)[rows]
    moments = _moments(at_s)
    ahead = fleet.predict(moments).astype(np.float32).take(rows, axis=2)
    return Snapshot(
        [fleet.names[row] for row in rows],
        rows.tolist(),
        table.tobytes(),
        fleet.group[rows].tolist(),
        request.local[rows].astype(np.int64).tobytes(),
        moments,
        ahead.tobytes(),
        {name: getattr(request, name) for name in _PLAIN} | {"demand": tuple(request.demand)},
        [
            (
                s.row,
                s.tokens,
                (s.tokens_per_s, s.ssd_tokens_per_s),
                [_kept(column, rows) for column in (s.on_host, s.on_ssd, s.held)],
                _kept(s.held_s, rows),
            )
            for s in request.sources
        ],
        [(a.tokens, a.ready_in_s, a.row, a.decision_id, a.pool) for a in request.awaited],
    )


def _kept(column: Ints | Floats | None, rows: Ints) -> list[Any] | None:
    return column[rows].tolist() if column is not None else None


def _column(kept: list[int] | None) -> Ints | None:
    return np.array(kept, dtype=np.int64) if kept is not None else None


def _seconds(kept: list[float] | None) -> Floats | None:
    return np.array(kept, dtype=np.float64) if kept is not None else None

"""What was not well and when: successive looks at the cluster become incidents with a begin and an end.

Bounded: so many that go on are followed one by one, and so many that have ended are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

OPEN_MAX: Final = 50
ENDED_MAX: Final = 50
_CALM: Final = frozenset({"ready", "active", "starting", "draining"})
Subject = tuple[str, str]
"""Kind and name: ("instance", "decode-1"), ("node", "node-1"), ("service", "conductor")."""
SERVICE: Final = "service"


@dataclass(slots=True)
class Incident:
    """Times are Unix seconds. `until_s` None: it goes on. `gone`: it ended because its subject is no longer listed."""

    kind: str
    name: str
    state: str
    reason: str
    since_s: float
    until_s: float | None = None
    gone: bool = False


class IncidentBook:
    """`take` a look after another; the first one that shows a trouble is its begin."""

    def __init__(self, begun_s: float, open_max: int = OPEN_MAX, ended_max: int = ENDED_MAX) -> None:
        self.begun_s = begun_s
        self._open_max = open_max
        self._open: dict[Subject, Incident] = {}
        self._ended: deque[Incident] = deque(maxlen=ended_max)

    def take(self, at_s: float, kind: str, rows: Iterable[Mapping[str, Any]] | None) -> None:
        """All subjects of a kind with `id`, `state` and `reason`; None: not known this time, and nothing changes."""
        if rows is None:
            return
        seen: set[str] = set()
        for row in rows:
            name, state = str(row["id"]), str(row["state"])
            seen.add(name)
            reason = str(row.get("reason") or row.get("remark") or "")
            if state in _CALM and not (state == "draining" and row.get("remark")):
                self._end((kind, name), at_s, gone=False)
            else:
                self._go_on((kind, name), state, reason, at_s)
        for subject in [each for each in self._open if each[0] == kind and each[1] not in seen]:
            self._end(subject, at_s, gone=kind != SERVICE)

    def newest(self) -> list[dict[str, Any]]:
        """Those that go on, then those that have ended, each the newest first."""
        going_on = sorted(self._open.values(), key=lambda each: (-each.since_s, each.kind, each.name))
        return [asdict(each) for each in (*going_on, *reversed(self._ended))]

    def _go_on(self, subject: Subject, state: str, reason: str, at_s: float) -> None:
        known = self._open.get(subject)
        if known is not None:
            known.state, known.reason = state, reason or known.reason
        elif len(self._open) < self._open_max:
            self._open[subject] = Incident(*subject, state, reason, at_s)

    def _end(self, subject: Subject, at_s: float, *, gone: bool) -> None:
        ended = self._open.pop(subject, None)
        if ended is not None:
            ended.until_s, ended.gone = max(at_s, ended.since_s), gone  # the clock may have been set back
            self._ended.append(ended)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self._open) <= self._open_max, "too many incidents go on"
        assert all(each.until_s is None for each in self._open.values()), "an open incident has an end"
        assert all(each.until_s is not None and each.until_s >= each.since_s for each in self._ended), (
            "no end"
        )

"""Which processes the cluster has: who announced itself, or was named by the master. For people; decides nothing.

A member that says nothing for longer than its lease is silent, then gone; one that said goodbye has stopped. Both are
listed for a while, so that an operator sees what is missing, and then forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

COUNT_MAX: Final = 4096
INTERVAL_S: Final = 2.0
CALLS_PER_S_MAX: Final = 100.0  # more members announce themselves less often
SILENT_INTERVALS: Final = 4
GONE_INTERVALS: Final = 30
LISTED_S: Final = 600.0
OUT_OF_ORDER_S: Final = 1.0  # a master may say something new of a node that it heard of at the same moment


class MemberKind(StrEnum):
    """What a process is, in the words of operators."""

    GATEWAY = "gateway"
    ENDPOINT_PICKER = "endpoint picker"
    CONDUCTOR = "conductor"
    WORKER = "worker"
    MASTER = "master"
    STORE_NODE = "store node"


class Presence(StrEnum):
    """Whether a member is heard of."""

    PRESENT = "present"
    SILENT = "silent"
    GONE = "gone"
    STOPPED = "stopped"


# Their names are unique in the cluster; the others may have one name on two hosts.
_NAMED: Final = frozenset({MemberKind.WORKER, MemberKind.MASTER, MemberKind.STORE_NODE})


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """What a member says of itself."""

    kind: MemberKind
    name: str
    address: str
    host_id: str = ""
    host_name: str = ""
    software_version: str = ""
    started_ms: int = 0
    state: str = ""
    reason: str = ""
    pid: int = 0
    clock_offset_ms: int = 0
    clock_bound_ms: int | None = None

    @property
    def key(self) -> tuple[MemberKind, str, str]:
        """What makes it the same member after a restart."""
        return self.kind, self.name, "" if self.kind in _NAMED else self.address


@dataclass(frozen=True, slots=True)
class ListedMember:
    """A member, and whether it is heard of."""

    info: MemberInfo
    presence: Presence
    heard_age_s: float


@dataclass(slots=True)
class _KnownMember:
    info: MemberInfo
    heard_s: float
    left: bool = False


class MemberBook:
    """The members. Times are seconds of one monotonic clock; those of what happened may lie in the past."""

    def __init__(self, count_max: int = COUNT_MAX) -> None:
        self._count_max = count_max
        self._known: dict[tuple[MemberKind, str, str], _KnownMember] = {}

    @property
    def interval_s(self) -> float:
        """How often members shall announce themselves."""
        return max(INTERVAL_S, len(self._known) / CALLS_PER_S_MAX)

    def heard(self, info: MemberInfo, at_s: float, *, leaving: bool = False) -> None:
        """It was there at that moment. An older word of it changes nothing."""
        known = self._known.get(info.key)
        if known is not None and at_s < known.heard_s - OUT_OF_ORDER_S:
            return
        if known is not None and leaving and info.started_ms < known.info.started_ms:
            return  # the goodbye of a process that another one has followed already
        heard_s = at_s if known is None else max(at_s, known.heard_s)
        self._known[info.key] = _KnownMember(info, heard_s, leaving)
        if len(self._known) > self._count_max:
            first = min(self._known, key=lambda key: (not self._known[key].left, self._known[key].heard_s))
            del self._known[first]

    def listed(self, now_s: float) -> list[ListedMember]:
        """All of them, by host, kind and name; what ended long ago is forgotten."""
        interval_s = self.interval_s
        self._known = {
            key: known
            for key, known in self._known.items()
            if now_s - known.heard_s <= GONE_INTERVALS * interval_s + LISTED_S
        }
        found = [
            ListedMember(known.info, _presence(known, now_s, interval_s), max(0.0, now_s - known.heard_s))
            for known in self._known.values()
        ]
        order = list(MemberKind)
        return sorted(
            found,
            key=lambda one: (
                one.info.host_name,
                one.info.host_id,
                order.index(one.info.kind),
                one.info.name,
                one.info.address,
            ),
        )

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self._known) <= self._count_max, "more members than are allowed"
        assert all(key == known.info.key for key, known in self._known.items()), (
            "a member under another's key"
        )


def _presence(known: _KnownMember, now_s: float, interval_s: float) -> Presence:
    silent_s = now_s - known.heard_s
    if known.left:
        return Presence.STOPPED
    if silent_s > GONE_INTERVALS * interval_s:
        return Presence.GONE
    return Presence.SILENT if silent_s > SILENT_INTERVALS * interval_s else Presence.PRESENT

"""The faults that a run can make, each a row of the contract in docs/recovery.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from mooncache.errors import InvalidArgument


class FaultEffect(StrEnum):
    """What is done to a process."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP, and SIGCONT a while later
    SLOW = "slow"  # it runs a hundredth of the time, for a while
    FLIP = "flip"  # bits of its memory for blocks change


class Aim(StrEnum):
    """Which kind of process."""

    MASTER = "master"
    CONDUCTOR = "conductor"
    GATEWAY = "gateway"
    STORE_NODE = "store-node"
    PREFILL_WORKER = "prefill-worker"
    DECODE_WORKER = "decode-worker"
    PREFILL_ENGINE = "prefill-engine"
    DECODE_ENGINE = "decode-engine"
    ETCD = "etcd"


_OF_PARTS: Final = {
    "master": Aim.MASTER,
    "conductor": Aim.CONDUCTOR,
    "gateway": Aim.GATEWAY,
    "node": Aim.STORE_NODE,
    "prefill": Aim.PREFILL_WORKER,
    "decode": Aim.DECODE_WORKER,
    "etcd": Aim.ETCD,
}
_ENGINES: Final = {Aim.PREFILL_WORKER: Aim.PREFILL_ENGINE, Aim.DECODE_WORKER: Aim.DECODE_ENGINE}
_OWNERS_OF_STREAMS: Final = frozenset({Aim.GATEWAY, Aim.DECODE_WORKER, Aim.DECODE_ENGINE})


def aims_of(part: str) -> tuple[Aim, ...]:
    """What can be hit in a part of `mooncache up`, or a service of Compose, by its name: itself, a worker's engine."""
    aim = _OF_PARTS.get(part.rpartition("-")[0] or part)
    if aim is None:
        return ()
    return (aim, _ENGINES[aim]) if aim in _ENGINES else (aim,)


@dataclass(frozen=True, slots=True)
class ChaosFault:
    """One kind of fault. `row` is its row in docs/recovery.md; `lasts_s` is 0 where nothing has to be taken back."""

    effect: FaultEffect
    aim: Aim
    row: str
    lasts_s: float = 0.0

    @property
    def name(self) -> str:
        """As `--only` takes it."""
        return f"{self.effect}-{self.aim}"

    @property
    def may_fail(self) -> bool:
        """Whether requests may end with an error until all is well: those on the process itself."""
        return self.aim in _OWNERS_OF_STREAMS


_STOP_S: Final = 4.0
_SLOW_S: Final = 6.0
FAULTS: Final = (
    ChaosFault(FaultEffect.KILL, Aim.MASTER, "M1"),
    ChaosFault(FaultEffect.KILL, Aim.CONDUCTOR, "C1"),
    ChaosFault(FaultEffect.KILL, Aim.GATEWAY, "G1"),
    ChaosFault(FaultEffect.KILL, Aim.STORE_NODE, "N1"),
    ChaosFault(FaultEffect.KILL, Aim.PREFILL_WORKER, "W1"),
    ChaosFault(FaultEffect.KILL, Aim.DECODE_WORKER, "W1"),
    ChaosFault(FaultEffect.KILL, Aim.PREFILL_ENGINE, "E1"),
    ChaosFault(FaultEffect.KILL, Aim.DECODE_ENGINE, "E2"),
    ChaosFault(FaultEffect.KILL, Aim.ETCD, "T1"),
    ChaosFault(FaultEffect.STOP, Aim.MASTER, "M3", _STOP_S),
    ChaosFault(FaultEffect.STOP, Aim.CONDUCTOR, "C2", _STOP_S),
    ChaosFault(FaultEffect.STOP, Aim.GATEWAY, "G2", _STOP_S),
    ChaosFault(FaultEffect.STOP, Aim.STORE_NODE, "N4", _STOP_S),
    ChaosFault(FaultEffect.STOP, Aim.PREFILL_WORKER, "W2", _STOP_S),
    ChaosFault(FaultEffect.STOP, Aim.DECODE_WORKER, "W2", _STOP_S),
    ChaosFault(FaultEffect.STOP, Aim.PREFILL_ENGINE, "E3", _STOP_S),
    ChaosFault(FaultEffect.STOP, Aim.DECODE_ENGINE, "E3", _STOP_S),
    ChaosFault(FaultEffect.STOP, Aim.ETCD, "T2", _STOP_S),
    ChaosFault(FaultEffect.SLOW, Aim.MASTER, "M4", _SLOW_S),
    ChaosFault(FaultEffect.SLOW, Aim.CONDUCTOR, "C2", _SLOW_S),
    ChaosFault(FaultEffect.SLOW, Aim.STORE_NODE, "N5", _SLOW_S),
    ChaosFault(FaultEffect.FLIP, Aim.STORE_NODE, "L10"),
)
_WITH_STANDBY: Final = {"kill-master": "M2", "kill-conductor": "C4", "stop-conductor": "C5"}
"""Rows that hold where there are several of a kind, of which one leads."""


class Profile(StrEnum):
    """A choice of faults."""

    QUICK = "quick"
    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"
    BYTES = "bytes"
    ALL = "all"


_EFFECTS: Final = {
    Profile.KILL: {FaultEffect.KILL},
    Profile.STOP: {FaultEffect.STOP},
    Profile.SLOW: {FaultEffect.SLOW},
    Profile.BYTES: {FaultEffect.FLIP},
    Profile.ALL: set(FaultEffect),
}
_QUICK: Final = frozenset(
    {
        "flip-store-node",
        "kill-store-node",
        "kill-prefill-engine",
        "stop-store-node",
        "kill-conductor",
        "kill-master",
    }
)


def faults_of(profile: Profile) -> tuple[ChaosFault, ...]:
    """The faults of a profile, in the order of the list."""
    if profile is Profile.QUICK:
        return tuple(fault for fault in FAULTS if fault.name in _QUICK)
    return tuple(fault for fault in FAULTS if fault.effect in _EFFECTS[profile])


def faults_named(names: Iterable[str]) -> tuple[ChaosFault, ...]:
    """The faults of these names. Raises InvalidArgument for an unknown one."""
    known = {fault.name: fault for fault in FAULTS}
    chosen = tuple(names)
    for name in chosen:
        if name not in known:
            raise InvalidArgument(f"There is no fault {name!r}. `mooncache chaos list` shows all of them.")
    return tuple(known[name] for name in chosen)


def fitting(faults: Sequence[ChaosFault], parts: Iterable[str]) -> tuple[ChaosFault, ...]:
    """Those of the faults whose kind of process is among the parts, each with the row that holds there."""
    there = Counter(aim for part in parts for aim in aims_of(part))
    return tuple(
        replace(fault, row=_WITH_STANDBY.get(fault.name, fault.row)) if there[fault.aim] > 1 else fault
        for fault in faults
        if there[fault.aim]
    )

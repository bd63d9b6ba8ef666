"""The order of the faults: rounds in which each fault comes once, shuffled, each at a target of its kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mooncache.chaos.core.faults import ChaosFault, aims_of, fitting
from mooncache.errors import InvalidArgument

if TYPE_CHECKING:
    import random


class FaultStep(NamedTuple):
    """A fault at the part of this name."""

    fault: ChaosFault
    part: str


def steps(faults: Sequence[ChaosFault], parts: Sequence[str], rng: random.Random) -> Iterator[FaultStep]:
    """Endless: every fault once in a round, in a new order each time.

    Raises:
        InvalidArgument: none of the faults fits this cluster.
    """
    chosen = fitting(faults, parts)
    if not chosen:
        raise InvalidArgument("This cluster has no process that one of the chosen faults could hit.")
    return _rounds(chosen, parts, rng)


def _rounds(chosen: Sequence[ChaosFault], parts: Sequence[str], rng: random.Random) -> Iterator[FaultStep]:
    while True:
        for fault in rng.sample(chosen, len(chosen)):
            yield FaultStep(fault, rng.choice([part for part in parts if fault.aim in aims_of(part)]))

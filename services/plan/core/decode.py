"""Time between tokens: how many sequences decode together, from the trace's own arrivals.

Without a limit on batches decoding is a queue without waiting: a request stays for its output tokens times the step of
its batch, and the step depends on who stays. The fixed point is found from below, starting with steps of an empty
batch; residence only grows, so iterates only grow, and more instances, faster steps or fewer requests never make a
step longer. Counts are taken at arrivals, the only moments at which they rise.

A request's time between tokens is the mean of its longest tenth, which is close to the longest step during its stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from mooncache.plan.core.machine import Floats, InstanceType
from mooncache.plan.core.reuse import Ints

ROUNDS: Final = 12
_SETTLED: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Steps:
    """Per request: time between tokens, and whether the KV of its batch fitted; and the busiest moment."""

    tbt_s: Floats
    fits: np.ndarray[tuple[int], np.dtype[np.bool_]]
    sequences_mean: float
    sequences_max: float
    kv_load_max: float


def _present(begin: Floats, end: Floats, *weights: Floats) -> list[Floats]:
    """Sums of weights of all who are there at each begin (begins ascending), the newcomer included."""
    order = np.argsort(end, kind="stable")
    gone: Ints = np.searchsorted(end[order], begin, side="right")
    return [np.cumsum(weight) - np.concatenate(([0.0], np.cumsum(weight[order])))[gone] for weight in weights]


def _highest(values: Floats, first: Ints, last: Ints) -> Floats:
    """Largest of values[first[i] : last[i] + 1], with a table of maxima over powers of two."""
    rows = [values]
    width = 1
    while 2 * width <= len(values):
        above = rows[-1]
        rows.append(np.maximum(above[: len(above) - width], above[width:]))
        width *= 2
    level = np.log2(last - first + 1).astype(np.int64)
    found = np.empty(len(first))
    for number, row in enumerate(rows):
        mine = level == number
        if mine.any():
            found[mine] = np.maximum(row[first[mine]], row[last[mine] - (1 << number) + 1])
    return found


def steps(
    engine: InstanceType, instances: int, arrival_s: Floats, input_tokens: Floats, output_tokens: Floats
) -> Steps:
    """Decode a trace on `instances` equal instances that share sequences evenly.

    Args: arrivals ascending, seconds; tokens of prompts and answers. A sequence weighs its prompt and half its answer.
    """
    count = len(arrival_s)
    kv = input_tokens + output_tokens / 2
    one = np.ones(count)
    step = engine.step_s(one, kv)
    sequences = one
    kv_tokens = kv
    for _ in range(ROUNDS):
        end = arrival_s + output_tokens * step
        # The newcomer's instance has at least itself; the others are spread evenly.
        present, kv_present = _present(arrival_s, end, one, kv)
        sequences = 1 + (present - 1) / instances
        kv_tokens = kv + (kv_present - kv) / instances
        longer = engine.step_s(sequences, kv_tokens)
        settled = float(np.max(longer - step)) <= _SETTLED * float(step.max())
        step = np.maximum(step, longer)
        if settled:
            break
    last = np.searchsorted(arrival_s, arrival_s + output_tokens * step, side="right") - 1
    first = np.arange(count)
    highest = _highest(step, first, np.maximum(last, first))
    reserved = input_tokens + output_tokens  # room for the whole answer is taken when it begins
    end = arrival_s + output_tokens * step
    held = reserved + (_present(arrival_s, end, reserved)[0] - reserved) / instances
    kv_highest = _highest(held, first, np.maximum(last, first))
    return Steps(
        tbt_s=highest,
        fits=kv_highest <= engine.kv_capacity_tokens,
        sequences_mean=float(sequences.mean()),
        sequences_max=float(sequences.max()),
        kv_load_max=float(held.max()) / engine.kv_capacity_tokens,
    )

"""How long it takes to bring leading tokens to an instance from where they lie: one price for every policy, for the
running conductor and for the simulator.

Idea: all that comes passes a way, and the narrowest one sets the time. Tokens in the memory of the instance's own host
take the way inside of the host, all others the instance's link. What lies on a disk alone has to pass the disk as well.
Each way's rate is what was measured there (`core/models.py`), or what the simulated links offer. Tokens of which the
holder's own rate was measured (`core/holder_rates.py`) take its time instead of that of their way; in a simulation each
holder is a source of its own, with the rate that its links offer.
"""

from __future__ import annotations

import numpy as np

from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import Floats, Ints, PrefixSource


def fetch_s(fleet: Fleet, source: PrefixSource, tokens: Floats) -> Floats:
    """Seconds in which each row fetches the last `tokens` of what the source has, without the fixed time of a fetch.

    Rows that fetch nothing have 0 or less.
    """
    rate = fleet.fetch_tokens_per_s
    if source.tokens_per_s < np.inf:
        rate = np.minimum(rate, source.tokens_per_s)
    rest = tokens if source.held is None else tokens - np.minimum(source.held, tokens)
    if source.here is None:
        seconds: Floats = rest / rate
    else:
        here = np.minimum(source.here, rest)
        seconds = np.maximum((rest - here) / rate, here / fleet.near_tokens_per_s)
    if source.cold is not None:
        cold = np.minimum(source.cold, rest)
        np.maximum(seconds, cold / np.minimum(fleet.cold_tokens_per_s, source.cold_tokens_per_s), out=seconds)
    if source.held_s is not None:
        np.maximum(seconds, source.held_s, out=seconds)
    return seconds


def fetch_row_s(fleet: Fleet, row: int, source: PrefixSource, tokens: int) -> float:
    """The same for one row, with the fixed time of a fetch."""
    rate = min(float(fleet.fetch_tokens_per_s[row]), source.tokens_per_s)
    rest = tokens - min(_of(source.held, row), tokens)
    here = min(_of(source.here, row), rest)
    seconds = (rest - here) / rate
    if here:
        seconds = max(seconds, here / float(fleet.near_tokens_per_s[row]))
    cold = min(_of(source.cold, row), rest)
    if cold:
        seconds = max(seconds, cold / min(float(fleet.cold_tokens_per_s[row]), source.cold_tokens_per_s))
    if source.held_s is not None:
        seconds = max(seconds, float(source.held_s[row]))
    return float(fleet.fetch_latency_s[row]) + seconds


def _of(column: Ints | None, row: int) -> int:
    return int(column[row]) if column is not None else 0

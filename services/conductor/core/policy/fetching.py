"""How long it takes to bring leading tokens to an instance from where they lie: one price for every policy, for the
running conductor and for the simulator.

Idea: the slowest part of the path sets the time. Tokens in the memory of the instance's own host stay inside of it;
all others pass the instance's link. A token that is on a disk alone is read from that disk, too. Each rate is what was
measured (`core/models.py`), or what the simulated links offer. Tokens whose holder's own rate was measured
(`core/holder_rates.py`) take the holder's time instead; in a simulation each holder is a source of its own, with the
rate that its links offer.
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
    if source.on_host is None:
        seconds: Floats = rest / rate
    else:
        on_host = np.minimum(source.on_host, rest)
        seconds = np.maximum((rest - on_host) / rate, on_host / fleet.host_tokens_per_s)
    if source.on_ssd is not None:
        on_ssd = np.minimum(source.on_ssd, rest)
        np.maximum(seconds, on_ssd / np.minimum(fleet.ssd_tokens_per_s, source.ssd_tokens_per_s), out=seconds)
    if source.held_s is not None:
        np.maximum(seconds, source.held_s, out=seconds)
    return seconds


def fetch_row_s(fleet: Fleet, row: int, source: PrefixSource, tokens: int) -> float:
    """The same for one row, with the fixed time of a fetch."""
    rate = min(float(fleet.fetch_tokens_per_s[row]), source.tokens_per_s)
    rest = tokens - min(_of(source.held, row), tokens)
    on_host = min(_of(source.on_host, row), rest)
    seconds = (rest - on_host) / rate
    if on_host:
        seconds = max(seconds, on_host / float(fleet.host_tokens_per_s[row]))
    on_ssd = min(_of(source.on_ssd, row), rest)
    if on_ssd:
        seconds = max(seconds, on_ssd / min(float(fleet.ssd_tokens_per_s[row]), source.ssd_tokens_per_s))
    if source.held_s is not None:
        seconds = max(seconds, float(source.held_s[row]))
    return float(fleet.fetch_latency_s[row]) + seconds


def _of(column: Ints | None, row: int) -> int:
    return int(column[row]) if column is not None else 0

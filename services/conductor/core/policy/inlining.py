"""Whether a decode instance computes a prompt itself, or is handed its blocks by a prefill instance.

Idea: both have a price, the time until the answer ends and what the computing costs others; the lower one is taken.
What a hand-over costs is part of its price (`common.handovers_s`): the transfer, and what was observed to pass beside
it between the end of a prefill and the first token. What computing on a decode instance costs those who generate there
is below. `Rules.inline_tokens_max` bounds it for an operator who wants decode instances for decoding.
"""

from __future__ import annotations

import numpy as np

from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import Bools, Floats, InlineVerdict, Inlining, Request, Rules

NEWCOMERS_LEAST_PER_S = 1.0
"""An instance that is idle now is expected to get so many requests: one at a time would show no others."""
LEG_S = 0.003
"""What a second leg costs a gateway and an engine in any case: prices that are closer than that are equal."""
_STAY_LEAST_S = 1e-3


def delay_s(fleet: Fleet, compute_s: Floats, *, has_choice: bool) -> Floats:
    """What others lose together on each row while it computes for so long.

    Those that generate there wait for all of it, and who comes meanwhile for half of it on average. As many come as
    leave: an instance's sequences in the time for which they stay.

    has_choice: a prefill instance could compute it instead. Else who comes meanwhile has to be computed there as well.
    """
    if not has_choice:
        return compute_s * fleet.sequences
    arriving = np.maximum(fleet.sequences / np.maximum(fleet.stay_s, _STAY_LEAST_S), NEWCOMERS_LEAST_PER_S)
    seconds: Floats = compute_s * (fleet.sequences + arriving * compute_s / 2)
    return seconds


def short_enough(request: Request, fleet: Fleet, rules: Rules, mask: Bools) -> Bools:
    """Of these rows those on which at most `inline_tokens_max` tokens are left to compute, and those of both roles."""
    enough = request.prompt_tokens - rules.inline_tokens_max
    if any(source.tokens >= enough for source in request.sources):
        return mask
    return mask & ((request.local >= enough) | fleet.summary.both)


def verdict(here_s: float | None, apart_s: float | None, refused: InlineVerdict | None) -> Inlining:
    """What follows from both prices; None: no instance could have it. refused: why none may compute it itself."""
    if apart_s is None:
        return Inlining(InlineVerdict.ONLY, here_s or 0.0)
    if here_s is None:
        return Inlining(refused or InlineVerdict.DEARER, 0.0, apart_s)
    cheaper = here_s <= apart_s + LEG_S
    return Inlining(InlineVerdict.CHEAPER if cheaper else InlineVerdict.DEARER, here_s, apart_s)

"""Why each request went where it went: one JSON line per decision.

A line says what was chosen with its expected times, what the best candidates would have cost, and what is known of
the prefix. Lines come in the order of decisions; a request that is tried again has several. Instances that were
not chosen are listed up to a bound, cheapest first, so that a thousand instances do not make a thousand columns.
"""

from __future__ import annotations

import json
from typing import IO, Any

import numpy as np

from mooncache.conductor.core.policy.fleet import Fleet
from mooncache.conductor.core.policy.types import Choice, Floats, Request
from mooncache.simulate.report.document import plain

CANDIDATES_MAX = 5


class DecisionLog:
    """Writes decisions of one policy to an open text file; `write` fits SimOptions.on_decision."""

    def __init__(self, file: IO[str], policy: str) -> None:
        self._file = file
        self._policy = policy
        self.lines = 0

    def write(self, number: int, request: Request, fleet: Fleet, choice: Choice, now_s: float) -> None:
        """One decision."""
        line: dict[str, Any] = {
            "policy": self._policy,
            "request": number,
            "at_s": round(now_s, 6),
            "prompt_tokens": request.prompt_tokens,
            "local_tokens_best": int(request.local.max()) if len(request.local) else 0,
            "anywhere_tokens": max((source.tokens for source in request.sources), default=0),
            "awaited_tokens": max((awaited.tokens for awaited in request.awaited), default=0),
            "admitted": choice.admitted,
            "reason": choice.reason,
        }
        if choice.admitted:
            line |= {
                "prefill": _name(fleet, choice.prefill),
                "decode": _name(fleet, choice.decode),
                "branch": choice.branch,
                "prefix_tokens": choice.prefix_tokens,
                "fetch_tokens": choice.fetch_tokens,
                "source": _name(fleet, choice.source_row),
            }
            if len(choice.members) > 1:
                line |= {
                    "pipeline": [_name(fleet, row) for row in choice.members],
                    "chunk_tokens": choice.chunk_tokens,
                }
        else:
            line["retry_after_s"] = _round(choice.retry_after_s)
        expected = {name: getattr(choice, name) for name in ("ttft_s", "queue_s", "compute_s", "tbt_s")}
        line["expected"] = {name: _round(value) for name, value in expected.items()}
        line["prefill_scores"] = _best(fleet, choice.scores)
        line["decode_scores"] = _best(fleet, choice.decode_scores)
        self._file.write(json.dumps(plain(line), separators=(",", ":")) + "\n")
        self.lines += 1


def _round(value: float) -> float:
    return round(float(value), 6)


def _name(fleet: Fleet, row: int) -> str | None:
    return fleet.names[row] if row >= 0 else None


def _best(fleet: Fleet, scores: Floats | None) -> dict[str, float]:
    if scores is None or not len(scores):
        return {}
    order = np.argsort(scores, kind="stable")[:CANDIDATES_MAX]
    return {fleet.names[row]: _round(scores[row]) for row in order if np.isfinite(scores[row])}

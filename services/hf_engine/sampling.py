"""From logits to tokens: greedy, or temperature with top-k, top-p and min-p, reproducible by seed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch

from mooncache.hf_engine.core.sequence import Sequence
from mooncache.hf_engine.kv_memory import Tensor


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token. logprob and top (token, logprob; likeliest first) are those of the model, before temperature."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


def choose(logits: Tensor, sequences: Many[Sequence]) -> list[SampledToken]:
    """The next token of each sequence from its row of logits."""
    scores = logits.cpu()
    greedy = scores.argmax(dim=-1).tolist()
    chosen = []
    for row, (sequence, best) in enumerate(zip(sequences, greedy, strict=True)):
        sampling = sequence.sampling
        values = scores[row]
        if sampling.min_tokens > sequence.generated and sampling.stop_ids:
            values = values.clone()
            values[list(sampling.stop_ids)] = -torch.inf
            best = int(values.argmax())  # noqa: PLW2901
        token = best if sampling.temperature == 0 else _sample(values, sequence)
        chosen.append(_with_logprobs(token, scores[row], sampling.logprobs))
    return chosen


def _sample(values: Tensor, sequence: Sequence) -> int:
    sampling = sequence.sampling
    if sequence.random is None:
        seed = (
            secrets.randbits(63) if sampling.seed is None else (sampling.seed + sequence.index) & (2**63 - 1)
        )
        sequence.random = torch.Generator().manual_seed(seed)
    weights = torch.softmax(values / max(sampling.temperature, 1e-5), dim=-1)
    ordered, index = weights.sort(descending=True)
    keep = len(ordered) if sampling.top_k <= 0 else min(sampling.top_k, len(ordered))
    ordered = ordered[:keep]
    if sampling.top_p < 1:
        before = ordered.cumsum(0) - ordered  # the token that crosses the limit stays
        ordered = ordered[before < sampling.top_p * ordered.sum()]
    if sampling.min_p > 0:
        ordered = ordered[ordered >= sampling.min_p * ordered[0]]
    return int(index[torch.multinomial(ordered, 1, generator=sequence.random)])


def _with_logprobs(token: int, values: Any, count: int) -> SampledToken:
    if count < 0:
        return SampledToken(token)
    logs = torch.log_softmax(values, dim=-1)
    best, ids = logs.topk(count) if count else (logs[:0], logs[:0])
    return SampledToken(token, float(logs[token]), tuple(zip(ids.tolist(), best.tolist(), strict=True)))

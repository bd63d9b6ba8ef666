"""A trace made small enough for the cluster at hand, with whole conversations, and tokens for its blocks.

Requests are not cut off at the front of the trace: an hour's first minute has hardly a second turn. Conversations are
drawn at random instead, each with all its turns, and time runs faster. A block of the trace becomes a shorter run of
tokens, the same one wherever the block occurs: that is all that a cache sees of a prompt, and what the publishers of
the traces advise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mooncache.errors import InvalidArgument
from mooncache.traces import Trace
from mooncache.traces.checks import compact

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

# A block that more requests than this share is a system prompt: it does not tell conversations apart.
_COMMON_SHARE = 0.02
_COMMON_LEAST = 16
_TOKEN_FIRST = 64


@dataclass(frozen=True, slots=True)
class ReplayShape:
    """How requests are made smaller."""

    tokens_per_block: int = 16  # tokens that a block of the trace becomes; the answers shrink alike
    context_tokens: int = 2048  # prompt and answer together; what is longer is cut
    vocab: int = 4096  # token ids are drawn below this
    output_tokens_max: int = 128

    def __post_init__(self) -> None:
        if self.tokens_per_block < 1 or self.vocab <= _TOKEN_FIRST or self.output_tokens_max < 1:
            raise InvalidArgument(
                f"tokens per block ({self.tokens_per_block}) and answers ({self.output_tokens_max}) have at least one "
                f"token, a vocabulary ({self.vocab}) more than {_TOKEN_FIRST}"
            )
        if self.context_tokens <= self.output_tokens_max + self.tokens_per_block:
            raise InvalidArgument(
                f"a context of {self.context_tokens} tokens has no room for an answer of {self.output_tokens_max} "
                f"and a block of {self.tokens_per_block}"
            )


def sample_conversations(trace: Trace, count: int, rng: random.Random) -> Trace:
    """At least `count` requests (or all) of conversations drawn at random, each with all its turns."""
    if len(trace) <= count:
        return trace
    groups = conversations(trace)
    sizes = np.bincount(groups)
    chosen = np.zeros(len(sizes), bool)
    order = list(range(len(sizes)))
    rng.shuffle(order)
    total = 0
    for group in order:
        if total >= count:
            break
        chosen[group] = True
        total += int(sizes[group])
    return pick(trace, np.flatnonzero(chosen[groups]))


def conversations(trace: Trace) -> NDArray[np.int64]:
    """A number for each request: equal for requests that share more than a system prompt."""
    keys = compact(trace.hash_ids)
    counts = np.bincount(keys)
    common = counts[keys] > max(_COMMON_LEAST, _COMMON_SHARE * len(trace))
    # Common blocks lead, so their number is the place of the first block of the conversation's own.
    before = np.r_[0, np.cumsum(common)]
    leading = before[trace.offsets[1:]] - before[trace.offsets[:-1]]
    last = np.diff(trace.offsets) - 1
    own = keys[trace.offsets[:-1] + np.minimum(leading, last)]
    _, groups = np.unique(own, return_inverse=True)
    return groups.astype(np.int64)


def pick(trace: Trace, rows: NDArray[np.int64]) -> Trace:
    """Some rows of a trace, in its order; their time counts from the first of them."""
    counts = np.diff(trace.offsets)[rows]
    places = [np.arange(trace.offsets[row], trace.offsets[row + 1]) for row in rows.tolist()]
    arrival_s = trace.arrival_s[rows]
    return replace(
        trace,
        arrival_s=arrival_s - arrival_s[0] if len(rows) else arrival_s,
        input_tokens=trace.input_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        offsets=np.r_[0, np.cumsum(counts)].astype(np.int64),
        hash_ids=trace.hash_ids[np.concatenate(places)] if places else trace.hash_ids[:0],
        tenant=None if trace.tenant is None else trace.tenant[rows],
        session=None if trace.session is None else trace.session[rows],
        priority=None if trace.priority is None else trace.priority[rows],
    )


def shrink(trace: Trace, shape: ReplayShape) -> Trace:
    """The same requests with shorter blocks and answers; at least one token of answer each."""
    size, old = shape.tokens_per_block, trace.block_tokens
    whole, part = trace.input_tokens.astype(np.int64) // old, trace.input_tokens.astype(np.int64) % old
    inputs = whole * size + -(-part * size // old)
    outputs = np.rint(trace.output_tokens * (size / old)).astype(np.int64)
    outputs = np.clip(outputs, 1, shape.output_tokens_max)
    inputs = np.minimum(inputs, shape.context_tokens - outputs)
    kept = -(-inputs // size)
    places = np.arange(len(trace.hash_ids)) - np.repeat(trace.offsets[:-1], np.diff(trace.offsets))
    return replace(
        trace,
        input_tokens=inputs.astype(np.int32),
        output_tokens=outputs.astype(np.int32),
        offsets=np.r_[0, np.cumsum(kept)].astype(np.int64),
        hash_ids=trace.hash_ids[places < np.repeat(kept, np.diff(trace.offsets))],
        block_tokens=size,
    )


class Prompts:
    """Token ids of requests: a fixed random run for each block id, the beginning of it for a partial block."""

    def __init__(self, trace: Trace, shape: ReplayShape, seed: int) -> None:
        self._trace, self._shape, self._seed = trace, shape, seed

    def tokens(self, row: int) -> list[int]:
        """The prompt of one request."""
        found: list[int] = []
        for block in self._trace.blocks(row):
            found += self.run(block)
        return found[: int(self._trace.input_tokens[row])]

    def run(self, block: int) -> list[int]:
        """The tokens that a block id stands for."""
        draws = np.random.default_rng((self._seed, block))
        drawn: list[int] = draws.integers(
            _TOKEN_FIRST, self._shape.vocab, self._shape.tokens_per_block
        ).tolist()
        return drawn

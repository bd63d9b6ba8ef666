"""The instances of one model at one moment, a column for each property and a row for each instance.

Policies compute with whole columns: one formula for one instance and for a thousand. They never write to a
column: `FleetBook.view` hands out its own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mooncache.conductor.core.policy.types import Bools, Floats, Ints

PREFILL, DECODE, BOTH, NO_ROLE = 0, 1, 2, -1
ROLES = {"prefill": PREFILL, "decode": DECODE, "both": BOTH}
ROLE_NAMES = {number: name for name, number in ROLES.items()}


@dataclass(slots=True)
class Fleet:
    """Columns; see the module's text. A row without an instance has no name, is not ready and has NO_ROLE.

    fetch_tokens_per_s: what one more fetch into the instance would get of its links. queue_s, queue_tokens,
    queue_prompts: prompts in front of a newcomer, by time, uncached tokens, count. sequences, kv_tokens: all that
    was sent there to be decoded and has not ended. batch_sequences, batch_kv_tokens: what is being decoded now.
    handover_s: fixed time from the end of a prefill to the first decode step; handover_tokens_per_s: rate of
    what is loaded then. tail: the decode instance computes what is behind the last complete block.
    pipeline: number of the group that can compute one prompt together, -1 for none.
    generating_s: time that all answers so far were expected to add to the steps of their batches.
    predict: (seconds from now) -> (sequences, kv tokens) being decoded then.
    """

    now_s: float
    names: Sequence[str]
    role: Ints
    ready: Bools
    group: Ints
    pool: Bools
    prefill_a: Floats
    prefill_b: Floats
    prefill_c: Floats
    prefill_d: Floats
    fetch_latency_s: Floats
    fetch_tokens_per_s: Floats
    queue_s: Floats
    queue_tokens: Floats
    queue_prompts: Ints
    decode_base_s: Floats
    decode_per_sequence_s: Floats
    decode_per_token_s: Floats
    sequences: Floats
    sequences_max: Floats
    kv_tokens: Floats
    kv_capacity_tokens: Floats
    batch_sequences: Floats
    batch_kv_tokens: Floats
    stay_s: Floats
    handover_s: Floats
    handover_tokens_per_s: Floats
    tail: Bools
    pipeline: Ints
    predict: Callable[[float], tuple[Floats, Floats]]
    generating_s: float = 0.0

    def __len__(self) -> int:
        return len(self.role)

    def decode_at(self, after_s: float) -> tuple[Floats, Floats]:
        """Return the sequences and their KV tokens that each row will decode in `after_s` seconds."""
        return self.predict(after_s)

    def prefill_s(self, n: int, p: Ints) -> Floats:
        """Return the time of a prompt of n tokens of which each row has p; at least one is computed."""
        have = np.minimum(p, n - 1).astype(np.float64)
        return (
            self.prefill_a
            + self.prefill_b * (n - have)
            + self.prefill_c * (float(n) * n - have * have)
            + self.prefill_d * have
        )

    def prefill_same_s(self, n: int, p: int) -> Floats:
        """Return the same for one prefix that all rows have."""
        have = float(max(0, min(p, n - 1)))
        return (
            self.prefill_a
            + self.prefill_b * (n - have)
            + self.prefill_c * (float(n) * n - have * have)
            + self.prefill_d * have
        )

    def prefill_row_s(self, row: int, n: int, p: int) -> float:
        """Return the same for one row."""
        have = float(max(0, min(p, n - 1)))
        return float(
            self.prefill_a[row]
            + self.prefill_b[row] * (n - have)
            + self.prefill_c[row] * (float(n) * n - have * have)
            + self.prefill_d[row] * have
        )

    def tbt_s(self, sequences: Floats, kv_tokens: Floats) -> Floats:
        """Return the step time of each row with such a batch."""
        return (
            self.decode_base_s + self.decode_per_sequence_s * sequences + self.decode_per_token_s * kv_tokens
        )

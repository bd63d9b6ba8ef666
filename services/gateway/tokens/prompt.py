"""What is known about the prompts of one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of each prompt of one request, in the request's order.

    token_ids: arrays of 32-bit unsigned integers ("I"); chat requests have one. texts: what was encoded, None where the
    request gave token ids.
    """

    token_ids: list[array[int]] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)

    @property
    def token_count(self) -> int:
        """Tokens of all prompts together."""
        return sum(map(len, self.token_ids))

"""Which blocks of the engine's requests are saved after a step. Pure.

The engine says of each step which tokens and blocks a request has got since the last one, where its computed part
ended, and how many tokens the step computes. A block may be saved when the step has computed its last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NO_PAGE = -1


@dataclass(frozen=True, slots=True)
class BlockSave:
    """A block that is complete after the step."""

    key: bytes
    block_id: int


@dataclass(slots=True)
class FollowedRequest:
    """A request while it runs.

    Attributes:
        salt: of the tenant; "" without tenants.
        held_tokens: found in the engine's own cache or in the pool at the start: these blocks are not saved.
    """

    salt: str
    held_tokens: int
    tokens: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Of its first blocks, as far as they were needed."""
    prompt_tokens: int = 0
    saved_blocks: int = 0
    shared: bool = True
    """Whether its blocks mean what their tokens say: no images, no adapter, no window that has passed."""

    def step(
        self,
        tokens: Sequence[int],
        block_ids: Sequence[int],
        computed: int,
        scheduled: int,
        block_tokens: int,
    ) -> range:
        """Take what a step brings. The numbers of the blocks that it completes and that are not saved yet."""
        self.tokens += tokens
        self.block_ids += block_ids
        self.prompt_tokens = self.prompt_tokens or len(self.tokens)
        if NO_PAGE in block_ids:
            self.shared = False
        # Versions differ in whether the position of the first step has what the connector brings in it.
        end = min(max(computed, self.held_tokens) + scheduled, len(self.tokens))
        first = max(self.saved_blocks, self.held_tokens // block_tokens)
        last = min(end // block_tokens, len(self.block_ids))
        if not self.shared or last <= first:
            return range(0)
        self.saved_blocks = last
        return range(first, last)


def wanted_blocks(prompt_tokens: int, computed_tokens: int, block_tokens: int) -> range:
    """Numbers of the blocks that could come from the pool: after those of the engine, and never the last token's."""
    if computed_tokens % block_tokens:
        return range(0)  # a part of a block is there, which a whole one would overwrite
    return range(computed_tokens // block_tokens, max(0, prompt_tokens - 1) // block_tokens)

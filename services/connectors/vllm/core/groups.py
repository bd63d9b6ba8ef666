"""Groups of KV cache: layers that share a block table of vLLM, and how far back their tokens look.

Idea: in a group of full attention a token needs all blocks before it; in a group with a sliding window it needs those
of its window; in a group with a recurrent state it needs the state behind the token before it, which vLLM keeps in the
block of that token. Each group has blocks and keys of its own. A prefix can be taken from the pool up to a border at
which every group has what the next token needs: groups of full attention all blocks before it, the others the last
ones. vLLM allocates no memory for the blocks in front of a window or a state, and so none of them is loaded.

A state is there only at borders at which a step of the engine ended: most blocks of such a group do not exist.

vLLM makes the pages of all groups equally large. So where the layers of one group have smaller KV (Gemma 4), its blocks
have more tokens, and borders are as far apart as the least common multiple of all sizes. A group with several blocks
between two borders counts here as several groups, its *columns*: the first block behind each border, the second one,
and so on. Each column has one block between two borders, as every other group.

Block numbers count from the beginning of the prompt; a border lies in front of the block of its number. Presence is one
byte of 0 or 1 for each block, for each group.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

_DIGEST_CHARS = 32
FULL = 0
"""Instead of a window: all tokens before it."""
STATE_WINDOW = 2
"""Of a recurrent state: a token needs the block of the one before it, as with a window of the two."""


class Column(NamedTuple):
    """Of one of vLLM's groups, which has `of` blocks between two borders, the one at this place."""

    group: int
    at: int = 0
    of: int = 1


class BlockRange(NamedTuple):
    """Blocks `first` to `end` of one group."""

    group: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class KvGroups:
    """The groups of one engine, in vLLM's order.

    Attributes:
        block_tokens: between two borders.
        windows: how many tokens one token of a group looks at, with itself; FULL: all before it.
        states: of each group what its state is, "": it has none; empty: no group has one.
        columns: what each group is to vLLM; empty: its group of the same number, as all have blocks of one size.
    """

    block_tokens: int
    windows: tuple[int, ...] = (FULL,)
    states: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def is_plain(self) -> bool:
        """One group of full attention: any leading blocks of it are of use."""
        return self.windows == (FULL,)

    def has_state(self, group: int) -> bool:
        """Whether a block of the group is the state behind its last token, and not KV of its tokens."""
        return bool(self.states) and bool(self.states[group])

    @property
    def lead(self) -> int:
        """The group whose blocks say most of what the pool has of a prompt: gateways make its keys."""
        return self.windows.index(FULL) if FULL in self.windows else 0

    def column(self, group: int) -> Column:
        """What the group is to vLLM."""
        return self.columns[group] if self.columns else Column(group)

    @property
    def members(self) -> tuple[int, ...]:
        """Of each group its number among vLLM's."""
        return tuple(self.column(group).group for group in range(len(self)))

    def tables(self, tables: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The block table of each group, from those of vLLM's groups."""
        if not self.columns:
            return tables
        return [tables[column.group][column.at :: column.of] for column in self.columns]

    def first_needed(self, group: int, border: int) -> int:
        """The first block that the group needs for the token behind `border`."""
        window = self.windows[group]
        if window == FULL:
            return 0
        column = self.column(group)
        first = max(0, border * self.block_tokens - window + 1) // (self.block_tokens // column.of)
        return -((column.at - first) // column.of)  # of the column's blocks: rounded up

    def needed(self, first: int, border: int) -> list[BlockRange]:
        """What has to be loaded to go on at `border`, when the engine has what each group needs at `first`."""
        ranges = (
            BlockRange(group, max(first, self.first_needed(group, border)), border)
            for group in range(len(self.windows))
        )
        return [part for part in ranges if part.first < part.end]

    def limit(self, blocks: int, tokens: int) -> int:
        """The last border for a request of so many tokens, of which so many blocks have keys.

        vLLM computes the last token of a prompt again when all of it is loaded. It may look at more than the one
        behind it, and at what is not loaded: with a window it stays to be computed, with its block.
        """
        return blocks if self.is_plain else min(blocks, max(0, tokens - 1) // self.block_tokens)

    def awaited(self, blocks: int, limit: int) -> int:
        """Up to which border blocks are waited for that another engine computes, at most `limit`.

        Engines stop at the last border of a prompt. Whether there will be a state at an earlier one is not known: it is
        not waited for.
        """
        return 0 if self.states and blocks < limit else min(blocks, limit)

    def came(self, loaded: int, asked: int, blocks: int) -> int:
        """For how many of `blocks` of the prompt those are of use that came of a load, the leading ones of `asked`.

        With several groups or a window all of them are, or none.
        """
        return loaded if self.is_plain else blocks if loaded >= asked else 0

    def longest(self, present: Sequence[bytes | bytearray], first: int, end: int) -> int:
        """The last border up to `end` at which the pool has all that is needed behind `first`; else `first`.

        A missing block rules out all borders behind it up to the one that needs it: the search jumps to it.
        """
        border = min([end, *map(len, present)]) if len(present) == len(self.windows) else first
        group = unchanged = 0
        while border > first and unchanged < len(self.windows):
            low = max(first, self.first_needed(group, border))
            missing = present[group].find(0, low, border)
            unchanged = unchanged + 1 if missing < 0 else 0
            border = border if missing < 0 else missing
            group = (group + 1) % len(self.windows)
        return max(first, border)


def groups_of(cache_config: Any, block_tokens: int) -> KvGroups:
    """The groups of vLLM's KVCacheConfig, of an engine that `refusals.of_engine` lets use the pool.

    Args:
        block_tokens: of an engine with one group.
    """
    specs = [group.kv_cache_spec for group in cache_config.kv_cache_groups]
    columns: tuple[Column, ...] = ()
    if len(specs) > 1:
        sizes = [spec.block_size for spec in specs]
        block_tokens = math.lcm(*sizes)
        if len(set(sizes)) > 1:
            columns = columns_of(sizes)
            specs = [specs[column.group] for column in columns]
    states = tuple(_state(spec) for spec in specs)
    return KvGroups(block_tokens, tuple(map(window_of, specs)), states if any(states) else (), columns)


def columns_of(sizes: Sequence[int]) -> tuple[Column, ...]:
    """The columns of groups whose blocks have so many tokens."""
    border = math.lcm(*sizes)
    return tuple(
        Column(group, at, border // size) for group, size in enumerate(sizes) for at in range(border // size)
    )


def described(group: int, layers: Sequence[Iterable[str]], groups: KvGroups) -> str:
    """What the passport says of a group's place among all of them; "" for the one of an engine with full attention.

    KV of equal shape may mean other layers, or be complete for another window.

    Args:
        layers: the names of the layers of each of vLLM's groups.
    """
    if groups.is_plain:
        return ""
    kinds = ["full" if window == FULL else f"window {window}" for window in groups.windows]
    kinds = [state or kind for kind, state in zip_longest(kinds, groups.states, fillvalue="")]
    if groups.columns:
        kinds = [f"{kind} {at + 1} of {of}" for kind, (_, at, of) in zip(kinds, groups.columns, strict=True)]
        layers = [layers[member] for member in groups.members]
    all_groups = "/".join(f"{kind}:{','.join(names)}" for kind, names in zip(kinds, layers, strict=True))
    digest = hashlib.sha256(all_groups.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"group {group} of {len(groups)}, {digest}"


def window_of(spec: Any) -> int:
    """The window of a group's layers by their KVCacheSpec, as long as vLLM keeps blocks for it."""
    windows = {_window(part) for part in parts_of(spec)}
    return max(windows) if FULL not in windows else FULL


def parts_of(spec: Any) -> list[Any]:
    """The kinds of a group's layers: one, or one for each layer."""
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def is_state(spec: Any) -> bool:
    """Whether layers of this spec keep a recurrent state in place of keys and values."""
    return "Mamba" in type(spec).__name__


def _state(spec: Any) -> str:
    """What a state's bytes mean: they lie in a block as they are, whatever their shapes and types."""
    if not is_state(spec):
        return ""
    kind = getattr(spec.mamba_type, "name", spec.mamba_type)
    parts = (
        f"{'x'.join(map(str, shape))} {dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return f"state {kind}: {', '.join(parts)}"


def _window(spec: Any) -> int:
    if is_state(spec):
        return STATE_WINDOW
    # A spec of full attention may name a window, too: vLLM keeps all its blocks then (without the hybrid manager).
    if "SlidingWindow" not in type(spec).__name__:
        return FULL
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))

"""The keys of one request, for every shard of the model and every group of layers, growing with its tokens.

Idea: keys follow from tokens alone (mooncache.kvcache.keys), so a chain that was begun with the prompt goes on
with every block that decoding fills, without hashing the prompt again. With several ranks each holds another part of a
block's KV under a key of its own; a block is there when all its parts are. With several groups of KV cache each group
has blocks of its own, at the same tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mooncache.client.keys import KEY_BYTES
from mooncache.connectors.vllm.core.groups import BlockRange
from mooncache.errors import InvalidArgument
from mooncache.kvcache.keys import request_keys, salted
from mooncache.kvcache.media import Medium, chain_keys
from mooncache.kvcache.passport import Passport

Item = TypeVar("Item")


@dataclass(slots=True)
class _Part:
    """What one shard has of the blocks of one group."""

    passport: Passport
    keys: bytearray
    tail: bytes | None
    """Last key of the private chain; public keys in front are not part of it."""


@dataclass(slots=True)
class KeyChain:
    """Keys of the complete blocks of `tokens`. Raises InvalidArgument for invalid token ids."""

    block_tokens: int
    groups: int = 1
    parts: list[_Part] = field(default_factory=list)
    """All groups of the first shard, then those of the next one."""
    media: Sequence[Medium] = ()

    @classmethod
    def begin(
        cls,
        passports: Sequence[Passport],
        tokens: Sequence[int],
        *,
        groups: int = 1,
        salt: str = "",
        public_tokens: int = 0,
        public_salt: str = "",
        media: Sequence[Medium] = (),
    ) -> KeyChain:
        chain = cls(passports[0].block_tokens, groups, media=media)
        tokens = words_of(tokens)
        for passport in passports:
            private = salted(passport, salt)
            keys = request_keys(
                passport,
                tokens,
                salt=salt,
                public_tokens=public_tokens,
                public_salt=public_salt,
                media=media,
            )
            tail = keys[-KEY_BYTES:] if keys else None
            if tail is not None and public_tokens >= len(keys) // KEY_BYTES * passport.block_tokens:
                tail = chain_keys(private, tokens, media)[-KEY_BYTES:]  # the last key is a public one
            chain.parts.append(_Part(private, bytearray(keys), tail))
        return chain

    def __len__(self) -> int:
        """Number of blocks with keys."""
        return len(self.parts[0].keys) // KEY_BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        """`tokens` continue right behind the last block with keys; complete blocks of them get keys."""
        if len(tokens) < self.block_tokens:
            return
        tokens, first = words_of(tokens), len(self) * self.block_tokens
        for part in self.parts:
            more = chain_keys(part.passport, tokens, self.media, part.tail, first=first)
            part.keys += more
            part.tail = more[-KEY_BYTES:]

    @property
    def shards(self) -> int:
        """In how many parts each block of a group is kept."""
        return len(self.parts) // self.groups

    def key(self, block: int, shard: int = 0, group: int = 0) -> bytes:
        """Key of one shard's part of a group's block."""
        keys = self.parts[shard * self.groups + group].keys
        return bytes(keys[block * KEY_BYTES : (block + 1) * KEY_BYTES])

    def packed(self, *ranges: BlockRange) -> tuple[bytes, ...]:
        """For each shard the keys of these blocks, one range behind the other."""
        return tuple(
            b"".join(
                self.parts[at + part.group].keys[part.first * KEY_BYTES : part.end * KEY_BYTES]
                for part in ranges
            )
            for at in range(0, len(self.parts), self.groups)
        )

    def interleaved(self, blocks: int | None = None) -> bytes:
        """Keys of the first blocks, the parts of one next to each other: the chain that the pool is asked about."""
        parts = [
            memoryview(part.keys)[: None if blocks is None else blocks * KEY_BYTES] for part in self.parts
        ]
        if len(parts) == 1:
            return bytes(parts[0])
        whole = bytearray(sum(len(part) for part in parts))
        # Long prompts have tens of thousands of keys: columns of machine words are copied, no key is touched by itself.
        rows, words = memoryview(whole).cast("Q"), KEY_BYTES // 8
        for number, part in enumerate(parts):
            column = part.cast("Q")
            for word in range(words):
                rows[number * words + word :: len(parts) * words] = column[word::words]
        return bytes(whole)

    def order(self, blocks: int, *ranges: BlockRange) -> list[int]:
        """Positions in `interleaved` of so many blocks: those of the ranges' keys first, then all others."""
        count = len(self.parts)
        leading = [
            block * count + at + part.group
            for part in ranges
            for block in range(part.first, min(part.end, blocks))
            for at in range(0, count, self.groups)
        ]
        known = set(leading)
        return leading + [at for at in range(blocks * count) if at not in known]

    def together(self, places: Sequence[str], group: int = 0) -> tuple[tuple[str, ...], ...]:
        """For each block of a group the places of its parts, from those of the keys of `interleaved`."""
        count = len(self.parts)
        return tuple(zip(*(places[at + group :: count] for at in range(0, count, self.groups)), strict=False))

    def whole(self, present: Sequence[bool], group: int = 0) -> bytes:
        """Which blocks of a group are there, one byte of 0 or 1 each, from which keys of `interleaved` are there."""
        flags, count = bytes(present), len(self.parts)
        blocks = len(flags) // count
        if count == 1:
            return flags
        together = int.from_bytes(flags[group : blocks * count : count])
        for at in range(self.groups, count, self.groups):
            together &= int.from_bytes(flags[at + group : blocks * count : count])
        return together.to_bytes(blocks)


def at_positions(items: bytes, order: Sequence[int], size: int) -> bytes:
    """Of packed items of so many bytes each those at these positions, in this order."""
    return b"".join(items[at * size : (at + 1) * size] for at in order)


def put_back(items: Sequence[Item], order: Sequence[int], default: Item) -> list[Item]:
    """The items, of which the first was at position `order[0]` and so on, where they were; `default` elsewhere."""
    found = [default] * len(order)
    for at, item in zip(order, items, strict=False):
        found[at] = item
    return found


def words_of(tokens: Sequence[int]) -> Sequence[int]:
    """The token ids as the array that every shard's keys are made of. Raises InvalidArgument for invalid ids."""
    if not isinstance(tokens, list | tuple | range):
        return tokens
    try:
        return array("I", tokens)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidArgument(f"cannot make block keys: {error}") from None

"""The keys of one request, for every shard of the model, growing with its tokens.

Idea: keys follow from tokens alone (mooncache.kvcache.keys), so a chain that was begun with the prompt goes on
with every block that decoding fills, without hashing the prompt again. With several ranks each holds another part of a
block's KV under a key of its own; a block is there when all its parts are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncache.client.keys import KEY_BYTES
from mooncache.errors import InvalidArgument
from mooncache.kvcache.keys import request_keys, salted
from mooncache.kvcache.passport import Passport


@dataclass(slots=True)
class _Shard:
    passport: Passport
    keys: bytearray
    tail: bytes | None
    """Last key of the private chain; public keys in front are not part of it."""


@dataclass(slots=True)
class KeyChain:
    """Keys of the complete blocks of `tokens`. Raises InvalidArgument for invalid token ids."""

    block_tokens: int
    shards: list[_Shard] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        passports: Sequence[Passport],
        tokens: Sequence[int],
        *,
        salt: str = "",
        public_tokens: int = 0,
        public_salt: str = "",
    ) -> KeyChain:
        chain = cls(passports[0].block_tokens)
        tokens = words_of(tokens)
        for passport in passports:
            private = salted(passport, salt)
            keys = request_keys(
                passport, tokens, salt=salt, public_tokens=public_tokens, public_salt=public_salt
            )
            tail = keys[-KEY_BYTES:] if keys else None
            if tail is not None and public_tokens >= len(keys) // KEY_BYTES * passport.block_tokens:
                tail = private.chain_keys(tokens)[-KEY_BYTES:]  # the last key is a public one
            chain.shards.append(_Shard(private, bytearray(keys), tail))
        return chain

    def __len__(self) -> int:
        """Number of blocks with keys."""
        return len(self.shards[0].keys) // KEY_BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        """`tokens` continue right behind the last block with keys; complete blocks of them get keys."""
        if len(tokens) < self.block_tokens:
            return
        tokens = words_of(tokens)
        for shard in self.shards:
            more = shard.passport.chain_keys(tokens, shard.tail)
            shard.keys += more
            shard.tail = more[-KEY_BYTES:]

    def key(self, block: int, shard: int = 0) -> bytes:
        """Key of one block's part."""
        return bytes(self.shards[shard].keys[block * KEY_BYTES : (block + 1) * KEY_BYTES])

    def packed(self, first: int, end: int) -> tuple[bytes, ...]:
        """For each shard the keys of blocks first to end."""
        return tuple(bytes(shard.keys[first * KEY_BYTES : end * KEY_BYTES]) for shard in self.shards)

    def interleaved(self, blocks: int | None = None) -> bytes:
        """Keys of the first blocks, the parts of one next to each other: the chain that the pool is asked about."""
        parts = [
            memoryview(shard.keys)[: None if blocks is None else blocks * KEY_BYTES] for shard in self.shards
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

    def together(self, places: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """For each block the places of its parts, from those of the keys of `interleaved`."""
        count = len(self.shards)
        return tuple(zip(*(places[shard::count] for shard in range(count)), strict=False))

    def whole(self, present: Sequence[bool]) -> bytes:
        """Which blocks are there, one byte of 0 or 1 each, from which keys of `interleaved` are there."""
        flags, count = bytes(present), len(self.shards)
        blocks = len(flags) // count
        if count == 1:
            return flags
        together = int.from_bytes(flags[: blocks * count : count])
        for shard in range(1, count):
            together &= int.from_bytes(flags[shard : blocks * count : count])
        return together.to_bytes(blocks)


def words_of(tokens: Sequence[int]) -> Sequence[int]:
    """The token ids as the array that every shard's keys are made of. Raises InvalidArgument for invalid ids."""
    if not isinstance(tokens, list | tuple | range):
        return tokens
    try:
        return array("I", tokens)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidArgument(f"cannot make block keys: {error}") from None

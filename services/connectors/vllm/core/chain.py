"""The keys of one request, for every shard of the model, growing with its tokens.

Idea: keys follow from tokens alone (mooncache.kvcache.keys), so a chain that was begun with the prompt goes on
with every block that decoding fills, without hashing the prompt again. With several ranks each holds another part of a
block's KV under a key of its own; a block is there when all its parts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncache.kvcache.keys import request_keys, salted
from mooncache.passport import KEY_BYTES, Passport


@dataclass(slots=True)
class _Shard:
    passport: Passport
    keys: bytearray
    tail: bytes | None
    """Last key of the private chain; public keys in front are no part of it."""


@dataclass(slots=True)
class Chain:
    """Keys of the complete blocks of `tokens`. Raises InvalidArgument for token ids that are none."""

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
    ) -> Chain:
        chain = cls(passports[0].block_tokens)
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

    def interleaved(self) -> bytes:
        """All keys, the parts of one block next to each other: the chain that the pool is asked about."""
        if len(self.shards) == 1:
            return bytes(self.shards[0].keys)
        return b"".join(
            self.key(block, shard) for block in range(len(self)) for shard in range(len(self.shards))
        )

    def whole(self, present: Sequence[bool]) -> tuple[bool, ...]:
        """Which blocks are there, from which keys of `interleaved` are there."""
        count = len(self.shards)
        if count == 1:
            return tuple(present)
        return tuple(
            all(present[at : at + count]) for at in range(0, len(present) - len(present) % count, count)
        )

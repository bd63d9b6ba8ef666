"""Block keys of prompts; of a prompt that grows, only the keys of what is new are made.

A chain of keys has to be hashed block by block, which takes four times as long as to hash the same tokens in one go. So
the keys of each step of complete blocks are remembered under a digest of all tokens up to its end.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

from mooncache.client.keys import KEY_BYTES
from mooncache.gateway.tokens.memo import Memo
from mooncache.kvcache.passport import Passport

_STEP_TOKENS: Final = 4096


class ChainKeys(NamedTuple):
    """Keys of complete blocks under two passports: 32 bytes each, concatenated."""

    keys: bytes
    content_keys: bytes


class ChainMemo:
    """Safe to use from several threads.

    Args:
        bytes_max: memory for keys; 0: all are made each time.
    """

    def __init__(self, bytes_max: int, *, step_tokens: int = _STEP_TOKENS) -> None:
        self.memo: Memo[ChainKeys] = Memo(bytes_max, lambda found: sum(map(len, found)))
        self._step_tokens = step_tokens if bytes_max else 0

    def chain_keys(
        self, passport: Passport, content: Passport, tokens: array[int], *, scope: str
    ) -> ChainKeys:
        """Keys of the complete blocks of `tokens` under two passports of equal blocks.

        scope: whose remembered keys may be used. Raises InvalidArgument as `Passport.chain_keys` does.
        """
        names = self._names(passport, content, tokens, scope)
        known: list[ChainKeys] = []
        for found in self.memo.find(names):
            if found is None:
                break
            known.append(found)
        step = self._step_tokens // passport.block_tokens
        done = len(known) * step
        new = memoryview(tokens)[done * passport.block_tokens :]
        last = known[-1] if known else None
        made = ChainKeys(
            passport.chain_keys(new, last.keys[-KEY_BYTES:] if last else None),
            content.chain_keys(new, last.content_keys[-KEY_BYTES:] if last else None),
        )
        size = step * KEY_BYTES
        self.memo.keep(
            [
                (name, ChainKeys(*(keys[at * size : (at + 1) * size] for keys in made)))
                for at, name in enumerate(names[len(known) :])
            ]
        )
        return ChainKeys(*(b"".join(parts) for parts in zip(*known, made, strict=True)))

    def _names(self, passport: Passport, content: Passport, tokens: array[int], scope: str) -> list[bytes]:
        """Of each complete step: a digest of the passports and of all tokens up to its end."""
        step = self._step_tokens // passport.block_tokens * passport.block_tokens
        if not step or len(tokens) < step:
            return []
        so_far = self.memo.namer(scope)
        so_far.update(passport.root() + content.root())
        view, names = memoryview(tokens), []
        for at in range(0, len(tokens) - step + 1, step):
            so_far.update(view[at : at + step])
            names.append(so_far.copy().digest())
        return names

"""Images, sounds and videos within a prompt, and the keys of its blocks.

Idea: the tokens in a medium's place say nothing of it. So the chain of keys takes it in where it begins: the key of the
block in which a medium begins, and of every block behind it, is one of its content, its length and its place. Blocks in
front of it are those of the tokens alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from mooncache import _native
from mooncache.client.keys import KEY_BYTES
from mooncache.kvcache.passport import Passport


class Medium(NamedTuple):
    """One image, sound or video. `digest` is equal exactly for equal contents."""

    begin: int  # the first of its tokens in the prompt
    end: int
    digest: str


def chain_keys(
    passport: Passport, tokens: Any, media: Sequence[Medium], parent: bytes | None = None, *, first: int = 0
) -> bytes:
    """Keys of the complete blocks of `tokens`, as `Passport.chain_keys` makes them, with the media in them.

    Args:
        tokens: of a prompt, from its token `first` on, which begins a block.
        media: all of the prompt.
        parent: the last key in front of them.

    Raises:
        InvalidArgument: invalid token ids.
    """
    if not media:
        return passport.chain_keys(tokens, parent)
    size, keys, done = passport.block_tokens, bytearray(), 0
    beginning: dict[int, list[tuple[int, int, str]]] = {}
    for begin, end, digest in sorted(media):
        if begin >= first:
            block, place = divmod(begin - first, size)
            beginning.setdefault(block, []).append((place, end - begin, digest))
    for block in [at for at in beginning if at < len(tokens) // size]:
        keys += passport.chain_keys(tokens[done * size : block * size], parent)
        before = bytes(keys[-KEY_BYTES:]) or parent or b""
        parent = _native.blake3(json.dumps(["media", before.hex(), beginning[block]]).encode())
        keys += passport.chain_keys(tokens[block * size : (block + 1) * size], parent)
        parent, done = bytes(keys[-KEY_BYTES:]), block + 1
    return bytes(keys + passport.chain_keys(tokens[done * size :], parent))

"""What a captured trace says of a request, and what it never says.

A row has times, lengths and ids of blocks; an id says that two prompts begin with the same tokens, nothing else. In
memory a block is a hash, keyed with a secret, of its tokens and all before it, so that not even a dump of the process
tells what was asked. Into the file go small numbers in order of first use. With a salt that outlives the file the
keyed hashes themselves are written instead: then files of several gateways or days can be joined.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from array import array

DIGEST_BYTES: Final = 16
# 53 bits: what JSON readers of every language keep exactly.
_KEYED_ID_MASK: Final = (1 << 53) - 1
_KEYED_NAME_MASK: Final = (1 << 31) - 1

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class CapturedPrompt:
    """One prompt to be captured. Blocks within `public_tokens` are shared by all, the others by `scope` (a tenant)."""

    tokens: array[int]
    scope: str
    public_tokens: int = 0

    @property
    def size_bytes(self) -> int:
        """Memory that is held while the prompt waits to be hashed."""
        return len(self.tokens) * self.tokens.itemsize


def block_digests(prompt: CapturedPrompt, block_tokens: int, salt: bytes) -> bytes:
    """DIGEST_BYTES for each block, the partial last one included: keyed hash of the tokens and all before them.

    As with keys of the pool, what is private hangs on the scope, so equal prompts of two tenants have no id in common.
    """
    private = _keyed(salt, b"scope" + prompt.scope.encode())
    parent = _keyed(salt, b"public") if prompt.public_tokens >= block_tokens else private
    is_public = parent is not private
    data, step = memoryview(prompt.tokens).cast("B"), block_tokens * prompt.tokens.itemsize
    found = []
    for begin in range(0, len(data), step):
        if is_public and (begin + step) // prompt.tokens.itemsize > prompt.public_tokens:
            is_public, parent = False, _keyed(salt, parent + private)
        digest = hashlib.blake2b(parent, digest_size=DIGEST_BYTES, key=salt)
        digest.update(data[begin : begin + step])
        parent = digest.digest()
        found.append(parent)
    return b"".join(found)


class Numbering:
    """Numbers of blocks and names within one file, in order of first use."""

    def __init__(self, salt: bytes, *, is_lasting: bool) -> None:
        self._salt, self.is_lasting = salt, is_lasting
        self._blocks: dict[bytes, int] = {}
        self._names: dict[str, int] = {}

    @property
    def count(self) -> int:
        """Blocks and names that are remembered."""
        return len(self._blocks) + len(self._names)

    def blocks(self, digests: bytes) -> list[int]:
        """Ids of the blocks of one request."""
        parts = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
        if self.is_lasting:
            return [int.from_bytes(part[:8], "big") & _KEYED_ID_MASK for part in parts]
        known = self._blocks
        return [known.setdefault(part, len(known)) for part in parts]

    def name(self, kind: str, name: str) -> int:
        """Number of a tenant or session; -1 for none."""
        if not name:
            return -1
        key = f"{kind}/{name}"
        if self.is_lasting:
            return int.from_bytes(_keyed(self._salt, key.encode())[:8], "big") & _KEYED_NAME_MASK
        return self._names.setdefault(key, len(self._names))


def line(
    timestamp_ms: int,
    input_tokens: int,
    output_tokens: int,
    ids: Sequence[int],
    names: tuple[int, int] | None,
) -> bytes:
    """One line of the file; `names` are the numbers of tenant and session."""
    row: dict[str, object] = {
        "timestamp": timestamp_ms,
        "input_length": input_tokens,
        "output_length": output_tokens,
        "hash_ids": ids,
    }
    if names is not None:
        row |= {"tenant": names[0], "session": names[1]}
    return _encode(row) + b"\n"


def _keyed(salt: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=salt).digest()

"""A key means one value: keys that are nearly equal, and keys that are odd."""

from __future__ import annotations

import string
from typing import Final

from mooncache.conformance.core.content import content_of, neighbours, odd_keys
from mooncache.conformance.core.verdicts import PromiseBrokenError, PromiseFamily, PromiseText
from mooncache.conformance.limits import attempt
from mooncache.conformance.store_bench import StoreBench, shown

_SIZE: Final = 96
_LETTERS: Final = (string.ascii_letters + string.digits).encode()
_BINARY_BYTES: Final = 32


def _one_byte_apart(bench: StoreBench) -> str:
    letters = bench.key("near")
    binary = bench.rng("near").randbytes(_BINARY_BYTES - 8) + bench.run.encode()[:8]
    families = [
        [letters, *neighbours(letters, _LETTERS), letters[:-1], letters + b"0"],
        [binary, *neighbours(binary, bytes(range(256)))],
    ]
    taken, refused = 0, 0
    for keys in families:
        put: list[bytes] = []
        for key in keys:
            bench.must_miss(key, "was never put, only a key that is nearly equal,")
            refusal = attempt(lambda k=key: bench.store.put(k, content_of(k, _SIZE))).refusal  # type: ignore[misc]
            if refusal is None:
                put.append(key)
            elif keys[0] is letters:
                raise PromiseBrokenError(f"a put of {shown(key)} was refused: {refusal!r}")
            else:
                refused += 1
        for key in put:
            bench.must_read(key, content_of(key, _SIZE))
        if put:
            bench.store.remove(put[0])
            bench.must_miss(put[0], "was removed")
            for key in put[1:]:
                bench.must_read(key, content_of(key, _SIZE))
        taken += len(put)
    return f"{taken} keys that differ in one byte or in length by one, {refused} refused"


def _odd_keys(bench: StoreBench) -> str:
    keys = odd_keys(bench.key("odd") + b"/")
    put: list[bytes] = []
    for key in keys:
        attempt(lambda k=key: bench.store.remove(k))  # type: ignore[misc]
        if attempt(lambda k=key: bench.store.put(k, content_of(k, _SIZE))).refusal is None:  # type: ignore[misc]
            put.append(key)
    for key in put:
        for client in bench.clients():
            bench.must_read(key, content_of(key, _SIZE), client)
    for key in keys:
        found = None if key in put else attempt(lambda k=key: bench.store.get(k)).answer  # type: ignore[misc]
        if found is not None:
            raise PromiseBrokenError(f"a put of {shown(key)} was refused, and {len(found)} bytes are read")
    if not put:
        raise PromiseBrokenError(f"none of {len(keys)} keys was taken")
    refused = ", ".join(shown(key) for key in keys if key not in put) or "none"
    return f"{len(put)} of {len(keys)} odd keys taken, each with its own value; refused: {refused}"


PROMISES: Final = {
    PromiseText(
        "near-keys",
        PromiseFamily.IDENTITY,
        "Keys that differ in one byte, or by one byte in length, never share a value.",
    ): _one_byte_apart,
    PromiseText(
        "odd-keys",
        PromiseFamily.IDENTITY,
        "Empty, long, binary and oddly spelt keys have values of their own, or are refused.",
    ): _odd_keys,
}

"""Names of LMCache's chunks and objects in the pool.

Idea: LMCache names KV by a model's name, ranks, and a hash of all tokens before. The root of a passport says what that
leaves out: weights, configuration, layout. Both together are the name. No two keys of LMCache may have one name, so
what requests bring (tags, salts) is JSON in it: a user who chooses a tag cannot end it early and forge the rest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

PREFIX = "lmcache"


def chunk_name(root: str, *, chunk_hash: str, tags: Sequence[tuple[str, object]] | None) -> str:
    """Name of a chunk of the in-process mode.

    Args:
        root: of the passport, in hexadecimal.
        tags: of the request (`lmcache.tag.*`), in its order.
    """
    words = json.dumps(list(tags), default=repr) if tags else ""
    return f"{PREFIX}/{root}/{chunk_hash}/{words}"


def object_name(root: str, *, kv_rank: int, group: int, salt: str, chunk_hash: bytes) -> str:
    """Name of an object of the multi-process mode.

    Args:
        kv_rank: LMCache's number that says which rank of how many.
        salt: the request's `cache_salt`.
    """
    words = json.dumps(salt) if salt else ""
    return f"{PREFIX}/{root}/{kv_rank:x}/{group:x}/{chunk_hash.hex()}/{words}"


def describe(shapes: Sequence[Sequence[int]], dtypes: Sequence[object]) -> str:
    """A layout as the passport has it: types and shapes of the tensors, one after the other."""
    parts = zip(dtypes, shapes, strict=True)
    return "; ".join(f"{dtype_name(dtype)} {'x'.join(map(str, shape))}" for dtype, shape in parts)


def dtype_name(dtype: object) -> str:
    """PyTorch's name of a type, without the module."""
    return str(dtype).removeprefix("torch.")


def leading(present: Sequence[object]) -> int:
    """Number of entries before the first that is false or missing."""
    return next((at for at, there in enumerate(present) if not there), len(present))

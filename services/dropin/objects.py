"""Objects of any size under names, on blocks of a pool.

An object is one block, under the key of its name, with the caller's bytes and nothing else: so it moves without a copy.
One larger than `part_bytes` is several blocks, and the block of its name is a manifest: 64 bytes that begin with a
mark. A value that could be taken for a manifest is stored by way of one. The parts are written before their manifest,
under keys of their own, so a reader never sees half an object, nor parts of two.

All results are the original's codes.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from mooncache import _native
from mooncache.client.keys import MAX_NAME_BYTES, to_block_key
from mooncache.client.limits import MAX_BATCH, MAX_REPLICAS
from mooncache.client.results import STORED
from mooncache.dropin import codes
from mooncache.dropin.memory import ObjectPart, part_of
from mooncache.dropin.values import ReplicateConfig, SoftPinAction
from mooncache.errors import OK, KeyInvalid, Pinned

if TYPE_CHECKING:
    from mooncache.client.results import BlockStat
    from mooncache.client.sync import Client

Source = Sequence[ObjectPart]
"""The slices of one object."""

PART_BYTES: Final = 256 << 20
SOFT_PIN_S: Final = 1800.0  # the original's default
PIN_MAX_S: Final = 86_400.0  # nodes refuse longer ones
_MARK: Final = bytes.fromhex("9f3c41d8e25b7a06b1f4c86d0e927355aa18d0c37be964f2")
_MANIFEST: Final = struct.Struct("<24s16sQQQ")
_MANIFEST_BYTES: Final = _MANIFEST.size
_LIST_MAX: Final = 1 << 62
_PART_CONTEXT: Final = "mooncache 2026-11 dropin part of a large object"


class Manifest(NamedTuple):
    """What the block of a large object's name says."""

    ident: bytes
    size_bytes: int
    part_bytes: int

    def encode(self) -> bytes:
        return _MANIFEST.pack(_MARK, self.ident, self.size_bytes, self.part_bytes, 0)

    def keys(self) -> list[bytes]:
        """The keys of its parts, in order."""
        count = -(-self.size_bytes // self.part_bytes)
        return [
            _native.blake3_derive_key(_PART_CONTEXT, self.ident + number.to_bytes(8, "little"))
            for number in range(count)
        ]


def manifest_of(block: bytes | memoryview) -> Manifest | None:
    """The manifest that a block is; None for a block of a caller's bytes."""
    if len(block) != _MANIFEST_BYTES or bytes(block[: len(_MARK)]) != _MARK:
        return None
    _, ident, size_bytes, part_bytes, _ = _MANIFEST.unpack(block)
    if not 0 < size_bytes <= part_bytes * MAX_BATCH:
        return None
    return Manifest(ident, size_bytes, part_bytes)


def total_of(source: Source) -> int:
    """Bytes of an object or of a destination."""
    return sum(part.nbytes for part in source)


def span(source: Source, begin: int, end: int) -> list[ObjectPart]:
    """The slices of the bytes from begin to end."""
    found: list[ObjectPart] = []
    at = 0
    for part in source:
        low, high = max(begin - at, 0), min(end - at, part.nbytes)
        if low < high:
            found.append(part_of(part, low, high - low))
        at += part.nbytes
    return found


def _first_bytes(source: Source, count: int) -> bytes | None:
    """The first bytes; None when some are in GPU memory."""
    first = b""
    for part in span(source, 0, count):
        if not isinstance(part, memoryview):
            return None
        first += part.tobytes()
    return first


def _keys_of(names: Sequence[str]) -> tuple[Sequence[int], list[bytes]]:
    """Positions of the names that can be keys, and those keys."""
    if all(type(name) is str and name.isascii() and 0 < len(name) <= MAX_NAME_BYTES for name in names):
        return range(len(names)), list(map(_native.key_of_name, names))  # the usual case, hundreds at once
    positions, keys = [], []
    for position, name in enumerate(names):
        try:
            keys.append(to_block_key(name if isinstance(name, str) else bytes(name).decode()))
        except (KeyInvalid, UnicodeError):
            continue
        positions.append(position)
    return positions, keys


def _batches(count: int) -> Iterator[slice]:
    for begin in range(0, count, MAX_BATCH):
        yield slice(begin, begin + MAX_BATCH)


class Range(NamedTuple):
    """Bytes of an object, from `offset` on as many as the destination has."""

    name: str
    offset: int
    destination: ObjectPart


class Objects:
    """Objects of one tenant. Thread-safe, like the client below it."""

    def __init__(self, client: Client, part_bytes: int = PART_BYTES) -> None:
        self.client = client
        self._part_bytes = part_bytes

    # --- put -------------------------------------------------------------------------------------------------

    def put(self, names: Sequence[str], sources: Sequence[Source], config: ReplicateConfig) -> list[int]:
        """Store objects; 0 also for those that are there already, and for empty ones, which are not stored."""
        answer = [codes.INVALID_KEY] * len(names)
        positions, keys = _keys_of(names)
        plain: list[tuple[int, bytes]] = []
        for position, key in zip(positions, keys, strict=True):
            source = sources[position]
            if not (total := total_of(source)):
                answer[position] = codes.OK
            elif total > self._part_bytes or (total == _MANIFEST_BYTES and self._looks_like_one(source)):
                answer[position] = self._put_large(key, source, config)
            else:
                plain.append((position, key))
        for batch in _batches(len(plain)):
            rows = plain[batch]
            found = self._put_blocks([key for _, key in rows], [sources[i] for i, _ in rows], config)
            for (position, _), code in zip(rows, found, strict=True):
                answer[position] = codes.code_of(code)
            stored = [row for row, code in zip(rows, found, strict=True) if not code]
            for (position, _), code in zip(
                stored, self._pin([key for _, key in stored], config), strict=True
            ):
                answer[position] = code
        return answer

    def _put_blocks(self, keys: list[bytes], sources: Sequence[Source], config: ReplicateConfig) -> list[int]:
        replicas = min(config.replica_num, MAX_REPLICAS)
        node = self.node_of(config.preferred()) if config.preferred() else None
        result = self.client.put_many(
            keys, [list(source) for source in sources], replicas=replicas, prefer_node=node
        )
        return [OK if code in STORED else code for code in result.codes]  # fewer copies are no failure there

    @staticmethod
    def _looks_like_one(source: Source) -> bool:
        first = _first_bytes(source, len(_MARK))
        return first is None or first == _MARK

    def _put_large(self, key: bytes, source: Source, config: ReplicateConfig) -> int:
        if self.client.exists(key):
            return codes.OK
        total = total_of(source)
        manifest = Manifest(secrets.token_bytes(16), total, self._part_bytes)
        parts = manifest.keys()
        if len(parts) > MAX_BATCH:
            return codes.INVALID_PARAMS
        step = self._part_bytes
        pieces = [span(source, begin, begin + step) for begin in range(0, total, step)]
        found = self._put_blocks(parts, pieces, config)
        if failed := next(filter(None, found), 0):
            self.client.remove_many(parts)
            return codes.code_of(failed)
        node = self.node_of(config.preferred()) if config.preferred() else None
        replicas = min(config.replica_num, MAX_REPLICAS)
        result = self.client.put_many([key], [manifest.encode()], replicas=replicas, prefer_node=node)
        if not result.created[0]:
            self.client.remove_many(parts)
            return codes.code_of(result.codes[0])
        return next(filter(None, self._pin([key, *parts], config)), codes.OK)

    def _pin(self, keys: list[bytes], config: ReplicateConfig) -> list[int]:
        """Pin what was stored; 0 for each, or why a hard pin was not had: such a block is removed again."""
        if config.with_hard_pin:
            ttl_s = PIN_MAX_S
        elif config.soft_pin_action == SoftPinAction.ENABLE:
            ttl_s = SOFT_PIN_S if config.soft_pin_ttl_ms is None else config.soft_pin_ttl_ms / 1000
        else:
            ttl_s = 0.0
        answer = [codes.OK] * len(keys)
        for batch in _batches(len(keys) if ttl_s > 0 else 0):
            found = self.client.pin_many(keys[batch], ttl_s=min(ttl_s, PIN_MAX_S)).codes
            lost = [i for i, code in enumerate(found) if code and config.with_hard_pin]
            self.client.remove_many([keys[batch][i] for i in lost])
            for i in lost:
                answer[batch.start + i] = codes.code_of(found[i])
        return answer

    def upsert(self, names: Sequence[str], sources: Sequence[Source], config: ReplicateConfig) -> list[int]:
        """Store objects in place of what is there. A reader in between finds nothing."""
        kept = [i for i, source in enumerate(sources) if total_of(source)]
        gone = self.remove([names[i] for i in kept])
        answer = [codes.OK] * len(names)
        go_on = [i for i, code in zip(kept, gone, strict=True) if code in {codes.OK, codes.NOT_FOUND}]
        for i, code in zip(kept, gone, strict=True):
            answer[i] = code
        put = self.put([names[i] for i in go_on], [sources[i] for i in go_on], config)
        for i, code in zip(go_on, put, strict=True):
            answer[i] = code
        return answer

    # --- get -------------------------------------------------------------------------------------------------

    def get_into(self, names: Sequence[str], destinations: Sequence[Source]) -> list[int]:
        """Read whole objects; for each the number of its bytes, or a negative code."""
        answer = [codes.INVALID_KEY] * len(names)
        positions, keys = _keys_of(names)
        for batch in _batches(len(keys)):
            chosen, at = keys[batch], positions[batch]
            targets = [list(destinations[i]) for i in at]
            result = self.client.get_many_into(chosen, targets)
            for i, key, code, size in zip(at, chosen, result.codes, result.sizes_bytes, strict=True):
                answer[i] = size if not code else codes.code_of(code)
                if not code and size == _MANIFEST_BYTES and self._looks_like_one(destinations[i]):
                    manifest = self._manifest(key)
                    if manifest is not None:
                        answer[i] = self._get_large(manifest, destinations[i])
        return answer

    def _manifest(self, key: bytes) -> Manifest | None:
        block = self.client.get(key)
        return None if block is None else manifest_of(block)

    def _get_large(self, manifest: Manifest, destination: Source) -> int:
        total, step = manifest.size_bytes, manifest.part_bytes
        if total_of(destination) < total:
            return codes.INVALID_PARAMS
        pieces = [span(destination, begin, min(begin + step, total)) for begin in range(0, total, step)]
        result = self.client.get_many_into(manifest.keys(), pieces)
        if failed := next(filter(None, result.codes), 0):
            return codes.code_of(failed)
        return total if sum(result.sizes_bytes) == total else codes.TRANSFER_FAIL

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """Read whole objects; None for what cannot be read."""
        answer: list[bytes | None] = [None] * len(names)
        positions, keys = _keys_of(names)
        for batch in _batches(len(keys)):
            for i, value in zip(positions[batch], self.client.get_many(keys[batch]).values, strict=True):
                manifest = None if value is None else manifest_of(value)
                answer[i] = value if manifest is None else self._get_large_bytes(manifest)
        return answer

    def _get_large_bytes(self, manifest: Manifest) -> bytes | None:
        # Memory is made for bytes that are there, not for what a manifest says.
        stats = self.client.stat_many(manifest.keys())
        if sum(0 if stat is None else stat.size_bytes for stat in stats) != manifest.size_bytes:
            return None
        whole = bytearray(manifest.size_bytes)
        return bytes(whole) if self._get_large(manifest, [memoryview(whole)]) >= 0 else None

    def get_ranges(self, ranges: Sequence[Range]) -> list[int]:
        """Read parts of objects; for each the number of bytes, or a negative code."""
        names = list(dict.fromkeys(item.name for item in ranges))
        known = dict(zip(names, self._sizes(names), strict=True))
        answer = [codes.NOT_FOUND] * len(ranges)
        asked: list[tuple[int, bytes, int, ObjectPart]] = []
        for i, (name, offset, destination) in enumerate(ranges):
            key, size, manifest = known[name]
            if size < 0:
                answer[i] = size
            elif offset < 0 or offset + destination.nbytes > size:
                answer[i] = codes.INVALID_PARAMS
            else:
                answer[i] = destination.nbytes
                asked += [(i, *piece) for piece in _pieces(key, manifest, offset, destination)]
        for batch in _batches(len(asked)):
            rows = asked[batch]
            result = self.client.get_many_into(
                [row[1] for row in rows], [row[3] for row in rows], offsets=[row[2] for row in rows]
            )
            for row, code, size in zip(rows, result.codes, result.sizes_bytes, strict=True):
                if code or size != row[3].nbytes:
                    answer[row[0]] = codes.code_of(code) or codes.TRANSFER_FAIL
        return answer

    # --- questions -------------------------------------------------------------------------------------------

    def exist(self, names: Sequence[str]) -> list[int]:
        """1 for objects that are there, 0 for others."""
        answer = [0] * len(names)
        positions, keys = _keys_of(names)
        if len(keys) == len(names) <= MAX_BATCH:
            return list(map(int, self.client.exists_many(keys)))
        for batch in _batches(len(keys)):
            for i, there in zip(positions[batch], self.client.exists_many(keys[batch]), strict=True):
                answer[i] = int(there)
        return answer

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Bytes of objects, or a negative code."""
        return [size for _, size, _ in self._sizes(names)]

    def _sizes(self, names: Sequence[str]) -> list[tuple[bytes, int, Manifest | None]]:
        """For each name its key, its size or a negative code, and its manifest if it has one."""
        return [
            (key, codes.NOT_FOUND if stat is None else (manifest or stat).size_bytes, manifest)
            for key, stat, manifest in self.stats(names)
        ]

    def stats(self, names: Sequence[str]) -> list[tuple[bytes, BlockStat | None, Manifest | None]]:
        """For each name its key, the stat of its block (None: not there), and its manifest if it has one."""
        answer: list[tuple[bytes, BlockStat | None, Manifest | None]] = [(b"", None, None)] * len(names)
        positions, keys = _keys_of(names)
        for batch in _batches(len(keys)):
            for i, key, stat in zip(
                positions[batch], keys[batch], self.client.stat_many(keys[batch]), strict=True
            ):
                small = stat is not None and stat.size_bytes == _MANIFEST_BYTES
                answer[i] = (key, stat, self._manifest(key) if small else None)
        return answer

    def node_of(self, segment: str) -> str | None:
        """Name of the node that a segment's name means (its own, or the host:port of its data); None when none does."""
        nodes = self.client.nodes()
        for node in nodes:
            if segment in {node.node_id, f"{node.tcp_host}:{node.tcp_port}"}:
                return node.node_id
        return None

    # --- removal ---------------------------------------------------------------------------------------------

    def remove(self, names: Sequence[str], segment: str = "") -> list[int]:
        """Remove objects with their pins, or their copies in one segment; 0, or a negative code (NOT_FOUND for what was
        not there)."""
        answer = [codes.NOT_FOUND] * len(names)
        node = self.node_of(segment) if segment else None
        if segment and node is None:
            return answer
        there = [(i, key, manifest) for i, (key, stat, manifest) in enumerate(self.stats(names)) if stat]
        found = self._remove_blocks([key for _, key, _ in there], node)
        for (i, _, manifest), code in zip(there, found, strict=True):
            answer[i] = codes.code_of(code)
            if not code and manifest is not None:
                self._remove_blocks(manifest.keys(), node)
        return answer

    def _remove_blocks(self, keys: list[bytes], node: str | None = None) -> list[int]:
        answer: list[int] = []
        for batch in _batches(len(keys)):
            chosen = keys[batch]
            found = list(self.client.remove_many(chosen, node=node).codes)
            pinned = [i for i, code in enumerate(found) if code == Pinned.code]
            if pinned:
                held = [chosen[i] for i in pinned]
                self.client.unpin_many(held)
                for i, code in zip(pinned, self.client.remove_many(held, node=node).codes, strict=True):
                    found[i] = code
            answer += found
        return answer

    def remove_all(self) -> int:
        """Remove every block of the tenant; how many."""
        keys = list({entry.key for entry in self.client.list(limit=_LIST_MAX)})
        return self._remove_blocks(keys).count(0)


def _pieces(
    key: bytes, manifest: Manifest | None, offset: int, destination: ObjectPart
) -> list[tuple[bytes, int, ObjectPart]]:
    """The blocks' ranges that one range of an object consists of: (key, offset in the block, destination)."""
    if manifest is None:
        return [(key, offset, destination)] if destination.nbytes else []
    keys, step, done = manifest.keys(), manifest.part_bytes, 0
    found = []
    while done < destination.nbytes:
        number, begin = divmod(offset + done, step)
        size = min(step - begin, destination.nbytes - done)
        found.append((keys[number], begin, part_of(destination, done, size)))
        done += size
    return found

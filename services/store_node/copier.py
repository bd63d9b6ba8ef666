"""Copies blocks from another node to this one with the native client, as the tenant that owns them.

Idea: the node holds the cluster's secret and can therefore prove any tenant's key to its peers. Blocks travel in
batches of bounded bytes: sizes are asked first, then each batch is read (checksums checked) and put locally. Where the
caller gives a rate, batches are small and have turns (core/copy_pace.py). One native client per tenant is kept for a
few tenants; threads are bounded by `concurrency`.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from mooncache.client.keys import split_keys
from mooncache.client.map_keeper import view_of_node
from mooncache.client.native_call import call_native
from mooncache.client.results import MapNodeState, NodeView
from mooncache.errors import (
    OK,
    AlreadyExists,
    ConnectionLost,
    DeadlineExceeded,
    InvalidArgument,
    NodeUnavailable,
    NotFound,
)
from mooncache.proto.v1 import common_pb2
from mooncache.store_node.core.copy_pace import PIECE_BYTES, CopyPace

if TYPE_CHECKING:
    from mooncache._native import Client as NativeClient

_UNREACHABLE = frozenset({NodeUnavailable.code, ConnectionLost.code})
MAX_BATCH_BYTES = 64 << 20
MAX_TENANT_CLIENTS = 8
MAX_SOURCES = 256
_SELF_INDEX = 65_534
_SOURCE_LIMIT = 65_000

ClientFor = Callable[[str], "NativeClient"]
"""Makes a native client that acts for a tenant."""


def batches(sizes_bytes: Iterable[int | None], limit_bytes: int) -> list[list[int]]:
    """Positions grouped so that each group holds at most `limit_bytes`, or a single larger block. None is left out."""
    groups: list[list[int]] = []
    held_bytes = 0
    for position, size in enumerate(sizes_bytes):
        if size is None:
            continue
        if not groups or held_bytes + size > limit_bytes:
            groups.append([])
            held_bytes = 0
        groups[-1].append(position)
        held_bytes += size
    return groups


class _Peer:
    """One tenant's client with the nodes it knows."""

    def __init__(self, client: NativeClient, own: NodeView) -> None:
        self._client = client
        self._own = own
        self._sources: collections.OrderedDict[str, NodeView] = collections.OrderedDict()
        self._epoch = 0
        self._next_index = 0
        self._lock = threading.Lock()

    @property
    def client(self) -> NativeClient:
        return self._client

    def index_of(self, source: NodeView) -> int:
        """Make the source known and return its index in this client's own map."""
        with self._lock:
            known = self._sources.get(source.node_id)
            same = known is not None and _address(known) == _address(source)
            if known is None or not same:
                self._sources.pop(source.node_id, None)
                while len(self._sources) >= MAX_SOURCES:
                    self._sources.popitem(last=False)
                known = _with_index(source, self._next_index % _SOURCE_LIMIT)
                self._next_index += 1
                self._sources[source.node_id] = known
                self._set_map()
            return known.index

    def know_self(self) -> None:
        """Make this node known, if no source was asked for yet."""
        with self._lock:
            if not self._epoch:
                self._set_map()

    def _set_map(self) -> None:
        self._epoch += 1
        nodes = [*self._sources.values(), self._own]
        call_native(self._client.set_map, self._epoch, [map_entry(node) for node in nodes])


class NativeCopier:
    """Copies blocks from other nodes to this one. `close` ends running copies."""

    def __init__(self, own: NodeView, client_for: ClientFor, concurrency: int) -> None:
        self._own = _with_index(own, _SELF_INDEX)
        self._client_for = client_for
        self._peers: collections.OrderedDict[str, _Peer] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._pace = CopyPace()
        self._closed = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(concurrency, thread_name_prefix="mooncache-copy")

    async def copy(
        self, tenant: str, keys: bytes, source: common_pb2.NodeInfo, timeout_s: float, bytes_per_s: int
    ) -> tuple[list[int], int]:
        """Copy packed `keys` of `tenant` from `source`.

        bytes_per_s: of all calls with a rate together; 0: as fast as it goes.

        Returns:
            A stable code for each key and the number of bytes that moved.

        Raises:
            InvalidArgument: the source has no data endpoint.
            NodeUnavailable: the source cannot be asked at all.
        """
        if not source.endpoints.tcp_port and not source.endpoints.unix_path:
            raise InvalidArgument("source has no data endpoint.")
        loop = asyncio.get_running_loop()
        deadline_s = time.monotonic() + timeout_s
        return await loop.run_in_executor(
            self._pool, self._copy, tenant, keys, view_of_node(source), deadline_s, bytes_per_s
        )

    async def reads(self, tenant: str, keys: bytes, timeout_s: float) -> list[int | None]:
        """How often each block here was read since it came; None for those that are not here.

        Raises:
            MooncacheError: the node's own data port does not answer.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._reads, tenant, keys, timeout_s)

    def _reads(self, tenant: str, keys: bytes, timeout_s: float) -> list[int | None]:
        peer = self._peer(tenant)
        peer.know_self()
        own = call_native(peer.client.stat, keys, timeout_s, None, _SELF_INDEX)
        codes = [NotFound.code if item is None else item["code"] for item in own]
        if any(code in _UNREACHABLE for code in codes):
            raise NodeUnavailable("The node's own data port did not answer.")
        return [
            item["hits"] if item is not None and code == OK else None
            for item, code in zip(own, codes, strict=True)
        ]

    def set_keys(self, key_for: Callable[[str], bytes]) -> None:
        """Prove other keys from now on: `key_for` a tenant."""
        with self._lock:
            for tenant, peer in self._peers.items():
                peer.client.set_key(key_for(tenant))

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for peer in self._peers.values():
                peer.client.close()
            self._peers.clear()

    def _peer(self, tenant: str) -> _Peer:
        with self._lock:
            peer = self._peers.pop(tenant, None) or _Peer(self._client_for(tenant), self._own)
            self._peers[tenant] = peer
            while len(self._peers) > MAX_TENANT_CLIENTS:
                self._peers.popitem(last=False)[1].client.close()
            return peer

    def _copy(
        self, tenant: str, keys: bytes, source: NodeView, deadline_s: float, bytes_per_s: int
    ) -> tuple[list[int], int]:
        peer = self._peer(tenant)
        index = peer.index_of(source)
        client = peer.client
        wanted = split_keys(keys)
        codes = [DeadlineExceeded.code] * len(wanted)
        copied_bytes = 0
        try:
            own = call_native(client.stat, keys, _left_s(deadline_s), None, _SELF_INDEX)
            held = [item is not None and item["code"] == OK for item in own]
            if all(held):
                return [AlreadyExists.code] * len(wanted), 0
            stats = call_native(client.stat, keys, _left_s(deadline_s), None, index)
        except DeadlineExceeded:
            return codes, 0
        sizes: list[int | None] = []
        for position, item in enumerate(stats):
            if held[position]:
                codes[position] = AlreadyExists.code
                sizes.append(None)
                continue
            codes[position] = NotFound.code if item is None else item["code"]
            sizes.append(item["size_bytes"] if item is not None and item["code"] == OK else None)
        if any(code in _UNREACHABLE for code in codes):
            raise NodeUnavailable(f"Node {source.node_id} did not answer.")
        for position, size in enumerate(sizes):
            if size is not None:
                codes[position] = DeadlineExceeded.code  # until it is done
        for group in batches(sizes, PIECE_BYTES if bytes_per_s else MAX_BATCH_BYTES):
            if not self._turn(sum(sizes[i] or 0 for i in group), bytes_per_s, deadline_s):
                break
            moved = self._copy_group(client, index, [wanted[i] for i in group], deadline_s)
            for position, (code, size) in zip(group, moved, strict=True):
                codes[position] = code
                copied_bytes += size
        return codes, copied_bytes

    def _turn(self, size_bytes: int, bytes_per_s: int, deadline_s: float) -> bool:
        """Wait until a piece may move; False when that is not before the deadline, or the copier is closed."""
        now_s = time.monotonic()
        if now_s >= deadline_s:
            return False
        with self._lock:
            wait_s = self._pace.take_turn(size_bytes, bytes_per_s, now_s, deadline_s - now_s)
        return wait_s is not None and not self._closed.wait(wait_s)

    def _copy_group(
        self, client: NativeClient, source: int, keys: list[bytes], deadline_s: float
    ) -> list[tuple[int, int]]:
        """Code and bytes moved of each key."""
        values = call_native(client.get_bytes, keys, _left_s(deadline_s), None, source)
        outcome = [(OK, len(item)) if isinstance(item, bytes) else (item, 0) for item in values]
        found = {i: item for i, item in enumerate(values) if isinstance(item, bytes)}
        if found:
            answer = call_native(
                client.put,
                [keys[i] for i in found],
                list(found.values()),
                1,
                _left_s(deadline_s),
                None,
                _SELF_INDEX,
            )
            for i, (code, *_) in zip(found, answer, strict=True):
                outcome[i] = (code, len(found[i]) if code == OK else 0)
        return outcome


def _left_s(deadline_s: float) -> float:
    return max(0.05, deadline_s - time.monotonic())


def _address(node: NodeView) -> tuple[object, ...]:
    return node.incarnation, node.tcp_host, node.tcp_port, node.unix_path, node.host_id


def _with_index(node: NodeView, index: int) -> NodeView:
    return dataclasses.replace(node, index=index, state=MapNodeState.ACTIVE, weight=1.0)


def map_entry(node: NodeView) -> dict[str, object]:
    """A node as the native client's map takes it."""
    return {
        "index": node.index,
        "node_id": node.node_id,
        "host_id": node.host_id,
        "incarnation": node.incarnation,
        "tcp_host": node.tcp_host,
        "tcp_port": node.tcp_port,
        "unix_path": node.unix_path,
        "free_bytes": max(1, node.free_bytes),
        "weight": node.weight,
        "state": node.state,
    }

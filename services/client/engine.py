"""The blocking half of both clients: checks arguments, calls the native core with whole batches, types the outcome.

`Client` calls it directly, `AsyncClient` from a bounded thread pool; the semantics are therefore the same. The native
core moves bytes on the calling thread with the GIL released. Keys whose holder it cannot know (large clusters) are
located once per batch (locator.py), and never when every key has a place.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mooncache._native import StagedTally
from mooncache.client import buffers as buf
from mooncache.client import results as res
from mooncache.client.device import (
    BlockParts,
    DeviceStaging,
    GetAnswer,
    HostParts,
    PutAnswer,
    device_view,
    in_device,
)
from mooncache.client.gpu_direct import GpuDirect
from mooncache.client.keys import KEY_BYTES, Key, batch_chain, batch_keys, pack_keys, to_block_key
from mooncache.client.limits import MAX_PREFETCH_BYTES, MAX_REPLICAS, MAX_TTL_S, check_count, check_timeout
from mooncache.client.locator import Locate, Locator
from mooncache.client.native_call import call_native, map_rows
from mooncache.client.registered import RegisteredBuffer
from mooncache.client.staging import Slices
from mooncache.client.token_file import KeyFollower
from mooncache.client.watch import AsyncBlockWatch, BlockWatch, known_index
from mooncache.errors import OK, AlreadyExists, Closed, InvalidArgument, NotFound, UnknownNode
from mooncache.runtime.logs import Event, get_logger

if TYPE_CHECKING:
    from mooncache._native import CancelToken, Reservation, ReservationBatch
    from mooncache._native import Client as NativeClient

T = TypeVar("T")
W = TypeVar("W", BlockWatch, AsyncBlockWatch)
_log = get_logger(__name__)
RDMA_LOOK_S = 1.0  # a look costs a small call several percent


class ClientCore:
    """The blocking core of both clients. Thread-safe; `close` may be called from any thread and more than once."""

    def __init__(
        self,
        native: NativeClient,
        *,
        default_timeout_s: float,
        locate: Locate | None,
        default_replicas: int = 1,
        key: KeyFollower | None = None,
    ) -> None:
        self._native, self._key = native, key
        self._default_timeout_s = check_timeout(default_timeout_s)
        self._default_replicas = default_replicas
        self._locate = locate
        self._locator = Locator(native, locate)
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._view = res.ClusterView()
        self._map_version = 0
        self._direct = GpuDirect(DeviceStaging())
        self._rdma_open = False  # a node offers RDMA, and it is not known yet whether it can be used here
        self._rdma_look_s, self._rdma_logged = 0.0, False

    # --- membership ------------------------------------------------------------------------------------------

    @property
    def view(self) -> res.ClusterView:
        return self._view

    def apply_view(self, view: res.ClusterView) -> None:
        """Hand a new cluster map to the native core. Versions only grow, whichever master made the map."""
        with self._lock:
            if self._closed:
                return
            self._map_version += 1
            call_native(self._native.set_map, self._map_version, map_rows(view))
            self._view = view
            self._rdma_open = not self._rdma_logged and (
                self._locate is None or any(node.rails for node in view.nodes)
            )

    @property
    def in_child(self) -> bool:
        """This process is a fork of the one that made the client: locks and connections are the parent's."""
        return os.getpid() != self._pid

    def close(self) -> None:
        if self.in_child:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._rdma_open:
            self._log_rdma()
        self._native.close()

    @property
    def closed(self) -> bool:
        return self._closed

    # --- helpers ---------------------------------------------------------------------------------------------

    def _core(self) -> NativeClient:
        if self._closed:
            raise Closed("The client is closed. Make a new one with mooncache.connect().")
        if self._rdma_open and time.monotonic() >= self._rdma_look_s and not self.in_child:
            self._log_rdma()
        if self._key is not None:
            self._key.look()
        return self._native

    def _timeout(self, timeout_s: float | None) -> float:
        return self._default_timeout_s if timeout_s is None else check_timeout(timeout_s)

    def _located(
        self,
        block_keys: list[bytes],
        limit_s: float,
        ask: Callable[[Sequence[int], float], list[T]],
        missed: Callable[[T], bool],
    ) -> list[T]:
        """What `ask` says of each key, and again of those it misses that can be located; all within one limit.

        `ask` takes positions in `block_keys` and the time that is left.
        """
        end_s = time.monotonic() + limit_s
        answer = ask(range(len(block_keys)), limit_s)
        lost = [i for i, item in enumerate(answer) if missed(item)]
        left_s = self._left_to_ask_again([block_keys[i] for i in lost], end_s)
        if left_s:
            for i, item in zip(lost, ask(lost, left_s), strict=True):
                answer[i] = item
        return answer

    def _left_to_ask_again(self, missed: list[bytes], end_s: float) -> float:
        """Seconds to ask the nodes again in, once it is known where missed keys are; 0: it is not worth it."""
        left_s = end_s - time.monotonic()
        if not missed or left_s <= 0 or not self._locator.learn(missed, left_s):
            return 0.0
        return max(end_s - time.monotonic(), 0.0)

    # --- bytes -----------------------------------------------------------------------------------------------

    def put_many(
        self,
        keys: Iterable[Key],
        values: Sequence[buf.Buffer],
        replicas: int | None,
        timeout_s: float | None,
        cancel: CancelToken | None = None,
        node: int | None = None,
        prefer_node: str | None = None,
    ) -> res.PutResult:
        block_keys = batch_keys(keys)
        if isinstance(values, (bytes, bytearray, memoryview, str)):
            raise InvalidArgument("Expected a list of values, got a single buffer. Wrap it: [value].")
        sources = [buf.to_source(value) for value in values]
        if len(sources) != len(block_keys):
            raise InvalidArgument(
                f"As many values as keys are needed; got {len(block_keys)} keys and {len(sources)}."
            )
        for position, source in enumerate(sources):
            if buf.size_bytes(source) == 0:
                raise InvalidArgument(f"A block must hold at least one byte; value {position} is empty.")
        replicas = self._default_replicas if replicas is None else replicas
        check_count("replicas", replicas, 1, MAX_REPLICAS)
        if not block_keys:
            return res.PutResult(())
        core = self._core()
        preferred = None if prefer_node is None else self._view.node_index(prefer_node)
        limit_s, tally = self._timeout(timeout_s), StagedTally()
        if in_device(sources):

            def direct(positions: Sequence[int], slices: Slices, left_s: float) -> list[PutAnswer]:
                chosen = [block_keys[i] for i in positions]
                return call_native(core.put_device, chosen, slices, replicas, left_s, cancel, node, preferred)

            def staged(positions: Sequence[int], parts: HostParts, left_s: float) -> list[PutAnswer]:
                chosen = [block_keys[i] for i in positions]
                return call_native(core.put, chosen, parts, replicas, left_s, cancel, node, preferred)

            answer = self._direct.put(core, sources, limit_s, direct, staged)
        else:
            also = (cancel, node, preferred, tally)
            answer = call_native(core.put, block_keys, sources, replicas, limit_s, *also)
        created = tuple(made and code in res.STORED for code, _, made in answer)
        codes = tuple(OK if code == AlreadyExists.code else code for code, _, _ in answer)
        names = tuple(self._view.node_name(index) for _, index, _ in answer)
        return res.PutResult(codes, created, names, staged_bytes=tally.bytes)

    def get_many_into(
        self,
        keys: Iterable[Key],
        destinations: Sequence[buf.Buffer],
        timeout_s: float | None,
        cancel: CancelToken | None = None,
        offsets: Sequence[int] | None = None,
    ) -> res.GetResult:
        block_keys = batch_keys(keys)
        if isinstance(destinations, (bytearray, memoryview)):
            raise InvalidArgument("Expected a list of destinations, got a single buffer. Wrap it: [buffer].")
        targets = [buf.to_destination(value) for value in destinations]
        if len(targets) != len(block_keys):
            raise InvalidArgument(
                f"As many destinations as keys are needed; got {len(block_keys)} keys and {len(targets)}."
            )
        if offsets is not None and len(offsets) != len(block_keys):
            raise InvalidArgument(f"As many offsets as keys are needed; got {len(offsets)}.")
        if not block_keys:
            return res.GetResult(())
        limit_s, tally = self._timeout(timeout_s), StagedTally()
        ranges = (
            None if offsets is None else [check_count("offset", offset, 0, 1 << 62) for offset in offsets]
        )

        if in_device(targets):

            def direct(positions: Sequence[int], slices: Slices, left_s: float) -> list[GetAnswer]:
                return self._get_in_place([block_keys[i] for i in positions], slices, left_s, cancel)

            def staged(positions: Sequence[int], parts: HostParts, left_s: float) -> list[GetAnswer]:
                chosen = [block_keys[i] for i in positions]
                part = None if ranges is None else [ranges[i] for i in positions]
                return self._get_located(chosen, parts, left_s, cancel, part)

            # only whole blocks have a checksum that can be compared where they land
            answer = self._direct.get(
                self._core(), targets, limit_s, direct if ranges is None else None, staged
            )
        else:
            answer = self._get_located(block_keys, targets, limit_s, cancel, ranges, tally)
        return res.GetResult(
            tuple(code for code, _, _ in answer),
            tuple(size if code == OK else 0 for code, size, _ in answer),
            tuple(self._view.node_name(index) if code == OK else "" for code, _, index in answer),
            staged_bytes=tally.bytes,
        )

    def _get_located(
        self,
        block_keys: list[bytes],
        targets: Sequence[BlockParts],
        limit_s: float,
        cancel: CancelToken | None,
        ranges: list[int] | None,
        tally: StagedTally | None = None,
    ) -> list[GetAnswer]:
        core = self._core()

        def ask(positions: Sequence[int], left_s: float) -> list[GetAnswer]:
            keys, parts = [block_keys[i] for i in positions], [targets[i] for i in positions]
            part = None if ranges is None else [ranges[i] for i in positions]
            return call_native(core.get, keys, parts, left_s, cancel, part, None, tally)

        return self._located(block_keys, limit_s, ask, lambda item: item[0] == NotFound.code)

    def _get_in_place(
        self, block_keys: list[bytes], targets: Slices, limit_s: float, cancel: CancelToken | None
    ) -> list[GetAnswer]:
        core = self._core()

        def ask(positions: Sequence[int], left_s: float) -> list[GetAnswer]:
            keys, slices = [block_keys[i] for i in positions], [targets[i] for i in positions]
            return call_native(core.get_device, keys, slices, left_s, cancel)

        return self._located(block_keys, limit_s, ask, lambda item: item[0] == NotFound.code)

    def get_many(
        self, keys: Iterable[Key], timeout_s: float | None, cancel: CancelToken | None = None
    ) -> res.GetValues:
        answer = self._get_sized(lambda core: core.get_bytes, keys, timeout_s, cancel)
        return res.GetValues(
            res.codes_of(answer), tuple(item if isinstance(item, bytes) else None for item in answer)
        )

    def get_many_views(
        self, keys: Iterable[Key], timeout_s: float | None, cancel: CancelToken | None = None
    ) -> res.GetViews:
        answer = self._get_sized(lambda core: core.get_lent, keys, timeout_s, cancel)
        return res.GetViews(
            res.codes_of(answer),
            tuple(None if isinstance(item, int) else memoryview(item) for item in answer),
        )

    def _get_sized(
        self,
        way: Callable[[NativeClient], Callable[[list[bytes], float, CancelToken | None], list[T]]],
        keys: Iterable[Key],
        timeout_s: float | None,
        cancel: CancelToken | None,
    ) -> list[T]:
        """A native get into memory made once the size is known: for each key what holds the bytes, or the code."""
        block_keys = batch_keys(keys)
        if not block_keys:
            return []
        limit_s = self._timeout(timeout_s)
        call = way(self._core())

        def ask(positions: Sequence[int], left_s: float) -> list[T]:
            return call_native(call, [block_keys[i] for i in positions], left_s, cancel)

        return self._located(block_keys, limit_s, ask, lambda item: item == NotFound.code)

    def register_buffer(self, buffer: buf.Buffer) -> RegisteredBuffer:
        core = self._core()
        if isinstance(buffer, (str, list, tuple)):
            raise InvalidArgument(f"One buffer is registered at a time; got {type(buffer).__name__}.")
        if (memory := device_view(buffer, writable=True)) is not None:
            return RegisteredBuffer(self._direct.register(core, memory))
        return RegisteredBuffer(call_native(core.register_buffer, buffer))

    def reserve(
        self, key: Key, size_bytes: int, timeout_s: float | None, cancel: CancelToken | None = None
    ) -> Reservation:
        block_key = to_block_key(key)
        check_count("size_bytes", size_bytes, 1, 1 << 62)
        return call_native(self._core().reserve, block_key, size_bytes, self._timeout(timeout_s), cancel)

    def reserve_many(
        self,
        keys: Iterable[Key],
        block_bytes: int,
        prefer_node: str | None,
        timeout_s: float | None,
        cancel: CancelToken | None = None,
    ) -> ReservationBatch:
        block_keys = batch_keys(keys)
        check_count("block_bytes", block_bytes, 1, 1 << 62)
        prefer = None if prefer_node is None else self._view.node_index(prefer_node)
        call, limit_s = self._core().reserve_many, self._timeout(timeout_s)
        return call_native(call, block_keys, block_bytes, limit_s, cancel, prefer_node=prefer)

    # --- questions -------------------------------------------------------------------------------------------

    def exists_many(
        self, keys: Iterable[Key], timeout_s: float | None, cancel: CancelToken | None = None
    ) -> tuple[bool, ...]:
        block_keys = batch_keys(keys)
        if not block_keys:
            return ()
        core = self._core()

        def ask(positions: Sequence[int], left_s: float) -> list[bool]:
            packed = pack_keys([block_keys[i] for i in positions])
            return list(call_native(core.exists, packed, left_s, cancel))

        return tuple(self._located(block_keys, self._timeout(timeout_s), ask, lambda there: not there))

    def match(
        self,
        keys: Iterable[Key] | bytes,
        touch: bool,
        timeout_s: float | None,
        cancel: CancelToken | None = None,
    ) -> res.MatchResult:
        packed = batch_chain(keys)
        count = len(packed) // KEY_BYTES
        if not count:
            return res.MatchResult(0, ())
        limit_s = self._timeout(timeout_s)
        end_s = time.monotonic() + limit_s
        answer = call_native(self._core().match, packed, limit_s, touch, cancel)
        if answer[0] < count:
            unlocated = self._native.unlocated(
                packed
            )  # none in small clusters: nothing to pick from the chain
            missed = [packed[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in unlocated if not answer[1][i]]
            if left_s := self._left_to_ask_again(missed, end_s):
                answer = call_native(self._core().match, packed, left_s, touch, cancel)
        return res.matched(answer, self._view.node_name)

    def stat_many(
        self, keys: Iterable[Key], timeout_s: float | None, cancel: CancelToken | None = None
    ) -> tuple[tuple[int, res.BlockStat | None], ...]:
        """Code and stat of each key; the stat is None unless the code is 0."""
        block_keys = batch_keys(keys)
        if not block_keys:
            return ()
        core = self._core()

        def ask(positions: Sequence[int], left_s: float) -> list[dict[str, object] | None]:
            return call_native(core.stat, pack_keys([block_keys[i] for i in positions]), left_s, cancel)

        answer = self._located(block_keys, self._timeout(timeout_s), ask, lambda item: item is None)
        return tuple(res.block_stat(item, self._view.node_name) for item in answer)

    # --- changes ---------------------------------------------------------------------------------------------

    def _change(
        self,
        way: Callable[[NativeClient, bytes, float], list[int]],
        keys: Iterable[Key],
        timeout_s: float | None,
    ) -> res.BatchResult:
        block_keys = batch_keys(keys)
        if not block_keys:
            return res.BatchResult(())
        core = self._core()

        def ask(positions: Sequence[int], left_s: float) -> list[int]:
            return call_native(way, core, pack_keys([block_keys[i] for i in positions]), left_s)

        codes = self._located(block_keys, self._timeout(timeout_s), ask, lambda code: code == NotFound.code)
        return res.BatchResult(tuple(codes))

    def remove_many(
        self, keys: Iterable[Key], timeout_s: float | None, node: str | None = None
    ) -> res.BatchResult:
        if node is not None:
            index, packed = known_index(self._view, node), pack_keys(batch_keys(keys))
            if not packed:
                return res.BatchResult(())
            answer = call_native(self._core().remove, packed, self._timeout(timeout_s), None, index)
            return res.BatchResult(tuple(answer))
        return self._change(lambda core, packed, left_s: core.remove(packed, left_s), keys, timeout_s)

    def pin_many(self, keys: Iterable[Key], ttl_s: float, timeout_s: float | None) -> res.BatchResult:
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not 0 < ttl_s <= MAX_TTL_S:
            raise InvalidArgument(f"ttl_s must be above 0 and at most {MAX_TTL_S:g} seconds; got {ttl_s!r}.")
        return self._change(
            lambda core, packed, left_s: core.pin(packed, float(ttl_s), left_s), keys, timeout_s
        )

    def unpin_many(self, keys: Iterable[Key], timeout_s: float | None) -> res.BatchResult:
        return self._change(lambda core, packed, left_s: core.unpin(packed, left_s), keys, timeout_s)

    # --- blocks to come --------------------------------------------------------------------------------------

    def watch(self, kind: type[W]) -> W:
        return kind(call_native(self._core().watch), lambda node: known_index(self._view, node))

    def give_up(self, keys: Iterable[Key] | bytes, node: str | None, timeout_s: float | None) -> int:
        index = known_index(self._view, node)
        return call_native(self._core().give_up, batch_chain(keys), self._timeout(timeout_s), index)

    def prefetch(
        self, keys: Iterable[Key] | bytes, max_bytes: int, begin_s: float, timeout_s: float | None
    ) -> res.Prefetched:
        limit_s, packed = self._timeout(timeout_s), batch_chain(keys)
        check_count("max_bytes", max_bytes, 1, MAX_PREFETCH_BYTES)
        check_timeout(begin_s)
        return res.Prefetched(*call_native(self._core().prefetch, packed, max_bytes, begin_s, limit_s))

    # --- nodes -----------------------------------------------------------------------------------------------

    def list_page(
        self, node: int, cursor: int, limit: int, timeout_s: float | None
    ) -> tuple[int, list[res.BlockEntry]]:
        """One page of a node's blocks of this tenant; next cursor 0 is the end. A node that has left has none."""
        limit_s = self._timeout(timeout_s)
        try:
            next_cursor, items = call_native(self._core().list_blocks, node, cursor, limit, limit_s)
        except UnknownNode:  # since the caller looked at the map
            return 0, []
        return next_cursor, res.entries_of(items, self._view.node_name(node))

    def node_stat(self, node: int, timeout_s: float | None) -> dict[str, int]:
        return dict(call_native(self._core().node_stat, node, self._timeout(timeout_s)))

    def ping(self, node: int, timeout_s: float | None) -> float:
        """Round trip in seconds."""
        return float(call_native(self._core().ping, node, self._timeout(timeout_s)))

    def stats(self) -> dict[str, int]:
        return dict(self._core().stats())

    # --- transports ------------------------------------------------------------------------------------------

    def transports(self) -> tuple[res.TransportView, ...]:
        core = self._core()
        if self._rdma_open:
            self._log_rdma()
        return tuple(
            res.TransportView(name, res.TransportState(state), reason)
            for name, state, reason in core.transports()
        )

    def _log_rdma(self) -> None:
        """Log once why RDMA, which a node offers, is not used; look again later while nothing has asked for it."""
        self._rdma_look_s = time.monotonic() + RDMA_LOOK_S
        _, state, reason = next(found for found in self._native.transports() if found[0] == "rdma")
        if state == res.TransportState.IDLE:
            return
        with self._lock:
            logged, self._rdma_logged, self._rdma_open = self._rdma_logged, True, False
        if not logged and state == res.TransportState.UNAVAILABLE:
            _log.warning(Event.CLIENT_RDMA_UNAVAILABLE, reason=reason)

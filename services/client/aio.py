"""The asyncio client: the same engine, run on a bounded pool of threads; the map is kept fresh by a task.

Cancelling a task that waits for a call cancels the call itself: the native token is set, and the task ends only after
the native call has returned. From then on no byte moves into or out of the buffers it was given.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import ParamSpec, Self, TypeVar, Unpack

from mooncache import _native
from mooncache.auth import parse_session_token
from mooncache.client import results as res
from mooncache.client.background_loop import wait_for
from mooncache.client.buffers import Buffer
from mooncache.client.control import Control, with_master
from mooncache.client.engine import ClientCore
from mooncache.client.keys import Key, batch_keys, pack_keys
from mooncache.client.limits import PREFETCH_BYTES
from mooncache.client.options import ClientOptions, ConnectSettings, key_follower, new_native
from mooncache.client.registered import RegisteredBuffer
from mooncache.client.reservation import AsyncReservation, AsyncReservationBatch
from mooncache.client.shared_map import SharedMap
from mooncache.client.sync import _missed, _raise_single
from mooncache.client.watch import AsyncBlockWatch
from mooncache.config import Config
from mooncache.errors import BufferTooSmall, Closed

P = ParamSpec("P")
T = TypeVar("T")
_LIST_PAGE = 1024
_MAX_THREADS = 256


class AsyncClient:
    """The asyncio twin of `Client`. Make it with `await AsyncClient.connect(...)`; arguments as for `Client`.

    `threads` bounds the number of calls that move bytes at the same time; further calls wait their turn.
    """

    def __init__(self, options: ClientOptions, threads: int) -> None:
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="mooncache-io")
        self._control: Control | None = None
        native = new_native(options)
        self._engine = ClientCore(
            native,
            default_timeout_s=options.timeout_s,
            default_replicas=options.replicas,
            locate=self._locate if options.targets else None,
            key=key_follower(options, native),
        )
        self._maps = SharedMap(self._engine)
        self._owns_pool = True

    def for_tenant(self, session_token: str) -> Self:
        """A client that acts for a tenant, as `Client.for_tenant`; it uses this one's threads."""
        session, control = parse_session_token(session_token), self._control

        def locate(keys: bytes, timeout_s: float) -> bytes:
            assert control is not None
            return wait_for(control.locate(keys, timeout_s, session.tenant), self._loop, timeout_s)

        other = copy.copy(self)
        other._options = dataclasses.replace(self._options, tenant=session.tenant, key=session.key)
        other._control, other._owns_pool = None, False
        other._engine = self._maps.tenant_core(
            self._options, session, locate if control is not None else None
        )
        return other

    @classmethod
    async def connect(
        cls,
        master: str | Sequence[str] | None = None,
        *,
        threads: int = 8,
        config: Config | None = None,
        **settings: Unpack[ConnectSettings],
    ) -> Self:
        """Connect; every setting and every error is described at `Client`. `config` None: it is loaded as usual."""
        threads = min(max(1, threads), _MAX_THREADS)
        client = cls(ClientOptions.gather(master, config=config, **settings), threads)
        try:
            await client._start()
        except BaseException:
            await client.close()
            raise
        return client

    async def _start(self) -> None:
        if not self._options.targets:
            self._maps.apply(self._options.static_view())
            return
        self._control = Control(self._options, self._maps.apply)
        await self._control.start()

    def _locate(self, keys: bytes, timeout_s: float) -> bytes:
        assert self._control is not None
        return wait_for(self._control.locate(keys, timeout_s), self._loop, timeout_s)

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call on the pool; when this task is cancelled, wait until the call has come back."""
        return await self._finish(self._submit(call, *args, **kwargs), None)

    async def _run_cancellable(self, call: Callable[[_native.CancelToken], T]) -> T:
        """As `_run`; the call gets a token, and is cancelled with this task."""
        token = _native.CancelToken()
        return await self._finish(self._submit(call, token), token)

    def _submit(
        self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        try:
            return self._pool.submit(call, *args, **kwargs)
        except RuntimeError:  # the pool is shut down
            raise Closed("The client is closed. Make a new one with mooncache.connect_async().") from None

    @staticmethod
    async def _finish(running: concurrent.futures.Future[T], token: _native.CancelToken | None) -> T:
        future = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The thread's own future knows whether the call has begun; asyncio's would say "cancelled" either way.
            if running.cancel():
                raise
            if token is not None:
                token.cancel()
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue  # quiescence first: the buffers are in use until the call is back
            if not future.cancelled():
                future.exception()  # taken, so that it is not reported as lost
            raise

    # --- put -------------------------------------------------------------------------------------------------

    async def put(
        self, key: Key, value: Buffer, *, replicas: int | None = None, timeout_s: float | None = None
    ) -> bool:
        """Store one block, as `Client.put`: True when stored, False when the pool held it already."""
        result = await self.put_many([key], [value], replicas=replicas, timeout_s=timeout_s)
        _raise_single(result.codes[0], "put")
        return result.created[0]

    async def put_many(
        self,
        keys: Iterable[Key],
        values: Sequence[Buffer],
        *,
        replicas: int | None = None,
        timeout_s: float | None = None,
        prefer_node: str | None = None,
    ) -> res.PutResult:
        """Store a batch, as `Client.put_many`: one code for each key."""
        return await self._run_cancellable(
            lambda token: self._engine.put_many(
                keys, values, replicas, timeout_s, token, prefer_node=prefer_node
            )
        )

    async def put_iov(
        self,
        key: Key,
        slices: Sequence[Buffer],
        *,
        replicas: int | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Store one block gathered from `slices`, as `Client.put_iov`."""
        return await self.put(key, list(slices), replicas=replicas, timeout_s=timeout_s)

    # --- get -------------------------------------------------------------------------------------------------

    async def get(self, key: Key, *, timeout_s: float | None = None) -> bytes | None:
        """The block's bytes, or None on a miss, as `Client.get`."""
        result = await self.get_many([key], timeout_s=timeout_s)
        return None if _missed(result.codes[0], "get") else result.values[0]

    async def get_many(self, keys: Iterable[Key], *, timeout_s: float | None = None) -> res.GetValues:
        """The bytes of a batch, as `Client.get_many`."""
        return await self._run_cancellable(lambda token: self._engine.get_many(keys, timeout_s, token))

    async def get_view(self, key: Key, *, timeout_s: float | None = None) -> memoryview | None:
        """A read-only view of memory that the client lends, or None on a miss, as `Client.get_view`."""
        result = await self.get_many_views([key], timeout_s=timeout_s)
        return None if _missed(result.codes[0], "get_view") else result.values[0]

    async def get_many_views(self, keys: Iterable[Key], *, timeout_s: float | None = None) -> res.GetViews:
        """The views of a batch, as `Client.get_many_views`."""
        return await self._run_cancellable(lambda token: self._engine.get_many_views(keys, timeout_s, token))

    async def get_into(
        self, key: Key, destination: Buffer, *, offset: int | None = None, timeout_s: float | None = None
    ) -> int | None:
        """Read one block into `destination`, as `Client.get_into`: bytes written, or None on a miss."""
        offsets = None if offset is None else [offset]
        result = await self.get_many_into([key], [destination], offsets=offsets, timeout_s=timeout_s)
        if result.codes[0] == BufferTooSmall.code:
            stat = await self.stat(key, timeout_s=timeout_s)
            size = f"{stat.size_bytes} bytes" if stat else "larger"
            raise BufferTooSmall(f"The block is {size} and does not fit into the destination.")
        return None if _missed(result.codes[0], "get_into") else result.sizes_bytes[0]

    async def get_many_into(
        self,
        keys: Iterable[Key],
        destinations: Sequence[Buffer],
        *,
        offsets: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> res.GetResult:
        """Read a batch into `destinations`, as `Client.get_many_into`."""
        return await self._run_cancellable(
            lambda token: self._engine.get_many_into(keys, destinations, timeout_s, token, offsets)
        )

    async def get_iov(
        self, key: Key, slices: Sequence[Buffer], *, timeout_s: float | None = None
    ) -> int | None:
        """Read one block scattered over `slices`, as `Client.get_iov`."""
        return await self.get_into(key, list(slices), timeout_s=timeout_s)

    def register_buffer(self, buffer: Buffer) -> RegisteredBuffer:
        """Let RDMA devices use this memory in place, as `Client.register_buffer`. It waits for nothing."""
        return self._engine.register_buffer(buffer)

    async def reserve(self, key: Key, size_bytes: int, *, timeout_s: float | None = None) -> AsyncReservation:
        """Reserve space for one block, as `Client.reserve`: `async with await client.reserve(...) as block`."""
        native = await self._run_cancellable(
            lambda token: self._engine.reserve(key, size_bytes, timeout_s, token)
        )
        return AsyncReservation(native, self._options.timeout_s, size_bytes, self._run)

    async def reserve_many(
        self,
        keys: Iterable[Key],
        block_bytes: int,
        *,
        prefer_node: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncReservationBatch:
        """Reserve space for blocks of one size, as `Client.reserve_many`."""
        native = await self._run_cancellable(
            lambda token: self._engine.reserve_many(keys, block_bytes, prefer_node, timeout_s, token)
        )
        return AsyncReservationBatch(native, self._options.timeout_s, lambda: self._engine.view, self._run)

    # --- questions -------------------------------------------------------------------------------------------

    async def exists(self, key: Key, *, timeout_s: float | None = None) -> bool:
        """True when some node holds the block."""
        return (await self.exists_many([key], timeout_s=timeout_s))[0]

    async def exists_many(self, keys: Iterable[Key], *, timeout_s: float | None = None) -> tuple[bool, ...]:
        """For each key whether some node holds the block."""
        return await self._run_cancellable(lambda token: self._engine.exists_many(keys, timeout_s, token))

    async def match(
        self, keys: Iterable[Key] | bytes, *, touch: bool = True, timeout_s: float | None = None
    ) -> res.MatchResult:
        """The longest leading run of a key chain that the pool holds, as `Client.match`."""
        return await self._run_cancellable(lambda token: self._engine.match(keys, touch, timeout_s, token))

    async def stat(self, key: Key, *, timeout_s: float | None = None) -> res.BlockStat | None:
        """Size, checksum, tier, pins, hits and age of one block, or None on a miss."""
        code, found = (
            await self._run_cancellable(lambda token: self._engine.stat_many([key], timeout_s, token))
        )[0]
        return None if _missed(code, "stat") else found

    async def stat_many(
        self, keys: Iterable[Key], *, timeout_s: float | None = None
    ) -> tuple[res.BlockStat | None, ...]:
        """`stat` for a batch, as `Client.stat_many`."""
        answer = await self._run_cancellable(lambda token: self._engine.stat_many(keys, timeout_s, token))
        return tuple(found for _, found in answer)

    async def list(
        self, *, limit: int = 10_000, timeout_s: float | None = None
    ) -> AsyncIterator[res.BlockEntry]:
        """Blocks of this tenant, node by node, as `Client.list`; use `async for`."""
        for node in self.nodes():
            cursor = 0
            while limit > 0 and node.state != res.MapNodeState.DEAD:
                cursor, entries = await self._run(
                    self._engine.list_page, node.index, cursor, min(limit, _LIST_PAGE), timeout_s
                )
                for entry in entries[:limit]:
                    yield entry
                limit -= len(entries)
                if cursor == 0:
                    break

    # --- changes ---------------------------------------------------------------------------------------------

    async def remove(self, key: Key, *, timeout_s: float | None = None) -> bool:
        """Remove the block from every node. False when there was none."""
        return not _missed((await self.remove_many([key], timeout_s=timeout_s)).codes[0], "remove")

    async def remove_many(
        self, keys: Iterable[Key], *, node: str | None = None, timeout_s: float | None = None
    ) -> res.BatchResult:
        """Remove a batch; one code for each key."""
        return await self._run(self._engine.remove_many, keys, timeout_s, node)

    async def pin(self, key: Key, *, ttl_s: float = 60.0, timeout_s: float | None = None) -> bool:
        """Keep the block from eviction for `ttl_s` seconds. False when there is none."""
        return not _missed((await self.pin_many([key], ttl_s=ttl_s, timeout_s=timeout_s)).codes[0], "pin")

    async def pin_many(
        self, keys: Iterable[Key], *, ttl_s: float = 60.0, timeout_s: float | None = None
    ) -> res.BatchResult:
        """Pin a batch; one code for each key."""
        return await self._run(self._engine.pin_many, keys, ttl_s, timeout_s)

    async def unpin(self, key: Key, *, timeout_s: float | None = None) -> bool:
        """Take the block's pin back, whoever set it. False when there is no such block."""
        return not _missed((await self.unpin_many([key], timeout_s=timeout_s)).codes[0], "unpin")

    async def unpin_many(self, keys: Iterable[Key], *, timeout_s: float | None = None) -> res.BatchResult:
        """Unpin a batch; one code for each key."""
        return await self._run(self._engine.unpin_many, keys, timeout_s)

    async def report_wrong(
        self,
        keys: Iterable[Key],
        found: res.Deviation,
        *,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> res.WrongBlocks:
        """Say that blocks are others than this process computed, as `Client.report_wrong`."""
        control = with_master(self._control)
        return await control.report_wrong(pack_keys(batch_keys(keys)), found, tenant, timeout_s)

    # --- blocks to come --------------------------------------------------------------------------------------

    def watch(self) -> AsyncBlockWatch:
        """An `AsyncBlockWatch`, which waits for blocks that others are about to write, as `Client.watch`."""
        return self._engine.watch(AsyncBlockWatch)

    async def give_up(
        self, keys: Iterable[Key] | bytes, *, node: str | None = None, timeout_s: float | None = None
    ) -> int:
        """Say that these blocks will not be written, as `Client.give_up`: the number of waits that ended."""
        return await self._run(self._engine.give_up, keys, node, timeout_s)

    async def prefetch(
        self,
        keys: Iterable[Key] | bytes,
        *,
        max_bytes: int = PREFETCH_BYTES,
        begin_s: float = 1.0,
        timeout_s: float | None = None,
    ) -> res.Prefetched:
        """Let blocks come up from disks into memory, as `Client.prefetch`."""
        return await self._run(self._engine.prefetch, keys, max_bytes, begin_s, timeout_s)

    # --- the cluster -----------------------------------------------------------------------------------------

    @property
    def tenant(self) -> str:
        """The tenant this client acts for."""
        return self._options.tenant

    def nodes(self) -> tuple[res.NodeView, ...]:
        """Store nodes of the current cluster map."""
        return self._engine.view.nodes

    def cluster(self) -> res.ClusterView:
        """The cluster map in use."""
        return self._engine.view

    async def node_stat(self, node: int, *, timeout_s: float | None = None) -> dict[str, int]:
        """A node's counters by name. `node` is an index of `nodes()`."""
        return await self._run(self._engine.node_stat, node, timeout_s)

    async def ping(self, node: int, *, timeout_s: float | None = None) -> float:
        """Round trip to a node over the data plane, in seconds, as `Client.ping`."""
        return await self._run(self._engine.ping, node, timeout_s)

    def stats(self) -> dict[str, int]:
        """Counters of this client's native core by name."""
        return self._engine.stats()

    def transports(self) -> tuple[res.TransportView, ...]:
        """The transports of this client, best first, as `Client.transports`."""
        return self._engine.transports()

    async def close(self) -> None:
        """Close every connection and stop the threads. Calling it twice, or in a forked child, is harmless."""
        if self._engine.in_child:
            return
        if self._control is not None:
            control, self._control = self._control, None
            await control.close()
        self._engine.close()
        if self._owns_pool:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        where = ",".join(self._options.targets) or "static nodes"
        return f"<mooncache.AsyncClient {where} tenant={self.tenant} nodes={len(self.nodes())}>"

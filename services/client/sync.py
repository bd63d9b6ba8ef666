"""The synchronous client.

Idea: the calling thread moves the bytes in native code with the GIL released; a daemon thread keeps the cluster map
fresh. Every call has a deadline. A miss is not an error: single gets answer None, batches carry a code for each key.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack

from mooncache.auth import parse_session_token
from mooncache.client import results as res
from mooncache.client.background_loop import background_loop, wait_for
from mooncache.client.buffers import Buffer
from mooncache.client.control import Control, with_master
from mooncache.client.engine import ClientCore
from mooncache.client.keys import Key, batch_keys, pack_keys
from mooncache.client.limits import PREFETCH_BYTES
from mooncache.client.options import ClientOptions, ConnectSettings, key_follower, new_native
from mooncache.client.registered import RegisteredBuffer
from mooncache.client.reservation import Reservation, ReservationBatch
from mooncache.client.shared_map import SharedMap
from mooncache.client.watch import BlockWatch
from mooncache.errors import BufferTooSmall, ChecksumMismatch, NotFound, error_for

_LIST_PAGE = 1024


class Client:
    """A connection to a pool. Thread-safe: several threads may call at once. Use it as a context manager.

    Whatever is None comes from the configuration (TOML, MOONCACHE_… variables) or from the state folder.

    Args:
        master: where the master is, "host:port" or several ("a:1,b:1" or a list). None takes the configured
            targets, else the cluster that `mooncache up` started on this machine.
        token: the cluster token (`mcc1.…`) or a tenant token (`mct1.…`). None reads `token_file`.
        token_file: file with the token, mode 0600; None takes the state folder's.
        tenant: act as this tenant; needs the cluster token. None takes the token's tenant.
        nodes: work with these store nodes ("host:port" or "unix:/path") and without any master.
        timeout_s: default time limit of each call, in seconds.
        connect_timeout_s: time limit for the first contact, in seconds (5 when None).
        client_name: shown in the nodes' logs, and in `mooncache writers` as the writer of what this client puts.
        build: the engine behind the client, with its version, shown there too; default "mooncache VERSION".
        shm: use shared memory with nodes on this host.
        lanes_per_node: connections to each node for calls that move many bytes; small calls have one more.
        tls_ca, tls_cert, tls_key: PEM files; a CA turns TLS on, certificate and key make it mutual.
        state_dir: folder with `cluster.token` and `cluster.json`; None means $MOONCACHE_STATE_DIR or ~/.mooncache.

    Raises:
        InvalidArgument: an argument that cannot be used; the text says which and why.
        MasterUnavailable: no master answered within `connect_timeout_s`.
        Unauthenticated: the master refused the token.
        ConfigInvalid: no token or no cluster was found.
    """

    def __init__(
        self, master: str | Sequence[str] | None = None, **settings: Unpack[ConnectSettings]
    ) -> None:
        options = ClientOptions.gather(master, **settings)
        self._options = options
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
        if not options.targets:
            self._maps.apply(options.static_view())
            return
        self._loop = background_loop()
        self._control = Control(options, self._maps.apply)
        try:
            wait_for(self._control.start(), self._loop, options.connect_timeout_s)
        except BaseException:
            self.close()
            raise

    def _locate(self, keys: bytes, timeout_s: float) -> bytes:
        assert self._control is not None
        return wait_for(self._control.locate(keys, timeout_s), self._loop, timeout_s)

    def for_tenant(self, session_token: str) -> Self:
        """A client whose sessions at nodes act for the tenant of a session token (`mcs1.…`), until that ends.

        It shares this client's cluster map, and is closed on its own. It sees that tenant's blocks only.

        Raises:
            Unauthenticated: the text is no session token. Nodes refuse one that has expired or that is not theirs.
        """
        session, control = parse_session_token(session_token), self._control
        loop = self._loop if control is not None else None

        def locate(keys: bytes, timeout_s: float) -> bytes:
            assert control is not None
            assert loop is not None
            return wait_for(control.locate(keys, timeout_s, session.tenant), loop, timeout_s)

        other = copy.copy(self)
        other._options = dataclasses.replace(self._options, tenant=session.tenant, key=session.key)
        other._control = None
        other._engine = self._maps.tenant_core(
            self._options, session, locate if control is not None else None
        )
        return other

    # --- put -------------------------------------------------------------------------------------------------

    def put(
        self, key: Key, value: Buffer, *, replicas: int | None = None, timeout_s: float | None = None
    ) -> bool:
        """Store one block and return once it is committed.

        Args:
            key: a `str` of your naming, or 32 `bytes` (a block key).
            value: bytes-like, NumPy array, host tensor, or a list of those (stored one after the other). Not copied.
            replicas: number of distinct nodes to store it on, by default the setting client.replicas. Fewer copies
                than that are no error; `put_many` says FEWER_REPLICAS of such a block.
            timeout_s: time limit in seconds; None means the client's.

        Returns:
            True when it was stored, False when the pool held the key already (equal keys mean equal bytes).

        Raises:
            NoSpace, BackPressure, QuotaExceeded, TooLarge: the pool cannot take it.
            NoNodes, NodeUnavailable, DeadlineExceeded: no node took it in time.
        """
        result = self._engine.put_many([key], [value], replicas, timeout_s)
        _raise_single(result.codes[0], "put")
        return result.created[0]

    def put_many(
        self,
        keys: Iterable[Key],
        values: Sequence[Buffer],
        *,
        replicas: int | None = None,
        timeout_s: float | None = None,
        prefer_node: str | None = None,
    ) -> res.PutResult:
        """Store a batch in one go: `values[i]` (see `put`) under `keys[i]`. One code for each key, nothing raised
        for single keys; call `.raise_for_errors()` on the result to raise.

        Args:
            prefer_node: the first copy goes to this node (`node_id`); a block that it cannot take (full, draining,
                unreachable, not in the map) goes where it would go otherwise.

        Raises:
            InvalidArgument, KeyInvalid: the arguments cannot be used; nothing was stored.
        """
        return self._engine.put_many(keys, values, replicas, timeout_s, prefer_node=prefer_node)

    def put_iov(
        self,
        key: Key,
        slices: Sequence[Buffer],
        *,
        replicas: int | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Store one block that is the concatenation of `slices` (for example one slice per layer), uncopied."""
        return self.put(key, list(slices), replicas=replicas, timeout_s=timeout_s)

    # --- get -------------------------------------------------------------------------------------------------

    def get(self, key: Key, *, timeout_s: float | None = None) -> bytes | None:
        """The block's bytes, checked against the checksum made by its producer; None on a miss.

        Raises:
            NodeUnavailable, ConnectionLost, DeadlineExceeded: no holder could deliver it in time.
        """
        result = self._engine.get_many([key], timeout_s)
        return None if _missed(result.codes[0], "get") else result.values[0]

    def get_many(self, keys: Iterable[Key], *, timeout_s: float | None = None) -> res.GetValues:
        """The bytes of a batch: `.values[i]` is None for a miss or a failure, `.codes[i]` says which."""
        return self._engine.get_many(keys, timeout_s)

    def get_view(self, key: Key, *, timeout_s: float | None = None) -> memoryview | None:
        """As `get`, without the copy into an object of its own: a read-only view of memory that the client lends.

        The memory goes back when the view and all that was made of it are gone; it may outlive the client, but not
        a fork. With nothing left to lend (`client.receive_pool_bytes`) it is a view of a bytes object.
        """
        result = self._engine.get_many_views([key], timeout_s)
        return None if _missed(result.codes[0], "get_view") else result.values[0]

    def get_many_views(self, keys: Iterable[Key], *, timeout_s: float | None = None) -> res.GetViews:
        """`get_view` for a batch: `.values[i]` is None for a miss or a failure, `.codes[i]` says which."""
        return self._engine.get_many_views(keys, timeout_s)

    def get_into(
        self, key: Key, destination: Buffer, *, offset: int | None = None, timeout_s: float | None = None
    ) -> int | None:
        """Read one block into `destination` (writable buffer or host tensor) without a copy in between.

        Args:
            offset: None reads the whole block, which must fit. A number reads from that byte of the block as much
                as the destination holds.

        Returns:
            Bytes written, or None on a miss. After an error or a miss the destination's contents are undefined.

        Raises:
            BufferTooSmall: the whole block does not fit; the text says how large it is.
        """
        offsets = None if offset is None else [offset]
        result = self._engine.get_many_into([key], [destination], timeout_s, None, offsets)
        if result.codes[0] == BufferTooSmall.code:
            stat = self._engine.stat_many([key], timeout_s)[0][1]
            size = f"{stat.size_bytes} bytes" if stat else "larger"
            raise BufferTooSmall(f"The block is {size} and does not fit into the destination.")
        return None if _missed(result.codes[0], "get_into") else result.sizes_bytes[0]

    def get_many_into(
        self,
        keys: Iterable[Key],
        destinations: Sequence[Buffer],
        *,
        offsets: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> res.GetResult:
        """Read a batch: block i into `destinations[i]`, a writable buffer or a list of them. See `get_into`."""
        return self._engine.get_many_into(keys, destinations, timeout_s, None, offsets)

    def get_iov(self, key: Key, slices: Sequence[Buffer], *, timeout_s: float | None = None) -> int | None:
        """Read one block scattered over `slices`, filled from the first on. Returns bytes written, None on a miss."""
        return self.get_into(key, list(slices), timeout_s=timeout_s)

    def register_buffer(self, buffer: Buffer) -> RegisteredBuffer:
        """Let RDMA devices read and write this memory in place, in puts out of it and gets into it or parts of it.

        Worth it for memory that is used many times, such as an arena of KV blocks: what is not registered goes
        through memory of the client. Nothing is registered before the first use, and the registrations used longest
        ago make room (16 GiB and 256 buffers are kept); without RDMA it has no effect.

        Args:
            buffer: one writable object with the buffer protocol (NumPy array, bytearray, mmap; of a host tensor
                `tensor.numpy()`). It cannot be freed, resized or closed until the result is closed. Or an array in
                GPU memory (`__cuda_array_interface__`, DLPack), which is kept alive as long.

        Raises:
            InvalidArgument: read-only, empty, no buffer, or it overlaps one that is registered.
            TransportUnavailable: an array in GPU memory, and no CUDA here.
        """
        return self._engine.register_buffer(buffer)

    # --- reserve, write, commit ------------------------------------------------------------------------------

    def reserve(self, key: Key, size_bytes: int, *, timeout_s: float | None = None) -> Reservation:
        """Space for one block that will be written range by range and become visible at its commit.

        Use it as a context manager: leaving it commits, an exception aborts. See `Reservation`.

        Raises:
            AlreadyExists: the pool holds the key.
            NoSpace, TooLarge, NoNodes, DeadlineExceeded: there is no place for it.
        """
        return Reservation(
            self._engine.reserve(key, size_bytes, timeout_s), self._options.timeout_s, size_bytes
        )

    def reserve_many(
        self,
        keys: Iterable[Key],
        block_bytes: int,
        *,
        prefer_node: str | None = None,
        timeout_s: float | None = None,
    ) -> ReservationBatch:
        """Space for blocks of one size that will be written range by range, many in one call; see `ReservationBatch`.

        Each goes to the node that a put would choose; `prefer_node` is the node_id of one that comes first where it
        takes new blocks. What was refused has its code in `.codes`, and nothing is raised for single blocks.

        Raises:
            InvalidArgument, TooLarge, NoNodes: nothing was reserved.
        """
        native = self._engine.reserve_many(keys, block_bytes, prefer_node, timeout_s)
        return ReservationBatch(native, self._options.timeout_s, lambda: self._engine.view)

    # --- questions -------------------------------------------------------------------------------------------

    def exists(self, key: Key, *, timeout_s: float | None = None) -> bool:
        """True when some node holds the block."""
        return self._engine.exists_many([key], timeout_s)[0]

    def exists_many(self, keys: Iterable[Key], *, timeout_s: float | None = None) -> tuple[bool, ...]:
        """For each key whether some node holds the block."""
        return self._engine.exists_many(keys, timeout_s)

    def match(
        self, keys: Iterable[Key] | bytes, *, touch: bool = True, timeout_s: float | None = None
    ) -> res.MatchResult:
        """The longest leading run of a key chain that the pool holds. `touch` marks the blocks as used.

        A long chain may come as one bytes object, 32 bytes a key.
        """
        return self._engine.match(keys, touch, timeout_s)

    def stat(self, key: Key, *, timeout_s: float | None = None) -> res.BlockStat | None:
        """Size, checksum, tier, pins, hits and age of one block; None on a miss.

        Raises:
            NodeUnavailable, DeadlineExceeded: whether it is there could not be found out.
        """
        code, found = self._engine.stat_many([key], timeout_s)[0]
        return None if _missed(code, "stat") else found

    def stat_many(
        self, keys: Iterable[Key], *, timeout_s: float | None = None
    ) -> tuple[res.BlockStat | None, ...]:
        """`stat` for a batch; None for a miss and where no answer came."""
        return tuple(found for _, found in self._engine.stat_many(keys, timeout_s))

    def list(self, *, limit: int = 10_000, timeout_s: float | None = None) -> Iterator[res.BlockEntry]:
        """Blocks of this tenant, node by node, at most `limit` entries (a replica is its own entry)."""
        for node in self.nodes():
            cursor = 0
            while limit > 0 and node.state != res.MapNodeState.DEAD:
                page = min(limit, _LIST_PAGE)
                cursor, entries = self._engine.list_page(node.index, cursor, page, timeout_s)
                yield from entries[:limit]
                limit -= len(entries)
                if cursor == 0:
                    break

    # --- changes ---------------------------------------------------------------------------------------------

    def remove(self, key: Key, *, timeout_s: float | None = None) -> bool:
        """Remove the block from every node. False when there was none.

        Raises:
            Pinned: the block is pinned.
        """
        return not _missed(self._engine.remove_many([key], timeout_s).codes[0], "remove")

    def remove_many(
        self, keys: Iterable[Key], *, node: str | None = None, timeout_s: float | None = None
    ) -> res.BatchResult:
        """`remove` for a batch, one code for each key.

        Args:
            node: remove the copy on this node (`node_id`) only. None removes all copies.

        Raises:
            UnknownNode: the cluster map does not list the node.
        """
        return self._engine.remove_many(keys, timeout_s, node)

    def pin(self, key: Key, *, ttl_s: float = 60.0, timeout_s: float | None = None) -> bool:
        """Keep the block from eviction for `ttl_s` seconds on every node that holds it. False when there is none."""
        return not _missed(self._engine.pin_many([key], ttl_s, timeout_s).codes[0], "pin")

    def pin_many(
        self, keys: Iterable[Key], *, ttl_s: float = 60.0, timeout_s: float | None = None
    ) -> res.BatchResult:
        """`pin` for a batch, one code for each key."""
        return self._engine.pin_many(keys, ttl_s, timeout_s)

    def unpin(self, key: Key, *, timeout_s: float | None = None) -> bool:
        """Take the block's pin back, whoever set it. False when there is no such block."""
        return not _missed(self._engine.unpin_many([key], timeout_s).codes[0], "unpin")

    def unpin_many(self, keys: Iterable[Key], *, timeout_s: float | None = None) -> res.BatchResult:
        """`unpin` for a batch, one code for each key."""
        return self._engine.unpin_many(keys, timeout_s)

    def report_wrong(
        self, keys: Iterable[Key], found: res.Deviation, *, tenant: str = "", timeout_s: float | None = None
    ) -> res.WrongBlocks:
        """Say that blocks are others than this process computed: they go, and their writer may be quarantined.

        `tenant`: whose they are, else the client's. Raises Unsupported (no master, or an older one), PermissionDenied.
        """
        said = with_master(self._control).report_wrong(pack_keys(batch_keys(keys)), found, tenant, timeout_s)
        return wait_for(said, self._loop, self._options.timeout_s if timeout_s is None else timeout_s)

    # --- blocks to come --------------------------------------------------------------------------------------

    def watch(self) -> BlockWatch:
        """A `BlockWatch`, which waits for blocks that others are about to write. Close it when it is not needed."""
        return self._engine.watch(BlockWatch)

    def give_up(
        self, keys: Iterable[Key] | bytes, *, node: str | None = None, timeout_s: float | None = None
    ) -> int:
        """Say that these blocks will not be written: who waits for one of them learns it at once, and for a second
        also who begins to wait. It is no harm if they are written after all.

        Args:
            node: tell this node (`node_id`) only. None tells all of them.

        Returns:
            The number of waits that ended.

        Raises:
            UnknownNode: the cluster map does not list the node.
            NodeUnavailable, DeadlineExceeded: no node that was asked answered.
        """
        return self._engine.give_up(keys, node, timeout_s)

    def prefetch(
        self,
        keys: Iterable[Key] | bytes,
        *,
        max_bytes: int = PREFETCH_BYTES,
        begin_s: float = 1.0,
        timeout_s: float | None = None,
    ) -> res.Prefetched:
        """Prefetch blocks from disks into memory: those that a `match` of this client reported to be on a disk
        alone, at the nodes where they would be read. Waits for no block. A get reads the others from the disk.

        Args:
            max_bytes: on each node.
            begin_s: what has not begun in so many seconds is given up.
        """
        return self._engine.prefetch(keys, max_bytes, begin_s, timeout_s)

    # --- the cluster -----------------------------------------------------------------------------------------

    @property
    def tenant(self) -> str:
        """The tenant this client acts for; keys of other tenants are invisible to it."""
        return self._options.tenant

    def nodes(self) -> tuple[res.NodeView, ...]:
        """Store nodes of the current cluster map."""
        return self._engine.view.nodes

    def cluster(self) -> res.ClusterView:
        """The cluster map in use."""
        return self._engine.view

    def node_stat(self, node: int, *, timeout_s: float | None = None) -> dict[str, int]:
        """A node's counters by name, asked over the data plane. `node` is an index of `nodes()`."""
        return self._engine.node_stat(node, timeout_s)

    def ping(self, node: int, *, timeout_s: float | None = None) -> float:
        """Round trip to a node over the data plane, in seconds.

        Raises:
            NodeUnavailable, DeadlineExceeded: the node did not answer.
        """
        return self._engine.ping(node, timeout_s)

    def stats(self) -> dict[str, int]:
        """Counters of this client's native core by name."""
        return self._engine.stats()

    def transports(self) -> tuple[res.TransportView, ...]:
        """The ways that blocks may take, best first, and why one is not used. It opens nothing: RDMA is idle until a
        node offers it for a transfer that is large enough."""
        return self._engine.transports()

    def close(self) -> None:
        """Close every connection. Calls in flight end with an error; calling it twice is harmless.

        In a forked child it does nothing: the connections are the parent's.
        """
        if self._engine.in_child:
            return
        if self._control is not None:
            control, self._control = self._control, None
            wait_for(control.close(), self._loop, 2.0)
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = ",".join(self._options.targets) or "static nodes"
        return f"<mooncache.Client {where} tenant={self.tenant} nodes={len(self.nodes())}>"


def _raise_single(code: int, what: str) -> None:
    if code not in res.STORED:
        raise error_for(code, f"{what} failed. {error_for(code).hint}")


def _missed(code: int, what: str) -> bool:
    """True for a miss; a checksum mismatch is one too (decision: never data, never an exception)."""
    if code in {NotFound.code, ChecksumMismatch.code}:
        return True
    _raise_single(code, what)
    return False

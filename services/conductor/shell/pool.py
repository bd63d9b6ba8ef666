"""Asking the pool which leading blocks of a prompt it holds, within a short time and without ever failing a
request; telling it which blocks will not come.

The conductor asks the store nodes themselves (data plane, MATCH) through the SDK; see docs/decisions/0009.
Without an answer blocks count as absent.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from mooncache.auth import TokenSource, parse_token, session_token, text_of
from mooncache.client.aio import AsyncClient
from mooncache.client.results import BlockTier, MapNodeState, MatchResult, NodeView, Prefetched
from mooncache.conductor.core.decisions import PoolAnswer, PoolState
from mooncache.conductor.core.handover_node import NO_NODE, NodesByHost, by_host
from mooncache.conductor.core.holder_rates import BlockHolder
from mooncache.conductor.core.placed import PlacedRun, holders_of, runs_of
from mooncache.config import Config
from mooncache.errors import Closed, DeadlineExceeded, MooncacheError
from mooncache.runtime import tracing
from mooncache.runtime.clock import Clock

# Blocks of which the pool says nothing in this time count as absent: a decision must not wait for it.
MATCH_TIMEOUT_S = 0.05
_CONNECT_TIMEOUT_S = 2.0
_THREADS = 8
_GRACE_S = 0.02
GIVE_UP_TIMEOUT_S = 0.5
PREFETCH_TIMEOUT_S = 0.5
TENANTS_KEPT = 256
_CLOSE_AFTER_S = 2.0


class StoreClient(Protocol):
    """The calls that the conductor makes; `AsyncClient` has them."""

    def nodes(self) -> Sequence[NodeView]: ...

    async def match(
        self, keys: bytes, *, touch: bool = True, timeout_s: float | None = None
    ) -> MatchResult: ...

    async def give_up(
        self, keys: bytes, *, node: str | None = None, timeout_s: float | None = None
    ) -> int: ...

    async def prefetch(
        self, keys: bytes, *, begin_s: float = 1.0, timeout_s: float | None = None
    ) -> Prefetched: ...

    def for_tenant(self, session_token: str) -> StoreClient: ...

    async def close(self) -> None: ...


class TenantStoreClients:
    """Clients that see one tenant's blocks each; those that were used last are kept."""

    def __init__(self, token: str | TokenSource) -> None:
        self._token = token
        self._known: OrderedDict[str, tuple[str, StoreClient]] = OrderedDict()  # longest unused first
        self._closing: set[asyncio.Task[None]] = set()

    def client(self, parent: StoreClient, tenant: str, unix_s: float) -> StoreClient:
        """The tenant's client, with a session token that is good for a while. Raises InvalidArgument."""
        session = session_token(parse_token(text_of(self._token)), tenant, unix_s).text
        known = self._known.pop(tenant, None)
        if known is None or known[0] != session:
            self._end_later(known)
            known = session, parent.for_tenant(session)
        self._known[tenant] = known
        if len(self._known) > TENANTS_KEPT:
            self._end_later(self._known.popitem(last=False)[1])
        return known[1]

    async def close(self) -> None:
        """Close all of them."""
        for _, client in self._known.values():
            await client.close()
        self._known.clear()

    def _end_later(self, known: tuple[str, StoreClient] | None) -> None:
        """Close a client when the calls that use it have ended: each of them has a limit."""
        if known is None:
            return

        async def end(client: StoreClient) -> None:
            await asyncio.sleep(_CLOSE_AFTER_S)
            await client.close()

        task = asyncio.create_task(end(known[1]))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class PoolLookup:
    """Bounded lookups of leading blocks in the pool. A background duty calls `connect` until it succeeds."""

    def __init__(
        self,
        config: Config,
        token: str | TokenSource,
        clock: Clock,
        make_client: Callable[[], Awaitable[StoreClient]] | None = None,
    ) -> None:
        self._config = config
        self._tenants = TenantStoreClients(token)
        self._clock = clock
        self._make_client = make_client or self._connect
        self._client: StoreClient | None = None
        self._by_host: tuple[Sequence[NodeView], NodesByHost] = ((), {})
        self._hosts: tuple[Sequence[NodeView], dict[str, str]] = ((), {})

    @property
    def connected(self) -> bool:
        """Whether a client is there and knows of store nodes."""
        return self._client is not None and bool(self._client.nodes())

    @property
    def node_count(self) -> int:
        """Store nodes that the cluster map names."""
        return len(self._client.nodes()) if self._client is not None else 0

    @property
    def nodes_by_host(self) -> NodesByHost:
        """The store nodes through which instances of a host may hand over, as the cluster map has them now."""
        nodes = self._client.nodes() if self._client is not None else ()
        known, found = self._by_host
        if nodes is not known:
            found = by_host(nodes)
            self._by_host = nodes, found
        return found

    def _host_of_node(self) -> dict[str, str]:
        nodes = self._client.nodes() if self._client is not None else ()
        if nodes is not self._hosts[0]:
            self._hosts = nodes, {node.node_id: node.host_id for node in nodes if node.host_id}
        return self._hosts[1]

    def nodes_on(self, hosts: Sequence[str]) -> list[str]:
        """One store node on each of these hosts, by name: the one that takes most new blocks.

        Not the memory of GPUs: it is scarce, and processes on its host cannot map it.
        """
        best: dict[str, NodeView] = {}
        for node in self._client.nodes() if self._client is not None else ():
            if node.state is not MapNodeState.ACTIVE or node.weight <= 0 or node.tier == BlockTier.HBM:
                continue
            known = best.get(node.host_id)
            if known is None or node.weight > known.weight:
                best[node.host_id] = node
        return [best[host].node_id for host in hosts if host in best]

    async def connect(self) -> bool:
        """Connect when there is no client yet; return whether one was made. Raises MooncacheError."""
        if self._client is not None:
            return False
        self._client = await self._make_client()
        return True

    async def match(self, keys: bytes, tenant: str = "") -> PoolAnswer:
        """Ask for the leading blocks of packed keys; never raises for a pool that cannot be asked.

        tenant: whose blocks they are; "": the engines' own.
        """
        if not keys:
            return PoolAnswer(PoolState.NO_KEYS)
        if self._client is None or not self._client.nodes():
            return PoolAnswer(PoolState.ABSENT)
        started_s = self._clock.now_s()
        state, blocks, unreachable = PoolState.OK, 0, 0
        runs: tuple[PlacedRun, ...] = ()
        holders: tuple[tuple[BlockHolder, ...], ...] = ()
        try:
            # The native call keeps its own deadline; the outer one is for a thread pool that is busy.
            with tracing.span("pool.match", kind="client", root=False) as span:
                async with asyncio.timeout(MATCH_TIMEOUT_S + _GRACE_S):
                    client = self._of(self._client, tenant)
                    found = await client.match(keys, touch=False, timeout_s=MATCH_TIMEOUT_S)
                span.set(pool__blocks=found.leading_blocks)
            blocks, unreachable = found.leading_blocks, found.unreachable_nodes
            runs = runs_of(found.copies, blocks, self._host_of_node())
            holders = holders_of(found.copies, blocks)
        except (TimeoutError, DeadlineExceeded):
            state = PoolState.TIMEOUT
        except Closed:
            self._client, state = None, PoolState.ABSENT
        except MooncacheError:
            state = PoolState.ABSENT
        if state == PoolState.OK and unreachable and not blocks:
            state = PoolState.TIMEOUT
        elapsed_s = self._clock.now_s() - started_s
        return PoolAnswer(state, blocks, elapsed_s, unreachable, self.nodes_by_host, runs, holders)

    async def give_up(self, keys: bytes, store_node: str = NO_NODE, tenant: str = "") -> int:
        """End the waits for packed keys that will not come to a node, NO_NODE: to any; return how many ended.

        Raises: MooncacheError, TimeoutError.
        """
        if self._client is None or not self._client.nodes():
            return 0
        async with asyncio.timeout(GIVE_UP_TIMEOUT_S + _GRACE_S):
            client = self._of(self._client, tenant)
            return await client.give_up(keys, node=store_node or None, timeout_s=GIVE_UP_TIMEOUT_S)

    async def prefetch(self, keys: bytes, begin_s: float, tenant: str = "") -> int:
        """Let packed keys come up from disks; return how many blocks do.

        Raises: MooncacheError, TimeoutError.
        """
        if self._client is None or not self._client.nodes():
            return 0
        async with asyncio.timeout(PREFETCH_TIMEOUT_S + _GRACE_S):
            client = self._of(self._client, tenant)
            found = await client.prefetch(keys, begin_s=begin_s, timeout_s=PREFETCH_TIMEOUT_S)
        return found.blocks

    async def close(self) -> None:
        """Let go of the client."""
        client, self._client = self._client, None
        await self._tenants.close()
        if client is not None:
            await client.close()

    def _of(self, client: StoreClient, tenant: str) -> StoreClient:
        """The client that sees the tenant's blocks."""
        return self._tenants.client(client, tenant, self._clock.wall_s()) if tenant else client

    async def _connect(self) -> AsyncClient:
        return await AsyncClient.connect(
            self._config.cluster.master_targets,
            threads=_THREADS,
            token_file=str(self._config.cluster.token_path),  # followed
            config=self._config,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            client_name="mooncache-conductor",
        )

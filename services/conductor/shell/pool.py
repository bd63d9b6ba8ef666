"""Asking the pool which leading blocks of a prompt it holds, within a short time and without ever failing a
request.

The conductor asks the store nodes themselves (data plane, MATCH) through the SDK; see docs/decisions/0009.
Without an answer blocks count as absent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mooncache.client.aio import AsyncClient
from mooncache.conductor.core.decisions import POOL_ABSENT, POOL_NO_KEYS, POOL_OK, POOL_TIMEOUT, PoolAnswer
from mooncache.config import Config
from mooncache.errors import Closed, DeadlineExceeded, MooncacheError
from mooncache.runtime import tracing
from mooncache.runtime.clock import Clock

_CONNECT_TIMEOUT_S = 2.0
_THREADS = 8
_GRACE_S = 0.02


class PoolLookup:
    """See the module's text. `connect` is called by a background duty until it succeeds."""

    def __init__(
        self,
        config: Config,
        token: str,
        clock: Clock,
        make_client: Callable[[], Any] | None = None,
    ) -> None:
        self._config = config
        self._token = token
        self._clock = clock
        self._timeout_s = config.conductor.pool_match_timeout_s
        self._make_client = make_client or self._connect
        self._client: Any = None

    @property
    def connected(self) -> bool:
        """Whether a client is there and knows of store nodes."""
        return self._client is not None and bool(self._client.nodes())

    @property
    def node_count(self) -> int:
        """Store nodes that the cluster map names."""
        return len(self._client.nodes()) if self._client is not None else 0

    async def connect(self) -> bool:
        """Connect when there is no client yet; return whether one was made. Raises MooncacheError."""
        if self._client is not None:
            return False
        self._client = await self._make_client()
        return True

    async def match(self, keys: bytes) -> PoolAnswer:
        """Ask for the leading blocks of packed keys; never raises for a pool that cannot be asked."""
        if not keys:
            return PoolAnswer(POOL_NO_KEYS)
        if self._client is None or not self._client.nodes():
            return PoolAnswer(POOL_ABSENT)
        started_s = self._clock.now_s()
        state, blocks, unreachable = POOL_OK, 0, 0
        try:
            # The native call keeps its own deadline; the outer one is for a thread pool that is busy.
            with tracing.span("pool.match", kind="client", root=False) as span:
                async with asyncio.timeout(self._timeout_s + _GRACE_S):
                    found = await self._client.match(keys, touch=False, timeout_s=self._timeout_s)
                span.set(pool__blocks=found.leading_blocks)
            blocks, unreachable = found.leading_blocks, found.unreachable_nodes
        except (TimeoutError, DeadlineExceeded):
            state = POOL_TIMEOUT
        except Closed:
            self._client, state = None, POOL_ABSENT
        except MooncacheError:
            state = POOL_ABSENT
        if state == POOL_OK and unreachable and not blocks:
            state = POOL_TIMEOUT
        return PoolAnswer(state, blocks, self._clock.now_s() - started_s, unreachable)

    async def close(self) -> None:
        """Let go of the client."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _connect(self) -> AsyncClient:
        return await AsyncClient.connect(
            self._config.cluster.master_targets,
            threads=_THREADS,
            token=self._token,
            config=self._config,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            client_name="mooncache-conductor",
        )

"""Waiting for blocks that others are about to write: the nodes say when they are there.

Many watches share one connection per node. Nothing is sent and no news comes but in `next`, so a thread of its own is
in it most of the time; the other calls are for any thread and do not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mooncache.client.limits import check_timeout
from mooncache.client.native_call import call_native
from mooncache.client.results import ClusterView, WatchNews, WatchState
from mooncache.errors import Closed, MooncacheError, UnknownNode

if TYPE_CHECKING:
    from mooncache._native import BlockWatch as NativeWatch

_STATES = tuple(WatchState)  # numbered by the native core in this order


def known_index(view: ClusterView, node_id: str | None) -> int | None:
    """Index of the node that a caller names; None when it names none.

    Raises:
        UnknownNode: the map does not list it.
    """
    if node_id is None:
        return None
    if (index := view.node_index(node_id)) is None:
        raise UnknownNode(f"The cluster map lists no node {node_id!r}.")
    return index


def _next_timeout(timeout_s: float) -> float:
    return 0.0 if timeout_s == 0 else check_timeout(timeout_s)


class _WatchCore:
    def __init__(self, native: NativeWatch, node_index: Callable[[str | None], int | None]) -> None:
        self._native = native
        self._node_index = node_index

    def add(
        self, name: str, keys: bytes, *, timeout_s: float, node: str | None = None, news_s: float = 0.0
    ) -> None:
        """Wait for all of `keys`, 32 bytes each, for ten minutes at most.

        Args:
            name: what its news are called; free again after the last of them.
            node: wait at this node only. None waits at all nodes of a small cluster, and a key counts wherever it is.
            news_s: at least so long between two news of one node; 0 gives the last one only.

        Raises:
            InvalidArgument: the name is in use, or there is no key.
            LimitExceeded: more than 65,536 keys or 4,096 watches, or a cluster too large to wait at all of its nodes.
            UnknownNode, NoNodes: the cluster map does not list the node, or none.
            Closed: the watch or its client is closed.
        """
        index = self._node_index(node)
        call_native(self._native.add, name, keys, check_timeout(timeout_s), index, news_s)

    def remove(self, name: str) -> bool:
        """End a watch without news. False when there is none of this name, or its last news was taken."""
        return self._native.remove(name)

    def wake(self) -> None:
        """End the present `next`, or the one to come, without news."""
        self._native.wake()

    def close(self) -> None:
        """End all watches and their connections; a `next` under way raises Closed. Twice is harmless."""
        self._native.close()

    def _next(self, timeout_s: float) -> list[WatchNews]:
        return [
            WatchNews(name, positions, _STATES[state], code)
            for name, positions, state, code in call_native(self._native.next, timeout_s)
        ]


class BlockWatch(_WatchCore):
    """What `Client.watch` returns. Close it, or use it as a context manager."""

    def next(self, timeout_s: float) -> list[WatchNews]:
        """News of any watches; empty when the time is over, or after `wake`. Time limit 0: what is there now.

        Raises:
            InvalidArgument: another thread is in `next`.
            Closed: the watch or its client was closed.
        """
        return self._next(_next_timeout(timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncBlockWatch(_WatchCore):
    """What `AsyncClient.watch` returns; the twin of `BlockWatch`, with a thread of its own (use `async with`)."""

    def __init__(self, native: NativeWatch, node_index: Callable[[str | None], int | None]) -> None:
        super().__init__(native, node_index)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mooncache-watch")
        self._waiting: asyncio.Future[list[WatchNews]] | None = None

    async def next(self, timeout_s: float) -> list[WatchNews]:
        """News of any watches, as `BlockWatch.next`. Cancelling it loses none: the next call has them."""
        limit_s = _next_timeout(timeout_s)
        while True:
            was_cancelled = self._waiting is not None
            if self._waiting is None:
                self._waiting = asyncio.wrap_future(self._submit(limit_s))
            try:
                news = await asyncio.shield(self._waiting)
            except asyncio.CancelledError:
                self.wake()
                raise
            except MooncacheError:
                self._waiting = None
                raise
            self._waiting = None
            if news or not was_cancelled:
                return news

    def _submit(self, limit_s: float) -> Future[list[WatchNews]]:
        try:
            return self._thread.submit(self._next, limit_s)
        except RuntimeError:  # shut down
            raise Closed("The watch is closed.") from None

    def close(self) -> None:
        """End all watches and their connections; a `next` under way raises Closed. Twice is harmless."""
        super().close()
        self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

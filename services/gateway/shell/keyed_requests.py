"""Requests under way by the key that they came with, so that a key's end is their end, too."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mooncache.gateway.core.faults import Refusal
from mooncache.gateway.shell.exchange import Exchange


@dataclass(slots=True)
class KeyedRequests:
    """The requests under way of keys that can be taken away."""

    _open: dict[str, dict[Exchange, asyncio.Task[Any]]] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self, exchange: Exchange) -> Iterator[None]:
        """The current task serves a request. Meanwhile it may be cancelled, with `exchange.ended_by` set."""
        caller, task = exchange.require_caller(), asyncio.current_task()
        assert task is not None
        if not caller.may_end:
            yield
            return
        self._open.setdefault(caller.key_id, {})[exchange] = task
        try:
            yield
        finally:
            mine = self._open[caller.key_id]
            del mine[exchange]
            if not mine:
                del self._open[caller.key_id]

    def end(self, end_of: Callable[[str], Refusal | None]) -> dict[str, int]:
        """End the requests of keys that have ended; how many there were of each. An answer that is complete is let go.

        end_of: why a key has ended, None while it has not.
        """
        counts: dict[str, int] = {}
        for key_id, requests in self._open.items():
            reason = end_of(key_id)
            if reason is None:
                continue
            for exchange, task in requests.items():
                if exchange.ended_by is None and not exchange.answered and not exchange.gone:
                    exchange.ended_by = reason.fault
                    task.cancel()
                    counts[key_id] = counts.get(key_id, 0) + 1
        return counts

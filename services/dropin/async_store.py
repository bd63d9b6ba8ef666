"""The store's calls as coroutines, for programs that use the original's `mooncake.async_store`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from mooncache.dropin.store import MooncakeDistributedStore

_PREFIX = "async_"


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """`async_put`, `async_get` and so on: the call of that name in a thread of the event loop's executor."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        call = getattr(type(self), name.removeprefix(_PREFIX), None)
        if not name.startswith(_PREFIX) or name.startswith("async__") or not callable(call):
            raise AttributeError(f"{type(self).__name__} has no {name}")

        async def in_thread(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(call, self, *args, **kwargs)

        return in_thread

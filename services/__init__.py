"""Mooncache: a verified, shared KV cache pool for LLM serving.

>>> import mooncache
>>> with mooncache.connect() as pool:      # the cluster that `mooncache up` started on this machine
...     pool.put("greeting", b"hello")
...     pool.get("greeting")
True
b'hello'

`connect` gives the synchronous client, `connect_async` the asyncio one. Errors are in `mooncache.errors`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncache._version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from mooncache.client.aio import AsyncClient
    from mooncache.client.options import ConnectSettings
    from mooncache.client.registered import RegisteredBuffer
    from mooncache.client.reservation import (
        AsyncReservation,
        AsyncReservationBatch,
        Reservation,
        ReservationBatch,
        StridedBuffer,
    )
    from mooncache.client.results import (
        BatchResult,
        BlockEntry,
        BlockStat,
        ClusterView,
        GetResult,
        GetValues,
        GetViews,
        MatchResult,
        NodeView,
        PutResult,
        WatchNews,
        WatchState,
    )
    from mooncache.client.sync import Client
    from mooncache.client.watch import AsyncBlockWatch, BlockWatch
    from mooncache.errors import MooncacheError

__all__ = [
    "AsyncBlockWatch",
    "AsyncClient",
    "AsyncReservation",
    "AsyncReservationBatch",
    "BatchResult",
    "BlockEntry",
    "BlockStat",
    "BlockWatch",
    "Client",
    "ClusterView",
    "GetResult",
    "GetValues",
    "GetViews",
    "MatchResult",
    "MooncacheError",
    "NodeView",
    "PutResult",
    "RegisteredBuffer",
    "Reservation",
    "ReservationBatch",
    "StridedBuffer",
    "WatchNews",
    "WatchState",
    "__version__",
    "connect",
    "connect_async",
    "get_cmake_path",
    "get_include",
    "get_proto_path",
]

# gRPC's fork handlers are skipped in part while a call is under way, as a client's always is; the threads that they
# start again in the child crash it. Without them a child has no thread of gRPC. Read when gRPC starts.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Loaded on first use: `import mooncache` stays cheap for tools that only want the version or a proto.
_HOMES = {
    "AsyncBlockWatch": "mooncache.client.watch",
    "AsyncClient": "mooncache.client.aio",
    "AsyncReservation": "mooncache.client.reservation",
    "AsyncReservationBatch": "mooncache.client.reservation",
    "BatchResult": "mooncache.client.results",
    "BlockEntry": "mooncache.client.results",
    "BlockStat": "mooncache.client.results",
    "BlockWatch": "mooncache.client.watch",
    "Client": "mooncache.client.sync",
    "ClusterView": "mooncache.client.results",
    "StridedBuffer": "mooncache.client.reservation",
    "GetResult": "mooncache.client.results",
    "GetValues": "mooncache.client.results",
    "GetViews": "mooncache.client.results",
    "MatchResult": "mooncache.client.results",
    "MooncacheError": "mooncache.errors",
    "NodeView": "mooncache.client.results",
    "PutResult": "mooncache.client.results",
    "RegisteredBuffer": "mooncache.client.registered",
    "Reservation": "mooncache.client.reservation",
    "ReservationBatch": "mooncache.client.reservation",
    "WatchNews": "mooncache.client.results",
    "WatchState": "mooncache.client.results",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mooncache' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def get_cmake_path() -> str:
    """Folder of mooncacheConfig.cmake (-Dmooncache_DIR=…), which knows the headers of this package (docs/cpp.md)."""
    return str(Path(__file__).resolve().parent / "cmake")


def get_include() -> str:
    """Folder to pass to a C++ compiler as -I; below it are the public headers, mooncache/*.h (docs/cpp.md)."""
    return str(Path(__file__).resolve().parent / "include")


def get_proto_path() -> str:
    """Folder to pass to a protobuf compiler as -I; below it are mooncache/proto/v1/*.proto (docs/grpc.md)."""
    return str(Path(__file__).resolve().parent / "protos")


def connect(master: str | Sequence[str] | None = None, **settings: Unpack[ConnectSettings]) -> Client:
    """Connect to a pool and return a `Client`; arguments and errors are described there."""
    from mooncache.client.sync import Client

    return Client(master, **settings)


async def connect_async(
    master: str | Sequence[str] | None = None, *, threads: int = 8, **settings: Unpack[ConnectSettings]
) -> AsyncClient:
    """Connect to a pool and return an `AsyncClient`; arguments and errors are described at `Client`."""
    from mooncache.client.aio import AsyncClient

    return await AsyncClient.connect(master, threads=threads, **settings)

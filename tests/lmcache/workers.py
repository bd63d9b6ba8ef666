"""One worker of LMCache's in-process mode, without an engine: its real CPU backend and its real remote backend, which
loads our connector by name.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from tests.conditions import wait_until

LAYERS, HEADS, HEAD_DIM, CHUNK = 2, 4, 16, 16
PLUGIN = {
    "remote_storage_plugin.mooncache.module_path": "mooncache.connectors.lmcache",
    "remote_storage_plugin.mooncache.class_name": "MooncacheConnectorAdapter",
}


class Worker:
    """Raises what ends an engine's start."""

    def __init__(
        self,
        extra: dict[str, Any],
        model: str,
        *,
        rank: int = 0,
        world: int = 1,
        dtype: torch.dtype = torch.float16,
        chunk: int = CHUNK,
        heads: int = HEADS,
        cpu_gb: float = 0.01,
        role: str = "worker",
        **settings: Any,
    ) -> None:
        self.config = LMCacheEngineConfig.from_defaults(
            **{
                "chunk_size": chunk,
                "max_local_cpu_size": cpu_gb,
                "local_cpu": False,
                "pre_caching_hash_algorithm": "sha256_cbor",
                "remote_storage_plugins": ["mooncache"],
                "extra_config": {**PLUGIN, **extra},
                **settings,
            }
        )
        self.metadata = LMCacheMetadata(
            model,
            world,
            world,
            rank,
            rank,
            dtype,
            (LAYERS, 2, chunk, heads, HEAD_DIM),
            chunk_size=chunk,
            role=role,
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.cpu = None if role == "scheduler" else LocalCPUBackend(self.config, self.metadata, "cpu")
        (plugin,) = self.config.remote_storage_plugins
        try:
            self.remote = RemoteBackend(
                self.config, self.metadata, self.loop, self.cpu, "cpu", plugin_name=plugin
            )
        except BaseException:
            self._end_loop()
            raise

    @property
    def connector(self) -> Any:
        """Ours, below LMCache's own wrapper."""
        assert self.remote.connection is not None
        return self.remote.connection.getWrappedConnector()

    def keys(self, *hashes: int, tags: dict[str, str] | None = None) -> list[CacheEngineKey]:
        """Keys of chunks, as LMCache makes them for this worker."""
        meta = self.metadata
        configs = {f"lmcache.tag.{name}": value for name, value in (tags or {}).items()}
        return [
            CacheEngineKey(meta.model_name, meta.world_size, meta.worker_id, each, meta.kv_dtype, configs)
            for each in hashes
        ]

    def chunks(self, *seeds: int) -> list[Any]:
        """Chunks in LMCache's memory with bytes that differ everywhere."""
        assert self.cpu is not None
        made = []
        for seed in seeds:
            chunk = self.cpu.allocate(self.metadata.get_shapes(), self.metadata.get_dtypes(), busy_loop=False)
            assert chunk is not None
            size = chunk.get_size()
            maker = torch.Generator().manual_seed(seed)
            chunk.raw_data[:size].copy_(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=maker))
            made.append(chunk)
        return made

    def store(self, keys: list[CacheEngineKey], chunks: list[Any]) -> None:
        """As the engine saves, and until it is over."""
        done: list[CacheEngineKey] = []
        self.remote.batched_submit_put_task(keys, chunks, on_complete_callback=done.append)
        wait_until(lambda: len(done) == len(keys), "the put has ended")

    def load(self, keys: list[CacheEngineKey]) -> list[bytes | None]:
        """As the engine loads: bytes of each chunk that came."""
        found = self.remote.batched_get_blocking(keys)
        answer = [None if chunk is None else bytes(chunk.byte_array) for chunk in found]
        for chunk in found:
            if chunk is not None:
                chunk.ref_count_down()
        return answer

    def free_bytes(self) -> int:
        """Of LMCache's memory, what nothing uses."""
        assert self.cpu is not None
        return int(self.cpu.memory_allocator.pin_allocator.address_manager.get_free_size())

    def close(self) -> None:
        """End."""
        self.remote.close()
        self._end_loop()

    def _end_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def content(chunk: Any) -> bytes:
    """Bytes of a chunk."""
    return bytes(chunk.byte_array)

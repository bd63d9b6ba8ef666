"""The remote connector of LMCache's in-process mode: its chunks in the Mooncache pool, and back.

Idea: a chunk is a block. Its bytes move straight between LMCache's CPU memory and the nodes, on threads of ours: the
loop of LMCache never waits. LMCache computes what it does not get, so every failure is a miss. Only what makes all
sharing impossible ends the engine's start.

The invariant: memory that a call uses is held by a reference until that call has ended, also when LMCache has given up
waiting for it.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from mooncache.connectors.lmcache.core.names import chunk_name, describe, dtype_name, leading
from mooncache.connectors.lmcache.memory import CacheMemory, tensors_of, view_of
from mooncache.connectors.lmcache.models import ModelDigests, Models, Roots, engine_name
from mooncache.connectors.lmcache.pool import PoolOfPlugin
from mooncache.connectors.lmcache.settings import IN_EXTRA, PluginSettings, read_settings
from mooncache.connectors.lmcache.threads import CallThreads
from mooncache.errors import ConfigInvalid
from mooncache.kvcache import identity
from mooncache.kvcache.passport import Passport

SCHEMA: Final = "plugin://mooncache"
SAVE_THREADS: Final = 2
T = TypeVar("T")


class MooncacheConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes connectors for the remote storage plug-in `mooncache` (or `mooncache.NAME`)."""

    def __init__(self) -> None:
        super().__init__(SCHEMA)

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """A connector. Raises IrrecoverableException, which ends the engine's start: chunks cannot be shared."""
        try:
            return MooncacheRemoteConnector(context)
        except ConfigInvalid as error:
            raise IrrecoverableException(str(error)) from error


def check_config(config: Any) -> None:
    """Raise ConfigInvalid for settings of LMCache whose chunks cannot be shared."""
    if config.pre_caching_hash_algorithm == "builtin":
        raise ConfigInvalid(
            "With pre_caching_hash_algorithm: builtin chunks are named by Python's own hash, which collides. "
            "Use sha256_cbor, and the same PYTHONHASHSEED for all engines."
        )
    if importlib.util.find_spec("vllm") is None:
        raise ConfigInvalid(
            f"{config.pre_caching_hash_algorithm} is a hash of vLLM, which is not installed: LMCache would use "
            "Python's own, which collides."
        )
    if config.remote_serde not in (None, "naive"):
        raise ConfigInvalid(
            f"remote_serde: {config.remote_serde} changes a chunk's bytes and size. Use naive; the pool has its own "
            "checksums."
        )
    if config.use_layerwise or config.enable_blending:
        raise ConfigInvalid("Chunks of use_layerwise and enable_blending cannot be shared. Switch both off.")


class MooncacheRemoteConnector(RemoteConnector):  # type: ignore[misc]
    """Chunks of one worker in the pool. See docs/lmcache.md for its settings.

    Raises:
        ConfigInvalid: settings that cannot be used, no cluster, a version of LMCache or a model whose chunks cannot be
            shared.
    """

    def __init__(self, context: ConnectorContext) -> None:
        self._engine = engine_name(in_process=True)
        self._config, self._metadata = context.config, context.metadata
        super().__init__(self._config, self._metadata)
        check_config(self._config)
        settings: PluginSettings = read_settings(self._config.extra_config, IN_EXTRA)
        self._cpu = context.local_cpu_backend
        models = Models(settings)
        models.read(self._metadata.model_name)
        self._roots = Roots(models, self._passport)
        memory = CacheMemory.of_allocator(getattr(self._cpu, "memory_allocator", None))
        self._pool = PoolOfPlugin(settings, memory, f"lmcache-{self._metadata.worker_id}")
        self._loads = CallThreads("load", settings.connector.load_threads)
        self._saves = CallThreads("save", SAVE_THREADS)

    def _passport(self, digests: ModelDigests, facts: tuple[str, ...]) -> Passport:
        world_size, worker_id, dtype = facts
        # kv_shape is the same in LMCache's scheduler, which asks, and in its workers, which load and save.
        layout = describe([self._metadata.kv_shape], [dtype])
        return Passport(
            weights_digest=digests.weights,
            config_digest=digests.config,
            tokenizer_digest=identity.NO_TOKENIZER,
            engine=self._engine,
            kv_dtype=dtype,
            kv_layout=f"{self.meta_fmt.name} of {layout}; named by {self._config.pre_caching_hash_algorithm}",
            block_tokens=self._metadata.chunk_size,
            tp_rank=int(worker_id),
            tp_size=int(world_size),
        )

    def _names(self, keys: Sequence[Any]) -> list[str]:
        """Names of chunks; empty when their model cannot be shared."""
        names = []
        for key in keys:
            facts = (str(key.world_size), str(key.worker_id), dtype_name(key.dtype))
            root = self._roots.get(key.model_name, *facts)
            if root is None:
                return []
            names.append(chunk_name(root, chunk_hash=key.chunk_hash_hex, tags=key.tags))
        return names

    # --- questions -------------------------------------------------------------------------------------------

    async def exists(self, key: Any) -> bool:
        """Whether the pool has a chunk."""
        return await self._count([key]) == 1

    def exists_sync(self, key: Any) -> bool:
        """Whether the pool has a chunk."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        """It has `batched_contains`."""
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """Number of leading chunks that the pool has."""
        return self._loads.shielded(lambda: self._leading(keys), lambda: 0)

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        """Number of leading chunks that the pool has. A chunk that goes before it is loaded is a miss then."""
        return await self._count(keys)

    async def _count(self, keys: list[Any]) -> int:
        return await self._run(self._loads, lambda: self._leading(keys), lambda: 0)

    def _leading(self, keys: Sequence[Any]) -> int:
        return leading(self._pool.blocks.present(self._names(keys)))

    # --- chunks ----------------------------------------------------------------------------------------------

    async def get(self, key: Any) -> Any:
        """The chunk in memory of LMCache; None on a miss."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """It has `batched_get`."""
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        """The chunks in memory of LMCache, None for each that did not come."""
        nothing = [None] * len(keys)
        return await self._run(
            self._loads, lambda: self._load(keys), lambda: list(nothing), abandoned=_drop_all
        )

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any]) -> list[Any]:
        """The chunks before the first that did not come."""
        found = await self.batched_get(keys)
        count = leading([chunk is not None for chunk in found])
        _drop_all(found[count:])
        return found[:count]

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store a chunk. LMCache does not ask whether the pool took it: what it has not is computed again."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """It has `batched_put`."""
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        """Store chunks in one call."""
        await self._run(
            self._saves, lambda: self._save(keys, memory_objs), lambda: None, held=tuple(memory_objs)
        )

    def _load(self, keys: list[Any]) -> list[Any]:
        names = self._names(keys)
        chunks: list[Any] = []
        try:
            while names and len(chunks) < len(names) and (chunk := self._allocate()) is not None:
                chunks.append(chunk)
            views = [[view_of(chunk)] for chunk in chunks]
            sizes = self._pool.blocks.load(names[: len(chunks)], views)
            loaded = list(map(self._whole, chunks, sizes))
        except BaseException:
            _drop_all(chunks)
            raise
        _drop_all([chunk for chunk, came in zip(chunks, loaded, strict=True) if came is None])
        return loaded + [None] * (len(keys) - len(loaded))

    def _allocate(self) -> Any:
        """Memory for one chunk, None when LMCache has none now: to wait for some would hold up all loads."""
        shapes, dtypes = self._metadata.get_shapes(), self._metadata.get_dtypes()
        return self._cpu.allocate(shapes, dtypes, self.meta_fmt, busy_loop=False)

    def _whole(self, chunk: Any, size_bytes: int | None) -> Any:
        """The chunk with so many bytes, None if that is no chunk."""
        if size_bytes is None or size_bytes == chunk.get_size():
            return chunk if size_bytes else None
        one_group = len(tensors_of(chunk)[0]) == 1
        if not self._config.save_unfull_chunk or not one_group or size_bytes % self.single_token_size:
            return None
        return self.reshape_partial_chunk(chunk, size_bytes)

    def _save(self, keys: list[Any], memory_objs: list[Any]) -> None:
        names = self._names(keys)
        if names:
            self._pool.blocks.save(names, [[view_of(chunk)] for chunk in memory_objs])

    async def _run(
        self,
        threads: CallThreads,
        call: Callable[[], T],
        otherwise: Callable[[], T],
        *,
        held: tuple[Any, ...] = (),
        abandoned: Callable[[T], None] | None = None,
    ) -> T:
        """The call's answer from a thread.

        Args:
            held: memory that the call uses.
            abandoned: gets the answer for which LMCache has given up waiting.
        """
        for chunk in held:
            chunk.ref_count_up()
        future = threads.submit(call, otherwise)
        if future is None:
            _drop_all(held)
            return otherwise()
        future.add_done_callback(lambda _: _drop_all(held))
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if abandoned is not None:
                future.add_done_callback(partial(_abandon, abandoned))
            raise

    # --- the rest of the interface ---------------------------------------------------------------------------

    async def list(self) -> list[str]:
        """Nothing: the pool's keys are hashes of names."""
        return []

    def remove_sync(self, key: Any) -> bool:
        """Not removed: other engines use it, and the pool makes room by itself."""
        return False

    async def close(self) -> None:
        """End the connection. Calls under way end before, within their time limits."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._loads.close()
        self._saves.close()
        self._pool.close()


def _drop_all(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        if chunk is not None:
            chunk.ref_count_down()


def _abandon(abandoned: Callable[[T], None], future: Future[T]) -> None:
    if not future.cancelled():
        abandoned(future.result())

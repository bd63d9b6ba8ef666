"""The L2 adapter of `lmcache server`: its objects in the Mooncache pool, and back.

Idea: an object is a block. LMCache's controllers submit batches and look at event fds; here each batch is one call to
the pool, on threads for stores, lookups and loads that do not wait for each other. Bytes move straight between L1 and
the nodes. Objects are not locked between lookup and load: what goes meanwhile is a miss of the load, which LMCache
expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from mooncache.connectors.lmcache.core.names import describe, object_name
from mooncache.connectors.lmcache.memory import CacheMemory, tensors_of, view_of
from mooncache.connectors.lmcache.models import ModelDigests, Models, Roots, engine_name
from mooncache.connectors.lmcache.pool import PoolOfPlugin
from mooncache.connectors.lmcache.settings import IN_PARAMS, read_settings
from mooncache.connectors.lmcache.tasks import Tasks
from mooncache.kvcache import identity
from mooncache.kvcache.lookup import TIMEOUT_S
from mooncache.kvcache.passport import Passport

STORE_THREADS: Final = 2
LOOKUP_THREADS: Final = 1
LAYOUTS_MAX: Final = 4096
"""Object groups whose layout is remembered."""


class MooncacheL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Objects of one LMCache server in the pool. See docs/lmcache.md for its settings.

    Raises:
        ConfigInvalid: settings that cannot be used, no cluster, a model of `mooncache.models` that has no files, or a
            version of LMCache with other interfaces.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        self._engine = engine_name(in_process=False)
        settings = read_settings(params, IN_PARAMS)
        models = Models(settings)
        for name in settings.models:
            models.read(name)
        self._roots = Roots(models, self._passport)
        self._layouts: dict[tuple[str, int], str] = {}
        desc = l1_memory_desc
        memory = CacheMemory(desc.ptr, desc.size) if desc is not None else CacheMemory(0, 0)
        self._pool = PoolOfPlugin(settings, memory, "lmcache-server")
        self._stores: Tasks[L2StoreResult] = Tasks("store", STORE_THREADS)
        self._lookups: Tasks[Bitmap] = Tasks("lookup", LOOKUP_THREADS)
        self._loads: Tasks[Bitmap] = Tasks("load", settings.connector.load_threads)

    def _passport(self, digests: ModelDigests, facts: tuple[str, ...]) -> Passport:
        (layout,) = facts
        return Passport(
            weights_digest=digests.weights,
            config_digest=digests.config,
            tokenizer_digest=identity.NO_TOKENIZER,
            engine=self._engine,
            kv_dtype=layout.split(" ", 1)[0],
            kv_layout=layout,
            block_tokens=1,  # the layout's shapes say how many an object has
        )

    def _names(self, keys: Sequence[Any], layouts: Sequence[str]) -> list[str]:
        """Names of objects; empty for those that cannot be shared."""
        return list(map(self._name, keys, layouts))

    def _name(self, key: Any, layout: str) -> str:
        root = self._roots.get(key.model_name, layout) if layout else None
        if root is None:
            return ""
        return object_name(
            root,
            kv_rank=key.kv_rank,
            group=key.object_group_id,
            salt=key.cache_salt,
            chunk_hash=key.chunk_hash,
        )

    def _layout_of(self, key: Any, memory_obj: Any) -> str:
        """Of an object in L1; remembered, because a question may come without."""
        layout = describe(*tensors_of(memory_obj))
        if len(self._layouts) >= LAYOUTS_MAX:
            self._layouts.clear()
        self._layouts[key.model_name, key.object_group_id] = layout
        return layout

    def _layout_asked(self, key: Any, group_layout_descs: dict[int, Any]) -> str:
        desc = group_layout_descs.get(key.object_group_id)
        if desc is not None and desc.shapes:
            return describe(desc.shapes, desc.dtypes)
        return self._layouts.get((key.model_name, key.object_group_id), "")

    # --- event fds -------------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Readable when a store has ended."""
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a lookup has ended."""
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        """Readable when a load has ended."""
        return self._loads.fd

    # --- stores ----------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store a batch; it succeeds when the pool has all of it."""
        return self._stores.submit(lambda: self._store(keys, objects), lambda: L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Results of stores, with the bytes that are in the pool now and were not before."""
        return self._stores.take_all()

    def _store(self, keys: list[Any], objects: list[Any]) -> L2StoreResult:
        names = self._names(keys, list(map(self._layout_of, keys, objects)))
        named = [at for at, name in enumerate(names) if name]
        views = [[view_of(objects[at])] for at in named]
        saved = self._pool.blocks.save([names[at] for at in named], views)
        new = [
            (keys[at], view[0].nbytes)
            for at, view, made in zip(named, views, saved.created, strict=True)
            if made
        ]
        if new:
            self._notify_keys_stored([key for key, _ in new], [size for _, size in new])
        return L2StoreResult(len(named) == len(keys) and all(saved.there), sum(size for _, size in new))

    # --- lookups ---------------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Ask which objects the pool has."""
        return self._lookups.submit(lambda: self._lookup(keys, group_layout_descs), lambda: Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """For each object whether the pool has it; None while that is not known."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing: no object was locked."""

    def _lookup(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> Bitmap:
        names = self._names(keys, [self._layout_asked(key, group_layout_descs) for key in keys])
        named = [at for at, name in enumerate(names) if name]
        present = self._pool.blocks.present([names[at] for at in named])
        there = [at for at, found in zip(named, present, strict=True) if found]
        if there:
            self._notify_keys_accessed([keys[at] for at in there])
        return _bitmap(len(keys), there)

    # --- loads -----------------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Read a batch into L1."""
        return self._loads.submit(lambda: self._load(keys, objects), lambda: Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """For each object whether it came, whole and undamaged; None while that is not known."""
        return self._loads.take(task_id)

    def _load(self, keys: list[Any], objects: list[Any]) -> Bitmap:
        names = self._names(keys, list(map(self._layout_of, keys, objects)))
        named = [at for at, name in enumerate(names) if name]
        views = [[view_of(objects[at])] for at in named]
        sizes = self._pool.blocks.load([names[at] for at in named], views)
        came = [at for at, view, size in zip(named, views, sizes, strict=True) if size == view[0].nbytes]
        return _bitmap(len(keys), came)

    # --- the rest of the interface ---------------------------------------------------------------------------

    def delete(self, keys: list[Any]) -> None:
        """Remove objects from the pool, for all its users. LMCache does that only for an `eviction` of this adapter."""
        client = self._pool.link.client()
        names = self._names(keys, [self._layout_asked(key, {}) for key in keys])
        named = [at for at, name in enumerate(names) if name]
        if client is None or not named:
            return
        self._stores.shielded(
            lambda: self._delete(client, [(keys[at], names[at]) for at in named]),
            lambda: L2StoreResult(False, 0),
        )

    def _delete(self, client: Any, objects: list[tuple[Any, str]]) -> L2StoreResult:
        names = [name for _, name in objects]
        found = client.stat_many(names, timeout_s=TIMEOUT_S)
        client.remove_many(names, timeout_s=TIMEOUT_S)
        gone = [
            (key, stat.size_bytes) for (key, _), stat in zip(objects, found, strict=True) if stat is not None
        ]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])
        return L2StoreResult(True, 0)

    def report_status(self) -> dict[str, Any]:
        """For LMCache's status page: healthy while the pool can be asked."""
        return {
            "is_healthy": self._pool.link.usable,
            "type": "MooncacheL2Adapter",
            "connected": self._pool.link.connected.is_set(),
        }

    def close(self) -> None:
        """End the connection. Tasks under way end before, within their time limits."""
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self._pool.close()


def _bitmap(size: int, ones: Sequence[int]) -> Bitmap:
    bitmap = Bitmap(size)
    for at in ones:
        bitmap.set(at)
    return bitmap

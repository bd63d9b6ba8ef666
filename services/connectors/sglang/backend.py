"""The storage backend that SGLang's HiCache loads: pages of its host pools in the Mooncache pool, and back.

Idea: a page is a block (one for each group of heads where fleets of several sizes share), whose bytes move straight
between the host pool's memory and the nodes. SGLang calls from its prefetch, I/O and backup threads and computes what
it does not get, so every failure is a miss: a call has a time limit, and a sick pool is left alone for a while. Only
what makes all sharing impossible is raised, at construction and when host pools are registered.
"""

from __future__ import annotations

import functools
import importlib.metadata
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from mooncache.client.options import ClientOptions
from mooncache.connectors.named_blocks import NamedBlocks
from mooncache.connectors.sglang.core.pages import (
    Rank,
    leading,
    page_names,
    ranks_of_page,
    trailing_ends,
    whole_pages,
)
from mooncache.connectors.sglang.engine_passport import EngineIdentity, passport_of, read_engine
from mooncache.connectors.sglang.host_pools import HostPools, PagePool, is_logical
from mooncache.connectors.sglang.settings import WHERE, read_settings
from mooncache.connectors.sglang.stats import Operation, PageStats
from mooncache.errors import ConfigInvalid, InvalidArgument
from mooncache.kvcache.in_place import RegisteredMemory
from mooncache.kvcache.pool_link import PoolLink, connect_pool
from mooncache.runtime.logs import Event, get_logger

_log = get_logger(__name__)
DEFECTS_LOGGED_MAX: Final = 100
CONNECT_WAIT_S: Final = 5.0
"""The engine's start waits so long for the pool, and goes on without it after that."""
T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


def shielded(answer: Callable[..., Any]) -> Callable[[Method], Method]:
    """The value of `answer(first argument)` for the engine when the method raises; the error is logged."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: MooncacheHiCache, first: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, first, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  (see the module's text)
                self.note_defect(method.__name__, error)
                return answer(first)

        return call  # type: ignore[return-value]

    return wrap


def _no_page(keys: Sequence[str]) -> list[bool]:
    return [False] * len(keys)


def _no_page_of_any(transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
    return {transfer.name: _no_page(transfer.keys or []) for transfer in transfers}


class MooncacheHiCache(HiCacheStorage):  # type: ignore[misc]
    """Pages of one rank in the Mooncache pool. See docs/sglang.md for its settings.

    Raises:
        ConfigInvalid: at construction and when host pools are registered: settings that cannot be used, no cluster,
            a version of SGLang or a model whose pages cannot be shared.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _options: Any = None) -> None:
        self._config = storage_config
        settings = read_settings(storage_config.extra_config)
        if storage_config.dcp_size > 1:
            raise ConfigInvalid(
                "Pages of engines with decode context parallelism (--dcp-size) cannot be shared."
            )
        state_dir = str(settings.state_dir)
        ClientOptions.gather(
            settings.master_targets or None, state_dir=state_dir
        )  # says early what is missing
        self._facts: EngineIdentity = read_engine(settings)
        self._section = settings.connector
        self._pools = HostPools()
        self._roots: dict[str, tuple[str, ...]] = {}
        self._generation = ""
        self._defects = 0
        self._lock = threading.Lock()
        self._stats = PageStats(enabled=storage_config.enable_storage_metrics)
        self._in_place = RegisteredMemory(self._pools, self._section.registered_bytes_max)
        name = f"sglang-tp{storage_config.tp_rank}-pp{storage_config.pp_rank}"
        build = f"sglang {importlib.metadata.version('sglang')}"
        connect = connect_pool(
            master_targets=settings.master_targets, state_dir=state_dir, name=name, build=build
        )
        self._link = PoolLink(connect, prepare=self._in_place)
        self._named = NamedBlocks(self._link, self._section)
        if self._section.enabled and not self._link.connected.wait(CONNECT_WAIT_S):
            _log.warning(
                Event.CONNECTOR_POOL_ABSENT, code="NOT_YET", reason="the engine starts without the pool"
            )

    # --- host pools ------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool that has the KV. Raises ConfigInvalid for one whose pages cannot be shared."""
        group_anchor = getattr(mem_pool_host, "anchor_entry", None)
        if group_anchor is not None:
            mem_pool_host = group_anchor.host_pool
        self.mem_pool_host = mem_pool_host
        if not is_logical(mem_pool_host):
            self._add(PoolName.KV.value, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a pool beside the KV: states, windows, drafts. Raises ConfigInvalid as register_mem_pool_host does."""
        name = str(host_pool_name)
        if name != PoolName.KV.value and not is_logical(host_pool):
            self._add(name, host_pool)

    def _add(self, name: str, host_pool: Any) -> None:
        pool = PagePool(name, host_pool)
        ranks = self._ranks(pool)
        if name == PoolName.KV.value and pool.shape.heads % len(ranks):
            raise ConfigInvalid(
                f"tp_lcm_size in {WHERE} cuts the {pool.shape.heads} KV heads of a rank into {len(ranks)} parts: "
                "that must leave whole heads. Choose one that divides the model's number of KV heads."
            )
        config = self._config
        passports = [
            passport_of(
                self._facts,
                pool=name,
                layout=pool.shape.share(len(ranks)).describe(),
                dtype=pool.dtype,
                page_tokens=pool.page_tokens,
                rank=rank,
                pp=Rank(config.pp_rank, config.pp_size),
                cp=Rank(config.attn_cp_rank, config.attn_cp_size),
            )
            for rank in ranks
        ]
        self._roots[name] = tuple(passport.root().hex() for passport in passports)
        self._pools.add(pool)
        _log.info(
            Event.CONNECTOR_STARTED, passport=self._roots[name][0], pool=name, page_bytes=pool.page_bytes
        )

    def _ranks(self, pool: PagePool) -> tuple[Rank, ...]:
        """The shards of a pool's pages that this rank holds."""
        config = self._config
        # A recurrent state has heads also where the KV is a latent vector; a draft model may be of the other kind.
        own = pool.name == PoolName.MAMBA.value or pool.shape.has_k_and_v
        split = pool.name == PoolName.KV.value and pool.shape.layout == "page_head"
        return ranks_of_page(
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            replicated=config.is_mla_model and not own,
            split_into=(config.tp_lcm_size or 0) if split else 0,
        )

    def _names(self, pool: str, hashes: Sequence[str]) -> list[str]:
        return page_names([root + self._generation for root in self._roots[pool]], hashes)

    # --- pages of the KV -------------------------------------------------------------------------------------

    @shielded(lambda keys: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Number of leading pages that the pool has."""
        if is_logical(self.mem_pool_host):
            return len(keys)
        name = PoolName.KV.value
        return leading(whole_pages(self._named.present(self._names(name, keys)), len(self._roots[name])))

    def exists(self, key: str) -> bool:
        """Whether the pool has a page."""
        return self.batch_exists([key]) == 1

    @shielded(_no_page)
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into the host pool; for each whether it came. What did not come is undefined there."""
        if is_logical(self.mem_pool_host):
            return [True] * len(keys)
        return self._get([(PoolName.KV.value, keys, host_indices)])[0]

    @shielded(_no_page)
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the host pool; for each whether the pool has it now."""
        if is_logical(self.mem_pool_host):
            return [True] * len(keys)
        return self._set([(PoolName.KV.value, keys, host_indices)])[0]

    # --- pages of several pools ------------------------------------------------------------------------------

    @shielded(lambda keys: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix that all pools can restore, each by its own policy, and how far each of them goes."""
        logical = is_logical(self.mem_pool_host)
        asked = [] if logical else [PoolName.KV.value]
        transfers = [t for t in pool_transfers or () if t.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        asked += [str(transfer.name) for transfer in transfers if str(transfer.name) in self._pools]
        present = self._named.present([name for pool in asked for name in self._names(pool, keys)])
        pages: dict[str, list[bool]] = {}
        at = 0
        for pool in asked:
            count = len(keys) * len(self._roots[pool])
            pages[pool] = whole_pages(present[at : at + count], len(self._roots[pool]))
            at += count
        longest = len(keys) if logical else leading(pages[PoolName.KV.value])
        hits: dict[Any, int] = {PoolName.KV: longest} if longest else {}
        ends = set(range(1, longest + 1))
        for transfer in transfers:
            there = pages.get(str(transfer.name), [False] * len(keys))[:longest]
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                can = trailing_ends(there, max(1, len(transfer.keys or ())))
            else:
                can = list(range(1, leading(there) + 1))
            if can:
                hits[transfer.name] = can[-1]
            ends &= set(can)
        return PoolTransferResult(max(ends, default=0), hits, sorted(ends))

    @shielded(_no_page_of_any)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages of several pools in one call; for each pool and page whether it came."""
        return self._batch_v2(transfers, self._get)

    @shielded(_no_page_of_any)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools in one call; for each pool and page whether the pool has it now."""
        return self._batch_v2(transfers, self._set)

    def _batch_v2(
        self,
        transfers: Sequence[PoolTransfer],
        move: Callable[[list[tuple[str, Any, Any]]], list[list[bool]]],
    ) -> dict[str, list[bool]]:
        parts = [(str(transfer.name), transfer.keys or [], transfer.host_indices) for transfer in transfers]
        answer = move(parts)
        return {transfer.name: pages for transfer, pages in zip(transfers, answer, strict=True)}

    # --- the pool --------------------------------------------------------------------------------------------

    def _get(self, parts: list[tuple[str, Any, Any]]) -> list[list[bool]]:
        names, pieces = self._blocks(parts)
        started_s = time.monotonic()
        sizes = self._named.load(names, pieces)
        done = [size == _bytes_of(block) for size, block in zip(sizes, pieces, strict=True)]
        return self._moved(Operation.GET, parts, pieces, done, started_s)

    def _set(self, parts: list[tuple[str, Any, Any]]) -> list[list[bool]]:
        names, pieces = self._blocks(parts)
        started_s = time.monotonic()
        done = self._named.save(names, pieces).there
        return self._moved(Operation.SET, parts, pieces, done, started_s)

    def _moved(
        self,
        way: Operation,
        parts: list[tuple[str, Any, Any]],
        pieces: list[list[memoryview]],
        done: list[bool],
        started_s: float,
    ) -> list[list[bool]]:
        """Count whole pages and bytes of a call; for each part and page whether it moved."""
        answer = self._by_page(parts, done)
        pages = sum(map(sum, answer))
        self._stats.moved(way, pages, _bytes_moved(pieces, done), time.monotonic() - started_s)
        return answer

    def _blocks(self, parts: list[tuple[str, Any, Any]]) -> tuple[list[str], list[list[memoryview]]]:
        """Names of the blocks of all parts (pool, page hashes, host indices), and where their bytes are."""
        names: list[str] = []
        pieces: list[list[memoryview]] = []
        for pool, keys, indices in parts:
            if indices is None:
                raise InvalidArgument(f"SGLang gave no host indices for the pool {pool}.")
            pieces += self._pools.get(pool).pieces(indices, len(keys), len(self._roots[pool])) if keys else []
            names += self._names(pool, keys)
        return names, pieces

    def _by_page(self, parts: list[tuple[str, Any, Any]], done: list[bool]) -> list[list[bool]]:
        answer, at = [], 0
        for pool, keys, _ in parts:
            each = len(self._roots[pool])
            answer.append(whole_pages(done[at : at + len(keys) * each], each))
            at += len(keys) * each
        return answer

    # --- the rest of the interface ---------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """A miss: pages move by batch_get_v1 (`interface_v1`)."""

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """Misses: pages move by batch_get_v1 (`interface_v1`)."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not stored: pages move by batch_set_v1 (`interface_v1`)."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not stored: pages move by batch_set_v1 (`interface_v1`)."""
        return False

    def clear(self) -> None:
        """From now on this rank neither finds pages that were stored before, nor does another engine find its new ones.

        Other engines keep theirs. To be called after weights changed in memory, which no file says.
        """
        self._generation = f"-{secrets.token_hex(8)}"
        _log.warning(
            Event.CONNECTOR_NEW_GENERATION, generation=self._generation, reason="the storage was cleared"
        )

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics of what moved since the last call."""
        return self._stats.take()

    def close(self) -> None:
        """End the connection. Calls under way end with misses; the host pools must live until they have."""
        self._link.close()
        self._in_place.close()

    def note_defect(self, method: str, error: Exception) -> None:
        """Log an error that the engine must not see."""
        with self._lock:
            self._defects += 1
            count = self._defects
        if count <= DEFECTS_LOGGED_MAX:
            _log.error(Event.CONNECTOR_DEFECT, method=method, error=type(error).__name__, reason=str(error))


def _bytes_of(pieces: Sequence[memoryview]) -> int:
    return sum(piece.nbytes for piece in pieces)


def _bytes_moved(blocks: Sequence[Sequence[memoryview]], done: Sequence[bool]) -> int:
    return sum(_bytes_of(block) for block, ok in zip(blocks, done, strict=True) if ok)

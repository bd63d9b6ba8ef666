"""Real host pools of SGLang with known bytes, and backends on a real pool made by SGLang's own loader."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch

LAYERS, HEADS, HEAD_DIM, PAGE, PAGES = 3, 4, 16, 8, 12
TOKENS = PAGE * PAGES
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
LOADER = {
    "backend_name": "mooncache",
    "module_path": "mooncache.connectors.sglang",
    "class_name": "MooncacheHiCache",
    "interface_v1": 1,
}
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def mha_pool(
    layout: str, *, heads: int = HEADS, page: int = PAGE, dtype: Any = torch.float16, **more: Any
) -> Any:
    """A host pool of keys and values over a device pool in host memory, filled with bytes that differ everywhere."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device = MHATokenToKVPool(TOKENS, page, dtype, heads, HEAD_DIM, LAYERS, "cpu", False)
        pool = MHATokenToKVPoolHost(
            device._mha_buffer_info(),
            1.0,
            0,
            page,
            layout,
            pin_memory=False,
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=LAYERS,
            host_token_capacity=TOKENS,
            **more,
        )
    return fill(pool)


def mla_pool(layout: str, *, page: int = PAGE, dtype: Any = torch.float16) -> Any:
    """A host pool of latent vectors."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device = MLATokenToKVPool(TOKENS, page, dtype, 24, 8, LAYERS, "cpu", False)
        pool = MLATokenToKVPoolHost(
            device._mla_buffer_info(),
            1.0,
            0,
            page,
            layout,
            pin_memory=False,
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=LAYERS,
            target_layer_num=LAYERS,
            host_token_capacity=TOKENS,
        )
    return fill(pool)


def fill(pool: Any, seed: int = 1) -> Any:
    """Random bytes everywhere in the pool."""
    maker = torch.Generator().manual_seed(seed)
    raw = pool.kv_buffer.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=maker))
    return pool


def page_bytes(pool: Any, page: int) -> bytes:
    """SGLang's own flat copy of a page."""
    flat = pool.get_data_page(page * pool.page_size, flat=True)
    return bytes(flat.contiguous().view(torch.uint8).numpy())


def indices(pages: list[int], page: int = PAGE) -> torch.Tensor:
    """Host indices of pages."""
    return torch.cat([torch.arange(at * page, (at + 1) * page, dtype=torch.int64) for at in pages])


def prompt(pages: int, name: str, page: int = PAGE) -> list[int]:
    """Tokens of a prompt that no other name has."""
    maker = random.Random(name)
    return [maker.randrange(50_000) for _ in range(pages * page)]


def hashes(tokens: list[int], page: int = PAGE) -> list[str]:
    """SGLang's own hashes of the pages of a prompt."""
    from sglang.srt.mem_cache.utils import get_hash_str

    found = get_hash_str(tokens, None, page)
    assert isinstance(found, list)
    return found


def config(extra: dict[str, Any], **more: Any) -> Any:
    """What SGLang gives a backend."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "any name",
    }
    return HiCacheStorageConfig(**{**values, **more}, extra_config={**LOADER, **extra})


def load_backend(pool: Any, extra: dict[str, Any], **more: Any) -> Any:
    """The backend of one rank, as SGLang's controller makes it."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    backend = StorageBackendFactory.create_backend("dynamic", config(extra, **more), pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend

"""SGLang's own controller with its threads: it backs pages up and prefetches them through the backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import ConfigInvalid
from tests.sglang.package import need_sglang

need_sglang()

from tests.sglang import pools  # noqa: E402
from tests.sglang.pools import PAGE, fill, hashes, indices, page_bytes, prompt  # noqa: E402

WAIT_S = 90
ONE_RANK = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}


@pytest.fixture
def attach(model_dir: Path, cluster: EmbeddedCluster) -> Callable[..., Any]:
    """A context with a controller on a host pool, as an engine of one rank has it, attached to the backend."""

    @contextmanager
    def attached(host_pool: Any, **extra: Any) -> Iterator[Any]:
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.runtime_context import get_context, get_parallel

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            device = MHATokenToKVPool(
                pools.TOKENS, PAGE, torch.float16, pools.HEADS, pools.HEAD_DIM, pools.LAYERS, "cpu", False
            )
        allocator = SimpleNamespace(get_kvcache=lambda: device)
        settings = {**pools.LOADER, "mooncache.state_dir": str(cluster.state_dir), **extra}
        published = get_context().override_server_args(model_path=str(model_dir))
        with published, get_parallel().override(**ONE_RANK):
            controller = HiCacheController(
                allocator, host_pool, PAGE, None, None, enable_storage_metrics=True
            )
            controller.attach_storage_backend("dynamic", PAGE, "served", settings)
            try:
                yield controller
            finally:
                controller.detach_storage_backend()

    return attached


def backed_up(controller: Any, keys: list[str], pages: list[int], tokens: list[int]) -> int:
    """Tokens that the controller stored."""
    controller.write_storage(indices(pages), tokens, keys)
    done = controller.ack_backup_queue.get(timeout=WAIT_S)
    return int(done.completed_tokens)


def prefetched(controller: Any, tokens: list[int], pages: list[int]) -> int:
    """Tokens that the controller found and then brought into these pages."""
    controller.prefetch("request", tokens)
    operation = controller.prefetch_hit_queue.get(timeout=WAIT_S)
    if not operation.hash_value:
        return 0
    operation.host_indices = indices(pages[: len(operation.hash_value)])
    controller.prefetch_buffer.put(operation)
    completed = 0
    while True:
        ack = controller.ack_prefetch_queue.get(timeout=WAIT_S)
        completed = ack.completed_tokens or completed
        if ack.completed_req:
            return int(completed)


@pytest.mark.parametrize("layout", pools.LAYOUTS)
def test_pages_that_one_engine_backed_up_are_prefetched_by_another(attach: Any, layout: str) -> None:
    ours, theirs = pools.mha_pool(layout), fill(pools.mha_pool(layout), seed=6)
    tokens = prompt(4, f"controller {layout}")
    with attach(ours) as writer:
        assert type(writer.storage_backend).__name__ == "MooncacheHiCache"
        assert backed_up(writer, hashes(tokens)[:3], [0, 1, 2], tokens[: 3 * PAGE]) == 3 * PAGE
        assert writer.storage_backend.get_stats().backup_pgs == [3]
    with attach(theirs) as reader:
        assert prefetched(reader, tokens, [5, 6, 7, 8]) == 3 * PAGE
        assert reader.storage_backend.get_stats().prefetch_pgs == [3]
    assert [page_bytes(theirs, 5 + i) for i in range(3)] == [page_bytes(ours, i) for i in range(3)]


def test_an_unknown_prompt_is_not_found(attach: Any) -> None:
    with attach(pools.mha_pool("page_first")) as controller:
        assert prefetched(controller, prompt(2, "never stored"), [0, 1]) == 0


def test_more_pages_than_one_call_has(attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import cache_controller

    monkeypatch.setattr(cache_controller, "STORAGE_BATCH_SIZE", 2)
    pool, tokens = pools.mha_pool("page_first"), prompt(5, "batches")
    with attach(pool) as controller:
        assert backed_up(controller, hashes(tokens), [0, 1, 2, 3, 4], tokens) == 5 * PAGE
        assert prefetched(controller, tokens, [5, 6, 7, 8, 9]) == 5 * PAGE
    assert page_bytes(pool, 9) == page_bytes(pool, 4)


def test_a_configuration_error_reaches_whoever_attaches(attach: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigInvalid, match="mooncache up"),
        attach(pools.mha_pool("page_first"), **{"mooncache.state_dir": str(tmp_path)}),
    ):
        pytest.fail("it was attached")

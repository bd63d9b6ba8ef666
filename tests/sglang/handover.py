"""Ranks of engines with the transfer backend: real pools and metadata of SGLang, its manager, sender and receiver."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mooncache.connectors.sglang.handover.plugin import register
from tests.conditions import wait_until

LAYERS, HEADS, HEAD_DIM, PAGE, PAGES = 3, 4, 16, 8, 24
LATENT = 32


@dataclass
class RankUnderTest:
    """One rank: its pool's tensors, its metadata, its manager."""

    manager: Any
    pool: Any
    metadata: Any
    states: list[torch.Tensor]

    def buffers(self) -> list[torch.Tensor]:
        """Tensors of keys and values, [tokens, heads, dim] each; the page after the last one is SGLang's own."""
        found = getattr(self.pool, "kv_buffer", None)
        return list(found) if found is not None else [*self.pool.k_buffer, *self.pool.v_buffer]

    def page(self, number: int) -> list[torch.Tensor]:
        """The bytes of a page of each buffer."""
        return [each[number * PAGE : (number + 1) * PAGE].view(torch.uint8) for each in self.buffers()]

    def close(self) -> None:
        """End its threads."""
        self.manager.teardown()


def fill(rank: RankUnderTest, seed: int) -> None:
    """Bytes that differ everywhere."""
    maker = torch.Generator().manual_seed(seed)
    for each in [*rank.buffers(), *rank.states]:
        raw = each.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=maker))


def free_port() -> int:
    """A port that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def engine_process(port: int, **fields: Any) -> Iterator[None]:
    """What an engine publishes in its process before it makes its managers."""
    from sglang.srt.runtime_context import get_context, get_parallel

    register()
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    settings = {"host": "127.0.0.1", "disaggregation_bootstrap_port": port, "device": "cpu", **fields}
    one = {
        "pp_rank": 0,
        "pp_group": None,
        "attn_cp_rank": 0,
        "attn_dp_rank": 0,
        "attn_tp_rank": 0,
        "attn_dcp_rank": 0,
        "dp_rank": None,
    }
    with get_context().override_server_args(**settings), get_parallel().override(**one):
        yield


def make_rank(
    mode: str, *, ranks: int = 1, rank: int = 0, heads: int = HEADS, latent: bool = False, states: str = ""
) -> RankUnderTest:
    """A rank of a model with `heads` KV heads, within `engine_process`."""
    from sglang.srt.disaggregation.utils import (
        DisaggregationMode,
        KVClassType,
        MetadataBuffers,
        TransferBackend,
        get_kv_class,
    )
    from sglang.srt.runtime_context import get_parallel, get_server_args

    each = max(1, heads // ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool = _latent_pool() if latent else _pool(each)
        metadata = MetadataBuffers(8, 16, torch.float32, 0)
    rows = [torch.zeros(10, 96, dtype=torch.uint8) for _ in range(2)] if states else []
    arguments = _arguments(pool, metadata, rows, states)
    arguments.engine_rank, arguments.kv_head_num, arguments.total_kv_head_num = rank, each, heads
    manager_class = get_kv_class(TransferBackend("mooncache"), KVClassType.MANAGER)
    sizes = {
        "tp_size": ranks,
        "attn_tp_size": ranks,
        "moe_tp_size": ranks,
        "attn_tp_rank": rank,
        "tp_rank": rank,
    }
    with get_parallel().override(**sizes):
        manager = manager_class(arguments, DisaggregationMode(mode), get_server_args(), latent)
    return RankUnderTest(manager, pool, metadata, rows)


def _pool(heads: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(PAGE * PAGES, PAGE, torch.float16, heads, HEAD_DIM, LAYERS, "cpu", False)


def _latent_pool() -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(PAGE * PAGES, PAGE, torch.float16, LATENT - 8, 8, LAYERS, "cpu", False)


def _arguments(pool: Any, metadata: Any, states: list[torch.Tensor], kind: str) -> Any:
    from sglang.srt.disaggregation.base import KVArgs
    from sglang.srt.disaggregation.base.conn import StateType

    found = KVArgs()
    found.kv_data_ptrs, found.kv_data_lens, found.kv_item_lens = pool.get_contiguous_buf_infos()
    found.kv_layer_ids = list(range(LAYERS)) * (len(found.kv_data_ptrs) // LAYERS)
    found.aux_data_ptrs, found.aux_data_lens, found.aux_item_lens = metadata.get_buf_infos()
    found.state_types = [StateType(kind)] if kind else []
    found.state_data_ptrs = [[each.data_ptr() for each in states]] if kind else []
    found.state_data_lens = [[each.nbytes for each in states]] if kind else []
    found.state_item_lens = [[each[0].nbytes for each in states]] if kind else []
    found.state_layer_ids = [[0, 1]] if kind else []
    found.state_dim_per_tensor = []
    found.kv_cache_dtype_str, found.page_size, found.gpu_id = "float16", PAGE, 0
    found.system_dp_rank, found.pp_rank, found.prefill_start_layer = 0, 0, 0
    found.rust_http_port = None
    return found


class Request:
    """One request on one prefill rank and on one decode rank, as the two schedulers drive it."""

    def __init__(self, address: str, room: int) -> None:
        from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

        backend = TransferBackend("mooncache")
        self._sender = get_kv_class(backend, KVClassType.SENDER)
        self._receiver = get_kv_class(backend, KVClassType.RECEIVER)
        self.address, self.room = address, room

    def receive(
        self, rank: RankUnderTest, pages: list[int], row: int = 0, states: list[Any] | None = None
    ) -> Any:
        """The decode rank's part: it has room for the pages."""
        wait_until(lambda: rank.manager.try_ensure_parallel_info(self.address), "the prefill engine is found")
        receiver = self._receiver(rank.manager, self.address, self.room)
        receiver.init(0)
        receiver.send_metadata(np.array(pages, np.int32), row, states)
        return receiver

    def send(self, rank: RankUnderTest) -> Any:
        """The prefill rank's part, which waits for the other one."""
        return self._sender(rank.manager, self.address, self.room)


def poll(one: Any) -> int:
    """The status, as a number."""
    return int(one.poll())


def wait_for_room(sender: Any) -> None:
    """The decode side has announced its rows."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    wait_until(lambda: poll(sender) != KVPoll.Bootstrapping, "the decode side has room")
    assert poll(sender) == KVPoll.WaitingForInput


def send_chunks(sender: Any, chunks: list[list[int]], row: int = 0, states: list[Any] | None = None) -> None:
    """All pages, chunk after chunk; states and metadata go with the last."""
    sender.init(sum(map(len, chunks)), row)
    for at, pages in enumerate(chunks):
        last = at + 1 == len(chunks)
        sender.send(np.array(pages, np.int32), states if last else None)


def ended(one: Any) -> int:
    """The status in which it ends."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    wait_until(lambda: poll(one) in (KVPoll.Success, KVPoll.Failed), "it ends")
    return poll(one)


def reason(one: Any) -> str:
    """Why it has failed, as SGLang tells the client."""
    try:
        one.failure_exception()
    except Exception as error:
        return str(error)
    raise AssertionError("it has not failed")

"""The connector beside the model: blocks into the engine's memory before a step, and out of it after the step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from mooncache.connectors.tensorrt_llm.engine_side import side_of
from mooncache.connectors.tensorrt_llm.interface import base_class
from mooncache.errors import EngineFailed


class MooncacheWorker(base_class("KvCacheConnectorWorker")):  # type: ignore[misc]
    """TensorRT-LLM calls it in the process of the model."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._side = side_of(llm_args)
        self._cache: torch.Tensor | None = None

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """The engine's memory, [blocks, ...]."""
        self._cache = kv_cache_tensor
        self._side.registered(kv_cache_tensor)

    def start_load_kv(self, stream: Any) -> None:
        """Copy what was promised; the step that follows on `stream` reads it."""
        orders, cache = self.get_connector_meta(), self._memory()
        for load in orders.loads if orders is not None else ():
            block = self._side.take(load.request_id, load.number)
            with torch.cuda.stream(stream) if cache.is_cuda else nullcontext():
                cache[load.block_id].copy_(block)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: all layers of a block are there."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: whole blocks are saved after the step."""

    def wait_for_save(self, stream: Any) -> None:
        """Copy complete blocks into host memory. The engine may reuse them afterwards."""
        orders = self.get_connector_meta()
        if orders is None or not orders.saves:
            return
        stream.synchronize()
        chosen = torch.tensor([save.block_id for save in orders.saves], device=self._memory().device)
        self._side.save([save.key for save in orders.saves], self._memory().index_select(0, chosen).cpu())

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """None: nothing goes on after a step."""
        del finished_gen_req_ids, started_loading_req_ids
        return [], []

    def _memory(self) -> torch.Tensor:
        if self._cache is None:
            raise EngineFailed("The engine has registered no KV memory.")
        return self._cache

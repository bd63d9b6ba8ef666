"""`MooncacheConnector`: vLLM's connector interface over the two halves of the connector.

Idea: this class only translates. It holds one rule of its own: nothing that goes wrong in the connector may reach the
engine. A method that fails returns what a connector without a cache would return, and the defect is logged and counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from mooncache.connectors.vllm.core import refusals
from mooncache.connectors.vllm.core.groups import groups_of
from mooncache.connectors.vllm.engine_passport import engine_version
from mooncache.connectors.vllm.messages import Handshake, StepOrders
from mooncache.connectors.vllm.scheduler_side import SchedulerSide
from mooncache.connectors.vllm.settings import read_settings
from mooncache.connectors.vllm.stats import ConnectorPromMetrics, ConnectorStats
from mooncache.connectors.vllm.worker_side import WorkerSide
from mooncache.errors import ConfigInvalid, MooncacheError
from mooncache.kvcache.in_place import RegisteredMemory
from mooncache.kvcache.kv_types import why_garbage
from mooncache.kvcache.pool_link import PoolLink, connect_pool, instance_name
from mooncache.runtime.logs import Event, get_logger

_log = get_logger(__name__)
DEFECTS_LOGGED_MAX = 100
Method = TypeVar("Method", bound=Callable[..., Any])


def shielded(answer: Callable[[], Any]) -> Callable[[Method], Method]:
    """The value of `answer()` for the engine when the method raises; the error is logged and counted."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: MooncacheConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  (see the module's text)
                self.note_defect(method.__name__, error)
                return answer()

        return call  # type: ignore[return-value]

    return wrap


_HEADS_FIRST: Final = "LBHNC"
"""vLLM's name: layers, blocks, heads, tokens, content."""


def nothing() -> None:
    """The answer of methods that return None."""


class MooncacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KV blocks in the Mooncache pool. See docs/vllm-connector.md for its settings.

    Raises:
        ConfigInvalid: at construction only, for settings that cannot be used and engines that would answer garbage.
    """

    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        settings = read_settings(extra)
        refuse_garbage(vllm_config)
        self._defects = 0
        self._received_bad: set[int] = set()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        refusal = refusals.of_engine(
            enabled=settings.connector.enabled, config=vllm_config, cache_config=kv_cache_config
        )
        if refusal is not None:
            _log.warning(Event.CONNECTOR_OFF, code=refusal.code, reason=refusal.text)
        name = instance_name(f"vllm-{self._kv_transfer_config.engine_id}")
        build = f"vllm {engine_version()}"

        def connect(prepare: RegisteredMemory | None = None) -> PoolLink:
            targets = settings.master_targets or None
            maker = connect_pool(
                master_targets=targets, state_dir=str(settings.state_dir), name=name, build=build
            )
            return PoolLink(maker, prepare=prepare)

        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                settings,
                None if refusal else connect(),
                groups=None if refusal else groups_of(kv_cache_config, vllm_config.cache_config.block_size),
                block_tokens=vllm_config.cache_config.block_size,
                may_cut=self._kv_transfer_config.kv_load_failure_policy == "recompute",
                refusal=refusal,
                lora_config=vllm_config.lora_config,
            )
        else:
            self._worker = WorkerSide(settings, None if refusal else connect, vllm_config, kv_cache_config)

    def note_defect(self, where: str, error: Exception) -> None:
        """Count it; the first ones are logged."""
        self._defects += 1
        side = self._scheduler or self._worker
        if side is not None:
            side.stats.count("defects")
        if self._defects <= DEFECTS_LOGGED_MAX:
            _log.error(Event.CONNECTOR_DEFECT, where=where, reason=repr(error), exc_info=error)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is given up is a later miss and nothing else."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Hooks per layer do not run while a full graph is replayed."""
        try:
            return read_settings(extra_config).connector.layerwise
        except MooncacheError:
            return False  # the connector itself says so at its start

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads before tokens where blocks lie in parts by heads: a part has one range in each layer then.

        vLLM takes another layout, with a warning, where its attention does not have this one.
        """
        try:
            settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        except MooncacheError:
            return None
        return _HEADS_FIRST if settings.connector.head_groups else None

    # --- worker ----------------------------------------------------------------------------------------------

    @shielded(nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._worker is not None and kv_caches:
            try:
                self._worker.register(kv_caches)
            except Exception as error:
                refusal = self._worker.refuse(error)
                _log.error(Event.CONNECTOR_OFF, code=refusal.code, reason=refusal.text)
                if not isinstance(error, (MooncacheError, OSError)):
                    raise  # a defect, which is counted as one

    @shielded(nothing)
    def unregister_kv_caches(self) -> None:
        """Before sleep (vLLM 0.33): no thread touches the tensors until they are back at the same addresses."""
        if self._worker is not None:
            self._worker.drain()

    def restore_kv_caches(self) -> None:
        """After sleep: the tensors are where they were."""

    @shielded(nothing)
    def get_handshake_metadata(self) -> Handshake | None:
        return self._worker.handshake() if self._worker is not None else None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Nothing to do: blocks under a save are pinned, and a preempted request never loads."""

    def _orders(self) -> StepOrders:
        orders = self._connector_metadata
        return orders if isinstance(orders, StepOrders) else StepOrders()

    @shielded(nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: requests run after their blocks have come."""

    @shielded(nothing)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.layer_done(self._orders(), layer_name)

    @shielded(nothing)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_saves(self._orders())

    @shielded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        received = self._worker.received(idle=self._orders().idle)
        self._received_bad |= received.bad_blocks
        return KVConnectorTransferResults(finished_recving=received.finished, failed_recving=received.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For runners that do not know get_transfer_results. They cannot hear of loads that failed as a whole. Such a
        request does not go on: it would answer from KV that did not come."""
        results = self.get_transfer_results(finished_req_ids)
        return None, (results.finished_recving - results.failed_recving) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded, in the same pass as the end of their load."""
        bad, self._received_bad = self._received_bad, set()
        return bad

    @shielded(nothing)
    def build_connector_worker_meta(self) -> Any:
        return self._worker.take_report() if self._worker is not None else None

    # --- scheduler -------------------------------------------------------------------------------------------

    @shielded(nothing)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        shards = [metadata[rank] for rank in sorted(metadata)]
        parallel = self._vllm_config.parallel_config
        if self._scheduler is not None and len(shards) == (
            parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        ):
            self._scheduler.handshake(shards)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): part for rank, part in metadata.items()})

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    @shielded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Not shielded: the request waits for this load, and would never run if ordering it failed unseen."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """The loads alone: a defect in planning saves must not lose them, since requests wait for them."""
        if self._scheduler is None:
            return StepOrders()
        orders = self._scheduler.orders(scheduler_output)
        self._add_saves(orders, scheduler_output)
        return orders

    @shielded(nothing)
    def _add_saves(self, orders: StepOrders, scheduler_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.add_saves(orders, scheduler_output)

    @shielded(nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.reported(connector_output.kv_connector_worker_meta)

    @shielded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request, block_ids) if self._scheduler is not None else None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        answer: tuple[bool, dict[str, Any] | None] = self.request_finished_all_groups(request, (block_ids,))
        return answer

    def has_pending_push_work(self) -> bool:
        """True while blocks are pinned, which keeps the engine stepping until they are released."""
        return self._scheduler is not None and self._scheduler.saves_under_way

    @shielded(lambda: False)
    def reset_cache(self) -> bool:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # --- both ------------------------------------------------------------------------------------------------

    @shielded(nothing)
    def get_kv_connector_stats(self) -> ConnectorStats | None:
        side = self._scheduler or self._worker
        return side.take_stats() if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data) if data is not None else ConnectorStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @shielded(nothing)
    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.close()


def refuse_garbage(config: Any) -> None:
    """Raises ConfigInvalid for an engine that would answer garbage, with the types as vLLM understood them."""
    from vllm.platforms import current_platform

    problem = why_garbage(
        str(config.cache_config.cache_dtype), str(config.model_config.dtype), cpu=current_platform.is_cpu()
    )
    if problem:
        raise ConfigInvalid(problem)

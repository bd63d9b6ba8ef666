"""The half of the connector inside vLLM's worker: knows the KV tensors, moves blocks, reports what ended.

Idea: the engine's thread only hands over orders and takes reports; bytes move on the mover's threads, straight
between the tensors and the pool. A load counts as received only when its native call has returned, so that vLLM, which
keeps the blocks of an aborted request until then, never gives away a block that is still being written.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mooncache.client.figures import Figures, figures, growth
from mooncache.client.keys import split_keys
from mooncache.config import load
from mooncache.connectors.vllm.core.idle import IdleWait
from mooncache.connectors.vllm.core.layer_hooks import replays_full_graphs, why_whole_blocks
from mooncache.connectors.vllm.core.refusals import PoolRefusal, Uncached, said
from mooncache.connectors.vllm.core.request import BlockTransfer
from mooncache.connectors.vllm.engine_passport import engine_version, in_memory, read_passport, write_passport
from mooncache.connectors.vllm.messages import Handshake, LoadEnd, SaveEnd, StepOrders, StepReport
from mooncache.connectors.vllm.settings import ConnectorSettings
from mooncache.connectors.vllm.stats import ConnectorStats
from mooncache.connectors.vllm.weights import WeightWatch, models_in_memory
from mooncache.errors import Closed
from mooncache.kvcache.core.weighing import ShardLoad
from mooncache.kvcache.in_place import RegisteredMemory
from mooncache.kvcache.keys import passport_to_json
from mooncache.kvcache.layerwise import LayerSaver
from mooncache.kvcache.mover import Mover
from mooncache.kvcache.pool_link import PoolLink
from mooncache.kvcache.tensors import block_memory, layout_of
from mooncache.kvcache.transfers import LoadReport, MoveFailure, SaveReport, TransferJob
from mooncache.runtime import tracing
from mooncache.runtime.logs import Event, get_logger

_log = get_logger(__name__)
_NOT_READ = "the weights were not read again"
_FLUSH_S = 5.0
_CLIENT_READ_S = 5.0


@dataclass
class Received:
    """What get_transfer_results hands to vLLM."""

    finished: set[str]
    bad_blocks: set[int]


class WorkerSide:
    """The half of the connector in vLLM's worker. Called on the worker's main thread."""

    def __init__(
        self,
        settings: ConnectorSettings,
        connect: Callable[[RegisteredMemory], PoolLink] | None,
        config: Any,
        cache_config: Any,
    ) -> None:
        self._settings = settings
        self._connect = connect
        self._config = config
        self._cache_config = cache_config
        self._link: PoolLink | None = None
        self._in_place: RegisteredMemory | None = None
        self._mover: Mover | None = None
        self._layers: LayerSaver | None = None
        self._layered: dict[str, TransferJob] = {}
        self._passport = ""
        self._weights: WeightWatch | None = None
        self._broken_weights = ""
        self._reads = Uncached.KV_LAYOUT
        self._refusal: PoolRefusal | None = None
        self._loading: set[str] = set()
        self._stale: set[str] = set()
        self._facts: dict[str, Any] = {}
        self._block_bytes = 0
        self._shard = 0
        self._changed = threading.Event()
        self._idle = IdleWait()
        self._ends = StepReport()
        self._orders_hold = True
        self._refused: list[LoadReport] = []
        self._bad_blocks: set[int] = set()
        self.stats = ConnectorStats()
        self._was_usable: bool | None = None
        self._client_figures: Figures = {}
        self._client_read_s = 0.0

    # --- start -----------------------------------------------------------------------------------------------

    def register(self, tensors: dict[str, Any]) -> None:
        """The KV tensors are there: derive the passport, write the hand-over file, connect."""
        count = self._cache_config.num_blocks
        tensors = in_order(tensors)
        layers = {name: layout_of(tensor) for name, tensor in tensors.items()}
        first = next(iter(tensors.values()))
        dtype = str(first.dtype).removeprefix("torch.")
        self._reads = Uncached.WEIGHTS_UNREADABLE
        experts_move = bool(getattr(self._config.parallel_config, "enable_eplb", False))
        self._weights = WeightWatch(models_in_memory(), experts_move=experts_move)
        self._reads = Uncached.MODEL_UNREADABLE
        passport = read_passport(
            self._config,
            layers,
            dtype,
            count,
            self._settings.state_dir,
            chat_template=self._settings.chat_template,
        )
        self._reads = Uncached.KV_LAYOUT
        memory = block_memory(list(tensors.values()), count)
        self._block_bytes = memory.block_bytes
        self._passport = passport_to_json(passport)
        self._shard = passport.pp_rank * passport.tp_size + passport.tp_rank
        self._facts = {
            "kv_bytes_per_token": memory.block_bytes * passport.tp_size // passport.block_tokens,
            "kv_capacity_tokens": count * passport.block_tokens,
            "engine_version": engine_version(),
            "max_model_tokens": int(self._config.model_config.max_model_len),
            "pool": self._connect is not None,
        }
        if self._connect is None:
            path = self._settings.passport_path
            if (
                self._shard == 0 and path is not None
            ):  # else the scheduler's side writes it, who knows all shards
                write_passport(path, in_memory(passport, [self._weights.fingerprint]), **self._facts)
            return
        connector = self._settings.connector
        tracing.setup("engine", load())  # beside vLLM's own spans, in the same trace
        self._in_place = RegisteredMemory(memory, connector.registered_bytes_max)
        self._link = self._connect(self._in_place)
        self._mover = Mover(
            self._link,
            memory,
            load_threads=connector.load_threads,
            load_timeout_s=connector.load_timeout_s,
            save_timeout_s=connector.save_timeout_s,
            save_queue_bytes_max=connector.save_queue_bytes_max,
            changed=self._changed,
        )
        reason = why_whole_blocks(wanted=connector.layerwise, full_graphs=replays_full_graphs(self._config))
        _log.info(Event.CONNECTOR_SAVES, layerwise=not reason, reason=reason)
        if not reason:
            self._layers = LayerSaver(
                self._link,
                memory,
                list(tensors),
                self._layers_saved,
                timeout_s=connector.save_timeout_s,
                queue_bytes_max=connector.save_queue_bytes_max,
            )

    def refuse(self, error: Exception) -> PoolRefusal:
        """`register` failed: what the scheduler's side is to know of it."""
        self._refusal = PoolRefusal(self._reads, said(error))
        return self._refusal

    def handshake(self) -> Handshake | None:
        """For the scheduler's side, also of a worker that was to take part and cannot; None when it was not to."""
        if self._refusal is not None:
            return Handshake("", 0, "", {}, self._refusal)
        if not (self._passport and self._mover and self._weights):
            return None
        return Handshake(self._passport, self._block_bytes, self._weights.fingerprint, self._facts)

    # --- a step ----------------------------------------------------------------------------------------------

    def look_at_weights(self, orders: StepOrders) -> bool:
        """Before anything of a step: whether its orders are for the weights that lie in memory.

        Weights change between steps only. Loads that are under way then are useless.
        """
        if self._weights is None or not orders.weights:
            return True
        try:
            if self._broken_weights or self._weights.changed():
                self._broken_weights = self._broken_weights or _NOT_READ
                self._weights.renew()
                self._broken_weights = ""
        except Exception as error:  # noqa: BLE001  (weights without an identity: no key is right for them)
            if not self._broken_weights or self._broken_weights == _NOT_READ:
                _log.error(Event.CONNECTOR_OFF, code=Uncached.WEIGHTS_UNREADABLE, reason=said(error))
            self._broken_weights = said(error)
        if not self._broken_weights and orders.weights[self._shard] == self._weights.fingerprint:
            return True
        if not self._broken_weights:
            self._ends.weights[self._shard] = self._weights.fingerprint
        self._stale |= self._loading
        for name in self._loading:
            if self._mover is not None:
                self._mover.cancel(name)
        return False

    def start_loads(self, orders: StepOrders) -> None:
        """Start the step's loads, for vLLM's `start_load_kv`."""
        self._orders_hold = self.look_at_weights(orders)
        self._ends.step = orders.step
        for transfer in orders.loads:
            try:
                assert self._mover is not None
                if not self._orders_hold:
                    self._refused.append(
                        LoadReport(transfer.name, transfer.blocks, 0, 0, 0.0, MoveFailure.STALE)
                    )
                    continue
                self._mover.load(self._job(transfer))
                self._loading.add(transfer.name)
            except Exception:  # noqa: BLE001  (the request waits for an end: it gets one)
                self._refused.append(
                    LoadReport(transfer.name, transfer.blocks, 0, 0, 0.0, MoveFailure.ABSENT)
                )
        for name in orders.cancels:
            if self._mover is not None:
                self._mover.cancel(name)

    def layer_done(self, orders: StepOrders, layer: str) -> None:
        """Handle vLLM's `save_kv_layer`: with `layerwise` the layer's part of the step's blocks is sent at once."""
        if self._layers is not None and orders.saves and self._orders_hold:
            self._layers.layer_done([self._job(transfer) for transfer in orders.saves], layer)
            self.stats.count("hooked_layers")

    def start_saves(self, orders: StepOrders) -> None:
        """Start the step's saves, for vLLM's `wait_for_save`. Unpinned blocks are saved before it returns."""
        layered: list[TransferJob] = []
        for transfer in orders.saves:
            if self._mover is None or not self._orders_hold:
                self._ends.saves[transfer.name] = SaveEnd(frozenset())
                if not self._orders_hold:
                    self.stats.count("dropped_blocks", len(transfer.blocks), MoveFailure.STALE)
                    if self._mover is not None:
                        self._mover.give_up(self._job(transfer))
            elif self._layers is not None:
                job = self._job(transfer)
                self._layered[job.name] = job
                layered.append(job)
            else:
                self._mover.save(self._job(transfer))
        if self._layers is not None and layered:
            self._layers.finish(*layered)
        if orders.saves and not orders.pinned:
            self._wait_saved(self._settings.connector.save_timeout_s * 2)

    def _layers_saved(self, report: SaveReport) -> None:
        """A save by layers has ended. A block may lie elsewhere than at the node where it is awaited: whoever waits for
        it there looks again. Called by the saver's thread, or by `start_saves`."""
        assert self._mover is not None
        job = self._layered.pop(report.name, None)
        if job is not None:
            stored = set() if job.node else set(report.stored)
            unsaid = tuple(key for at, key in enumerate(job.keys) if at not in stored)
            self._mover.give_up(replace(job, keys=unsaid))
        self._mover.report_save(report)

    def _wait_saved(self, timeout_s: float) -> None:
        if self._mover is not None:
            self._mover.wait_saved(timeout_s)
        if self._layers is not None:
            self._layers.wait_saved(timeout_s)

    def drain(self) -> None:
        """Wait until no save reads the tensors; requests that load have ended when vLLM asks for it."""
        self._wait_saved(self._settings.connector.save_timeout_s)

    def _job(self, transfer: BlockTransfer) -> TransferJob:
        keys = transfer.keys[self._shard]
        trace = tracing.extract({tracing.TRACEPARENT: transfer.traceparent}) if transfer.traceparent else None
        return TransferJob(
            transfer.name,
            tuple(split_keys(keys)),
            tuple(transfer.blocks),
            trace,
            transfer.pace,
            transfer.awaited,
            transfer.await_s,
            transfer.node,
            transfer.is_awaited,
            transfer.session_token,
        )

    def received(self, *, idle: bool) -> Received:
        """Ended loads, and blocks that could not be loaded; waits a moment when the engine is idle."""
        refused, self._refused = self._refused, []
        if self._mover is None:
            return self._taken(refused)
        waiting = idle and bool(self._mover.loading) and not refused
        wait_s = self._idle.next_s(time.monotonic(), waiting=waiting)
        if wait_s:
            self._changed.wait(wait_s)
        self._changed.clear()
        for save in self._mover.take_saves():
            self._note_save(save)
        return self._taken(refused + self._mover.take_loads())

    def _taken(self, reports: list[LoadReport]) -> Received:
        got = Received(set(), set())
        for report in reports:
            self._loading.discard(report.name)
            if report.name in self._stale:
                self._stale.discard(report.name)
                report.loaded, report.loaded_bytes, report.staged_bytes = 0, 0, 0
                report.reason = MoveFailure.STALE
            got.finished.add(report.name)
            got.bad_blocks.update(report.blocks[report.loaded :])
            self._ends.loads[report.name] = LoadEnd(
                report.loaded,
                report.loaded_bytes,
                report.transfer_s,
                report.reason,
                waited_s=report.waited_s,
                hidden_s=report.hidden_s,
                by_shard={
                    self._shard: ShardLoad(
                        report.loaded, report.transfer_s, is_cut=report.reason is MoveFailure.TOO_SLOW
                    )
                },
                staged_bytes=report.staged_bytes,
            )
            self.stats.count("loads")
            self.stats.count("loaded_blocks", report.loaded)
            self.stats.count("loaded_bytes", report.loaded_bytes)
            self.stats.count_path("load_path_bytes", report.loaded_bytes, report.staged_bytes)
            self.stats.count("hit_tokens", report.loaded * self._config.cache_config.block_size)
            self.stats.seen("load_seconds", report.transfer_s)
            missing = len(report.blocks) - report.loaded
            if missing:
                self.stats.count("load_failures", missing, report.reason)
            if missing and report.reason not in {MoveFailure.TOO_SLOW, MoveFailure.NOT_COME}:
                _log.warning(
                    Event.CONNECTOR_LOAD_FAILED, request=report.name, reason=report.reason, blocks=missing
                )
        return got

    def _note_save(self, report: SaveReport) -> None:
        self._ends.saves[report.name] = SaveEnd(frozenset(report.stored))
        stored = len(report.stored) - report.present
        if stored:
            self.stats.count("saved_blocks", stored)
            self.stats.count("saved_bytes", report.saved_bytes)
            self.stats.count_path("save_path_bytes", report.saved_bytes, report.staged_bytes)
            self.stats.seen("save_seconds", report.seconds)
        if report.present:
            self.stats.count("present_blocks", report.present)
        for reason, blocks in report.lost.items():
            self.stats.count("dropped_blocks", blocks, reason)

    def take_report(self) -> StepReport | None:
        """What ended since the last call, for the scheduler's side."""
        ends = self._ends
        if not (ends.loads or ends.saves or ends.weights or ends.step):
            return None
        taken, self._ends = self._ends, StepReport()
        return taken

    def take_stats(self) -> ConnectorStats | None:
        """Counts since the last call."""
        if self._link is not None and self._was_usable is not self._link.usable:
            self._was_usable = self._link.usable
            self.stats.gauge("pool_up", float(self._was_usable))
        self._count_client(time.monotonic())
        if self.stats.is_empty():
            return None
        if self._mover is not None:
            self.stats.gauge("saving_bytes", float(self._mover.saving_bytes))
        taken, self.stats = self.stats, ConnectorStats()
        return taken

    def _count_client(self, now_s: float) -> None:
        """What the client moved and by which way, every few seconds: reading it costs more than a step may."""
        client = self._link.client() if self._link is not None else None
        if client is None or now_s < self._client_read_s + _CLIENT_READ_S:
            return
        self._client_read_s = now_s
        with contextlib.suppress(Closed):
            now = figures(client.stats())
            for (name, label), amount in growth(self._client_figures, now).items():
                self.stats.count(name, amount, label)
            self._client_figures = now

    def close(self) -> None:
        """Let saves end for a moment, then end threads and connection. The tensors may go afterwards."""
        self._wait_saved(_FLUSH_S)
        if self._layers is not None:
            self._layers.close()
        if self._link is not None:
            self._link.close()
        if self._mover is not None:
            self._mover.close()
        if self._in_place is not None:
            self._in_place.close()
        tracing.shutdown()


def in_order(tensors: dict[str, Any]) -> dict[str, Any]:
    """Layers by name, numbers as numbers; layers that share the KV of another one are left out."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name in sorted(tensors, key=lambda text: [_word(part) for part in re.split(r"(\d+)", text)]):
        address = tensors[name].data_ptr()
        if address not in seen:
            seen.add(address)
            found[name] = tensors[name]
    return found


def _word(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)

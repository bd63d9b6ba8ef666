"""The half of the connector inside vLLM's worker: knows the KV tensors, moves blocks, reports what ended.

Idea: the engine's thread only hands over orders and takes reports; bytes move on the mover's threads, straight
between the tensors and the pool. A load counts as received only when its native call has returned, so that vLLM, which
keeps the blocks of an aborted request until then, never gives away a block that is still being written.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mooncache.client.figures import Figures, figures, growth
from mooncache.client.keys import split_keys
from mooncache.config import load
from mooncache.connectors.vllm.core.groups import KvGroups, groups_of
from mooncache.connectors.vllm.core.idle import IdleWait
from mooncache.connectors.vllm.core.kv_parts import RankParts
from mooncache.connectors.vllm.core.layer_hooks import replays_full_graphs, why_whole_blocks
from mooncache.connectors.vllm.core.refusals import PoolRefusal, Uncached, said
from mooncache.connectors.vllm.core.request import BlockTransfer
from mooncache.connectors.vllm.engine_passport import (
    engine_size,
    engine_version,
    in_memory,
    shard_of,
)
from mooncache.connectors.vllm.messages import Handshake, LoadEnd, SaveEnd, StepOrders, StepReport
from mooncache.connectors.vllm.part_memory import (
    by_group_of,
    rank_parts,
    read_passports,
    tensors_of,
    why_not_of_files,
)
from mooncache.connectors.vllm.settings import ConnectorSettings
from mooncache.connectors.vllm.stats import ConnectorStats
from mooncache.connectors.vllm.verifying import count_heard, make_verifier
from mooncache.connectors.vllm.weights import WeightWatch, models_in_memory
from mooncache.errors import Closed
from mooncache.kvcache.core.weighing import ShardLoad
from mooncache.kvcache.gpu_blocks import GpuBlocks
from mooncache.kvcache.grouped import GroupedMemory
from mooncache.kvcache.in_place import RegisteredMemory
from mooncache.kvcache.keys import passport_to_json
from mooncache.kvcache.layerwise import LayerSaver
from mooncache.kvcache.memory import HostMemory
from mooncache.kvcache.mover import Mover
from mooncache.kvcache.passport_file import write_passport
from mooncache.kvcache.pool_link import PoolLink
from mooncache.kvcache.tensors import block_memory
from mooncache.kvcache.transfers import LoadReport, MoveFailure, SaveReport, TransferJob
from mooncache.kvcache.verifier import ShadowReport, Verifier
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
    """Of loads of which the leading blocks are of use."""
    failed: set[str]
    """Loads of which nothing is of use, with several groups or a window."""


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
        self._verifier: Verifier | None = None
        self._heard: deque[ShadowReport] = deque()
        self._layered: dict[str, TransferJob] = {}
        self._groups = KvGroups(config.cache_config.block_size)
        if connect is not None:
            self._groups = groups_of(cache_config, config.cache_config.block_size)
        self._grouped: GroupedMemory | None = None
        self._parts: RankParts | None = None  # of each block, when they are shared over numbers of ranks
        self._as_loaded = ""
        self._passports: tuple[str, ...] = ()
        self._weights: WeightWatch | None = None
        self._broken_weights = ""
        self._reads = Uncached.KV_LAYOUT
        self._refusal: PoolRefusal | None = None
        self._loading: dict[str, int] = {}  # with the tokens that a whole load stands for
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
        connector = self._settings.connector
        by_group = self._in_parts(by_group_of(self._cache_config, self._groups, tensors))
        self._reads = Uncached.WEIGHTS_UNREADABLE
        experts_move = bool(getattr(self._config.parallel_config, "enable_eplb", False))
        self._weights = WeightWatch(models_in_memory(), experts_move=experts_move)
        self._reads = Uncached.MODEL_UNREADABLE
        passports = read_passports(self._config, self._settings, count, by_group, self._groups, self._parts)
        if self._parts is not None:
            self._as_loaded = self._fingerprint_of_files(self._parts)
        self._reads = Uncached.KV_LAYOUT
        memories = [block_memory(list(tensors.values()), count) for tensors in by_group]
        members = self._groups.members if self._parts is None else range(len(memories))
        self._block_bytes = sum(memories[member].block_bytes for member in members)
        self._passports = tuple(map(passport_to_json, passports))
        passport = passports[self._groups.lead]
        self._shard = shard_of(self._config)
        copies = passport.tp_size if self._parts is None else self._parts.shares / len(self._parts.own)
        self._facts = {
            "kv_bytes_per_token": int(self._block_bytes * copies) // passport.block_tokens,
            "kv_capacity_tokens": self._capacity_tokens(),
            "engine_version": engine_version(),
            "max_model_tokens": int(self._config.model_config.max_model_len),
            "pool": self._connect is not None,
            **engine_size(self._config),
        }
        if self._connect is None:
            path = self._settings.passport_path
            if (
                self._shard == 0 and path is not None
            ):  # else the scheduler's side writes it, who knows all shards
                write_passport(path, in_memory(passport, [self._weights.fingerprint]), self._facts)
            return
        tracing.setup("engine", load())  # beside vLLM's own spans, in the same trace
        memory: HostMemory | GpuBlocks | GroupedMemory = memories[0]
        if len(memories) > 1:
            memory = self._grouped = GroupedMemory(memories)
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
        self._verifier = make_verifier(
            connector, self._link, self._mover, memory, by_group, self._heard.append
        )
        reason = why_whole_blocks(
            wanted=connector.layerwise,
            full_graphs=replays_full_graphs(self._config),
            groups=len(memories),
            states=bool(self._groups.states),
        )
        _log.info(Event.CONNECTOR_SAVES, layerwise=not reason, reason=reason)
        if not reason:
            self._layers = LayerSaver(
                self._link,
                memories[0],
                list(by_group[0]),
                self._layers_saved,
                timeout_s=connector.save_timeout_s,
                queue_bytes_max=connector.save_queue_bytes_max,
            )

    def _in_parts(self, by_group: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The tensors of each part instead, if blocks are stored in parts. Raises InvalidArgument: they cannot be."""
        connector = self._settings.connector
        if not connector.head_groups or self._connect is None:
            return by_group
        self._reads = Uncached.HEAD_GROUPS
        self._parts = rank_parts(
            self._config, self._cache_config, by_group[0], connector.head_groups, connector.layer_groups
        )
        return [tensors_of(part, by_group[0]) for part in self._parts.own]

    def _fingerprint_of_files(self, parts: RankParts) -> str:
        """Of the weights in memory, if it is that of what the files say; else ""."""
        assert self._weights is not None
        reason = why_not_of_files(self._config)
        sizes = {"head_groups": parts.head_groups, "layer_groups": parts.layer_groups}
        _log.info(Event.CONNECTOR_PARTS, **sizes, parts=parts.numbers, writes=parts.writes, reason=reason)
        return "" if reason else self._weights.fingerprint

    def _capacity_tokens(self) -> int:
        """Tokens of which the engine can keep the KV. vLLM knows it where some layers keep only the last ones."""
        blocks = self._cache_config.num_blocks // len(self._groups)
        known = None if self._groups.is_plain else self._config.cache_config.kv_cache_size_tokens
        return int(known or blocks * self._groups.block_tokens)

    def refuse(self, error: Exception) -> PoolRefusal:
        """`register` failed: what the scheduler's side is to know of it."""
        self._refusal = PoolRefusal(self._reads, said(error))
        return self._refusal

    def handshake(self) -> Handshake | None:
        """For the scheduler's side, also of a worker that was to take part and cannot; None when it was not to."""
        if self._refusal is not None:
            return Handshake((), 0, "", {}, refusal=self._refusal)
        if not (self._passports and self._mover and self._weights):
            return None
        return Handshake(
            self._passports,
            self._block_bytes if self._writes else 0,
            self._weights.fingerprint,
            self._facts,
            verifies=self._verifier is not None,
            as_loaded=self._as_loaded,
        )

    @property
    def _writes(self) -> bool:
        """False when another rank has the same heads, and saves them."""
        return self._parts is None or self._parts.writes

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
        self._stale |= set(self._loading)
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
                self._loading[transfer.name] = transfer.tokens
            except Exception:  # noqa: BLE001  (the request waits for an end: it gets one)
                self._refused.append(
                    LoadReport(transfer.name, transfer.blocks, 0, 0, 0.0, MoveFailure.ABSENT)
                )
        for name in orders.cancels:
            if self._mover is not None:
                self._mover.cancel(name)

    def layer_done(self, orders: StepOrders, layer: str) -> None:
        """Handle vLLM's `save_kv_layer`: with `layerwise` the layer's part of the step's blocks is sent at once."""
        saves = [transfer for transfer in orders.saves if not transfer.verifies]
        if self._layers is not None and saves and self._orders_hold and self._writes:
            self._layers.layer_done([self._job(transfer) for transfer in saves], layer)
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
            elif not self._writes and not transfer.verifies:
                self._ends.saves[transfer.name] = SaveEnd(frozenset(range(len(transfer.blocks))))
            elif transfer.verifies and self._verifier is not None:
                self._verifier.check(self._job(transfer))
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
        if self._verifier is not None:
            self._verifier.wait_checked(timeout_s)

    def drain(self) -> None:
        """Wait until no save reads the tensors; requests that load have ended when vLLM asks for it."""
        self._wait_saved(self._settings.connector.save_timeout_s)

    def _job(self, transfer: BlockTransfer) -> TransferJob:
        trace = tracing.extract({tracing.TRACEPARENT: transfer.traceparent}) if transfer.traceparent else None
        job = TransferJob(
            transfer.name,
            (),
            tuple(transfer.blocks),
            trace,
            transfer.pace,
            transfer.awaited,
            transfer.await_s,
            transfer.node,
            transfer.is_awaited,
            transfer.session_token,
        )
        place = self._grouped.place if self._grouped is not None else lambda _, block: block
        if self._parts is not None:
            return self._parts.spread(job, transfer.keys, place)
        if self._grouped is not None:
            members = map(self._groups.members.__getitem__, transfer.groups)
            job = replace(job, blocks=tuple(map(place, members, job.blocks)))
        return replace(job, keys=tuple(split_keys(transfer.keys[self._shard])))

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
            self._note_save(save if self._parts is None else self._parts.saved(save))
        loads = self._mover.take_loads()
        if self._parts is not None:
            loads = [self._parts.loaded(load) for load in loads]
        return self._taken(refused + loads)

    def _taken(self, reports: list[LoadReport]) -> Received:
        got = Received(set(), set(), set())
        for report in reports:
            tokens = self._loading.pop(report.name, 0)
            if report.name in self._stale:
                self._stale.discard(report.name)
                report.loaded, report.loaded_bytes, report.staged_bytes = 0, 0, 0
                report.reason = MoveFailure.STALE
            got.finished.add(report.name)
            missing = len(report.blocks) - report.loaded
            if self._groups.is_plain:
                got.bad_blocks.update(report.blocks[report.loaded :])
                tokens = report.loaded * self._groups.block_tokens
            elif missing:
                got.failed.add(report.name)
            self._ends.loads[report.name] = LoadEnd(
                report.loaded,
                report.loaded_bytes,
                report.transfer_s,
                report.reason,
                waited_s=report.waited_s,
                hidden_s=report.hidden_s,
                by_shard=dict.fromkeys(
                    (self._shard,) if self._parts is None else self._parts.numbers,
                    ShardLoad(report.loaded, report.transfer_s, is_cut=report.reason is MoveFailure.TOO_SLOW),
                ),
                staged_bytes=report.staged_bytes,
            )
            self.stats.count("loads")
            self.stats.count("loaded_blocks", report.loaded)
            self.stats.count("loaded_bytes", report.loaded_bytes)
            self.stats.count_path("load_path_bytes", report.loaded_bytes, report.staged_bytes)
            if self._groups.is_plain or not missing:
                self.stats.count("hit_tokens", tokens)
            self.stats.seen("load_seconds", report.transfer_s)
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
        count_heard(self._heard, self.stats)
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
        if self._verifier is not None:
            self._verifier.close()
        if self._mover is not None:
            self._mover.close()
        if self._in_place is not None:
            self._in_place.close()
        tracing.shutdown()

"""The half of the connector inside vLLM's scheduler: decides by the book, asks the pool, pins blocks.

Idea: nothing here waits for the pool. Questions go to a thread and their answers are taken when the scheduler asks
again. Blocks that are being saved are pinned by their reference count in vLLM's block pool, so requests are freed and
preempted as if there were no connector, and still no block changes under a save.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from mooncache.connectors.vllm.contents import Contents
from mooncache.connectors.vllm.core.book import RequestBook
from mooncache.connectors.vllm.core.engine_request import (
    completed,
    computed_after,
    prompt_tokens,
    why_uncached,
)
from mooncache.connectors.vllm.core.groups import KvGroups
from mooncache.connectors.vllm.core.idle import IdleWait
from mooncache.connectors.vllm.core.kv_parts import passports_of, weights_named
from mooncache.connectors.vllm.core.refusals import PoolRefusal, Uncached
from mooncache.connectors.vllm.core.request import TOKENS_ALONE, BlockTransfer, RequestContent
from mooncache.connectors.vllm.core.step_times import StepTimes
from mooncache.connectors.vllm.engine_passport import in_memory
from mooncache.connectors.vllm.messages import (
    Handshake,
    LoadEnd,
    SaveEnd,
    StepOrders,
    StepReport,
    lookup_of,
    merge_loads,
    merge_saves,
    traced,
)
from mooncache.connectors.vllm.settings import ConnectorSettings
from mooncache.connectors.vllm.stats import ConnectorStats
from mooncache.kvcache.core.break_even import BreakEven
from mooncache.kvcache.core.shadow import ShadowSampler
from mooncache.kvcache.core.streaming import EngineMemory, Streaming, StreamMode, WaitPlace
from mooncache.kvcache.leg_hint import CacheReport
from mooncache.kvcache.leg_reports import LegReporter
from mooncache.kvcache.lookup import Lookups
from mooncache.kvcache.passport import Passport
from mooncache.kvcache.passport_file import write_passport
from mooncache.kvcache.pool_link import PoolLink
from mooncache.kvcache.transfers import MoveFailure
from mooncache.runtime.logs import Event, get_logger

_log = get_logger(__name__)
CONNECT_WAIT_S = 3.0
PINNED_SHARE = 0.5
"""Part of the engine's blocks that saves may pin; the others wait their turn."""


class SchedulerSide:
    """The half of the connector in vLLM's scheduler. Called by vLLM's scheduler, on one thread."""

    def __init__(
        self,
        settings: ConnectorSettings,
        link: PoolLink | None,
        *,
        block_tokens: int,
        groups: KvGroups | None = None,
        may_cut: bool = True,
        refusal: PoolRefusal | None = None,
        lora_config: Any = None,
    ) -> None:
        """
        Args:
            link: None together with a `refusal`.
            groups: of KV cache; None: one of full attention.
            may_cut: whether vLLM computes what did not come of a load, and does not fail the request.
            refusal: why the engine does not use the pool.
            lora_config: vLLM's LoRAConfig, if the engine takes adapters.
        """
        self._settings = settings
        self._link = link
        self._groups = groups or KvGroups(block_tokens)
        self._block_tokens = self._groups.block_tokens
        self._may_cut = may_cut
        self._break_even: BreakEven | None = None
        self._shadow: ShadowSampler | None = None
        self._steps = StepTimes()
        self._refusal = refusal
        self._book = RequestBook([], refusal=refusal)
        self._shards = 1
        self._changed = threading.Event()
        self._contents = Contents(settings.state_dir, lora_config, self._changed)
        self._idle = IdleWait()
        self._lookups: Lookups | None = None
        if link is not None:
            self._lookups = Lookups(link, changed=self._changed)
        self._handshakes: list[Handshake] = []
        self._files: list[Passport] = []
        self._weights: tuple[str, ...] = ()
        self._generations: dict[tuple[str, ...], int] = {}
        self._mixed: set[str] = set()
        self._renewed = False
        self._pool: Any = None
        self._requests: dict[str, Any] = {}
        self._loads: list[BlockTransfer] = []
        self._cancels: list[str] = []
        self._finish_saves: list[BlockTransfer] = []
        self._pins: dict[str, list[Any]] = {}
        self._pinned = 0
        self._partial_saves: dict[str, SaveEnd] = {}
        self._partial_loads: dict[str, LoadEnd] = {}
        self.stats = ConnectorStats()
        self._was_usable: bool | None = None
        self._legs = LegReporter(settings.passport_path)

    def handshake(self, shards: list[Handshake]) -> None:
        """The workers' passports, in the order of their ranks: from now on requests have keys."""
        refusal = next((shard.refusal for shard in shards if shard.refusal is not None), None)
        in_parts = self._settings.connector.head_groups > 0
        files = refusal or passports_of([shard.passports for shard in shards], in_parts=in_parts)
        if isinstance(files, PoolRefusal):
            self._refusal = self._refusal or files
            self._book = RequestBook([], refusal=self._refusal)
            return
        self._handshakes, self._files = shards, files
        self._weights = tuple(shard.weights for shard in shards)
        if self._link is not None:
            self._link.connected.wait(CONNECT_WAIT_S)  # the engine is starting: no request is kept waiting
        self._shards = max(1, len(shards))
        if self._settings.connector.break_even and shards:
            size_bytes = sum(shard.block_bytes for shard in shards)
            self._break_even = BreakEven(
                block_tokens=self._block_tokens,
                block_bytes=size_bytes,
                shards=len(files) // len(self._groups),
            )
        if shards and all(shard.verifies for shard in shards):
            self._shadow = ShadowSampler.of(self._settings.connector)
        # Under vLLM's policy "fail" a promise that is not kept would end the request with an error.
        mode = StreamMode(self._settings.connector.stream) if self._may_cut else StreamMode.OFF
        self._book = RequestBook(
            self._passports(),
            groups=self._groups,
            save_decode_blocks=self._settings.connector.save_decode_blocks,
            refusal=self._refusal,
            break_even=self._break_even,
            may_cut=self._may_cut,
            streaming=Streaming(mode, block_bytes=sum(shard.block_bytes for shard in shards)),
        )
        self._tell_passport()
        if shards:
            root = self._passports()[self._groups.lead].root().hex()
            _log.info(Event.CONNECTOR_STARTED, passport=root, block_bytes=shards[0].block_bytes)

    # --- generations of keys ---------------------------------------------------------------------------------

    def _passports(self) -> list[Passport]:
        """Of the shards and their groups, as keys are made now."""
        generation = self._generations.get(self._weights, 0)
        weights = weights_named([shard.as_loaded for shard in self._handshakes], self._weights)
        return [in_memory(files, weights, generation) for files in self._files]

    def _tell_passport(self) -> None:
        """The worker beside the engine, and by it gateways and conductor, learn the passport from its file."""
        if (path := self._settings.passport_path) is None or not self._files:
            return
        try:
            write_passport(path, self._passports()[self._groups.lead], self._handshakes[0].facts)
        except OSError as error:
            _log.warning(Event.CONNECTOR_PASSPORT_UNTOLD, path=str(path), reason=str(error))

    def _renew(self, reason: str) -> None:
        """A new generation begins. No block that was computed before may get a key of it: neither those of requests
        that run, nor those that vLLM's own cache would give to new ones."""
        passports = self._passports()
        for name, request in list(self._requests.items()):
            if not request.num_computed_tokens and not self._book.is_loading(name):
                self._forget(name)  # nothing of it was computed: it is added again, with new keys
        self._book.renew(passports)
        self._mixed = set(self._requests)
        if self._mixed:
            self.stats.count("uncached_requests", len(self._mixed), Uncached.NEW_GENERATION)
        self._renewed = True
        self._empty_own_cache()
        self._tell_passport()
        _log.warning(
            Event.CONNECTOR_NEW_GENERATION,
            reason=reason,
            passport=passports[self._groups.lead].root().hex() if passports else "",
        )

    def _forget(self, name: str) -> None:
        del self._requests[name]
        self._book.forget(name)
        if self._lookups is not None:
            self._lookups.withdraw(name)

    def _empty_own_cache(self) -> None:
        if self._pool is not None:
            self._pool.evict_blocks(set(range(len(self._pool.blocks))))

    def _note_mixed(self, name: str, local_tokens: int) -> None:
        """While requests of the former generation run, vLLM's own cache may have blocks that they made."""
        if (
            local_tokens
            and (self._mixed or (self._renewed and self._pool is None))
            and name not in self._mixed
        ):
            self._mixed.add(name)
            self._book.leave_out(name)
            self.stats.count("uncached_requests", label=Uncached.NEW_GENERATION)

    def _mixed_over(self, name: str) -> None:
        if name in self._mixed:
            self._mixed.discard(name)
            if not self._mixed:
                self._empty_own_cache()

    def _note_weights(self, weights: dict[int, str]) -> None:
        """What workers found in their memory."""
        known = list(self._weights)
        for shard, found in weights.items():
            if 0 <= shard < len(known):
                known[shard] = found
        if tuple(known) != self._weights:
            self._weights = tuple(known)
            self._renew("the weights in memory changed")

    def reset(self) -> None:
        """Begin a new generation of keys: whatever the pool holds, this engine does not take it for its own."""
        if self._files:
            self._generations[self._weights] = self._generations.get(self._weights, 0) + 1
            self._renew("the cache was reset")

    def bind_pool(self, pool: object) -> None:
        """vLLM's block pool."""
        self._pool = pool

    @property
    def usable(self) -> bool:
        """True when the pool may be asked now."""
        return self._link is not None and self._link.usable

    # --- loads -----------------------------------------------------------------------------------------------

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Answer vLLM's `get_num_new_matched_tokens`."""
        name = request.request_id
        if not self._add(request):
            return None, False
        self._take_answer(name)
        self._note_mixed(name, local_tokens)
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        found = self._book.match(
            name,
            local_tokens,
            time.monotonic(),
            pool_usable=self.usable,
            memory=self._memory(),
            tokens=request.num_tokens,
        )
        if found.query is not None and self._lookups is not None:
            self._lookups.ask(lookup_of(found.query, with_places=self._break_even is not None))
        if found.spared:
            self.stats.count("break_even_tokens", found.spared, "computed_faster")
        if found.waits is not None:
            self.stats.count("awaiting_requests", label=found.waits)
        if found.tokens and not local_tokens and self._shadow is not None:
            draw, now_s = random.random(), time.monotonic()
            if self._book.verify(name, found.tokens, self._shadow, now_s, draw):
                self.stats.count("shadow_tokens", found.tokens)
                return 0, False
        return found.tokens, bool(found.tokens)

    def _memory(self) -> EngineMemory | None:
        if self._pool is None:
            return None
        return EngineMemory(self._pool.get_num_free_blocks(), len(self._pool.blocks))

    def _add(self, request: Any) -> bool:
        """Whether the book knows the request; False while it is not known what it is beside its tokens."""
        name = request.request_id
        if name in self._book:
            return True
        code = why_uncached(request)
        content: RequestContent | PoolRefusal | None = PoolRefusal(code) if code else TOKENS_ALONE
        if not code and self._book.refusal is None:
            content = self._contents.ask(request)
        if content is None:
            return False
        why = self._book.add(
            name,
            list(request.all_token_ids) if request.prompt_token_ids is not None else [],
            salt=request.cache_salt or "",
            params=request.kv_transfer_params,
            refusal=content if isinstance(content, PoolRefusal) else None,
            content=content if isinstance(content, RequestContent) else TOKENS_ALONE,
        )
        self._requests[name] = request
        if why:
            self.stats.count("uncached_requests", label=why)
        return True

    def _take_answer(self, name: str) -> None:
        answer = self._lookups.take(name) if self._lookups is not None else None
        if answer is None:
            return
        outcome = answer.outcome.reported()
        self._book.answered(
            name,
            answer.present,
            outcome,
            answer.waited_s,
            time.monotonic(),
            places=answer.places,
            reason=answer.reason,
        )
        self.stats.count("lookups", label=answer.outcome)
        self.stats.seen("wait_seconds", answer.waited_s)

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Answer vLLM's `update_state_after_alloc`."""
        if tokens > 0:
            tables = self._groups.tables(blocks.get_block_ids())
            transfer = self._book.allocated(request.request_id, tables, tokens)
            if transfer is not None:
                self._loads.append(traced(transfer, request))
                if transfer.awaited:
                    self.stats.count("awaiting_requests", label=WaitPlace.STREAMED)

    # --- steps -----------------------------------------------------------------------------------------------

    def orders(self, output: Any) -> StepOrders:
        """Make the metadata of a step for vLLM's `build_connector_meta`; the saves are added by `add_saves`."""
        orders = StepOrders(self._loads, [], self._cancels, pinned=self._pool is not None)
        orders.weights = self._weights
        orders.idle = output.total_num_scheduled_tokens == 0
        if self._break_even is not None:
            orders.step = self._steps.begin(prompt_tokens(output, self._requests), time.monotonic())
        self._loads, self._cancels = [], []
        orders.saves, self._finish_saves = self._finish_saves, []
        wait_s = self._idle.next_s(
            time.monotonic(), waiting=orders.idle and not orders.loads and self._only_pool_works()
        )
        if wait_s:
            self._changed.wait(wait_s)
        self._changed.clear()
        return orders

    def _only_pool_works(self) -> bool:
        """Questions are open, or saves are all there is; for loads the worker waits, who sees their end."""
        return (
            self._book.pending() or self._contents.pending or (bool(self._pins) and not self._book.loading())
        )

    def add_saves(self, orders: StepOrders, output: object) -> None:
        """Blocks that are complete once this step is over."""
        if not self.usable:
            return
        for name, computed in computed_after(output):
            request = self._requests.get(name)
            if request is not None:
                transfer = self._plan_save(request, computed, output)
                if transfer is not None:
                    orders.saves.append(traced(transfer, request))

    def _plan_save(self, request: Any, computed: int, output: Any) -> BlockTransfer | None:
        state = output.kv_connector_block_state
        states = getattr(state, "boundary_state_offloads", {}).get(request.request_id, ())
        if not self._book.due(request.request_id, len(request.all_token_ids), computed, states):
            return None
        table = state.get_block_ids(request.request_id) if state is not None else None
        if table is None:
            return None
        name, tables = request.request_id, self._groups.tables(table)
        transfer = self._book.plan_save(name, request.all_token_ids, computed, tables, self._pins_left())
        self._pin(transfer)
        return transfer

    def _pins_left(self) -> int:
        if self._pool is None:
            return 1 << 30
        return max(0, int(len(self._pool.blocks) * PINNED_SHARE) - self._pinned)

    def _pin(self, transfer: BlockTransfer | None) -> None:
        if transfer is None or self._pool is None:
            return
        blocks = [self._pool.blocks[block] for block in transfer.blocks]
        self._pool.touch(blocks)
        self._pins[transfer.name] = blocks
        self._pinned += len(blocks)

    def _unpin(self, name: str) -> None:
        blocks = self._pins.pop(name, None)
        if blocks:
            self._pinned -= len(blocks)
            self._pool.free_blocks(reversed(blocks))

    def reported(self, report: object) -> None:
        """Take in the ended transfers of the workers, for vLLM's `update_connector_output`."""
        if not isinstance(report, StepReport):
            return
        if report.weights:
            self._note_weights(report.weights)
        measured = self._steps.end(report.step, time.monotonic())
        if measured is not None and self._break_even is not None:
            self._break_even.computed(*measured)
        for name, part in report.loads.items():
            before = self._partial_loads.pop(name, None)
            load = merge_loads(before, part) if before is not None else part
            if load.shards < self._shards:
                self._partial_loads[name] = load
                continue
            cut = load.reason is MoveFailure.TOO_SLOW
            missing = self._book.loaded(
                name,
                load.loaded,
                load.loaded_bytes,
                load.seconds,
                reason=load.reason,
                waited_s=load.waited_s,
                hidden_s=load.hidden_s,
                shards=load.by_shard,
                staged_bytes=load.staged_bytes,
            )
            if load.waited_s:
                self.stats.seen("wait_seconds", load.waited_s)
            if cut and missing:
                self.stats.count("break_even_tokens", missing * self._block_tokens, "load_cut")
            if name not in self._requests:
                self._book.forget(name)
        for name, save in report.saves.items():
            merged = self._partial_saves.pop(name, None)
            end = merge_saves(merged, save) if merged is not None else save
            if end.shards < self._shards:
                self._partial_saves[name] = end
                continue
            self._book.saved(name, sorted(end.stored))
            self._unpin(name)

    @property
    def saves_under_way(self) -> bool:
        """True while blocks are pinned for saves: the engine has to go on stepping to release them."""
        return bool(self._pins) or bool(self._finish_saves)

    # --- the end of a request --------------------------------------------------------------------------------

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """Answer vLLM's `request_finished_all_groups`. Returns the report for the gateway."""
        name = request.request_id
        self._contents.forget(name)
        if self._requests.pop(name, None) is None:
            return None
        self._mixed_over(name)
        if self._lookups is not None:
            self._lookups.withdraw(name)
        if self._book.is_loading(name):
            self._cancels.append(name)  # the book forgets it when the load's end is reported
            return None
        if self.usable and completed(request) and block_ids and all(block_ids):
            # Tokens of steps that were under way when their keys could not be known yet.
            computed = min(request.num_tokens - 1, request.num_computed_tokens)
            tables = self._groups.tables(block_ids)
            transfer = self._book.plan_save(name, request.all_token_ids, computed, tables, self._pins_left())
            if transfer is not None and self._pool is not None:
                self._pin(transfer)
                self._finish_saves.append(transfer)
            elif transfer is not None:
                self._book.saved(transfer.name, [])
        cache: CacheReport | None = self._book.cache_report(name)
        ended = self._book.ended_leg(name)
        # vLLM leaves what is returned here out of a stream.
        if ended is not None and request.num_computed_tokens and not self._legs.send(ended):
            self.stats.count("lost_leg_reports")
        self._book.forget(name)
        return cache.to_params() if cache is not None else None

    def take_stats(self) -> ConnectorStats | None:
        """Counts since the last call."""
        if self._was_usable is not self.usable:
            self._was_usable = self.usable
            self.stats.gauge("pool_up", float(self.usable))
        if self.stats.is_empty():
            return None
        taken, self.stats = self.stats, ConnectorStats()
        return taken

    def close(self) -> None:
        """End threads and connection."""
        if self._link is not None:
            self._link.close()
        if self._lookups is not None:
            self._lookups.close()
        self._legs.close()
        self._contents.close()

"""What the scheduler's side knows about every request, and what it decides from it.

Idea: a request goes through: added -> asked the pool -> answered -> loading -> running -> finished; preemption
leads back. The book answers three questions and never waits: how many tokens can be loaded (or "not known yet"), which
blocks to load where, which blocks to save. Everything is best effort: when in doubt the answer is 0 and the engine
computes.

Blocks that another instance is computing are waited for in one of two places (kvcache/core/streaming.py): in the pool's
lookup, before the request has memory; or in the load, which is promised to the engine at once and filled as they come.

Invariants (`check`): a block is ordered for saving at most once at a time; a request loads at most once at a time, and
blocks that are not there yet are promised for it at most once; a request whose load failed never loads again, so that a
bad block cannot make a request go round in circles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mooncache.client.keys import split_keys
from mooncache.connectors.vllm.core import parts, question
from mooncache.connectors.vllm.core.chain import KeyChain
from mooncache.connectors.vllm.core.groups import KvGroups
from mooncache.connectors.vllm.core.refusals import PoolRefusal, Uncached, said
from mooncache.connectors.vllm.core.request import (
    TOKENS_ALONE,
    BlockTransfer,
    Matched,
    PoolQuery,
    RequestContent,
    RequestState,
    report_of,
)
from mooncache.connectors.vllm.core.save_ledger import SaveLedger
from mooncache.errors import InvalidArgument
from mooncache.kvcache.core.break_even import BreakEven
from mooncache.kvcache.core.shadow import ShadowSampler
from mooncache.kvcache.core.streaming import EngineMemory, Streaming, WaitPlace
from mooncache.kvcache.core.weighing import LoadWeighing, ShardLoad
from mooncache.kvcache.keys import adapted
from mooncache.kvcache.leg_hint import CacheOutcome, CacheReport, LegHint, LegRole
from mooncache.kvcache.leg_reports import EndedLeg
from mooncache.kvcache.passport import Passport
from mooncache.kvcache.transfers import MoveFailure

ANSWER_TTL_S = 1.0


class RequestBook:
    """The state of every request.

    Args:
        passports: for each shard, in the order of the workers' ranks, one for each group.
        groups: of KV cache; None: one of full attention.
        refusal: why no request of the engine uses the pool; None: they do, once there are passports.
        break_even: weighs loading against computing; None: everything is loaded.
        may_cut: whether the engine can use a part of a load.
        streaming: decides which loads are streamed; None: none is.
    """

    def __init__(
        self,
        passports: Sequence[Passport],
        *,
        groups: KvGroups | None = None,
        save_decode_blocks: bool = True,
        refusal: PoolRefusal | None = None,
        break_even: BreakEven | None = None,
        may_cut: bool = True,
        streaming: Streaming | None = None,
    ) -> None:
        self._block_tokens = passports[0].block_tokens if passports else 0
        self._groups = groups or KvGroups(self._block_tokens)
        shards = len(passports) // len(self._groups)
        self._weighing = LoadWeighing(break_even, shards=shards) if break_even else None
        # A part of what several groups or a window need is of no use: such loads are not streamed.
        self._streaming = streaming if self._groups.is_plain else None
        self._may_cut = may_cut
        self._passports = list(passports)
        self._save_decode_blocks = save_decode_blocks
        self.refusal = refusal if passports or refusal else PoolRefusal(Uncached.NOT_STARTED)
        self._requests: dict[str, RequestState] = {}
        self._saves = SaveLedger()

    # --- requests --------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        salt: str,
        params: object,
        refusal: PoolRefusal | None = None,
        content: RequestContent = TOKENS_ALONE,
    ) -> Uncached:
        """A request came, with what it is beside its tokens. Returns why it does not use the pool."""
        reports, hint = isinstance(params, dict) and "mooncache" in params, LegHint.from_params(params)
        request = RequestState(request_id, len(tokens), hint, reports, self.refusal or refusal)
        if request.refusal is None:
            try:
                request.chain = KeyChain.begin(
                    [adapted(passport, content.lora) for passport in self._passports],
                    tokens,
                    groups=len(self._groups),
                    salt=salt,
                    public_tokens=hint.public_tokens if hint.public_salt else 0,
                    public_salt=hint.public_salt,
                    media=content.media,
                )
            except InvalidArgument as error:
                request.refusal = PoolRefusal(Uncached.TOKENS, said(error))
        self._requests[request_id] = request
        return request.refusal.code if request.refusal is not None else Uncached.NO

    def renew(self, passports: Sequence[Passport]) -> None:
        """A new generation of keys: requests from here on get theirs from these passports.

        What the others have computed so far belongs to no generation: they neither load nor save from then on.
        """
        self._passports = list(passports)
        self._saves.forget_stored()
        for request_id in self._requests:
            self.leave_out(request_id)

    def leave_out(self, request_id: str) -> None:
        """The request goes on without the pool."""
        request = self._requests.get(request_id)
        if request is not None:
            request.loads_off = request.saves_off = True
            request.choice.reason = str(PoolRefusal(Uncached.NEW_GENERATION))
            request.pending, request.known, request.answered_s = False, [], None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._requests.pop(request_id, None)

    def is_loading(self, request_id: str) -> bool:
        """True between `allocated` and `loaded`."""
        request = self._requests.get(request_id)
        return request is not None and request.loading is not None

    def cache_report(self, request_id: str) -> CacheReport | None:
        """What to tell the gateway; None when it did not ask."""
        request = self._requests.get(request_id)
        if request is None or not request.reports:
            return None
        return report_of(request, self._block_tokens)

    def ended_leg(self, request_id: str) -> EndedLeg | None:
        """What to tell the worker of a decode leg that is over; None for any other request."""
        request = self._requests.get(request_id)
        if request is None or request.hint.role is not LegRole.DECODE or not request.hint.decision_id:
            return None
        return EndedLeg(request.hint.decision_id, report_of(request, self._block_tokens))

    # --- loads -----------------------------------------------------------------------------------------------

    def match(
        self,
        request_id: str,
        local_tokens: int,
        now_s: float,
        *,
        pool_usable: bool,
        memory: EngineMemory | None = None,
        tokens: int | None = None,
    ) -> Matched:
        """How many tokens behind the `local_tokens` can be loaded. May be called any number of times.

        Args:
            memory: the engine's, now; None: not known.
            tokens: of the request, with those that were generated; None: of its prompt.
        """
        request = self._requests.get(request_id)
        if request is None or request.chain is None or request.loading is not None:
            return Matched(0)
        request.local_blocks = local_tokens // self._block_tokens
        request.matched_s = now_s
        if request.running:  # preempted: the engine's own blocks may come from elsewhere now
            request.verify_end = 0
        else:  # the client does not learn of a preemption
            request.local_tokens = min(local_tokens, request.prompt_tokens)
        request.limit = self._groups.limit(
            len(request.chain), request.prompt_tokens if tokens is None else tokens
        )
        # Where vLLM's own hit ends inside a larger block, what is behind it there would not come.
        ends_inside = bool(self._groups.columns and local_tokens % self._block_tokens)
        if ends_inside or request.loads_off or request.local_blocks >= request.limit:
            return Matched(0)
        if request.pending:
            return Matched(None)
        if request.answered_s is None or now_s - request.answered_s > ANSWER_TTL_S:
            return self._ask(request, now_s, pool_usable=pool_usable, memory=memory)
        found = self._groups.longest(request.known, request.local_blocks, request.limit)
        if request.promise_end:
            return self._promise(request, found, now_s, memory)
        return self._weighed(request, found, now_s)

    def _ask(
        self, request: RequestState, now_s: float, *, pool_usable: bool, memory: EngineMemory | None
    ) -> Matched:
        """The question to the pool. Waiting is for the first time only: after a preemption everything is there."""
        assert request.chain is not None
        awaited, place = 0, None
        if not request.asked:
            awaited = question.awaited_blocks(request, self._groups, self._block_tokens)
            request.wait_until_s = now_s + request.hint.wait_s
            if awaited and self._weighing is not None:
                awaited = self._weighing.worth_awaiting(
                    request.choice, request.hint, request.local_blocks, awaited, now_s
                )
            if awaited:
                end = question.promise_end(request, awaited, self._block_tokens)
                place = self._place(request, end, now_s, memory)
                if place is WaitPlace.STREAMED and not pool_usable:
                    place = WaitPlace.NO_POOL
        # A pool that is silent for a moment is still worth waiting for: the lookup knows for how long.
        if not pool_usable and not awaited:
            request.outcome = CacheOutcome.POOL_ABSENT
            return Matched(0)
        request.asked = True
        if place is WaitPlace.STREAMED:  # the load waits
            request.promise_end = question.promise_end(request, awaited, self._block_tokens)
            return self._question(request, 0)
        return replace(self._question(request, awaited), waits=place)

    def _question(self, request: RequestState, awaited: int) -> Matched:
        assert request.chain is not None
        request.pending = True
        keys, awaited, blocks = question.ask(request, self._groups, awaited)
        until_s = request.wait_until_s if awaited else request.matched_s
        node, limit_s = request.hint.store_node if awaited else "", None
        if self._weighing is not None and not awaited and not request.promise_end:
            limit_s = self._weighing.known.ask_s(blocks - request.local_blocks)
        token = request.hint.session_token
        return Matched(None, PoolQuery(request.request_id, keys, awaited, until_s, node, limit_s, token))

    def _place(self, request: RequestState, end: int, now_s: float, memory: EngineMemory | None) -> WaitPlace:
        """Where blocks from the local ones to `end` are waited for."""
        blocks = end - request.local_blocks
        if self._streaming is None or not self._may_cut or request.streams or blocks <= 0:
            return WaitPlace.OFF
        weighing, first = self._weighing, request.local_blocks
        if weighing is not None and not weighing.pays(request.choice, request.hint, first, end):
            return WaitPlace.NO_GAIN
        return self._streaming.place(
            blocks,
            limit_s=request.wait_until_s - now_s,
            expected_s=request.hint.expected_s,
            memory=memory,
            streams=sum(1 for other in self._requests.values() if other.streams and other.loading),
        )

    def _promise(
        self, request: RequestState, found: int, now_s: float, memory: EngineMemory | None
    ) -> Matched:
        """The pool has said what is there. The rest is promised, unless there is a reason now to wait outside."""
        first, end = request.local_blocks, request.promise_end
        if found >= end or now_s >= request.wait_until_s:
            request.promise_end = 0
            if found < end:
                request.outcome = CacheOutcome.TIMEOUT
            return self._weighed(request, found, now_s)
        place = self._place(request, end, now_s, memory)
        if request.outcome is not CacheOutcome.UNKNOWN:
            place = WaitPlace.NO_POOL  # the lookup knows for how long to wait for it
        if place is not WaitPlace.STREAMED:
            request.promise_end = 0
            awaited = question.awaited_blocks(request, self._groups, self._block_tokens)
            return replace(self._question(request, awaited), waits=place)
        return Matched((end - first) * self._block_tokens)

    def _weighed(self, request: RequestState, found: int, now_s: float) -> Matched:
        """Which of the blocks up to `found` to load. An answer of the pool is weighed once, however often vLLM asks."""
        first, spared = request.local_blocks, 0
        if self._weighing is not None and request.load_end is None and found > first:
            request.load_end, spared = self._weighing.weigh(request.choice, request.hint, first, found, now_s)
        end = found if request.load_end is None else min(found, request.load_end)
        if end < found:
            end = self._groups.longest(request.known, first, end)
        return Matched(max(0, end - first) * self._block_tokens, spared=spared * self._block_tokens)

    def verify(self, request_id: str, tokens: int, by: ShadowSampler, now_s: float, draw: float) -> bool:
        """Whether tokens that `match` has found are computed and compared, for a request without local blocks."""
        return question.verifies(self._requests[request_id], tokens, self._block_tokens, by, now_s, draw)

    def answered(
        self,
        request_id: str,
        present: Sequence[bool],
        outcome: CacheOutcome,
        waited_s: float,
        now_s: float,
        *,
        places: Sequence[str] = (),
        reason: str = "",
    ) -> None:
        """The pool's answer to `PoolQuery`; `outcome` UNKNOWN when it did answer, else `reason` may say why not.

        Args:
            places: where the keys lie that were asked for, as far as known.
        """
        request = self._requests.get(request_id)
        if request is None or request.chain is None or not request.pending:
            return
        request.pending = False
        request.answered_s = now_s
        request.load_end = None
        question.answered(request, self._groups, present, places)
        request.choice.reason = reason or request.choice.reason
        request.known_as_of = self._saves.ended
        request.waited_s += waited_s
        request.outcome = outcome

    def pending(self) -> bool:
        """True while some question has no answer."""
        return any(request.pending for request in self._requests.values())

    def loading(self) -> bool:
        """True while some request's blocks are on their way."""
        return any(request.loading is not None for request in self._requests.values())

    def allocated(
        self, request_id: str, tables: Sequence[Sequence[int]], tokens: int
    ) -> BlockTransfer | None:
        """The engine gave the request blocks for `tokens` to load behind the local ones: what to load where.

        `tables` has the request's block table of each group.
        """
        request = self._requests.get(request_id)
        if request is None or request.chain is None or tokens <= 0:
            return None
        first = request.local_blocks
        end = first + tokens // self._block_tokens
        request.loading, request.load_parts = (first, end), parts.to_load(tables, first, end)
        request.answered_s = None  # after a preemption the pool is asked anew
        pace, blocks = None, parts.positions(request.load_parts)
        if self._weighing is not None and self._may_cut:
            pace = self._weighing.pace(request.choice, request.hint, first, end)
            pace = pace and pace.in_parts(end - first, len(blocks))
        transfer = BlockTransfer(
            request_id,
            request.chain.packed(*request.load_parts),
            tuple(tables[group][block] for group, block in blocks),
            pace=pace,
            session_token=request.hint.session_token,
            groups=parts.named(blocks, self._groups),
            tokens=tokens,
        )
        if not request.promise_end:
            return transfer
        request.promise_end, request.streams = 0, True
        known = request.known[0] if request.known else b""
        missing = (at for at in range(first, end) if at >= len(known) or not known[at])
        return replace(
            transfer,
            awaited=tuple(at - first for at in missing),
            await_s=max(0.0, request.wait_until_s - request.matched_s),
            node=request.hint.store_node,
        )

    def loaded(
        self,
        request_id: str,
        count: int,
        size_bytes: int,
        seconds: float,
        *,
        reason: MoveFailure = MoveFailure.NONE,
        waited_s: float = 0.0,
        hidden_s: float = 0.0,
        shards: Mapping[int, ShardLoad] | None = None,
        staged_bytes: int = 0,
    ) -> int:
        """The load ended with `count` leading blocks in place. Returns how many blocks have to be computed.

        Args:
            seconds: of moving bytes.
            shards: what each shard measured.
            reason: why blocks did not come. Of a load that did not keep its pace the pool has them all the same.
            waited_s: for blocks of another instance; `hidden_s` of `seconds` were within that.
            staged_bytes: of `size_bytes`, those that passed through staging memory.
        """
        request = self._requests.get(request_id)
        if request is None or request.loading is None:
            return 0
        first, end = request.loading
        blocks = parts.positions(request.load_parts)
        request.loading, missing = None, len(blocks) - count
        came = self._groups.came(count, len(blocks), end - first)
        if not request.running:
            request.loaded_tokens += came * self._block_tokens
        request.loaded_bytes += size_bytes
        request.staged_bytes += staged_bytes
        request.load_s += seconds
        request.waited_s += waited_s
        request.hidden_s += hidden_s
        cut = reason is MoveFailure.TOO_SLOW
        if self._weighing is not None:
            self._weighing.loaded(request.choice, request.hint, first, end, shards or {}, parts=len(blocks))
        if self._streaming is not None and missing <= 0:
            self._streaming.loaded(count, seconds)
        if missing > 0:
            request.loads_off = True
        if missing > 0 and cut:
            request.choice.was_cut(came, end - first, seconds)
        elif missing > 0:
            if reason is MoveFailure.NOT_COME:
                request.outcome = CacheOutcome.TIMEOUT
            else:
                request.failed_blocks += missing
            request.note(blocks[count:], 0)  # they are computed again, and then saved again
        request.note(blocks[:count], 1)  # awaited blocks were missing when the pool was asked
        return end - first - came

    # --- saves -----------------------------------------------------------------------------------------------

    def due(
        self, request_id: str, known: int, computed: int, states: Iterable[tuple[int, int, int]] = ()
    ) -> bool:
        """Whether `plan_save` may find something after a step; asked first, because a block table costs time to make.

        Args:
            known: how many tokens of the request are known.
            computed: see `plan_save`.
            states: the recurrent states that vLLM keeps from this step on: (group, place, tokens before it).
        """
        request = self._requests.get(request_id)
        if request is None or request.chain is None or request.loading is not None or request.saves_off:
            return False
        request.keeps(states, self._block_tokens)
        return self._complete(request, known, computed) > request.next_save

    def _complete(self, request: RequestState, known: int, computed: int) -> int:
        """Blocks that may be saved once the step is over."""
        last = known if self._save_decode_blocks else request.prompt_tokens
        return min(computed, known, last) // self._block_tokens

    def plan_save(
        self,
        request_id: str,
        tokens: Sequence[int],
        computed: int,
        tables: Sequence[Sequence[int]],
        blocks_max: int,
    ) -> BlockTransfer | None:
        """Which blocks to save after a step.

        Args:
            tokens: all known tokens of the request.
            computed: tokens whose KV is in the blocks once the step is over.
            tables: the request's block table of each group.
            blocks_max: at most so many now; the others come later.
        """
        request = self._requests.get(request_id)
        if request is None or request.chain is None or request.loading is not None or request.saves_off:
            return None
        request.running, chain, size = True, request.chain, self._block_tokens
        end = min(self._complete(request, len(tokens), computed), *map(len, tables))
        if end <= request.next_save:
            return None
        if end > len(chain):
            chain.extend(tokens[len(chain) * size : end * size])
        chosen = parts.to_save(request, self._groups, self._saves, tables, end, blocks_max)
        if not chosen:
            return None
        keys = tuple(
            b"".join(chain.key(block, shard, group) for group, block in chosen)
            for shard in range(chain.shards)
        )
        name = self._saves.begin(request_id, split_keys(keys[0]), [block for _, block in chosen])
        request.saved_blocks += len(chosen)
        return BlockTransfer(
            name,
            keys,
            tuple(tables[group][block] for group, block in chosen),
            node=request.hint.store_node,
            is_awaited=request.hint.is_awaited,
            session_token=request.hint.session_token,
            groups=parts.named(chosen, self._groups),
            verifies=chosen[0][1] < request.verify_end,
        )

    def saved(self, name: str, stored: Sequence[int]) -> None:
        """A save ended; the pool has the blocks at these positions of its order."""
        order, there = self._saves.end(name, stored), set(stored)
        request = self._requests.get(order.request_id)
        if request is not None:
            request.saved_blocks -= len(order.keys) - len(there)
            request.unsaved.update(block for at, block in enumerate(order.blocks) if at not in there)

    def check(self) -> None:
        """The invariants; for tests."""
        self._saves.check()
        assert not any(each.loading and each.chain is None for each in self._requests.values())

"""The connector in the scheduler: what of a prompt comes from the pool, and what is saved after a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mooncache.client.keys import split_keys
from mooncache.connectors.tensorrt_llm.core.requests import (
    NO_PAGE,
    BlockSave,
    FollowedRequest,
    wanted_blocks,
)
from mooncache.connectors.tensorrt_llm.engine_side import side_of
from mooncache.connectors.tensorrt_llm.interface import base_class
from mooncache.errors import EngineFailed
from mooncache.kvcache.keys import salted


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """A block that is in memory, and where it belongs."""

    request_id: int
    number: int
    block_id: int


@dataclass(slots=True)
class WorkerOrders:
    """For the worker, before the step and after it."""

    loads: list[BlockLoad] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)


class MooncacheScheduler(base_class("KvCacheConnectorScheduler")):  # type: ignore[misc]
    """TensorRT-LLM calls it in its scheduler, on rank 0."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._side = side_of(llm_args)
        self._followed: dict[int, FollowedRequest] = {}
        self._promised: dict[int, range] = {}
        self._loads: list[BlockLoad] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """(tokens that come from the pool beyond those of the engine, False: they are in memory now).

        It waits for the pool, `connector.load_timeout_s` at most: see `engine_side`.
        """
        number = int(request.request_id)
        self._end(number)
        salt = salt_of(request)
        if salt is None or self._side.passport is None:
            return 0, False
        tokens = list(request.get_tokens(0))
        block_tokens = self._side.block_tokens
        wanted = wanted_blocks(len(tokens), num_computed_tokens, block_tokens)
        followed = FollowedRequest(salt, num_computed_tokens)
        self._followed[number] = followed
        if not wanted:
            return 0, False
        keys = self._keys(followed, tokens[: wanted.stop * block_tokens])
        came = self._side.fetch(number, keys[wanted.start :], wanted.start)
        followed.held_tokens = num_computed_tokens + came * block_tokens
        self._promised[number] = range(wanted.start, wanted.start + came)
        return came * block_tokens, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """The blocks of a request: those that were promised are loaded before the next step.

        Raises:
            EngineFailed: there is no page for a promised block.
        """
        number = int(request.request_id)
        for at in self._promised.pop(number, range(0)):
            if at >= len(block_ids):
                break  # the engine computes the rest of what was offered
            if block_ids[at] == NO_PAGE:
                raise EngineFailed(
                    f"The engine has no page for block {at} of request {number}, which was promised."
                )
            self._loads.append(BlockLoad(number, at, block_ids[at]))

    def build_connector_meta(self, scheduler_output: Any) -> WorkerOrders:
        """What the worker does before and after this step."""
        orders = WorkerOrders(loads=self._loads)
        self._loads = []
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            followed = self._followed.get(int(data.request_id))
            if followed is None:
                continue
            complete = followed.step(
                data.new_tokens,
                data.new_block_ids,
                data.computed_position,
                data.num_scheduled_tokens,
                self._side.block_tokens,
            )
            block_tokens = self._side.block_tokens
            if not self._side.saves_decoded:
                complete = range(complete.start, min(complete.stop, followed.prompt_tokens // block_tokens))
            if complete:
                keys = self._keys(followed, followed.tokens[: complete.stop * block_tokens])
                orders.saves += [BlockSave(keys[at], followed.block_ids[at]) for at in complete]
        return orders

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """False: what is saved was copied within its step, so the engine may free the blocks."""
        del cache_block_ids
        self._end(int(request.request_id))
        return False

    def _keys(self, followed: FollowedRequest, tokens: list[int]) -> list[bytes]:
        """Keys of all complete blocks of `tokens`, of which the first may be known."""
        passport = self._side.passport
        assert passport is not None
        known = len(followed.keys) * self._side.block_tokens
        if known < len(tokens):
            parent = followed.keys[-1] if followed.keys else None
            followed.keys += split_keys(salted(passport, followed.salt).chain_keys(tokens[known:], parent))
        return followed.keys

    def _end(self, number: int) -> None:
        self._followed.pop(number, None)
        self._promised.pop(number, None)
        self._loads = [load for load in self._loads if load.request_id != number]
        self._side.forget(number)


def salt_of(request: Any) -> str | None:
    """The tenant's salt; None: blocks of this request mean more than their tokens, or the engine does not say."""
    salt = getattr(request, "cache_salt", 0)
    if salt == 0 or not isinstance(salt, str | None):
        return None
    if any(getattr(request, name, None) is not None for name in ("lora_task_id", "multimodal_hashes")):
        return None
    return salt or ""

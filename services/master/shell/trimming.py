"""How copies are dropped: those that stay are confirmed first.

The directory may lag behind the nodes, so a copy only goes after those that stay were confirmed: their nodes are asked
to fetch the block from the one that will lose it, which moves nothing when they have it. Who confirmed has to be the
same living process when the others lose theirs. Trims run one after the other (`MasterState.trimming`), or two with
different views could each take the other's last copy. A pinned copy stays. Every command carries the term of the view
that it follows from, so that nodes refuse what a leader still sends after its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from mooncache import errors
from mooncache.master.core.membership import Node
from mooncache.master.core.trimming import Trim
from mooncache.master.messages import node_info
from mooncache.master.shell.fan_out import KeysRequest, ask_node
from mooncache.master.state import MasterState
from mooncache.proto.v1 import store_node_pb2

_THERE = (errors.OK, errors.AlreadyExists.code)
_GONE = (errors.OK, errors.NotFound.code)


class Trimming:
    """One call at work. `codes` gets the first refusal for each key."""

    def __init__(
        self,
        state: MasterState,
        tenant: str,
        tenant_id: int,
        keys: Sequence[bytes],
        codes: list[int],
        deadline_s: float,
        *,
        spare: bool,
    ) -> None:
        """spare: what a confirmation has to fetch is a spare copy, like the one that goes."""
        self._state, self._tenant, self._tenant_id = state, tenant, tenant_id
        self._keys, self._codes, self._deadline_s = keys, codes, deadline_s
        self._term, self._spare = state.membership.term, spare
        self._asked: dict[int, int] = {}  # incarnation of each node that was asked to keep blocks

    async def confirm(self, trims: Sequence[Trim]) -> None:
        """Make sure that those that stay have the block now."""
        routes: dict[tuple[int, int], list[int]] = {}
        for trim in trims:
            for index in trim.stay:
                routes.setdefault((index, trim.go[0]), []).append(trim.position)

        def make(source: Node, packed: bytes, timeout_s: float) -> KeysRequest:
            return store_node_pb2.CopyBlocksRequest(
                tenant_id=self._tenant_id,
                tenant=self._tenant,
                keys=packed,
                source=node_info(source),
                timeout_ms=round(timeout_s * 1000),
                spare=self._spare,
            )

        calls = []
        for (target, giver), where in routes.items():
            node = self._state.membership.by_index(giver)
            if node is None:
                self._refuse(where, errors.NodeUnavailable.code)
                continue
            calls.append(self._ask(target, "CopyBlocks", where, partial(make, node), _THERE))
        for target, _ in routes:
            asked = self._state.membership.by_index(target)
            self._asked[target] = asked.incarnation if asked is not None else 0
        await asyncio.gather(*calls)

    def confirmed(self, trims: Iterable[Trim]) -> list[Trim]:
        """The copies that may be dropped: all staying copies are confirmed, and none was lost meanwhile."""
        found = []
        for trim in trims:
            if not all(self._lasts(index) for index in trim.stay):
                self._refuse((trim.position,), errors.NodeUnavailable.code)
            if self._codes[trim.position] == errors.OK:
                found.append(trim)
        return found

    def _lasts(self, index: int) -> bool:
        node = self._state.membership.by_index(index)
        return node is not None and self._state.lasting(index) and node.incarnation == self._asked[index]

    async def drop(self, trims: Sequence[Trim]) -> int:
        """Drop what may go; return how many copies went."""
        routes: dict[int, list[int]] = {}
        for trim in trims:
            for index in trim.go:
                routes.setdefault(index, []).append(trim.position)

        def make(packed: bytes, _timeout_s: float) -> KeysRequest:
            return store_node_pb2.DropBlocksRequest(
                tenant_id=self._tenant_id, keys=packed, reason=store_node_pb2.DROP_REASON_REMOVED
            )

        answers = [self._ask(index, "DropBlocks", where, make, _GONE) for index, where in routes.items()]
        return sum(codes.count(errors.OK) for codes in await asyncio.gather(*answers))

    async def _ask(
        self,
        index: int,
        method: str,
        where: Sequence[int],
        make: Callable[[bytes, float], KeysRequest],
        good: Sequence[int],
    ) -> list[int]:
        state = self._state
        left_s = max(0.0, self._deadline_s - state.clock.now_s())
        timeout_s = min(state.limits.copy_timeout_s, left_s / 2)  # the answer has to be in time as well
        node = state.membership.by_index(index)
        if node is None or not node.alive:
            codes = [errors.NodeUnavailable.code] * len(where)
        else:
            request = make(b"".join(self._keys[position] for position in where), timeout_s)
            codes = await ask_node(state, node, method, request, len(where), timeout_s, self._term)
        for position, code in zip(where, codes, strict=True):
            if code not in good:
                self._refuse((position,), code)
        return codes

    def _refuse(self, where: Iterable[int], code: int) -> None:
        for position in where:
            if self._codes[position] == errors.OK:
                self._codes[position] = code

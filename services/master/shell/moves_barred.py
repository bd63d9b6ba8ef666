"""While blocks are removed, none of them may be on its way from one node to another: its copy would come back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from mooncache.master.state import MasterState
from mooncache.runtime.rpc import CallContext

_LOOK_S: Final = 0.01
_REMOVAL_S: Final = 0.5


@contextlib.asynccontextmanager
async def moves_barred(
    state: MasterState, tenant_id: int, keys: frozenset[bytes] | None, context: CallContext
) -> AsyncIterator[set[bytes]]:
    """Inside, the rebalance begins nothing with these blocks (None: with all of the tenant's). What it has begun is
    waited for, as long as for a node's answer; the rest of the call's time is for the removal.

    Yields: the keys of which something is under way still.
    """
    until_s = min(state.clock.now_s() + state.limits.node_call_timeout_s, context.deadline_s - _REMOVAL_S)
    book = state.rebalance
    book.bar(tenant_id, keys)
    try:
        while (late := book.under_way(tenant_id, keys)) and state.clock.now_s() < until_s:
            await state.clock.sleep(_LOOK_S)
        yield late
    finally:
        book.unbar(tenant_id, keys)

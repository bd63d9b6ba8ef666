"""While blocks are removed, none of them may be on its way from one node to another: its copy would come back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from mooncache.master.state import MasterState

_LOOK_S: Final = 0.01


@contextlib.asynccontextmanager
async def moves_barred(
    state: MasterState, tenant_id: int, keys: frozenset[bytes] | None, until_s: float
) -> AsyncIterator[set[bytes]]:
    """Inside, the rebalance begins nothing with these blocks (None: with all of the tenant's). What it has begun is
    waited for, until `until_s`.

    Yields: the keys of which something is under way still.
    """
    book = state.rebalance
    book.bar(tenant_id, keys)
    try:
        while (late := book.under_way(tenant_id, keys)) and state.clock.now_s() < until_s:
            await state.clock.sleep(_LOOK_S)
        yield late
    finally:
        book.unbar(tenant_id, keys)

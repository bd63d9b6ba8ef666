"""Blocks read back through the engines' own connector: who reads whose, how it is asked, and what it answered.

Idea: an engine that has computed and saved a prompt cannot be asked for it again, because its own cache would answer.
So another engine of the same passport is asked; where none is, the same one under another salt: its own cache, which
goes by the salt, does not have the prompt then, while the hint names the blocks by the salt of the first request
(`public_salt`). An engine whose own cache goes by the keys of the pool says that it had the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from mooncache.gateway.core.fleet import EngineInstance
from mooncache.kvcache.leg_hint import FIELD, CacheReport, LegHint, LegRole

WAIT_MS_MAX: Final = 2000
WAIT_MS_MIN: Final = 100
AFTER_WAIT_MS: Final = 1500
"""Of a read-back, for what follows the wait: the last look at the pool, the load, the answer."""


class ReadBack(msgspec.Struct, frozen=True):
    """What `reader` loaded of the blocks that `writer` saved; both are the same where no other engine shares them.

    `expected_tokens` is the least that a whole load brings. `outcome` is the engine's ("" when it does not report).
    `first_difference` is the first generated token that differs from the writer's; -1: none does.
    """

    writer: str
    reader: str
    expected_tokens: int = 0
    loaded_tokens: int = 0
    local_tokens: int = 0
    outcome: str = ""
    reason: str = ""
    waited_ms: float = 0.0
    load_ms: float = 0.0
    first_difference: int = -1
    error: str = ""
    """Why it could not be asked; "" when it could."""


def reader_of(writer: EngineInstance, instances: Sequence[EngineInstance]) -> EngineInstance:
    """The next engine that shares the writer's blocks; the writer itself when there is none. So each one reads once."""
    same = [one for one in instances if one.passport_json == writer.passport_json]
    return same[(same.index(writer) + 1) % len(same)]


def wait_ms(left_ms: float) -> int:
    """How long the reader may wait for blocks that are still being saved; 0: there is no time to ask it."""
    found = int(min(WAIT_MS_MAX, left_ms - AFTER_WAIT_MS))
    return found if found >= WAIT_MS_MIN else 0


def expected_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Tokens of complete blocks when the last token of a prompt has to be computed."""
    return max(0, prompt_tokens - 1) // block_tokens * block_tokens


def read_back_fields(
    asked: dict[str, Any], prompt_tokens: int, block_tokens: int, wait_limit_ms: int, *, own_salt: str = ""
) -> dict[str, Any]:
    """The body that asks for the same prompt, to be loaded.

    Args:
        asked: the body that the writer was asked with.
        own_salt: a new salt for a writer that reads itself; "" for another engine.
    """
    wait_tokens = prompt_tokens // block_tokens * block_tokens
    hint = LegHint(
        role=LegRole.DECODE,
        wait_tokens=wait_tokens,
        wait_ms=wait_limit_ms,
        public_tokens=wait_tokens if own_salt else 0,
        public_salt=str(asked["cache_salt"]) if own_salt else "",
        load_always=True,
    )
    return {**asked, "cache_salt": own_salt or asked["cache_salt"], FIELD: hint.to_params()}


def report_said(answer: bytes) -> CacheReport | None:
    """What an engine's answer says of its loads; None when it says nothing."""
    try:
        body: Any = msgspec.json.decode(answer)
        return CacheReport.from_params(body.get(FIELD))
    except (msgspec.DecodeError, AttributeError, RecursionError):
        return None

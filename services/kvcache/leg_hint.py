"""What gateway and engine tell each other about a request's cache, inside the field `kv_transfer_params`.

The gateway adds `{"mooncache": {...}}` to the body that it sends to an engine, the engine's connector answers in the
same field. Both sides are ours, but the text passes through an engine: what is read is checked, what is unknown is
ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any, Final, NamedTuple, Self

import msgspec

FIELD = "kv_transfer_params"
NAME = "mooncache"
VERSION = 1
WAIT_MS_MAX = 600_000
PLACES_MAX: Final = 8
"""Of one report."""
_NAME_CHARS_MAX: Final = 128


class LegRole(StrEnum):
    """Which leg of a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class CacheOutcome(StrEnum):
    """What the cache did for one leg."""

    HIT = "hit"
    PARTIAL = "partial"
    MISS = "miss"
    TIMEOUT = "timeout"  # awaited blocks did not come, in time or at all
    FAILED = "failed"  # the pool did not answer, or blocks that it had could not be loaded
    POOL_ABSENT = "pool_absent"
    COMPUTED_FASTER = "computed_faster"  # the pool had blocks that were computed, because that was faster
    LOAD_CUT = "load_cut"  # a load turned out slow: what had come was used, the rest computed
    OFF = "off"  # the request must not or cannot use the pool
    UNKNOWN = ""  # not said

    @classmethod
    def parse(cls, text: str) -> CacheOutcome:
        """The outcome of this name; UNKNOWN for any other text."""
        return cls(text) if text in _OUTCOMES else cls.UNKNOWN


_OUTCOMES = frozenset(CacheOutcome)
_ROLES = frozenset(LegRole)


@dataclass(frozen=True, slots=True)
class LegHint:
    """Gateway to engine."""

    role: LegRole | None = None  # which leg this is; None for a request that came straight to the engine
    wait_tokens: int = 0  # leading prompt tokens that another instance computes: wait for them in the pool
    wait_ms: int = 0  # for at most this long
    public_tokens: int = 0  # see keys.request_keys
    public_salt: str = ""  # see keys.request_keys
    store_node: str = ""  # the pool's node through which the legs hand blocks over, by its id
    request_id: str = ""  # for logs
    decision_id: str = ""  # of the plan; the worker's report of a leg names it
    expected_ms: int = 0  # how long the wait is expected to last; 0: not said
    load_always: bool = (
        False  # load what the pool has, also if it is slower than computing: a check of the loads
    )
    # Whose blocks these are, for the pool's nodes; empty: the engine's own tenant.
    session_token: str = field(default="", repr=False)

    @property
    def wait_s(self) -> float:
        """How long to wait, ten minutes at most: an engine's memory may be held meanwhile."""
        return min(self.wait_ms, WAIT_MS_MAX) / 1e3

    @property
    def expected_s(self) -> float:
        """How long the wait is expected to last, its limit at most; 0: not said."""
        return min(self.expected_ms / 1e3, self.wait_s)

    @property
    def is_awaited(self) -> bool:
        """Whether other legs may wait for what this leg computes of its prompt."""
        return self.role is LegRole.PREFILL or (self.role is LegRole.DECODE and not self.wait_tokens)

    def to_params(self) -> dict[str, object]:
        """The value of `kv_transfer_params`."""
        return {NAME: {"v": VERSION, **msgspec.to_builtins(self)}}

    @classmethod
    def from_params(cls, params: object) -> Self:
        """What a request says; defaults for fields that are missing or invalid."""
        return cls(**_known(cls, params))


class LoadedFrom(NamedTuple):
    """Blocks that a leg loaded from one place of the pool."""

    store_node: str
    tier: str
    blocks: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Engine to gateway: what the cache did for one request."""

    asked_tokens: int = 0  # tokens of complete prompt blocks
    hit_tokens: int = 0  # prompt tokens that were not computed here
    local_tokens: int = 0  # those of them from the engine's own cache
    loaded_tokens: int = 0  # those of them from the pool
    loaded_bytes: int = 0
    staged_bytes: int = 0  # those of them that passed through staging memory; the others went in place
    waited_ms: float = 0.0
    load_ms: float = 0.0  # of moving bytes
    hidden_ms: float = (
        0.0  # of `load_ms`, within `waited_ms`: both together took waited_ms + load_ms - hidden_ms
    )
    failed_blocks: int = 0  # blocks that should have been there and could not be loaded
    saved_blocks: int = 0  # blocks handed to the pool so far
    held_tokens: int = -1  # leading prompt tokens whose blocks the pool has or is being given; -1: not said
    outcome: CacheOutcome = CacheOutcome.UNKNOWN
    reason: str = ""  # why blocks that the pool had were computed, for people
    loaded_from: tuple[LoadedFrom, ...] = ()  # the places with the most blocks, as far as known

    def to_params(self) -> dict[str, object]:
        """The value of `kv_transfer_params` in the response."""
        return {NAME: {"v": VERSION, **msgspec.to_builtins(self)}}

    @classmethod
    def from_params(cls, params: object) -> Self | None:
        """What an engine said, None when it said nothing of ours."""
        return cls(**_known(cls, params)) if isinstance(params, dict) and NAME in params else None


def _known(cls: type, params: object) -> dict[str, Any]:
    """Fields of `cls` that are there with the right type; numbers are not negative."""
    given = params.get(NAME) if isinstance(params, dict) else None
    if not isinstance(given, dict):
        return {}
    found: dict[str, Any] = {}
    for name, kind in _kinds(cls).items():
        value = given.get(name)
        if kind == "str":
            if isinstance(value, str) and len(value) <= 256:
                found[name] = value
        elif kind == "bool":
            found[name] = value is True
        elif kind == "LegRole | None":
            found[name] = LegRole(value) if isinstance(value, str) and value in _ROLES else None
        elif kind == "CacheOutcome":
            found[name] = CacheOutcome.parse(value) if isinstance(value, str) else CacheOutcome.UNKNOWN
        elif kind == "tuple[LoadedFrom, ...]":
            found[name] = _places(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 53:
            found[name] = int(value) if kind == "int" else float(value)
    return found


@cache
def _kinds(cls: type) -> dict[str, object]:
    """The types of the fields, by name."""
    return {each.name: each.type for each in fields(cls)}


def _places(value: object) -> tuple[LoadedFrom, ...]:
    """Those that are what they should be, a few at most."""
    if not isinstance(value, list | tuple):
        return ()
    found = []
    for item in value[:PLACES_MAX]:
        if not isinstance(item, list | tuple) or len(item) != 3:
            continue
        node, tier, blocks = item
        names = (
            isinstance(node, str) and isinstance(tier, str) and max(len(node), len(tier)) <= _NAME_CHARS_MAX
        )
        if names and isinstance(blocks, int) and not isinstance(blocks, bool) and 0 < blocks < 1 << 32:
            found.append(LoadedFrom(node, tier, blocks))
    return tuple(found)


def most_loaded(places: Iterable[LoadedFrom]) -> tuple[LoadedFrom, ...]:
    """Each place once, those with the most blocks first, a few at most."""
    blocks: Counter[tuple[str, str]] = Counter()
    for place in places:
        blocks[place.store_node, place.tier] += place.blocks
    return tuple(LoadedFrom(*at, count) for at, count in blocks.most_common(PLACES_MAX))

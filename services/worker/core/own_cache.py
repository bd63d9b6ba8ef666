"""What the engine's own prefix cache holds, in our keys, and which changes of it the conductor does not know yet.

Engines name blocks by hashes of their own. Our key of a block is computed anew from its tokens, with the
engine's passport and the request's salt, by the same chain as everywhere (kvcache/keys.py). The salt stands
in the extra keys of the first block of a prompt; a later block continues its parent's chain, which is found
in a bounded table hash -> (key, salt). A block whose parent is not known, or whose content is more than
tokens (LoRA, images), has no key of ours: it is counted and left out.

Changes wait coalesced (the last one of a key counts). When too many wait, or when the conductor asks,
everything held is reported instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from mooncache.client.keys import KEY_BYTES, split_keys
from mooncache.errors import InvalidArgument
from mooncache.kvcache.keys import salted
from mooncache.kvcache.passport import Passport
from mooncache.worker.core.kv_events import SALT_CHARS_MAX, BlockHash, CacheEvent, Cleared, Removed, Stored

FORGOTTEN_MAX: Final = 65_536
REPORT_KEYS_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class Changes:
    """One report: see CacheChanges in conductor.proto."""

    full: bool
    stored: bytes
    removed: bytes
    sequence: int


class OwnCache:
    """The keys in an engine's own prefix cache, and their unreported changes.

    Args:
        passport: of the engine's blocks, with an empty tenant salt.
        block_count_max: blocks that are known at most; the oldest are forgotten (and reported as removed).
        pending_max: changes that may wait before a full report takes their place.
        first_sequence: number before that of the first report.
    """

    def __init__(
        self,
        passport: Passport,
        *,
        block_count_max: int = 4_000_000,
        pending_max: int = 100_000,
        first_sequence: int = 0,
    ) -> None:
        self.passport = passport
        self._block_count_max = block_count_max
        self._pending_max = pending_max
        self._held: OrderedDict[BlockHash, tuple[bytes, str]] = OrderedDict()
        self._forgotten: OrderedDict[BlockHash, tuple[bytes, str]] = OrderedDict()
        self._pending: dict[bytes, bool] = {}
        self._full_wanted = True
        self._full_rest: list[bytes] = []
        self._sent: Changes | None = None
        self.sequence = first_sequence
        self.unknown_parent_count = 0
        self.not_ours_count = 0

    def __len__(self) -> int:
        return len(self._held)

    def keys(self) -> set[bytes]:
        """Keys that are held."""
        return {key for key, _ in self._held.values()}

    def renew(self, passport: Passport) -> None:
        """The engine's blocks have other keys from here on; it has dropped those that it held."""
        self.passport = passport
        self.clear()

    # what the engine tells

    def apply(self, events: Iterable[CacheEvent]) -> None:
        """Take events in, in their order."""
        for event in events:
            match event:
                case Stored(own=True):
                    self._store(event)
                case Removed(own=True):
                    for name in event.hashes:
                        self._remove(name)
                case Cleared():
                    self.clear()
                case _:
                    self.not_ours_count += len(event.hashes)

    def clear(self) -> None:
        """The engine no longer holds anything."""
        self._held.clear()
        self._forgotten.clear()
        self.want_full()

    def _store(self, event: Stored) -> None:
        count = len(event.hashes)
        if event.lora or event.block_tokens != self.passport.block_tokens:
            self.not_ours_count += count
            return
        if event.parent is None:
            parent, salt, rest = None, _salt(event.extra_keys[0] if count else ()), event.extra_keys[1:]
        else:
            known = self._held.get(event.parent) or self._forgotten.get(event.parent)
            if known is None:
                self.unknown_parent_count += count
                return
            parent, salt, rest = known[0], known[1], event.extra_keys
        if salt is None or any(rest):
            self.not_ours_count += count
            return
        try:
            keys = salted(self.passport, salt).chain_keys(event.tokens, parent)
        except InvalidArgument:
            self.not_ours_count += count
            return
        for name, key in zip(event.hashes, split_keys(keys), strict=True):
            self._hold(name, key, salt)

    def _hold(self, name: BlockHash, key: bytes, salt: str) -> None:
        self._forgotten.pop(name, None)
        if name not in self._held:
            self._note(key, held=True)
        self._held[name] = (key, salt)
        self._held.move_to_end(name)
        if len(self._held) > self._block_count_max:
            self._remove(next(iter(self._held)))

    def _remove(self, name: BlockHash) -> None:
        found = self._held.pop(name, None)
        if found is None:
            return
        # A copy of the block may live on under the same hash and get children: keep its key for a while.
        self._forgotten[name] = found
        if len(self._forgotten) > FORGOTTEN_MAX:
            self._forgotten.popitem(last=False)
        self._note(found[0], held=False)

    def _note(self, key: bytes, *, held: bool) -> None:
        if self._full_wanted:
            return  # a full report will tell
        self._pending[key] = held
        if len(self._pending) > self._pending_max:
            self.want_full()

    # what the conductor hears

    def want_full(self) -> None:
        """Report everything next."""
        self._full_wanted = True
        self._pending.clear()

    def next_report(self) -> Changes | None:
        """What to send now: the last report again until `acknowledged`, else what is new; None when nothing is."""
        if self._full_wanted:
            self._full_wanted = False
            self._full_rest = list(self.keys())
            self._sent = self._report(self._take_rest(), b"", full=True)
        elif self._sent is None and self._full_rest:
            self._sent = self._report(self._take_rest(), b"")
        elif self._sent is None and self._pending:
            stored: list[bytes] = []
            removed: list[bytes] = []
            for key in list(self._pending)[:REPORT_KEYS_MAX]:
                (stored if self._pending.pop(key) else removed).append(key)
            self._sent = self._report(b"".join(stored), b"".join(removed))
        return self._sent

    def acknowledged(self) -> None:
        """The last report arrived."""
        self._sent = None

    def _report(self, stored: bytes, removed: bytes, *, full: bool = False) -> Changes:
        self.sequence += 1
        return Changes(full, stored, removed, self.sequence)

    def _take_rest(self) -> bytes:
        part, self._full_rest = self._full_rest[:REPORT_KEYS_MAX], self._full_rest[REPORT_KEYS_MAX:]
        return b"".join(part)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert not self._held.keys() & self._forgotten.keys(), "a block is held and forgotten"
        assert len(self._held) <= self._block_count_max
        assert len(self._forgotten) <= FORGOTTEN_MAX
        assert len(self._pending) <= self._pending_max
        assert all(len(key) == KEY_BYTES for key, _ in self._held.values())


def _salt(extra: Sequence[object]) -> str | None:
    """Salt of a prompt from its first block's extra keys; None when they say more than a salt."""
    if not extra:
        return ""
    if len(extra) == 1 and isinstance(extra[0], str) and len(extra[0]) <= SALT_CHARS_MAX:
        return extra[0]
    return None

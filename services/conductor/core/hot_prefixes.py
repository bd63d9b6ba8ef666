"""Hot prefixes of the pool: which blocks are worth more copies, by what was read of them lately.

A prompt's leading blocks in the pool are counted in segments of doubling length (block 1, 2, 3-4, 5-8, ... and the
rest), so that a shared beginning is counted once for all prompts that share it, and a request costs a few dictionary
entries instead of one for each block. How many copies a segment deserves is the policy's (`policy/replication.py`): its
rate of reading over what one reader was observed to load. Copies are asked for within a budget of bytes that fills at
an even rate; an order is only repeated when its copies may be gone. Copies of segments that were copied from here, and
only of those, are given back when demand has fallen below half of what justified them (also copies that others asked
for: it is not known whose they are); what a restart forgets goes when it was not read for a while, which its nodes see.
An order names the hosts whose engines read the segment, the busiest first: copies belong there.
Engines with several shards keep a part of each block under a key for each shard, and a gateway sends those of the first
shard only. So it is asked for the others once a segment deserves copies; until then nothing is copied, because a load
that waits for one part is not relieved by copies of another.
Invariant: at most KNOWN_MAX segments with KEY_BYTES_MAX of keys are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from mooncache.client.keys import KEY_BYTES
from mooncache.conductor.core.policy.replication import (
    COPIES_AT_ONCE,
    PREFIXES_MAX,
    PrefixDemand,
    copies_kept,
    copies_wanted,
    faded,
)
from mooncache.errors import InvalidArgument

KEY_BYTES_MAX: Final = 32 << 20
KNOWN_MAX: Final = 2 * PREFIXES_MAX
ORDER_KEYS_MAX: Final = 65_536  # a master takes no more in one call
ORDER_COPIES_MAX: Final = 64  # nor more copies
SEGMENTS_MAX: Final = 256  # that one plan looks at
BUDGET_S: Final = 10.0  # of the rate may be saved up
ASK_AGAIN_S: Final = 300.0
POOL_NODES_FEW: Final = 4  # in a pool of fewer nodes a prefix may be on all of them
HOSTS_MAX: Final = 8  # readers' hosts that are kept of a segment
SHARD_BLOCKS_MAX: Final = (
    1024  # leading blocks whose keys of other shards are asked for; those behind are not copied
)
SHARD_KEYS_MAX: Final = 65_536  # in one answer
SHARDS_AGAIN_S: Final = 5.0  # an answer that has not come by then is asked for again


class FadingCount(NamedTuple):
    """A fading count as of a moment."""

    uses: float
    at_s: float

    def uses_at(self, now_s: float) -> float:
        """The count at a later moment."""
        return faded(self.uses, now_s - self.at_s)


@dataclass(slots=True)
class _Segment:
    keys: bytes
    model: str
    pool_tenant: str = ""  # whose blocks they are at the nodes
    begin: int = 0  # place of its first block in prompts
    parent: int = 0  # name of the segment before it
    copies: int = 1
    ordered_blocks: int = 0  # what there are copies of
    asked_s: float = float("-inf")
    hosts: dict[str, FadingCount] = field(default_factory=dict)  # who reads it
    shards: tuple[bytes, ...] = ()  # keys of the same blocks under the other shards' passports
    shards_wanted: bool = False
    shards_asked_s: float = float("-inf")

    @property
    def key_bytes(self) -> int:
        """Memory of its keys."""
        return len(self.keys) * (1 + len(self.shards))

    def leading(self, blocks: int) -> bytes:
        """The keys of its first blocks, of all shards."""
        end = blocks * KEY_BYTES
        return b"".join(keys[:end] for keys in (self.keys, *self.shards))

    def read_from(self, hosts: Iterable[str], now_s: float) -> None:
        """Engines on these hosts load it."""
        for host in hosts:
            known = self.hosts.get(host)
            if known is None and len(self.hosts) >= HOSTS_MAX:
                del self.hosts[min(self.hosts, key=lambda name: self.hosts[name].uses_at(now_s))]
            self.hosts[host] = FadingCount(1.0 + (known.uses_at(now_s) if known else 0.0), now_s)

    def readers(self, now_s: float) -> tuple[str, ...]:
        """Their hosts, the busiest first; those that have not read it for long are left out."""
        busy = {host: use.uses_at(now_s) for host, use in self.hosts.items()}
        return tuple(
            sorted((host for host in busy if busy[host] >= 0.5), key=lambda host: (-busy[host], host))
        )


class HotPrefix(NamedTuple):
    """A segment as operators see it. `reads`: how often lately, a fading count; `parent` 0: none is known."""

    name: int
    parent: int
    model: str
    pool_tenant: str
    begin: int
    blocks: int
    tokens: int
    reads: float
    copies: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """Blocks that should be there `copies` times instead of `before` times."""

    name: int
    keys: bytes
    model: str
    copies: int
    before: int
    size_bytes: int  # what will be moved at most; 0 for copies that are given back
    hosts: tuple[str, ...] = ()  # of its readers, the busiest first
    pool_tenant: str = ""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one model: what a reader loads, how large a token's KV and a block are, and in how many parts a block lies."""

    tokens_per_s: float
    bytes_per_token: int
    block_tokens: int
    shards: int = 1


class HotPrefixes:
    """Read rates of the pool's prefixes, and the copies that they deserve. Times are seconds of one monotonic clock."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._budget_bytes = bytes_per_s * BUDGET_S
        self._filled_s: float | None = None
        self._demand = PrefixDemand()
        self._segments: dict[int, _Segment] = {}
        self._copied: set[int] = set()  # names of segments with copies
        self._key_bytes = 0

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def copied(self) -> int:
        """Segments that were given more than one copy."""
        return len(self._copied)

    def use(
        self,
        model: str,
        keys: bytes,
        blocks: int,
        block_tokens: int,
        now_s: float,
        hosts: Iterable[str] = (),
        pool_tenant: str = "",
    ) -> int:
        """A prompt that begins with `blocks` blocks of the pool was scheduled, to engines on `hosts`.

        Returns how many leading blocks' keys of the other shards are wanted (`learn_shards`).
        """
        if not self._bytes_per_s:
            return 0
        wanted = parent = 0
        for begin, end in segments_of(min(blocks, len(keys) // KEY_BYTES)):
            part = keys[begin * KEY_BYTES : end * KEY_BYTES]
            name = _name_of(part)
            segment = self._segments.get(name)
            if segment is None:
                segment = self._segments[name] = _Segment(part, model, pool_tenant)
                self._key_bytes += len(part)
            segment.begin, segment.parent = begin, parent
            parent = name
            segment.read_from(hosts, now_s)
            self._demand.use(name, (end - begin) * block_tokens, now_s)
            if (
                segment.shards_wanted
                and end <= SHARD_BLOCKS_MAX
                and now_s - segment.shards_asked_s >= SHARDS_AGAIN_S
            ):
                segment.shards_asked_s = now_s
                wanted = end
        self._bound(now_s)
        return wanted

    def learn_shards(self, keys: bytes, shards: Sequence[bytes], now_s: float) -> None:
        """The keys of the first blocks of a prompt under the other shards' passports, one bytes object for each.

        Raises InvalidArgument unless all name as many blocks, no more than `keys` does.
        """
        blocks = len(shards[0]) // KEY_BYTES if shards else 0
        if any(len(other) != blocks * KEY_BYTES for other in shards) or blocks * KEY_BYTES > len(keys):
            raise InvalidArgument("the shards' keys are not those of the prompt's first blocks")
        if len(shards) * blocks > SHARD_KEYS_MAX:
            raise InvalidArgument(f"more than {SHARD_KEYS_MAX} keys of shards")
        for begin, end in segments_of(blocks):
            segment = self._segments.get(_name_of(keys[begin * KEY_BYTES : end * KEY_BYTES]))
            if segment is None or not segment.shards_wanted:
                continue
            self._key_bytes -= segment.key_bytes
            segment.shards = tuple(other[begin * KEY_BYTES : end * KEY_BYTES] for other in shards)
            segment.shards_wanted = False
            self._key_bytes += segment.key_bytes
        self._bound(now_s)

    def _bound(self, now_s: float) -> None:
        if self._key_bytes > KEY_BYTES_MAX or len(self._segments) > KNOWN_MAX:
            self._forget(now_s)

    def plan(self, speeds: dict[str, Speed], nodes: int, now_s: float) -> list[Order]:
        """The copies to make now, hottest first; they count as ordered."""
        passed_s = 0.0 if self._filled_s is None else max(0.0, now_s - self._filled_s)
        limit = self._bytes_per_s * BUDGET_S
        self._budget_bytes = min(limit, self._budget_bytes + passed_s * self._bytes_per_s)
        self._filled_s = now_s
        orders: list[Order] = []
        if nodes < 2:
            return orders
        for name, prefix in self._demand.hottest(SEGMENTS_MAX, now_s):
            segment = self._segments.get(name)
            speed = speeds.get(segment.model) if segment is not None else None
            if segment is None or speed is None:
                continue
            wanted = copies_wanted(prefix, speed.tokens_per_s, max(nodes, POOL_NODES_FEW), now_s)
            wanted = min(nodes, wanted, ORDER_COPIES_MAX)
            known = segment.copies if now_s - segment.asked_s < ASK_AGAIN_S else 1
            if wanted <= max(known, segment.copies // 2):
                continue
            before = segment.copies
            wanted = max(wanted, before)
            if len(segment.shards) != speed.shards - 1:
                segment.shards_wanted = True
                continue  # without the other parts no load is relieved
            each = max(1, speed.bytes_per_token * speed.block_tokens * (wanted - known))
            count = min(len(segment.keys) // KEY_BYTES, int(limit // each), ORDER_KEYS_MAX // speed.shards)
            if count == 0:
                continue  # no budget would ever do
            if count * each > self._budget_bytes or len(orders) >= COPIES_AT_ONCE:
                break  # the hottest one waits for the budget; a colder one must not eat it
            self._budget_bytes -= count * each
            segment.asked_s, segment.ordered_blocks = now_s, max(segment.ordered_blocks, count)
            self._set_copies(name, segment, wanted)
            keys, hosts = segment.leading(count), segment.readers(now_s)
            orders.append(
                Order(name, keys, segment.model, wanted, before, count * each, hosts, segment.pool_tenant)
            )
        return orders

    def plan_removals(self, speeds: dict[str, Speed], now_s: float) -> list[Order]:
        """The copies to drop now that fewer requests read them; they count as ordered."""
        orders: list[Order] = []
        for name in sorted(self._copied):
            segment, prefix = self._segments[name], self._demand.of(name)
            speed = speeds.get(segment.model)
            wanted = 0
            if prefix is not None and speed is not None:
                wanted = copies_wanted(prefix, speed.tokens_per_s, 2 * ORDER_COPIES_MAX, now_s)
            elif prefix is not None and prefix.uses_at(now_s) >= 1.0:
                continue  # its readers are away for a moment
            before, stay = segment.copies, copies_kept(wanted)
            if before <= stay:
                continue
            keys, hosts = segment.leading(segment.ordered_blocks), segment.readers(now_s)
            orders.append(Order(name, keys, segment.model, stay, before, 0, hosts, segment.pool_tenant))
            self._set_copies(name, segment, stay)
            if len(orders) == COPIES_AT_ONCE:
                break
        return orders

    @property
    def counts(self) -> bool:
        """Whether reads are counted at all."""
        return self._bytes_per_s > 0

    def hottest(self, count: int, now_s: float) -> list[HotPrefix]:
        """The segments of which most tokens are read, most first."""
        names = (name for name, _ in self._demand.hottest(len(self._demand), now_s) if name in self._segments)
        return [self._view(name, now_s) for name in islice(names, count)]

    def find(self, name: int, now_s: float) -> tuple[HotPrefix, bytes] | None:
        """A segment and the keys of its blocks, of all shards; None when it is forgotten."""
        segment = self._segments.get(name)
        return (self._view(name, now_s), segment.leading(len(segment.keys))) if segment is not None else None

    def _view(self, name: int, now_s: float) -> HotPrefix:
        segment, read = self._segments[name], self._demand.of(name)
        return HotPrefix(
            name=name,
            parent=segment.parent if segment.parent in self._segments else 0,
            model=segment.model,
            pool_tenant=segment.pool_tenant,
            begin=segment.begin,
            blocks=len(segment.keys) // KEY_BYTES,
            tokens=read.tokens if read is not None else 0,
            reads=read.uses_at(now_s) if read is not None else 0.0,
            copies=segment.copies,
            hosts=segment.readers(now_s),
        )

    def keys_of(self, name: int) -> bytes:
        """The keys of an order's segment; b"" when it is forgotten."""
        segment = self._segments.get(name)
        return segment.keys if segment is not None else b""

    def ordered_elsewhere(
        self, model: str, keys: bytes, blocks: int, copies: int, pool_tenant: str, now_s: float
    ) -> None:
        """Another conductor had the first blocks of the segment with these keys brought to a number of copies."""
        if not keys:
            return
        name = _name_of(keys)
        segment = self._segments.get(name)
        if segment is None:
            segment = self._segments[name] = _Segment(keys, model, pool_tenant)
            self._key_bytes += len(keys)
        segment.asked_s, segment.ordered_blocks = now_s, max(segment.ordered_blocks, blocks)
        self._set_copies(name, segment, copies)
        self._bound(now_s)

    def failed(self, order: Order) -> None:
        """An order could not be given: it may be planned again."""
        segment = self._segments.get(order.name)
        if segment is not None:
            segment.asked_s = float("-inf")
            self._set_copies(order.name, segment, order.before)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        held = sum(segment.key_bytes for segment in self._segments.values())
        assert held == self._key_bytes, "bytes of kept keys are wrong"
        copied = {name for name, segment in self._segments.items() if segment.copies > 1}
        assert copied == self._copied, "it is not known which segments have copies"
        assert 0 <= self._budget_bytes <= self._bytes_per_s * BUDGET_S, "the budget is beyond its limit"

    def _set_copies(self, name: int, segment: _Segment, copies: int) -> None:
        segment.copies = copies
        if copies > 1:
            self._copied.add(name)
        else:
            self._copied.discard(name)

    def _forget(self, now_s: float) -> None:
        """Keep the hottest half, and first those that have copies to be given back."""
        kept: dict[int, _Segment] = {}
        self._key_bytes = 0
        hottest = [name for name, _ in self._demand.hottest(len(self._demand), now_s)]
        for name in dict.fromkeys([*sorted(self._copied), *hottest]):
            segment = self._segments.get(name)
            if segment is None or self._key_bytes + segment.key_bytes > KEY_BYTES_MAX // 2:
                continue
            kept[name] = segment
            self._key_bytes += segment.key_bytes
        self._segments = kept
        self._copied &= kept.keys()


def segments_of(blocks: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the segments of a prompt's first blocks: 0-1, 1-2, 2-4, 4-8, ... and the rest."""
    begin = 0
    while begin < blocks:
        end = min(blocks, max(1, 2 * begin))
        yield begin, end
        begin = end


def _name_of(keys: bytes) -> int:
    """A segment's name: its last key stands for all before."""
    return int.from_bytes(keys[-KEY_BYTES : 8 - KEY_BYTES], "little")

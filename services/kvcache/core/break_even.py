"""Load or compute: which of the two is faster for the blocks that the pool has, by what this engine measured itself.

Idea: the engine says how long its steps took that computed prompts, and how long its loads took. Of the first a low
quantile counts, because a step that also did other work says nothing about prompts; the second is a line for each path
(a node's tier, to one shard), seconds per load and per byte, in which old loads fade.

- A load that would take longer than computing does not begin: its blocks end before the first one on a slow path. Now
  and then a small part is loaded all the same, or a path that was slow once would never be tried again.
- A load that has begun must keep pace with computing (`Pace`): blocks that come later than they could have been
  computed, with some grace, are not waited for. While the engine has not measured how fast it computes, it is taken to
  be fast; so a path that is not known yet is tried at a price that is known.
- Asking the pool may take a small part of what computing takes.

Invariant: the leading blocks are loaded; an estimate is never negative; a load costs at most its grace, whatever the
path does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

STEP_TOKENS_MIN = 64  # a step with fewer prompt tokens measures its fixed cost
STEPS_MIN, STEPS_KEPT = 4, 64
STEP_QUANTILE = 0.25
TOKEN_S_ASSUMED = (
    3e-4  # of computing, while it is not measured: faster than most engines, so that loads end early
)
LOADS_MIN = 3
LOAD_FADE = 0.8  # what a load's measurement weighs after the next one
# Variance of sizes over their squared mean from which two coefficients can be distinguished.
SPREAD_MIN = 0.05
REACH = 4.0  # a load so much larger than those measured is not judged
CUTS_MAX = 2  # so many loads in a row that fell behind: the path has changed
CUT_SHARE = 2.0  # of the time of computing: what a load would have taken of which nothing came in time
MARGIN_S = 0.002
BACK_SHARE = 0.8  # of the time of computing; what was judged too slow has to be so much faster
TRIAL_EVERY_S = 5.0
TRIAL_SHARE = 0.05
SURPRISE_SHARE = 0.5  # a load so much faster than expected: the path has changed
GRACE_SHARE, GRACE_SHARE_MAX, GRACE_MIN_S, GRACE_UNKNOWN_S = 0.02, 0.035, 0.005, 0.05
GRACE_LOADS = 3.0
FIRST_BATCH_BYTES = 1 << 20
"""A load that must keep pace begins with so much, so that a stalled path is noticed with something gained."""
ASK_SHARE, ASK_MIN_S, ASK_UNKNOWN_S = 0.015, 0.015, 0.1
PATHS_MAX: Final = 1024
PLACE_CHARS_MAX: Final = 96
"""Of a place within a reason."""

Path = tuple[int, str]
"""A shard of the model, and a place of the pool: the name of a node with its tier, or "" when it is not known."""
Places = Sequence[tuple[str, ...]]
"""For each block the place of every shard's part. Blocks beyond its end lie at places that are not known."""


def place_name(node: str, tier: str) -> str:
    """A place of blocks, by which paths differ, as people read it."""
    return f"{node} ({tier})"


def node_and_tier(place: str) -> tuple[str, str]:
    """What `place_name` put together; two times "" when the place is not known."""
    node, _, tier = place.removesuffix(")").rpartition(" (")
    return node, tier


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a load has to be: `grace_s` at once, and the time of computing each block that has come."""

    grace_s: float
    block_s: float

    def due_s(self, blocks: int) -> float:
        """Seconds after its start until which a load that has brought so many blocks may bring the next ones."""
        return self.grace_s + blocks * self.block_s

    def in_parts(self, blocks: int, parts: int) -> Pace:
        """The same pace of a load that moves another number of parts for so many blocks."""
        return self if parts == blocks else Pace(self.grace_s, self.block_s * blocks / max(1, parts))

    def batch_blocks(self, last: int, came: int, elapsed_s: float) -> int:
        """How many blocks to ask for next: twice the last ones, but no more than half of what is left until the pace is
        lost should bring, because blocks of a batch that is late do not count."""
        if came <= 0 or elapsed_s <= 0:
            return max(1, last)
        fits = 0.5 * (self.due_s(came) - elapsed_s) * came / elapsed_s
        return max(1, min(2 * last, int(fits)))


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to load of the blocks that the pool has: the `load` leading ones of `found`, and why not all.

    Attributes:
        load_s, compute_s: what all of them were expected to take; None: not known.
        place: where they lie, or the slowest of several places; "" when it is not known.
        is_trial: a slow path is tried with a small part.
    """

    found: int
    load: int
    load_s: float | None = None
    compute_s: float | None = None
    place: str = ""
    is_trial: bool = False

    @property
    def reason(self) -> str:
        """Why not all of them are loaded, for people; "" when all are."""
        if self.load >= self.found or self.load_s is None or self.compute_s is None:
            return ""
        where = f" from {self.place[:PLACE_CHARS_MAX]}" if self.place else ""
        spared = self.found - self.load
        what = f"{spared} of {self.found} blocks not loaded" if self.load else f"{spared} blocks not loaded"
        more = f", {self.load} as a trial" if self.is_trial else ""
        return (
            f"{what}{more}: all{where} would take {self.load_s * 1e3:.0f} ms, "
            f"computing {self.compute_s * 1e3:.0f} ms"
        )


def cut_reason(came: int, asked: int, seconds: float, pace: Pace | None) -> str:
    """Why a load was cut, for people."""
    due = f", due after {pace.due_s(came) * 1e3:.0f} ms" if pace is not None else ""
    return f"cut after {came} of {asked} blocks: the next did not come in {seconds * 1e3:.0f} ms{due}"


class ComputeSpeed:
    """Seconds per prompt token of steps that computed prompts."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS_KEPT)  # seconds per token, tokens
        self._token_s: float | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens."""
        if tokens >= STEP_TOKENS_MIN and seconds > 0:
            self._steps.append((seconds / tokens, tokens))
            self._token_s = None

    @property
    def token_s(self) -> float | None:
        """The low quantile over computed tokens, so that large steps count more; None while it is not known."""
        if len(self._steps) < STEPS_MIN:
            return None
        if self._token_s is None:
            left = STEP_QUANTILE * sum(tokens for _, tokens in self._steps)
            for each_s, tokens in sorted(self._steps):
                self._token_s = each_s
                left -= tokens
                if left <= 0:
                    break
        return self._token_s


class LoadSpeed:
    """Seconds of a load by its bytes: a line through the loads measured, in which old ones fade."""

    def __init__(self) -> None:
        self.forget()
        self._count = 0

    def forget(self) -> None:
        """What was measured holds no more."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, size_bytes: int, seconds: float, *, sure: bool = False) -> bool:
        """A load of so many bytes took so long. `sure`: this one is enough to judge. Returns whether it was so much
        faster than expected that the path has changed."""
        expected_s = self.seconds(size_bytes)
        surprise = expected_s is not None and seconds < SURPRISE_SHARE * expected_s
        if surprise:
            self.forget()
        x, y, fade = float(size_bytes), seconds, LOAD_FADE
        self._weight = self._weight * fade + 1
        self._x = self._x * fade + x
        self._y = self._y * fade + y
        self._xx = self._xx * fade + x * x
        self._xy = self._xy * fade + x * y
        self._count = max(self._count + 1, LOADS_MIN if sure else 0)
        return surprise

    def seconds(self, size_bytes: int, reach: float = REACH) -> float | None:
        """How long a load would take; None when nothing is known of loads of that size."""
        if self._count < LOADS_MIN or not self._x:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        if size_bytes > reach * mean_x:
            return None
        variance = self._xx / self._weight - mean_x * mean_x
        if variance > SPREAD_MIN * mean_x * mean_x:
            byte_s = (self._xy / self._weight - mean_x * mean_y) / variance
            fixed_s = mean_y - byte_s * mean_x
            if byte_s >= 0 and fixed_s >= 0:
                return fixed_s + byte_s * size_bytes
        return mean_y / mean_x * size_bytes


class PathSpeed:
    """One path: how fast it is, and whether it was judged slower than computing."""

    def __init__(self) -> None:
        self._line = LoadSpeed()
        self._cuts = 0
        self.is_slow = False
        self.trial_s = 0.0  # when it may be tried again

    def observe(self, size_bytes: int, seconds: float) -> None:
        """A load of so many bytes took so long."""
        self._cuts = 0
        if self._line.observe(size_bytes, seconds):
            self.is_slow = False

    def was_cut(self, size_bytes: int, seconds: float) -> None:
        """A load was cut, and would have taken so long at least. Once may be chance; more often is judged by that."""
        self._cuts += 1
        if self._cuts >= CUTS_MAX:
            self._line.forget()
        self._line.observe(size_bytes, seconds, sure=self._cuts >= CUTS_MAX)

    def seconds(self, size_bytes: int) -> float | None:
        """As `LoadSpeed.seconds`. What is known of a slow path comes from small loads, and is believed for all."""
        return self._line.seconds(size_bytes, float("inf") if self.is_slow else REACH)

    def judge(self, size_bytes: int, compute_s: float) -> bool:
        """Whether loading so much takes longer than computing what it is a part of; see `BreakEven.pays`."""
        load_s = self.seconds(size_bytes)
        if load_s is not None:
            limit_s = BACK_SHARE * compute_s if self.is_slow else compute_s + MARGIN_S
            self.is_slow = load_s > limit_s
        return self.is_slow


class BreakEven:
    """What this engine knows of loading and computing, and what follows for a load.

    Args:
        block_tokens: tokens of a block.
        block_bytes: bytes of a block, of all shards together.
        shards: parts of a block, each on a path of its own.
    """

    def __init__(self, *, block_tokens: int, block_bytes: int, shards: int = 1) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._unknown = ("",) * shards
        self._compute = ComputeSpeed()
        self._paths: dict[Path, PathSpeed] = {}

    # --- what is measured ------------------------------------------------------------------------------------

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens."""
        self._compute.observe(tokens, seconds)

    def loaded(self, asked: int, came: int, seconds: float, places: Places = (), shard: int = 0) -> None:
        """A load of `asked` blocks to one shard ended; with fewer that `came` it was cut.

        A cut tells of the path of the first block that did not come. Of several paths of a whole load the one counts
        that was expected to be slowest, and those that were expected to be slower than all of them together were.
        """
        if asked <= 0 or seconds <= 0:
            return
        counts = {path: count for path, count in self._counts(asked, places).items() if path[0] == shard}
        if came < asked:
            path = shard, self._at(came, places)[shard]
            compute_s = asked * self._block_tokens * self._token_s
            whole_s = max(seconds * asked / came if came else 0.0, CUT_SHARE * compute_s)
            self._path(path).was_cut(asked * self._block_bytes, whole_s)
            return
        expected = {
            path: self._path(path).seconds(count * self._block_bytes) for path, count in counts.items()
        }
        slowest_s = max((each_s for each_s in expected.values() if each_s is not None), default=0.0)
        for path, count in counts.items():
            each_s = expected[path]
            if each_s is None or each_s >= slowest_s or seconds < each_s:
                self._path(path).observe(count * self._block_bytes, seconds)

    # --- what is expected ------------------------------------------------------------------------------------

    @property
    def _token_s(self) -> float:
        """Seconds of a prompt token, measured or assumed."""
        return self._compute.token_s or TOKEN_S_ASSUMED

    def compute_s(self, blocks: int) -> float | None:
        """Seconds that these blocks take to compute; None while that is not known."""
        token_s = self._compute.token_s
        return None if token_s is None else token_s * blocks * self._block_tokens

    def load_s(self, blocks: int, places: Places = ()) -> float | None:
        """Seconds that these blocks take to load, from all places at once; None while that is not known of one."""
        found = [
            self._path(path).seconds(count * self._block_bytes)
            for path, count in self._counts(blocks, places).items()
        ]
        known = [each_s for each_s in found if each_s is not None]
        return max(known) if known and len(known) == len(found) else None

    def _path(self, path: Path) -> PathSpeed:
        known = self._paths.pop(path, None) or PathSpeed()
        self._paths[path] = known
        if len(self._paths) > PATHS_MAX:  # the one that was not used for longest; nodes come and go
            self._paths.pop(next(iter(self._paths)))
        return known

    def _at(self, block: int, places: Places) -> tuple[str, ...]:
        return places[block] if block < len(places) else self._unknown

    def _counts(self, blocks: int, places: Places) -> Counter[Path]:
        """Blocks on each path."""
        together = Counter(places[:blocks])
        together[self._unknown] += max(0, blocks - len(places))
        counts: Counter[Path] = Counter()
        for at, count in together.items():
            if count:
                counts.update(dict.fromkeys(enumerate(at), count))
        return counts

    # --- what follows ----------------------------------------------------------------------------------------

    def pays(self, blocks: int, places: Places = ()) -> bool:
        """Whether to load all of these blocks. What was judged too slow has to become clearly faster."""
        return not self._slow_paths(blocks, places)

    def _slow_paths(self, blocks: int, places: Places) -> dict[Path, PathSpeed]:
        """Paths on which their part of these blocks takes longer than computing all of them."""
        compute_s = self.compute_s(blocks)
        if compute_s is None:
            return {}  # everything is loaded, with the pace that is assumed
        found = {path: (self._path(path), count) for path, count in self._counts(blocks, places).items()}
        return {
            path: speed
            for path, (speed, count) in found.items()
            if speed.judge(count * self._block_bytes, compute_s)
        }

    def weigh(self, blocks: int, now_s: float, places: Places = ()) -> LoadPlan:
        """What to load of the blocks that the pool has: those before the first one on a slow path, and now and then a
        few more as a trial of that path."""
        if blocks <= 0:
            return LoadPlan(0, 0)
        worth = blocks
        slow = first_slow = self._slow_paths(blocks, places)
        while slow and worth:
            worth = next((at for at in range(worth) if self._lies_on(self._at(at, places), slow)), 0)
            slow = self._slow_paths(worth, places) if worth else {}
        if worth == blocks:
            return LoadPlan(blocks, blocks)
        sizes = self._counts(blocks, places)
        times = {
            path: speed.seconds(sizes[path] * self._block_bytes) or 0.0 for path, speed in first_slow.items()
        }
        worst = max(times, key=lambda path: times[path])
        is_trial = now_s >= first_slow[worst].trial_s
        if is_trial:
            first_slow[worst].trial_s = now_s + TRIAL_EVERY_S
            worth = min(blocks, worth + max(1, int(blocks * TRIAL_SHARE)))
        compute_s = blocks * self._block_tokens * self._token_s
        return LoadPlan(blocks, worth, times[worst], compute_s, worst[1], is_trial)

    @staticmethod
    def _lies_on(at: tuple[str, ...], paths: Collection[Path]) -> bool:
        return any((shard, place) in paths for shard, place in enumerate(at))

    def blocks_to_load(self, blocks: int, now_s: float, places: Places = ()) -> int:
        """How many leading ones of the blocks that the pool has to load; see `weigh`."""
        return self.weigh(blocks, now_s, places).load

    def pace(self, blocks: int, places: Places = (), *, found: int = 0) -> Pace:
        """The pace that a load of these blocks has to keep. `found`: how many of them the pool has, if not all are
        loaded: the grace is a part of what all of them take to compute."""
        block_s = self._token_s * self._block_tokens
        compute_s = max(blocks, found) * block_s
        first = min(blocks, max(1, FIRST_BATCH_BYTES // max(1, self._block_bytes)))
        first_s = self.load_s(first, places) if first else None
        most_s = GRACE_SHARE_MAX * compute_s
        if first_s is None:
            grace_s = max(most_s, min(GRACE_UNKNOWN_S, compute_s))
        else:
            grace_s = min(most_s, max(GRACE_SHARE * compute_s, GRACE_LOADS * first_s))
        return Pace(max(GRACE_MIN_S, grace_s), block_s if blocks else 0.0)

    def ask_s(self, blocks: int) -> float:
        """How long to wait for the pool to say which of so many blocks it has."""
        compute_s = self.compute_s(blocks)
        return ASK_UNKNOWN_S if compute_s is None else max(ASK_MIN_S, ASK_SHARE * compute_s)

"""InstanceLoad of an engine from its Prometheus page: a small reader for the few names that matter, and means over a
window.

The page is text from another process: lines that make no sense are skipped, values that are not numbers do not
count. Means of TTFT and TBT come from the growth of a histogram's sum and count over the last seconds; a
counter that fell means that the engine was started anew, and the window begins again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from mooncache.kvcache.instance_load import InstanceLoad

PAGE_BYTES_MAX = 16 << 20
_COUNT_MAX = (1 << 32) - 1
_TOTAL_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class MetricNames:
    """How an engine calls what we read; each is a tuple of names that are added up.

    Histograms are named without _sum and _count, in seconds.
    """

    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    kv_usage: tuple[str, ...] = ()
    ttft: tuple[str, ...] = ()
    tbt: tuple[str, ...] = ()
    prompt_tokens: tuple[str, ...] = ()
    prompt_tokens_cached: tuple[str, ...] = ()  # those among prompt_tokens that were not computed
    output_tokens: tuple[str, ...] = ()
    local_hit_tokens: tuple[str, ...] = ()
    pool_hit_tokens: tuple[str, ...] = ()

    def wanted(self) -> frozenset[str]:
        """Every sample name of the page that is read."""
        plain = (
            *self.waiting,
            *self.running,
            *self.kv_usage,
            *self.prompt_tokens,
            *self.prompt_tokens_cached,
            *self.output_tokens,
            *self.local_hit_tokens,
            *self.pool_hit_tokens,
        )
        sums = (f"{name}_{end}" for name in (*self.ttft, *self.tbt) for end in ("sum", "count"))
        return frozenset((*plain, *sums))


def read_page(text: str, wanted: frozenset[str]) -> dict[str, float]:
    """Samples of the wanted names; label sets of one name are added up."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        end = len(line)
        for at, character in enumerate(line):
            if character in "{ \t":
                end = at
                break
        name = line[:end]
        if name not in wanted:
            continue
        rest = line[line.rfind("}") + 1 :] if "{" in line else line[end:]
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if math.isfinite(value):
            found[name] = found.get(name, 0.0) + value
    return found


def read_labels(text: str, name: str) -> dict[str, str]:
    """Labels of the first sample of `name`, for info metrics; values are taken without unescaping."""
    for line in text.splitlines():
        if line.startswith(name + "{"):
            inside = line[len(name) + 1 : line.rfind("}")]
            pairs = (part.partition('="') for part in inside.split('",'))
            return {key.strip(): value.rstrip('"') for key, _, value in pairs}
    return {}


@dataclass(slots=True)
class LoadMeter:
    """Turns pages into loads. `window_s`: over how many seconds means are taken.

    The time between tokens has a window of its own: it is compared with the batch of this moment, so an old mean
    would tell the conductor the wrong speed for as long as it is remembered, and an engine makes many tokens a second.
    """

    names: MetricNames
    window_s: float = 30.0
    tbt_window_s: float = 3.0
    _points: deque[tuple[float, tuple[float, float, float, float]]] = field(default_factory=deque)

    def take(self, page: Mapping[str, float], now_s: float) -> InstanceLoad:
        """The load that a page (see `read_page`) tells at `now_s`."""
        names = self.names
        ttft = self._pair(page, names.ttft)
        tbt = self._pair(page, names.tbt)
        ttft_s, tbt_s = self._means((*ttft, *tbt), now_s)
        return InstanceLoad(
            waiting=_count(_sum(page, names.waiting)),
            running=_count(_sum(page, names.running)),
            kv_usage=min(1.0, max(0.0, _sum(page, names.kv_usage))),
            ttft_ms=ttft_s * 1e3,
            tbt_ms=tbt_s * 1e3,
            prompt_tokens_total=_total(
                _sum(page, names.prompt_tokens) - _sum(page, names.prompt_tokens_cached)
            ),
            output_tokens_total=_total(_sum(page, names.output_tokens)),
            local_hit_tokens_total=_total(_sum(page, names.local_hit_tokens)),
            pool_hit_tokens_total=_total(_sum(page, names.pool_hit_tokens)),
        )

    def reset(self, new_at_s: float | None = None) -> None:
        """Forget the window: another engine begins; `new_at_s`: it is a new one, whose counters began at 0 then."""
        self._points.clear()
        if new_at_s is not None:
            self._points.append((new_at_s, (0.0, 0.0, 0.0, 0.0)))

    def _pair(self, page: Mapping[str, float], names: tuple[str, ...]) -> tuple[float, float]:
        return _sum(page, tuple(f"{n}_sum" for n in names)), _sum(page, tuple(f"{n}_count" for n in names))

    def _means(self, point: tuple[float, float, float, float], now_s: float) -> tuple[float, float]:
        points = self._points
        if points and any(new < old for new, old in zip(point, points[-1][1], strict=True)):
            points.clear()
        points.append((now_s, point))
        # One point older than the window stays: the window begins there.
        while len(points) > 2 and now_s - points[1][0] >= self.window_s:
            points.popleft()
        first = points[0][1]
        since = next((old for at_s, old in reversed(points) if now_s - at_s >= self.tbt_window_s), first)
        return _mean(point[0] - first[0], point[1] - first[1]), _mean(
            point[2] - since[2], point[3] - since[3]
        )


def _sum(page: Mapping[str, float], names: tuple[str, ...]) -> float:
    return sum(page.get(name, 0.0) for name in names)


def _mean(total: float, count: float) -> float:
    return max(0.0, total / count) if count > 0 else 0.0


def _count(value: float) -> int:
    return int(min(max(value, 0.0), _COUNT_MAX))


def _total(value: float) -> int:
    return int(min(max(value, 0.0), _TOTAL_MAX))

"""A hit whose path is slow, vLLM: time to the first token over the same engine without a cache.

Two engines get the same prompts in turn, with vLLM's own cache off: one has a pool that holds all of them, the other
has none. The path to the pool's node is fast while the prompts are saved, then

- it has a tenth of the speed at which loading takes as long as computing (break-even), or
- it stops for ten seconds in the middle of a load.

Tokens have to be equal, and the engine's own counters say what became of the hits: loaded, cut, or not loaded at all.
Afterwards the path is fast again, and hits have to come back.
"""

from __future__ import annotations

import json
import random
import socket
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mooncache import tiny_model
from mooncache.auth import engine_key, load_cluster_token
from mooncache.bench.serving.turns import TurnsOptions, cluster_of
from mooncache.bench.throttle import ThrottledPath
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.settings import EngineKind
from mooncache.errors import DeadlineExceeded, EngineFailed
from mooncache.reporting.rows import Row, bar_row

_BAR: Final = 1.05
_THROTTLE: Final = 0.1
_STALL_S: Final = 10.0
_STALL_AFTER_BYTES: Final = 2 << 20
_ROUNDS: Final = 5
_PROMPTS: Final = 12
_WARM_UP: Final = 4
_TOKENS: Final = 1500
_ANSWER_TOKENS: Final = 8
_CALL_S: Final = 120.0
_SAVE_S: Final = 60.0
_RECOVER_S: Final = 30.0
_FAR_HOST: Final = "127.0.0.2"
_NEAR_HOST: Final = "127.0.0.1"
_MODEL: Final = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 2}
_COUNTERS: Final = {
    "hits": "mooncache_connector_hit_tokens_total",
    "cut": 'mooncache_connector_break_even_tokens_total{reason="load_cut"}',
    "computed": 'mooncache_connector_break_even_tokens_total{reason="computed_faster"}',
    "late": 'mooncache_connector_lookups_total{outcome="late"}',
    "saved": "mooncache_connector_saved_bytes_total",
    "saving": "mooncache_connector_saving_bytes",
}


@dataclass(slots=True)
class _Figures:
    """Of one way in which the path is slow: P99 of each round with and without the pool, and what was counted."""

    with_pool_s: list[float] = field(default_factory=list)
    without_s: list[float] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.with_pool_s, self.without_s, strict=True)]


class _Engine:
    """One vLLM, asked directly."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self._url = cluster.describe_instances()[0]["url"]
        self._key = engine_key(load_cluster_token(cluster.token_path))

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        return urllib.request.urlopen(
            urllib.request.Request(f"{self._url}{path}", data, headers), timeout=_CALL_S
        )

    def ask(self, tokens: list[int]) -> tuple[float, list[int]]:
        """Seconds to the first token, and all tokens."""
        body = {
            "model": "bench",
            "prompt": tokens,
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        answer: list[int] = []
        first_s = 0.0
        began_s = time.perf_counter()
        with self._open("/v1/completions", body) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                for choice in json.loads(line[6:]).get("choices", ()):
                    first_s = first_s or time.perf_counter() - began_s
                    answer += choice.get("token_ids") or []
        if len(answer) != _ANSWER_TOKENS:
            raise EngineFailed(f"The engine answered {len(answer)} tokens instead of {_ANSWER_TOKENS}.")
        return first_s, answer

    def counters(self) -> dict[str, float]:
        """What the connector has counted so far."""
        with self._open("/metrics") as response:
            lines = response.read().decode().splitlines()
        found = dict.fromkeys(_COUNTERS, 0.0)
        for line in lines:
            series, _, value = line.rpartition(" ")
            for name, wanted in _COUNTERS.items():
                metric, _, label = wanted.partition("{")
                if series.split("{")[0] == metric and label.rstrip("}") in series:
                    found[name] += float(value)
        return found


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """P99 of the time to the first token with a slow path over that without a cache, medians of the rounds.

    Raises:
        EngineFailed: a request was not served, tokens differed, or hits were not cut or did not come back.
        DeadlineExceeded: saves did not end.
    """
    rounds = 1 if quick else _ROUNDS
    throttled, stalled = _Figures(), _Figures()
    with ExitStack() as stack:
        progress("starting two engines")
        model = tiny_model.build(Path(tempfile.gettempdir()) / "mooncache-bench-slow-path-model", **_MODEL)
        options = TurnsOptions(engine=EngineKind.VLLM, model=str(model))
        plain = stack.enter_context(
            cluster_of(options, "plain", {**_OWN_CACHE_OFF, "MOONCACHE_CONNECTOR_ENABLED": "false"}, 0)
        )
        path, cluster = stack.enter_context(_pool_behind(options))
        lab = _Lab(_Engine(plain), _Engine(cluster), path)
        lab.warm_up()
        for number in range(rounds):
            progress(f"a tenth of break-even, round {number + 1} of {rounds}")
            lab.throttled(throttled)
            progress(f"stopped for ten seconds, round {number + 1} of {rounds}")
            lab.stalled(stalled)
    return [
        Row("prompt", float(_TOKENS), "tokens"),
        *_rows(f"path at {_THROTTLE:g}x of break-even", throttled),
        *_rows(f"path stopped for {_STALL_S:g} s in mid-load", stalled),
        Row("rounds in which hits came back when the path was fast again", float(lab.recovered), ""),
    ]


_OWN_CACHE_OFF: Final = {
    "MOONCACHE_VLLM_EXTRA_ARGS": "--no-enable-prefix-caching,--max-num-batched-tokens,4096"
}


@contextmanager
def _pool_behind(options: TurnsOptions) -> Iterator[tuple[ThrottledPath, EmbeddedCluster]]:
    """An engine whose pool is reached over a path that can be slowed down; shared memory is off."""
    with socket.socket() as probe:
        probe.bind((_FAR_HOST, 0))
        port = probe.getsockname()[1]
    env = {
        **_OWN_CACHE_OFF,
        "MOONCACHE_STORE_NODE_ADVERTISE_HOST": _FAR_HOST,
        "MOONCACHE_STORE_NODE_DATA_PORT": str(port),
        "MOONCACHE_CLIENT_SHM_ENABLED": "false",
    }
    with (
        ThrottledPath(_FAR_HOST, _NEAR_HOST, port) as path,
        cluster_of(options, "slow", env, 0) as cluster,
    ):
        yield path, cluster


class _Lab:
    """The two engines and the path."""

    def __init__(self, plain: _Engine, pooled: _Engine, path: ThrottledPath) -> None:
        self._plain, self._pooled, self._path = plain, pooled, path
        self._chooser = random.Random(0)
        self._plain_s: list[float] = []
        self.recovered = 0

    def _prompts(self, count: int) -> list[list[int]]:
        return [[self._chooser.randrange(10, 8000) for _ in range(_TOKENS)] for _ in range(count)]

    def warm_up(self) -> None:
        """Both engines compute and the pool's one loads, so that they know their speeds."""
        prompts = self._saved(_WARM_UP)
        for tokens in prompts:
            self._plain_s.append(self._both(tokens)[0])
        if not self._pooled.counters()["hits"]:
            raise EngineFailed("Nothing was loaded over the fast path.")

    def _saved(self, count: int) -> list[list[int]]:
        """New prompts that the pool has whole."""
        prompts, before = self._prompts(count), self._pooled.counters()["saved"]
        for tokens in prompts:
            self._pooled.ask(tokens)
        until_s, wanted = time.monotonic() + _SAVE_S, before
        while time.monotonic() < until_s:
            self._pooled.ask(prompts[0][:8])  # the engine hands its counters on with a step
            found = self._pooled.counters()
            if found["saved"] > before and found["saved"] == wanted:
                self._kv_bytes = (found["saved"] - before) / count
                return prompts
            wanted = found["saved"]
            time.sleep(0.2)
        raise DeadlineExceeded("The prompts were not saved in time.")

    def _both(self, tokens: list[int]) -> tuple[float, float]:
        """Seconds to the first token without and with the pool, asked in an order of chance."""
        engines = [self._plain, self._pooled]
        if self._chooser.random() < 0.5:
            engines.reverse()
        found = {engine: engine.ask(tokens) for engine in engines}
        (plain_s, expected), (pooled_s, answer) = found[self._plain], found[self._pooled]
        if answer != expected:
            raise EngineFailed(f"With the pool the engine answered {answer}, without it {expected}.")
        return plain_s, pooled_s

    def _measure(self, figures: _Figures, prompts: list[list[int]]) -> dict[str, float]:
        before = self._pooled.counters()
        times = [self._both(tokens) for tokens in prompts]
        self._pooled.ask(prompts[0][:8])
        grown = {name: value - before[name] for name, value in self._pooled.counters().items()}
        figures.without_s.append(_p99([plain_s for plain_s, _ in times]))
        figures.with_pool_s.append(_p99([pooled_s for _, pooled_s in times]))
        for name, value in grown.items():
            figures.counted[name] = figures.counted.get(name, 0.0) + value
        return grown

    def throttled(self, figures: _Figures) -> None:
        """A round at a tenth of the speed of break-even."""
        prompts = self._saved(_PROMPTS)
        self._path.rate_bytes_s = _THROTTLE * self._kv_bytes / statistics.median(self._plain_s)
        try:
            grown = self._measure(figures, prompts)
        finally:
            self._path.rate_bytes_s = None
        if not grown["cut"] + grown["computed"] + grown["late"]:
            raise EngineFailed(f"No load was cut or left out on the slow path: {grown}.")
        self._recover()

    def stalled(self, figures: _Figures) -> None:
        """A round in which the path stops within the first load."""
        prompts = self._saved(_PROMPTS)
        self._path.stop_after(_STALL_AFTER_BYTES, _STALL_S)
        try:
            grown = self._measure(figures, prompts)
        finally:
            self._path.stopped_until_s = 0.0
        if not grown["cut"]:
            raise EngineFailed(f"No load was cut though the path stopped: {grown}.")
        self._recover()

    def _recover(self) -> None:
        """Ask until a whole prompt is a hit again."""
        until_s = time.monotonic() + _RECOVER_S
        while time.monotonic() < until_s:
            prompts, before = self._saved(1), self._pooled.counters()["hits"]
            self._both(prompts[0])
            self._pooled.ask(prompts[0][:8])
            if self._pooled.counters()["hits"] - before > _TOKENS / 2:
                self.recovered += 1
                return
        raise EngineFailed("Hits did not come back when the path was fast again.")


def _p99(values: list[float]) -> float:
    """Interpolated between the ranks around it."""
    ordered = sorted(values)
    at = 0.99 * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def _rows(what: str, figures: _Figures) -> list[Row]:
    base_ms = statistics.median(figures.without_s) * 1e3
    return [
        Row(f"{what}: P99 TTFT, no cache", base_ms, "ms"),
        Row(f"{what}: P99 TTFT, with the pool", statistics.median(figures.with_pool_s) * 1e3, "ms"),
        bar_row(f"{what}: P99 TTFT over no cache", statistics.median(figures.ratios), "x", at_most=_BAR),
        Row(f"{what}: the same, worst round", max(figures.ratios), "x"),
        Row(f"{what}: tokens loaded", figures.counted["hits"], "tokens"),
        Row(f"{what}: tokens of loads that were cut", figures.counted["cut"], "tokens"),
        Row(f"{what}: tokens whose load did not begin", figures.counted["computed"], "tokens"),
        Row(f"{what}: questions that were not waited for", figures.counted["late"], ""),
    ]

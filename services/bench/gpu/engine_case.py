"""The small engine with the pool on and off: the same tokens, and the time to the first token against recomputing.

Idea: one engine without a pool and one with it, one after the other on the same device, each in this process. A prompt
is computed once and saved; then the engine's own cache is emptied and the prompt comes again, from the pool. The engine
without a pool computes the same prompts with an empty cache. Times are those of the second pass over the prompts, so
that nothing which is made on first use counts.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mooncache.errors import EngineTimeout
from mooncache.reporting.rows import Report, bar_row

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Shape of the random model, prompts in tokens, and limits. `seconds_max` ends the list of prompts early."""

    device: str = "cuda"
    dtype: str = "float32"
    layers: int = 4
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 8192
    prompts: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384, 32_000)
    new_tokens: int = 8
    block_tokens: int = 32
    chunk_tokens: int = 2048
    kv_cache_bytes: int = 6 << 30
    pool_bytes: int = 8 << 30
    seconds_max: float = 240.0
    wait_s: float = 120.0


@dataclass
class _Answer:
    """A sink of the engine."""

    outputs: list[Any] = field(default_factory=list)
    first_s: float = 0.0
    ended: threading.Event = field(default_factory=threading.Event)

    def put(self, output: Any) -> None:
        if output.chosen and not self.first_s:
            self.first_s = time.perf_counter()
        self.outputs.append(output)
        if output.finish:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [output.chosen.token for output in self.outputs if output.chosen]


@dataclass(frozen=True, slots=True)
class Pass:
    """What one prompt gave: its tokens, seconds to the first of them, and prompt tokens that the pool gave."""

    tokens: list[int]
    first_token_s: float
    loaded_tokens: int


def measure(report: Report, options: EngineOptions, progress: Progress) -> None:
    """Add two rows for each prompt and one for the tokens.

    Raises:
        EngineTimeout: an answer did not come.
        ConfigInvalid: the device cannot be used.
    """
    from mooncache import connect, tiny_model
    from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster

    end_s = time.monotonic() + options.seconds_max
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-gpu-") as name:
        folder = Path(name)
        progress("making the model")
        model = tiny_model.build(
            folder / "model",
            layers=options.layers,
            hidden=options.hidden,
            heads=options.heads,
            kv_heads=options.kv_heads,
            vocab=options.vocab,
            max_positions=max(options.prompts) + options.new_tokens + 1,
        )
        report.notes.append(
            f"engine: random Llama, {options.layers} layers of hidden size {options.hidden}, {options.heads} heads, "
            f"{options.kv_heads} KV heads, {options.dtype} on {options.device}; a store node in shared memory"
        )
        with _engine(model, folder / "off", options, None) as (engine, parts):
            without = _passes(engine, parts, options, end_s, progress, "pool off")
        settings = ClusterSettings(
            state_dir=folder / "pool", nodes=1, capacity_bytes=options.pool_bytes, port=0, log_level="error"
        )
        with (
            EmbeddedCluster(settings) as pool,
            _engine(model, folder / "on", options, lambda: connect(**pool.client_settings())) as (
                engine,
                parts,
            ),
        ):
            with_pool = _passes(engine, parts, options, end_s, progress, "pool on")
    _add_rows(report, options, without, with_pool)


def _add_rows(
    report: Report, options: EngineOptions, without: dict[int, Pass], with_pool: dict[int, Pass]
) -> None:
    both = [count for count in options.prompts if count in without and count in with_pool]
    if len(both) < len(options.prompts):
        report.notes.append(f"prompts were measured up to {max(both, default=0)} tokens: the time was over")
    same = sum(without[count].tokens == with_pool[count].tokens for count in both)
    report.add(
        bar_row(f"prompts of {len(both)} with the same tokens", float(same), "", at_least=float(len(both)))
    )
    for count in both:
        name = f"first token of {count:,} tokens, computed"
        report.add(
            bar_row(name, without[count].first_token_s * 1e3, "ms"),
            bar_row(
                f"first token of {count:,} tokens, {with_pool[count].loaded_tokens:,} from the pool",
                with_pool[count].first_token_s * 1e3,
                "ms",
                against=name,
                reference=without[count].first_token_s * 1e3,
            ),
        )


@contextmanager
def _engine(
    model: Path, state_dir: Path, options: EngineOptions, connect: Callable[[], Any] | None
) -> Iterator[tuple[Any, Any]]:
    from mooncache.config import load
    from mooncache.hf_engine.service import HfOptions, build

    values = {
        "hf.device": options.device,
        "hf.dtype": options.dtype,
        "hf.block_tokens": options.block_tokens,
        "hf.prefill_chunk_tokens": options.chunk_tokens,
        "hf.kv_cache_bytes": options.kv_cache_bytes,
        "connector.enabled": connect is not None,
        "connector.load_timeout_s": options.wait_s / 2,
        "connector.save_timeout_s": options.wait_s / 2,
        "connector.save_queue_bytes_max": options.kv_cache_bytes,
        "cluster.state_dir": str(state_dir),
    }
    parts = build(load(env={}, overrides=values), HfOptions(model=str(model)), connect)
    parts.start()
    try:
        _until(
            lambda: parts.pool is None or parts.pool.link.connected.is_set(),
            options,
            "the pool was not found",
        )
        yield parts.engine, parts
    finally:
        parts.stop()


def _passes(
    engine: Any, parts: Any, options: EngineOptions, end_s: float, progress: Progress, what: str
) -> dict[int, Pass]:
    found: dict[int, Pass] = {}
    for count in options.prompts:
        if time.monotonic() > end_s:
            break
        progress(f"{what}: {count} tokens")
        source = random.Random(count)
        tokens = [source.randrange(300, options.vocab) for _ in range(count)]
        for _ in range(2):
            _until(
                lambda: parts.pool is None or not parts.pool.mover.saving_bytes, options, "saves did not end"
            )
            _forget(engine, options)
            found[count] = _ask(engine, parts, tokens, options)
    return found


def _ask(engine: Any, parts: Any, tokens: list[int], options: EngineOptions) -> Pass:
    from mooncache.hf_engine.core.sequence import Sampling, Sequence
    from mooncache.kvcache.leg_hint import LegHint

    answer = _Answer()
    sequence = Sequence(
        tokens=list(tokens),
        sampling=Sampling(max_tokens=options.new_tokens, temperature=0.0),
        passport=parts.passport,
        block_tokens=parts.passport.block_tokens,
        salt="",
        hint=LegHint(),
        sink=answer,
    )
    begun_s = time.perf_counter()
    engine.submit([sequence])
    if not answer.ended.wait(options.wait_s):
        raise EngineTimeout(f"A prompt of {len(tokens)} tokens was not answered in {options.wait_s:g} s.")
    report = answer.outputs[-1].cache
    return Pass(answer.tokens, answer.first_s - begun_s, report.loaded_tokens if report else 0)


def _forget(engine: Any, options: EngineOptions) -> None:
    """Empty the engine's own cache, on the engine's thread."""
    done = threading.Event()

    def action() -> None:
        engine.blocks.forget()
        done.set()

    engine.post(action)
    if not done.wait(options.wait_s):
        raise EngineTimeout("The engine's thread does not answer.")


def _until(condition: Callable[[], bool], options: EngineOptions, what: str) -> None:
    end_s = time.monotonic() + options.wait_s
    while not condition():
        if time.monotonic() > end_s:
            raise EngineTimeout(f"{what} in {options.wait_s:g} s")
        time.sleep(0.01)

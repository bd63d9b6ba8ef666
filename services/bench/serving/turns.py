"""Later turns of a conversation: time to the first token with the pool, with the engine's own cache, and with nothing.

Each turn adds a question to everything said before. The pool's cluster runs prefill and decode apart. To show what a
shared cache is for, its conversation also moves: both engines are restarted in the middle, and the next turn still
finds its blocks. The others are one engine for everything: with its own prefix cache, and without any.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from mooncache.auth import load_cluster_token, tenant_token
from mooncache.bench.serving.talk import ChatReply, ask
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.layout import is_worker
from mooncache.cluster.settings import EngineKind
from mooncache.errors import Internal
from mooncache.reporting.rows import Report, Row, bar_row

Progress = Callable[[str], None]
TURNS = 8
ANSWER_TOKENS = 16
NO_POOL: Final = {"MOONCACHE_CONNECTOR_ENABLED": "false"}
# Where the hand-over is what is measured: no decode engine computes a prompt because that would cost less.
HANDED_OVER: Final = {"MOONCACHE_CONDUCTOR_INLINE_TOKENS_MAX": "0"}
VLLM_CACHE_OFF: Final = {"MOONCACHE_VLLM_EXTRA_ARGS": "--no-enable-prefix-caching"}
_QUESTION = "Turn {turn} of conversation {talk}. Consider number {turn}, then consider it again. "


@dataclass(frozen=True, slots=True)
class TurnsOptions:
    """`turn_tokens` is roughly what each question adds; `talks` conversations give medians."""

    engine: EngineKind = EngineKind.VLLM
    model: str = ""
    turn_tokens: int = 400
    talks: int = 5
    start_timeout_s: float = 600.0


@contextmanager
def cluster_of(
    options: TurnsOptions,
    name: str,
    env: dict[str, str],
    prefill: int,
    decode: int = 1,
    *,
    capacity_bytes: int = 1 << 30,
) -> Iterator[EmbeddedCluster]:
    """A cluster of its own in a folder of its own, gone afterwards. `capacity_bytes` is of each store node."""
    with tempfile.TemporaryDirectory(prefix=f"mooncache-bench-{name}-") as folder:
        settings = ClusterSettings(
            state_dir=Path(folder),
            engine=options.engine,
            model=options.model,
            model_name="bench",
            capacity_bytes=capacity_bytes,
            prefill=prefill,
            decode=decode,
            port=0,
            conductor_port=0,
            gateway_port=0,
            extra_env=tuple({"MOONCACHE_CONDUCTOR_ADMISSION_ENABLED": "false", **env}.items()),
        )
        cluster = EmbeddedCluster(settings)
        cluster.start(options.start_timeout_s)
        try:
            yield cluster
        finally:
            cluster.stop()


def run(options: TurnsOptions, progress: Progress) -> Report:
    """All three clusters, one after the other, and a report."""
    report = Report(f"turns of a conversation, engine {options.engine}")
    own_cache_off = VLLM_CACHE_OFF if options.engine == EngineKind.VLLM else {}
    progress("no cache: starting")
    with cluster_of(options, "nothing", {**NO_POOL, **own_cache_off}, 0) as cluster:
        nothing = asyncio.run(_talks(cluster, options, lambda text: progress(f"no cache: {text}")))
    own: list[list[ChatReply]] | None = None
    if options.engine == EngineKind.VLLM:
        progress("own cache: starting")
        with cluster_of(options, "own", NO_POOL, 0) as cluster:
            own = asyncio.run(_talks(cluster, options, lambda text: progress(f"own cache: {text}")))
    progress("pool: starting")
    with cluster_of(options, "pool", {}, 1) as cluster:
        pool = asyncio.run(_talks(cluster, options, lambda text: progress(f"pool: {text}")))
        progress("pool: both engines start anew")
        moved = asyncio.run(_after_restart(cluster, options, progress))
    _rows(report, nothing, own, pool, moved)
    return report


def _rows(
    report: Report,
    nothing: list[list[ChatReply]],
    own: list[list[ChatReply]] | None,
    pool: list[list[ChatReply]],
    moved: ChatReply | None,
) -> None:
    base = _ttft(nothing, TURNS - 1)
    report.add(Row("prompt of the last turn", float(pool[0][-1].prompt_tokens), "tokens"))
    report.add(Row("ttft, last turn, no cache", base * 1e3, "ms"))
    report.add(Row("ttft, first turn, no cache", _ttft(nothing, 0) * 1e3, "ms"))
    if own is not None:
        report.add(
            bar_row(
                "ttft, last turn, engine's own cache",
                _ttft(own, TURNS - 1) * 1e3,
                "ms",
                against="no cache",
                reference=base * 1e3,
            )
        )
    report.add(Row("ttft, first turn, pool", _ttft(pool, 0) * 1e3, "ms"))
    last = _ttft(pool, TURNS - 1) * 1e3
    report.add(
        bar_row("ttft, last turn, pool", last, "ms", against="no cache", reference=base * 1e3, at_most=1.0)
    )
    share = statistics.median(talk[-1].cached_tokens / talk[-1].prompt_tokens for talk in pool)
    report.add(Row("cached share of the last turn's prompt, pool", share, "of 1"))
    if moved is not None:
        report.add(
            bar_row(
                "ttft, turn after both engines restarted, pool",
                moved.ttft_s * 1e3,
                "ms",
                against="no cache",
                reference=base * 1e3,
            )
        )
        report.add(Row("cached tokens of that turn", float(moved.cached_tokens), "tokens"))
        report.add(Row("prompt tokens of that turn", float(moved.prompt_tokens), "tokens"))


def _ttft(talks: list[list[ChatReply]], turn: int) -> float:
    return statistics.median(talk[turn].ttft_s for talk in talks)


async def _talks(
    cluster: EmbeddedCluster, options: TurnsOptions, progress: Progress
) -> list[list[ChatReply]]:
    """Several conversations, one after the other; the very first one only warms up."""
    talks = []
    async with aiohttp.ClientSession() as session:
        for talk in range(options.talks + 1):
            progress(f"conversation {talk} of {options.talks}")
            talks.append(await conversation(session, cluster, options, talk))
    return talks[1:]


async def conversation(
    session: aiohttp.ClientSession,
    cluster: EmbeddedCluster,
    options: TurnsOptions,
    talk: int,
    turns: int = TURNS,
) -> list[ChatReply]:
    """The answers of one conversation, turn by turn; no other `talk` has its prompts.

    Raises:
        Internal: a turn was not answered.
    """
    answers: list[ChatReply] = []
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        messages.append(_question(options, talk, turn))
        answer = await _ask(session, cluster, messages)
        if answer.error:
            raise Internal(f"turn {turn} of conversation {talk}: {answer.error}")
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})
    return answers


def _question(options: TurnsOptions, talk: int, turn: int) -> dict[str, str]:
    text = _QUESTION.format(turn=turn, talk=talk)
    return {"role": "user", "content": text * max(1, options.turn_tokens // 24)}


async def _ask(
    session: aiohttp.ClientSession, cluster: EmbeddedCluster, messages: list[dict[str, str]]
) -> ChatReply:
    body = {"model": "bench", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    return await ask(session, cluster.layout.gateway_url, demo_key(cluster), body, 600.0)


async def _after_restart(
    cluster: EmbeddedCluster, options: TurnsOptions, progress: Progress
) -> ChatReply | None:
    """One conversation whose last turn meets engines that have just been started: their own caches are empty."""
    async with aiohttp.ClientSession() as session:
        talk = options.talks + 1
        answers = await conversation(session, cluster, options, talk, TURNS - 1)
        await asyncio.to_thread(_restart_engines, cluster, options.start_timeout_s)
        progress("pool: engines are back")
        # Something else first: a fresh engine's very first request pays for its own warm-up.
        await conversation(session, cluster, options, talk + 1, 2)
        messages = []
        for turn, answer in enumerate(answers):
            messages.append(_question(options, talk, turn))
            messages.append({"role": "assistant", "content": answer.text})
        messages.append(_question(options, talk, TURNS - 1))
        found = await _ask(session, cluster, messages)
        return None if found.error else found


def _restart_engines(cluster: EmbeddedCluster, timeout_s: float) -> None:
    """kill -9 of every worker and its engine; returns when new ones are ready. Raises Internal after `timeout_s`."""
    former = {row["url"] for row in cluster.describe_instances()}
    for name in [name for name, part in cluster.parts.items() if is_worker(part)]:
        cluster.kill(name)
        cluster.restart(name)
    deadline_s = time.monotonic() + timeout_s
    while former & {
        row["url"] for row in cluster.describe_instances()
    }:  # the conductor's last word of the dead
        if time.monotonic() > deadline_s:
            raise Internal("the killed engines did not come back")
        time.sleep(0.2)
    cluster.wait_ready(max(0.1, deadline_s - time.monotonic()))


def demo_key(cluster: EmbeddedCluster) -> str:
    """An API key of the benchmark's tenant."""
    return tenant_token(load_cluster_token(cluster.token_path), "bench").text

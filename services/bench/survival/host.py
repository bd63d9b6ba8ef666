"""A host with a gateway, an engine with its worker, and a store node is gone: what the other host's clients notice.

Two hosts, as far as processes can tell: each has a host id of its own, blocks go between them over TCP, and all
processes of one are killed in the same instant. Clients ask the gateway of the other host in a stream, with pauses: one
engine is enough for them, so that no lack of engines is measured. Another client streams through the gateway that
goes. Blocks lie on one node or on both.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp

import mooncache
from mooncache import tiny_model
from mooncache.bench.block_reads import BlockReads
from mooncache.bench.serving.talk import ChatReply, ask
from mooncache.bench.survival.upgrade import QUESTIONS
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.ports import PortPicker
from mooncache.cluster.processes import Part, stop_all
from mooncache.cluster.settings import EngineKind
from mooncache.errors import DeadlineExceeded, EngineFailed, MooncacheError
from mooncache.reporting.rows import Row, bar_row, p99

_MODEL: Final = "tiny"
_TOKENS: Final = 24
_NODE, _INSTANCE, _GATEWAY = "node-2", "decode-2", "gateway-2"
"""What the host has that is lost."""
_CLIENTS: Final = 2
_PAUSE_S: Final = 0.15  # of each client, after an answer
_BLOCKS: Final = 200
_BLOCK: Final = 16 << 10
_READ_PAUSE_S: Final = 0.002
_CALL_S: Final = 60.0
_START_S: Final = 300.0
_P99_BAR: Final = 1.2


class TwoHosts(EmbeddedCluster):
    """What `mooncache up` starts, on two hosts; `second` is the gateway of the one that is lost."""

    second: Part

    def _prepare(self) -> None:
        super()._prepare()
        for name, part in self.parts.items():
            host = "host-b" if name in (_NODE, _INSTANCE) else "host-a"
            ids = {"MOONCACHE_STORE_NODE_HOST_ID": host, "MOONCACHE_CLIENT_HOST_ID": host}
            part.env = {**part.env, **ids}
        first = self.parts["gateway"]
        ports = PortPicker("127.0.0.1")
        own = {
            "MOONCACHE_GATEWAY_PORT": str(ports.any()),
            "MOONCACHE_GATEWAY_METRICS_PORT": str(ports.any()),
            "MOONCACHE_GATEWAY_BATCH_DIR": str(self.state_dir / "batches-2"),
            "MOONCACHE_CLIENT_HOST_ID": "host-b",
        }
        ports.close()
        log = first.log_path.with_name(f"{_GATEWAY}.log")
        self.second = replace(first, name=_GATEWAY, env={**first.env, **own}, log_path=log, listener=None)

    @property
    def second_url(self) -> str:
        """Base URL of the gateway that is lost."""
        return f"http://127.0.0.1:{self.second.env['MOONCACHE_GATEWAY_PORT']}"

    def stop(self, timeout_s: float = 8.0) -> list[str]:
        """Stop everything; returns the names of parts that had to be killed."""
        second = [self.second] if hasattr(self, "second") else []
        return stop_all(second, timeout_s) + super().stop(timeout_s)

    def lose_host(self) -> None:
        """kill -9 to all processes of the second host, one right after the other."""
        engine = next(row for row in self.describe_instances() if row["instance_id"] == _INSTANCE)
        parts = [self.second, self.parts[_INSTANCE], self.parts[_NODE]]
        for pid in (*(part.pid for part in parts), int(engine["engine_pid"])):
            os.kill(pid, signal.SIGKILL)
        for part in parts:
            part.wait(10.0)


@contextmanager
def two_hosts(folder: Path, model: Path) -> Iterator[TwoHosts]:
    """A running cluster on two hosts. Raises as `EmbeddedCluster.start` does."""
    settings = ClusterSettings(
        state_dir=folder,
        nodes=2,
        capacity_bytes=64 << 20,
        port=0,
        conductor_port=0,
        gateway_port=0,
        engine=EngineKind.HF,
        model=str(model),
        model_name=_MODEL,
        prefill=0,
        decode=2,
        extra_env=(("OMP_NUM_THREADS", "1"), ("MOONCACHE_CONNECTOR_BREAK_EVEN", "false")),
    )
    cluster = TwoHosts(settings)
    cluster.start(_START_S)
    try:
        cluster.second.start()
        yield cluster
    finally:
        cluster.stop()


@dataclass(frozen=True, slots=True)
class _AskedStream:
    """One request: when it began, and what came back. `is_right`: as far as it came, it was the answer."""

    begun_s: float
    reply: ChatReply
    is_right: bool

    @property
    def on_lost_host(self) -> bool:
        """Whether the lost engine generated it.

        When the conductor is late, a gateway takes the next engine, and no header names it. Such a stream that broke
        off after its beginning was on the lost one: the other engine runs on.
        """
        if "decode=" in self.reply.plan:
            return f"decode={_INSTANCE};" in f"{self.reply.plan};"
        return bool(self.reply.error) and not self.reply.error.startswith("HTTP ")


@dataclass
class _GatewayClients:
    """Clients that ask one gateway, until `ended` is set."""

    url: str
    key: str
    expected: dict[str, str]
    streams: list[_AskedStream] = field(default_factory=list)

    async def run(self, ended: asyncio.Event, number: int, *, until_error: bool = False) -> None:
        """One client."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            while not ended.is_set():
                question, number = QUESTIONS[number % len(QUESTIONS)], number + 1
                begun_s = time.monotonic()
                reply = await ask(session, self.url, self.key, _body(question), _CALL_S)
                wanted = self.expected[question]
                is_right = wanted.startswith(reply.text) if reply.error else reply.text == wanted
                self.streams.append(_AskedStream(begun_s, reply, is_right))
                if until_error and reply.error:
                    return
                await asyncio.sleep(_PAUSE_S)

    async def answered(self, count: int) -> None:
        """Wait for so many more answers. Raises DeadlineExceeded."""
        wanted, deadline_s = len(self.streams) + count, time.monotonic() + _START_S
        while len(self.streams) < wanted:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{self.url} gave too few answers within {_START_S:g} s.")
            await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class LostHost:
    """What was seen. Times in seconds; `late` are broken streams that only a time limit ended."""

    served: int
    broken: list[str]  # errors of streams on the lost host
    late: list[str]
    failed_elsewhere: list[str]
    wrong: list[str]
    before_s: list[float]
    after_s: list[float]
    reads_before_s: float  # P99 of blocks on the other node
    reads_after_s: float
    other_reads_failed: int
    copies_missing: int  # blocks with a copy on each host that are no longer found
    misses: int  # blocks that only the lost node had
    other_bytes: int


def _body(question: str, **more: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": _MODEL, "messages": messages, "max_tokens": _TOKENS, "temperature": 0, **more}


async def _learn(url: str, key: str) -> dict[str, str]:
    """What is answered when nothing is cached. Raises EngineFailed."""
    expected = {}
    async with aiohttp.ClientSession() as session:
        for question in QUESTIONS:
            body = _body(question, cache_salt=f"apart {question[-24:]}")
            found = await ask(session, url, key, body, _CALL_S)
            if found.error:
                raise EngineFailed(found.error)
            expected[question] = found.text
    return expected


async def _second_ready(cluster: TwoHosts, key: str) -> None:
    """Wait until the second gateway serves. Raises EngineFailed."""
    deadline_s, error = time.monotonic() + _START_S, ""
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline_s:
            reply = await ask(session, cluster.second_url, key, _body(QUESTIONS[0]), _CALL_S)
            error = reply.error
            if not error:
                return
            await asyncio.sleep(0.2)
    raise EngineFailed(f"The second gateway does not serve: {error}. {cluster.second.log_tail()}")


async def _serve(
    cluster: TwoHosts, count: int, progress: Callable[[str], None]
) -> tuple[float, _GatewayClients, _GatewayClients]:
    """Lose the host under load; when that was, and what the clients of both gateways saw."""
    key = cluster.demo_key_path.read_text().strip()
    expected = await _learn(cluster.layout.gateway_url, key)
    await _second_ready(cluster, key)
    stays = _GatewayClients(cluster.layout.gateway_url, key, expected)
    goes = _GatewayClients(cluster.second_url, key, expected)
    ended = asyncio.Event()
    tasks = [asyncio.create_task(stays.run(ended, number)) for number in range(_CLIENTS)]
    tasks.append(asyncio.create_task(goes.run(ended, 0, until_error=True)))
    try:
        await stays.answered(len(QUESTIONS) * 2)  # until all is cached
        stays.streams.clear()
        await stays.answered(count)
        progress("gateway, worker, engine and node of one host are killed")
        await asyncio.to_thread(cluster.lose_host)
        lost_s = time.monotonic()
        await stays.answered(count)
    finally:
        ended.set()
        await asyncio.gather(*tasks)
    return lost_s, stays, goes


def lose_host(cluster: TwoHosts, count: int, progress: Callable[[str], None]) -> LostHost:
    """Lose one of two hosts under load.

    Args:
        count: answers before, and after.

    Raises:
        EngineFailed, DeadlineExceeded: the load did not come about.
    """
    values = {f"block-{number}": number.to_bytes(4, "little") * (_BLOCK // 4) for number in range(_BLOCKS)}
    keys, data = list(values), list(values.values())
    half = _BLOCKS // 2
    with mooncache.connect(**cluster.client_settings(), shm=False, timeout_s=20.0) as client:
        placed = client.put_many(keys[:half], data[:half])
        placed.raise_for_errors()
        client.put_many(keys[half:], data[half:], replicas=2).raise_for_errors()
        there = dict(zip(keys[:half], placed.node_ids, strict=True))
        others = [key for key, node in there.items() if node != _NODE]
        reads = BlockReads(client, others, pause_s=_READ_PAUSE_S)
        begun_s = time.monotonic()
        try:
            lost_s, stays, goes = asyncio.run(_serve(cluster, count, progress))
        finally:
            reads.end()
        found = {key: _get(client, key) for key in keys}
    broken = [one for one in stays.streams if one.reply.error and one.on_lost_host]
    broken += [one for one in goes.streams if one.reply.error]
    whole = [one for one in stays.streams if not one.reply.error and not one.on_lost_host]
    return LostHost(
        served=sum(not one.reply.error for one in stays.streams),
        broken=[one.reply.error for one in broken],
        late=[one.reply.error for one in broken if "TimeoutError" in one.reply.error],
        failed_elsewhere=[
            one.reply.error for one in stays.streams if one.reply.error and not one.on_lost_host
        ],
        wrong=[one.reply.text for one in (*stays.streams, *goes.streams) if not one.is_right],
        before_s=[one.reply.total_s for one in whole if one.begun_s + one.reply.total_s < lost_s],
        after_s=[one.reply.total_s for one in whole if one.begun_s >= lost_s],
        reads_before_s=reads.p99_s(begun_s, lost_s),
        reads_after_s=reads.p99_s(lost_s, time.monotonic()),
        other_reads_failed=reads.failed,
        copies_missing=sum(found[key] is None for key in keys[half:]),
        misses=sum(found[key] is None for key in there if key not in others),
        other_bytes=sum(value is not None and value != values[key] for key, value in found.items()),
    )


def _get(client: mooncache.Client, key: str) -> bytes | None:
    try:
        return client.get(key)
    except MooncacheError:
        return None  # of a node that is known to the map and does not answer: the block is not to be had, as by a miss


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Streams that broke, requests that failed elsewhere, and latencies of the others after over before."""
    progress("starting a pool of two nodes, two engines and two gateways on two hosts")
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-") as made:
        model = tiny_model.build(Path(made) / "model", layers=2, hidden=128, heads=4, kv_heads=2, vocab=2048)
        with two_hosts(Path(made) / "state", model) as cluster:
            seen = lose_host(cluster, 60 if quick else 400, progress)
    before, after = seen.before_s, seen.after_s
    return [
        Row("requests served by the other gateway", float(seen.served), ""),
        Row("streams on the lost host that broke off", float(len(seen.broken)), ""),
        bar_row("of these: ended by a time limit alone", float(len(seen.late)), "", at_most=0),
        bar_row("failed requests elsewhere", float(len(seen.failed_elsewhere)), "", at_most=0),
        bar_row("wrong answers", float(len(seen.wrong) + seen.other_bytes), "", at_most=0),
        bar_row("blocks with a copy elsewhere that were lost", float(seen.copies_missing), "", at_most=0),
        Row("blocks of the lost node alone: misses", float(seen.misses), ""),
        bar_row("gets of the other node's blocks that failed", float(seen.other_reads_failed), "", at_most=0),
        Row("median request before, other engine", median(before) * 1e3, "ms"),
        bar_row(
            "median request after",
            median(after) * 1e3,
            "ms",
            against="before",
            reference=median(before) * 1e3,
        ),
        Row("P99 request before, other engine", p99(before) * 1e3, "ms"),
        bar_row(
            "P99 request after",
            p99(after) * 1e3,
            "ms",
            against="before",
            reference=p99(before) * 1e3,
            at_most=_P99_BAR,
        ),
        Row("P99 get before, other node's blocks", seen.reads_before_s * 1e3, "ms"),
        bar_row(
            "P99 get after",
            seen.reads_after_s * 1e3,
            "ms",
            against="before",
            reference=seen.reads_before_s * 1e3,
            at_most=_P99_BAR,
        ),
    ]

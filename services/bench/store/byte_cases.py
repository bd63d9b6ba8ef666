"""Blocks of 1 MiB in batches, blocks of 4 KiB one by one, and chains of keys: ours, the original, raw copies.

Every repeat goes round all systems, so a noisy moment falls on all of them; the rows are medians.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack

from mooncache import _native
from mooncache.bench.store import peer_mooncake
from mooncache.bench.store.options import StoreBenchOptions
from mooncache.bench.store.ours import connect, start_node
from mooncache.bench.store.peer_mooncake import PeerMooncake
from mooncache.bench.store.raw_socket import RawSocket
from mooncache.reporting.rows import Report, bar_row

Progress = Callable[[str], None]
Times = dict[str, list[float]]

POOLED = "original, pool on"
DEFAULT = "original, default"
_TUNED_RECEIVE_BYTES = 64 << 10
BEST = "original's best"
"""The faster of its two settings, for each operation and in this run."""


class Systems:
    """Everything that is measured, started once."""

    def __init__(self, options: StoreBenchOptions, stack: ExitStack, progress: Progress) -> None:
        progress("starting a store node")
        self.node = stack.enter_context(start_node(options))
        self.tcp = stack.enter_context(connect(self.node, shared_memory=False))
        self.shm = stack.enter_context(connect(self.node, shared_memory=True))
        self.raw = RawSocket(options.block_bytes, options.block_count, options.block_bytes)
        stack.callback(self.raw.close)
        self.tuned_raw = RawSocket(options.block_bytes, options.block_count, _TUNED_RECEIVE_BYTES)
        stack.callback(self.tuned_raw.close)
        self.peers: dict[str, PeerMooncake] = {}
        if options.peer:
            for name, settings in ((POOLED, peer_mooncake.POOLED), (DEFAULT, peer_mooncake.DEFAULT)):
                progress(f"starting the {name}")
                peer = PeerMooncake(
                    settings,
                    build=options.peer_build,
                    block_bytes=options.block_bytes,
                    count=options.block_count,
                )
                self.peers[name] = peer
                stack.callback(peer.close)


def _best(figures: dict[str, float], op: str, choose: Callable[[list[float]], float]) -> float | None:
    """The better figure of the original's two settings; None when it was not measured."""
    found = [
        figures[name] for name in (f"{POOLED} {op}".strip(), f"{DEFAULT} {op}".strip()) if name in figures
    ]
    return choose(found) if found else None


def _median(times: list[float]) -> float:
    return statistics.median(times)


def batch_rows(report: Report, systems: Systems, options: StoreBenchOptions, progress: Progress) -> None:
    """64 x 1 MiB, put and get, verified, over TCP and shared memory."""
    total = options.block_bytes * options.block_count
    source = memoryview(bytearray(os.urandom(options.block_bytes) * options.block_count))
    target = memoryview(bytearray(total))
    pieces = [
        slice(i * options.block_bytes, (i + 1) * options.block_bytes) for i in range(options.block_count)
    ]
    sources, targets = [source[p] for p in pieces], [target[p] for p in pieces]
    times: Times = defaultdict(list)
    # One round more than asked: the first one warms up (page faults, connections) and is dropped.
    for repeat in range(options.repeats + 1):
        progress(f"64 x 1 MiB batches, round {repeat} of {options.repeats}")
        times["raw put"].append(systems.raw.put_s(source))
        times["raw get"].append(systems.raw.get_s(target))
        times["raw put, 64 KiB receives"].append(systems.tuned_raw.put_s(source))
        times["raw get, 64 KiB receives"].append(systems.tuned_raw.get_s(target))
        started = time.perf_counter()
        target[:] = source
        times["memcpy"].append(time.perf_counter() - started)
        for name, client in (("TCP", systems.tcp), ("shm", systems.shm)):
            keys = [os.urandom(32) for _ in pieces]
            target[:] = bytes(total)
            times[f"{name} put"].append(client.put_batch_s(keys, sources))
            times[f"{name} get"].append(client.get_batch_s(keys, targets))
            if target != source:
                raise AssertionError(f"{name}: the bytes that came back are not the bytes that were put")
            client.remove(keys)
        for name, peer in systems.peers.items():
            answer = peer.client.ask("batch")
            times[f"{name} put"].append(answer["put_s"])
            times[f"{name} get"].append(answer["get_s"])
    gbps = {name: total / _median(seconds[1:]) / 1e9 for name, seconds in times.items()}
    _add_batch_rows(report, gbps)


def _add_batch_rows(report: Report, gbps: dict[str, float]) -> None:
    unit = "GB/s"
    raw = [f"raw {op}{how}" for how in ("", ", 64 KiB receives") for op in ("put", "get")]
    original = [f"{setting} {op}" for setting in (POOLED, DEFAULT) for op in ("put", "get")]
    for name in ("memcpy", *raw, *original):
        if name in gbps:
            report.add(bar_row(f"64 x 1 MiB {name}", gbps[name], unit))
    best_put, best_get = _best(gbps, "put", max), _best(gbps, "get", max)
    bars = [
        ("TCP put", f"{BEST} put", best_put, 2.0),
        ("TCP get", f"{BEST} get", best_get, 1.15),
        ("TCP put", "raw put", gbps["raw put"], 0.85),
        ("TCP get", "raw get", gbps["raw get"], 0.85),
        ("shm get", "memcpy", gbps["memcpy"], 0.7),
        ("shm put", "memcpy", gbps["memcpy"], 0.6),
        ("shm get", f"{BEST} get", best_get, 4.0),
        ("shm put", f"{BEST} put", best_put, 4.0),
    ]
    for name, against, reference, at_least in bars:
        report.add(
            bar_row(
                f"64 x 1 MiB {name}",
                gbps[name],
                unit,
                against=against,
                reference=reference,
                at_least=at_least,
            )
        )


def small_rows(report: Report, systems: Systems, options: StoreBenchOptions, progress: Progress) -> None:
    """4 KiB blocks one at a time; p50 and p99 in microseconds."""
    times: Times = defaultdict(list)
    source = memoryview(bytearray(os.urandom(options.small_bytes)))
    target = memoryview(bytearray(options.small_bytes))
    for repeat in range(options.repeats):
        progress(f"4 KiB blocks, round {repeat + 1} of {options.repeats}")
        for name, client in (("TCP", systems.tcp), ("shm", systems.shm)):
            keys = [os.urandom(32) for _ in range(options.small_operations)]
            for key in keys:
                times[f"{name} put"].append(client.put_s(key, source))
                target[:] = bytes(options.small_bytes)
                times[f"{name} get"].append(client.get_s(key, target))
                if target != source:
                    raise AssertionError(f"{name}: the bytes that came back are not the bytes that were put")
            client.remove(keys)
        for name, peer in systems.peers.items():
            answer = peer.client.ask(
                "small", operations=options.small_operations, size_bytes=options.small_bytes
            )
            times[f"{name} put"].extend(answer["put_s"])
            times[f"{name} get"].extend(answer["get_s"])
    p50 = {name: _median(seconds) * 1e6 for name, seconds in times.items()}
    for name, seconds in times.items():
        p99 = statistics.quantiles(seconds, n=100)[98] * 1e6
        op = name.rsplit(" ", 1)[1]
        against = f"{BEST} {op}"
        bound = {"TCP get": 0.5, "TCP put": 0.4}.get(name)
        if bound is not None:
            report.add(
                bar_row(
                    f"4 KiB {name} p50",
                    p50[name],
                    "us",
                    against=against,
                    reference=_best(p50, op, min),
                    at_most=bound,
                )
            )
        else:
            report.add(bar_row(f"4 KiB {name} p50", p50[name], "us"))
        report.add(bar_row(f"4 KiB {name} p99", p99, "us"))


def chain_rows(report: Report, systems: Systems, options: StoreBenchOptions, progress: Progress) -> None:
    """match and exists of a chain of 500 keys that are all there."""
    keys = [os.urandom(32) for _ in range(options.chain_keys)]
    block = memoryview(bytearray(64))
    systems.tcp.put_batch_s(keys, [block] * len(keys))
    times: Times = defaultdict(list)
    for repeat in range(options.repeats):
        progress(f"chains of {options.chain_keys} keys, round {repeat + 1} of {options.repeats}")
        for _ in range(options.chain_repeats):
            times["TCP match"].append(systems.tcp.match_s(keys))
            times["TCP exists"].append(systems.tcp.exists_s(keys))
            times["shm match"].append(systems.shm.match_s(keys))
        for name, peer in systems.peers.items():
            answer = peer.client.ask("exist", keys=options.chain_keys, repeats=options.chain_repeats)
            times[name].extend(answer["exist_s"])
    rate = {name: options.chain_keys / _median(seconds) for name, seconds in times.items()}
    best = _best(rate, "", max)
    label = f"{options.chain_keys}-key chain"
    for name in systems.peers:
        report.add(bar_row(f"{label} exists, {name}", rate[name], "keys/s"))
    for name in ("TCP match", "TCP exists", "shm match"):
        report.add(
            bar_row(f"{label} {name}", rate[name], "keys/s", against=BEST, reference=best, at_least=2.0)
        )


def native_memory_rows(report: Report, options: StoreBenchOptions) -> None:
    """What one core does to memory: the ceiling of everything above."""
    figures = _native.memory_benchmark(options.block_bytes, options.block_count, options.repeats)
    report.notes.append(f"CRC-32C implementation: {_native.crc32c_implementation()}")
    for name in ("memcpy", "crc32c", "memcpy_then_crc32c", "copy_crc32c"):
        report.add(bar_row(f"one core, native: {name}", figures[f"{name}_bytes_per_s"] / 1e9, "GB/s"))

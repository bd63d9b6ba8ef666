"""Same calls, drop-in beside the original: a program written for the original, on a pool of ours and on its own.

The original runs in each of its settings that may be its fastest; the bars compare with the best of them, call by call.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Final

from mooncache.bench.store import peer_mooncake
from mooncache.bench.store.options import StoreBenchOptions
from mooncache.bench.store.ours import start_node
from mooncache.bench.store.peer_mooncake import PeerMooncake
from mooncache.bench.store.same_calls import MeasuredPart
from mooncache.bench.worker import Worker, WorkerError
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.reporting.rows import Report, Row, bar_row

Progress = Callable[[str], None]
CallFigures = dict[str, dict[str, float]]
"""Call -> system -> figure."""

OURS: Final[dict[str, Mapping[str, str]]] = {
    "drop-in": {},
    "drop-in, TCP": {"MOONCACHE_CLIENT_SHM_ENABLED": "false"},
}
ORIGINALS: Final[dict[str, Mapping[str, str]]] = {
    "original, default": peer_mooncake.DEFAULT,
    "original, pool on": peer_mooncake.POOLED,
    "original, pool on, 2 threads": {**peer_mooncake.POOLED, "MC_NUM_TCP_IO_THREADS": "2"},
    "original, pool on, 4 threads": {**peer_mooncake.POOLED, "MC_NUM_TCP_IO_THREADS": "4"},
    "original, shared memory": {**peer_mooncake.POOLED, "MC_FORCE_SHM": "1"},
}
"""Threads and shared memory: builds before 0.3.14 do not read these variables."""
ORIGINAL: Final = "original"
_CALLS: Final = {
    "batch_put_from": ("GB/s", 1.5),
    "batch_get_into": ("GB/s", 2.0),
    "put_from p50": ("us", 0.4),
    "get_into p50": ("us", 0.4),
    "batch_is_exist": ("keys/s", 2.0),
}
"""Call -> unit and bar. Times have to be at most that part of the original's, rates at least that multiple."""


def dropin_rows(report: Report, options: StoreBenchOptions, progress: Progress) -> None:
    """64 x 1 MiB in batches, 4 KiB one by one, existence of 500 keys: by the original's own API."""
    with ExitStack() as stack:
        progress("starting a store node")
        node = stack.enter_context(start_node(options))
        clients: dict[str, Worker] = {}
        for name, settings in OURS.items():
            clients[name] = stack.enter_context(_drop_in(node, settings, options))
        if options.peer:
            for name, settings in ORIGINALS.items():
                progress(f"starting the {name}")
                peer = _original(settings, options, report, name)
                if peer is not None:
                    stack.callback(peer.close)
                    clients[name] = peer.client
        figures = _measure(clients, options, progress)
    report.rows += rows_of(figures, options)


def _drop_in(node: EmbeddedCluster, settings: Mapping[str, str], options: StoreBenchOptions) -> Worker:
    env = {"MOONCACHE_CLUSTER_STATE_DIR": str(node.state_dir), **settings}
    arguments = [MeasuredPart.DROP_IN, node.master_target, str(options.block_bytes), str(options.block_count)]
    return Worker("mooncache.bench.store.same_calls", arguments, env=env)


def _original(
    settings: Mapping[str, str], options: StoreBenchOptions, report: Report, name: str
) -> PeerMooncake | None:
    """None, with a note, in a setting in which this build of the original does not serve."""
    try:
        return PeerMooncake(
            settings, build=options.peer_build, block_bytes=options.block_bytes, count=options.block_count
        )
    except WorkerError as error:
        report.notes.append(f"{name}: left out, {str(error).splitlines()[-1][:160]}")
        return None


def _measure(clients: Mapping[str, Worker], options: StoreBenchOptions, progress: Progress) -> CallFigures:
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    # One round more than asked: the first one warms up (page faults, connections) and is dropped.
    for repeat in range(options.repeats + 1):
        progress(f"same calls, round {repeat} of {options.repeats}")
        for name, client in clients.items():
            batch = client.ask("batch")
            small = client.ask("small", operations=options.small_operations, size_bytes=options.small_bytes)
            exist = client.ask("exist", keys=options.chain_keys, repeats=options.chain_repeats)
            if repeat == 0:
                continue
            times["batch_put_from"][name].append(batch["put_s"])
            times["batch_get_into"][name].append(batch["get_s"])
            times["put_from p50"][name] += small["put_s"]
            times["get_into p50"][name] += small["get_s"]
            times["batch_is_exist"][name] += exist["exist_s"]
    total_bytes = options.block_bytes * options.block_count
    scale: dict[str, Callable[[float], float]] = {
        "GB/s": lambda seconds: total_bytes / seconds / 1e9,
        "us": lambda seconds: seconds * 1e6,
        "keys/s": lambda seconds: options.chain_keys / seconds,
    }
    return {
        call: {name: scale[unit](statistics.median(times[call][name])) for name in clients}
        for call, (unit, _) in _CALLS.items()
    }


def rows_of(figures: CallFigures, options: StoreBenchOptions) -> list[Row]:
    """A row for each call and system; those of the drop-in are compared with the best of the original's."""
    what = {
        "batch_put_from": f"{options.block_count} x {options.block_bytes >> 10} KiB",
        "batch_get_into": f"{options.block_count} x {options.block_bytes >> 10} KiB",
        "put_from p50": f"{options.small_bytes} bytes",
        "get_into p50": f"{options.small_bytes} bytes",
        "batch_is_exist": f"{options.chain_keys} keys",
    }
    rows = []
    for call, (unit, bar) in _CALLS.items():
        seen = figures[call]
        theirs = {name: seen[name] for name in ORIGINALS if name in seen}
        rows += [bar_row(f"{call}, {what[call]}, {name}", value, unit) for name, value in theirs.items()]
        faster = min if unit == "us" else max
        best = faster(theirs, key=theirs.__getitem__) if theirs else None
        bound = {"at_most" if unit == "us" else "at_least": bar}
        for name in OURS:
            row = f"{call}, {what[call]}, {name}"
            reference = seen[best] if best else None
            rows.append(
                bar_row(row, seen[name], unit, against=best or ORIGINAL, reference=reference, **bound)
            )
    return rows

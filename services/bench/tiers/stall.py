"""A disk that stops answering: when the node goes on without it, and what gets from memory notice.

The kernel stalls the disk for the node's process alone (a control group with a limit of a byte a second; needs root).
A process asks for blocks of the disk all the time, before, during and after the stall. While the disk counts as gone it
gets misses; the same process, asking for blocks that were never put, tells what these misses cost by themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Final

import mooncache
from mooncache.bench.ssd_pool import (
    NODE,
    put_at_the_disks_pace,
    settle,
    ssd_pool,
    wait_for,
)
from mooncache.bench.stalled_disk import stalled_disk
from mooncache.bench.tiers.memory import reader_of, small_get_p99_us
from mooncache.reporting.rows import Row, bar_row

_GONE_S: Final = 1.0
_P99: Final = 1.2
_SMALL, _LARGE = 4 << 10, 1 << 20
_WAIT_S: Final = 20.0


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """p99 of small gets from memory alone, beside the reader, and during the stall; the times until the disk counts as
    gone and as back. Medians of rounds.

    Raises:
        ConfigInvalid: no disk can be stalled here.
    """
    rounds, seconds = (1, 0.2) if quick else (5, 1.5)
    memory_bytes = (32 if quick else 128) << 20
    alone, beside, absent, stalled, gone, back, misses = [], [], [], [], [], [], []
    with (
        ssd_pool(memory_bytes, 6 * memory_bytes) as pool,
        mooncache.connect(**pool.client_settings(), timeout_s=60.0) as client,
        stalled_disk(pool.parts[NODE].pid, pool.parts[NODE].log_path) as disk,
    ):
        progress("filling the disk")
        cold = put_at_the_disks_pace(pool, client, 3 * (memory_bytes >> 20), _LARGE)
        settle(pool)
        small = os.urandom(32)
        client.put(small, os.urandom(_SMALL))
        client.pin(small, ttl_s=600.0)
        for number in range(rounds):
            progress(f"stall {number + 1} of {rounds}")
            alone.append(small_get_p99_us(client, small, seconds))
            with reader_of(pool, [os.urandom(32) for _ in cold]):
                absent.append(small_get_p99_us(client, small, seconds))
            with reader_of(pool, cold):
                beside.append(small_get_p99_us(client, small, seconds))
                disk.stall()
                gone.append(wait_for(pool, _is_gone, _WAIT_S))
                misses.append(_longest_miss_s(client, cold))
                disk.go_on()
                back.append(wait_for(pool, _is_back, _WAIT_S))
                # Once more without looks at the counters, which take the processor from the gets.
                disk.stall()
                stalled.append(small_get_p99_us(client, small, seconds))
                disk.go_on()
                wait_for(pool, _is_back, _WAIT_S)
    against = "4 KiB get from memory, p99, alone"
    beside_name = "4 KiB get from memory, p99, beside a process that reads a disk that answers"
    absent_name = "4 KiB get from memory, p99, beside a process that asks for blocks that were never put"
    return [
        Row(against, median(alone), "us"),
        bar_row(beside_name, median(beside), "us", against=against, reference=median(alone)),
        bar_row(absent_name, median(absent), "us", against=against, reference=median(alone)),
        bar_row(
            "4 KiB get from memory, p99, from the moment when the disk stalls",
            median(stalled),
            "us",
            against=against,
            reference=median(alone),
            at_most=_P99,
        ),
        bar_row("until a disk that stalls counts as gone, longest", max(gone), "s", at_most=_GONE_S),
        bar_row("a block of the disk that counts as gone is a miss after", max(misses), "s", at_most=_GONE_S),
        Row("until it serves again when it answers", median(back), "s"),
    ]


def _is_gone(counters: dict[str, float]) -> bool:
    return counters["ssd_devices_answering"] == 0


def _is_back(counters: dict[str, float]) -> bool:
    return counters["ssd_devices_answering"] == 1


def _longest_miss_s(client: mooncache.Client, keys: list[bytes]) -> float:
    longest_s = 0.0
    for key in keys[:: max(1, len(keys) // 16)]:
        begun = time.perf_counter()
        client.get(key)
        longest_s = max(longest_s, time.perf_counter() - begun)
    return longest_s

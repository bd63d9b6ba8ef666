"""`mooncache bench serving soak`: its settings are settings, and what grows, leaks or gets slower misses its bar."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mooncache.bench.serving import soak
from mooncache.bench.serving.soak import Tally
from mooncache.config import load
from mooncache.reporting.rows import Row


def met(rows: list[Row]) -> dict[str, bool | None]:
    return {row.name: row.met for row in rows}


def test_every_process_takes_its_settings() -> None:
    config = load(env=soak.ENV)
    assert config.hf.kv_cache_bytes == 128 << 20
    assert config.gateway.request_timeout_s == soak.REQUEST_TIMEOUT_S


def test_what_grows_in_the_second_half_is_found() -> None:
    full_in_the_middle = [*range(1, 41), *[40.0] * 40]
    rows = soak.flat_rows("memory", {"flat": full_in_the_middle, "leaks": [*map(float, range(80))]}, "MB")
    assert met(rows) == {
        "memory of flat, end against middle": True,
        "memory of leaks, end against middle": False,
    }
    assert soak.flat_rows("memory", {"short": [1.0]}, "MB") == []


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_a_cluster_that_gets_slower_is_found(slower: float) -> None:
    tally = Tally(ok=400, ttft_s=[3.0] * 200 + [1.0] * 100 + [slower] * 100)
    found = met(soak.tally_rows(tally, 10.0))
    assert found["ttft, median, end against middle"] is (slower == 1.0)
    assert found["ttft, P99, end against middle"] is (slower == 1.0)
    assert found["requests that failed"]


def test_descriptors_and_memory_of_children_count() -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert soak.children(parent.pid) == [child]
            assert soak.tree_descriptors(parent.pid) >= soak.tree_descriptors(child) + 3 > 3
            assert soak.tree_private_bytes(parent.pid) > soak.tree_private_bytes(child) > 0
        finally:
            os.kill(child, 9)
            parent.stdin.close()
    assert soak.tree_descriptors(child) == 0, "a process that has ended has none"

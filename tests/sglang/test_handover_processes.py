"""Two processes: KV goes from a prefill engine's to a decode engine's, and the death of the first is noticed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncache.auth import create_cluster_token
from tests.sglang.package import need_sglang

need_sglang()

from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402

from tests.sglang import handover  # noqa: E402
from tests.sglang.prefill_process import SEED  # noqa: E402

ROOM = 1 << 62 | 5


@pytest.fixture
def decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[handover.RankUnderTest, int]]:
    """A decode rank of this process, and the port of the prefill engine."""
    create_cluster_token(tmp_path / "cluster.token")
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "1")
    port = handover.free_port()
    with handover.engine_process(port):
        rank = handover.make_rank("decode")
        yield rank, port
        rank.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts prefill engines; none outlives the test."""
    started: list[Any] = []

    def run(port: int, how: str) -> Any:
        command = [sys.executable, "-m", "tests.sglang.prefill_process", str(port), str(ROOM), how]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_kv_moves_between_processes(decode: tuple[Any, int], start: Callable[..., Any]) -> None:
    rank, port = decode
    engine = start(port, "whole")
    receiver = handover.Request(f"127.0.0.1:{port}", ROOM).receive(rank, [2, 5, 4])
    assert handover.ended(receiver) == KVPoll.Success
    assert engine.communicate(timeout=60)[0].split() == ["sent", str(int(KVPoll.Success))]
    wanted = handover.RankUnderTest(None, handover._pool(handover.HEADS), None, [])
    handover.fill(wanted, SEED)
    for here, there in ((7, 2), (3, 5), (9, 4)):
        assert all(torch.equal(a, b) for a, b in zip(wanted.page(here), rank.page(there), strict=True))


def test_a_prefill_engine_that_is_killed_fails_the_request(
    decode: tuple[Any, int], start: Callable[..., Any]
) -> None:
    rank, port = decode
    engine = start(port, "part")
    receiver = handover.Request(f"127.0.0.1:{port}", ROOM).receive(rank, [2, 5, 4])
    assert engine.stdout.readline() == "sent\n"
    engine.kill()
    assert handover.ended(receiver) == KVPoll.Failed
    assert "Lost connection with prefill instance" in handover.reason(receiver)

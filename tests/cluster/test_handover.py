"""Blocks that do not get from the prefill to the decode engine: the answer is the same, and nobody waits for them."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from mooncache.cli.app import run
from mooncache.cluster.embedded import EmbeddedCluster
from tests.cluster.conftest import ask
from tests.cluster.one_engine import alone
from tests.conditions import wait_until

pytestmark = pytest.mark.timeout(300)


def text(seed: str) -> str:
    return f"{seed} and the moon is a harsh mistress, said somebody once. " * 40


def record(capsys: pytest.CaptureFixture[str], cluster: EmbeddedCluster) -> dict[str, Any]:
    """The last decision, once the conductor has heard how it ended."""

    def ended() -> dict[str, Any] | None:
        capsys.readouterr()
        assert run(["why", "--json", "--state-dir", str(cluster.state_dir)]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found if found["state"] != "running" else None

    return wait_until(ended, "the end of the request") or {}


def counted(cluster: EmbeddedCluster) -> float:
    """Decode legs that were sent again so far; whether the engine or the pool said so is a matter of moments."""
    with urllib.request.urlopen(f"{cluster.layout.gateway_url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    name = "mooncache_gateway_waits_cut_total{"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


_LEGS_OF_LOST_BLOCKS = {("decode", "OK"), ("decode", "REPLACED"), ("prefill", "OK")}


def test_a_node_that_takes_no_blocks(serving: EmbeddedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """What is handed to the pool is lost on its way; the decode leg is not left to wait for it."""
    prompt = text("a")
    expected = alone(serving, prompt, 8)
    where = ["--state-dir", str(serving.state_dir)]
    assert run(["drain", "node-1", "--no-move", *where]) == 0
    try:
        answer = ask(serving, prompt)
        assert answer["choices"][0]["message"]["content"] == expected
        found = record(capsys, serving)
        assert found["chosen"]["prefill"] == "prefill-1"
        legs = [(leg["leg"], leg["code"]) for leg in found["events"][-1]["legs"]]
        # The engine hears from the pool that its blocks were given up; the gateway may have sent the leg again before.
        assert {("decode", "OK"), ("prefill", "OK")} <= set(legs) <= _LEGS_OF_LOST_BLOCKS
        assert found["observed"]["handover"] == "missed"
        assert counted(serving) == legs.count(("decode", "REPLACED")) <= 1
        other = text("b")
        assert ask(serving, other)["choices"][0]["message"]["content"] == alone(serving, other, 8)
        assert record(capsys, serving)["chosen"]["inline"], "for a while the decode engine computes by itself"
        assert counted(serving) == legs.count(("decode", "REPLACED"))
    finally:
        assert run(["drain", "node-1", "--cancel", *where]) == 0

"""vLLM's scheduler and the connector tell the worker of each decode leg what they tell the gateway, streamed or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from mooncache.kvcache.leg_reports import decode, reports_path
from tests.connectors.harness import BLOCK_TOKENS, WAIT_S, Make, ask, prompt, warm
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    """The worker's end of the socket."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{reports_path(tmp_path / 'passport.json')}")
        yield socket


def test_a_decode_leg_is_reported_once(
    make: Make, faulty: FaultyPool, tmp_path: Path, worker: zmq.Socket[bytes]
) -> None:
    tokens = prompt(1, 10 * BLOCK_TOKENS + 7)
    warm(make, tokens)
    engine = make({"mooncache.passport_path": str(tmp_path / "passport.json")})
    engine.add("prefill", prompt(2, 40), max_tokens=1, ask=ask("prefill", decision_id="d-1"))
    engine.add("direct", prompt(3, 40), max_tokens=1, ask=ask("decode"))
    engine.run()
    engine.add("leg", tokens, ask=ask("decode", decision_id="d-2"))
    engine.run()
    assert worker.poll(WAIT_S * 1000), "it was sent"
    leg = decode(worker.recv())
    assert leg is not None
    said = engine.reported("leg")
    assert leg.decision_id == "d-2", "legs of no plan and prefill legs are in the answer alone"
    assert (leg.cache.hit_tokens, leg.cache.loaded_tokens) == (320, 320)
    assert (leg.cache.loaded_bytes, leg.cache.load_ms) == (said["loaded_bytes"], said["load_ms"])
    assert leg.cache.outcome == said["outcome"] == "hit"
    assert not worker.poll(0), "once"
    engine.close()

"""The connector with KV tensors in the memory of a fake GPU, under vLLM's own scheduler: what is gathered and
scattered is right at every step, and a GPU that hangs costs its requests and nothing else."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mooncache.client import staging
from tests.connectors.harness import BLOCK_TOKENS, WAIT_S, Make, ask, expected, prompt, warm
from tests.gpu.fake_gpu import FakeGpu
from tests.kvcache.faulty import FaultyPool

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/install_vllm.sh)")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


class CudaTensor:
    """A tensor as if it were on the GPU: its address is one of the fake device."""

    def __init__(self, gpu: FakeGpu, host: Any) -> None:
        self.host = host
        self.device = SimpleNamespace(type="cuda", index=0)
        self.address = gpu.adopt(host.data_ptr(), host.untyped_storage().nbytes())
        self.shape, self.dtype = host.shape, host.dtype

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return tuple(self.host.stride())

    def element_size(self) -> int:
        return int(self.host.element_size())


@pytest.fixture(params=[True, False], ids=["kernel", "copies"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    import torch

    made = FakeGpu(kernel=request.param)

    class Event:
        def __init__(self) -> None:
            self.fence = made.event()
            self.cuda_event = self.fence[1]

        def record(self, _stream: Any) -> None:
            made.complete(self.fence)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    monkeypatch.setattr(staging, "open_device", lambda _ordinal: made.device)
    monkeypatch.setattr(staging, "GRACE_S", 0.02)
    yield made
    made.restore()
    deadline_s = time.monotonic() + WAIT_S
    while staging.UNFINISHED_COPIES.size_bytes():
        assert time.monotonic() < deadline_s


@pytest.fixture
def build(make: Make, gpu: FakeGpu) -> Make:
    shown = lambda tensors: {name: CudaTensor(gpu, tensor) for name, tensor in tensors.items()}  # noqa: E731
    return functools.partial(make, shown=shown)


def test_a_second_engine_loads_what_the_first_computed(build: Make, faulty: FaultyPool) -> None:
    tokens = prompt(1, 10 * BLOCK_TOKENS + 7)
    warm(build, tokens)
    engine = build()
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    reported = engine.reported("r")
    assert (reported["outcome"], reported["hit_tokens"], reported["loaded_tokens"]) == ("hit", 320, 320)
    assert engine.counted["loaded_blocks"] == 10
    assert engine.leaked_blocks == 0


def test_engines_with_and_without_a_gpu_share_blocks(build: Make, make: Make, faulty: FaultyPool) -> None:
    tokens = prompt(2, 6 * BLOCK_TOKENS + 1)
    warm(build, tokens)
    engine = make()
    engine.add("r", tokens, ask=ask())
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    assert engine.reported("r")["loaded_tokens"] == 6 * BLOCK_TOKENS


def test_blocks_are_kept_while_a_gpu_that_hangs_may_write_them(
    build: Make, faulty: FaultyPool, gpu: FakeGpu
) -> None:
    tokens = prompt(3, 4 * BLOCK_TOKENS + 3)
    warm(build, tokens)
    engine = build({"mooncache.load_timeout_s": 0.2})
    gpu.hang(True)
    engine.add("r", tokens, ask=ask())
    engine.run_until(lambda: engine.status("r") == "WAITING_FOR_REMOTE_KVS")
    until_s = time.monotonic() + 0.6
    engine.run_until(lambda: time.monotonic() > until_s)
    assert engine.status("r") == "WAITING_FOR_REMOTE_KVS"  # the limit has passed, the copy has not ended
    gpu.hang(False)
    engine.run()
    assert engine.outputs["r"] == expected(tokens, 4)
    assert engine.reported("r")["outcome"] in {"failed", "timeout"}
    assert engine.counted["load_failures:timeout"] == 4
    assert engine.leaked_blocks == 0

"""The interface of TensorRT-LLM's connectors as its published source has it, and an executor that calls it in its
order.

The package needs CUDA to be imported, so nothing of it runs here. These classes have the names, arguments and abstract
methods of `tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector` (read in November 2026), no code of it. The
executor has one layer group, one rank, blocks in host memory, and a model of arithmetic: the KV of a token is a
number made of all tokens before it, so that a wrong block is found.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

BLOCK, BLOCKS, LAYERS, WIDTH = 4, 64, 2, 8


class KvCacheConnectorWorker(ABC):
    """Abstract methods of the engine's class of that name."""

    def __init__(self, llm_args: Any) -> None:
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: Any) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> Any:
        return self._metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any: ...


class KvCacheConnectorScheduler(ABC):
    """Abstract methods of the engine's class of that name."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


def install(home: str = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector") -> dict[str, Any]:
    """Modules of these classes under the engine's name, for sys.modules."""
    parts = home.split(".")
    modules = {".".join(parts[: at + 1]): types.ModuleType(parts[at]) for at in range(len(parts))}
    for module in list(modules.values())[:-1]:
        module.__path__ = []
    vars(modules[home]).update(
        KvCacheConnectorScheduler=KvCacheConnectorScheduler, KvCacheConnectorWorker=KvCacheConnectorWorker
    )
    return modules


def arguments(model: str, **more: Any) -> Any:
    """TorchLlmArgs, as far as the connector reads them."""
    cache = SimpleNamespace(tokens_per_block=BLOCK, dtype="auto")
    values = {
        "model": model,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
    }
    return SimpleNamespace(**{**values, "speculative_config": None, "kv_cache_config": cache, **more})


@dataclass
class Prompt:
    """A request, with the fields and methods of the engine's that the connector reads."""

    request_id: int
    tokens: list[int]
    cache_salt: str | None = None
    lora_task_id: int | None = None
    multimodal_hashes: Any = None

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.tokens


@dataclass
class StepData:
    """One request in a step."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class StepOutput:
    """What the scheduler says of a step."""

    new_requests: list[StepData] = field(default_factory=list)
    cached_requests: list[StepData] = field(default_factory=list)


class Stream:
    """A CUDA stream whose work is done when it is queued."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Executor:
    """One engine: its memory, its connector's two sides, and requests one after the other."""

    def __init__(self, scheduler: Any, worker: Any, *, loads_in_position: bool = False) -> None:
        self.scheduler, self.worker = scheduler, worker
        self.memory = torch.zeros(BLOCKS, LAYERS, BLOCK, WIDTH, dtype=torch.int64)
        self.worker.register_kv_caches(self.memory)
        self._free = list(range(1, BLOCKS))
        self._loads_in_position = loads_in_position
        self.stream = Stream()

    def start(self, prompt: Prompt, local: int = 0) -> tuple[int, list[int]]:
        """Match and allocate; `local` tokens are in the engine's own cache. (tokens from the pool, block ids)."""
        matched, later = self.scheduler.get_num_new_matched_tokens(prompt, local)
        assert not later
        assert matched + local < len(prompt.tokens)
        ids = [self._free.pop(0) for _ in range(-(-len(prompt.tokens) // BLOCK))]
        for at in range(local // BLOCK):
            self.memory[ids[at]] = block_of(prompt.tokens, at)
        self.scheduler.update_state_after_alloc(prompt, ids)
        return matched, ids

    def step(self, output: StepOutput) -> None:
        """Everything around a forward pass; the pass itself is `compute`."""
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(self.stream)

    def run(self, prompt: Prompt, *, local: int = 0, chunk: int = 1000, decode: int = 0) -> int:
        """Compute a prompt and some tokens after it. Tokens that came from the pool."""
        matched, ids = self.start(prompt, local)
        done, first = local + matched, True
        while done < len(prompt.tokens):
            count = min(chunk, len(prompt.tokens) - done)
            seen = done - matched if first and not self._loads_in_position else done
            data = StepData(
                prompt.request_id, prompt.tokens if first else [], ids if first else [], seen, count
            )
            self.step(StepOutput([data]) if first else StepOutput([], [data]))
            self.compute(prompt.tokens, ids, done, count)
            done, first = done + count, False
        for at in range(decode):
            prompt.tokens.append(1000 + at)
            fresh = [self._free.pop(0)] if len(prompt.tokens) > len(ids) * BLOCK else []
            ids += fresh
            self.step(
                StepOutput([], [StepData(prompt.request_id, [1000 + at], fresh, len(prompt.tokens) - 1, 1)])
            )
            self.compute(prompt.tokens, ids, len(prompt.tokens) - 1, 1)
        assert not self.scheduler.request_finished(prompt, ids)
        assert self.worker.get_finished([], []) == ([], [])
        return matched

    def compute(self, tokens: list[int], ids: list[int], first: int, count: int) -> None:
        """The forward pass: it finds a wrong KV before `first`, and writes that of the tokens."""
        for at in range(first // BLOCK):
            assert torch.equal(self.memory[ids[at]], block_of(tokens, at)), f"block {at} is wrong"
        for layer in range(LAYERS):
            self.worker.wait_for_layer_load(layer, self.stream)
            self.worker.save_kv_layer(layer, self.stream)
        for at in range(first, first + count):
            self.memory[ids[at // BLOCK], :, at % BLOCK] = kv_of(tokens, at)
        self.worker.wait_for_save(self.stream)
        # The engine may reuse memory at once: what is saved was copied.


def kv_of(tokens: list[int], at: int) -> torch.Tensor:
    """KV of one token in all layers: it depends on every token before."""
    number = 7
    for token in tokens[: at + 1]:
        number = (number * 1_000_003 + token) % (1 << 61)
    return torch.arange(LAYERS * WIDTH, dtype=torch.int64).view(LAYERS, WIDTH) + number


def block_of(tokens: list[int], number: int) -> torch.Tensor:
    """KV of a whole block, [layers, tokens, width]."""
    return torch.stack([kv_of(tokens, number * BLOCK + at) for at in range(BLOCK)], dim=1)

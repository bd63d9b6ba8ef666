"""vLLM's real scheduler and the real connector around a model that is a few lines of arithmetic.

The "model" writes into each token's place of the KV tensors a number that depends on all tokens up to it. So wherever
a block came from, it can be told whether it holds what it has to hold, at every step.
"""

from __future__ import annotations

import os
import random
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32
LAYERS = 4
WAIT_S = 60.0


def prompt(seed: int, count: int) -> list[int]:
    """Token ids."""
    chooser = random.Random(seed)
    return [chooser.randrange(10, 5000) for _ in range(count)]


def ask(role: str = "both", **more: Any) -> dict[str, Any]:
    """What a gateway asks."""
    return {"v": 1, "role": role, **more}


def fingerprint(tokens: list[int], seed: int = 0) -> list[int]:
    """For each token a number that depends on it, on all before it and on the model's weights, which are `seed`."""
    value, found = seed, []
    for token in tokens:
        value = zlib.crc32(token.to_bytes(4, "little"), value)
        found.append(value >> 8)  # 24 bits are exact in float32
    return found


def next_token(tokens: list[int], seed: int = 0) -> int:
    """What the model says after these tokens."""
    return fingerprint(tokens, seed)[-1] % 5000 + 10


class Harness:
    """Scheduler and worker halves, driven in the order of vLLM's own runner."""

    def __init__(
        self,
        model: Path,
        extra: dict[str, Any],
        *,
        policy: str = "recompute",
        blocks: int = 64,
        max_tokens_step: int = 512,
        hooks: bool = False,
        seeds: dict[str, int] | None = None,
        shown: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        """`seeds`: the weights that an adapter makes of the model's, by its name. `shown`: the KV tensors as the
        connector sees them."""
        from vllm.config import KVTransferConfig, set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from mooncache.connectors.vllm import MooncacheConnector

        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=1024,
            max_num_batched_tokens=max(1024, max_tokens_step),
            async_scheduling=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="MooncacheConnector",
                kv_connector_module_path="mooncache.connectors.vllm",
                kv_role="kv_both",
                kv_load_failure_policy=policy,
                kv_connector_extra_config=extra,
            ),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.max_num_scheduled_tokens = max_tokens_step
        self._make_memory(blocks)
        self.config = self.vllm_config = config
        self._begin()
        hash_fn = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, hash_fn)
        with set_current_vllm_config(config):
            self.worker = MooncacheConnector(config, KVConnectorRole.WORKER, self.cache)
            self.worker.register_kv_caches(shown(self.tensors))
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=self.cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK_TOKENS,
                hash_block_size=BLOCK_TOKENS,
                log_stats=True,
            )
        self.connector = self.scheduler.connector
        handshake = self.worker.get_handshake_metadata()
        if handshake is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        self.steps = 0
        self.hooks = hooks
        self.seeds = seeds or {}
        self.counted: dict[str, float] = {}

    def _begin(self) -> None:
        import torch

        self.model = torch.nn.Linear(8, 8, bias=False)
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Any] = {}
        self.mixed: set[str] = set()
        self.set_weights(0)

    def _make_memory(self, blocks: int) -> None:
        """KV tensors as the runner would allocate them."""
        import torch
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
        )

        names = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=4, dtype=torch.float32)
        page = spec.page_size_bytes
        self.cache = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=LAYERS * blocks * page, layers=names, layer_stride=blocks * page, block_stride=page
                )
            ],
            kv_cache_groups=[KVCacheGroupSpec(names, spec)],
            hash_block_size=BLOCK_TOKENS,
        )
        self.tensors = {name: torch.zeros(blocks, 2, BLOCK_TOKENS, 8) for name in names}

    def set_weights(self, seed: int) -> None:
        """Other weights in memory, as vLLM's loaders write them. What runs goes on with KV of both."""
        import torch

        self.seed = seed
        self.model.weight.data.copy_(torch.full_like(self.model.weight, seed))
        self.mixed |= set(self.outputs) - set(self.finished)

    def get_model(self) -> Any:
        """What a runner has, and the connector looks for."""
        return self.model

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def leaked_blocks(self) -> int:
        """Blocks that nobody should hold when no request is left."""
        return self.cache.num_blocks - 1 - self.pool.get_num_free_blocks()

    def add(
        self,
        name: str,
        tokens: list[int],
        *,
        max_tokens: int = 4,
        ask: dict[str, Any] | None = None,
        salt: str | None = None,
        **more: Any,
    ) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        if ask is not None:
            params.extra_args = {"kv_transfer_params": {"mooncache": ask}}
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self.hasher,
            **more,
        )
        self.outputs[name] = []
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """One step of the engine."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        self.steps += 1
        output = self.scheduler.schedule()
        worker, meta = self.worker, output.kv_connector_metadata
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(None)
        sampled = self._forward(output)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        reported = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=reported,
        )
        for core in self.scheduler.update_from_output(output, made).values():
            stats = core.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                for counter, amount in stats.kv_connector_stats["count"].items():
                    self.counted[counter] = self.counted.get(counter, 0) + amount
            for out in core.outputs:
                self.outputs[out.request_id] += out.new_token_ids
                if out.finish_reason is not None:
                    self.finished[out.request_id] = out
        return output

    def _forward(self, output: Any) -> dict[str, list[int]]:
        """Check the KV of what counts as computed, compute the rest, sample."""
        import torch

        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            seed = self.seeds[request.lora_request.lora_name] if request.lora_request else self.seed
            tokens = list(request.all_token_ids)
            # The scheduler has counted this step's tokens already.
            end = request.num_computed_tokens
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            values = torch.tensor(fingerprint(tokens[:end], seed), dtype=torch.float32)
            for number in range((end + BLOCK_TOKENS - 1) // BLOCK_TOKENS):
                first = number * BLOCK_TOKENS
                ready = min(max(end - count - first, 0), BLOCK_TOKENS)
                last = min(end - first, BLOCK_TOKENS)
                for layer, tensor in enumerate(self.tensors.values()):
                    held = tensor[table[number]]
                    wanted = values[first : first + last] + layer
                    assert name in self.mixed or torch.equal(held[0, :ready, 0], wanted[:ready]), (
                        f"{name}: block {number} of layer {layer}, in place {table[number]}, is wrong"
                    )
                    held[:, ready:last, :] = wanted[ready:, None]
            sampled[name] = [next_token(tokens, seed)] if end == len(tokens) else []
        if self.hooks:
            for name, tensor in self.tensors.items():
                self.worker.save_kv_layer(name, tensor, None)
        return sampled

    def run(self) -> None:
        """Step until nothing is left to do."""
        self.run_until(lambda: not self.scheduler.has_requests())

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Step until the condition is true."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, "it did not come true"
            self.step()

    def status(self, name: str) -> str:
        """Where the request is; "gone" when it was freed."""
        request = self.scheduler.requests.get(name)
        return "gone" if request is None else request.status.name

    def reported(self, name: str) -> dict[str, Any]:
        """What went back to the gateway."""
        return self.finished[name].kv_transfer_params["mooncache"]

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def expected(tokens: list[int], count: int, seed: int = 0) -> list[int]:
    """What the model says, without any cache."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[-count:]


Make = Callable[..., Harness]


def warm(make: Make, tokens: list[int], **more: Any) -> Harness:
    """An engine that computed the prompt and saved its blocks."""
    engine = make()
    engine.add("warm", tokens, **more)
    engine.run()
    assert engine.outputs["warm"] == expected(tokens, 4)
    assert engine.leaked_blocks == 0
    return engine

"""vLLM's real scheduler and the real connector around a model that is a few lines of arithmetic.

The "model" writes into each token's place of the KV tensors a number that depends on all tokens up to it. So wherever
a block came from, it can be told whether it holds what it has to hold, at every step.
"""

from __future__ import annotations

import math
import os
import random
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32
LAYERS = 4
STATE = -1
"""In place of a window: the group has a recurrent state."""
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
        windows: tuple[int, ...] = (0,),
        sizes: tuple[int, ...] = (),
    ) -> None:
        """`seeds`: the weights that an adapter makes of the model's, by its name. `shown`: the KV tensors as the
        connector sees them. `windows`: of each group, 0 is full attention, STATE a state; all lie in the same bytes.
        `sizes`: how many times BLOCK_TOKENS a block of each group has, 1, 2 or 4, with as much less for each."""
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
        config.cache_config.mamba_cache_mode = "align" if STATE in windows else "none"
        config.scheduler_config.max_num_scheduled_tokens = max_tokens_step
        self.sizes = tuple(BLOCK_TOKENS * size for size in sizes or (1,) * len(windows))
        self._make_memory(blocks, windows)
        self.config = self.vllm_config = config
        self._begin()
        self.steps, self.hooks, self.seeds = 0, hooks, seeds or {}
        hash_fn = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(math.gcd(*self.sizes), hash_fn)
        with set_current_vllm_config(config):
            self.worker = MooncacheConnector(config, KVConnectorRole.WORKER, self.cache)
            self.worker.register_kv_caches(shown(self.tensors))
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=self.cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=math.lcm(*self.sizes),
                hash_block_size=math.gcd(*self.sizes),
                log_stats=True,
            )
        self.connector = self.scheduler.connector
        self._shake_hands()
        self.counted: dict[str, float] = {}

    def _shake_hands(self) -> None:
        handshake = self.worker.get_handshake_metadata()
        if handshake is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})

    def _begin(self) -> None:
        import torch

        self.model = torch.nn.Linear(8, 8, bias=False)
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Any] = {}
        self.mixed: set[str] = set()
        self.set_weights(0)

    def _make_memory(self, blocks: int, windows: tuple[int, ...]) -> None:
        """KV tensors as the runner would allocate them."""
        self.windows = windows
        import torch
        from vllm.v1.kv_cache_interface import (
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
        )

        # The last of several groups has a layer less, as vLLM's own groups may have.
        self.layers = [
            [f"model.layers.{group * LAYERS + index}.self_attn.attn" for index in range(LAYERS)]
            for group in range(len(self.windows))
        ]
        del self.layers[-1][LAYERS - (len(self.windows) > 1) :]
        specs = self._specs()
        page = specs[0].page_size_bytes
        self.cache = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=LAYERS * blocks * page, layers=names, layer_stride=blocks * page, block_stride=page
                )
                for names in self.layers
            ],
            kv_cache_groups=[
                KVCacheGroupSpec(names, spec) for names, spec in zip(self.layers, specs, strict=True)
            ],
            hash_block_size=math.gcd(*self.sizes),
        )
        memory = [torch.zeros(blocks, 2, BLOCK_TOKENS, 8) for _ in range(LAYERS)]
        self.tensors = {
            name: memory[index].view(blocks, 2, size, 8 * BLOCK_TOKENS // size)
            for names, size in zip(self.layers, self.sizes, strict=True)
            for index, name in enumerate(names)
        }

    def _specs(self) -> list[Any]:
        """What vLLM knows of each group."""
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

        heads = {"num_kv_heads": 2, "dtype": torch.float32}
        full = FullAttentionSpec(block_size=BLOCK_TOKENS, head_size=4, **heads)
        state = MambaSpec(
            block_size=BLOCK_TOKENS,
            shapes=((full.page_size_bytes // 8,),),
            dtypes=(torch.float32,),
            page_size_padded=full.page_size_bytes,
            mamba_cache_mode="align",
        )
        found: list[Any] = []
        for window, size in zip(self.windows, self.sizes, strict=True):
            layer = {"block_size": size, "head_size": 4 * BLOCK_TOKENS // size, **heads}
            if window == STATE:
                found.append(state)
            elif window:
                found.append(SlidingWindowSpec(**layer, sliding_window=window))
            else:
                found.append(FullAttentionSpec(**layer))
        return found

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
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            values = torch.tensor(fingerprint(tokens[:end], seed), dtype=torch.float32)
            for group, table in enumerate(tables):
                advance = self._remember if self.windows[group] == STATE else self._attend
                advance(name, group, table, values, end - count, end)
            sampled[name] = [next_token(tokens, seed)] if end == len(tokens) else []
        if self.hooks:
            for name, tensor in self.tensors.items():
                self.worker.save_kv_layer(name, tensor, None)
        return sampled

    def _attend(self, name: str, group: int, table: list[int], values: Any, begin: int, end: int) -> None:
        """Check what the tokens from `begin` on look at in one group, and write theirs."""
        import torch

        size = self.sizes[group]
        seen = max(0, begin - self.windows[group] + 1) if self.windows[group] else 0
        for number in range(seen // size, (end + size - 1) // size):
            first = number * size
            ready = min(max(begin - first, 0), size)
            last = min(end - first, size)
            assert table[number], f"{name}: block {number} of group {group} has no memory"
            for layer, tensor in enumerate(self.tensors[part] for part in self.layers[group]):
                held = tensor[table[number]]
                wanted = values[first : first + last] + layer + group * LAYERS
                assert name in self.mixed or torch.equal(held[0, :ready, 0], wanted[:ready]), (
                    f"{name}: block {number} of layer {layer} of group {group}, in place {table[number]}, is wrong"
                )
                held[:, ready:last, :] = wanted[ready:, None]

    def _remember(self, name: str, group: int, table: list[int], values: Any, begin: int, end: int) -> None:
        """Check the state behind the token before `begin`, and write that behind the last one. A state is kept in the
        block of its token, and goes on in another block only."""
        before, after = (begin - 1) // BLOCK_TOKENS, (end - 1) // BLOCK_TOKENS
        for layer, tensor in enumerate(self.tensors[part] for part in self.layers[group]):
            if begin:
                held, wanted = tensor[table[before]], values[begin - 1] + layer + group * LAYERS
                assert table[before], f"{name}: the state of group {group} before {begin} has no memory"
                assert name in self.mixed or bool((held == wanted).all()), (
                    f"{name}: the state of layer {layer} of group {group} before {begin} is wrong"
                )
            assert table[after], f"{name}: the state of group {group} before {end} has no memory"
            tensor[table[after]] = values[end - 1] + layer + group * LAYERS

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

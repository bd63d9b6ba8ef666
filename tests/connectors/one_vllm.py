"""One vLLM engine with the connector, in this process: answers requests one after the other.

usage: python one_vllm.py ASKED.json ANSWERED.json

ASKED: {"model", "state_dir", "master", "settings": more of vLLM's LLM, "connector": more of the connector's settings,
"engine_id", "wrong_keys": true for an engine that computes other K than its weights say, "requests": [{"name", "path",
"tokens", "wait_tokens", "write": {path: text} of files that change before it, "forget": true when the engine has
nothing left of earlier requests, "settle": true to ask again until blocks come from the pool, "spoil": true when the
bytes of groups of KV do not arrive: those with a recurrent state, or else the first}]}; "path" is that of a LoRA
adapter, or "".
ANSWERED: a row for each request; "distances": of its blocks from the pool's, where they were verified; "drafts":
{"proposed", "accepted"}: tokens of drafts since the engine's start.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAIT_MS = 60_000
MAX_TOKENS = 12


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    distances = recorded_distances()
    settings = {
        "dtype": "float32",
        "block_size": 32,
        "distributed_executor_backend": "uni",
        **asked["settings"],
    }
    engine = LLM(
        model=asked["model"],
        enforce_eager=True,
        max_model_len=1024,
        disable_log_stats=False,
        kv_transfer_config=transfer_config(asked),
        **settings,
    )
    if asked.get("wrong_keys"):
        engine.apply_model(compute_wrong_keys)
    answers, numbers = [], dict[str, int]()
    for request in asked["requests"]:
        for path, text in request.get("write", {}).items():
            Path(path).write_text(text)
        if request.get("forget"):
            forget(engine)
        if request.get("spoil"):
            spoil()
        hint = {"v": 1, "role": "both", "wait_tokens": request["wait_tokens"], "wait_ms": WAIT_MS}
        lora = None
        if request["path"]:
            number = numbers.setdefault(request["name"], len(numbers) + 1)
            lora = LoRARequest(request["name"], number, request["path"])
        sampling = SamplingParams(
            temperature=0,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"mooncache": hint}},
        )
        (answer,) = engine.generate(
            [{"prompt_token_ids": request["tokens"]}], sampling, lora_request=lora, use_tqdm=False
        )
        if asked.get("connector", {}).get("shadow_share"):
            verified()
        if request.get("settle"):
            answer = cached_answer(engine, request["tokens"], sampling)
        answers.append(
            {
                "cached": answer.num_cached_tokens,
                "tokens": list(answer.outputs[0].token_ids),
                "reported": (answer.kv_transfer_params or {}).get("mooncache"),
                "distances": distances[:],
                "drafts": drafts(engine),
            }
        )
        distances.clear()
        Path(sys.argv[2]).write_text(json.dumps(answers))
    engine.llm_engine.engine_core.shutdown()  # lets saves end


def drafts(engine: Any) -> dict[str, int]:
    """Tokens of drafts since the engine's start: all of them, and those that were right."""
    found = {metric.name: metric for metric in engine.get_metrics()}
    names = {
        "proposed": "vllm:spec_decode_num_draft_tokens",
        "accepted": "vllm:spec_decode_num_accepted_tokens",
    }
    return {what: int(found[name].value) if name in found else 0 for what, name in names.items()}


def transfer_config(asked: dict[str, Any]) -> dict[str, Any]:
    """vLLM's, with our connector."""
    return {
        "kv_connector": "MooncacheConnector",
        "kv_connector_module_path": "mooncache.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "mooncache.state_dir": asked["state_dir"],
            "mooncache.master_targets": asked["master"],
            "mooncache.break_even": False,
            "mooncache.load_timeout_s": 60,
            "mooncache.save_timeout_s": 60,
            **{f"mooncache.{name}": value for name, value in asked.get("connector", {}).items()},
        },
        **({"engine_id": asked["engine_id"]} if "engine_id" in asked else {}),
    }


def cached_answer(engine: Any, tokens: list[int], sampling: Any) -> Any:
    """Ask again until blocks come from the pool: saves end a moment after their request."""
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while True:
        empty_own_cache(engine)
        (answer,) = engine.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        if answer.num_cached_tokens or time.monotonic() > deadline_s:
            return answer


def empty_own_cache(engine: Any) -> None:
    """vLLM's own cache; it refuses while saves pin blocks, and what it has left would pass for blocks of the pool."""
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while not engine.reset_prefix_cache():
        assert time.monotonic() < deadline_s, "blocks stay pinned"
        engine.llm_engine.step()  # the end of a save is heard in a step


def forget(engine: Any) -> None:
    """Neither vLLM's own cache nor the bytes of its blocks are left."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    empty_own_cache(engine)
    for view in get_kv_transfer_group()._worker._mover._memory.buffers():
        view[:] = bytes(len(view))


def recorded_distances() -> list[float]:
    """Distances of blocks that are compared from here on, in the order in which they are."""
    from mooncache.kvcache.distance import Comparison

    found: list[float] = []
    compare = Comparison.distance

    def distance(self: Comparison, computed: Any, stored: Any) -> float:
        found.append(compare(self, computed, stored))
        return found[-1]

    Comparison.distance = distance  # type: ignore[method-assign]
    return found


def verified() -> None:
    """Wait until what the last request left to compare was compared."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group()._worker.drain()


def compute_wrong_keys(model: Any) -> None:
    """A quarter of the first layer's K comes out 1.02 times as large, as from a broken unit; the weights stay right."""
    projection = model.model.layers[0].self_attn.qkv_proj
    attention = model.model.layers[0].self_attn
    first, last = attention.q_size, attention.q_size + attention.kv_size // 4

    def enlarge(_module: Any, _inputs: Any, output: Any) -> Any:
        computed, bias = output
        computed = computed.clone()
        computed[..., first:last] *= 1.02
        return computed, bias

    projection.register_forward_hook(enlarge)


def spoil() -> None:
    """What is loaded for the groups with a state, or for the first group, from here on goes nowhere."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()._worker
    memory, groups = worker._mover._memory, worker._groups
    states = [group for group in range(len(groups)) if groups.has_state(group)]
    for group in states or [0]:
        lose_writes(memory._groups[group] if hasattr(memory, "_groups") else memory)


def lose_writes(memory: Any) -> None:
    @contextmanager
    def nowhere(blocks: Any, fence: Any = None, deadline_s: float = 0.0) -> Iterator[Any]:
        yield [[memoryview(bytearray(len(piece))) for piece in memory.slices(block)] for block in blocks]

    memory.writing = nowhere


if __name__ == "__main__":
    main()

"""vLLM with two tensor parallel ranks and the connector: one prompt computed, loaded, and again with other weights.

usage: python two_ranks.py MODEL OTHER PROMPT.json OUT.json STATE_DIR MASTER
"""

import json
import sys
import time
from pathlib import Path

SAVED_S = 60.0


def main() -> None:
    from one_vllm import empty_own_cache  # beside this file, which is run as a program
    from vllm import LLM, SamplingParams

    model, other, asked, answered, state_dir, master = sys.argv[1:]
    tokens = json.loads(Path(asked).read_text())
    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=32,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        kv_transfer_config={
            "kv_connector": "MooncacheConnector",
            "kv_connector_module_path": "mooncache.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "mooncache.state_dir": state_dir,
                "mooncache.master_targets": master,
                "mooncache.break_even": False,  # a busy machine may load slower than so small a model computes
            },
        },
    )
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def ask() -> dict[str, object]:
        answer = engine.generate([{"prompt_token_ids": tokens}], greedy, use_tqdm=False)[0]
        return {"cached": answer.num_cached_tokens, "tokens": list(answer.outputs[0].token_ids)}

    def ask_until_cached() -> dict[str, object]:
        """Saves end a moment after their request."""
        deadline_s = time.monotonic() + SAVED_S
        found: dict[str, object] = {"cached": 0}
        while not found["cached"] and time.monotonic() < deadline_s:
            empty_own_cache(engine)
            found = ask()
        return found

    steps = [ask(), ask_until_cached()]
    engine.collective_rpc("reload_weights", kwargs={"weights_path": other})
    engine.reset_prefix_cache()
    steps += [ask(), ask_until_cached()]
    Path(answered).write_text(json.dumps(steps))


if __name__ == "__main__":
    main()

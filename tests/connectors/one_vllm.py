"""One vLLM engine with the connector, in this process: answers requests one after the other.

usage: python one_vllm.py ASKED.json ANSWERED.json

ASKED: {"model", "state_dir", "master", "settings": more of vLLM's LLM, "requests": [{"name", "path", "tokens",
"wait_tokens", "write": {path: text} of files that change before it}]}; "path" is that of a LoRA adapter, or "".
"""

import json
import sys
from pathlib import Path
from typing import Any

WAIT_MS = 60_000
MAX_TOKENS = 12


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(
        model=asked["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        kv_transfer_config={
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
            },
        },
        **asked["settings"],
    )
    answers, numbers = [], dict[str, int]()
    for request in asked["requests"]:
        for path, text in request.get("write", {}).items():
            Path(path).write_text(text)
        hint = {"v": 1, "role": "both", "wait_tokens": request["wait_tokens"], "wait_ms": WAIT_MS}
        lora = None
        if request["path"]:
            number = numbers.setdefault(request["name"], len(numbers) + 1)
            lora = LoRARequest(request["name"], number, request["path"])
        (answer,) = engine.generate(
            [{"prompt_token_ids": request["tokens"]}],
            SamplingParams(
                temperature=0,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                extra_args={"kv_transfer_params": {"mooncache": hint}},
            ),
            lora_request=lora,
            use_tqdm=False,
        )
        answers.append(
            {
                "cached": answer.num_cached_tokens,
                "tokens": list(answer.outputs[0].token_ids),
                "reported": (answer.kv_transfer_params or {}).get("mooncache"),
            }
        )
        Path(sys.argv[2]).write_text(json.dumps(answers))
    engine.llm_engine.engine_core.shutdown()  # lets saves end


if __name__ == "__main__":
    main()

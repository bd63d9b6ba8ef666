"""One vLLM engine with LMCache's own connector to a server, in this process: answers prompts one after the other.

usage: python one_engine.py ASKED.json ANSWERED.json

ASKED: {"model", "port" of the LMCache server, "prompts": lists of token ids}.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

MAX_TOKENS = 8


def main() -> None:
    # vLLM 0.32 looks through the loaded modules for a library that numba, which LMCache imports, has replaced.
    ffi: Any = importlib.import_module("llvmlite.binding.ffi")
    ffi._lib_fn_wrapper.get = lambda _self, *_: None
    from vllm import LLM, SamplingParams

    asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(
        model=asked["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        kv_transfer_config={
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": asked["port"],
            },
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    answers = []
    for tokens in asked["prompts"]:
        (answer,) = engine.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        answers.append({"cached": answer.num_cached_tokens, "tokens": list(answer.outputs[0].token_ids)})
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()

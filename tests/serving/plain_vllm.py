"""One plain vLLM, no connector, no prefix cache: the oracle. Reads prompts, writes greedy tokens.

usage: python plain_vllm.py MODEL PROMPTS.json OUT.json MAX_TOKENS
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    model, prompts_path, out_path, max_tokens = sys.argv[1:]
    prompts = json.loads(Path(prompts_path).read_text())
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=8192,
        block_size=32,
        distributed_executor_backend="uni",
        disable_log_stats=True,
    )
    greedy = SamplingParams(temperature=0, max_tokens=int(max_tokens), ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    Path(out_path).write_text(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()

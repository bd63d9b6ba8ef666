"""Engines of vLLM as forks of one process that has imported it: importing is half of the time that a small one takes.

usage: python preloaded_vllm.py

A line of standard input is a JSON list: the file for what the engine prints, and the arguments of one_vllm.py. When the
fork has ended, its exit code is a line of standard output. The process ends with its input.
"""

import importlib
import json
import os
import sys

# What an engine needs that computes in one process, with a Llama or a model like one.
MODULES = (
    "vllm.entrypoints.llm",
    "vllm.lora.request",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "mooncache.connectors.vllm",
)


def main() -> None:
    """Answer until the input ends; in a fork, be the engine."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is imported may print
    for name in MODULES:
        importlib.import_module(name)
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        engine = os.fork()
        if not engine:
            _be_engine(log, arguments)
            return
        _, status = os.waitpid(engine, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _be_engine(log: str, arguments: list[str]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    sys.argv = ["one_vllm.py", *arguments]
    importlib.import_module("one_vllm").main()


if __name__ == "__main__":
    main()

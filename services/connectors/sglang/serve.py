"""`sglang.launch_server` for a worker: the key comes from the environment, and the passport file is written.

    MOONCACHE_ENGINE_API_KEY=... python -m mooncache.connectors.sglang.serve --passport-path FILE [SGLang's arguments]

Every user of a machine can read the command line of a process. So the key is put before SGLang's own reader of
arguments here, in the process, and taken out of the environment that its children inherit.

The passport is that of the engine's own prefix cache, by which gateways and the conductor know which prompts it holds.
Pages in the pool have names that SGLang makes (docs/decisions/0069).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import runpy
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Final

from mooncache.config import load
from mooncache.connectors.sglang.engine_passport import check_version
from mooncache.errors import ConfigInvalid
from mooncache.kvcache import identity
from mooncache.kvcache.passport import Passport
from mooncache.kvcache.passport_file import write_passport

SERVER: Final = "sglang.launch_server"
KEY_VARIABLE: Final = "MOONCACHE_ENGINE_API_KEY"
_LAYOUT: Final = "sglang"


def server_arguments(arguments: Sequence[str], env: MutableMapping[str, str]) -> list[str]:
    """What SGLang reads. Takes the key out of `env`.

    Raises:
        ConfigInvalid: there is no key: everyone who reaches the port could use the engine.
    """
    key = env.pop(KEY_VARIABLE, "")
    if not key:
        raise ConfigInvalid(
            f"{KEY_VARIABLE} is not set: the engine would serve everyone who reaches its port."
        )
    return [*arguments, "--api-key", key]


def passport_of(arguments: Sequence[str], state_dir: Path) -> Passport:
    """The passport of the engine that SGLang's arguments describe. Reads all weights once for each machine.

    Raises:
        ConfigInvalid: a version of SGLang that is not known, or files of the model that cannot be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--model-path", "--dtype", "--kv-cache-dtype", "--load-format", "--chat-template"):
        parser.add_argument(name, default="")
    parser.add_argument("--page-size", type=int, default=1)
    known, _ = parser.parse_known_args(list(arguments))
    version = check_version()
    folder = identity.resolve_model(known.model_path)
    return Passport(
        weights_digest=identity.weights_digest(
            folder, state_dir=state_dir, load_format=known.load_format or "auto"
        ),
        config_digest=identity.config_digest(folder),
        tokenizer_digest=identity.tokenizer_digest(folder, chat_template=known.chat_template),
        engine=f"sglang {version}",
        kv_dtype=f"{known.dtype or 'auto'}/{known.kv_cache_dtype or 'auto'}",
        kv_layout=_LAYOUT,
        block_tokens=known.page_size,
    )


def main(arguments: Sequence[str]) -> None:
    """Write the passport file and be the server."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--passport-path", type=Path, required=True)
    own, theirs = parser.parse_known_args(list(arguments))
    given = server_arguments(theirs, os.environ)
    passport = passport_of(theirs, load().cluster.state_dir.expanduser())
    write_passport(
        own.passport_path, passport, {"engine_version": importlib.metadata.version("sglang"), "pool": False}
    )
    sys.argv = [SERVER, *given]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigInvalid as error:
        sys.exit(error.message)

"""Who this engine's blocks are for: the passport, and what the worker learns of it."""

from __future__ import annotations

from pathlib import Path

from mooncache._version import __version__
from mooncache.hf_engine.model_runner import ModelRunner
from mooncache.kvcache import identity
from mooncache.kvcache.passport import Passport
from mooncache.kvcache.passport_file import write_passport
from mooncache.whole_file import OWNER_ONLY

# Raise the number when the same model would write other bytes into a block.
ENGINE = "mooncache-hf/1"


def passport_of(folder: Path, runner: ModelRunner, state_dir: Path | None) -> Passport:
    """Passport of a loaded model. Raises ConfigInvalid when the model's files cannot be read."""
    return Passport(
        weights_digest=identity.weights_digest(folder, state_dir=state_dir),
        config_digest=identity.config_digest(folder),
        tokenizer_digest=identity.tokenizer_digest(folder),
        engine=ENGINE,
        kv_dtype=runner.dtype,
        kv_layout=runner.memory.layout(),
        block_tokens=runner.memory.block_tokens,
    )


def hand_over(path: Path, passport: Passport, runner: ModelRunner, *, tokens_max: int, pool: bool) -> None:
    """Write the file for the worker. Raises OSError."""
    memory = runner.memory
    write_passport(
        path,
        passport,
        OWNER_ONLY,
        kv_bytes_per_token=memory.block_bytes // memory.block_tokens,
        kv_capacity_tokens=memory.blocks * memory.block_tokens,
        engine_version=__version__,
        max_model_tokens=tokens_max,
        pool=pool,
    )

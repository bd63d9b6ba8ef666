"""What `--set` may name for `--connector`: of the connector, of the engines around it, and of how they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mooncache.conformance.engine_target import EngineSettings, checked_settings

_CONNECTOR: Final = "connector."
_ENV: Final = "env."
_OF_QUESTIONS: Final = ("call_limit_s", "max_tokens", "many", "break_command", "mend_command")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Of the vLLM engines of a run.

    Attributes:
        model: a model's folder or name; by default a small random one is made for the run.
        other_model: a model with the same shapes and other weights, for promises about identity; made as well where
            `model` is.
        dtype: of model and KV. float32 repeats answers exactly on a CPU.
        other_dtype: another one, which must not share.
        blocks: of each engine's own cache, of `block_tokens` each: few, so that requests are preempted.
        block_tokens: tokens of one block; vLLM takes multiples of 32 on a CPU.
        max_model_len: tokens of the longest prompt and its answer.
        vllm_args: more arguments of `vllm serve`, as in a shell.
        start_limit_s: seconds that an engine may take until it serves.
        damage_command: a command that damages what the connector has stored, such as one that flips bits of its files.
    """

    model: str = ""
    other_model: str = ""
    dtype: str = "float32"
    other_dtype: str = "bfloat16"
    blocks: int = 48
    block_tokens: int = 32
    max_model_len: int = 1024
    vllm_args: str = ""
    start_limit_s: float = 400.0
    damage_command: str = ""


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """All of it. extra: `kv_connector_extra_config`. env: variables of the engines' processes."""

    vllm: VllmSettings
    questions: EngineSettings
    extra: dict[str, Any]
    env: dict[str, str]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ConnectorConfig:
        """From pairs: `connector.NAME`, `env.NAME`, and the others by their names. Raises InvalidArgument."""
        extra: dict[str, Any] = {}
        env: dict[str, str] = {}
        questions: dict[str, Any] = {}
        vllm: dict[str, Any] = {}
        for name, value in config.items():
            if name.startswith(_CONNECTOR):
                extra[name.removeprefix(_CONNECTOR)] = value
            elif name.startswith(_ENV):
                env[name.removeprefix(_ENV)] = str(value)
            elif name in _OF_QUESTIONS:
                questions[name] = value
            else:
                vllm[name] = value
        whose = (
            f"A run of a connector (which takes connector.NAME, env.NAME, {', '.join(_OF_QUESTIONS)} as well)"
        )
        return cls(checked_settings(VllmSettings, vllm, whose), EngineSettings.of(questions), extra, env)

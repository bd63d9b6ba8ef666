"""What a one-machine cluster is made of, and what can be run here."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from mooncache.errors import ConfigInvalid, InvalidArgument

MAX_NODES: Final = 64
MAX_INSTANCES: Final = 64
MAX_CONDUCTORS: Final = 8
MASTER_PORT: Final = 7700
CONDUCTOR_PORT: Final = 7800
GATEWAY_PORT: Final = 8000
_SERVE_MODULES: Final = ("starlette", "uvicorn", "aiohttp", "zmq", "tokenizers", "jinja2")


class ClusterRole(StrEnum):
    """What a machine does for a cluster whose master runs elsewhere."""

    STORE = "store"  # store nodes
    ENGINE = "engine"  # workers with their engines
    GATEWAY = "gateway"


class EngineKind(StrEnum):
    """Which engine the workers of a one-machine cluster start."""

    VLLM = "vllm"
    HF = "hf"
    NONE = "none"  # no workers: a pool alone


_ENGINE_MODULES: Final[dict[EngineKind, tuple[str, ...]]] = {
    EngineKind.VLLM: ("vllm", "torch"),
    EngineKind.HF: ("transformers", "torch", "safetensors"),
    EngineKind.NONE: (),
}
_HOW_TO_INSTALL: Final = {
    EngineKind.VLLM: "pip install 'mooncache[vllm]', on a machine without a GPU scripts/install_vllm.sh",
    EngineKind.HF: "pip install 'mooncache[hf]'",
}


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What an embedded cluster is made of. A port of None means the usual one when it is free; 0 means any free port.

    Engine "none" is a pool alone: master and store nodes. With an engine there are also a conductor, a gateway and
    `prefill` + `decode` workers; with `prefill` 0 the decode workers do both. Of several conductors one leads, and the
    others are its standbys; `conductor_port` is that of the first.

    With `roles` only these parts run here, for the cluster that the configuration names: its master and conductor are
    on another machine.
    """

    state_dir: Path
    nodes: int | None = None
    capacity_bytes: int = 1 << 30
    ssd_bytes: int = 0
    shared_path: Path | None = None
    shared_url: str = ""
    keep_memory: bool = False
    host: str = "127.0.0.1"
    port: int | None = None
    log_level: str = "info"
    extra_env: tuple[tuple[str, str], ...] = ()
    engine: EngineKind = EngineKind.NONE
    model: str = ""
    model_name: str = ""
    prefill: int = 1
    decode: int = 1
    conductors: int = 1
    conductor_port: int | None = None
    gateway_port: int | None = None
    roles: tuple[ClusterRole, ...] = ()

    def __post_init__(self) -> None:
        if self.nodes is not None and not 1 <= self.nodes <= MAX_NODES:
            raise InvalidArgument(f"nodes must be between 1 and {MAX_NODES}; got {self.nodes}.")
        if self.capacity_bytes < 1 << 20:
            raise InvalidArgument(f"capacity must be at least 1 MiB; got {self.capacity_bytes} bytes.")
        if not 1 <= self.conductors <= MAX_CONDUCTORS:
            raise InvalidArgument(
                f"conductors must be between 1 and {MAX_CONDUCTORS}; got {self.conductors}."
            )
        if not 0 <= self.prefill <= MAX_INSTANCES:
            raise InvalidArgument(f"prefill must be between 0 and {MAX_INSTANCES}; got {self.prefill}.")
        least = 0 if self.roles and self.prefill else 1  # elsewhere in the cluster others may decode
        if not least <= self.decode <= MAX_INSTANCES:
            raise InvalidArgument(f"decode must be between {least} and {MAX_INSTANCES}; got {self.decode}.")

    @property
    def serves(self) -> bool:
        """Whether requests are served, not only blocks kept."""
        return self.engine != EngineKind.NONE

    @property
    def node_count(self) -> int:
        """Store nodes: as asked for, else one beside engines or elsewhere's master, and two for a pool alone."""
        return self.nodes if self.nodes is not None else 1 if self.serves or self.roles else 2

    def runs(self, role: ClusterRole) -> bool:
        """Whether parts of this role run on this machine."""
        return role in self.roles if self.roles else role is ClusterRole.STORE or self.serves


def missing_modules(engine: EngineKind) -> list[str]:
    """Packages that this engine needs and that are not installed; nothing is imported to find out."""
    wanted = (*_SERVE_MODULES, *_ENGINE_MODULES[engine]) if engine != EngineKind.NONE else ()
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def choose_engine(asked: str) -> tuple[EngineKind, str]:
    """The engine to use and, when it is not the first choice, a sentence about why.

    Raises:
        InvalidArgument: no engine of that name.
        ConfigInvalid: the engine asked for by name is not installed.
    """
    if asked == "auto":
        if not missing_modules(EngineKind.VLLM):
            return EngineKind.VLLM, ""
        missing = ", ".join(missing_modules(EngineKind.HF))
        if not missing:
            install = _HOW_TO_INSTALL[EngineKind.VLLM]
            why = f"vLLM is not installed, so the small engine hf is used. To install vLLM: {install}."
            return EngineKind.HF, why
        install = _HOW_TO_INSTALL[EngineKind.HF]
        why = f"No engine is installed ({missing} missing), so a pool alone is started. To install one: {install}."
        return EngineKind.NONE, why
    if asked == "sglang":
        raise InvalidArgument(
            "`mooncache up` starts no SGLang engines. Start each by `mooncache worker --engine sglang --model FOLDER`, "
            "beside master, store nodes, conductor and gateway."
        )
    if asked not in set(EngineKind):
        raise InvalidArgument(f"--engine must be auto, vllm, hf or none; got {asked!r}.")
    engine = EngineKind(asked)
    missing = ", ".join(missing_modules(engine))
    if missing:
        raise ConfigInvalid(f"--engine {engine} needs {missing} (not installed): {_HOW_TO_INSTALL[engine]}.")
    return engine, ""


def resolve_model(text: str) -> str:
    """A model's folder as an absolute path, or a hub's id as it is.

    Raises:
        InvalidArgument: it looks like a folder and there is no model in it.
    """
    if not text:
        return ""
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidArgument(
                f"--model: {path} has no config.json, so it is not a model in Hugging Face's format."
            )
        return str(path.absolute())
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise InvalidArgument(f"--model: there is no folder {path}.")
    return text


def gpu_count() -> int:
    """NVIDIA GPUs of this machine, as the driver's device files tell; CUDA_VISIBLE_DEVICES restricts them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() not in {"", "-1"}])
    return len(
        [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
    )

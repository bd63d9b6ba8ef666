"""What LMCache's names of models stand for: digests of the models' files.

Idea: two servers may call two models by one name, so a name is worth what the files on this machine say. Reading all
weights takes time (once for each machine); models that are known at the start are read then, others by a thread, and
until that is done their chunks are misses. So are those of a model that has no files here.
"""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mooncache.connectors.lmcache.settings import PluginSettings
from mooncache.connectors.versions import Version, supported_minor
from mooncache.kvcache import identity
from mooncache.kvcache.passport import Passport
from mooncache.kvcache.pool_link import code_name
from mooncache.runtime.logs import Event, get_logger

_log = get_logger(__name__)
OLDEST: Final[Version] = (0, 5, 6)
NEWER_THAN_ALL: Final[Version] = (0, 6, 0)
MODELS_MAX: Final = 64
"""Models of one process; those beyond are never shared."""
ROOTS_MAX: Final = 4096
"""Roots that are remembered."""
_ENGINES: Final = ("vllm", "sglang")


def check_version(text: str | None = None) -> str:
    """LMCache's minor version, for example 0.5.

    Raises:
        ConfigInvalid: a version whose storage interfaces are not those of the plug-ins.
    """
    text = importlib.metadata.version("lmcache") if text is None else text
    return supported_minor("LMCache", text, oldest=OLDEST, newer_than_all=NEWER_THAN_ALL)


def engine_name(*, in_process: bool) -> str:
    """Who makes the bytes: LMCache's minor version, and that of the engine where it runs in the same process."""
    parts = [f"lmcache-{check_version()}"]
    for name in _ENGINES if in_process else ():
        version = str(getattr(sys.modules.get(name), "__version__", ""))
        if version:
            parts.append(f"{name}-{'.'.join(version.split('.')[:2])}")
    return "/".join(parts)


@dataclass(frozen=True, slots=True)
class ModelDigests:
    """What a model is."""

    weights: str
    config: str


class Models:
    """Digests of models by LMCache's names. Thread-safe."""

    def __init__(self, settings: PluginSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._known: dict[str, ModelDigests | None] = {}  # None: being read, or refused

    def read(self, name: str) -> ModelDigests:
        """The digests, from the files.

        Raises:
            ConfigInvalid: the model has no files here, or they cannot be read.
        """
        folder = identity.resolve_model(self._settings.models.get(name, name))
        content = {
            "files": identity.config_digest(folder),
            "code": identity.code_digest(folder),
            "name": name,
            "variant": self._settings.variant,
        }
        weights = identity.weights_digest(folder, state_dir=self._settings.state_dir)
        found = ModelDigests(weights, identity.digest_of(content))
        with self._lock:
            self._known[name] = found
        return found

    def get(self, name: str) -> ModelDigests | None:
        """The digests; None while they are read, and of models that cannot be shared."""
        with self._lock:
            if name in self._known:
                return self._known[name]
            if len(self._known) >= MODELS_MAX:
                return None
            self._known[name] = None
        threading.Thread(target=self._read_later, args=(name,), name="mooncache-model", daemon=True).start()
        return None

    def _read_later(self, name: str) -> None:
        try:
            self.read(name)
        except Exception as error:  # noqa: BLE001  (whatever is wrong with a model, LMCache serves it)
            _log.warning(Event.CONNECTOR_OFF, code=code_name(error), reason=str(error), model=name)


class Roots:
    """Roots of passports, in hexadecimal, by what decides them; None for models that are not known (yet)."""

    def __init__(self, models: Models, make: Callable[[ModelDigests, tuple[str, ...]], Passport]) -> None:
        self._models = models
        self._make = make
        self._roots: dict[tuple[str, ...], str] = {}

    def get(self, model: str, *facts: str) -> str | None:
        """The root of a model's passport with these further facts. Raises InvalidArgument for impossible ones."""
        key = (model, *facts)
        root = self._roots.get(key)
        if root is None:
            digests = self._models.get(model)
            if digests is None:
                return None
            if len(self._roots) >= ROOTS_MAX:
                self._roots.clear()
            root = self._roots[key] = self._make(digests, facts).root().hex()
            _log.info(Event.CONNECTOR_STARTED, passport=root, model=model)
        return root

"""A connector on the bench: an engine of vLLM with it, one without any cache for the right answers, and others.

Each question empties the engine's own cache first, so that whatever is cached in an answer came through the connector.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from mooncache.conformance.connector_settings import ConnectorConfig
from mooncache.conformance.core.verdicts import NotOfferedError
from mooncache.conformance.engine_bench import EngineBench
from mooncache.conformance.engine_target import CompletionAnswer, EngineSettings, EngineTarget
from mooncache.conformance.vllm_server import MODEL_NAME, EngineChoice, VllmServer
from mooncache.errors import InvalidArgument

_SAVED_S: Final = 30.0
_AGAIN_S: Final = 0.5
_OTHER_SEED: Final = 20_261_127

Damage = Callable[[random.Random], object]


class ConnectorTarget(EngineTarget):
    """The engine of a connector. Its own cache is empty before each question that is the only one under way."""

    def __init__(self, server: VllmServer, settings: EngineSettings) -> None:
        self.server = server
        self._asked = 0
        self._lock = threading.Lock()
        super().__init__(server.url, replace(settings, model=MODEL_NAME))

    def ask(self, prompt: str, **changes: Any) -> CompletionAnswer:
        """The whole answer. Raises OSError, EngineRefusedError."""
        with self._alone():
            return super().ask(prompt, **changes)

    def stream(self, prompt: str, cut_after: int | None = None, **changes: Any) -> CompletionAnswer | None:
        """As an engine's. Raises OSError, EngineRefusedError."""
        with self._alone():
            return super().stream(prompt, cut_after, **changes)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            if not self._asked:
                self.server.forget()
            self._asked += 1
        try:
            yield
        finally:
            with self._lock:
                self._asked -= 1


class ConnectorEngines:
    """The engines of one run, and the models that were made for it.

    Args:
        connector: `package.module:Class` of a subclass of vLLM's KVConnectorBase_V1.

    Raises:
        InvalidArgument: an engine cannot be started.
    """

    def __init__(self, connector: str, config: ConnectorConfig) -> None:
        module, colon, attribute = connector.partition(":")
        if not colon or not module or not attribute:
            raise InvalidArgument(f"{connector!r} is no connector: it is named as package.module:Class.")
        self._transfer: Mapping[str, Any] = {
            "kv_connector": attribute,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": config.extra,
        }
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="mooncache-conformance-")
        self._closing = contextlib.ExitStack()
        self._closing.callback(self._folder.cleanup)
        try:
            vllm = config.vllm
            self.model = vllm.model or self._made(0)
            plain = EngineChoice("without-cache", self.model, vllm.dtype)
            self.server = self._start(EngineChoice("with-connector", self.model, vllm.dtype, self._transfer))
            reference = self._start(plain)
            self.server.wait()
            reference.wait()
        except BaseException:
            self.close()
            raise
        self.target = ConnectorTarget(self.server, config.questions)
        self.reference = EngineTarget(reference.url, replace(config.questions, model=MODEL_NAME))

    @contextlib.contextmanager
    def other_weights(self) -> Iterator[ConnectorTarget]:
        """An engine with this connector and other weights of the same shapes. Raises NotOfferedError."""
        vllm = self._config.vllm
        if vllm.model and not vllm.other_model:
            raise NotOfferedError(
                "no other model: --set other_model=a folder with the same shapes and other weights"
            )
        model = vllm.other_model or self._made(_OTHER_SEED)
        with self._beside(EngineChoice("other-weights", model, vllm.dtype, self._transfer)) as target:
            yield target

    @contextlib.contextmanager
    def other_type(self) -> Iterator[ConnectorTarget]:
        """An engine with this connector and numbers of another type."""
        other = self._config.vllm.other_dtype
        with self._beside(EngineChoice("other-type", self.model, other, self._transfer)) as target:
            yield target

    def close(self) -> None:
        """End all engines, and remove what was made for them."""
        self._closing.close()

    @contextlib.contextmanager
    def _beside(self, choice: EngineChoice) -> Iterator[ConnectorTarget]:
        server = VllmServer(choice, self._config.vllm, self._config.env, Path(self._folder.name))
        try:
            try:
                server.wait()
            except InvalidArgument as error:
                raise NotOfferedError(str(error)) from None
            yield ConnectorTarget(server, self._config.questions)
        finally:
            server.close()

    def _start(self, choice: EngineChoice) -> VllmServer:
        server = VllmServer(choice, self._config.vllm, self._config.env, Path(self._folder.name))
        self._closing.callback(server.close)
        return server

    def _made(self, seed: int) -> str:
        from mooncache import tiny_model

        try:
            return str(tiny_model.build(Path(self._folder.name) / f"model-{seed}", seed=seed))
        except ImportError as error:
            raise InvalidArgument(
                f"A small model needs {error.name}: pip install 'mooncache[hf]', or --set model=FOLDER."
            ) from None


@dataclass
class ConnectorBench(EngineBench):
    """What each try of a promise gets."""

    engines: ConnectorEngines = field(kw_only=True)
    damage: Damage | None = None

    @property
    def target(self) -> ConnectorTarget:
        """The engine with the connector."""
        return self.engines.target

    def until_saved(self, target: ConnectorTarget, prompt: str) -> CompletionAnswer:
        """The first answer of which the connector has loaded a part, or the last one when time is up."""
        until_s = time.monotonic() + _SAVED_S
        while True:
            found = self.within("a question", lambda: target.ask(prompt))
            if found.cached_tokens or time.monotonic() > until_s:
                return found
            time.sleep(_AGAIN_S)

    def restart(self) -> None:
        """Kill the engine with the connector, and start it anew. Raises InvalidArgument."""
        self.engines.server.kill()
        self.engines.server.start()
        self.engines.server.wait()

"""One `vllm serve` of a run, on a port that it keeps over its starts. Nothing of it outlives this process."""

from __future__ import annotations

import http
import http.client
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from mooncache.conformance.connector_settings import VllmSettings
from mooncache.errors import InvalidArgument
from mooncache.runtime.ports import UNIX_PATH_MAX, hold_port, port_of
from mooncache.worker import guard
from mooncache.worker.adapters.vllm import processor_env

HOST: Final = "127.0.0.1"
MODEL_NAME: Final = "conformance"
_ASK_S: Final = 10.0
_AGAIN_S: Final = 0.25
_RESET_S: Final = 3.0
_END_S: Final = 20.0
_TAIL_CHARS: Final = 1500
_LOG_BYTES_MAX: Final = 1 << 20
_ERRORS_MAX: Final = 3
_SOCKET_NAME_BYTES: Final = 37  # a slash and a UUID
_ANSWER_BYTES_MAX: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine. transfer: its `--kv-transfer-config`; None is an engine that neither loads nor keeps anything."""

    name: str
    model: str
    dtype: str
    transfer: Mapping[str, Any] | None = None


class VllmServer:
    """It is started by the constructor; `wait` returns when it serves. `folder` gets its log.

    Raises:
        InvalidArgument: it cannot be started, or ends before it serves; the text has the end of its log.
    """

    def __init__(
        self, choice: EngineChoice, settings: VllmSettings, env: Mapping[str, str], folder: Path
    ) -> None:
        self.choice, self._settings, self._env = choice, settings, dict(env)
        self._held = hold_port(HOST)
        self.port = port_of(self._held)
        self._log = folder / f"{choice.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: IO[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Where it is asked."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start it, for the first time or again after `kill`."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        # The guard ends everything that vLLM has started when the pipe's writing end closes, also after a kill of ours.
        command = [sys.executable, "-I", "-S", str(guard.__file__), str(reading), *self._command()]
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(reading,),
                    env=self._environment(),
                )
        except OSError as error:
            os.close(writing)
            raise InvalidArgument(f"vLLM cannot be started: {error.strerror}.") from None
        finally:
            os.close(reading)
        self._lifeline = os.fdopen(writing, "wb", buffering=0)

    def wait(self) -> None:
        """Return when it serves. Raises InvalidArgument."""
        until_s = time.monotonic() + self._settings.start_limit_s
        while time.monotonic() < until_s:
            if not self.runs:
                raise InvalidArgument(f"The engine {self.choice.name} ended before it served: {self._tail()}")
            if self.serves():
                return
            time.sleep(_AGAIN_S)
        raise InvalidArgument(
            f"The engine {self.choice.name} does not serve after {self._settings.start_limit_s:g} s: {self._tail()}"
        )

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def serves(self) -> bool:
        """Whether it answers and says that it is well."""
        try:
            self._ask("GET", "/health")
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """End it at once, with everything that it has started."""
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def close(self) -> None:
        """End it for good."""
        self.kill()
        self._held.close()

    def forget(self) -> bool:
        """Empty the engine's own cache, not the connector's. False: requests that run keep it from that."""
        until_s = time.monotonic() + _RESET_S
        while time.monotonic() < until_s:
            try:
                if json.loads(self._ask("POST", "/reset_prefix_cache")).get("success", True):
                    return True
            except (OSError, ValueError):
                return False
            time.sleep(_AGAIN_S)
        return False

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 where it is not there. Raises OSError."""
        text = self._ask("GET", "/metrics").decode(errors="replace")
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def _ask(self, method: str, path: str) -> bytes:
        """What it answers with status 200. Raises OSError."""
        link = http.client.HTTPConnection(HOST, self.port, timeout=_ASK_S)
        try:
            link.request(method, path)
            answer = link.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise OSError(f"{path}: status {answer.status}")
            return answer.read(_ANSWER_BYTES_MAX)
        except http.client.HTTPException as error:
            raise OSError(f"{path}: {error!r}") from None
        finally:
            link.close()

    def _command(self) -> list[str]:
        settings, choice = self._settings, self.choice
        words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", choice.model]
        options = {
            "--served-model-name": MODEL_NAME,
            "--host": HOST,
            "--port": self.port,
            "--dtype": choice.dtype,
            "--block-size": settings.block_tokens,
            "--max-model-len": settings.max_model_len,
            "--num-gpu-blocks-override": settings.blocks,
            # Hashes that mean the same in every process.
            "--prefix-caching-hash-algo": "sha256_cbor",
            "--disable-access-log-for-endpoints": "/health,/metrics,/reset_prefix_cache",
        }
        for name, value in options.items():
            words += [name, str(value)]
        words += ["--enforce-eager", "--enable-prompt-tokens-details"]
        if choice.transfer is None:
            words.append("--no-enable-prefix-caching")
        else:
            words += ["--enable-prefix-caching", "--kv-transfer-config", json.dumps(dict(choice.transfer))]
        return [*words, *shlex.split(settings.vllm_args)]

    def _environment(self) -> dict[str, str]:
        env = {**os.environ, **processor_env(0)}
        env |= {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }  # dev mode: the route that empties its cache
        if Path(self.choice.model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        sockets = str(self._log.parent)
        if len(os.fsencode(sockets)) + _SOCKET_NAME_BYTES <= UNIX_PATH_MAX:
            env["VLLM_RPC_BASE_PATH"] = (
                sockets  # a killed engine leaves its sockets, and this folder is removed
            )
        return env | self._env

    def _tail(self) -> str:
        """Why it ended, as far as its log says so: errors by name, else the last lines."""
        try:
            text = self._log.read_bytes()[-_LOG_BYTES_MAX:].decode(errors="replace")
        except OSError:
            return "it wrote no log"
        errors = list(
            dict.fromkeys(re.findall(r"^(?:.*ERROR.*\] )?(\w*(?:Error|Exception): .+)$", text, re.MULTILINE))
        )
        return "; ".join(errors[:_ERRORS_MAX]) or text[-_TAIL_CHARS:].strip()

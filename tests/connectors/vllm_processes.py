"""Real engines of vLLM, one after the other, each in a process of its own: a fork of one that has imported vLLM."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.worker import guard
from tests.groups import stop_after

ENGINE_S = 900
SCRIPT = Path(__file__).with_name("preloaded_vllm.py")
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Of a small engine beside others on few cores."""


class _Preloaded:
    """The process that engines are forks of. It and they end with this one, however that ends."""

    def __init__(self) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self._lifeline = os.fdopen(writing, "wb", buffering=0)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(guard.__file__), str(reading), sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            pass_fds=(reading,),
            env=os.environ | ENGINE_ENVIRONMENT,
        )
        os.close(reading)

    def run(self, log: Path, *arguments: str) -> int:
        """The exit code of one engine."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(log), *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], ENGINE_S)[0], f"not within {ENGINE_S} s"
        answer = self.process.stdout.readline()
        assert answer, f"the process of the engines ended:\n{self._said()}"
        return int(answer)

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    def stop(self) -> None:
        """With whatever runs in it."""
        self._lifeline.close()
        self.process.communicate()
        self._log.close()


_running: list[_Preloaded] = []


def _preloaded() -> _Preloaded:
    if not _running:
        _running.append(_Preloaded())
        stop_after("connectors", lambda: _running.pop().stop())
    return _running[0]


class Engines:
    """Whatever an engine has of an earlier one comes from the pool."""

    def __init__(self, model: Path, cluster: EmbeddedCluster, folder: Path) -> None:
        self._asked = {
            "model": str(model),
            "state_dir": str(cluster.state_dir),
            "master": cluster.master_target,
        }
        self._folder = folder

    def answers(
        self, name: str, *requests: dict[str, Any], more: dict[str, Any] | None = None, **settings: Any
    ) -> list[dict[str, Any]]:
        """`settings` are vLLM's; `more` is what else one_vllm.py may be asked for."""
        asked, answered = self._folder / f"{name}-asked.json", self._folder / f"{name}-answered.json"
        asked.write_text(
            json.dumps({**self._asked, **(more or {}), "settings": settings, "requests": requests})
        )
        log = self._folder / f"{name}.log"
        code = _preloaded().run(log, str(asked), str(answered))
        assert code == 0, log.read_text(errors="replace")[-8000:]
        found: list[dict[str, Any]] = json.loads(answered.read_text())
        return found

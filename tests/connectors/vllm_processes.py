"""Real engines of vLLM, one after the other, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mooncache.cluster.embedded import EmbeddedCluster

ENGINE_S = 900


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
        script = Path(__file__).with_name("one_vllm.py")
        done = subprocess.run(
            [sys.executable, str(script), str(asked), str(answered)],
            env={
                **os.environ,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
            check=False,
            capture_output=True,
            text=True,
            timeout=ENGINE_S,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        found: list[dict[str, Any]] = json.loads(answered.read_text())
        return found

"""One more gateway beside a running cluster, as a real process with settings of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

from mooncache.cluster.embedded import EmbeddedCluster
from tests.conditions import wait_until


@contextlib.contextmanager
def second_gateway(cluster: EmbeddedCluster, **settings: Any) -> Iterator[str]:
    """Base URL of a gateway with these settings; ends with the block."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MOONCACHE_")}
    env |= {
        "MOONCACHE_STATE_DIR": str(cluster.state_dir),
        "MOONCACHE_CLUSTER_CONDUCTOR_TARGET": cluster.layout.conductor_target,
        "MOONCACHE_GATEWAY_PORT": "0",
        "MOONCACHE_LOGGING_FORMAT": "json",
    }
    env |= {f"MOONCACHE_GATEWAY_{name.upper()}": str(value) for name, value in settings.items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncache.gateway"], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if found.get("event") == "gateway.listening":
                    url = found["url"]
                if found.get("event") == "tokenizer.loaded":
                    break
        assert url, "the gateway did not start"
        _wait(url)
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _wait(url: str) -> None:
    def has_models() -> bool:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return bool(json.load(response)["models"])

    wait_until(has_models, "the gateway knows a model", every_s=0.05)

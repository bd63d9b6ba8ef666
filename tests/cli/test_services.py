"""Each service starts by its command with the options of its help: they reach it, and none is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mooncache.auth import create_cluster_token
from mooncache.cluster.settings import missing_modules
from tests.cli.test_cluster import environment
from tests.conditions import wait_until

START_S = 60.0
NOWHERE = "127.0.0.1:9"


@contextmanager
def service(folder: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """The service in the foreground; yields its log line `service.ready`."""
    log = folder / "service.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "mooncache.cli", *arguments, "--state-dir", str(folder)],
            env=environment(folder),
            stdout=file,
            stderr=file,
        )
    try:
        yield ready_line(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)
            raise
    assert code == 0, log.read_text()


def ready_line(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        for line in log.read_text().splitlines():
            if '"service.ready"' in line:
                return dict(json.loads(line))
        assert process.poll() is None, log.read_text()
        return None

    return wait_until(found, log.read_text, START_S) or {}


CASES = {
    "master": ["--host", "127.0.0.1", "--port", "0"],
    "store-node": ["--node-id", "n", "--capacity", "16MiB", "--host", "127.0.0.1", "--master", NOWHERE],
    "conductor": ["--host", "127.0.0.1", "--port", "0", "--master", NOWHERE],
    "gateway": ["--host", "127.0.0.1", "--port", "0", "--conductor", NOWHERE],
    "worker": [
        *("--engine", "hf", "--role", "prefill", "--instance-id", "p", "--host", "127.0.0.1"),
        *("--master", NOWHERE, "--conductor", NOWHERE),
    ],
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_a_service_starts_with_its_options(name: str, tmp_path: Path) -> None:
    if name in ("gateway", "conductor", "worker") and missing_modules("hf"):
        pytest.skip("needs the small engine: pip install 'mooncache[hf]'")
    create_cluster_token(tmp_path / "cluster.token")
    with service(tmp_path, name, *CASES[name]) as ready:
        assert ready["event"] == "service.ready"

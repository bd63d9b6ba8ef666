"""The engines behind our gateway keep every promise of an engine, also while the store node below them is stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncache.auth import load_cluster_token, tenant_token
from mooncache.client.state_dir import read_cluster_file
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.settings import missing_modules
from mooncache.conformance.engine_promises import ENGINE_PROMISES

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_modules("hf")), reason="needs the small engine: pip install 'mooncache[hf]'"
    ),
]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("serving"),
        engine="hf",
        nodes=1,
        capacity_bytes=256 << 20,
        port=0,
        conductor_port=0,
        gateway_port=0,
        extra_env=(("OMP_NUM_THREADS", "1"), ("MOONCACHE_CONNECTOR_BREAK_EVEN", "false")),
    )
    cluster = EmbeddedCluster(settings)
    cluster.start(180)
    yield cluster
    assert not cluster.stop()


def test_our_engines_keep_every_promise(serving: EmbeddedCluster, tmp_path: Path) -> None:
    other = tmp_path / "other.key"
    other.write_text(tenant_token(load_cluster_token(serving.token_path), "other").text)
    cluster_file = read_cluster_file(serving.settings.state_dir)
    node = next(part.pid for part in cluster_file.parts if part.name == "node-1")
    page = tmp_path / "page.html"
    settings = {
        "api_key_file": serving.demo_key_path,
        "other_key_file": other,
        "many": 12,
        "break_command": f"kill -STOP {node}",
        "mend_command": f"kill -CONT {node}",
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mooncache.cli", "conformance", "--engine", serving.layout.gateway_url),
            *(*words, "--seed", "7", "--json", "--report", str(page)),
        ],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    found = json.loads(done.stdout)
    verdicts = {each["name"]: (each["verdict"], each["seen"]) for each in found["promises"]}
    assert set(verdicts) == {promise.name for promise in ENGINE_PROMISES}
    assert {name: told for name, told in verdicts.items() if told[0] != "pass"} == {}
    assert (done.returncode, found["kept"]) == (0, True)
    assert "conforms" in page.read_text(encoding="utf-8")

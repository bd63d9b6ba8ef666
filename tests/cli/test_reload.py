"""`mooncache config reload`: processes of `mooncache up` take over what needs no restart, and say what does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster

FILE = '[logging]\nlevel = "{level}"\n\n[master]\nrepair_grace_s = "{grace}"\n'


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedCluster]:
    (tmp_path / "m.toml").write_text(FILE.format(level="info", grace="30s"))
    monkeypatch.setenv("MOONCACHE_CONFIG", str(tmp_path / "m.toml"))
    running = EmbeddedCluster(
        ClusterSettings(state_dir=tmp_path / "state", nodes=1, capacity_bytes=16 << 20, port=0)
    )
    with running:
        yield running


def reload(cluster: EmbeddedCluster, expect: int) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "mooncache.cli", "config", "reload", "--json", "--timeout", "60s"],
        env={**os.environ, "MOONCACHE_STATE_DIR": str(cluster.state_dir)},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return list(json.loads(done.stdout)["processes"])


def levels(cluster: EmbeddedCluster, name: str) -> set[str]:
    text = cluster.parts[name].log_path.read_text(encoding="utf-8")
    return {json.loads(line)["level"] for line in text.splitlines() if line.startswith("{")}


def test_log_level_and_what_needs_a_restart(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    pids = {name: part.pid for name, part in cluster.parts.items()}
    assert "debug" not in levels(cluster, "node-1")
    (tmp_path / "m.toml").write_text(FILE.format(level="debug", grace="40s"))
    for row in reload(cluster, 0):
        assert row["outcome"] == "reloaded"
        assert row["changed"] == ["logging.level"]
        assert row["needs_restart"] == ["master.repair_grace_s"]
    assert [row["changed"] for row in reload(cluster, 0)] == [[], []], "it is in force already"
    assert {name: part.pid for name, part in cluster.parts.items()} == pids
    assert all(part.exit_code is None for part in cluster.parts.values())


def test_a_wrong_file_changes_nothing(
    cluster: EmbeddedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (tmp_path / "m.toml").read_text()
    (tmp_path / "m.toml").write_text(good + "\n[gateway]\nno_such_setting = 1\n")
    done = subprocess.run(
        [sys.executable, "-m", "mooncache.cli", "config", "reload", "--json"],
        env={**os.environ, "MOONCACHE_STATE_DIR": str(cluster.state_dir)},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, "the command reads the same file"
    monkeypatch.delenv("MOONCACHE_CONFIG")
    rows = reload(cluster, 1)
    assert {row["outcome"] for row in rows} == {"refused"}
    assert all("no_such_setting" in row["reason"] for row in rows)

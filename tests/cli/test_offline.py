"""Commands that need no cluster, and every way to be refused: a sentence, an exit code, never a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from mooncache.cli.app import build
from mooncache.cli.app import run as run_here


def run(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    base = {key: value for key, value in os.environ.items() if not key.startswith("MOONCACHE_")}
    return subprocess.run(
        [sys.executable, "-m", "mooncache.cli", *arguments],
        env={**base, "MOONCACHE_STATE_DIR": str(folder), "COLUMNS": "200", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def commands(app: App, *names: str) -> Iterator[tuple[str, ...]]:
    """Every command of the tree that does something, as the words that are typed."""
    for name in app:
        if name.startswith("-"):
            continue
        below = app[name]
        if below.default_command is not None:
            yield (*names, name)
        yield from commands(below, *names, name)


ALL_COMMANDS = sorted(commands(build()))


def test_the_tree_is_whole() -> None:
    assert {("up",), ("why",), ("doctor",), ("doctor", "rdma"), ("bench", "sound"), ("plan",)} <= set(
        ALL_COMMANDS
    )


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=" ".join)
def test_help_teaches(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: mooncache {' '.join(command)}")
    assert len(text.splitlines()) > 3


def test_a_benchmark_prints_its_document_or_writes_it(tmp_path: Path) -> None:
    quick = ["bench", "conductor", "--quick", "--decisions", "10", "--index-blocks", "1000"]
    printed = run(*quick, "--json", folder=tmp_path)
    assert {"rows", "machine"} <= set(json.loads(printed.stdout))
    file = tmp_path / "rows.json"
    written = run(*quick, "--json", str(file), folder=tmp_path)
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == [
        row["name"] for row in json.loads(printed.stdout)["rows"]
    ]
    assert "decision p50" in written.stdout, "and the table is shown"


def test_lines_in_a_pipe_are_not_folded() -> None:
    """Without a terminal nobody knows a width, and a folded path or name cannot be searched for."""
    base = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    folder = "/tmp/a-state-folder-whose-name-is-long-but-not-absurd"
    done = subprocess.run(
        [sys.executable, "-m", "mooncache.cli", "config", "explain"],
        env={**base, "MOONCACHE_STATE_DIR": folder},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert any(len(line.rstrip()) > 80 for line in done.stdout.splitlines())
    assert folder in done.stdout


def test_version_has_a_stable_shape(tmp_path: Path) -> None:
    found = json.loads(run("version", "--json", folder=tmp_path).stdout)
    assert set(found) == {"mooncache", "python", "grpcio", "machine"}


@pytest.mark.parametrize(
    ("arguments", "code", "name", "words"),
    [
        (["get", "x"], 2, "CONFIG_INVALID", "mooncache up"),
        (["get"], 2, "INVALID_ARGUMENT", "KEY"),
        (["gett", "x"], 2, "INVALID_ARGUMENT", "get"),
        (["get", "x", "--mastre", "a:1"], 2, "INVALID_ARGUMENT", "--master"),
        (["get", "x", "--master", "nowhere"], 2, "INVALID_ARGUMENT", "host:port"),
        (["get", "x", "--timeout", "soon"], 2, "INVALID_ARGUMENT", "--timeout"),
        (["put", "x"], 2, "INVALID_ARGUMENT", "VALUE"),
        (["put", "x", "v", "--file", "f"], 2, "INVALID_ARGUMENT", "Give either a VALUE or --file"),
        (["put", "x", "--file", "/nowhere/f"], 2, "INVALID_ARGUMENT", "cannot be read"),
        (["up", "--capacity", "lots"], 2, "INVALID_ARGUMENT", "--capacity"),
        (["up", "--engine", "llama"], 2, "INVALID_ARGUMENT", "vllm, hf or none"),
        (["up", "--model", "/nowhere/model"], 2, "INVALID_ARGUMENT", "no folder"),
        (["up", "--model", "/"], 2, "INVALID_ARGUMENT", "config.json"),
        (["up", "--engine", "none", "--decode", "0"], 2, "INVALID_ARGUMENT", "decode"),
        (["up", "--engine", "none", "--prefill", "-1"], 2, "INVALID_ARGUMENT", "prefill"),
        (["up", "--timeout", "soon"], 2, "INVALID_ARGUMENT", "--timeout"),
        (["instance", "role", "decode-1", "cook"], 2, "INVALID_ARGUMENT", "prefill, decode or both"),
        (["instance", "drain", "decode-1"], 2, "CONFIG_INVALID", "mooncache up"),
        (["up", "--nodes", "0"], 2, "INVALID_ARGUMENT", "nodes"),
        (["up", "--nodes", "many"], 2, "INVALID_ARGUMENT", "nodes"),
        (["token"], 2, "CONFIG_INVALID", "cluster.token"),
        (["rm"], 2, "INVALID_ARGUMENT", "at least one"),
        (["pin", "x", "--ttl", "-1"], 2, "INVALID_ARGUMENT", "ttl"),
        (["ls", "--limit", "0"], 2, "INVALID_ARGUMENT", "--limit"),
    ],
)
def test_refusals(arguments: list[str], code: int, name: str, words: str, tmp_path: Path) -> None:
    human = run(*arguments, folder=tmp_path)
    assert human.returncode == code, human.stderr
    assert words in human.stderr
    assert "Traceback" not in human.stderr
    machine = run(*arguments, "--json", folder=tmp_path)
    assert machine.returncode == code
    error = json.loads(machine.stdout)["error"]
    assert set(error) == {"code", "name", "message", "retryable", "hint"}
    assert error["name"] == name


def test_an_unreachable_master_is_bounded(tmp_path: Path) -> None:
    make_token(tmp_path)
    done = run("status", "--master", "127.0.0.1:1", "--timeout", "500ms", "--json", folder=tmp_path)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["error"]["name"] == "MASTER_UNAVAILABLE"


def make_token(folder: Path) -> None:
    from mooncache.auth import create_cluster_token

    create_cluster_token(folder / "cluster.token")


def test_tokens(tmp_path: Path) -> None:
    make_token(tmp_path)
    cluster = run("token", folder=tmp_path).stdout.strip()
    assert cluster == (tmp_path / "cluster.token").read_text().strip()
    found: dict[str, Any] = json.loads(run("token", "--tenant", "team-a", "--json", folder=tmp_path).stdout)
    assert found["tenant"] == "team-a"
    assert found["admin"] is False
    assert found["token"].startswith("mct1.team-a.")
    control = run("token", "--control", folder=tmp_path).stdout.strip()
    assert re.fullmatch(r"mck1\.[0-9a-f]{64}", control)
    assert cluster.rpartition(".")[2] not in control
    of_tenant = json.loads(run("token", "--control", "--tenant", "team-a", "--json", folder=tmp_path).stdout)
    assert of_tenant["control_key"].startswith("mck1.team-a.")
    assert run("token", "--control", "--metrics", folder=tmp_path).returncode == 2
    wrong = run("token", "--tenant", "Team A", folder=tmp_path)
    assert wrong.returncode == 2
    assert "tenant name" in wrong.stderr


def test_config_explain_tells_where_a_value_came_from(tmp_path: Path) -> None:
    done = run("config", "explain", "--json", "--set-only", folder=tmp_path, MOONCACHE_MASTER_PORT="7800")
    rows = {row["name"]: row for row in json.loads(done.stdout)["settings"]}
    assert rows["master.port"]["value"] == 7800
    assert "MOONCACHE_MASTER_PORT" in rows["master.port"]["source"]
    wrong = run("config", "explain", folder=tmp_path, MOONCACHE_MASTER_PROT="7800")
    assert wrong.returncode == 2
    assert "MOONCACHE_MASTER_PORT" in wrong.stderr
    toml = run("config", "explain", "--toml", folder=tmp_path)
    assert "[master]" in toml.stdout


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m mooncache.cli config explain --json | head -1",
        shell=True,
        env={**os.environ, "MOONCACHE_STATE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith("{")
    assert "Traceback" not in done.stderr

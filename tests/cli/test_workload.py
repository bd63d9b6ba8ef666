"""What the commands over traces have in common: formats, limits, missing packages, exit codes of wrong arguments."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mooncache.cli.app import run
from mooncache.plan import workload
from mooncache.plan.core.spec import Workload


@pytest.fixture
def in_seconds(tmp_path: Path) -> str:
    """Forty conversations of three turns, stamped in seconds."""
    path = tmp_path / "seconds.jsonl"
    rows = [
        {
            "timestamp": round(turn + talk * 0.05, 3),
            "input_length": 512 * (turn + 1),
            "output_length": 10,
            "hash_ids": [talk * 10 + block for block in range(turn + 1)],
        }
        for turn in range(3)
        for talk in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: row["timestamp"])))
    return str(path)


COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "simulate": lambda path: ["simulate", "--trace", path],
    "plan": lambda path: ["plan", "--finalists", "0", "--trace", path],
    "trace stats": lambda path: ["trace", "stats", path],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_an_error_advises_can_be_done_there(
    command: str, in_seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = COMMANDS[command](in_seconds)
    assert run(words) != 0
    assert "--time-unit s" in " ".join(capsys.readouterr().err.split())
    assert run([*words, "--time-unit", "s"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert run([*words, "--time-unit", "s", "--block-tokens", "100"]) != 0
    assert "--block-tokens" in capsys.readouterr().err
    assert run([*words, "--time-unit", "s", "--block-tokens", "-1"]) == 2


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["simulate", "--generate", "5"], "numpy"),
        (["plan", "--rate", "2"], "numpy"),
        (["reproduce", "table1"], "numpy"),
        (["trace", "check", "any.jsonl"], "numpy"),
        (["trace", "stats", "any.jsonl"], "numpy"),
        (["trace", "generate", "any.jsonl"], "numpy"),
        (["bench", "replay"], "numpy"),
        (["simulate", "--generate", "5", "--html", "report.html"], "matplotlib"),
        (["plan", "--rate", "2", "--html", "plan.html"], "matplotlib"),
    ],
)
def test_a_missing_package_is_named_with_what_brings_it(
    words: list[str],
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    found = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == missing else found(name, *more)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mooncache.reporting.workload.find_spec", without)
    assert run(words) != 0
    reported = " ".join(capsys.readouterr().err.split())
    assert f"needs {missing}, which is not installed" in reported
    assert 'pip install "mooncache[simulate]"' in reported
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulate", "--generate", "5", "--speed", "1e-300"], "--speed"),
        (["simulate", "--generate", "5", "--speed", "nan"], "--speed"),
        (["simulate", "--generate", "5", "--memory-tokens", "-5"], "--memory-tokens"),
        (["simulate", "--generate", "5", "--memory-tokens", "9" * 20], "--memory-tokens"),
        (["simulate", "--generate", "5", "--decisions", "/nowhere/x"], "--decisions"),
        (["simulate", "--generate", "5", "--policy", "mooncash"], "did you mean mooncache?"),
        (["plan", "--rate", "2", "--out", "/proc/x"], "--out"),
        (["reproduce", "table2", "--trace", "EMPTY"], "no request in the file"),
        (["bench", "replay", "--trace", "EMPTY"], "no request in the file"),
        (["bench", "replay", "--requests", "0"], "at least 10 requests"),
        (["bench", "replay", "--endpoint", "http://127.0.0.1:1"], "lists no model"),
    ],
)
def test_wrong_arguments_are_told_before_the_work(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert run([str(empty) if word == "EMPTY" else word for word in words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_list_of_benchmarks_says_what_they_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    listed = capsys.readouterr().out
    for words in ("How long a decision takes", "what the simulator predicts", "What a gateway adds"):
        assert words in " ".join(listed.split())
    assert run(["bench", "replay", "--help"]) == 0
    assert "mooncache bench replay --trace" in capsys.readouterr().out, "its own help has examples"


def test_a_high_rate_makes_a_short_trace_not_a_huge_one() -> None:
    trace = workload.made(Workload(rate_per_s=5000.0, duration_s=3600.0, input_tokens_mean=600.0, reuse=0.0))
    assert len(trace) < 60_000
    assert len(trace) / trace.span_s == pytest.approx(5000.0, rel=0.01)

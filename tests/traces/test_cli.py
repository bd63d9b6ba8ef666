"""`mooncache trace`: exit codes, JSON, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncache.cli.app import run


def test_generate_check_stats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "made.jsonl.gz")
    assert (
        run(["trace", "generate", path, "--requests", "300", "--rate", "2", "--tenants", "3", "--json"]) == 0
    )
    made = json.loads(capsys.readouterr().out)
    assert made["requests"] == 300
    assert made["tenants"] == 3
    assert run(["trace", "stats", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == made
    assert run(["trace", "check", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 300
    assert run(["trace", "stats", path]) == 0
    assert "300 in" in capsys.readouterr().out
    assert run(["trace", "check", path]) == 0
    assert "300 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--kind", "single-turn", "--seconds", "60"],
        ["--kind", "tool-agent", "--requests", "50", "--tick", "0"],
        ["--input-mean", "2000", "--output-mean", "50", "--requests", "50", "--block-tokens", "16"],
    ],
)
def test_kinds_and_lengths(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "made.jsonl")
    assert run(["trace", "generate", path, *options, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["span_s"] < 60 or "--seconds" not in options
    assert run(["trace", "check", path, "--time-unit", "ms"]) == 0


def test_a_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0]}\n')
    assert run(["trace", "check", str(path)]) != 0
    assert "TRACE_INVALID (720)" in (text := " ".join(capsys.readouterr().err.split()))
    assert "line 1" in text and "600 needs 2" in text
    assert run(["trace", "stats", str(path), "--json"]) != 0
    assert json.loads(capsys.readouterr().out)["error"]["name"] == "TRACE_INVALID"
    assert run(["trace", "stats", str(tmp_path / "none.jsonl")]) != 0
    assert "cannot be read" in capsys.readouterr().err


def test_what_cannot_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (
        ["--rate", "-1"],
        ["--returning", "-1"],
        ["--seconds", "0.000001"],
        ["--output-mean", "nan"],
    ):
        assert run(["trace", "generate", str(tmp_path / "t.jsonl"), *options]) == 2, options
    assert run(["trace", "generate", str(tmp_path / "no" / "t.jsonl"), "--requests", "5"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--tick", "nan"], "--tick"), (["--kind", "single-turn", "--returning", "0.5"], "--returning")],
)
def test_options_that_mean_nothing_are_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["trace", "generate", str(tmp_path / "made.jsonl"), "--requests", "5", *options]) == 2
    assert said in capsys.readouterr().err

"""`mooncache simulate` as people call it: first minute, files, and mistakes that are told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncache.cli.app import run


def test_first_minute(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--generate", "60", "--prefill", "2", "--decode", "2"]) == 0
    text = capsys.readouterr().out
    assert "60 requests" in text
    assert "time to first token" in text, "words are not explained"
    assert "--html" in text, "nothing says what to try next"


def test_all_files_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {name: tmp_path / name for name in ("rows.json", "page.html", "log.jsonl")}
    arguments = [
        "simulate",
        "--generate",
        "50",
        "--policy",
        "mooncache",
        "random",
        "--json",
        str(names["rows.json"]),
    ]
    arguments += ["--html", str(names["page.html"]), "--decisions", str(names["log.jsonl"])]
    assert run(arguments) == 0
    document = json.loads(names["rows.json"].read_text())
    assert [summary["policy"] for summary in document["summaries"]] == ["mooncache", "random"]
    assert names["page.html"].read_text().startswith("<!doctype html>")
    lines = [json.loads(line) for line in names["log.jsonl"].read_text().splitlines()]
    assert {line["request"] for line in lines if line["policy"] == "random"} == set(range(50))
    first = lines[0]
    assert first["admitted"]
    assert first["prefill"].startswith("prefill-")
    assert first["expected"]["ttft_s"] > 0
    assert "page.html" in capsys.readouterr().out


def test_json_alone_is_json_and_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for _ in range(2):
        assert run(["simulate", "--generate", "40", "--seed", "7", "--json", "-"]) == 0
        document = json.loads(capsys.readouterr().out)
        for summary in document["summaries"]:
            del summary["wall_s"]
        found.append(document)
    assert found[0] == found[1]


def test_roles_may_follow_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "simulate",
        "--generate",
        "150",
        "--speed",
        "3",
        "--prefill",
        "1",
        "--decode",
        "4",
        "--json",
        "-",
    ]
    switches = []
    for more in ([], ["--roles"]):
        assert run([*arguments, "--admission", "none", *more]) == 0
        switches.append(json.loads(capsys.readouterr().out)["summaries"][0]["role_switches"])
    assert switches[0] == 0
    assert switches[1] > 0


def test_example_is_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--example"]) == 0
    file = tmp_path / "cluster.toml"
    file.write_text(capsys.readouterr().out)
    assert run(["simulate", "--generate", "20", "--cluster", str(file), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["about"]["instances"] == {"prefill": 8, "decode": 8}


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ([], "--trace FILE, or --generate"),
        (["--generate", "0"], "1 to"),
        (["--generate", "10", "--policy", "algoritm1"], "did you mean algorithm1"),
        (["--generate", "10", "--speed", "0"], "--speed"),
        (["--generate", "10", "--speed", "nan"], "--speed"),
        (["--generate", "10", "--decode", "0"], "no group decodes"),
        (["--generate", "10", "--prefill", "-1"], "--prefill"),
        (["--generate", "10", "--ttft", "soon"], "--ttft"),
        (["--generate", "10", "--admission", "never"], "--admission"),
        (["--generate", "10", "--first", "0"], "--first"),
        (["--generate", "10", "--html", "/nowhere/page.html"], "cannot be written"),
        (["--generate", "10", "--decisions", "/nowhere/log.jsonl"], "cannot be written"),
        (["--generate", "10", "--json", "/nowhere/rows.json"], "cannot be written"),
        (["--generate", "10", "--html", "."], "cannot be written"),
        (["--generate", "10", "--prefill", "100000000"], "looks like"),
        (["--trace", "/nowhere/trace.jsonl"], "trace.jsonl"),
    ],
)
def test_mistakes_are_one_line_with_a_code(
    arguments: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert reported in " ".join(error.split())
    assert "Traceback" not in error
    assert "(" in error.split(":")[0], "no code"


def test_a_broken_trace_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    good = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(good) + "\n" + json.dumps({**good, "input_length": -5}) + "\n")
    assert run(["simulate", "--trace", str(trace)]) == 2
    error = capsys.readouterr().err
    assert "TRACE_INVALID (720)" in error
    assert ":2" in error or "line 2" in error


def test_what_cannot_be_written_is_said_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mooncache.simulate.simulate", lambda *_, **__: pytest.fail("it was simulated"))
    assert run(["simulate", "--generate", "10", "--html", "/nowhere/page.html"]) == 2
    assert run(["reproduce", "table2", "--markdown", "/nowhere/page.md"]) == 2
    assert "there is no folder /nowhere" in " ".join(capsys.readouterr().err.split())


def test_a_stamp_of_another_decade_does_not_run_forever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(row) + "\n" + json.dumps({**row, "timestamp": 1_700_000_000_000}) + "\n")
    assert run(["simulate", "--trace", str(trace), "--prefill", "1", "--decode", "1"]) == 0
    assert "2 requests" in capsys.readouterr().out


@pytest.mark.parametrize("group", [[], ["trace"]])
def test_lists_of_commands_say_what_each_does(group: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*group, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        ["Find the cheapest", "Measure the published", "Run requests through"]
        if not group
        else ["Say whether a file", "Describe a trace", "Generate a trace"]
    ):
        assert words in text


def test_the_cluster_takes_blocks_of_the_traces_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(tmp_path / "trace.jsonl")
    assert run(["trace", "generate", trace, "--requests", "20", "--block-tokens", "64"]) == 0
    assert run(["simulate", "--trace", trace, "--json", "-"]) == 0
    assert "SIMULATION_INVALID" not in capsys.readouterr().out

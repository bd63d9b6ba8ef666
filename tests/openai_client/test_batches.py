"""A batch over real engines, by the unmodified client and by the command; its answers are those of online requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai import OpenAI

from mooncache.cli.app import run
from mooncache.cluster.embedded import EmbeddedCluster
from tests.conditions import wait_until

pytestmark = pytest.mark.timeout(300)
SHARED = "All of them begin with the same long instruction, which is computed once. " * 8


def test_a_batch_gives_the_answers_of_online_requests_and_finds_what_they_share(
    client: OpenAI, model: str
) -> None:
    bodies = {
        f"r{number}": {
            "model": model,
            "messages": [{"role": "user", "content": f"{SHARED} Question {number}"}],
            "max_tokens": 6,
            "temperature": 0,
            "logprobs": number == 0,
        }
        for number in range(6)
    }
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})
        for name, body in bodies.items()
    ]
    file = client.files.create(file=("b.jsonl", "\n".join([*lines, "broken"]).encode()), purpose="batch")
    begun = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    wait_until(lambda: client.batches.retrieve(begun.id).status == "completed", 120)
    batch = client.batches.retrieve(begun.id)
    assert batch.request_counts is not None and batch.request_counts.completed == 6
    assert batch.request_counts.failed == 1 and batch.error_file_id is not None
    assert batch.usage is not None and batch.usage.input_tokens_details.cached_tokens > 0
    assert batch.output_file_id is not None
    rows = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {row["custom_id"] for row in rows} == set(bodies)
    for row in rows:
        online = client.chat.completions.create(**bodies[row["custom_id"]]).to_dict()
        offline = row["response"]["body"]
        assert offline["choices"][0]["message"]["content"] == online["choices"][0]["message"]["content"]
        assert offline["choices"][0]["finish_reason"] == online["choices"][0]["finish_reason"]
        tokens = (offline["usage"]["prompt_tokens"], offline["usage"]["completion_tokens"])
        assert tokens == (online["usage"]["prompt_tokens"], online["usage"]["completion_tokens"])


def test_the_command_submits_watches_and_fetches(
    cluster: EmbeddedCluster, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\nbroken\n")
    here = ["--state-dir", str(cluster.state_dir), "--tenant", "cli"]

    def said(*arguments: str) -> str:
        capsys.readouterr()
        assert run(["batch", *arguments, *here]) == 0
        return capsys.readouterr().out

    name = said("submit", str(tmp_path / "in.jsonl"), "--endpoint", "/v1/completions").strip()
    wait_until(lambda: json.loads(said("status", name, "--json"))["status"] == "completed", 120)
    assert "1 of 2 requests are answered, 1 failed" in said("status", name)
    assert "Line 2: It is no JSON" in said("status", name)
    assert name in said("ls")
    out = tmp_path / "out.jsonl"
    said("fetch", name, "--output", str(out))
    assert json.loads(out.read_text())["custom_id"] == "a"
    assert json.loads(said("fetch", name, "--errors"))["error"]["code"] == "invalid_json_line"
    capsys.readouterr()
    assert run(["batch", "cancel", name, *here]) == 2
    assert "Cannot cancel" in capsys.readouterr().err
    assert run(["batch", "status", "batch_none", *here]) != 0
    assert run(["batch", "ls", "--gateway", "http://127.0.0.1:9", *here]) == 3

"""The whole system on one machine with the small engine: works, tells what it does, survives its engines."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from mooncache.cli.app import run
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.processes import processes_of_run
from mooncache.cluster.supervisor import PartNews, PartStage
from mooncache.errors import Cancelled, Internal
from mooncache.reporting import output
from tests.cluster.conftest import ask, serving_settings

pytestmark = pytest.mark.timeout(300)
TEXT = "The moon is a harsh mistress, said somebody once. " * 20


def test_a_request_and_its_second_turn(serving: EmbeddedCluster) -> None:
    first = ask(serving, TEXT)
    assert first["choices"][0]["message"]["content"]
    again = ask(serving, TEXT + "And then?")
    details = again["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 100, again["usage"]
    assert ask(serving, TEXT)["choices"] == first["choices"]


def test_what_is_known_of_the_engines(serving: EmbeddedCluster) -> None:
    rows = {row["instance_id"]: row for row in serving.describe_instances()}
    assert {name: row["role"] for name, row in rows.items()} == {"prefill-1": "prefill", "decode-1": "decode"}
    for row in rows.values():
        assert row["pool"], "it shares what it computes"
        assert Path(f"/proc/{row['engine_pid']}").exists()
        assert row["url"].startswith("http://127.0.0.1:")


def test_status_shows_gateways_and_engines_to_whoever_names_the_conductor(
    serving: EmbeddedCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on another host: a folder of its own with nothing but the token in it."""
    monkeypatch.setattr(output.console, "width", 200)
    shutil.copy(serving.token_path, tmp_path / "cluster.token")
    target = serving.layout.conductor_target
    where = ["--state-dir", str(tmp_path), "--conductor", target, "--master", serving.layout.master_target]
    assert run(["status", "--json", *where]) == 0
    found = json.loads(capsys.readouterr().out)["serving"]
    assert [gateway["url"] for gateway in found["conductor"]["gateways"]] == [serving.layout.gateway_url]
    assert {row["instance_id"] for row in found["instances"]} == {"prefill-1", "decode-1"}
    assert run(["status", *where]) == 0
    address = serving.layout.gateway_url.partition("://")[2]
    assert re.search(rf"gateway .*{re.escape(address)} ", capsys.readouterr().out), "a row of the list"


def test_the_demo_key_is_private(serving: EmbeddedCluster) -> None:
    assert serving.demo_key_path.stat().st_mode & 0o777 == 0o600
    assert serving.demo_key_path.read_text().startswith("mct1.demo.")


def test_a_killed_engine_is_started_again(serving: EmbeddedCluster) -> None:
    rows = {row["instance_id"]: row for row in serving.describe_instances()}
    news: list[str] = []
    again = threading.Event()
    deadline_s = time.monotonic() + 120

    def tell(name: str, what: PartNews) -> None:
        news.append(f"{name}: {what.text}")
        if name == "prefill-1" and what.stage is PartStage.READY and len(news) > 1:
            again.set()

    os.kill(rows["prefill-1"]["engine_pid"], signal.SIGKILL)
    serving.supervise(tell, lambda: again.is_set() or time.monotonic() > deadline_s)
    assert all("ended with" not in line for line in news), "the worker lives; only its engine ended"
    assert again.is_set(), news
    after = {row["instance_id"]: row for row in serving.describe_instances()}
    assert after["prefill-1"]["engine_pid"] != rows["prefill-1"]["engine_pid"]
    assert ask(serving, "after the crash")["choices"][0]["message"]["content"] is not None


def test_one_engine_for_both(tmp_path: Path) -> None:
    cluster = EmbeddedCluster(serving_settings(tmp_path, prefill=0))
    cluster.start(180)
    try:
        assert [row["role"] for row in cluster.describe_instances()] == ["both"]
        ask(cluster, TEXT)
        assert ask(cluster, TEXT)["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        news: list[tuple[str, str]] = []
        cluster.kill("gateway")
        deadline_s = time.monotonic() + 60
        cluster.supervise(
            lambda name, what: news.append((name, what.text)),
            lambda: ("gateway", "answers again") in news or time.monotonic() > deadline_s,
        )
        assert ("gateway", "started again") in news
        cluster.wait_ready(60)
        assert ask(cluster, TEXT)["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    finally:
        cluster.stop()
    assert not processes_of_run(cluster.run_id)


def test_a_start_that_is_called_off_leaves_nothing(tmp_path: Path) -> None:
    cluster = EmbeddedCluster(serving_settings(tmp_path))
    said: list[str] = []
    with pytest.raises(Cancelled):
        cluster.start(120, lambda name, what: said.append(name), lambda: len(said) > len(cluster.parts))
    assert not processes_of_run(cluster.run_id)
    assert not (tmp_path / "cluster.json").exists()


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """The worker tries again and then gives up; `up` names it with its last lines."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "nothing that exists"}')
    cluster = EmbeddedCluster(serving_settings(tmp_path / "state", model=str(model), prefill=0))
    with pytest.raises(Internal, match="decode-1"):
        cluster.start(120)
    assert not processes_of_run(cluster.run_id)

"""Roles of real engines follow a load that turns from prompts to answers, while instances leave and join."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mooncache.cli.app import run
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.processes import processes_of_run
from tests.cluster.conftest import INLINE_TOKENS_MAX, ask, serving_settings
from tests.cluster.one_engine import alone
from tests.conditions import wait_until

pytestmark = pytest.mark.timeout(300)

PLACES = 2  # of an engine's batch: few, so that few answers are more than one engine can take
CALLERS = 8
PROMPTS = {f"{name} and the moon is a harsh mistress. " * 40: 4 for name in ("Mike", "Wyoh")}
ANSWERS = {f"Tell {name} a long story.": 32 for name in ("Prof", "Stu", "Greg")}


class Load:
    """Callers that ask one question after the other until they are stopped, and what came back."""

    def __init__(self, cluster: EmbeddedCluster, expected: dict[str, str]) -> None:
        self._cluster, self._expected = cluster, expected
        self.asked = dict(PROMPTS)  # text -> tokens
        self.answered = self.cached_tokens = 0
        self.wrong: list[str] = []
        self._lock, self._over = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(at,)) for at in range(CALLERS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)

    def _call(self, at: int) -> None:
        while not self._over.is_set():
            texts = list(self.asked.items())
            text, tokens = texts[at % len(texts)]
            at += 1
            try:
                answer = ask(self._cluster, text, max_tokens=tokens)
                found = str(answer["choices"][0]["message"]["content"])
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            except (OSError, KeyError, ValueError) as error:
                found, cached = repr(error), 0
            with self._lock:
                self.answered += 1
                self.cached_tokens += cached
                if found != self._expected[text]:
                    self.wrong.append(found)

    def goes_on(self) -> None:
        """Wait until each caller could have got another answer."""
        until = self.answered + 2 * CALLERS
        wait_until(lambda: self.answered >= until or self.wrong, "more answers")
        assert not self.wrong, self.wrong[:3]


def test_roles_follow_the_load_while_instances_come_and_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = (
        ("OMP_NUM_THREADS", "1"),
        ("MOONCACHE_HF_BATCH_MAX", str(PLACES)),
        ("MOONCACHE_CONDUCTOR_INLINE_TOKENS_MAX", str(INLINE_TOKENS_MAX)),
        ("MOONCACHE_CONDUCTOR_ADMISSION_ENABLED", "false"),  # a slow machine would refuse what waits
    )
    cluster = EmbeddedCluster(serving_settings(tmp_path, prefill=2, decode=1, extra_env=env))
    where = ["--state-dir", str(tmp_path)]

    def instances() -> dict[str, dict[str, Any]]:
        capsys.readouterr()
        assert run(["status", "--json", *where]) == 0
        rows = json.loads(capsys.readouterr().out)["serving"]["instances"]
        return {row["instance_id"]: row for row in rows}

    def wait_for(condition: Callable[[dict[str, dict[str, Any]]], Any], what: str) -> Any:
        return wait_until(lambda: condition(instances()), lambda: f"{what}: {instances()}", every_s=0.2)

    try:
        cluster.start(180)
        # Of equally idle ones the first would change: an operator says that it stays.
        assert run(["instance", "role", "prefill-1", "prefill", *where]) == 0
        engines = {row["instance_id"]: row["engine_pid"] for row in cluster.describe_instances()}
        expected = {
            text: alone(cluster, text, tokens) for text, tokens in (*PROMPTS.items(), *ANSWERS.items())
        }
        with Load(cluster, expected) as load:
            load.goes_on()
            load.asked = dict(ANSWERS)
            wait_for(
                lambda rows: rows["prefill-2"]["role"] == "decode", "an instance that helps with the answers"
            )
            load.goes_on()
            # The one that generated from the beginning leaves, and comes back.
            leaver = "decode-1"
            assert run(["instance", "drain", leaver, *where]) == 0
            wait_for(lambda rows: rows[leaver]["assigned"] == 0, "the end of what it had")
            cluster.kill(leaver, signal.SIGTERM)
            wait_for(lambda rows: leaver not in rows, "its end")
            load.goes_on()
            cluster.restart(leaver)
            wait_for(lambda rows: leaver in rows and rows[leaver]["state"] == "ready", "its return")
            load.goes_on()
        assert not load.wrong, load.wrong[:3]
        assert load.cached_tokens > 0
        rows = {row["instance_id"]: row for row in cluster.describe_instances()}
        assert rows["prefill-1"]["role"] == "prefill", "an operator's choice was overruled"
        assert rows["prefill-2"]["role"] == "decode"
        for name in set(rows) - {leaver}:
            assert rows[name]["engine_pid"] == engines[name], "a role needs no restart"
    finally:
        killed = cluster.stop()
    assert not killed, f"did not end by themselves: {killed}"
    assert not processes_of_run(cluster.run_id)

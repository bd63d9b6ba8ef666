"""`mooncache token rotate` and `withdraw` on a serving cluster: gateway, conductor, workers, engines, pool, under load.

Every answer is compared with that of an empty cache, and blocks are read all the time. Engines take the key that they
were started with, so they are started again between the two commands, as docs/operations.md says.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import mooncache
from mooncache import auth
from mooncache._version import __version__
from mooncache.bench.survival.upgrade import MODEL, RepeatedQuestions, WatchedBlocks, supervised
from mooncache.cli.common import Where
from mooncache.cli.core.upgrade_check import RunningProcess
from mooncache.cli.rolling import Roller
from mooncache.cli.snapshot import ClusterPoller
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.cluster.processes import ServiceKind
from mooncache.cluster.settings import missing_modules
from tests.cli.test_token_rotation import command
from tests.hf_engine.conftest import model_folder

__all__ = ["model_folder"]  # a fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        bool(missing_modules("hf")), reason="needs the small engine: pip install 'mooncache[hf]'"
    ),
]
CLIENTS = 3
ENGINES = ("decode-1", "decode-2")
STEP_S = 300.0


class QuestionsInThread:
    """Clients that ask until the block ends; `load` says what they saw."""

    def __init__(self, load: RepeatedQuestions) -> None:
        self.load = load
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        await asyncio.gather(*(self.load.client(number) for number in range(CLIENTS)))

    def __enter__(self) -> QuestionsInThread:
        asyncio.run(self.load.learn())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.load.stopped = True
        self._thread.join()

    def go_on(self) -> None:
        """Wait until each client was answered to requests that began from now on, and nothing had failed."""
        asyncio.run(self.load.answered(4 * CLIENTS))
        assert self.load.failed == []


async def restart_engines(cluster: EmbeddedCluster) -> None:
    """One worker after the other: no new requests, the end of those it has, its next process."""
    where = Where(state_dir=cluster.state_dir, timeout="60s")
    poller = ClusterPoller(where)
    try:
        roller = Roller(poller, __version__, STEP_S)
        for name in ENGINES:
            process = RunningProcess(name, ServiceKind.WORKER, __version__, model=MODEL, generates=True)
            await roller.roll(process)
    finally:
        await poller.close()


def status_of(url: str, path: str, key: str) -> int:
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_serving_cluster_goes_over_to_a_new_token(tmp_path: Path, model_folder: Path) -> None:
    with supervised(tmp_path / "state", model_folder, prefill=0) as cluster:
        gateway = cluster.layout.gateway_url
        old = auth.load_cluster_token(cluster.token_path)
        load = RepeatedQuestions(gateway, cluster.demo_key_path.read_text().strip())
        stay = {name: part.pid for name, part in cluster.parts.items() if name not in ENGINES}
        with mooncache.connect(**cluster.client_settings(), timeout_s=60.0) as client:
            blocks = WatchedBlocks(client)
            try:
                with QuestionsInThread(load) as questions:
                    questions.go_on()
                    command(cluster, "rotate")
                    new = auth.load_cluster_token(cluster.token_path)
                    questions.go_on()  # clients show the old key, and engines take the old one
                    rows = {row["name"]: row for row in command(cluster, "status")["processes"]}
                    assert {rows[name]["engine_token"] for name in ENGINES} == {old.fingerprint}
                    still = command(cluster, "withdraw", "--timeout", "1s", expect=2)
                    assert "its engine was started with" in json.dumps(still)

                    load.key = auth.tenant_token(new, "demo").text
                    asyncio.run(restart_engines(cluster))
                    questions.go_on()
                    command(cluster, "withdraw", "--timeout", "120s")
                    assert auth.load_token_set(cluster.token_path).tokens == (new,)
                    questions.go_on()
                    ratio = asyncio.run(load.hit_ratio(4 * CLIENTS))
                assert load.failed == []
                assert ratio > 0.5, "salts stay, so what was computed before is still found"
            finally:
                blocks.end()
            assert blocks.wrong == [] and blocks.right > 0
            assert blocks.lost() == []
        engines = [row["url"] for row in cluster.describe_instances()]
        assert len(engines) == len(ENGINES)
        for token, expected in ((old, 401), (new, 200)):
            assert status_of(gateway, "/v1/models", auth.tenant_token(token, "demo").text) == expected
            assert [status_of(url, "/v1/models", auth.engine_key(token)) for url in engines] == [expected] * 2
        assert {name: cluster.parts[name].pid for name in stay} == stay, "nothing else was started again"

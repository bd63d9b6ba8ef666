"""`mooncache token rotate` and `withdraw` on real processes under load: no failed request, no lost block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import mooncache
from mooncache import auth
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import MooncacheError
from tests.client.conftest import make_cluster
from tests.conditions import WAIT_S, wait_until

pytestmark = pytest.mark.slow
REFUSED = {"UNAUTHENTICATED", "UNKNOWN_NODE"}


class Load:
    """A client that puts and gets without a pause. `failures`: every call that did not bring what it should."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.count = 0
        self.failures: list[str] = []
        self._settings = settings
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        with mooncache.connect(**self._settings, timeout_s=60) as pool:
            while not self._end.is_set():
                name, value = f"block-{id(self)}-{self.count % 64}", os.urandom(4096)
                try:
                    pool.remove(name)
                    if not pool.put(name, value) or pool.get(name) != value:
                        self.failures.append(f"{name} is not what was put")
                except MooncacheError as error:
                    self.failures.append(f"{error.name}: {error.message}")
                self.count += 1

    def goes_on(self) -> None:
        """Wait until calls were made that began from now on."""
        until = self.count + 20
        wait_until(lambda: self.count >= until or not self._thread.is_alive(), lambda: str(self.failures))


def command(cluster: EmbeddedCluster, *words: str, expect: int = 0) -> dict[str, Any]:
    limit = () if "--timeout" in words else ("--timeout", "60s")
    done = subprocess.run(
        [sys.executable, "-m", "mooncache.cli", "token", *words, "--json", *limit],
        env={**os.environ, "MOONCACHE_STATE_DIR": str(cluster.state_dir)},
        capture_output=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return dict(json.loads(done.stdout or done.stderr))


def outcome(pool: mooncache.Client) -> str:
    try:
        pool.ping(0)
    except MooncacheError as error:
        return error.name
    return ""


def test_a_token_is_replaced_under_load(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path)
    cluster.start()
    pids = {name: part.pid for name, part in cluster.parts.items()}
    old = auth.load_cluster_token(cluster.token_path)
    fixed = {name: value for name, value in cluster.client_settings().items() if name != "token_file"}
    tenant_old = auth.tenant_token(old, "team-a").text
    try:
        with (
            mooncache.connect(**cluster.client_settings()) as pool,
            mooncache.connect(**fixed, token=tenant_old, shm=False) as tenant,
            Load(cluster.client_settings()) as follows,
            Load({**cluster.client_settings(), "shm": False}) as follows_by_tcp,
        ):
            assert pool.put("kept", b"value")
            assert tenant.put("theirs", b"another")
            done = command(cluster, "rotate")
            new = auth.load_cluster_token(cluster.token_path)
            assert done["accepted"] == [new.fingerprint, old.fingerprint]
            for load in (follows, follows_by_tcp):
                load.goes_on()
            rows = command(cluster, "status")["processes"]
            assert {row["kind"] for row in rows} == {"master", "store node"}
            assert {row["signs"] for row in rows} == {new.fingerprint}
            assert tenant.get("theirs") == b"another", "who holds the old one only goes on"

            still = command(cluster, "withdraw", "--timeout", "1s", expect=2)
            assert old.fingerprint in json.dumps(still), "a client uses it"
            tenant.close()
            command(cluster, "withdraw")
            assert auth.load_token_set(cluster.token_path).tokens == (new,)
            for load in (follows, follows_by_tcp):
                load.goes_on()
                assert load.failures == []
            assert pool.get("kept") == b"value"
        for text in (old.text, tenant_old):
            with pytest.raises(MooncacheError) as caught:
                mooncache.connect(**fixed, token=text, connect_timeout_s=WAIT_S)
            assert caught.value.name == "UNAUTHENTICATED"
        with mooncache.connect(**fixed, token=auth.tenant_token(new, "team-a").text) as tenant:
            assert tenant.get("theirs") == b"another"
        assert {name: part.pid for name, part in cluster.parts.items()} == pids, "nothing was started again"
    finally:
        cluster.stop()


def test_a_client_with_the_withdrawn_token_is_refused_by_force(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path, nodes=1)
    cluster.start()
    old = auth.load_cluster_token(cluster.token_path)
    fixed = {name: value for name, value in cluster.client_settings().items() if name != "token_file"}
    try:
        with mooncache.connect(**fixed, token=old.text, timeout_s=30) as pool:
            assert pool.put("kept", b"value")
            command(cluster, "rotate")
            assert pool.get("kept") == b"value"
            command(cluster, "withdraw", "--force")
            wait_until(lambda: outcome(pool) in REFUSED, lambda: outcome(pool))
        log = cluster.parts["node-1"].log_path.read_text()
        assert "auth.tokens_changed" in log
        assert old.key.hex() not in log
    finally:
        cluster.stop()


def test_one_token_cannot_be_withdrawn(tmp_path: Path) -> None:
    auth.create_cluster_token(tmp_path / "cluster.token")
    done = subprocess.run(
        [sys.executable, "-m", "mooncache.cli", "token", "withdraw"],
        env={**os.environ, "MOONCACHE_STATE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "token rotate" in done.stderr

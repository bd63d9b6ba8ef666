"""`mooncache status` and `mooncache doctor` from a machine that runs nothing of the cluster: every process is there."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mooncache._version import __version__
from mooncache.cli.common import Where
from mooncache.cli.snapshot import ClusterPoller, ClusterSnapshot
from mooncache.client.host import host_id, host_name
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.joining.core.settings import cluster_toml
from mooncache.cluster.ports import PortPicker
from mooncache.cluster.processes import Part, ServiceKind, stop_all
from tests.conditions import wait_until

pytestmark = pytest.mark.timeout(900)
START_S = 300.0
CHANGE_S = 200.0


@dataclass
class Site:
    """A pool of `up`, two conductors, two gateways (one says that it is on another host), a worker; and a state folder
    that was only given the token and the addresses, as `mooncache join` writes them."""

    pool: EmbeddedCluster
    parts: dict[str, Part]
    elsewhere: Path

    def run(self, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[bytes]:
        base = {key: value for key, value in os.environ.items() if not key.startswith("MOONCACHE_")}
        return subprocess.run(
            [sys.executable, "-m", "mooncache.cli", *arguments],
            env={**base, "MOONCACHE_STATE_DIR": str(folder or self.elsewhere), "COLUMNS": "240"},
            capture_output=True,
            timeout=START_S,
            check=False,
        )

    def status(self, folder: Path | None = None) -> dict[str, Any]:
        done = self.run("status", "--json", folder=folder)
        assert done.stdout, done.stderr
        return dict(json.loads(done.stdout))

    def states(self) -> dict[str, str]:
        """The state of each process by its kind and port, as `mooncache status` gets it; none without a conductor."""

        async def look() -> ClusterSnapshot:
            poller = ClusterPoller(Where(state_dir=self.elsewhere))
            try:
                return await poller.poll(with_metrics=False)
            finally:
                await poller.close()

        rows = asyncio.run(look()).members or []
        return {f"{row['kind']} {port_of(row)}": row["state"] for row in rows}

    def becomes(self, name: str, *states: str) -> list[str]:
        """Wait for one of the states; returns those that were seen on the way."""
        part = self.parts[name]
        key, seen = f"{part.service.value.replace('_', ' ')} {part.port}", [""]

        def look() -> bool:
            state = self.states().get(key, "")
            if state != seen[-1]:
                seen.append(state)
            return state in states

        wait_until(look, lambda: f"{name} is {states}: {seen}", CHANGE_S, every_s=0.5)
        return seen[1:]


def port_of(row: dict[str, Any]) -> str:
    return str(row["address"].rpartition(":")[2])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    settings = ClusterSettings(state_dir=folder / "pool", nodes=1, capacity_bytes=32 << 20, port=0)
    pool = EmbeddedCluster(settings)
    pool.start(START_S)
    ports = PortPicker("127.0.0.1")
    conductors = [ports.any() for _ in range(2)]
    target = ",".join(f"127.0.0.1:{port}" for port in conductors)
    common = {
        "MOONCACHE_CLUSTER_STATE_DIR": str(pool.state_dir),
        "MOONCACHE_CLUSTER_MASTER_TARGETS": pool.master_target,
        "MOONCACHE_CLUSTER_CONDUCTOR_TARGET": target,
        "MOONCACHE_CONDUCTOR_TAKEOVER_S": "10",  # a busy machine is late
    }

    def part(name: str, service: ServiceKind, port: int, **env: str) -> Part:
        own = {f"MOONCACHE_{service}_PORT".upper(): str(port)}
        log = folder / "logs" / f"{name}.log"
        return Part(name, service, {**common, **own, **env}, log, f"127.0.0.1:{port}")

    parts = [
        *(part(f"c{n}", ServiceKind.CONDUCTOR, port) for n, port in enumerate(conductors, 1)),
        part("g1", ServiceKind.GATEWAY, ports.any()),
        part("g2", ServiceKind.GATEWAY, ports.any(), MOONCACHE_CLIENT_HOST_ID="another-host"),
        part(
            "w1",
            ServiceKind.WORKER,
            ports.any(),
            MOONCACHE_WORKER_INSTANCE_ID="decode-1",
            MOONCACHE_WORKER_ENGINE="hf",
            MOONCACHE_WORKER_ATTACH_URL="http://127.0.0.1:9",
        ),
    ]
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    shutil.copy(pool.token_path, elsewhere / "cluster.token")
    given = {"cluster.master_targets": [pool.master_target], "cluster.conductor_target": target}
    (elsewhere / "cluster.toml").write_text(cluster_toml("mooncache join", given))
    try:
        for each in parts:
            each.start()
        yield Site(pool, {each.name: each for each in parts}, elsewhere)
    finally:
        stop_all(parts, 20.0)
        ports.close()
        pool.stop()


def test_every_process_is_listed_from_a_machine_that_runs_none(site: Site) -> None:
    wanted = {
        "conductor": 2,
        "gateway": 2,
        "master": 1,
        "store node": 1,
        "worker": 1,
    }

    def listed() -> dict[str, int]:
        rows = site.status()["members"]
        return {kind: sum(row["kind"] == kind for row in rows) for kind in wanted}

    wait_until(lambda: listed() == wanted, lambda: f"all of them: {listed()}", START_S, every_s=1.0)
    for name in ("g1", "g2"):
        site.becomes(name, "ready")
    document = site.status()
    rows = document["members"]
    assert document["members_error"] == ""
    assert sorted(row["state"] for row in rows if row["kind"] == "conductor") == ["leader", "standby"]
    assert {row["software_version"] for row in rows} == {__version__}
    assert all(row["address"] and row["started_s"] and row["pid"] for row in rows), rows
    assert {row["host_name"] for row in rows} == {host_name()}
    hosts = {row["host_id"] for row in rows}
    assert hosts == {host_id(), "another-host"}
    assert all(row["here"] is None for row in rows), "no `mooncache up` of this folder started them"
    text = site.run("status").stdout.decode()
    assert "(here)" in text and "(anothe)" in text and "gateway" in text


def test_where_up_started_them_the_supervisors_facts_are_beside_them(site: Site) -> None:
    rows = {row["kind"]: row for row in site.status(site.pool.state_dir)["members"]}
    assert rows["store node"]["here"] == {
        "part": "node-1",
        "pid": site.pool.parts["node-1"].pid,
        "state": "ready",
        "restarts": 0,
    }
    assert rows["master"]["here"]["part"] == "master"


def test_the_doctor_sees_versions_and_clocks_of_all(site: Site) -> None:
    done = site.run("doctor", "--json", "--timeout", "60s")
    checks = {(one["check"], one["subject"]): one for one in json.loads(done.stdout)["checks"]}
    assert checks["processes", "cluster"]["why"].endswith("are heard of, on 2 hosts")
    assert checks["versions", "cluster"]["status"] == "pass"
    assert checks["clock", f"{host_name()} (anothe)"]["status"] == "pass", "a host without a store node"


def test_a_killed_one_is_silent_and_one_that_ends_has_stopped(site: Site) -> None:
    site.becomes("g1", "ready")
    site.becomes("g2", "ready")
    site.parts["g1"].send(signal.SIGKILL)
    site.parts["g1"].wait(10.0)
    assert site.becomes("g1", "silent") == ["ready", "silent"]
    assert "last heard of" in site.run("status").stdout.decode()
    site.parts["g2"].send(signal.SIGTERM)
    assert "silent" not in site.becomes("g2", "stopped")
    site.parts["g1"].start()
    site.becomes("g1", "ready")


@pytest.mark.deep
def test_a_silent_one_is_gone_after_a_minute(site: Site) -> None:
    """tests/conductor/test_members.py says the same by a clock that does not wait."""
    site.becomes("g1", "ready")
    site.parts["g1"].send(signal.SIGKILL)
    site.parts["g1"].wait(10.0)
    assert site.becomes("g1", "gone") == ["ready", "silent", "gone"]
    site.parts["g1"].start()
    site.becomes("g1", "ready")


def test_a_new_leader_lists_them_all_and_misses_the_former(site: Site) -> None:
    site.becomes("g1", "ready")
    before = site.states()
    leader = next(
        part
        for part in site.parts.values()
        if before.get(f"conductor {part.port}") == "leader" and part.service == ServiceKind.CONDUCTOR
    )
    leader.send(signal.SIGKILL)
    leader.wait(10.0)
    other = next(
        name
        for name, part in site.parts.items()
        if part.service == ServiceKind.CONDUCTOR and part.name != leader.name
    )
    site.becomes(other, "leader")
    assert set(site.states()) == set(before)
    site.becomes(leader.name, "silent", "gone")
    leader.start()
    site.becomes(leader.name, "standby")


def test_without_a_conductor_what_the_master_knows_and_a_clear_sentence(site: Site) -> None:
    for name in ("c1", "c2"):
        site.parts[name].send(signal.SIGKILL)
        site.parts[name].wait(10.0)
    document = site.status()
    assert {row["kind"] for row in document["members"]} == {"master", "store node"}
    assert document["members_error"].startswith("gateways, conductors and workers are not listed: ")
    for name in ("c1", "c2"):
        site.parts[name].start()
    site.becomes("g1", "ready")

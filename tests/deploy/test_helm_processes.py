"""What the chart renders, against real processes: probe paths, the container that copies secrets, the hook that drains.

The environment is that of the rendered containers; only addresses, folders and the size change, because the test has
one host.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mooncache import Client
from mooncache.auth import create_cluster_token, load_cluster_token, parse_token
from mooncache.errors import ConfigInvalid
from tests.conditions import wait_until
from tests.deploy.chart import (
    VALUE_SETS,
    Object,
    component,
    container,
    environment,
    of_kind,
    pod,
    rendered,
    workloads,
)
from tests.ports import own_port

POOL = VALUE_SETS[0].with_name("pool_only.yaml")
TLS = VALUE_SETS[0].with_name("keys_and_extras.yaml")
CAPACITY = "32MiB"


class Part:
    """A rendered container, run as a process on this host."""

    def __init__(
        self, name: str, folder: Path, objects: tuple[Object, ...] | None = None, **changes: str
    ) -> None:
        objects = rendered(POOL) if objects is None else objects
        (workload,) = (one for one in workloads(objects) if component(one) == name)
        self.container = container(workload)
        self.probe_port = own_port()
        self.state_dir = folder
        upper = f"MOONCACHE_{name.upper()}_"
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("MOONCACHE_")},
            **environment(self.container),
            "MOONCACHE_CLUSTER_STATE_DIR": str(folder),
            "MOONCACHE_CLUSTER_TOKEN_FILE": str(folder.parent / "cluster.token"),
            "MOONCACHE_METRICS_HOST": "127.0.0.1",
            f"{upper}HOST": "127.0.0.1",
            f"{upper}ADVERTISE_HOST": "127.0.0.1",
            f"{upper}METRICS_PORT": str(self.probe_port),
            **changes,
        }

    @contextmanager
    def running(self, ends: int = 0) -> Iterator[subprocess.Popen[bytes]]:
        """The process, until SIGTERM; `ends`: the exit status that it has then."""
        self.state_dir.mkdir(exist_ok=True)
        log = self.state_dir / "log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *self.container["args"]],
                env=self.environment,
                stdout=file,
                stderr=file,
            )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(60)
            finally:
                process.kill()
                process.wait()
        assert code == ends, log.read_text()

    def ask(self, probe: str) -> int:
        """Status of a rendered probe's path; 0 while the port is closed."""
        path = self.container[probe]["httpGet"]["path"]
        connection = http.client.HTTPConnection("127.0.0.1", self.probe_port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def pre_stop(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """The rendered hook, with `mooncache` on PATH as in the image."""
        folder.mkdir()
        program = folder / "mooncache"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mooncache.cli "$@"\n')
        program.chmod(0o755)
        command = self.container["lifecycle"]["preStop"]["exec"]["command"]
        path = f"{folder}{os.pathsep}{self.environment['PATH']}"
        return subprocess.run(
            command,
            env={**self.environment, "PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.mark.timeout(300)
def test_probes_are_served_and_the_hook_moves_blocks_away(tmp_path: Path) -> None:
    token = create_cluster_token(tmp_path / "cluster.token")
    control = own_port()
    target = f"127.0.0.1:{control}"
    master = Part("master", tmp_path / "m", MOONCACHE_MASTER_PORT=str(control))
    nodes = [
        Part(
            "store_node",
            tmp_path / name,
            MOONCACHE_CLUSTER_MASTER_TARGETS=target,
            MOONCACHE_STORE_NODE_NODE_ID=name,
            MOONCACHE_STORE_NODE_PORT="0",
            MOONCACHE_STORE_NODE_DATA_HOST="127.0.0.1",
            MOONCACHE_STORE_NODE_DATA_PORT="0",
            MOONCACHE_STORE_NODE_CAPACITY_BYTES=CAPACITY,
        )
        for name in ("rel-store-0", "rel-store-1")
    ]
    leaving, staying = nodes
    with leaving.running() as process:
        wait_until(lambda: leaving.ask("startupProbe") == 200, "the node answers")
        assert leaving.ask("livenessProbe") == 200
        assert leaving.ask("readinessProbe") == 503, "it serves, but no master knows of it"
        with master.running():
            wait_until(lambda: master.ask("readinessProbe") == 200, "the master leads")
            assert master.ask("startupProbe") == master.ask("livenessProbe") == 200
            wait_until(lambda: leaving.ask("readinessProbe") == 200, "the node is registered")
            with Client([target], token=token.text) as client:
                client.put("only here", b"value" * 1000)
                with staying.running():
                    wait_until(lambda: staying.ask("readinessProbe") == 200, "the other one is registered")
                    hook = leaving.pre_stop(tmp_path / "bin")
                    assert hook.returncode == 0, hook.stdout + hook.stderr
                    assert leaving.ask("readinessProbe") == 503, "it drains"
                    assert leaving.ask("livenessProbe") == 200, "and is not killed for it"
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(60) == 0
                    assert client.get("only here") == b"value" * 1000


def test_secrets_of_root_and_group_become_files_that_services_take(tmp_path: Path) -> None:
    """fsGroup makes files of a mounted Secret readable for the group, behind links."""
    (workload,) = (one for one in workloads(rendered(TLS)) if component(one) == "gateway")
    (copying,) = pod(workload)["initContainers"]
    source, target = tmp_path / "from", tmp_path / "secret"
    (source / "..data").mkdir(parents=True)
    target.mkdir()
    (projected,) = (volume for volume in pod(workload)["volumes"] if volume["name"] == "from")
    for each in projected["projected"]["sources"]:
        for item in each["secret"]["items"]:
            real = source / "..data" / item["path"]
            real.write_text(
                parse_token("mcc1." + "0f" * 32).text if item["path"] == "cluster.token" else "text"
            )
            real.chmod(projected["projected"]["defaultMode"])
            (source / item["path"]).symlink_to(Path("..data") / item["path"])
    with pytest.raises(ConfigInvalid, match="0440"):
        load_cluster_token(source / "cluster.token")
    command = [
        word.replace("/run/mooncache/from", str(source)).replace("/run/mooncache/secret", str(target))
        for word in copying["command"]
    ]
    subprocess.run(command, check=True, timeout=60)
    assert load_cluster_token(target / "cluster.token").admin
    assert {path.name for path in target.iterdir()} == {
        "cluster.token",
        "tls.crt",
        "tls.key",
        "ca.crt",
        "keys.toml",
        "accounts-ca.crt",
    }
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in target.iterdir())
    mounts = {mount["name"]: mount["mountPath"] for mount in copying["volumeMounts"]}
    assert mounts == {"from": "/run/mooncache/from", "secret": "/run/mooncache/secret"}


def test_the_token_that_the_chart_makes_is_one() -> None:
    tokens = set()
    for path in (POOL, TLS):
        (secret,) = of_kind(rendered(path), "Secret")
        text = base64.b64decode(secret["data"]["cluster.token"]).decode()
        assert parse_token(text).admin
        assert secret["immutable"] is True, "a rendering without the cluster must not replace it"
        assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        tokens.add(text)
    assert len(tokens) == 2, "each is drawn"
    assert json.dumps(sorted(tokens)).count("mcc1.") == 2

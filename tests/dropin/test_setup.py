"""What `setup` means here: arguments, memory that a program contributes, variables of the original."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mooncache
from mooncache.auth import parse_token, tenant_token
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.dropin.settings import SetupRefusedError, checked, foreign_variables, size_of
from mooncache.dropin.values import ReplicateConfig
from tests.conditions import wait_until
from tests.dropin.conftest import COMPAT, use
from tests.ports import own_port

MIB = 1 << 20
INVALID = -600
NEEDED = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}


@pytest.mark.parametrize(
    ("text", "size"),
    [("16MB", 16 * MIB), ("16 mb", 16 * MIB), ("1.5g", 3 << 29), ("4GiB", 4 << 30), ("123", 123), (5, 5)],
)
def test_sizes_as_people_write_them(text: str | int, size: int) -> None:
    assert size_of("global_segment_size", text) == size


@pytest.mark.parametrize("text", ["50%", "", "MB", "-1", -1, None, True, "1e9", "9" * 30])
def test_sizes_that_are_none(text: Any) -> None:
    with pytest.raises(SetupRefusedError):
        size_of("global_segment_size", text)


def test_a_dictionary_has_the_defaults_of_the_original() -> None:
    asked = checked(NEEDED)
    assert (asked.host, asked.port, asked.segment_bytes) == ("localhost", 0, 16 * MIB)
    assert (asked.master, asked.tenant, asked.ignored) == ("127.0.0.1:50051", None, ())
    more = {
        "tenant_id": "team",
        "master_server_address": "",
        "enable_ssd_offload": "true",
        "engine": object(),
    }
    asked = checked({**NEEDED, "local_hostname": "[::1]:77", **more})
    assert (asked.host, asked.port, asked.master, asked.tenant) == ("::1", 77, "", "team")
    assert [reason.partition(":")[0] for reason in asked.ignored] == ["enable_ssd_offload", "engine"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"protocol": "cxl"},
        {"protocol": "ascend"},
        {"master_server_addr": "etcd://10.0.0.1:2379"},
        {"local_buffer_size": "much"},
        {"local_hostname": "host:99999"},
    ],
)
def test_what_cannot_be_had_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SetupRefusedError):
        checked({**NEEDED, **wrong})


def test_variables_of_the_original_are_named_with_what_to_do() -> None:
    found = foreign_variables(
        {"MC_FORCE_TCP": "1", "MOONCAKE_CONFIG_PATH": "x", "MOONCAKE_OFFLOAD_THING": "1", "PATH": "/bin"}
    )
    assert found == {
        "MC_FORCE_TCP": "set MOONCACHE_RDMA_ENABLED=false",
        "MOONCAKE_OFFLOAD_THING": "has no counterpart here",
    }


def test_setup_answers_with_a_code(
    mooncake_store: ModuleType, cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, cluster)
    store = mooncake_store.MooncakeDistributedStore()
    with pytest.raises(TypeError):
        store.setup("localhost")
    with pytest.raises(TypeError):
        store.setup({"local_hostname": "localhost"})
    config = {**NEEDED, "master_server_addr": cluster.master_target, "global_segment_size": 0}
    assert store.setup({**config, "protocol": "cxl"}) == INVALID
    assert store.setup(config) == 0
    assert store.setup(config) == INVALID, "it is set up"
    assert store.health_check() == 0
    assert store.close() == 0
    monkeypatch.setenv("MOONCACHE_CLIENT_TOKEN", "no token")
    assert store.setup(config) == -601


def test_tenants_do_not_see_each_other(make_store: Callable[..., Any]) -> None:
    store, other = make_store(), make_store(tenant_id="other")
    assert store.put("mine", b"1") == 0
    assert other.is_exist("mine") == 0
    assert store.remove("mine") == 0


def test_memory_is_contributed_and_taken_back(
    make_store: Callable[..., Any], cluster: EmbeddedCluster
) -> None:
    store = make_store(segment=32 * MIB)
    name = store.get_hostname()
    host, _, port = name.partition(":")
    assert host == "localhost"
    assert 12300 <= int(port) <= 14300
    with mooncache.connect(**cluster.client_settings()) as client:
        (node,) = [node for node in client.nodes() if node.node_id == name]
        assert node.capacity_bytes == 32 * MIB
        config = ReplicateConfig()
        config.preferred_segment = name
        assert store.put("here", b"data", config) == 0
        (replica,) = store.get_replica_desc("here")
        assert replica.get_memory_descriptor().buffer_descriptor.transport_endpoint == name
        assert store.remove("here") == 0
        assert store.close() == 0
        wait_until(lambda: not any(n.node_id == name and n.state == "active" for n in client.nodes()))


def test_memory_under_the_name_of_a_node_that_was_killed(
    make_store: Callable[..., Any], cluster: EmbeddedCluster
) -> None:
    """The master has not noticed yet that the former node of this name is gone; what setup returns can be used."""
    port = own_port()
    former = make_store(segment=32 * MIB, host=f"localhost:{port}")
    os.kill(former._segment.pid, signal.SIGKILL)
    assert former.close() == 0
    store = make_store(segment=32 * MIB, host=f"localhost:{port}")
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    assert store.put("after", b"data", config) == 0
    (replica,) = store.get_replica_desc("after")
    assert replica.get_memory_descriptor().buffer_descriptor.transport_endpoint == store.get_hostname()
    assert store.remove("after") == 0


def test_two_stores_of_one_host_have_two_names(make_store: Callable[..., Any]) -> None:
    assert make_store().get_hostname() != make_store().get_hostname()


def test_a_tenant_token_contributes_no_memory(
    mooncake_store: ModuleType, cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, cluster)
    token = tenant_token(parse_token(cluster.token_path.read_text()), "demo")
    monkeypatch.setenv("MOONCACHE_CLIENT_TOKEN", token.text)
    store = mooncake_store.MooncakeDistributedStore()
    setup = ("localhost", "", 32 * MIB, 0, "tcp", "", cluster.master_target)
    assert store.setup(*setup) == INVALID
    assert store.setup("localhost", "", 0, 0, "tcp", "", cluster.master_target) == 0
    assert store.put("k", b"v") == 0
    assert store.remove("k") == 0
    assert store.close() == 0


PROGRAM = """
import sys, threading
from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
codes = []
setup = lambda: codes.append(store.setup("localhost", "", 32 << 20, 0, "tcp", "", sys.argv[1]))
thread = threading.Thread(target=setup)  # a thread that ends: the memory stays
thread.start()
thread.join()
print(codes[0], store.get_hostname(), flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("mooncake_store")
def test_contributed_memory_ends_with_its_program_however_that_ends(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    paths = os.pathsep.join([str(COMPAT), *(path for path in sys.path if path)])
    env = {**os.environ, "MOONCACHE_CLUSTER_STATE_DIR": str(cluster.state_dir), "PYTHONPATH": paths}
    with (
        mooncache.connect(**cluster.client_settings()) as client,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, cluster.master_target],
            env={**env, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as program,
    ):
        try:
            assert program.stdout is not None
            lines = (line for line in program.stdout if not line.startswith("{"))
            code, name = next(lines).split()
            assert code == "0"
            wait_until(lambda: any(n.node_id == name and n.state == "active" for n in client.nodes()))
        finally:
            program.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(n.node_id == name and n.state == "active" for n in client.nodes()))


def test_the_package_refuses_to_live_beside_the_original(tmp_path: Path) -> None:
    theirs = tmp_path / "mooncake_transfer_engine_non_cuda-0.3.13.dist-info"
    theirs.mkdir()
    (theirs / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mooncake-transfer-engine-non-cuda\nVersion: 0.3.13\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(COMPAT), str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Uninstall both" in done.stderr


def test_the_distribution_holds_the_names(tmp_path: Path) -> None:
    """What `pip install ./compat/mooncake` builds: the folder `mooncake`, every module in it, and nothing else."""
    copy = shutil.copytree(
        COMPAT, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("mooncache_mooncake-*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        assert "Requires-Dist: mooncache\n" in wheel.read(metadata).decode()
    assert names == {path.relative_to(COMPAT).as_posix() for path in (COMPAT / "mooncake").glob("*.py")}

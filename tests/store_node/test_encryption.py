"""Blocks of a tenant with a key: key files, and a real node whose disk does not have the blocks' bytes."""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import mooncache
from mooncache.auth import load_cluster_token, session_token
from mooncache.cli.app import run as cli
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.errors import ConfigInvalid, MooncacheError
from mooncache.runtime.tenant_limits import TenantLimits, TenantTable
from mooncache.store_node.tenant_keys import TenantKeys, key_id, parse_keys, read_key_file
from mooncache.store_node.tenants import encrypted_tenants
from tests.conditions import wait_until

MIB = 1 << 20
BLOCK = 256 << 10
KEYS = [bytes([number]) * 32 for number in range(20)]


class FakeServer:
    """The native server, as far as keys go."""

    def __init__(self, why: str = "") -> None:
        self.keys: dict[str, list[bytes]] = {}
        self.why = why

    def set_keys(self, tenant: str, keys: list[bytes]) -> None:
        self.keys[tenant] = keys
        if self.why and keys:
            raise RuntimeError(ConfigInvalid.code, "CONFIG_INVALID", self.why)


def write_keys(path: Path, *keys: bytes, mode: int = 0o600) -> None:
    path.write_text("# of the operator\n" + "".join(f"{key.hex()}  # one\n" for key in keys))
    path.chmod(mode)


# --- files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "# none", "00" * 31, "00" * 33, "zz" * 32, "00" * 32 + "\nkey"])
def test_what_is_no_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        parse_keys(text)
    assert "0000" not in str(refused.value)
    assert "zz" not in str(refused.value)


def test_too_many_keys_are_refused() -> None:
    assert parse_keys("\n".join(key.hex() for key in KEYS[:16])) == KEYS[:16]
    with pytest.raises(ConfigInvalid, match="1 to 16"):
        parse_keys("\n".join(key.hex() for key in KEYS))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    write_keys(tmp_path / "a.key", KEYS[1], mode=mode)
    with pytest.raises(ConfigInvalid, match="0600"):
        read_key_file(tmp_path / "a.key")


def test_no_file_and_no_plain_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.key").mkdir(mode=0o700)
    for name in ("folder.key", "none.key"):
        with pytest.raises(ConfigInvalid):
            read_key_file(tmp_path / name)
    (tmp_path / "long.key").write_text("#" * (17 << 10))
    (tmp_path / "long.key").chmod(0o600)
    with pytest.raises(ConfigInvalid, match="bytes"):
        read_key_file(tmp_path / "long.key")


def test_changes_of_files_reach_the_server(tmp_path: Path) -> None:
    server, keys = FakeServer(), TenantKeys(tmp_path)
    write_keys(tmp_path / "team-a.key", KEYS[1])
    (tmp_path / "README").write_text("no key file")
    (tmp_path / "No Tenant.key").write_text("")
    (tmp_path / ".team-z.key.12ab").write_text("")
    assert list(keys.first().values()) == [[KEYS[1]]]
    keys.refresh(server)
    assert server.keys == {}, "the start has given them"
    write_keys(tmp_path / "team-a.key", KEYS[2], KEYS[1])
    write_keys(tmp_path / "team-b.key", KEYS[3])
    keys.refresh(server)
    assert server.keys == {"team-a": [KEYS[2], KEYS[1]], "team-b": [KEYS[3]]}
    (tmp_path / "team-b.key").chmod(0o644)
    keys.refresh(server)
    assert server.keys["team-b"] == [], "refused: the tenant goes to no disk"
    (tmp_path / "team-a.key").unlink()
    keys.refresh(server)
    assert server.keys["team-a"] == []


def test_a_refused_file_is_known_before_the_start(tmp_path: Path) -> None:
    write_keys(tmp_path / "team-a.key", KEYS[1], mode=0o644)
    assert list(TenantKeys(tmp_path).first().values()) == [[]]
    with pytest.raises(ConfigInvalid, match="tenant_keys_path"):
        TenantKeys(tmp_path / "none").first()


def test_a_server_without_libcrypto_refuses_and_the_node_goes_on(tmp_path: Path) -> None:
    server, keys = FakeServer("libcrypto.so.3 was not found"), TenantKeys(tmp_path)
    write_keys(tmp_path / "team-a.key", KEYS[1])
    keys.refresh(server)
    keys.refresh(server)
    assert server.keys == {"team-a": [KEYS[1]]}


def test_erased_keys_are_gone(tmp_path: Path) -> None:
    server, keys = FakeServer(), TenantKeys(tmp_path)
    write_keys(tmp_path / "team-a.key", KEYS[1], KEYS[2])
    keys.refresh(server)
    assert keys.erase(server, "team-a") == [key_id(KEYS[1]), key_id(KEYS[2])]
    assert server.keys["team-a"] == []
    assert not (tmp_path / "team-a.key").exists()
    assert keys.erase(server, "team-a") == []


def test_tenants_that_have_to_be_encrypted_are_known_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    assert encrypted_tenants(path) == []
    table = TenantTable(3, {"a": TenantLimits(encrypted=1), "b": TenantLimits(ttl_ms=1)})
    path.write_text(table.to_text())
    assert len(encrypted_tenants(path)) == 1
    assert TenantTable.from_message(table.to_message()) == table
    path.write_text("{")
    assert encrypted_tenants(path) == []


def test_new_key_makes_and_rotates_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert cli(["tenant", "new-key", "team-a", "--folder", str(folder)]) == 0
    assert cli(["tenant", "new-key", "team-a", "--folder", str(folder)]) == 0
    new, old = read_key_file(folder / "team-a.key")
    out = capsys.readouterr().out
    assert key_id(new) in out
    assert new.hex() not in out
    assert old != new
    assert (folder / "team-a.key").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cli(["tenant", "new-key", "Not A Tenant", "--folder", str(folder)]) == 2
    assert [path.name for path in folder.iterdir()] == ["team-a.key"]


# --- a real node ---------------------------------------------------------------------------------------------


def value_of(tenant: str, number: int) -> bytes:
    text = f"the secret of {tenant}, block {number:06}; ".encode()
    return (text * (BLOCK // len(text) + 1))[:BLOCK]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    keys = tmp_path_factory.mktemp("keys")
    write_keys(keys / "team-a.key", KEYS[1])
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("pool"),
        nodes=1,
        capacity_bytes=8 * MIB,
        ssd_bytes=128 * MIB,
        port=0,
        extra_env=(
            ("MOONCACHE_METRICS_ENABLED", "true"),
            ("MOONCACHE_STORE_NODE_TENANT_KEYS_PATH", str(keys)),
        ),
    )
    with EmbeddedCluster(settings) as running:
        yield running


def keys_folder(cluster: EmbeddedCluster) -> Path:
    return Path(dict(cluster.settings.extra_env)["MOONCACHE_STORE_NODE_TENANT_KEYS_PATH"])


@contextlib.contextmanager
def session(cluster: EmbeddedCluster, tenant: str) -> Iterator[mooncache.Client]:
    token = session_token(load_cluster_token(cluster.token_path), tenant, time.time()).text
    with mooncache.connect(**cluster.client_settings()) as own, own.for_tenant(token) as client:
        yield client


def ssd(cluster: EmbeddedCluster, name: str) -> int:
    with urllib.request.urlopen(f"http://{cluster.parts['node-1'].metrics}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.search(rf"^mooncache_store_node_ssd_{name}(?:_total)? ([0-9.e+]+)$", text, re.MULTILINE)
    assert found, name
    return int(float(found[1]))


def put_until_on_disk(cluster: EmbeddedCluster, client: mooncache.Client, tenant: str) -> list[int]:
    """Blocks 0 to 59, through memory for half of them: the numbers of those that the disk alone has."""
    begun = judged(cluster)
    for number in range(60):
        client.put(f"{tenant}-{number}", value_of(tenant, number))
        if number > 32 and number % 4 == 3:  # a put never waits for a disk: it gets the time to follow
            wait_until(partial(follows, cluster, begun + number - 32), "the disk follows", every_s=0.01)
    return [number for number in range(60) if tier_of(client, f"{tenant}-{number}") == "ssd"]


def judged(cluster: EmbeddedCluster) -> int:
    """Blocks that the disk has taken or refused."""
    return ssd(cluster, "admitted_blocks") + ssd(cluster, "refused_blocks")


def follows(cluster: EmbeddedCluster, count: int) -> bool:
    return judged(cluster) >= count


def tier_of(client: mooncache.Client, key: str) -> str:
    with contextlib.suppress(MooncacheError):
        found = client.stat(key)
        return found.tier if found else ""
    return ""


def on_disk(cluster: EmbeddedCluster, tenant: str) -> int:
    """How often the text of a tenant lies in the files of the disk."""
    folder = cluster.settings.state_dir / "ssd"
    text = f"the secret of {tenant}".encode()
    return sum(path.read_bytes().count(text) for path in folder.rglob("*") if path.is_file())


def reads_as_put(client: mooncache.Client, tenant: str, number: int) -> bool:
    with contextlib.suppress(MooncacheError):
        found = client.get(f"{tenant}-{number}")
        if found is not None:
            assert bytes(found) == value_of(tenant, number), "wrong bytes"
            return True
    return False


def test_the_disk_has_no_text_of_a_tenant_with_a_key(cluster: EmbeddedCluster) -> None:
    with session(cluster, "team-b") as other:
        assert put_until_on_disk(cluster, other, "team-b")
        wait_until(lambda: on_disk(cluster, "team-b") > 0, "this search finds what is not encrypted")
    assert ssd(cluster, "encrypted_blocks") == 0
    with session(cluster, "team-a") as client:
        below = put_until_on_disk(cluster, client, "team-a")
        assert len(below) > 5
        for number in below[:5]:
            wait_until(lambda number=number: reads_as_put(client, "team-a", number), f"block {number}")
        assert ssd(cluster, "encrypted_bytes") >= len(below) * BLOCK
        assert on_disk(cluster, "team-a") == 0

        # A rotation, and a restart of the node by kill -9.
        write_keys(keys_folder(cluster) / "team-a.key", KEYS[2], KEYS[1])
        below = [number for number in range(60) if tier_of(client, f"team-a-{number}") == "ssd"]
        assert len(below) > 3
        cluster.kill("node-1")
        cluster.restart("node-1")
        for number in below[:3]:
            wait_until(lambda number=number: reads_as_put(client, "team-a", number), f"block {number} again")
        assert on_disk(cluster, "team-a") == 0
        assert ssd(cluster, "corrupt_blocks") == 0
        text = "".join(path.read_text(errors="replace") for path in cluster.settings.state_dir.rglob("*.log"))
        assert key_id(KEYS[1]) in text or "node.keys_set" not in text
        for key in KEYS[1:3]:
            assert key.hex() not in text, "a key is in a log"


def test_without_its_key_a_tenant_goes_to_no_disk(
    cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--state-dir", str(cluster.settings.state_dir), "--json"]
    assert cli(["tenant", "set", "team-c", "--encrypted", *where]) == 0
    assert json.loads(capsys.readouterr().out)["encrypted"] == 1
    refused = ssd(cluster, "key_refused_blocks")
    with session(cluster, "team-c") as client:
        assert not put_until_on_disk(cluster, client, "team-c")
        wait_until(lambda: ssd(cluster, "key_refused_blocks") > refused, "the node says so")
    assert on_disk(cluster, "team-c") == 0


def test_a_purge_can_delete_the_keys(cluster: EmbeddedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--state-dir", str(cluster.settings.state_dir), "--json"]
    with session(cluster, "team-a") as client:
        assert cli(["tenant", "purge", "team-a", "--yes", "--erase-keys", *where]) == 0
        receipt = json.loads(capsys.readouterr().out)
        node = receipt["nodes"][0]
        assert node["keys_erased"]
        assert node["erased_key_ids"] == [key_id(KEYS[2]), key_id(KEYS[1])]
        assert "deleted the keys" in receipt["method"]
        assert not (keys_folder(cluster) / "team-a.key").exists()
        assert client.get("team-a-3") is None
        assert not put_until_on_disk(cluster, client, "team-a"), "never as it is"
    assert on_disk(cluster, "team-a") == 0

"""Blocks in an object store that store nodes share, over HTTP with a real S3 server: what one node wrote the other
one reads, also when the writer was killed. Whatever the store does, a get gives the right bytes or none, in time."""

from __future__ import annotations

import contextlib
import errno
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import mooncache
from mooncache._native import ObjectRequests
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.config import Config
from mooncache.errors import ConfigInvalid, MooncacheError
from mooncache.store_node.identity import NodeIdentity
from mooncache.store_node.native_settings import server_settings
from mooncache.store_node.object_store import (
    LIST,
    READ,
    ObjectWorkers,
    check_url,
    errno_of,
    open_store,
    packed,
)
from tests.conditions import wait_until
from tests.s3_server import BUCKET, CREDENTIALS, S3Server, s3_server
from tests.store_node.questions import counter, reaches, read, tier_of

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = pytest.mark.filterwarnings("default")  # of the libraries below

MIB = 1 << 20
BLOCK = 256 << 10
NODES = ("node-1", "node-2")
URL = f"s3://{BUCKET}/pool"
IDENTITY = NodeIdentity("node-1", "host", 1, "0", 0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server() as running:
        for name, value in running.env.items():
            monkeypatch.setenv(name, value)
        yield running


def value_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * (BLOCK // 4)


# --- the store itself ---------------------------------------------------------------------------


def test_objects_come_back(server: S3Server) -> None:
    store = open_store(URL, 10.0, 4)
    assert store.list("") == [], "the trial object is gone"
    store.write("a.mooncache/one", b"0123456789")
    assert store.read("a.mooncache/one", 2, 3) == b"234"
    assert store.read("a.mooncache/one", 8, 10) == b"89"
    assert store.read("a.mooncache/one", 100, 10) == b""
    ((name, size, version),) = store.list("a.mooncache/")
    assert (name, size) == ("a.mooncache/one", 10)
    store.write("a.mooncache/one", b"9876543210")
    assert store.list("")[0][2] != version, "other bytes, another version"
    store.delete("a.mooncache/one")
    store.delete("a.mooncache/one")
    with pytest.raises(FileNotFoundError):
        store.read("a.mooncache/one", 0, 1)


def test_workers_answer_with_bytes_or_an_errno(server: S3Server) -> None:
    requests = ObjectRequests()
    workers = ObjectWorkers(requests, open_store(URL, 1.0, 4), 2)
    try:
        server.client().put_object(Bucket=BUCKET, Key="pool/x", Body=b"abc")
        assert workers._answer(READ, "x", 1, 9, b"") == (0, b"bc")
        assert workers._answer(READ, "y", 0, 1, b"") == (-errno.ENOENT, b"")
        result, listing = workers._answer(LIST, "", 0, 0, b"")
        assert result == 0
        assert listing[:2] + listing[3:11] == struct.pack("<HQ", 1, 3)
        server.status = 403
        assert workers._answer(READ, "x", 0, 1, b"")[0] == -errno.EACCES
        server.status = 0
        server.hold()
        begun_s = time.monotonic()
        assert workers._answer(READ, "x", 0, 1, b"")[0] == -errno.ETIMEDOUT
        assert time.monotonic() - begun_s < 60, "a bound, far above the limit of one second"
        server.go_on()
        assert workers.counters["object_store_errors"] == 2
    finally:
        workers.close()
    assert requests.closed


def test_what_a_person_has_to_mend_is_said(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigInvalid, match="the bucket does not exist"):
        open_store("s3://no-such-bucket/pool", 5.0, 4)
    server.status = 403
    with pytest.raises(ConfigInvalid, match="do not allow to write"):
        open_store(URL, 5.0, 4)
    server.status = 0
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(ConfigInvalid, match="there are no credentials"):
        open_store(URL, 5.0, 4)
    with pytest.raises(ConfigInvalid, match="cannot open nosuch://x"):
        open_store("nosuch://x/y", 5.0, 4)


def test_urls() -> None:
    check_url(URL)
    for wrong, why in (
        ("s3://", "needs a bucket"),
        ("s3://key:secret@bucket/x", "credentials"),
        ("s3://bucket/x?secret=1", "credentials"),
    ):
        with pytest.raises(ConfigInvalid, match=why) as refused:
            check_url(wrong)
        assert "key:secret" not in str(refused.value)


def test_errors_become_numbers() -> None:
    assert errno_of(PermissionError()) == errno.EACCES
    assert errno_of(TimeoutError()) == errno.ETIMEDOUT
    assert errno_of(OSError(errno.ENOSPC, "full")) == errno.ENOSPC
    assert errno_of(ValueError()) == errno.EIO
    assert packed([("ab", 5, 6)]) == struct.pack("<H", 2) + b"ab" + struct.pack("<QQ", 5, 6)


def test_settings_reach_the_native_server(tmp_path: Path) -> None:
    section = {"shared_url": URL, "shared_timeout_s": "1.5", "shared_spool_bytes": "64MiB"}
    config = Config.model_validate({"cluster": {"state_dir": tmp_path}, "store_node": section})
    settings = server_settings(config, IDENTITY, 64 * MIB, bytes(32))
    assert settings["shared_path"] == str(tmp_path / "spool" / "node-1")
    assert settings["shared_timeout_ms"] == 1500
    assert settings["shared_spool_bytes"] == 64 * MIB
    both = Config.model_validate({"store_node": {**section, "shared_path": tmp_path}})
    with pytest.raises(ConfigInvalid, match="Choose one"):
        server_settings(both, IDENTITY, 64 * MIB, bytes(32))


# --- nodes --------------------------------------------------------------------------------------


@contextlib.contextmanager
def pool(tmp_path: Path, server: S3Server, **more: str) -> Iterator[EmbeddedCluster]:
    env = {
        "METRICS_ENABLED": "true",
        "STORE_NODE_SHARED_BYTES": "256MiB",
        "STORE_NODE_SHARED_SCAN_MS": "200",
        "STORE_NODE_SHARED_UPLOAD_S": "0.5",
        "STORE_NODE_SHARED_TIMEOUT_S": "30",  # a busy machine is no slow store
        **more,
    }
    settings = ClusterSettings(
        state_dir=tmp_path / "state",
        nodes=2,
        capacity_bytes=16 * MIB,
        shared_url=URL,
        port=0,
        extra_env=(*server.env.items(), *((f"MOONCACHE_{name}", value) for name, value in env.items())),
    )
    cluster = EmbeddedCluster(settings)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


def fill(cluster: EmbeddedCluster, client: mooncache.Client, count: int = 240) -> dict[str, bytes]:
    """Blocks through twice the memory; those that left it."""
    values = {f"block-{number}": value_of(number) for number in range(count)}

    def written(least: int) -> bool:
        return sum(counter(cluster, node, "shared_blocks") for node in NODES) >= least

    for number, (key, value) in enumerate(values.items()):
        client.put(key, value)
        if number % 4 == 3 and number > 128:  # a put never waits: the store gets the time to follow
            wait_until(partial(written, (number - 128) // 2), "it follows", every_s=0.01)
    return {key: value for key, value in values.items() if tier_of(client, key) == "shared"}


def test_blocks_outlive_their_node(tmp_path: Path, server: S3Server) -> None:
    with pool(tmp_path, server) as cluster, mooncache.connect(**cluster.client_settings()) as client:
        below = fill(cluster, client)
        assert len(below) > 40
        removed, *kept = below
        assert {copy.tier for copy in client.match(kept[:1]).copies[0]} == {"shared"}
        assert client.remove(removed)
        own = counter(cluster, "node-1", "shared_blocks")
        assert own > 10
        wait_until(lambda: counter(cluster, "node-2", "shared_other_blocks") >= own - 1, "node-2 knows it")
        cluster.kill("node-1")
        for key in kept:
            assert wait_until(partial(read, client, key), f"{key} of the store") == below[key]
        assert counter(cluster, "node-2", "shared_other_reads") > 5, "blocks of the node that was killed"
        assert counter(cluster, "node-2", "object_store_read_bytes") > 5 * BLOCK
        assert not client.exists(removed)
        cluster.restart("node-1")
        cluster.wait_ready(60)
        wait_until(
            partial(reaches, cluster, "node-1", "shared_recovered_blocks", 10), "its log is taken over"
        )
        wait_until(partial(reaches, cluster, "node-1", "shared_answering", 1), "it reads the other log")
        assert not client.exists(removed), "a removed block came back"
        for key in kept[:10]:
            assert wait_until(partial(read, client, key), f"{key} after the restart") == below[key]


def test_whatever_the_store_does_bytes_are_right_or_missing(tmp_path: Path, server: S3Server) -> None:
    with (
        pool(tmp_path, server, STORE_NODE_SHARED_TIMEOUT_S="1") as cluster,
        mooncache.connect(**cluster.client_settings(), timeout_s=20.0) as client,
    ):
        below = fill(cluster, client)
        s3 = server.client()

        def objects() -> list[str]:
            found = s3.list_objects_v2(Bucket=BUCKET, Prefix="pool/").get("Contents", [])
            return sorted(each["Key"] for each in found if not each["Key"].endswith("superblock"))

        wait_until(lambda: len(objects()) >= 6, "segments are in the store")
        for number, key in enumerate(objects()):
            body = bytearray(s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())
            if number % 3 == 0:  # flipped bits, in every page
                for at in range(4096 + 1000, len(body) - 65536, 4096):
                    body[at] ^= 1
                s3.put_object(Bucket=BUCKET, Key=key, Body=bytes(body))
            elif number % 3 == 1:
                s3.put_object(Bucket=BUCKET, Key=key, Body=bytes(body[: len(body) // 2]))
            else:
                s3.delete_object(Bucket=BUCKET, Key=key)
        s3.put_object(Bucket=BUCKET, Key="pool/foreign.mooncache/superblock", Body=b"x" * 4096)
        found = {key: read(client, key) for key in below}
        assert all(value is None or value == below[key] for key, value in found.items())
        assert None in found.values()
        for server.status in (500, 503):
            client.put("fresh", value_of(1))
            assert read(client, "fresh") == value_of(1), "memory does not notice"
            for key in list(below)[-8:]:
                assert read(client, key) in (None, below[key])
            client.remove("fresh")
        server.status = 0
        server.hold()
        begun_s = time.monotonic()
        client.put("fresh", value_of(2))
        assert read(client, "fresh") == value_of(2), "memory does not notice"
        for key in list(below)[-8:]:
            assert read(client, key) in (None, below[key])
        assert time.monotonic() - begun_s < 90, "a bound: no get waited for the server"
        server.go_on()
        for node in NODES:
            wait_until(partial(reaches, cluster, node, "shared_answering", 1), f"{node} uses the store again")


def test_a_missing_bucket_refuses_the_start(tmp_path: Path, server: S3Server) -> None:
    server.client().delete_bucket(Bucket=BUCKET)
    with pytest.raises(MooncacheError, match="the bucket does not exist"), pool(tmp_path, server):
        pass

"""TLS end to end: control port and data port of a real cluster, with certificates made on the spot."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import mooncache
from mooncache.client.keys import pack_keys, to_block_keys
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import MooncacheError
from tests.client.conftest import make_cluster
from tests.conditions import WAIT_S, wait_until


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem with a certificate for 127.0.0.1 (cert.pem, key.pem), and a foreign authority (other.pem)."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    at = tmp_path_factory.mktemp("pki")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        made = (f"/CN={name}", "-days", 2, "-keyout", at / f"{name}.key", "-out", at / f"{name}.pem")
        openssl("req", "-x509", *curve, "-subj", *made)
    openssl("req", *curve, "-subj", "/CN=localhost", "-keyout", at / "key.pem", "-out", at / "csr.pem")
    (at / "ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    signing = ("-CA", at / "ca.pem", "-CAkey", at / "ca.key", "-CAcreateserial", "-days", 2)
    openssl("x509", "-req", "-in", at / "csr.pem", *signing, "-extfile", at / "ext", "-out", at / "cert.pem")
    return at


@pytest.fixture
def secured(tmp_path: Path, pki: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedCluster]:
    monkeypatch.setenv("MOONCACHE_TLS_ENABLED", "true")
    monkeypatch.setenv("MOONCACHE_TLS_CERT_FILE", str(pki / "cert.pem"))
    monkeypatch.setenv("MOONCACHE_TLS_KEY_FILE", str(pki / "key.pem"))
    monkeypatch.setenv("MOONCACHE_TLS_CA_FILE", str(pki / "ca.pem"))
    monkeypatch.setenv("MOONCACHE_TLS_REQUIRE_CLIENT_CERT", "true")
    cluster = make_cluster(tmp_path, nodes=2)
    cluster.start()
    yield cluster
    cluster.stop()


def test_mutual_tls(secured: EmbeddedCluster, pki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * 10_000
    with mooncache.connect(**secured.client_settings(), shm=False) as pool:
        assert all(node.tls for node in pool.nodes())
        assert pool.put("encrypted", data, replicas=2)
        assert pool.get("encrypted") == data
    for name in ("ENABLED", "CERT_FILE", "KEY_FILE", "CA_FILE", "REQUIRE_CLIENT_CERT"):
        monkeypatch.delenv(f"MOONCACHE_TLS_{name}")
    given = {
        "tls_ca": str(pki / "ca.pem"),
        "tls_cert": str(pki / "cert.pem"),
        "tls_key": str(pki / "key.pem"),
    }
    with mooncache.connect(**secured.client_settings(), **given, shm=False) as pool:
        assert pool.get("encrypted") == data
        nodes = [f"{node.node_id}@{node.tcp_host}:{node.tcp_port}" for node in pool.nodes()]
    (secured.state_dir / "cluster.json").unlink()
    for wrong in ({}, {"tls_ca": given["tls_ca"]}, {**given, "tls_ca": str(pki / "other.pem")}):
        with pytest.raises(MooncacheError):
            mooncache.connect(**secured.client_settings(), **wrong, connect_timeout_s=1)
        token = {"token_file": str(secured.token_path)}
        with (
            mooncache.connect(nodes=nodes, **token, **wrong, shm=False, timeout_s=3) as stranger,
            pytest.raises(MooncacheError),
        ):
            stranger.put("k", b"v")


def test_waiting_for_blocks_over_tls(secured: EmbeddedCluster) -> None:
    keys = [f"tls-{i}" for i in range(300)]
    with mooncache.connect(**secured.client_settings(), shm=False) as pool, pool.watch() as watch:
        node = pool.nodes()[0].node_id
        watch.add("all", pack_keys(to_block_keys(keys)), timeout_s=WAIT_S, node=node, news_s=0.001)
        assert watch.next(0.05) == []
        pool.put_many(keys, [b"x" * 1000] * len(keys), prefer_node=node).raise_for_errors()
        positions: list[int] = []

        def all_came() -> bool:
            news = watch.next(1.0)
            positions.extend(position for item in news for position in item.positions)
            return any(item.state == mooncache.WatchState.ALL for item in news)

        wait_until(all_came, "the last news", every_s=0.0)
        assert sorted(positions) == list(range(300))

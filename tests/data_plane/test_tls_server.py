"""The same requests over TLS: what the TLS library has buffered must not be forgotten."""

from __future__ import annotations

import random
import shutil
import socket
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import mooncache
from mooncache.auth import Token
from mooncache.errors import TlsError
from mooncache.runtime.certificates import make_certificates
from tests.certificates import certificate_until, expired_certificate
from tests.conditions import wait_until
from tests.data_plane import wire
from tests.data_plane.conftest import Start
from tests.data_plane.wire import Peer, frame, get_meta, key_of, put_frame


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cert.pem and key.pem for 127.0.0.1, self-signed."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    at = tmp_path_factory.mktemp("pki")
    subject = ("-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    files = ("-keyout", str(at / "key.pem"), "-out", str(at / "cert.pem"))
    subprocess.run(["openssl", "req", "-x509", *curve, *subject, *files], check=True, capture_output=True)
    return at


def settings(pki: Path) -> dict[str, str]:
    return {"tls_cert": str(pki / "cert.pem"), "tls_key": str(pki / "key.pem")}


def secure(peer: Peer, pki: Path) -> Peer:
    context = ssl.create_default_context(cafile=str(pki / "cert.pem"))
    peer.socket = context.wrap_socket(peer.socket, server_hostname="127.0.0.1")
    return peer


def test_pipelined_blocks_over_tls(start: Start, pki: Path) -> None:
    server = start(**settings(pki))
    assert server.endpoints()["tls"]
    rng = random.Random(5)
    blocks = {
        key_of(i): rng.randbytes(size) for i, size in enumerate([1, 100, 16_384, 300_000, 3_000_000] * 4)
    }
    with secure(Peer(server), pki) as peer:
        peer.login()
        # all requests at once; a request for each block by itself, so that frames end anywhere in TLS records
        requests = b"".join(put_frame([item]) for item in blocks.items())
        requests += b"".join(frame(wire.GET, get_meta(key)) for key in blocks)
        peer.send(requests)  # the answers wait in the node and in the kernel meanwhile
        for _ in blocks:
            assert wire.codes(peer.reply()) == [0]
        for block in blocks.values():
            assert peer.reply().payload == block


def test_plain_bytes_and_silence_on_a_tls_port(start: Start, pki: Path) -> None:
    server = start(handshake_timeout_ms=300, **settings(pki))
    with Peer(server) as plain, Peer(server) as silent:
        plain.send(frame(wire.PING))
        assert plain.closed()
        assert silent.closed()
    stats = server.stats()
    assert stats["connections_closed_tls"] == 1
    assert stats["connections_closed_handshake_timeout"] == 1
    with secure(Peer(server), pki) as peer:
        peer.login()
        peer.socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: server.stats()["connections_open"] == 0)


def test_a_node_with_an_expired_certificate_costs_a_client_its_blocks_only(
    start: Start, tmp_path: Path
) -> None:
    """Whoever connects refuses it at once with a typed error; the node runs on, and other nodes serve."""
    authority = make_certificates(tmp_path / "pki", ["127.0.0.1"])[0]
    cert, key = expired_certificate(tmp_path, authority)
    expired = start(node_id="late", tls_cert=str(cert), tls_key=str(key))
    good = start(node_id="good", tls_cert=str(authority / "cert.pem"), tls_key=str(authority / "key.pem"))
    ports = {name: server.endpoints()["tcp_port"] for name, server in (("late", expired), ("good", good))}
    nodes = [f"{name}@127.0.0.1:{port}" for name, port in ports.items()]
    token = Token("default", admin=True, key=wire.SECRET).text
    given = {"token": token, "tls_ca": str(authority / "ca.pem"), "shm": False, "timeout_s": 5}
    with mooncache.connect(nodes=nodes, **given) as pool:
        for number in range(20):
            assert pool.put(f"k{number}", b"value")
            assert pool.get(f"k{number}") == b"value"
        with pytest.raises(TlsError, match="certificate"):
            pool.ping(0)
        pool.ping(1)
    assert expired.stats()["store_blocks"] == 0


def test_connections_to_a_node_outlive_its_certificate(start: Start, tmp_path: Path) -> None:
    """It expires while they are open: they go on; whoever connects then is refused with the reason."""
    authority = make_certificates(tmp_path / "pki", ["127.0.0.1"])[0]
    token = Token("default", admin=True, key=wire.SECRET).text
    given = {"token": token, "tls_ca": str(authority / "ca.pem"), "shm": False, "timeout_s": 30}
    for life_s in (3, 10, 40):  # a busy machine may take longer than a life to connect
        end = datetime.now(UTC) + timedelta(seconds=life_s)
        cert, key = certificate_until(tmp_path / f"for-{life_s}", authority, end)
        server = start(tls_cert=str(cert), tls_key=str(key))
        nodes = [f"node@127.0.0.1:{server.endpoints()['tcp_port']}"]
        with mooncache.connect(nodes=nodes, **given) as pool:
            try:
                pool.ping(0)
            except TlsError:
                continue
            wait_until(lambda end=end: datetime.now(UTC) > end + timedelta(seconds=1), "its end")
            opened = server.stats()["connections_accepted"]
            assert pool.put("block", b"value")
            assert pool.get("block") == b"value"
            assert server.stats()["connections_accepted"] == opened
            with (
                mooncache.connect(nodes=nodes, **given) as late,
                pytest.raises(TlsError, match="certificate has expired"),
            ):
                late.ping(0)
            assert pool.get("block") == b"value"
            return
    pytest.fail("each certificate had expired before the client was connected")

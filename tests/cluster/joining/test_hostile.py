"""The join port and the joining machine, when the other side is not what it says."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from mooncache.cluster.joining.core.code import NONCE_BYTES, make_code
from mooncache.cluster.joining.core.invitation import InvitationState
from mooncache.cluster.joining.inviting import CONNECTIONS_MAX
from mooncache.cluster.joining.joining import JoiningMachine
from mooncache.cluster.joining.messages import (
    FRAME_BYTES_MAX,
    LENGTH_BYTES,
    VERSION,
    JoinAnswer,
    JoinGreeting,
    SealedMessage,
    packed,
)
from mooncache.errors import MooncacheError, ProtocolError, Unauthenticated, VersionSkew
from mooncache.runtime.certificates import make_certificates
from tests.cluster.joining.invited import HOST, invitation
from tests.conditions import wait_until

Talk = Callable[[ssl.SSLSocket], None]


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=20)


def speak_tls(port: int) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(connect(port))


def frame_of(line: ssl.SSLSocket) -> bytes:
    """One frame, without its length."""
    size = int.from_bytes(_exactly(line, LENGTH_BYTES), "big")
    assert size <= FRAME_BYTES_MAX
    return _exactly(line, size)


def _exactly(line: ssl.SSLSocket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = line.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


@contextlib.contextmanager
def machine_that(talks: Talk, folder: Path) -> Iterator[str]:
    """A machine with a certificate of its own that says what `talks` says; yields host:port."""
    made = make_certificates(folder, [HOST])[0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made / "cert.pem", made / "key.pem")
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(20)

        def serve() -> None:
            with contextlib.suppress(OSError, EOFError):
                plain, _ = listener.accept()
                with plain, context.wrap_socket(plain, server_side=True) as line:
                    line.settimeout(20)
                    talks(line)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"{HOST}:{listener.getsockname()[1]}"
        thread.join(30)
        assert not thread.is_alive()


def test_bytes_that_are_no_attempt(tmp_path: Path) -> None:
    """Scans, other protocols and broken frames neither end the invitation nor count, and the right code still works."""
    rng = random.Random(46)
    tls_bodies = [
        b"",
        b"\0",
        (FRAME_BYTES_MAX + 1).to_bytes(4, "big") + b"x",
        b"\0\0\0\0",
        b"\xff" * 64,
        packed(JoinGreeting(VERSION, b"n" * NONCE_BYTES)),
        packed(SealedMessage(b"{}", b"", "", b"short")),
        b"\0\0\0\x02{]",
        b"\0\0\1\0" + b"[" * 256,
        *(rng.randbytes(rng.randrange(1, 300)) for _ in range(6)),
    ]
    plain = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\xff\xff",
        *(rng.randbytes(200) for _ in range(3)),
    ]
    with invitation(tmp_path / "a") as first:
        for data in plain:
            with connect(first.port) as line, contextlib.suppress(OSError):
                line.sendall(data)
                line.shutdown(socket.SHUT_WR)
                while line.recv(4096):
                    pass
        for data in tls_bodies:
            with speak_tls(first.port) as line, contextlib.suppress(OSError, EOFError):
                frame_of(line)
                line.sendall(data)
                line.unwrap()
        assert first.server.invitation.state is InvitationState.OPEN
        assert first.server.invitation.wrong_count == 0
        JoiningMachine(tmp_path / "b", HOST).join(first.target, first.server.code)


def test_an_old_tls_is_refused(tmp_path: Path) -> None:
    with invitation(tmp_path / "a") as first:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with connect(first.port) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
            context.wrap_socket(plain)


def test_connections_are_few(tmp_path: Path) -> None:
    """Callers that only hold connections keep further ones out, and nothing else; when they leave, all is as before."""
    with invitation(tmp_path / "a") as first:
        held = [connect(first.port) for _ in range(CONNECTIONS_MAX)]
        with connect(first.port) as one_more:
            assert one_more.recv(1) == b""
        for line in held:
            line.close()

        def joined() -> bool:
            with contextlib.suppress(MooncacheError):
                JoiningMachine(tmp_path / "b", HOST).join(first.target, first.server.code)
                return True
            return False

        wait_until(joined, "a place to be free again")


def test_a_machine_in_between_gets_nothing(tmp_path: Path) -> None:
    """It passes every frame on, under a certificate of its own: the first machine refuses the proof."""
    with invitation(tmp_path / "a") as first:

        def relay(line: ssl.SSLSocket) -> None:
            with speak_tls(first.port) as onward:
                for source, sink in ((onward, line), (line, onward), (onward, line)):
                    data = frame_of(source)
                    seen.append(data)
                    sink.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)

        seen: list[bytes] = []
        with (
            machine_that(relay, tmp_path / "m") as between,
            pytest.raises(Unauthenticated, match="does not know this code"),
        ):
            JoiningMachine(tmp_path / "b", HOST).join(between, first.server.code)
        assert len(seen) == 3
        assert b"mcc1." not in b"".join(seen)
        assert first.server.invitation.wrong_count == 1
    assert not (tmp_path / "b" / "cluster.token").exists()


def test_an_answer_without_the_proof_is_not_believed(tmp_path: Path) -> None:
    """A machine that does not know the code hands over an authority and a token of its own."""
    answer = JoinAnswer("ca", "cert", f"mcc1.{'0' * 64}", ["6.6.6.6:7700"])

    def impostor(line: ssl.SSLSocket) -> None:
        line.sendall(packed(JoinGreeting(VERSION, b"n" * NONCE_BYTES)))
        frame_of(line)
        line.sendall(packed(SealedMessage(msgspec.json.encode(answer), b"p" * 32)))

    with (
        machine_that(impostor, tmp_path / "m") as target,
        pytest.raises(Unauthenticated, match=r"not the machine that invited\. Nothing was taken from it"),
    ):
        JoiningMachine(tmp_path / "b", HOST).join(target, make_code(b"x" * 12))
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["up.lock"]


def test_any_bytes_to_the_joining_machine(tmp_path: Path) -> None:
    rng = random.Random(7)
    greeting = packed(JoinGreeting(VERSION, b"n" * NONCE_BYTES))
    answers = [
        b"",
        rng.randbytes(100),
        b"\0\0\0\0",
        packed(JoinGreeting(VERSION, b"short")),
        greeting + b"\xff" * 8,
        greeting + b"\0\0\0\x02{}",
        greeting + b"\0\1\0\0" + b"[" * (1 << 16),
        greeting + b'\0\0\0\x26{"type":"refusal","reason":"nonsense!"}',
    ]
    for number, data in enumerate(answers):

        def says(line: ssl.SSLSocket, data: bytes = data) -> None:
            line.sendall(data)
            with contextlib.suppress(OSError):
                line.recv(1)

        with machine_that(says, tmp_path / "m") as target, pytest.raises(MooncacheError) as refused:
            JoiningMachine(tmp_path / "b", HOST).join(target, make_code(b"x" * 12), 10.0)
        assert refused.value.code != 900, (number, refused.value)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["up.lock"]


def test_another_version_and_no_tls(tmp_path: Path) -> None:
    def newer(line: ssl.SSLSocket) -> None:
        line.sendall(packed(JoinGreeting(VERSION + 1, b"n" * NONCE_BYTES)))

    with machine_that(newer, tmp_path / "m") as target, pytest.raises(VersionSkew):
        JoiningMachine(tmp_path / "b", HOST).join(target, make_code(b"x" * 12))
    with socket.create_server((HOST, 0)) as listener:

        def answer() -> None:
            plain, _ = listener.accept()
            plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            plain.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match=r"does not speak TLS 1\.3"):
            JoiningMachine(tmp_path / "b", HOST).join(
                f"{HOST}:{listener.getsockname()[1]}", make_code(b"x" * 12)
            )
        thread.join(30)

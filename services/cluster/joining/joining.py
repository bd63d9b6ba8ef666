"""The second machine's side: prove the code, believe the answer only with the first machine's proof, write the files.

The private key is made here and stays here. Nothing is written before the proof was right; cluster.toml is written
last, so that a machine has either joined or is as it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from mooncache.auth import parse_token_file
from mooncache.cluster.joining.core.code import NONCE_BYTES, JoinCode, JoinSide, join_proof
from mooncache.cluster.joining.core.invitation import RefusalReason, refusal_sentence
from mooncache.cluster.joining.core.settings import check_shared, cluster_toml, joined_settings, tls_settings
from mooncache.cluster.joining.messages import (
    JOIN_PORT,
    LENGTH_BYTES,
    VERSION,
    Frame,
    JoinAnswer,
    JoinDone,
    JoinGreeting,
    JoinRefusal,
    JoinRequest,
    SealedMessage,
    checked_answer,
    checked_nonce,
    frame_bytes,
    packed,
    parsed,
)
from mooncache.config import CLUSTER_SETTINGS
from mooncache.errors import (
    ConfigInvalid,
    ConnectionLost,
    DeadlineExceeded,
    InvalidArgument,
    PermissionDenied,
    ProtocolError,
    Unauthenticated,
    VersionSkew,
)
from mooncache.runtime.certificates import alternatives, check_certificate, fingerprint, make_request

TLS_FOLDER: Final = "tls"
TOKEN_FILE: Final = "cluster.token"  # noqa: S105 - the name of a file
JOIN_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class JoinResult:
    """What a machine got. `host`: by which others reach it; `authority`: fingerprint of the cluster's authority."""

    host: str
    names: tuple[str, ...]
    master_targets: tuple[str, ...]
    conductor_target: str
    authority: str
    state_dir: Path


def parse_join_target(text: str) -> tuple[str, int]:
    """Host and port of HOST[:PORT]. Raises InvalidArgument."""
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port or ("::" in text and "[" not in text):
        host, port = text, str(JOIN_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 65_536:
        raise InvalidArgument(f"{text[:80]!r} is no first machine. Expected HOST or HOST:PORT.")
    return host, int(port)


class JoiningMachine:
    """This machine, which joins by `join`.

    Args:
        host: by which others reach it; empty: the address from which it calls.
        names: more names and addresses for its certificate.
        replace: leave the cluster to which it belongs.
    """

    def __init__(
        self, state_dir: Path, host: str = "", names: Sequence[str] = (), *, replace: bool = False
    ) -> None:
        alternatives([host, *names] if host else names)
        self._state_dir, self._host, self._names, self._replace = state_dir, host, tuple(names), replace

    def join(self, target: str, code: JoinCode, timeout_s: float = JOIN_S) -> JoinResult:
        """Join the cluster of the machine at `target`.

        Raises:
            PermissionDenied, Unauthenticated: refused; the text says why.
            ConnectionLost, DeadlineExceeded: no answer.
            ProtocolError, VersionSkew: what answers is no invitation of this version.
            ConfigInvalid: this machine cannot take it: it belongs to a cluster, a cluster runs here, or the folder
                cannot be written.
        """
        host, port = parse_join_target(target)
        key = code.key()
        lock = self._take_folder()
        try:
            with tempfile.TemporaryDirectory(dir=self._state_dir, prefix=".join-") as made:
                request = make_request(Path(made), self._host or "mooncache")
                with _connect(host, port, time.monotonic() + timeout_s) as line:
                    answer, names = self._ask(line, code, key, request)
                    result = self._take(Path(made), answer, names)
                    with contextlib.suppress(ConnectionLost, DeadlineExceeded):  # it has joined all the same
                        line.send(JoinDone())
                    return result
        finally:
            lock.close()

    def _take_folder(self) -> IO[str]:
        """The folder is this command's until the file is closed; a running cluster has it otherwise."""
        folder = self._state_dir
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = (folder / "up.lock").open("w", encoding="ascii")
        except OSError as error:
            raise ConfigInvalid(f"The state folder {folder} cannot be used: {error.strerror}.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigInvalid(
                f"A cluster is running in {folder}. Stop it (`mooncache down`), or choose another --state-dir."
            ) from None
        there = [name for name in (CLUSTER_SETTINGS, TOKEN_FILE) if (folder / name).exists()]
        if there and not self._replace:
            lock.close()
            raise ConfigInvalid(
                f"This machine belongs to a cluster already: {folder / there[0]} exists. Choose another --state-dir, "
                "or give --replace to leave that cluster."
            )
        return lock

    def _ask(
        self, line: _JoinConnection, code: JoinCode, key: bytes, request: str
    ) -> tuple[JoinAnswer, tuple[str, ...]]:
        greeting = line.receive(JoinGreeting)
        if greeting.version != VERSION:
            raise VersionSkew(refusal_sentence(RefusalReason.VERSION))
        names = (self._host or line.own_address, *self._names)
        body = packed(JoinRequest(list(names), request))[LENGTH_BYTES:]
        nonce = secrets.token_bytes(NONCE_BYTES)
        nonces = (checked_nonce(greeting.nonce), nonce)
        proof = join_proof(key, JoinSide.JOINING, line.certificate, nonces, body)
        line.send(SealedMessage(body, proof, code.name, nonce))
        said = line.receive_answer()
        if isinstance(said, JoinRefusal):
            kind = Unauthenticated if said.reason is RefusalReason.WRONG else PermissionDenied
            raise kind(refusal_sentence(said.reason))
        expected = join_proof(key, JoinSide.INVITING, line.certificate, nonces, said.body)
        if not secrets.compare_digest(expected, said.proof):
            raise Unauthenticated(
                "What answers there does not know the code, so it is not the machine that invited. Nothing was "
                "taken from it. Check the address; if it is right, something stands between the two machines."
            )
        answer = checked_answer(parsed(said.body, JoinAnswer))
        check_shared(answer.settings)
        return answer, names

    def _take(self, made: Path, answer: JoinAnswer, names: tuple[str, ...]) -> JoinResult:
        """Check what came and put it in place."""
        try:
            tokens = parse_token_file(answer.token.encode(), made / TOKEN_FILE)
        except ConfigInvalid:
            raise ProtocolError("The first machine handed over no cluster token.") from None
        folder = self._state_dir / TLS_FOLDER
        shared = joined_settings(
            names[0], tuple(answer.master_targets), answer.conductor_target, answer.settings
        )
        text = cluster_toml("mooncache join", {**shared, **tls_settings(str(folder.absolute()))})
        _write(made / "ca.pem", answer.authority)
        _write(made / "cert.pem", answer.certificate)
        _write(made / TOKEN_FILE, tokens.text())
        _write(made / CLUSTER_SETTINGS, text)
        _check_pair(made)
        check_certificate(made / "ca.pem", made / "cert.pem", names[0])
        try:
            (made / "request.pem").unlink(missing_ok=True)
            (self._state_dir / CLUSTER_SETTINGS).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
            for name in ("key.pem", "cert.pem", "ca.pem"):
                (made / name).replace(folder / name)
            for name in (TOKEN_FILE, CLUSTER_SETTINGS):
                (made / name).replace(self._state_dir / name)
        except OSError as error:
            raise ConfigInvalid(f"{self._state_dir} cannot be written: {error.strerror}.") from None
        return JoinResult(
            names[0],
            names,
            tuple(answer.master_targets),
            answer.conductor_target,
            fingerprint(answer.authority),
            self._state_dir,
        )


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _check_pair(made: Path) -> None:
    """The certificate is for the key that was made here. Raises ProtocolError."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(made / "cert.pem", made / "key.pem")
    except (ssl.SSLError, OSError, ValueError):
        raise ProtocolError(
            "The first machine sent a certificate that is not for this machine's key."
        ) from None


class _JoinConnection:
    """The connection: frames within one deadline. The certificate that it shows is believed by its proof alone."""

    def __init__(self, connection: ssl.SSLSocket, deadline_s: float) -> None:
        self._connection, self._deadline_s = connection, deadline_s
        self.certificate = connection.getpeercert(binary_form=True) or b""
        self.own_address = str(connection.getsockname()[0])

    def __enter__(self) -> _JoinConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, frame: SealedMessage | JoinDone) -> None:
        try:
            self._connection.settimeout(self._left_s())
            self._connection.sendall(packed(frame))
        except OSError as error:
            raise _lost(error) from None

    def receive(self, kind: type[Frame]) -> Frame:
        return parsed(self._frame(), kind)

    def receive_answer(self) -> SealedMessage | JoinRefusal:
        data = self._frame()
        try:
            return parsed(data, JoinRefusal)
        except ProtocolError:
            return parsed(data, SealedMessage)

    def _frame(self) -> bytes:
        return self._read(frame_bytes(self._read(LENGTH_BYTES)))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                self._connection.settimeout(self._left_s())
                more = self._connection.recv(size - len(data))
            except OSError as error:
                raise _lost(error) from None
            if not more:
                raise _lost(None)
            data += more
        return data

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("The first machine did not answer in time.")
        return left_s


def _lost(error: OSError | None) -> ConnectionLost | DeadlineExceeded:
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("The first machine did not answer in time.")
    return ConnectionLost(
        "The first machine closed the connection. Its invitation has ended, or many are calling it now: look at what "
        "`mooncache invite` says there and try again."
    )


def _connect(host: str, port: int, deadline_s: float) -> _JoinConnection:
    """TLS 1.3 without a check of the certificate: there is nothing to check it with before the proof."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        plain = socket.create_connection((host, port), timeout=max(0.1, deadline_s - time.monotonic()))
    except TimeoutError:
        raise DeadlineExceeded(f"{shown} does not answer. Is the address right, and the port open?") from None
    except OSError as error:
        raise ConnectionLost(
            f"No invitation is open at {shown} ({error.strerror or error}). A code's port exists only while "
            "`mooncache invite` runs there: the code may have been used, have expired or been revoked. Run it again on "
            "the first machine for a new code."
        ) from None
    try:
        return _JoinConnection(context.wrap_socket(plain), deadline_s)
    except TimeoutError:
        plain.close()
        raise DeadlineExceeded(f"{shown} does not answer in TLS.") from None
    except OSError:
        plain.close()
        raise ProtocolError(f"{shown} is no invitation of Mooncache: it does not speak TLS 1.3.") from None

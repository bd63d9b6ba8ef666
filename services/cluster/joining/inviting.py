"""The first machine's side: a port that exists while an invitation is open, and lets one machine join.

The process of `mooncache invite` listens itself. It alone reads the authority's key, and the cluster's control ports
stay closed to callers without a token and a certificate. A connection has seconds, a message 64 KiB, and few
connections are served at a time; an attempt that fails is answered late and keeps its place meanwhile, which limits
how many there are.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from mooncache.cluster.joining.core.code import (
    NONCE_BYTES,
    RANDOM_BYTES,
    JoinCode,
    JoinSide,
    join_proof,
    make_code,
)
from mooncache.cluster.joining.core.invitation import (
    Invitation,
    InvitationState,
    Judgement,
    RefusalReason,
    aged,
    judge,
)
from mooncache.cluster.joining.messages import (
    LENGTH_BYTES,
    VERSION,
    Frame,
    JoinAnswer,
    JoinDone,
    JoinGreeting,
    JoinRefusal,
    JoinRequest,
    SealedMessage,
    checked_nonce,
    checked_request,
    frame_bytes,
    packed,
    parsed,
)
from mooncache.cluster.joining.records import InvitationRecords
from mooncache.errors import ConfigInvalid, InvalidArgument, MooncacheError, ProtocolError
from mooncache.runtime.certificates import alternatives, first_certificate, sign_request
from mooncache.runtime.clock import Clock
from mooncache.runtime.tasks import cancel_all

CONNECTIONS_MAX: Final = 8
CONNECTION_S: Final = 30.0
HANDSHAKE_S: Final = 10.0
REFUSED_AFTER_S: Final = 1.0
ATTEMPTS_MAX: Final = 50
"""So many failed attempts with codes of other invitations end this one, too."""
_LOOK_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class InvitingMachine:
    """What the first machine shows and hands over."""

    authority: Path
    """Folder with ca.key and ca.pem."""
    cert_file: Path
    key_file: Path
    token: str = field(repr=False)
    master_targets: tuple[str, ...]
    conductor_target: str
    own_names: tuple[str, ...]
    """Names and addresses that no other machine gets a certificate for."""
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Joined:
    """How an invitation ended. `confirmed`: the machine said that everything is in place."""

    invitation: Invitation
    names: tuple[str, ...] = ()
    confirmed: bool = False
    trouble: str = ""
    """What went wrong on this machine, a sentence; empty when nothing did."""


class InvitationServer:
    """One invitation and its port. `open` it, print the code, `wait`."""

    def __init__(
        self,
        machine: InvitingMachine,
        records: InvitationRecords,
        clock: Clock,
        refused_after_s: float = REFUSED_AFTER_S,
    ) -> None:
        self.code: JoinCode = make_code(secrets.token_bytes(RANDOM_BYTES))
        self._machine, self._records, self._clock = machine, records, clock
        self._refused_after_s = refused_after_s
        self._key = self.code.key()
        self._certificate = first_certificate(machine.cert_file.read_text(encoding="ascii", errors="replace"))
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
        self._tls.load_cert_chain(machine.cert_file, machine.key_file)
        self._listener: socket.socket | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._attempts = 0
        self._end_s = 0.0
        self._result: Joined | None = None
        self._invitation = Invitation(self.code.name, "", 0.0, 0.0)

    @property
    def invitation(self) -> Invitation:
        """The invitation as it is now."""
        return self._invitation

    def open(self, host: str, port: int, lifetime_s: float, pid: int) -> str:
        """Listen; returns host:port. Raises ConfigInvalid when the port or the state folder cannot be used."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=CONNECTIONS_MAX)
        except OSError as error:
            raise ConfigInvalid(
                f"Port {port} on {host} cannot be used: {error.strerror}. Choose another --port."
            ) from None
        self._listener.setblocking(False)
        number = self._listener.getsockname()[1]
        target = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
        now_unix_s = self._clock.wall_s()
        self._end_s = self._clock.now_s() + lifetime_s
        self._keep(
            replace(
                self._invitation,
                target=target,
                created_unix_s=now_unix_s,
                expires_unix_s=now_unix_s + lifetime_s,
                pid=pid,
            )
        )
        return target

    async def wait(self, should_stop: Callable[[], bool]) -> Joined:
        """Serve until a machine has joined, the invitation has ended, or `should_stop`; the port is closed then."""
        assert self._listener is not None, "open comes first"
        accepting = asyncio.create_task(self._accept(self._listener))
        try:
            while self._result is None:
                if accepting.done():
                    accepting.result()
                if should_stop():
                    self._keep(replace(self._invitation, state=InvitationState.REVOKED))
                self._look()
                state = self._invitation.state
                if state not in {InvitationState.OPEN, InvitationState.USED}:
                    return Joined(self._invitation)
                await asyncio.sleep(_LOOK_S)
            return self._result
        finally:
            await cancel_all([accepting])
            self._listener.close()
            if self._open and not should_stop():  # refusals are still on their way
                await asyncio.wait(self._open, timeout=self._refused_after_s + _LOOK_S)
            await cancel_all(self._open)

    # --- connections ------------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # it ended while it waited, or descriptors are short: the next one may come
                await asyncio.sleep(_LOOK_S)
                continue
            if len(self._open) >= CONNECTIONS_MAX:
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """One connection, whatever comes. What is no attempt counts nowhere: all ports are scanned."""
        try:
            async with asyncio.timeout(CONNECTION_S):
                await self._talk(connection)
        except (OSError, TimeoutError, EOFError, ProtocolError):
            pass  # the caller left, was too slow, or speaks something else
        except MooncacheError as error:  # of this machine's own files
            self._result = self._result or Joined(self._invitation, trouble=str(error))
        finally:
            connection.close()

    async def _talk(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            await self._converse(reader, writer)
        finally:
            transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        await _send(writer, JoinGreeting(VERSION, nonce))
        sealed = await _receive(reader, SealedMessage)
        nonces = (nonce, checked_nonce(sealed.nonce))
        expected = join_proof(self._key, JoinSide.JOINING, self._certificate, nonces, sealed.body)
        mine = sealed.invitation == self.code.name
        right = hmac.compare_digest(expected, sealed.proof) and mine
        request = checked_request(parsed(sealed.body, JoinRequest)) if right else JoinRequest([], "")
        if not mine:
            return await self._refuse(writer, self._reason_of_other(sealed.invitation))
        if right and self._own_or_wrong(request.names):
            return await self._refuse(writer, RefusalReason.NAMES)
        refusal = self._judge(right=right, joins=request.names[0] if right else "")
        if refusal is not None:
            return await self._refuse(writer, refusal)
        answer = await self._answer(request)
        if answer is None:
            return await self._refuse(writer, RefusalReason.INTERNAL)
        proof = join_proof(self._key, JoinSide.INVITING, self._certificate, nonces, answer)
        names, confirmed = tuple(request.names), False
        try:
            await _send(writer, SealedMessage(answer, proof))
            await _receive(reader, JoinDone)
            confirmed = True
        finally:
            self._result = Joined(self._invitation, names, confirmed)

    async def _answer(self, request: JoinRequest) -> bytes | None:
        """The body of the answer; None when no certificate can be made, which ends the invitation."""
        machine = self._machine
        try:
            certificate = await asyncio.to_thread(
                sign_request, machine.authority, request.request, request.names
            )
            authority = (machine.authority / "ca.pem").read_text(encoding="ascii")
        except (MooncacheError, OSError, UnicodeError) as error:
            self._result = Joined(self._invitation, tuple(request.names), trouble=str(error))
            return None
        answer = JoinAnswer(
            authority,
            certificate,
            machine.token,
            list(machine.master_targets),
            machine.conductor_target,
            machine.settings,
        )
        return packed(answer)[LENGTH_BYTES:]

    # --- decisions --------------------------------------------------------------------------------------------

    def _judge(self, *, right: bool, joins: str) -> RefusalReason | None:
        self._look()
        judged: Judgement = judge(
            self._invitation,
            right=right,
            joins=joins,
            now_unix_s=self._clock.wall_s(),
            has_ended=self._clock.now_s() >= self._end_s,
        )
        self._keep(judged.invitation)
        return judged.refusal

    def _look(self) -> None:
        """The invitation ends when its time is over, or when it was revoked."""
        current = aged(self._invitation, self._clock.wall_s(), has_ended=self._clock.now_s() >= self._end_s)
        if current.state is InvitationState.OPEN and self._records.is_revoked(current.name):
            current = replace(current, state=InvitationState.REVOKED)
        self._keep(current)

    def _reason_of_other(self, name: str) -> RefusalReason:
        """Of a code of another invitation: what became of it, where this machine knows. Many such attempts end this
        invitation: that is no person who mistypes."""
        self._attempts += 1
        if self._attempts >= ATTEMPTS_MAX and self._invitation.state is InvitationState.OPEN:
            self._keep(replace(self._invitation, state=InvitationState.BLOCKED))
        found = self._records.find(name, self._clock.wall_s())
        if found is None or found.state is InvitationState.OPEN:
            return RefusalReason.WRONG
        return RefusalReason(found.state)

    def _own_or_wrong(self, names: list[str]) -> bool:
        try:
            return bool(set(alternatives(names)) & set(alternatives(self._machine.own_names)))
        except InvalidArgument:
            return True

    def _keep(self, invitation: Invitation) -> None:
        if invitation != self._invitation:
            self._records.write(invitation)
            self._invitation = invitation

    async def _refuse(self, writer: asyncio.StreamWriter, reason: RefusalReason) -> None:
        await asyncio.sleep(self._refused_after_s)
        await _send(writer, JoinRefusal(reason))
        writer.close()
        await writer.wait_closed()


async def _send(writer: asyncio.StreamWriter, frame: JoinGreeting | SealedMessage | JoinRefusal) -> None:
    writer.write(packed(frame))
    await writer.drain()


async def _receive(reader: asyncio.StreamReader, kind: type[Frame]) -> Frame:
    size = frame_bytes(await reader.readexactly(LENGTH_BYTES))
    return parsed(await reader.readexactly(size), kind)

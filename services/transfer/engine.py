"""A transfer engine: registers memory, is found by its descriptor, connects to others."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from mooncache import _native
from mooncache.auth import Token, check_tenant_name, derive_tenant_key, parse_token
from mooncache.client.buffers import Buffer
from mooncache.client.host import host_id
from mooncache.client.native_call import call_native
from mooncache.client.options import read_token_file
from mooncache.config.loading import load
from mooncache.errors import InvalidArgument, Unauthenticated
from mooncache.transfer.peer import EnginePeer, Notification
from mooncache.transfer.region import (
    DEFAULT_TIMEOUT_S,
    EngineRegion,
    checked_timeout,
    whole_region_grants,
)

_NOTIFICATIONS_MAX = 256
_WAITS_MAX_S = 1e8


class TransferEngine:
    """Memory of this process for peers, and connections to theirs.

    Args:
        name: what peers call this engine in their grants ([a-z0-9][a-z0-9_.-]{0,62}). It is proven by a token: the
            cluster token serves for every name, a tenant token for its tenant's, which is then the default.
        token: the text of a token; without it the file of the configuration (`cluster.token_file`) is read.
        listen: "host:port" at which peers reach this engine over TCP, port 0: any free one; None: it only connects.
            To verify peers it needs the cluster token.
        advertise: the host in descriptors, when it differs from that of `listen`.
        shared_memory: whether peers of this host and user may map memory that was allocated here, and the other
            way round. False: everything goes through sockets.
        tls_cert, tls_key: PEM files: TLS for those who connect over TCP.
        tls_ca: PEM file: peers over TCP have to show a certificate of this authority.
        timeout_s: of calls and transfers that name none.
        progress_timeout_s: a peer that moves no byte of a transfer for so long is given up.

    Raises:
        Unauthenticated: no such token, or it does not serve for this name.
        ConfigInvalid: the address or a file cannot be used.
        InvalidArgument: the name is none.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        token: str | None = None,
        listen: str | None = "127.0.0.1:0",
        advertise: str | None = None,
        shared_memory: bool = True,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_ca: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        progress_timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        proven = parse_token(read_token_file(load().cluster.token_path) if token is None else token)
        self.name = check_tenant_name(proven.tenant if name is None else name)
        self._timeout_s = checked_timeout(timeout_s)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._registered: dict[int, memoryview] = {}
        host, port = ("", 0) if listen is None else host_and_port(listen)
        if listen is not None and not proven.admin:
            raise Unauthenticated(
                "An engine that listens verifies its peers, for which it needs the cluster token; with a tenant token "
                "pass listen=None and connect to others."
            )
        if listen is not None and shared_memory:
            self._folder = tempfile.TemporaryDirectory(prefix="mooncache-engine-")
        unix_path = "" if self._folder is None else str(Path(self._folder.name) / "socket")
        try:
            self._native = call_native(
                _native.TransferEngine,
                name=self.name,
                key=_key_for(self.name, proven),
                secret=b"" if listen is None else proven.key,
                host_id=host_id(),
                tcp_host=host,
                tcp_port=port,
                advertised_host=advertise or "",
                unix_path=unix_path,
                shared_memory=shared_memory,
                tls_cert=tls_cert or "",
                tls_key=tls_key or "",
                tls_ca=tls_ca or "",
                progress_timeout_s=progress_timeout_s,
            )
        except BaseException:
            self._remove_folder()
            raise

    @property
    def port(self) -> int:
        """The TCP port; 0: it does not listen."""
        return self._native.tcp_port()

    # Memory.

    def allocate(
        self,
        size_bytes: int,
        *,
        label: str = "",
        readable_by: str | Iterable[str] = (),
        writable_by: str | Iterable[str] = (),
    ) -> EngineRegion:
        """New memory, zeroed, which peers of this host and user copy through shared memory.

        Args:
            readable_by, writable_by: names of peers, or "*" for every peer with a token of the cluster. More, and
                for parts of the region: `EngineRegion.grant`.

        Raises:
            InvalidArgument, NoSpace, LimitExceeded (4,096 regions).
        """
        grants = whole_region_grants(readable_by, writable_by)
        memory = call_native(self._native.allocate, size_bytes, label, grants)
        return self._region(memory.base, memoryview(memory).cast("B"), label)

    def register(
        self,
        buffer: Buffer,
        *,
        label: str = "",
        readable_by: str | Iterable[str] = (),
        writable_by: str | Iterable[str] = (),
        address: int | None = None,
    ) -> EngineRegion:
        """Memory of the caller: any contiguous buffer. The region holds it until it is closed.

        Args:
            address: what peers call its first byte; None: an address that was never used, so that a peer with an
                old one is refused.

        Raises:
            InvalidArgument: it is empty, not contiguous, or read-only while a peer may write it.
            AlreadyExists: the address is in another region.
        """
        grants = whole_region_grants(readable_by, writable_by)
        try:
            view = memoryview(buffer).cast("B")
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"The memory is not one contiguous buffer: {error}.") from None
        if view.readonly and any(grant[4] for grant in grants):
            raise InvalidArgument("The memory is read-only; no peer may write it.")
        base = call_native(
            self._native.register_memory,
            _native.address_of(view),
            view.nbytes,
            label,
            grants,
            address or 0,
        )
        return self._region(base, view, label)

    def register_file(
        self,
        path: str | os.PathLike[str],
        *,
        label: str = "",
        readable_by: str | Iterable[str] = (),
        writable_by: str | Iterable[str] = (),
    ) -> EngineRegion:
        """A file, mapped: peers read it, or write it where they may. It must not be made shorter meanwhile.

        Raises:
            InvalidArgument: it is empty. OSError: it cannot be opened so.
        """
        writable = bool(whole_region_grants((), writable_by))
        with Path(path).open("r+b" if writable else "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise InvalidArgument(f"{path} is empty.")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            mapping = mmap.mmap(file.fileno(), 0, access=access)
        return self.register(mapping, label=label, readable_by=readable_by, writable_by=writable_by)

    # Peers.

    def describe(self, peer: str = "") -> bytes:
        """Bytes by which peers find this engine and its regions; with a name, the regions that this peer may use.

        They hold no secret. Whoever receives them by a way that others can write to loses nothing but availability:
        the engine that answers has to prove the name in them.

        Raises:
            Closed: it does not listen.
        """
        return call_native(self._native.describe, peer)

    def connect(self, descriptor: bytes | str, timeout_s: float | None = None) -> EnginePeer:
        """Connect to the engine of a descriptor, or to the one at "host:port".

        Raises:
            InvalidArgument: no descriptor.
            NodeUnavailable, DeadlineExceeded, Unauthenticated.
            StaleIncarnation: the engine was started again since; its regions are gone.
            Unsupported: a store node answers there.
        """
        limit_s = checked_timeout(timeout_s, self._timeout_s)
        if isinstance(descriptor, str):
            host, port = host_and_port(descriptor)
            native = call_native(self._native.connect_to, host, port, limit_s)
        else:
            native = call_native(self._native.connect, bytes(descriptor), limit_s)
        return EnginePeer(native, self._timeout_s)

    def notifications(self, timeout_s: float = 0.0) -> list[Notification]:
        """What peers have sent since the last call, oldest first; waits up to `timeout_s` for the first."""
        rows = call_native(
            self._native.notifications, _NOTIFICATIONS_MAX, min(checked_timeout(timeout_s), _WAITS_MAX_S)
        )
        return [Notification(peer, data) for peer, data in rows]

    def stats(self) -> dict[str, int]:
        """Counters of the listening side, by name."""
        return dict(self._native.stats())

    def close(self) -> None:
        """Stop listening and end every connection of peers; twice is harmless. Memory is free for anything then."""
        self._native.close()
        self._registered.clear()
        self._remove_folder()

    def _region(self, base: int, memory: memoryview, label: str) -> EngineRegion:
        self._registered[base] = memory
        return EngineRegion(self._native, self._registered, base, memory.nbytes, label)

    def __del__(self) -> None:
        if hasattr(self, "_native"):
            self.close()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def host_and_port(text: str) -> tuple[str, int]:
    """The two parts of "host:port". Raises InvalidArgument."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise InvalidArgument(f"{text!r} is not an address. Expected host:port.")
    return host.strip("[]"), int(port)


def _key_for(name: str, token: Token) -> bytes:
    if token.admin:
        return derive_tenant_key(token.key, name)
    if name != token.tenant:
        raise Unauthenticated(
            f"The token is that of {token.tenant!r}; an engine called {name!r} needs its own, or the cluster token."
        )
    return token.key

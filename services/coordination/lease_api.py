"""One Lease at the Kubernetes API: read, create, replace; each call with a deadline and a limit on its answer.

The token is read at each call, because the kubelet replaces it about every hour. The CA is read again when a connection
could not be opened. A call that fails closes its connection. The token goes to no other address: redirects are
refused, and without TLS it is only sent to this host (`kubectl proxy`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from mooncache.config import CoordinationSection
from mooncache.config.small_files import read_small
from mooncache.coordination.lease_object import API_VERSION, Lease, lease_of
from mooncache.errors import (
    Closed,
    ConfigInvalid,
    Internal,
    MasterUnavailable,
    MooncacheError,
    Unauthenticated,
)

ANSWER_BYTES_MAX: Final = 1 << 20  # annotations of one object end at 256 KiB
_FILE_BYTES_MAX: Final = 1 << 20
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_HERE: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_REASON_CHARACTERS_MAX: Final = 300


class LeaseChangedError(Exception):
    """Another process wrote the Lease, created or deleted it since it was read; nothing was written."""


class LeaseApi:
    """Calls raise MasterUnavailable when the API does not answer, Unauthenticated when it refuses the account."""

    def __init__(self, section: CoordinationSection, name: str, env: Mapping[str, str] = os.environ) -> None:
        self.name = name
        self.endpoint = _endpoint(section, env)
        self._account = section.kubernetes_account
        self.namespace = section.lease_namespace or self._own_namespace()
        if not _NAME.fullmatch(self.namespace):
            raise ConfigInvalid(f"{self.namespace[:80]!r} is no namespace; set coordination.lease_namespace.")
        self._path = f"/apis/{API_VERSION}/namespaces/{self.namespace}/leases"
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, timeout_s: float) -> Lease | None:
        """The Lease as it is now; None when there is none."""
        status, body = await self._call("GET", f"{self._path}/{self.name}", None, timeout_s)
        return None if status == 404 and _is_status(body) else self._lease(status, body, "read")

    async def create(self, made: dict[str, Any], timeout_s: float) -> Lease:
        """Make it. Raises LeaseChangedError when it is there already."""
        status, body = await self._call("POST", self._path, made, timeout_s)
        if status == 409:
            raise LeaseChangedError
        return self._lease(status, body, "create")

    async def replace(self, made: dict[str, Any], timeout_s: float) -> Lease:
        """Put a changed one in the place of the one that it was made from. Raises LeaseChangedError."""
        status, body = await self._call("PUT", f"{self._path}/{self.name}", made, timeout_s)
        if status == 409 or (status == 404 and _is_status(body)):
            raise LeaseChangedError
        return self._lease(status, body, "update")

    async def close(self) -> None:
        """Let go of the connection."""
        self._closed = True
        await self._drop_session()

    async def _call(
        self, method: str, path: str, made: dict[str, Any] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        if self._closed:
            raise Closed("The connection to the Kubernetes API is closed.")
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"} | self._credentials()
        data = None
        if made is not None:
            data, headers["Content-Type"] = json.dumps(made).encode(), "application/json"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._open().request(
                    method, self.endpoint + path, data=data, headers=headers, allow_redirects=False
                ) as answer,
            ):
                body = bytearray()
                async for part in answer.content.iter_chunked(1 << 16):
                    body += part
                    if len(body) > ANSWER_BYTES_MAX:
                        raise MasterUnavailable(
                            f"The Kubernetes API at {self.endpoint} answered more than {ANSWER_BYTES_MAX >> 20} MiB."
                        )
                return answer.status, bytes(body)
        except TimeoutError:
            raise MasterUnavailable(
                f"The Kubernetes API at {self.endpoint} did not answer within {timeout_s:g} s."
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, aiohttp.ClientConnectorError):
                await self._drop_session()
            raise MasterUnavailable(
                f"The Kubernetes API at {self.endpoint} does not answer: {error}"
            ) from None

    def _lease(self, status: int, body: bytes, what: str) -> Lease:
        """The Lease of a good answer. Raises what another answer means."""
        if status in (200, 201):
            return lease_of(body, self.name)
        where = f"the Lease {self.namespace}/{self.name}"
        if status == 401:
            return _refuse(
                Unauthenticated, f"The Kubernetes API refused the token of {self._account} (401).", body
            )
        if status == 403:
            text = (
                f"The service account may not {what} {where} (403): its Role needs get, update and,"
                " where no other makes the Lease, create."
            )
            return _refuse(Unauthenticated, text, body)
        text = f"The Kubernetes API did not {what} {where} ({status})."
        return _refuse(Internal if status in (400, 413, 415, 422) else MasterUnavailable, text, body)

    def _own_namespace(self) -> str:
        path = self._account / "namespace"
        if not path.is_file():
            raise ConfigInvalid(f"There is no {path}: outside a pod set coordination.lease_namespace.")
        return read_small(path, "namespace file", ConfigInvalid, 256).decode("ascii", "replace").strip()

    def _credentials(self) -> dict[str, str]:
        path = self._account / "token"
        if self.endpoint.startswith("http:") and not path.exists():
            return {}
        token = read_small(path, "service account's token", Unauthenticated, _FILE_BYTES_MAX)
        text = token.decode("ascii", "replace").strip()
        if not text or not text.isascii() or not text.isprintable():
            raise Unauthenticated(f"The service account's token {path} is empty or not text.")
        return {"Authorization": f"Bearer {text}"}

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=4, ssl=self._tls() or True),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session

    def _tls(self) -> ssl.SSLContext | None:
        if self.endpoint.startswith("http:"):
            return None
        data = read_small(
            self._account / "ca.crt", "CA of the Kubernetes API", ConfigInvalid, _FILE_BYTES_MAX
        )
        try:
            if b"-----BEGIN CERTIFICATE-----" not in data:
                raise ValueError
            return ssl.create_default_context(cadata=data.decode("ascii"))
        except (ssl.SSLError, ValueError):
            raise ConfigInvalid(f"{self._account / 'ca.crt'} is not a PEM file.") from None

    async def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await asyncio.shield(session.close())  # also when the call that failed is given up meanwhile


def _endpoint(section: CoordinationSection, env: Mapping[str, str]) -> str:
    given = section.kubernetes_api.rstrip("/")
    if not given:
        host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigInvalid(
                "Outside a pod coordination.kubernetes_api has to name the Kubernetes API: https://HOST:PORT."
            )
        given = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    if not _usable(given):
        raise ConfigInvalid(
            f"coordination.kubernetes_api is {given[:200]!r}; it is https://HOST:PORT, or http:// on this host only."
        )
    return given


def _usable(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port  # raises for what is no port
    except ValueError:
        return False
    if parts.path or parts.query or parts.fragment or "@" in parts.netloc or not parts.hostname or port == 0:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _HERE)


def _is_status(body: bytes) -> bool:
    """Whether the API itself said so, and not something before it that knows no such path."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("kind") == "Status"


def _refuse(error: type[MooncacheError], text: str, body: bytes) -> Lease:
    """Raise the error with what the API says of it."""
    try:
        found = json.loads(body)
        said = found.get("message") if isinstance(found, dict) else ""
    except (ValueError, RecursionError):
        said = ""
    words = " ".join(said.split())[:_REASON_CHARACTERS_MAX] if isinstance(said, str) else ""
    raise error(f"{text} It says: {words}" if words else text)

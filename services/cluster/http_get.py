"""One HTTP GET over asyncio streams, bounded in time and size: for probes and metrics of services on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

_ANSWER_BYTES_MAX = 16 << 20


async def http_get(
    address: str, path: str, *, token: str = "", timeout_s: float = 2.0, tls: ssl.SSLContext | None = None
) -> tuple[int, bytes]:
    """Status and body of http://address/path; status 0 when nothing answers in time (the body is empty then).

    With `tls` it is https, and the certificate has to hold for the address.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _get(address, path, token, tls)
    except (OSError, ValueError, IndexError, TimeoutError, asyncio.IncompleteReadError):
        return 0, b""


async def _get(address: str, path: str, token: str, tls: ssl.SSLContext | None) -> tuple[int, bytes]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=1 << 20, ssl=tls)
    try:
        lines = [f"GET {path} HTTP/1.0", f"Host: {address}", "Connection: close"]
        if token:
            lines.append(f"Authorization: Bearer {token}")
        writer.write("\r\n".join((*lines, "", "")).encode("latin-1"))
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        body = bytearray()
        while chunk := await reader.read(65_536):
            body += chunk
            if len(body) > _ANSWER_BYTES_MAX:
                raise ValueError("the answer is too long")
        return status, bytes(body)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

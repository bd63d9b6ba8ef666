"""TLS credentials from the configuration, for gRPC servers and channels.

With `tls.enabled` every port needs a certificate; with `tls.require_client_cert` callers need one too
(mTLS). The data plane reads the same files by itself. TLS comes on top of tokens, it does not replace them.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from mooncache.config import TlsSection
from mooncache.errors import ConfigInvalid

_FILE_BYTES_MAX = 1 << 20


def _read(name: str, path: Path | None) -> bytes:
    if path is None:
        raise ConfigInvalid(f"tls.{name} is not set; with tls.enabled it has to name a PEM file.")
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigInvalid(f"tls.{name}: {path} cannot be read: {error.strerror}.") from None
    if b"-----BEGIN" not in data or len(data) > _FILE_BYTES_MAX:
        raise ConfigInvalid(f"tls.{name}: {path} is not a PEM file.")
    return data


def server_credentials(tls: TlsSection) -> grpc.ServerCredentials | None:
    """Credentials of a listening port, None when TLS is off. Raises ConfigInvalid."""
    if not tls.enabled:
        return None
    pair = (_read("key_file", tls.key_file), _read("cert_file", tls.cert_file))
    client_ca = _read("ca_file", tls.ca_file) if tls.require_client_cert else None
    return grpc.ssl_server_credentials(
        [pair], root_certificates=client_ca, require_client_auth=tls.require_client_cert
    )


def channel_credentials(tls: TlsSection) -> grpc.ChannelCredentials | None:
    """Credentials of a caller, None when TLS is off. Without ca_file the system's authorities count.

    Raises ConfigInvalid.
    """
    if not tls.enabled:
        return None
    roots = _read("ca_file", tls.ca_file) if tls.ca_file else None
    if tls.cert_file is None:
        return grpc.ssl_channel_credentials(root_certificates=roots)
    return grpc.ssl_channel_credentials(
        root_certificates=roots,
        private_key=_read("key_file", tls.key_file),
        certificate_chain=_read("cert_file", tls.cert_file),
    )


def http_server_context(tls: TlsSection) -> ssl.SSLContext | None:
    """For ports that speak HTTP, None when TLS is off. Callers show no certificate there. Raises ConfigInvalid."""
    if not tls.enabled:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load_pair(context, tls)
    return context


def http_client_context(tls: TlsSection) -> ssl.SSLContext | None:
    """For callers of such ports, None when TLS is off. Raises ConfigInvalid."""
    if not tls.enabled:
        return None
    roots = _read("ca_file", tls.ca_file).decode("ascii", "replace") if tls.ca_file else None
    context = ssl.create_default_context(cadata=roots)
    if tls.cert_file is not None:
        _load_pair(context, tls)
    return context


def _load_pair(context: ssl.SSLContext, tls: TlsSection) -> None:
    _read("cert_file", tls.cert_file)
    _read("key_file", tls.key_file)
    try:
        context.load_cert_chain(str(tls.cert_file), str(tls.key_file))
    except ssl.SSLError as error:
        raise ConfigInvalid(
            f"tls.cert_file and tls.key_file do not belong together: {error.reason}."
        ) from None

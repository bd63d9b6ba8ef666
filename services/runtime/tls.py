"""TLS credentials from the configuration, for gRPC servers and channels.

With `tls.enabled` every port needs a certificate; with `tls.require_client_cert` callers need one too
(mTLS). The data plane reads the same files by itself. TLS comes on top of tokens, it does not replace them.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc

from mooncache.config import TlsSection
from mooncache.config.small_files import read_small
from mooncache.errors import ConfigInvalid

if TYPE_CHECKING:
    import urllib.request


def _read(name: str, path: Path | None) -> bytes:
    if path is None:
        raise ConfigInvalid(f"tls.{name} is not set; with tls.enabled it has to name a PEM file.")
    data = read_small(path, f"file tls.{name}", ConfigInvalid)
    if b"-----BEGIN" not in data:
        raise ConfigInvalid(f"tls.{name}: {path} is not a PEM file.")
    return data


def server_credentials(tls: TlsSection) -> grpc.ServerCredentials | None:
    """Credentials of a listening port, None when TLS is off. Raises ConfigInvalid."""
    if not tls.enabled:
        return None
    files = CertificateFiles(tls)

    def present() -> grpc.ServerCertificateConfiguration | None:
        """Called by the library before each handshake. Files that are wrong leave the certificate as it is."""
        try:
            return _configuration(tls) if files.changed() else None
        except ConfigInvalid:
            return None  # the duty `reload_certificates` looks at the same files, and says so

    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", present)  # None is: as it was
    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls), fetch, require_client_authentication=tls.require_client_cert
    )


def _configuration(tls: TlsSection) -> grpc.ServerCertificateConfiguration:
    pair = (_read("key_file", tls.key_file), _read("cert_file", tls.cert_file))
    client_ca = _read("ca_file", tls.ca_file) if tls.require_client_cert else None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=client_ca)


class CertificateFiles:
    """The certificate, key and authority that the configuration names, as files that may be replaced meanwhile."""

    def __init__(self, tls: TlsSection) -> None:
        self._tls = tls
        self._stamps = self._look()

    def changed(self) -> bool:
        """Whether they are others since the last time. Raises ConfigInvalid when they do not belong together.

        Then they count as unchanged, and the next call looks at them again.
        """
        stamps = self._look()
        if stamps == self._stamps or None in stamps:  # one is gone: it is just being replaced
            return False
        self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        self._stamps = stamps
        return True

    def load_into(self, context: ssl.SSLContext) -> None:
        """Have a context show the present certificate. Raises ConfigInvalid."""
        _load_pair(context, self._tls)

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in (self._tls.cert_file, self._tls.key_file, self._tls.ca_file) if path]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is replaced; None when it cannot be seen."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


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


def http_opener(url: str, tls: TlsSection) -> urllib.request.OpenerDirector:
    """For calls to a port of the cluster: past any proxy, and with the cluster's authority. Raises ConfigInvalid."""
    import urllib.request  # every service reads this module, and few call by HTTP

    context = http_client_context(tls) if url.startswith("https:") else None
    secure = [urllib.request.HTTPSHandler(context=context)] if context is not None else []
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *secure)


def _load_pair(context: ssl.SSLContext, tls: TlsSection) -> None:
    _read("cert_file", tls.cert_file)
    _read("key_file", tls.key_file)
    try:
        context.load_cert_chain(str(tls.cert_file), str(tls.key_file))
    except ssl.SSLError as error:
        raise ConfigInvalid(
            f"tls.cert_file and tls.key_file do not belong together: {error.reason}."
        ) from None

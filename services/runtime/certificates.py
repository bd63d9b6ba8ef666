"""Certificates of a small cluster: an authority of its own and one certificate for each host, by the openssl command.

    FOLDER/ca.key          the authority's key: keep it, give it to no host
    FOLDER/ca.pem          the authority: every host needs it
    FOLDER/HOST/           what that host needs: ca.pem, cert.pem, key.pem (0600)

What is there already is kept, so that a host can be added later. A host that makes its own key sends a request instead,
which `sign_request` answers. Operators with an authority of their own need none of this.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mooncache.errors import ConfigInvalid, InvalidArgument, Unsupported

HOSTS_MAX: Final = 1000
DAYS_MAX: Final = 3650
REQUEST_CHARS_MAX: Final = 16_384
NAMES_MAX: Final = 16
_HOST_NAME: Final = re.compile(
    r"[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?)*"
)
_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_TIMEOUT_S: Final = 30.0


def make_certificates(folder: Path, hosts: Sequence[str], *, days: int = 825) -> list[Path]:
    """Make what is missing; returns the hosts' folders. Certificates also hold for localhost.

    Raises:
        InvalidArgument: a host is neither an address nor a name. Unsupported: there is no openssl command.
        ConfigInvalid: the folder cannot be written, or openssl refuses.
    """
    names = alternatives(hosts)
    if not 0 < len(hosts) <= HOSTS_MAX or not 0 < days <= DAYS_MAX:
        raise InvalidArgument(f"Give 1 to {HOSTS_MAX} hosts and 1 to {DAYS_MAX} days.")
    _need_openssl()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / "ca.pem").exists():
            subject = ("-subj", "/CN=mooncache cluster", "-days", str(DAYS_MAX))
            _openssl("req", "-x509", *_KEY, *subject, "-keyout", folder / "ca.key", "-out", folder / "ca.pem")
        made = []
        for host, name in zip(hosts, names, strict=True):
            target = folder / host.replace(":", "_")
            if not (target / "cert.pem").exists():
                _make_host(folder, target, host, name, days)
            made.append(target)
    except OSError as error:
        raise ConfigInvalid(f"{folder} cannot be written: {error.strerror}.") from None
    return made


def make_request(folder: Path, host: str) -> str:
    """Make a key in `folder`, key.pem (0600), and return the request (PEM) for its certificate.

    Raises:
        InvalidArgument, Unsupported, ConfigInvalid: as `make_certificates` does.
    """
    alternatives([host])
    _need_openssl()
    made = folder / "request.pem"
    _openssl("req", *_KEY, "-subj", f"/CN={host[:64]}", "-keyout", folder / "key.pem", "-out", made)
    return made.read_text(encoding="ascii")


def sign_request(folder: Path, request: str, names: Sequence[str], *, days: int = 825) -> str:
    """The certificate (PEM) for a request of another host, by the authority in `folder`, for `names` and localhost.

    Of the request only the public key counts, beside a subject that is read nowhere: the names are those that the
    caller has checked.

    Raises:
        InvalidArgument: no names, too many, or one that is neither an address nor a name; the request is none.
        Unsupported, ConfigInvalid: as `make_certificates` does.
    """
    if not 0 < len(names) <= NAMES_MAX:
        raise InvalidArgument(f"A certificate is for 1 to {NAMES_MAX} names; got {len(names)}.")
    found = alternatives(names)
    begins = request.startswith("-----BEGIN CERTIFICATE REQUEST-----")
    if len(request) > REQUEST_CHARS_MAX or not request.isascii() or not begins:
        raise InvalidArgument("The request for a certificate is not one in PEM.")
    _need_openssl()
    with tempfile.TemporaryDirectory() as made:
        at = Path(made)
        (at / "request").write_text(request, encoding="ascii")
        _sign(folder, at, ",".join(found), days)
        return (at / "cert.pem").read_text(encoding="ascii")


def check_certificate(authority: Path, certificate: Path, host: str) -> None:
    """Raises ConfigInvalid when the certificate is not the authority's, has ended, or does not hold for `host`."""
    _need_openssl()
    by_name = "-verify_ip" if alternatives([host])[0].startswith("IP:") else "-verify_hostname"
    _openssl("verify", "-CAfile", authority, by_name, host, certificate)


def fingerprint(pem: str) -> str:
    """SHA-256 of the first certificate of a PEM text, as people compare it. Raises ConfigInvalid when there is none."""
    return ":".join(f"{byte:02X}" for byte in hashlib.sha256(first_certificate(pem)).digest())


def first_certificate(pem: str) -> bytes:
    """The first certificate of a PEM text as DER. Raises ConfigInvalid when there is none."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    at = pem.find(begin)
    until = pem.find(end, at)
    try:
        if at < 0 or until < 0:
            raise ValueError
        return ssl.PEM_cert_to_DER_cert(pem[at : until + len(end)])
    except ValueError:
        raise ConfigInvalid("The file holds no certificate in PEM.") from None


def alternatives(hosts: Sequence[str]) -> list[str]:
    """Each address or name as a certificate has it. Raises InvalidArgument for what is neither."""
    return [_alternative(host) for host in hosts]


def _need_openssl() -> None:
    if shutil.which("openssl") is None:
        raise Unsupported(
            "The command openssl is not installed; it makes the certificates (package openssl)."
        )


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        pass
    if len(host) > 253 or not _HOST_NAME.fullmatch(host):
        raise InvalidArgument(f"{host[:80]!r} is neither an address nor the name of a host.")
    return f"DNS:{host}"


def _make_host(folder: Path, target: Path, host: str, alternative: str, days: int) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        at = Path(made)
        _openssl("req", *_KEY, "-subj", f"/CN={host[:64]}", "-keyout", at / "key.pem", "-out", at / "request")
        _sign(folder, at, alternative, days)
        shutil.copyfile(folder / "ca.pem", at / "ca.pem")
        target.mkdir(mode=0o700, exist_ok=True)
        for name in ("key.pem", "ca.pem", "cert.pem"):  # the certificate last: with it the host is done
            (at / name).replace(target / name)


def _sign(folder: Path, at: Path, names: str, days: int) -> None:
    """at/request becomes at/cert.pem."""
    loopback = "DNS:localhost,IP:127.0.0.1,IP:::1"
    (at / "extensions").write_text(f"subjectAltName={names},{loopback}\n", encoding="ascii")
    authority = (
        "-CA",
        folder / "ca.pem",
        "-CAkey",
        folder / "ca.key",
        "-set_serial",
        f"0x{os.urandom(16).hex()}",
    )
    signing = ("-days", str(days), "-extfile", at / "extensions", "-out", at / "cert.pem")
    _openssl("x509", "-req", "-in", at / "request", *authority, *signing)


def _openssl(*arguments: str | Path) -> None:
    try:
        done = subprocess.run(
            ["openssl", *map(str, arguments)],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            umask=0o077,
        )
    except subprocess.TimeoutExpired:
        raise ConfigInvalid(f"openssl {arguments[0]} did not end within {_TIMEOUT_S:g} s.") from None
    if done.returncode != 0:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ConfigInvalid(
            f"openssl {arguments[0]} refused: {words[-1][:200] if words else 'no reason given'}"
        )

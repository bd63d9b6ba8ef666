"""Certificates that only tests need."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

_AUTHORITY = """
[ca]
default_ca = tests
[tests]
database = {folder}/index.txt
new_certs_dir = {folder}
serial = {folder}/serial
default_md = sha256
policy = any
x509_extensions = names
unique_subject = no
[any]
commonName = supplied
[names]
subjectAltName = DNS:localhost,IP:127.0.0.1
"""


def expired_certificate(folder: Path, authority: Path) -> tuple[Path, Path]:
    """Certificate and key for localhost, signed by `authority`'s ca.pem and ended in 2021."""
    return certificate_until(folder / "expired", authority, datetime(2021, 1, 1, tzinfo=UTC))


def certificate_until(at: Path, authority: Path, end: datetime) -> tuple[Path, Path]:
    """Certificate and key for localhost in a new folder, signed by `authority`'s ca.pem, which hold until then.

    `ca.key` lies beside ca.pem or one folder above it.
    """
    at.mkdir()
    (at / "index.txt").touch()
    (at / "serial").write_text("01\n")
    (at / "ca.cnf").write_text(_AUTHORITY.format(folder=at))
    ca_key = next(path for path in (authority / "ca.key", authority.parent / "ca.key") if path.exists())
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    made = ("-subj", "/CN=localhost", "-keyout", at / "key.pem", "-out", at / "csr.pem")
    _openssl("req", *curve, *made)
    times = ("-startdate", "20200101000000Z", "-enddate", f"{end.astimezone(UTC):%Y%m%d%H%M%SZ}")
    files = (
        "-cert",
        authority / "ca.pem",
        "-keyfile",
        ca_key,
        "-in",
        at / "csr.pem",
        "-out",
        at / "cert.pem",
    )
    _openssl("ca", "-batch", "-notext", "-config", at / "ca.cnf", *times, *files)
    return at / "cert.pem", at / "key.pem"


def _openssl(*arguments: object) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

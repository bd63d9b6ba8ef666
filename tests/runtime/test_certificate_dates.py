"""Validity of certificates that the openssl command made, and of bytes that are none."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.runtime.certificate_dates import validity, validity_of_file
from mooncache.runtime.certificates import make_certificates
from tests.certificates import expired_certificate

DAY_S = 86_400.0
_REFUSED = r"is not|has|ends|does not match"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (folder,) = make_certificates(tmp_path_factory.mktemp("tls"), ["127.0.0.1"], days=30)
    return folder


def test_validity_is_what_openssl_wrote(made: Path, tmp_path: Path) -> None:
    now_s = time.time()
    begins_s, ends_s = validity_of_file(made / "cert.pem")
    assert now_s - DAY_S < begins_s <= now_s
    assert ends_s - begins_s == 30 * DAY_S
    expired, _ = expired_certificate(tmp_path, made)
    assert validity_of_file(expired) == (1577836800.0, 1609459200.0)  # 2020-01-01, 2021-01-01


def test_files_that_are_no_certificate(made: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello")
    for path in (tmp_path / "x", made / "key.pem"):
        with pytest.raises(ValueError, match="no certificate"):
            validity_of_file(path)
    with pytest.raises(OSError, match="No such file"):
        validity_of_file(tmp_path / "missing")


def test_every_cut_is_refused(made: Path) -> None:
    der = ssl.PEM_cert_to_DER_cert((made / "cert.pem").read_text())
    for end in range(len(der)):
        with pytest.raises(ValueError, match=_REFUSED):
            validity(der[:end])


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=_REFUSED):
        validity(data)

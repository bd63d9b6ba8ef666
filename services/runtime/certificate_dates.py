"""From when until when a certificate is valid, read from its PEM file without a library for certificates.

Only the way to the validity is walked (RFC 5280, section 4.1): the certificate, its first part, and there the field
after the issuer. Everything else is skipped by its length. Bytes are hostile: every length is compared with what is
left.
"""

from __future__ import annotations

from calendar import timegm
from pathlib import Path
from time import strptime
from typing import Final

from mooncache.errors import ConfigInvalid
from mooncache.runtime.certificates import first_certificate

_FILE_BYTES_MAX: Final = 1 << 20
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_TIMES: Final = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
_BEFORE_VALIDITY: Final = 3  # serial number, signature, issuer


def validity_of_file(path: Path) -> tuple[float, float]:
    """Unix times of the first certificate of a PEM file: the first and the last moment of its validity.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no certificate.
    """
    with path.open("rb") as file:
        text = file.read(_FILE_BYTES_MAX).decode("ascii", "replace")
    try:
        der = first_certificate(text)
    except ConfigInvalid:
        raise ValueError("holds no certificate in PEM") from None
    return validity(der)


def validity(der: bytes) -> tuple[float, float]:
    """The same of a certificate in DER. Raises ValueError."""
    signed, _ = _part(_part(der, _SEQUENCE)[0], _SEQUENCE)
    if signed[:1] == bytes([_VERSION]):
        signed = _part(signed)[1]
    for _ in range(_BEFORE_VALIDITY):
        signed = _part(signed)[1]
    dates, _ = _part(signed, _SEQUENCE)
    begins, rest = _time(dates)
    return begins, _time(rest)[0]


def _part(data: bytes, wanted: int = 0) -> tuple[bytes, bytes]:
    """The first element's content, and what follows the element."""
    if len(data) < 2 or (wanted and data[0] != wanted):
        raise ValueError("is not a certificate")
    length, at = data[1], 2
    if length & 0x80:
        count = length & 0x7F
        if not 0 < count <= 4:
            raise ValueError("has a length that makes no sense")
        length, at = int.from_bytes(data[2 : 2 + count], "big"), 2 + count
    if at + length > len(data):
        raise ValueError("ends too early")
    return data[at : at + length], data[at + length :]


def _time(data: bytes) -> tuple[float, bytes]:
    form = _TIMES.get(data[0]) if data else None
    if form is None:
        raise ValueError("has no validity")
    content, rest = _part(data)
    return float(timegm(strptime(content.decode("ascii", "replace"), form))), rest

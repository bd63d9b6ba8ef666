"""Where a port may be opened: on loopback always, beyond it with TLS, or where it is written that it may be without.

Who can read along on a network sees the blocks and texts that pass, whatever callers prove about themselves. So
nothing listens there by accident.
"""

from __future__ import annotations

import contextlib
import ipaddress

from mooncache.config import TlsSection
from mooncache.errors import ConfigInvalid


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a port bound to `host`."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def check_bind(tls: TlsSection, setting: str, host: str) -> None:
    """Raises ConfigInvalid when other machines could reach the port and TLS is off."""
    if is_loopback(host) or tls.enabled or tls.insecure:
        return
    raise ConfigInvalid(
        f"{setting} is {host}, which other machines reach, and TLS is off. Set tls.enabled with certificates "
        "(`mooncache tls init` makes them), or tls.insecure = true where you trust every host on that network."
    )

"""`mooncache tls init`: certificates for the hosts of a small cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mooncache.cli.common import AsJson
from mooncache.reporting.output import EXIT_OK, console, print_json


def init(
    *hosts: Annotated[str, Parameter(help="Addresses or names by which clients reach the hosts.")],
    folder: Annotated[Path, Parameter(help="Folder for the files; existing files are kept.")] = Path("tls"),
    days: Annotated[int, Parameter(help="Validity of the hosts' certificates.")] = 825,
    json: AsJson = False,
) -> int:
    """Make a certificate authority and one certificate for each host, with the openssl command.

    Copy each host's folder to that host, readable only by the user of the processes. Keep the authority's key, ca.key,
    off the hosts: it is needed only to add hosts later.

    For example:

        mooncache tls init 10.0.0.5 10.0.0.6 10.0.0.7
    """
    from mooncache.runtime.certificates import make_certificates

    made = make_certificates(folder.expanduser(), hosts, days=days)
    if json:
        print_json(
            {
                "authority": str(folder / "ca.pem"),
                "hosts": {host: str(at) for host, at in zip(hosts, made, strict=True)},
            }
        )
        return EXIT_OK
    for host, at in zip(hosts, made, strict=True):
        console.print(f"{host}: {at}", markup=False, highlight=False)
    console.print(
        "\nOn every host, with its folder at /etc/mooncache/tls:\n\n[tls]\nenabled = true\n"
        'ca_file = "/etc/mooncache/tls/ca.pem"\ncert_file = "/etc/mooncache/tls/cert.pem"\n'
        'key_file = "/etc/mooncache/tls/key.pem"\nrequire_client_cert = true',
        markup=False,
        highlight=False,
    )
    return EXIT_OK

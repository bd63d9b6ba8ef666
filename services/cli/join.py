"""`mooncache join`: this machine becomes one of another machine's cluster."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mooncache.cli.common import AsJson, seconds_of
from mooncache.reporting.output import EXIT_OK, console, print_json

FirstMachine = Annotated[
    str, Parameter(help="The first machine, HOST[:PORT], as `mooncache invite` printed it.")
]
Code = Annotated[str | None, Parameter(help="The code that it printed; without it you are asked for it.")]
OwnAddress = Annotated[
    str | None, Parameter(help="Address of this machine for the others; default the one from which it calls.")
]
MoreNames = Annotated[
    tuple[str, ...],
    Parameter(negative=(), help="Another name or address for the certificate. Can be repeated."),
]


def join(
    target: FirstMachine,
    *,
    code: Code = None,
    host: OwnAddress = None,
    name: MoreNames = (),
    replace: Annotated[
        bool, Parameter(negative=(), help="Leave the cluster to which this machine belongs now.")
    ] = False,
    timeout: Annotated[str, Parameter(help="Time limit.")] = "30s",
    state_dir: Annotated[
        Path | None, Parameter(help="State folder to fill; default $MOONCACHE_STATE_DIR or ~/.mooncache.")
    ] = None,
    json: AsJson = False,
) -> int:
    """Join the cluster of another machine, where `mooncache invite` waits.

    The private key is made here and stays here. What comes back is the cluster's authority, a certificate for this
    machine, the cluster token, and the addresses and settings of the cluster, all mode 0600 in the state folder. Every
    command here knows the cluster from then on, and TLS is on. Then start what this machine shall do.

    For example:

        mooncache join 10.0.0.5

        mooncache join 10.0.0.5:7900 --code K7QM-2F9X-W4TB-0HND-5VZC --host 10.0.0.6

        mooncache up --role store --role engine --model ~/models/Qwen3-0.6B
    """
    from mooncache.cluster.joining.core.code import parse_code
    from mooncache.cluster.joining.joining import JoiningMachine
    from mooncache.config import load
    from mooncache.errors import InvalidArgument

    timeout_s = seconds_of(timeout, "--timeout", above_0=True)
    if code is None:
        if not sys.stdin.isatty():
            raise InvalidArgument("No code was given, and there is no terminal to ask for it: --code CODE.")
        code = getpass.getpass("Code: ")
    folder = load(overrides={"cluster.state_dir": state_dir}).cluster.state_dir.expanduser().absolute()
    machine = JoiningMachine(folder, host or "", name, replace=replace)
    found = machine.join(target, parse_code(code), timeout_s)
    if json:
        print_json(
            {
                "host": found.host,
                "names": list(found.names),
                "master_targets": list(found.master_targets),
                "conductor_target": found.conductor_target,
                "authority": found.authority,
                "state_dir": str(found.state_dir),
            }
        )
        return EXIT_OK
    lines = (
        f"This machine, {found.host}, has joined the cluster of {', '.join(found.master_targets)}.",
        f"Its authority is {found.authority}. TLS is on. Files: {found.state_dir}",
        "",
        "Start what it shall do, one or several of:",
        "",
        "    mooncache up --role store --capacity 64GiB",
        "    mooncache up --role engine --model DIR      (the same model as there, in a folder of this machine)",
        "    mooncache up --role gateway",
    )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return EXIT_OK

"""`mooncache invite`: let one more machine join the cluster of this one."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mooncache.cli.common import AsJson, Where, seconds_of
from mooncache.cli.watch import Stop
from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, error_console, print_json, print_table

if TYPE_CHECKING:
    from mooncache.cluster.joining.core.invitation import Invitation
    from mooncache.cluster.joining.inviting import InvitationServer, InvitingMachine, Joined
    from mooncache.cluster.joining.records import InvitationRecords

StateFolder = Annotated[
    Path | None, Parameter(help="State folder of the cluster; default $MOONCACHE_STATE_DIR or ~/.mooncache.")
]
_ASK_S = 5.0


def invite(
    *,
    host: Annotated[
        str | None, Parameter(help="Address to listen on for the other machine; default that of the master.")
    ] = None,
    port: Annotated[int | None, Parameter(help="Port for it; default 7900, or any when it is taken.")] = None,
    valid: Annotated[str, Parameter(help="How long the code is good.")] = "15min",
    authority: Annotated[
        Path | None, Parameter(help="Folder with ca.key and ca.pem; default that of `mooncache up --tls`.")
    ] = None,
    state_dir: StateFolder = None,
    json: AsJson = False,
) -> int:
    """Print a code with which one other machine can join this one's cluster, and wait until it has.

    The code is good once and for 15 minutes. The other machine makes its own key and gets a certificate, the cluster
    token and the addresses of the cluster. Ctrl-C takes the code back. The cluster has to run with TLS, at an address
    that the other machine reaches: `mooncache up --tls --host ADDRESS`.

    For example:

        mooncache invite

        mooncache invite --valid 5min --port 7901
    """
    from mooncache.cluster.joining.core.invitation import LIFETIME_S_MAX, LIFETIME_S_MIN, InvitationState
    from mooncache.cluster.joining.first_machine import inviting_machine
    from mooncache.cluster.joining.inviting import InvitationServer
    from mooncache.cluster.joining.messages import JOIN_PORT
    from mooncache.cluster.joining.records import InvitationRecords
    from mooncache.errors import ConfigInvalid, InvalidArgument
    from mooncache.runtime.clock import SystemClock

    lifetime_s = seconds_of(valid, "--valid", above_0=True)
    if not LIFETIME_S_MIN <= lifetime_s <= LIFETIME_S_MAX:
        raise InvalidArgument("--valid must be between 1 s and a day.")
    folder = _folder(state_dir)
    machine, address = inviting_machine(folder, authority, _models_of(state_dir))
    server = InvitationServer(machine, InvitationRecords(folder), SystemClock())
    stop = Stop()
    try:
        target = server.open(host or address, JOIN_PORT if port is None else port, lifetime_s, os.getpid())
    except ConfigInvalid:
        if port is not None:
            raise
        target = server.open(host or address, 0, lifetime_s, os.getpid())
    _show_code(server, machine, target, lifetime_s, as_json=json)
    joined = asyncio.run(server.wait(lambda: stop.asked))
    _show_end(joined, as_json=json)
    return EXIT_OK if joined.invitation.state is InvitationState.USED and joined.confirmed else EXIT_MISS


def list_invitations(*, state_dir: StateFolder = None, json: AsJson = False) -> int:
    """Show the invitations of the last day: open, used and by which machine, expired, revoked or blocked.

    For example:

        mooncache invite list
    """
    found = _records(state_dir).all(time.time())
    if json:
        print_json({"invitations": [_row(one) for one in found]})
        return EXIT_OK
    rows = [
        (one.name, one.target, one.state, one.joined or "-", one.wrong_count, _clock(one.expires_unix_s))
        for one in found
    ]
    print_table("", ("code", "at", "state", "joined", "wrong codes", "good until"), rows)
    return EXIT_OK


def revoke(
    name: Annotated[str, Parameter(help="First group of the code, as `mooncache invite list` shows it.")],
    *,
    state_dir: StateFolder = None,
    json: AsJson = False,
) -> int:
    """Take a code back before it is used.

    A machine that has joined is not removed by this: it has the cluster token (docs/deployment.md says what to do).

    For example:

        mooncache invite revoke K7QM
    """
    from mooncache.cluster.joining.core.invitation import InvitationState

    found = _records(state_dir).revoke(name.upper(), time.time())
    was_open = found.state is InvitationState.OPEN
    if json:
        print_json({"name": found.name, "revoked": was_open, "state": found.state})
    elif was_open:
        console.print(f"revoked {found.name}", markup=False)
    else:
        console.print(f"{found.name} was not open any longer: {found.state}", markup=False)
    return EXIT_OK if was_open else EXIT_MISS


def _folder(state_dir: Path | None) -> Path:
    from mooncache.config import load

    return load(overrides={"cluster.state_dir": state_dir}).cluster.state_dir.expanduser().absolute()


def _records(state_dir: Path | None) -> InvitationRecords:
    from mooncache.cluster.joining.records import InvitationRecords

    return InvitationRecords(_folder(state_dir))


def _models_of(state_dir: Path | None) -> dict[str, str]:
    """Engine and model name of the cluster's engines, where all have the same; empty when none can be asked."""
    from mooncache.errors import MooncacheError
    from mooncache.proto.v1 import conductor_pb2

    where = Where(state_dir=state_dir, timeout=f"{_ASK_S:g}s")
    try:
        answer = where.ask_conductor(
            "ListInstances", conductor_pb2.ListInstancesRequest(), conductor_pb2.ListInstancesResponse
        )
    except MooncacheError:
        return {}  # a pool alone, or no TLS yet, which is refused with its reason
    engines = {view.instance.engine for view in answer.instances}
    models = {view.instance.model for view in answer.instances}
    found = {"worker.engine": engines, "worker.model_name": models}
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def _show_code(
    server: InvitationServer, machine: InvitingMachine, target: str, lifetime_s: float, *, as_json: bool
) -> None:
    from mooncache.cluster.joining.messages import JOIN_PORT
    from mooncache.runtime.certificates import fingerprint

    shown = target.removesuffix(f":{JOIN_PORT}")
    line = f"mooncache join {shown} --code {server.code.text}"
    seen = fingerprint((machine.authority / "ca.pem").read_text(encoding="ascii", errors="replace"))
    if as_json:
        print_json(
            {
                "target": target,
                "code": server.code.text,
                "name": server.code.name,
                "expires_unix_s": server.invitation.expires_unix_s,
                "command": line,
                "authority": seen,
            }
        )
        console.file.flush()
        return
    minutes = lifetime_s / 60
    within = f"{minutes:g} minutes" if minutes >= 1 else f"{lifetime_s:g} seconds"
    console.print(f"On the other machine, within {within}:\n")
    console.print(f"    {line}\n", style="bold", markup=False, soft_wrap=True)
    console.print(f"The code works once. The cluster's authority is {seen}.", style="dim", soft_wrap=True)
    console.print("Waiting for it to join; Ctrl-C takes the code back.", style="dim")


def _show_end(joined: Joined, *, as_json: bool) -> None:
    from mooncache.cluster.joining.core.invitation import WRONG_CODES_MAX, InvitationState

    one = joined.invitation
    if as_json:
        print_json(
            {
                **_row(one),
                "names": list(joined.names),
                "confirmed": joined.confirmed,
                "reason": joined.trouble,
            }
        )
        return
    if joined.trouble:
        error_console.print(joined.trouble, style="red", markup=False, soft_wrap=True)
    elif one.state is InvitationState.USED and joined.confirmed:
        console.print(
            f"{one.joined} has joined. There: mooncache up --role store|engine|gateway", markup=False
        )
    elif one.state is InvitationState.USED:
        text = f"{one.joined} has got everything, but did not say that it is in place. Look there; invite again if not."
        error_console.print(text, style="yellow", markup=False, soft_wrap=True)
    else:
        words = {
            InvitationState.EXPIRED: "No machine joined in time; the code has expired.",
            InvitationState.BLOCKED: f"Blocked: {WRONG_CODES_MAX} wrong codes, or many of other invitations, came. "
            "Someone may be guessing; `mooncache invite` makes a new code.",
        }
        error_console.print(
            words.get(one.state, "The code has been revoked."), style="yellow", soft_wrap=True
        )


def _row(one: Invitation) -> dict[str, Any]:
    return {
        "name": one.name,
        "target": one.target,
        "state": one.state,
        "joined": one.joined,
        "wrong_count": one.wrong_count,
        "created_unix_s": one.created_unix_s,
        "expires_unix_s": one.expires_unix_s,
    }


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))

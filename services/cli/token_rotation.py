"""`mooncache token status`, `rotate` and `withdraw`: the cluster goes over to a new token while it serves."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from mooncache.cli.common import HERE, AsJson, Where
from mooncache.cli.core import token_steps as steps
from mooncache.cli.core.token_steps import ProcessTokens, StepVerdict, TokenUse
from mooncache.errors import ConfigInvalid, InvalidArgument, MooncacheError, Unsupported
from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, human_age, print_json, print_table

if TYPE_CHECKING:
    from mooncache.auth import TokenSet
    from mooncache.client.options import ClientOptions

_ASK_S: Final = 3.0
_POLL_S: Final = 0.5
_ANSWER_BYTES_MAX: Final = 1 << 16
_COPY: Final = (
    "Copy {path} to the hosts of these processes (mode 0600, by rename), then run `{command}` again."
)


def status(*, where: Where = HERE, json: AsJson = False) -> int:
    """Ask every process of the cluster which tokens it accepts, and which one it proves. Tokens are never shown.

    A token is called by its fingerprint. "used" says when a caller last proved it there.

    For example:

        mooncache token status
    """
    path, tokens = _tokens(where)
    rows = _ask(where)
    document = _document(path, tokens, rows)
    if json:
        print_json(document)
    else:
        _show(document)
    return EXIT_MISS if any(row.error or row.problem for row in rows) else EXIT_OK


def rotate(*, where: Where = HERE, json: AsJson = False) -> int:
    """Replace the cluster token without a restart: the new one first beside the old one, then in front of it.

    All processes that use this host's token file follow by themselves. When others are missing, the command says which;
    copy the file to their hosts and run it again: it goes on where it was. `mooncache token withdraw` ends the old one.

    For example:

        mooncache token rotate
    """
    from mooncache.auth import new_cluster_token

    path, tokens = _tokens(where)
    if len(tokens.tokens) == 1:
        _refuse(steps.strangers(tokens, _ask(where)), "The token is not replaced")
        tokens = steps.added(tokens, new_cluster_token())
        _write(path, tokens)
    if tokens.incoming:
        verdict = _wait(where, lambda rows: steps.may_promote(tokens, rows))
        if not verdict.is_free:
            return _left(path, tokens, verdict, "mooncache token rotate", json=json)
        tokens = steps.promoted(tokens)
        _write(path, tokens)
    verdict = _wait(where, lambda rows: steps.not_signing(tokens, rows))
    if not verdict.is_free:
        return _left(path, tokens, verdict, "mooncache token rotate", json=json)
    text = (
        f"Every process signs with {tokens.signing.fingerprint}; {tokens.tokens[-1].fingerprint} is still accepted. "
        "Give clients their new tokens, then run `mooncache token withdraw`."
    )
    return _done(path, tokens, text, json=json)


def withdraw(
    *,
    force: Annotated[
        bool,
        Parameter(negative=(), help="Even while something still needs the old token: it will be refused."),
    ] = False,
    new_salts: Annotated[
        bool,
        Parameter(
            negative=(),
            help="The old token may be known to strangers: requests get new salts, so the cache begins empty.",
        ),
    ] = False,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Take the old token away: from now on it is refused, and tenant tokens that were made from it.

    Refuses while a process still signs with it, an engine was started with it, or clients use it.

    For example:

        mooncache token withdraw
    """
    path, tokens = _tokens(where)
    if len(tokens.tokens) == 1:
        raise InvalidArgument(
            f"{path} holds one token, so none can be withdrawn; `mooncache token rotate` adds one."
        )
    if tokens.incoming:
        raise InvalidArgument(
            "The new token does not sign yet, so the old one is needed; finish `mooncache token rotate` first."
        )
    if not force:
        _refuse(
            _wait(where, lambda rows: steps.may_withdraw(tokens, rows)),
            "The old token is still needed (--force ends it all the same)",
        )
    gone = [token.fingerprint for token in tokens.tokens[1:]]
    tokens = steps.withdrawn(tokens, new_salts=new_salts)
    _write(path, tokens)
    verdict = _wait(where, lambda rows: steps.still_accepting(gone, rows))
    if not verdict.is_free:
        return _left(path, tokens, verdict, "mooncache token status", json=json)
    return _done(path, tokens, f"{gone[0]} is withdrawn: no process accepts it.", json=json)


def _tokens(where: Where) -> tuple[Path, TokenSet]:
    """The token file of this host. Raises ConfigInvalid."""
    from mooncache.auth import load_token_set
    from mooncache.config import load

    config = load(overrides={"cluster.state_dir": where.state_dir, "cluster.token_file": where.token_file})
    return config.cluster.token_path, load_token_set(config.cluster.token_path)


def _write(path: Path, tokens: TokenSet) -> None:
    """Raises ConfigInvalid."""
    from mooncache.auth import replace_token_file

    try:
        replace_token_file(path, tokens)
    except OSError as error:
        raise ConfigInvalid(
            f"The token file {path} cannot be replaced: {error.strerror}. Where it is mounted (Kubernetes), run this "
            "on a copy with --token-file, and put the copy into the Secret."
        ) from None


def _refuse(verdict: StepVerdict, what: str) -> None:
    if not verdict.is_free:
        raise InvalidArgument(f"{what}: {'; '.join(verdict.reasons)}.")


def _wait(where: Where, judge: Callable[[list[ProcessTokens]], StepVerdict]) -> StepVerdict:
    """Ask until nothing speaks against the step, for the time limit at most."""
    until_s = time.monotonic() + where.timeout_s
    while True:
        verdict = judge(_ask(where))
        if verdict.is_free or time.monotonic() >= until_s:
            return verdict
        time.sleep(_POLL_S)


def _left(path: Path, tokens: TokenSet, verdict: StepVerdict, command: str, *, json: bool) -> int:
    """What is missing on other hosts, and what to do."""
    todo = _COPY.format(path=path, command=command)
    if json:
        print_json({**_file(path, tokens), "missing": list(verdict.reasons), "todo": todo})
    else:
        for reason in verdict.reasons:
            console.print(reason, markup=False, highlight=False, soft_wrap=True)
        console.print(todo, markup=False, highlight=False, soft_wrap=True)
    return EXIT_MISS


def _done(path: Path, tokens: TokenSet, text: str, *, json: bool) -> int:
    if json:
        print_json({**_file(path, tokens), "missing": [], "todo": ""})
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK


def _file(path: Path, tokens: TokenSet) -> dict[str, Any]:
    return {
        "token_file": str(path),
        "signs": tokens.signing.fingerprint,
        "accepted": [token.fingerprint for token in tokens.tokens],
        "incoming": tokens.tokens[-1].fingerprint if tokens.incoming else None,
    }


def _document(path: Path, tokens: TokenSet, rows: list[ProcessTokens]) -> dict[str, Any]:
    return {
        **_file(path, tokens),
        "processes": [
            {
                "kind": row.kind,
                "name": row.name,
                "host_name": row.host,
                "signs": row.signs,
                "accepted": [
                    {
                        "fingerprint": use.fingerprint,
                        "used_age_s": use.used_age_s,
                        "connections": use.connections,
                    }
                    for use in row.uses
                ],
                "engine_token": row.engine_token,
                "problem": row.problem,
                "error": row.error,
            }
            for row in rows
        ],
    }


def _show(document: dict[str, Any]) -> None:
    accepted = ", ".join(document["accepted"])
    console.print(
        f"{document['token_file']}: signs with {document['signs']}, accepts {accepted}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    rows = []
    for row in document["processes"]:
        uses = [
            f"{use['fingerprint']} "
            + ("unused" if use["used_age_s"] is None else f"used {human_age(use['used_age_s'])} ago")
            + (f", {use['connections']} connections" if use["connections"] else "")
            for use in row["accepted"]
        ]
        engine, problem = row["engine_token"], row["error"] or row["problem"]
        rows.append(
            (row["kind"], row["name"], row["host_name"], row["signs"], "\n".join(uses), engine, problem)
        )
    columns = ("process", "name", "host", "signs", "accepts", "engine", "problem")
    print_table("tokens", columns, rows)


def _ask(where: Where) -> list[ProcessTokens]:
    """What each process of the cluster says. Raises MooncacheError when neither conductor nor master answers."""
    from mooncache.client.options import ClientOptions

    options = ClientOptions.gather(**where.settings())

    async def run() -> list[ProcessTokens]:
        members = await _members(where, options)
        return list(await asyncio.gather(*(_ask_one(options, member) for member in members)))

    return asyncio.run(run())


async def _members(where: Where, options: ClientOptions) -> list[dict[str, Any]]:
    """Processes that should answer, as the conductor lists them; without one those that a master knows."""
    from mooncache.cli.member_rows import member_rows, pool_rows
    from mooncache.client.master_link import MasterLink
    from mooncache.proto.v1 import conductor_pb2, master_pb2
    from mooncache.runtime.clock import SystemClock

    if where.conductor_target():
        conductor = where.conductor_channel()
        try:
            listed = await conductor.call(
                "ListMembers",
                conductor_pb2.ListMembersRequest(),
                conductor_pb2.ListMembersResponse,
                where.timeout_s,
            )
        finally:
            await conductor.close()
        rows = member_rows(listed)
    else:
        link = MasterLink(options.targets, options.master_channel, SystemClock(), random.Random())
        try:
            found = await link.call(
                "GetStatus", master_pb2.GetStatusRequest(), master_pb2.GetStatusResponse, where.timeout_s
            )
        finally:
            await link.close()
        rows = pool_rows(found)
    return [row for row in rows if row["state"] not in ("gone", "stopped", "dead")]


async def _ask_one(options: ClientOptions, member: dict[str, Any]) -> ProcessTokens:
    """One process; what does not answer has an error in its row."""
    from mooncache.proto.v1 import process_pb2 as pb

    kind, name, host = str(member["kind"]), str(member["name"]), str(member["host_name"])
    try:
        if member["address"].startswith("http"):
            found = await asyncio.to_thread(_ask_gateway, options, member["address"])
        elif "://" in member["address"]:
            raise Unsupported("it has no port that could be asked; look into its log (auth.tokens_changed)")
        else:
            found = await _ask_control_port(options, member["address"])
    except Unsupported as error:
        text = error.message if "no port" in error.message else "its version knows one token alone"
        return ProcessTokens(kind, name, host, error=text)
    except MooncacheError as error:
        return ProcessTokens(kind, name, host, error=error.message)
    uses = tuple(_use(use) for use in found.tokens)
    assert isinstance(found, pb.GetTokensResponse)
    return ProcessTokens(kind, name, host, uses, found.engine_token, found.problem)


def _use(use: Any) -> TokenUse:
    age_s = use.used_age_ms / 1e3 if use.HasField("used_age_ms") else None
    return TokenUse(use.fingerprint, age_s, use.connections)


async def _ask_control_port(options: ClientOptions, target: str) -> Any:
    from mooncache.errors import NodeUnavailable
    from mooncache.proto.v1 import process_pb2 as pb
    from mooncache.runtime.grpc_channel import GrpcChannel
    from mooncache.runtime.rpc import PROCESS_SERVICE
    from mooncache.runtime.tls import channel_credentials

    channel = GrpcChannel(
        target,
        PROCESS_SERVICE,
        token=options.token,
        credentials=channel_credentials(options.tls),
        unavailable_error=NodeUnavailable,
        server_name=options.tls.server_name,
    )
    try:
        return await channel.call("GetTokens", pb.GetTokensRequest(), pb.GetTokensResponse, _ASK_S)
    finally:
        await channel.close()


def _ask_gateway(options: ClientOptions, url: str) -> Any:
    """Raises MooncacheError: it does not answer, or would have to be shown the token on a network without TLS."""
    import urllib.error
    import urllib.request
    from urllib.parse import urlsplit

    from mooncache.errors import NodeUnavailable, PermissionDenied
    from mooncache.proto.v1 import process_pb2 as pb
    from mooncache.runtime.bind import is_loopback
    from mooncache.runtime.tls import http_opener

    if not url.startswith("https:") and not (
        is_loopback(urlsplit(url).hostname or "") or options.tls.insecure
    ):
        raise PermissionDenied(
            f"{url} has no TLS, and the token is not shown on a network; ask on its own host"
        )
    request = urllib.request.Request(url + "/tokens", headers={"Authorization": f"Bearer {options.token}"})  # noqa: S310
    try:
        with http_opener(url, options.tls).open(request, timeout=_ASK_S) as answer:
            said = loads(answer.read(_ANSWER_BYTES_MAX))
        return pb.GetTokensResponse(
            tokens=[pb.TokenUse(**use) for use in said["tokens"]], problem=said["problem"]
        )
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise Unsupported("the gateway is of an earlier version") from None
        raise NodeUnavailable(f"{url}/tokens answered {error.code}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise NodeUnavailable(f"{url} did not answer: {getattr(error, 'reason', error)}") from None

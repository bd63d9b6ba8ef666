"""`mooncache tenant ls | set | purge | check`: what tenants hold in the pool, what they may have, and their end."""

from __future__ import annotations

import hmac
import json as jsonlib
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from mooncache.cli.accounts import ACCOUNTS_DIR_HELP, Accounts
from mooncache.cli.common import HERE, WHERE, AsJson, Where
from mooncache.cli.request_limits import (
    REQUEST_OPTIONS,
    UNCHANGED,
    RequestLimitOptions,
    limits_text,
)
from mooncache.errors import OK, InvalidArgument, error_for
from mooncache.reporting.output import EXIT_MISS, EXIT_OK, console, human_bytes, print_json, print_table

if TYPE_CHECKING:
    from mooncache.proto.v1 import master_pb2
    from mooncache.runtime.tenant_limits import TenantLimits

Name = Annotated[str, Parameter(help="Name of the tenant.")]
_RECEIPT_PREFIX: Final = b"mooncache receipt v1\0"
_OTHERS: Final = "(others)"
_METHOD: Final = "overwritten with zeros where they lay; copies evicted or removed before are not among them"
_METHOD_KEYS: Final = (
    "; nodes with keys_erased have deleted the keys, without which encrypted copies are unreadable"
)
_FILE_BYTES_MAX: Final = 16 << 20


def ls(*, where: Where = HERE, json: AsJson = False) -> int:
    """List tenants: what they hold in memory and on disks, their hits and moves, and what they may have.

    Figures are sums over all nodes since each node's start; limits hold on each node. Needs the cluster token.

    For example:

        mooncache tenant ls
    """
    document = _document(where.ask_master(lambda link: _list(link, where.timeout_s)))
    if json:
        print_json(document)
        return EXIT_OK
    columns = [
        "tenant",
        "memory",
        "blocks",
        "disk",
        "hits",
        "misses",
        "stored",
        "down/up",
        "GiB h",
        "quota",
        "share",
        "copies",
        "encrypted",
    ]
    print_table("", columns, [_row(name, row) for name, row in document["tenants"].items()])
    return EXIT_OK


def set_limits(
    name: Name,
    /,
    *,
    quota: Annotated[
        str | None, Parameter(help='Most bytes in memory of each node, as "8GiB"; 0: no limit.')
    ] = None,
    share: Annotated[
        str | None, Parameter(help="Bytes in memory of each node that are not evicted for others; 0: none.")
    ] = None,
    disk_quota: Annotated[
        str | None, Parameter(help="Most bytes on the disks of each node; 0: no limit.")
    ] = None,
    disk_share: Annotated[
        str | None, Parameter(help="Bytes on each disk that are not given up for others; 0: none.")
    ] = None,
    rate: Annotated[
        str | None, Parameter(help="Bytes of puts and gets in a second, on each node; 0: no limit.")
    ] = None,
    ttl: Annotated[
        str | None,
        Parameter(help='Age at which a block is removed, as "12h"; it is not kept on disks then. 0: none.'),
    ] = None,
    replicas: Annotated[
        int | None, Parameter(help="Copies of each of its blocks in the pool; 0: as master.replicas says.")
    ] = None,
    encrypted: Annotated[
        bool | None,
        Parameter(
            help="Whether its blocks go to disks encrypted or not at all, also where a key is missing."
        ),
    ] = None,
    requests: RequestLimitOptions = UNCHANGED,
    accounts_dir: Annotated[str | None, Parameter(group=WHERE, help=ACCOUNTS_DIR_HELP)] = None,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Set what a tenant may have, without a restart; what is not named stays as it is.

    What it may have in the pool holds on all nodes. Limits on its requests are kept on this host, for its gateways;
    they are in force within two seconds and hold over all gateways. Encryption keys are files of the nodes, which
    `mooncache tenant new-key` makes.

    For example:

        mooncache tenant set team-a --quota 8GiB --share 2GiB

        mooncache tenant set team-a --requests-per-minute 600 --tokens-under-way 200000

        mooncache tenant set team-a --priority 2

        mooncache tenant set team-a --replicas 2

        mooncache tenant set team-a --encrypted
    """
    given = _given(quota, share, disk_quota, disk_share, rate, ttl, replicas, encrypted)
    if not given and not requests.given():
        raise InvalidArgument(
            "Name at least one of --quota, --share, --disk-quota, --disk-share, --rate, --ttl, --replicas, "
            f"--encrypted, {', '.join(REQUEST_OPTIONS)}."
        )
    document, lines = _set_all(name, given, requests, where, accounts_dir)
    if json:
        print_json(document)
    else:
        console.print("\n".join(f"{name}: {line}" for line in lines), markup=False, highlight=False)
    return EXIT_OK


def purge(
    name: Name,
    /,
    *,
    yes: Annotated[bool, Parameter(negative=(), help="Do it; without this nothing happens.")] = False,
    erase_keys: Annotated[
        bool,
        Parameter(negative=(), help="Nodes delete the tenant's key files, too: then no copy can be read."),
    ] = False,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Remove all blocks of a tenant from every node, overwrite their bytes, and print a receipt.

    The exit code is 0 when every node has done it. What was evicted or removed before is overwritten when its place is
    used again; where the tenant's blocks are encrypted, --erase-keys makes these copies, and those in backups of a
    disk, unreadable now. `mooncache tenant check` proves a receipt that was written with --json.

    For example:

        mooncache tenant purge team-a --yes --timeout 5min --json > receipt.json
    """
    if not yes:
        raise InvalidArgument(f"This removes every block of {name} for good. Add --yes to do it.")
    receipt = where.ask_master(lambda link: _purge(link, name, where.timeout_s, erase_keys=erase_keys))
    receipt["proof"] = _proof(receipt, where)
    if json:
        print_json(receipt)
    else:
        for node in receipt["nodes"]:
            console.print(_purged_text(node), markup=False, highlight=False)
        console.print(f"proof {receipt['proof']}", markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK if receipt["complete"] else EXIT_MISS


def check(
    file: Annotated[Path, Parameter(help="Receipt, as `mooncache tenant purge --json` printed it.")],
    /,
    *,
    where: Where = HERE,
) -> int:
    """Check that this cluster made a receipt and that nothing in it was changed. Needs the cluster token.

    For example:

        mooncache tenant check receipt.json
    """
    receipt = _read_receipt(file)
    proof = receipt.pop("proof", "")
    is_ours = isinstance(proof, str) and hmac.compare_digest(proof, _proof(receipt, where))
    console.print(
        "the receipt is sound" if is_ours else "this is no receipt of this cluster, or it was changed"
    )
    return EXIT_OK if is_ours else EXIT_MISS


def _read_receipt(file: Path) -> dict[str, Any]:
    try:
        with file.open(encoding="utf-8") as opened:
            found = jsonlib.loads(opened.read(_FILE_BYTES_MAX))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{file} is no receipt: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"{file} is no receipt.")
    return found


def _proof(receipt: Mapping[str, Any], where: Where) -> str:
    """What only a holder of the cluster token can make. Raises InvalidArgument without it."""
    from mooncache.auth import keyed_hash, parse_token
    from mooncache.client.options import ClientOptions

    token = parse_token(ClientOptions.gather(**where.settings()).token)
    if not token.admin:
        raise InvalidArgument("Receipts are made and checked with the cluster token; this is a tenant token.")
    text = jsonlib.dumps(receipt, sort_keys=True, separators=(",", ":"))
    return keyed_hash(token.key, _RECEIPT_PREFIX + text.encode()).hex()


def _given(
    quota: str | None,
    share: str | None,
    disk_quota: str | None,
    disk_share: str | None,
    rate: str | None,
    ttl: str | None,
    replicas: int | None,
    encrypted: bool | None,
) -> dict[str, int]:
    """The limits that were named."""
    from mooncache.config.units import parse_duration_s, parse_size_bytes
    from mooncache.runtime.tenant_limits import REPLICAS_MAX

    sizes = {
        "memory_quota_bytes": quota,
        "memory_share_bytes": share,
        "disk_quota_bytes": disk_quota,
        "disk_share_bytes": disk_share,
        "bytes_per_s": rate,
    }
    found = {key: parse_size_bytes(text) for key, text in sizes.items() if text is not None}
    if ttl is not None:
        found["ttl_ms"] = round(parse_duration_s(ttl) * 1e3)
    if replicas is not None:
        if not 0 <= replicas <= REPLICAS_MAX:
            raise InvalidArgument(f"--replicas must be from 0 to {REPLICAS_MAX}.")
        found["replicas"] = replicas
    if encrypted is not None:
        found["encrypted"] = int(encrypted)
    return found


def _set_all(
    name: str,
    given: Mapping[str, int],
    requests: RequestLimitOptions,
    where: Where,
    accounts_dir: str | None,
) -> tuple[dict[str, Any], list[str]]:
    """Set what was named, at the nodes and on this host; what to print of it."""
    document: dict[str, Any] = {"tenant": name}
    lines = []
    if given:
        version, nodes, limits = where.ask_master(lambda link: _set(link, name, given, where.timeout_s))
        document |= {"version": version, "node_ids": nodes, **asdict(limits)}
        lines.append(f"{limits_text(asdict(limits))}; in force on {', '.join(nodes) or 'no node yet'}")
    if changed := requests.given():
        from mooncache.accounts.limit_store import change_limits

        with Accounts(accounts_dir, where.state_dir).opened() as place:
            document["requests"] = of_requests = asdict(change_limits(place, name, "", changed))
        lines.append(f"{limits_text(of_requests)} over all gateways; in force here within two seconds")
    return document, lines


async def _list(link: Any, timeout_s: float) -> master_pb2.ListTenantsResponse:
    from mooncache.proto.v1 import master_pb2

    asked, answer = master_pb2.ListTenantsRequest(), master_pb2.ListTenantsResponse
    found: master_pb2.ListTenantsResponse = await link.call("ListTenants", asked, answer, timeout_s)
    return found


async def _set(
    link: Any, name: str, given: Mapping[str, int], timeout_s: float
) -> tuple[int, list[str], TenantLimits]:
    from mooncache.proto.v1 import common_pb2, master_pb2
    from mooncache.runtime.tenant_limits import TenantLimits, TenantTable

    table = TenantTable.from_message((await _list(link, timeout_s)).table)
    limits = replace(table.tenants.get(name, TenantLimits()), **given)
    asked = master_pb2.SetTenantRequest(limits=common_pb2.TenantLimits(tenant=name, **asdict(limits)))
    answer = await link.call("SetTenant", asked, master_pb2.SetTenantResponse, timeout_s)
    return answer.version, list(answer.node_ids), limits


async def _purge(link: Any, name: str, timeout_s: float, *, erase_keys: bool) -> dict[str, Any]:
    from mooncache.proto.v1 import master_pb2

    asked = master_pb2.PurgeTenantRequest(tenant=name, erase_keys=erase_keys)
    answer = master_pb2.PurgeTenantResponse
    began_s = time.time()
    found: master_pb2.PurgeTenantResponse = await link.call("PurgeTenant", asked, answer, timeout_s)
    nodes = [
        {
            "node_id": node.node_id,
            "code": node.code,
            "reason": "" if node.code == OK else error_for(node.code).name,
            "blocks": node.blocks,
            "bytes": node.bytes,
            "disk_blocks": node.disk_blocks,
            "disk_bytes": node.disk_bytes,
            "held_blocks": node.held_blocks,
            "failed_blocks": node.failed_blocks,
            "ended_unix_ms": node.ended_wall_ms,
            "keys_erased": node.keys_erased,
            "erased_key_ids": list(node.erased_key_ids),
        }
        for node in found.purges
    ]
    return {
        "tenant": name,
        "asked_unix_ms": round(began_s * 1e3),
        "complete": bool(nodes) and all(node["code"] == OK for node in nodes),
        "method": _METHOD + (_METHOD_KEYS if erase_keys else ""),
        "nodes": nodes,
    }


def _purged_text(node: Mapping[str, Any]) -> str:
    text = (
        f"{node['node_id']}: {node['blocks']} blocks ({human_bytes(node['bytes'])}) in memory and "
        f"{node['disk_blocks']} ({human_bytes(node['disk_bytes'])}) on disks overwritten"
    )
    if node["keys_erased"]:
        text += f", keys deleted ({' '.join(node['erased_key_ids']) or 'none was left'})"
    return (
        text
        if node["code"] == OK
        else f"{text}; not complete: {node['reason']}, {node['held_blocks']} in use"
    )


def _document(found: master_pb2.ListTenantsResponse) -> dict[str, Any]:
    """Sums over all nodes, by tenant; those that hold most come first."""
    from mooncache.runtime.tenant_limits import TenantLimits, TenantTable

    table = TenantTable.from_message(found.table)
    tenants: dict[str, dict[str, Any]] = {}
    for node in found.nodes:
        for row in node.tenants:
            sums = tenants.setdefault(row.tenant or _OTHERS, {})
            for key, value in row.figures.items():
                sums[key] = sums.get(key, 0) + value
    for name in table.tenants:
        tenants.setdefault(name, {})
    ranked = sorted(
        tenants, key=lambda name: (-tenants[name].get("bytes", 0) - tenants[name].get("disk_bytes", 0), name)
    )
    return {
        "version": table.version,
        "node_ids": sorted(node.node_id for node in found.nodes),
        "tenants": {
            name: {"figures": tenants[name], "limits": asdict(table.tenants.get(name, TenantLimits()))}
            for name in ranked
            if tenants[name].get("stored_blocks", 1) or tenants[name].get("bytes") or name in table.tenants
        },
    }


def _row(name: str, row: Mapping[str, Any]) -> list[str]:
    figures, limits = row["figures"], row["limits"]

    def size(key: str) -> str:
        return human_bytes(figures.get(key, 0))

    gib_hours = (figures.get("byte_ms", 0) + figures.get("disk_byte_ms", 0)) / (1 << 30) / 3_600_000
    return [
        name,
        size("bytes"),
        str(figures.get("blocks", 0)),
        size("disk_bytes"),
        str(figures.get("hits", 0)),
        str(figures.get("misses", 0)),
        size("stored_bytes"),
        f"{size('down_bytes')} / {size('up_bytes')}",
        f"{gib_hours:.3f}",
        human_bytes(limits["memory_quota_bytes"]) if limits["memory_quota_bytes"] else "-",
        human_bytes(limits["memory_share_bytes"]) if limits["memory_share_bytes"] else "-",
        str(limits["replicas"]) if limits["replicas"] else "-",
        "always" if limits["encrypted"] else "-",
    ]

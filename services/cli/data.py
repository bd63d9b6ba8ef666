"""Commands for blocks: put, get, ls, stat, rm, pin, unpin."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from mooncache.cli.common import HERE, AsJson, Where, seconds_of
from mooncache.cli.writers import origin_of, origin_text
from mooncache.client.keys import to_block_key
from mooncache.client.results import BatchResult
from mooncache.errors import FewerReplicas, InvalidArgument, NotFound, code_name
from mooncache.reporting.output import (
    EXIT_MISS,
    EXIT_OK,
    console,
    error_console,
    human_age,
    human_bytes,
    print_json,
    print_table,
)

MAX_VALUE_BYTES = 1 << 30
_HEX_KEY = re.compile(r"0x[0-9a-fA-F]{64}")

KeyText = Annotated[str, Parameter(help="Name of the block, or 0x and 64 hex digits for a block key.")]
KeyTexts = Annotated[str, Parameter(help="Names of blocks, or block keys in hex (0x…).")]


def to_key(text: str) -> str | bytes:
    """A key as written on the command line."""
    if _HEX_KEY.fullmatch(text):
        return bytes.fromhex(text[2:])
    if text.startswith("0x") and len(text) >= 60:
        raise InvalidArgument(
            f"A block key is 0x and exactly 64 hex digits; got {len(text) - 2} characters after 0x."
        )
    return text


def _read_value(value: str | None, file: Path | None) -> bytes:
    if (value is None) == (file is None):
        raise InvalidArgument("Give either a VALUE or --file PATH (- reads standard input).")
    if value is not None:
        return value.encode()
    assert file is not None
    try:
        if str(file) == "-":
            data = sys.stdin.buffer.read(MAX_VALUE_BYTES + 1)
        else:
            with file.open("rb") as source:
                data = source.read(MAX_VALUE_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be read: {error.strerror}.") from None
    if len(data) > MAX_VALUE_BYTES:
        raise InvalidArgument("A block has at most 1 GiB. Split the file.")
    return data


def put(
    key: KeyText,
    value: Annotated[str | None, Parameter(help="The value, as text.")] = None,
    /,
    *,
    file: Annotated[
        Path | None,
        Parameter(
            name=["--file", "-f"], allow_leading_hyphen=True, help="Read the value from a file; - is stdin."
        ),
    ] = None,
    replicas: Annotated[int, Parameter(help="Number of nodes to store it on.")] = 1,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Store a block.

    For example:

        mooncache put greeting hello

        mooncache put model-notes --file notes.bin --replicas 2
    """
    data = _read_value(value, file)
    with where.connect() as client:
        result = client.put_many([to_key(key)], [data], replicas=replicas)
        result.raise_for_errors()
        created, node, code = result.created[0], result.node_ids[0], result.codes[0]
    if json:
        print_json(
            {
                "key": key,
                "size_bytes": len(data),
                "created": created,
                "node_id": node,
                "code": code_name(code),
            }
        )
        return EXIT_OK
    if created:
        console.print(f"stored {human_bytes(len(data))} on {node}")
    else:
        console.print("the pool holds this key already; nothing was stored")
    if code == FewerReplicas.code:
        console.print(f"{FewerReplicas.name}: fewer than {replicas} nodes took it", style="yellow")
    return EXIT_OK


def get(
    key: KeyText,
    /,
    *,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"], help="Write the bytes to a file.")] = None,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Print a block's bytes, checked against their checksum. Exit code 1 when the pool does not have it.

    For example:

        mooncache get greeting

        mooncache get model-notes --out notes.bin
    """
    with where.connect() as client:
        data = client.get(to_key(key))
    if out is not None and data is not None:
        try:
            out.write_bytes(data)
        except OSError as error:
            raise InvalidArgument(f"{out} cannot be written: {error.strerror}.") from None
    if json:
        document: dict[str, object] = {"key": key, "found": data is not None}
        if data is not None:
            document["size_bytes"] = len(data)
            if out is None:
                import base64

                document["value_base64"] = base64.b64encode(data).decode()
        print_json(document)
    elif data is None:
        error_console.print("not found", style="yellow")
    elif out is not None:
        console.print(f"wrote {human_bytes(len(data))} to {out}")
    else:
        sys.stdout.buffer.write(data)
        if sys.stdout.isatty():
            sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()
    return EXIT_OK if data is not None else EXIT_MISS


def ls(
    *,
    limit: Annotated[int, Parameter(help="Most entries to list.")] = 100,
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """List the tenant's blocks, node by node. The pool keeps block keys only, not the names they were made from.

    For example:

        mooncache ls --limit 20
    """
    if not 1 <= limit <= 1_000_000:
        raise InvalidArgument(f"--limit must be between 1 and 1000000; got {limit}.")
    with where.connect() as client:
        entries = list(client.list(limit=limit))
    if json:
        rows = [
            {
                "key": "0x" + e.key.hex(),
                "size_bytes": e.size_bytes,
                "tier": e.tier,
                "hits": e.hits,
                "node_id": e.node_id,
            }
            for e in entries
        ]
        print_json({"blocks": rows})
    elif entries:
        print_table(
            f"{len(entries)} blocks",
            ("key", "size", "tier", "hits", "node"),
            [("0x" + e.key.hex(), human_bytes(e.size_bytes), e.tier, e.hits, e.node_id) for e in entries],
        )
    else:
        console.print("no blocks")
    return EXIT_OK


def stat(key: KeyText, /, *, where: Where = HERE, json: AsJson = False) -> int:
    """Show size, checksum, pins, hits and age of a block, and the nodes with a copy, the one that is read first first.
    With the cluster token also who wrote it, and when. Exit code 1 when the pool does not have it.

    For example:

        mooncache stat greeting
    """
    with where.connect() as client:
        found = client.stat(to_key(key))
        tenant = client.tenant
    origin = (
        origin_of(where, tenant, to_block_key(to_key(key)), found.node_ids) if found is not None else None
    )
    if json:
        document: dict[str, Any] = {"key": key, "found": found is not None}
        if found is not None:
            document |= {
                "size_bytes": found.size_bytes,
                "crc32c": f"{found.crc32c:08x}",
                "tier": found.tier,
                "pins": found.pins,
                "hits": found.hits,
                "age_s": found.age_s,
                "node_ids": list(found.node_ids),
                "tiers": list(found.tiers),
                "origin": origin,
            }
        print_json(document)
    elif found is None:
        error_console.print("not found", style="yellow")
    else:
        print_table(
            key,
            ("size", "crc32c", "pins", "hits", "age", "nodes"),
            [
                (
                    human_bytes(found.size_bytes),
                    f"{found.crc32c:08x}",
                    found.pins,
                    found.hits,
                    human_age(found.age_s),
                    ", ".join(
                        f"{node} ({tier})" for node, tier in zip(found.node_ids, found.tiers, strict=True)
                    ),
                )
            ],
        )
        if origin is not None:
            console.print(origin_text(origin), markup=False, soft_wrap=True)
    return EXIT_OK if found is not None else EXIT_MISS


def _change(keys: tuple[str, ...], result: BatchResult, done: str, *, as_json: bool) -> int:
    """Report a batch change; exit code 1 when some key was missing, the error's own when one failed."""
    if as_json:
        print_json({"results": [{"key": k, "code": c} for k, c in zip(keys, result.codes, strict=True)]})
    else:
        for key, code in zip(keys, result.codes, strict=True):
            if code == 0:
                console.print(f"{done} {key}", markup=False)
            elif code == NotFound.code:
                error_console.print(f"not found: {key}", markup=False)
    if result.errors and not as_json:
        result.raise_for_errors()
    return EXIT_OK if all(code == 0 for code in result.codes) else EXIT_MISS


def rm(*keys: KeyTexts, where: Where = HERE, json: AsJson = False) -> int:
    """Remove blocks from every node. Exit code 1 when one of them was not there.

    For example:

        mooncache rm greeting model-notes
    """
    _some(keys)
    with where.connect() as client:
        return _change(keys, client.remove_many([to_key(key) for key in keys]), "removed", as_json=json)


def pin(
    *keys: KeyTexts,
    ttl: Annotated[str, Parameter(help='How long, for example "10min".')] = "10min",
    where: Where = HERE,
    json: AsJson = False,
) -> int:
    """Keep blocks from eviction for a while.

    For example:

        mooncache pin system-prompt --ttl 1h
    """
    _some(keys)
    ttl_s = seconds_of(ttl, "--ttl")
    with where.connect() as client:
        return _change(
            keys, client.pin_many([to_key(key) for key in keys], ttl_s=ttl_s), "pinned", as_json=json
        )


def unpin(*keys: KeyTexts, where: Where = HERE, json: AsJson = False) -> int:
    """Allow the eviction of pinned blocks again.

    For example:

        mooncache unpin system-prompt
    """
    _some(keys)
    with where.connect() as client:
        return _change(keys, client.unpin_many([to_key(key) for key in keys]), "unpinned", as_json=json)


def _some(keys: tuple[str, ...]) -> None:
    if not keys:
        raise InvalidArgument("Name at least one block.")

"""Blocks of the doctor's own: one to each node and back, and those that engines saved of the doctor's prompt."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from mooncache.cli.doctor.core.facts import BlockProbe
from mooncache.errors import OK, MooncacheError, error_for

if TYPE_CHECKING:
    from mooncache.client.sync import Client

_BLOCK_BYTES: Final = 64 << 10
_AT_ONCE: Final = 16
_POLL_S: Final = 0.1


def probe_nodes(client: Client, nodes: Sequence[str], timeout_s: float) -> dict[str, BlockProbe]:
    """Write a block to each node, read it back, compare, remove it. Blocks for about `timeout_s` at most."""
    deadline_s = time.monotonic() + timeout_s
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="doctor-probe") as threads:
        begun = {node: threads.submit(_probe, client, node, deadline_s) for node in nodes}
    return {node: probe.result() for node, probe in begun.items()}


def _probe(client: Client, node: str, deadline_s: float) -> BlockProbe:
    key, data = f"mooncache-doctor-{secrets.token_hex(8)}", secrets.token_bytes(_BLOCK_BYTES)

    def left_s() -> float:
        return max(0.05, (deadline_s - time.monotonic()) / 2)

    began_s = time.monotonic()
    try:
        put = client.put_many([key], [data], replicas=1, timeout_s=left_s(), prefer_node=node)
        put_s = time.monotonic() - began_s
        if put.codes[0] != OK:
            return BlockProbe(f"put: {error_for(put.codes[0]).message}")
        if put.node_ids[0] != node:
            return BlockProbe(f"put: it did not take the block, which went to {put.node_ids[0] or 'no node'}")
        began_s = time.monotonic()
        got = client.get_many([key], timeout_s=left_s())
        get_s = time.monotonic() - began_s
        if got.codes[0] != OK:
            return BlockProbe(f"get: {error_for(got.codes[0]).message}", put_s * 1e3)
        if got.values[0] != data:
            return BlockProbe("get: other bytes came back", put_s * 1e3, get_s * 1e3)
        return BlockProbe("", put_s * 1e3, get_s * 1e3)
    except MooncacheError as error:
        return BlockProbe(error.message)
    finally:
        _remove(client, [key])


def count_saved(
    client: Client, keys_by_writer: Mapping[str, Sequence[bytes]], timeout_s: float, stop: threading.Event
) -> dict[str, int]:
    """How many leading keys of each engine the pool has. Engines save while they go on, so it is asked until all are
    there or the time is over; what is there is then removed."""
    deadline_s = time.monotonic() + timeout_s
    found = dict.fromkeys(keys_by_writer, 0)
    try:
        while True:
            for writer, keys in keys_by_writer.items():
                if found[writer] < len(keys):
                    present = client.exists_many(keys, timeout_s=1.0)
                    found[writer] = next(
                        (at for at, is_there in enumerate(present) if not is_there), len(keys)
                    )
            whole = all(found[writer] == len(keys) for writer, keys in keys_by_writer.items())
            if whole or time.monotonic() >= deadline_s or stop.wait(_POLL_S):
                return found
    finally:
        _remove(client, [key for keys in keys_by_writer.values() for key in keys])


def _remove(client: Client, keys: Sequence[str | bytes]) -> None:
    try:
        if keys:
            client.remove_many(keys, timeout_s=1.0)
    except MooncacheError:
        pass  # small blocks without a reader: they are evicted first

"""A tenant that wants four times its share: what others of the same node still hit, over what they hit alone.

Three tenants with a reserved share each ask for blocks of their own and store what is missing, over sessions of their
own at one node. Then a fourth one does so, too, four times as often and with a working set of four times its share:
with shares, and on a node without any, for comparison. The order of requests is the same in all three runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import mooncache
from mooncache.auth import load_cluster_token, session_token
from mooncache.client.master_link import MasterLink
from mooncache.client.options import ClientOptions
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.reporting.rows import Row, bar_row
from mooncache.runtime.clock import SystemClock

_AT_LEAST: Final = 0.97
_BLOCK_BYTES: Final = 64 << 10
_OTHERS: Final = ("team-a", "team-b", "team-c")
_GREEDY: Final = "greedy"
_SHARE_BLOCKS: Final = 256
_OTHERS_BLOCKS: Final = 240
_GREEDY_BLOCKS: Final = 4 * _SHARE_BLOCKS
_SKEW: Final = 1.1


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Hit ratios of the others: alone, beside the greedy one with shares, and without."""
    rounds = 2_000 if quick else 12_000
    found: dict[str, tuple[float, float]] = {}
    for name, shares, greedy in (("alone", True, False), ("shares", True, True), ("none", False, True)):
        progress(f"tenants: {name}")
        found[name] = _measure(rounds, shares=shares, greedy=greedy)
    alone, shared, unprotected = found["alone"][0], found["shares"][0], found["none"][0]
    title = "hit ratio of three tenants"
    return [
        Row(f"{title}, alone", alone, "of 1"),
        bar_row(
            f"{title}, beside one at 4x its share",
            shared,
            "of 1",
            against="alone",
            reference=alone,
            at_least=_AT_LEAST,
        ),
        bar_row(f"{title}, beside it, without shares", unprotected, "of 1", against="alone", reference=alone),
        Row("hit ratio of the one at 4x its share", found["shares"][1], "of 1"),
    ]


def _measure(rounds: int, *, shares: bool, greedy: bool) -> tuple[float, float]:
    """Hit ratios of the others and of the greedy one, in the second half of the rounds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="mooncache-tenants-")))
        capacity = (len(_OTHERS) + 1) * _SHARE_BLOCKS * _BLOCK_BYTES
        settings = ClusterSettings(state_dir=folder, nodes=1, capacity_bytes=capacity, port=0)
        cluster = stack.enter_context(EmbeddedCluster(settings))
        own = stack.enter_context(mooncache.connect(state_dir=str(folder), timeout_s=30.0))
        token = load_cluster_token(cluster.token_path)
        names = (*_OTHERS, _GREEDY) if greedy else _OTHERS
        if shares:
            for name in names:
                _reserve(folder, name)
        clients = {
            name: stack.enter_context(own.for_tenant(session_token(token, name, time.time()).text))
            for name in names
        }
        return _ask(clients, rounds)


def _ask(clients: dict[str, mooncache.Client], rounds: int) -> tuple[float, float]:
    rng, body = random.Random(7), bytearray(_BLOCK_BYTES)
    asked = dict.fromkeys(clients, 0)
    hits = dict.fromkeys(clients, 0)
    wanted = {name: _popular(_GREEDY_BLOCKS if name == _GREEDY else _OTHERS_BLOCKS) for name in clients}
    for number in range(rounds):
        for name, client in clients.items():
            for _ in range(4 if name == _GREEDY else 1):
                blocks, weights = wanted[name]
                block = rng.choices(blocks, cum_weights=weights)[0]
                key = hashlib.blake2b(f"{name} {block}".encode(), digest_size=32).digest()
                hit = client.get_into(key, body) is not None
                if not hit:
                    client.put(key, body)
                if number >= rounds // 2:
                    asked[name] += 1
                    hits[name] += hit
    others = [name for name in clients if name != _GREEDY]
    ratio = sum(hits[name] for name in others) / sum(asked[name] for name in others)
    return ratio, hits[_GREEDY] / asked[_GREEDY] if _GREEDY in clients else 0.0


def _popular(count: int) -> tuple[range, list[float]]:
    """Blocks, and sums of how often they are asked for."""
    sums, total = [], 0.0
    for rank in range(count):
        total += 1.0 / (rank + 1) ** _SKEW
        sums.append(total)
    return range(count), sums


def _reserve(folder: Path, name: str) -> None:
    """Give a tenant its share, through the master."""
    options = ClientOptions.gather(state_dir=str(folder))
    limits = common_pb2.TenantLimits(tenant=name, memory_share_bytes=_SHARE_BLOCKS * _BLOCK_BYTES)
    request = master_pb2.SetTenantRequest(limits=limits)

    async def ask() -> None:
        link = MasterLink(options.targets, options.master_channel, SystemClock(), random.Random())
        try:
            await link.call("SetTenant", request, master_pb2.SetTenantResponse, 10.0)
        finally:
            await link.close()

    asyncio.run(ask())

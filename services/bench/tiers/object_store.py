"""Reads of 1 MiB through the shared tier in an object store, over the same ranges read by s3fs alone: one, the other,
and so on.

The store is moto's server on this machine, in a process of its own; it is slow, so only the ratio says something.
"""

from __future__ import annotations

import importlib.util
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any, Final

import mooncache
from mooncache.bench.ssd_pool import disk_counters, wait_for
from mooncache.bench.store.ours import start_cluster
from mooncache.cluster.embedded import EmbeddedCluster
from mooncache.errors import NodeUnavailable
from mooncache.reporting.rows import Row

_BLOCK: Final = 1 << 20
_DEPTH: Final = 8
_BUCKET: Final = "mooncache-bench"
_MEMORY_BYTES: Final = 32 << 20
_MORE: Final = 64  # blocks that are below, and in memory too
_START_S: Final = 60.0
_NEEDED: Final = ("moto", "s3fs", "boto3")


def run(quick: bool, progress: Callable[[str], None]) -> list[Row]:
    """Both rates, and their ratio.

    Raises:
        MooncacheError: a block that the tier said it had did not come.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return [Row(f"object store: not measured, because {', '.join(missing)} is not installed", 0, "")]
    rounds, blocks = (2, 64) if quick else (5, 160)
    with _server() as environment:
        os.environ.update(environment)
        env = {
            **environment,
            "MOONCACHE_STORE_NODE_SHARED_URL": f"s3://{_BUCKET}/pool",
            "MOONCACHE_STORE_NODE_SHARED_BYTES": str(2 << 30),
            "MOONCACHE_STORE_NODE_SHARED_UPLOAD_S": "1",
        }
        with (
            start_cluster(nodes=1, capacity_bytes=_MEMORY_BYTES, env=env) as pool,
            mooncache.connect(**pool.client_settings(), timeout_s=60.0) as client,
        ):
            progress("blocks on their way into the store")
            keys = _fill(pool, client, rounds * blocks)
            return _compare(client, keys, rounds, progress)


def _compare(
    client: mooncache.Client, keys: list[bytes], rounds: int, progress: Callable[[str], None]
) -> list[Row]:
    plain = _Plain()
    alone, tier, ratios = [plain.rate(len(keys) // rounds)], [], []
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        tier.append(_tier_rate(client, keys[number::rounds]))
        alone.append(plain.rate(len(keys) // rounds))
        ratios.append(2 * tier[-1] / (alone[-2] + alone[-1]))
    reference = f"1 MiB reads of the object store, {_DEPTH} at once, s3fs alone"
    return [
        Row(reference, median(alone) / 1e6, "MB/s"),
        Row(
            f"1 MiB reads of the object store, {_DEPTH} at once, the tier, checksums on",
            median(tier) / 1e6,
            "MB/s",
            median(ratios),
            "s3fs",
        ),
    ]


def _fill(pool: EmbeddedCluster, client: mooncache.Client, count: int) -> list[bytes]:
    """Keys of so many blocks that are in the store alone. Raises NodeUnavailable: it takes none."""
    keys: list[bytes] = []
    for _ in range(20 * count):
        if disk_counters(pool)["object_store_written_bytes"] >= (count + _MORE) * _BLOCK:
            break
        keys.append(os.urandom(32))
        client.put(keys[-1], os.urandom(_BLOCK))
        time.sleep(0.01)  # a put never waits: the store gets the time to follow
    wait_for(pool, lambda counters: counters["object_store_written_bytes"] >= count * _BLOCK, _START_S)
    below = [key for key in keys if (found := client.stat(key)) is not None and found.tier == "shared"]
    if len(below) < count:
        raise NodeUnavailable(f"The object store took {len(below)} of {count} blocks.")
    return below[:count]


def _tier_rate(client: mooncache.Client, keys: list[bytes]) -> float:
    begun = time.perf_counter()
    for at in range(0, len(keys), _DEPTH):
        found = client.get_many(keys[at : at + _DEPTH])
        if found.hits != len(keys[at : at + _DEPTH]):
            raise NodeUnavailable("A block of the object store was not found.")
    return len(keys) * _BLOCK / (time.perf_counter() - begun)


class _Plain:
    """s3fs without anything of ours: random ranges of the same objects."""

    def __init__(self) -> None:
        from s3fs import S3FileSystem

        self._fs: Any = S3FileSystem(use_listings_cache=False, config_kwargs={"max_pool_connections": 32})
        found = self._fs.find(f"{_BUCKET}/pool", detail=True)
        self._objects = [name for name, info in found.items() if info["size"] > 2 * _BLOCK]
        self._random = random.Random(1)

    def rate(self, count: int) -> float:
        """Bytes a second."""
        names = [self._random.choice(self._objects) for _ in range(count)]

        def read(name: str) -> int:
            return len(self._fs.cat_file(name, start=4096, end=4096 + _BLOCK))

        begun = time.perf_counter()
        with ThreadPoolExecutor(_DEPTH) as threads:
            total = sum(threads.map(read, names))
        return total / (time.perf_counter() - begun)


@contextmanager
def _server() -> Iterator[dict[str, str]]:
    """moto's server with an empty bucket, as the environment in which S3 clients find it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _create_bucket(environment, time.monotonic() + _START_S)
        yield environment
    finally:
        process.terminate()
        process.wait(10)


def _create_bucket(environment: dict[str, str], until_s: float) -> None:
    import boto3
    from botocore.exceptions import EndpointConnectionError

    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_DEFAULT_REGION"],
    )
    while True:
        try:
            client.create_bucket(Bucket=_BUCKET)
            return
        except EndpointConnectionError:
            if time.monotonic() > until_s:
                raise NodeUnavailable("moto's server did not start.") from None
            time.sleep(0.1)

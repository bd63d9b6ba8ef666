"""Disks of a node: several of them, a block device, one that cannot be written, and one that mixes blocks up."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

import mooncache
from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from tests.conditions import wait_until
from tests.store_node.test_ssd_tier import answers, follows, ssd, tier_of

MIB: Final = 1 << 20
BLOCK: Final = 64 << 10
COUNT: Final = 320  # 20 MiB through 8 MiB of memory
DISK: Final = 64 * MIB  # in segments of 2 MiB
HEADER: Final = 128
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


def value_of(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK)


@pytest.fixture
def block_device(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """What stands for a block device, and the file that has its bytes. Without loop devices a file for both."""
    backing = tmp_path / "second.disk"
    with backing.open("wb") as file:
        file.truncate(DISK)
    made = None
    if os.geteuid() == 0 and shutil.which("losetup"):
        command = ["losetup", "--find", "--show", str(backing)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    device = made.stdout.strip() if made is not None and made.returncode == 0 else ""
    yield device or str(backing), backing
    if device:
        subprocess.run(["losetup", "--detach", device], timeout=60, check=True)


def exchange(disk: Path, one: int, other: int, size: int) -> None:
    """Exchange so many bytes at two places of a disk."""
    with disk.open("r+b") as file:
        pieces = [os.pread(file.fileno(), size, place) for place in (one, other)]
        for place, piece in zip((other, one), pieces, strict=True):
            os.pwrite(file.fileno(), piece, place)
        os.fsync(file.fileno())


def mix_up(disk: Path) -> tuple[set[int], int]:
    """Exchange records of blocks of one size, and contents below their headers. Returns those blocks' numbers, and how
    many blocks the disk has."""
    text = disk.read_bytes()
    found = [(text.find(value_of(number)), number) for number in range(COUNT)]
    places = sorted((place, number) for place, number in found if place >= 0)
    assert len(places) > 60, f"{disk.name} has {len(places)} blocks"
    apart, beside, below = (places[2], places[-20]), places[4:6], (places[8], places[12])
    assert apart[1][0] - apart[0][0] > 4 * MIB, "in other segments"
    for one, other in (apart, beside):
        exchange(disk, one[0] - HEADER, other[0] - HEADER, HEADER + BLOCK)
    exchange(disk, below[0][0], below[1][0], BLOCK)
    return {number for _, number in (*apart, *beside, *below)}, len(places)


def test_two_disks_and_blocks_that_were_mixed_up(tmp_path: Path, block_device: tuple[str, Path]) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    settings = ClusterSettings(
        state_dir=tmp_path / "state",
        nodes=1,
        capacity_bytes=8 * MIB,
        ssd_bytes=DISK,
        port=0,
        extra_env=(
            ("MOONCACHE_METRICS_ENABLED", "true"),
            ("MOONCACHE_STORE_NODE_SSD_PATHS", f"{folder},{block_device[0]}"),
        ),
    )
    cluster = EmbeddedCluster(settings)
    cluster.start(300.0)
    try:
        with mooncache.connect(**cluster.client_settings()) as client:
            for number in range(COUNT):
                client.put(f"block-{number}", value_of(number))
                # A put never waits for a disk, which gets the time to follow when memory (128 blocks) is full.
                if number % 8 == 7 and number > 128:
                    wait_until(partial(follows, cluster, number - 122), "the disks follow", every_s=0.01)
            assert ssd(cluster, "devices_answering") == 2
            cluster.kill("node-1")
            mixed: set[int] = set()
            for disk in (folder / "mooncache.ssd", block_device[1]):
                mixed |= mix_up(disk)[0]
            cluster.restart("node-1")
            wait_until(partial(answers_for_any, client, mixed), "the node is back")
            assert ssd(cluster, "devices_answering") == 2
            here = [number for number in range(COUNT) if tier_of(client, f"block-{number}") == "ssd"]
            right = 0
            for number in here:
                value = client.get(f"block-{number}")
                assert value is None or bytes(value) == value_of(number), f"other bytes for block {number}"
                assert value is None or number not in mixed, f"block {number} was mixed up and is not noticed"
                right += value is not None
            assert right > 150
            assert ssd(cluster, "corrupt_blocks") >= len(mixed.intersection(here)) >= 6
    finally:
        cluster.stop()


def answers_for_any(client: mooncache.Client, mixed: set[int]) -> bool:
    return any(answers(client, f"block-{number}") for number in range(COUNT) if number not in mixed)


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, of util-linux")
def test_a_disk_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    """A node starts beside a file system that is mounted read-only, says so, and uses its other disk."""
    code = f"""
        import asyncio
        from mooncache.config import Config
        from mooncache.store_node.service import StoreNodeService

        async def main():
            disks = {{"ssd_bytes": {DISK}, "ssd_paths": ["{tmp_path}/frozen", "{tmp_path}/sound"]}}
            node = {{"capacity_bytes": {8 * MIB}, "unix_enabled": False, **disks}}
            settings = {{"cluster": {{"state_dir": "{tmp_path}/state"}}, "store_node": node}}
            service = StoreNodeService(Config.model_validate(settings))
            await service.build()
            stats = service.state.core.stats()
            print("disks", stats["ssd_devices_answering"], stats["ssd_capacity_bytes"] > 0, flush=True)
            await service.shutdown()

        asyncio.run(main())
    """
    for name in ("frozen", "sound"):
        (tmp_path / name).mkdir()
    hold = f'mount -t tmpfs -o ro none {tmp_path}/frozen && exec {sys.executable} -c "$CODE"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hold],
        env={**os.environ, "CODE": textwrap.dedent(code)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert "disks 1 True" in done.stdout, done.stdout + done.stderr

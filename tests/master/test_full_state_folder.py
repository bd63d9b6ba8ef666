"""A master whose state folder has no room left: it does not lead, says why, and leads once there is room."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from pathlib import Path

import pytest

from mooncache import errors
from mooncache.auth import create_cluster_token, load_cluster_token
from mooncache.proto.v1 import master_pb2
from tests.conditions import until
from tests.master.processes import channel_to
from tests.ports import own_port

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts need root, and unshare of util-linux"
)
# A file system of its own, full but for the token; its process is this one from `exec` on.
START = """
mount -t tmpfs -o size=64k none "$1" && cp "$2" "$1/cluster.token" && echo mounted || exit 9
head -c 1M /dev/zero >"$1/ballast" 2>/dev/null
exec "$3" -m mooncache.master
"""


async def test_it_leads_once_there_is_room(tmp_path: Path) -> None:
    state, token_file, log = tmp_path / "state", tmp_path / "cluster.token", tmp_path / "log"
    state.mkdir()
    create_cluster_token(token_file)
    token, port = load_cluster_token(token_file).text, own_port()
    settings = {
        "MOONCACHE_CLUSTER_STATE_DIR": str(state),
        "MOONCACHE_MASTER_PORT": str(port),
        "MOONCACHE_METRICS_ENABLED": "false",
    }
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *("unshare", "--mount", "sh", "-c", START, "sh", str(state), str(token_file), sys.executable),
            env=os.environ | settings,
            stdout=file,
            stderr=file,
        )

    async def leads() -> bool | None:
        """None where nothing answers yet."""
        async with channel_to(f"127.0.0.1:{port}", token) as channel:
            with contextlib.suppress(errors.MooncacheError):
                request, answer = master_pb2.GetStatusRequest(), master_pb2.GetStatusResponse
                return bool((await channel.call("GetStatus", request, answer, 5.0)).leading)
        return None

    async def refused() -> bool:
        code = process.returncode
        if code == 9 or (code is not None and "unshare:" in log.read_text()):
            pytest.skip(f"no mounts here: {log.read_text()}")
        return "No space left" in log.read_text() and await leads() is not None

    try:
        await until(refused, log.read_text)
        assert await leads() is False
        assert f"{state}/master.term cannot be written: No space left on device" in log.read_text()
        os.unlink(f"/proc/{process.pid}/root{state}/ballast")
        await until(leads, log.read_text)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

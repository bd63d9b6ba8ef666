"""A network of its own, in which a test makes hosts as the tutorial does."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mooncache.cluster.settings import missing_modules

TOOLS = ("ip", "unshare", "nsenter", "curl", "openssl")
MARKS = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(
        bool(missing_modules("hf")), reason="needs the small engine: pip install 'mooncache[hf]'"
    ),
]


@contextmanager
def own_network(folder: Path) -> Iterator[tuple[str, ...]]:
    """What stands before a command so that it runs in a network and with a /run of its own, in `folder`.

    Skips the test where a tool or the permission is missing.
    """
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    hold = "mount -t tmpfs tmpfs /run && echo ready && exec cat"
    inside = ["unshare", "--net", "--mount", "sh", "-c", hold]
    with subprocess.Popen(
        inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        said = holder.stdout.readline().decode()
        if said != "ready\n":
            pytest.skip(f"no network namespaces here: {said}")
        yield ("nsenter", "--target", str(holder.pid), "--net", "--mount", "--wd=" + str(folder))
        holder.stdin.close()

"""A limit of memory for one process, as a container has it: a memory cgroup, of version 1 or 2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest

_ROOT: Final = Path("/sys/fs/cgroup")


@contextmanager
def memory_limit(pid: int, more_bytes: int) -> Iterator[None]:
    """The process, which runs already, may take so much more memory; the kernel kills it beyond that.

    What it has already counts where it was. Skips the test where no such cgroup can be made.
    """
    group, limit = _make()
    try:
        try:
            limit.write_text(str(more_bytes))
            (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            pytest.skip(f"no limit of memory here: {error}")
        yield
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(left)
        group.rmdir()


def _make() -> tuple[Path, Path]:
    """A new cgroup, and its file for the limit."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    of = {kinds: path.lstrip("/") for _, kinds, path in (line.split(":", 2) for line in lines)}
    first = (_ROOT / "memory", "memory.limit_in_bytes")
    places = [(first[0] / of["memory"], first[1]), first] if "memory" in of else [(_ROOT, "memory.max")]
    why: object = "no cgroup of memory"
    for parent, name in places:
        group = parent / f"mooncache-test-{os.getpid()}-{uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError as error:
            why = error
            continue
        if (group / name).exists():
            return group, group / name
        group.rmdir()
    pytest.skip(f"no limit of memory here: {why}")

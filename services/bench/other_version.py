"""A second version of Mooncache beside this one: the same code under another number, with an interpreter of its own.

It speaks one control version more than this one. So what is shown with it is that two versions work beside each other
and take over from each other; that the code of a real release does is for a wheel of it to show
(`MOONCACHE_TEST_OTHER_PYTHON` names the interpreter of an environment that has one).
"""

from __future__ import annotations

import os
import re
import shutil
import site
import venv
from pathlib import Path
from typing import Final, NamedTuple

import mooncache
from mooncache._version import __version__
from mooncache.runtime.formats import CONTROL_MINOR_NOW

OTHER_PYTHON: Final = "MOONCACHE_TEST_OTHER_PYTHON"
_LEFT_OUT: Final = ("__pycache__", "*.pyi", "include", "cmake", "protos")


class OtherVersion(NamedTuple):
    """An interpreter that has another version of Mooncache, and that version ("" when it is not known)."""

    python: Path
    version: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment to run it in: what was set for this interpreter's modules is not for it."""
        return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


def make_other_version(folder: Path) -> OtherVersion:
    """Make it in a folder, in about a second; or take the one that the environment names."""
    if named := os.environ.get(OTHER_PYTHON):
        return OtherVersion(Path(named), "")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    package = packages / "mooncache"
    shutil.copytree(Path(mooncache.__file__).parent, package, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    # Libraries are this environment's; its own packages come first.
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    version = next_minor(__version__)
    _replace(package / "_version.py", f'"{__version__}"', f'"{version}"')
    now = "CONTROL_MINOR_NOW: Final = "
    _replace(package / "runtime" / "formats.py", f"{now}{CONTROL_MINOR_NOW}", f"{now}{CONTROL_MINOR_NOW + 1}")
    return OtherVersion(folder / "bin" / "python", version)


def next_minor(version: str) -> str:
    """The next minor version: 0.2.0 after 0.1.3."""
    major, minor = re.findall(r"\d+", version)[:2]
    return f"{major}.{int(minor) + 1}.0"


def _replace(path: Path, former: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    if former not in text:
        raise ValueError(f"{path} does not contain {former}")
    path.write_text(text.replace(former, new), encoding="utf-8")

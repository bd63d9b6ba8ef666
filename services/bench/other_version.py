"""A second version of Mooncache beside this one: this code under another number, or an older build that really is one.

Without more it is the same code, which speaks one control version more. So what is shown with it is that two versions
work beside each other and take over from each other. `MOONCACHE_TEST_UPGRADE_FROM` names an older build: a wheel, or
a revision of the checkout, whose wheel is built first; it is installed in an environment of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

import mooncache
from mooncache._version import __version__
from mooncache.errors import ConfigInvalid, Internal
from mooncache.runtime.formats import CONTROL_MINOR_NOW

UPGRADE_FROM: Final = "MOONCACHE_TEST_UPGRADE_FROM"
_BUILD_MAX_S: Final = 3600.0
_VERSION_FILE: Final = "mooncache/_version.py"
_LEFT_OUT: Final = ("__pycache__", "*.pyi", "include", "cmake", "protos")


class OtherVersion(NamedTuple):
    """An interpreter that has another version of Mooncache, and that version.

    Attributes:
        older: it is an older build, so the way there is a way back.
    """

    python: Path
    version: str
    older: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """The environment to run it in: what was set for this interpreter's modules is not for it."""
        return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


def make_other_version(folder: Path) -> OtherVersion:
    """Make it in a folder: in about a second, or from the older build that the environment names.

    Raises: ConfigInvalid, Internal (see `older_build`).
    """
    if named := os.environ.get(UPGRADE_FROM):
        return older_build(named, folder)
    packages = _environment(folder)
    package = packages / "mooncache"
    shutil.copytree(Path(mooncache.__file__).parent, package, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    version = next_minor(__version__)
    _replace(package / "_version.py", f'"{__version__}"', f'"{version}"')
    now = "CONTROL_MINOR_NOW: Final = "
    _replace(package / "runtime" / "formats.py", f"{now}{CONTROL_MINOR_NOW}", f"{now}{CONTROL_MINOR_NOW + 1}")
    return OtherVersion(folder / "bin" / "python", version)


def older_build(named: str, folder: Path) -> OtherVersion:
    """Install a wheel, or that of a revision, in an environment of its own, with the libraries of this one.

    A build that has this version's number is called the minor version before it, because `mooncache upgrade` goes by
    numbers; nothing else of it is changed.

    Raises:
        ConfigInvalid: it is neither a wheel nor a revision of the checkout in the working folder.
        Internal: the wheel could not be built or installed.
    """
    wheel = Path(named) if named.endswith(".whl") else build_revision(named, folder / "built")
    if not wheel.is_file():
        raise ConfigInvalid(f"{UPGRADE_FROM}: there is no {wheel}.")
    packages = _environment(folder / "environment")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    version = _version_in(packages / _VERSION_FILE)
    if version == __version__:
        version = former_minor(__version__)
        _replace(packages / _VERSION_FILE, f'"{__version__}"', f'"{version}"')
    return OtherVersion(folder / "environment" / "bin" / "python", version, older=True)


def build_revision(revision: str, folder: Path) -> Path:
    """The wheel of a revision of the checkout in the working folder; minutes. Raises ConfigInvalid, Internal."""
    sources = folder / "sources"
    sources.mkdir(parents=True)
    packed = folder / "sources.tar"
    found = _run(["git", "archive", "--format=tar", "-o", str(packed), revision, "--"])
    if found.returncode:
        raise ConfigInvalid(f"{UPGRADE_FROM}: {revision} is neither a wheel nor a revision: {found.stderr}")
    with tarfile.open(packed) as archive:
        archive.extractall(sources, filter="data")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    built = _run([sys.executable, "-m", "pip", "wheel", *options, str(sources)])
    wheels = list(folder.glob("mooncache-*.whl"))
    if built.returncode or len(wheels) != 1:
        raise Internal(f"The wheel of {revision} was not built: {built.stderr[-2000:]}")
    return wheels[0]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BUILD_MAX_S)


def _environment(folder: Path) -> Path:
    """An environment whose libraries are this one's; returns the folder of its own packages, which come first."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    return packages


def _version_in(path: Path) -> str:
    found = re.search(r'__version__ = "([^"]+)"', path.read_text(encoding="utf-8"))
    if found is None:
        raise Internal(f"{path} has no version.")
    return found[1]


def former_minor(version: str) -> str:
    """The minor version before: 0.1.0 before 0.2.3. Raises ConfigInvalid when there is none."""
    major, minor = re.findall(r"\d+", version)[:2]
    if minor == "0":
        raise ConfigInvalid(f"There is no minor version before {version}.")
    return f"{major}.{int(minor) - 1}.0"


def next_minor(version: str) -> str:
    """The next minor version: 0.2.0 after 0.1.3."""
    major, minor = re.findall(r"\d+", version)[:2]
    return f"{major}.{int(minor) + 1}.0"


def _replace(path: Path, former: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    if former not in text:
        raise ValueError(f"{path} does not contain {former}")
    path.write_text(text.replace(former, new), encoding="utf-8")

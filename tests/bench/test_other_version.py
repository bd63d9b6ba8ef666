"""An older build is installed beside this version: from a wheel, under a number of its own, or refused by name."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from mooncache._version import __version__
from mooncache.bench.other_version import former_minor, older_build
from mooncache.errors import ConfigInvalid


def wheel_of(folder: Path, version: str) -> Path:
    """A wheel with a package that says its version and whether a library of this environment is there."""
    path = folder / f"mooncache-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mooncache/_version.py", f'__version__ = "{version}"\n')
        archive.writestr("mooncache/__init__.py", "import grpc\nfrom mooncache._version import __version__\n")
    return path


@pytest.mark.parametrize(
    ("version", "called"), [(__version__, former_minor(__version__)), ("0.7.2", "0.7.2")]
)
def test_a_wheel_is_run_by_an_interpreter_of_its_own(tmp_path: Path, version: str, called: str) -> None:
    other = older_build(str(wheel_of(tmp_path, version)), tmp_path / "other")
    command = [str(other.python), "-c", "import mooncache; print(mooncache.__version__, mooncache.__file__)"]
    ran = subprocess.run(command, env=other.environment, capture_output=True, text=True, check=True)
    said, place = ran.stdout.split()
    assert (said, other.version, other.older) == (called, called, True)
    assert Path(place).is_relative_to(tmp_path / "other")


@pytest.mark.parametrize("named", ["nowhere/mooncache-0.0.1-py3-none-any.whl", "no-such-revision"])
def test_what_is_not_there_is_refused_by_name(tmp_path: Path, named: str) -> None:
    with pytest.raises(ConfigInvalid, match=named):
        older_build(named, tmp_path / "other")


def test_the_minor_version_before() -> None:
    assert former_minor("0.2.3") == "0.1.0"
    with pytest.raises(ConfigInvalid):
        former_minor("1.0.0")

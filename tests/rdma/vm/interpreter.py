"""Python with this package and what it needs, as a second part of the machine's first files.

Through the share of the machine's disk each import costs milliseconds for every look at a folder, a minute
for a store node; out of memory it costs what Python itself does. Compiled files go along and keep the times
of their sources, so nothing is compiled in the guest.
"""

from __future__ import annotations

import compileall
import functools
import os
import platform
import re
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from tests.rdma.vm.cpio import Archive
from tests.rdma.vm.image import CACHE, UnavailableError

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "mooncache"
HOME, SITE = "py", "py/site"  # in the guest
COMMAND = f"PYTHONHOME=/{HOME} PYTHONPATH=/{SITE} LD_LIBRARY_PATH=/{HOME}/lib /{HOME}/bin/python3"
SKIPPED = {"test", "tests", "idlelib", "ensurepip", "tkinter", "turtledemo", "lib2to3", "site-packages"}
SKIPPED |= {"dist-packages"}
WANTED = {".py", ".pyc", ".so"}


def _add_tree(archive: Archive, root: Path, target: str) -> None:
    for folder, names, files in os.walk(root):
        here = Path(folder)
        names[:] = sorted(set(names) - SKIPPED)
        if here.name.startswith("config-"):
            continue
        inside = here.relative_to(root)
        for name in sorted(files):
            if Path(name).suffix in WANTED:
                _add(archive, here / name, str(Path(target) / inside / name))


def _add(archive: Archive, path: Path, name: str, mode: int = 0o644) -> None:
    archive.file(name, path.read_bytes(), mode, int(path.stat().st_mtime))


def _needed(package: str) -> list[metadata.Distribution]:
    """The package's requirements, and theirs, without those of extras or of other systems."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [package]
    while waiting:
        distribution = metadata.distribution(waiting.pop())
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        if name in found:
            continue
        found[name] = distribution
        for line in distribution.requires or ():
            wanted, _, marker = line.partition(";")
            other_python = "python_version <" in marker or "python_full_version <" in marker
            if "extra" not in marker and not other_python and "win32" not in marker:
                waiting.append(re.split(r"[^\w.-]", wanted.strip(), maxsplit=1)[0])
    found.pop(package)
    return list(found.values())


def _add_distribution(archive: Archive, distribution: metadata.Distribution) -> None:
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        wanted = file.suffix in WANTED or ".dist-info" in file.parts[0]
        if wanted and not SKIPPED & set(file.parts) and ".." not in file.parts and path.is_file():
            _add(archive, path, f"{SITE}/{file}")


def _add_python(archive: Archive) -> None:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    _add(archive, executable, f"{HOME}/bin/python3", 0o755)
    _add_tree(archive, Path(sysconfig.get_path("stdlib")), f"{HOME}/lib/{version}")
    shared = sysconfig.get_config_var("INSTSONAME") or ""
    library = Path(sysconfig.get_config_var("LIBDIR") or "/") / shared
    if ".so" in shared and library.is_file():
        _add(archive, library, f"{HOME}/lib/{shared}", 0o755)


@functools.cache
def make() -> Path:
    """The file to give the machine behind its own; made anew by each process, a second's work."""
    if platform.libc_ver()[0] != "glibc":
        raise UnavailableError("this Python does not use glibc, as the test machine does")
    compileall.compile_dir(ROOT / "services", quiet=2)
    archive = Archive()
    _add_python(archive)
    _add_tree(archive, ROOT / "services", f"{SITE}/{PACKAGE}")
    for distribution in _needed(PACKAGE):
        _add_distribution(archive, distribution)
    CACHE.mkdir(parents=True, exist_ok=True)
    temporary = CACHE / f"python.{os.getpid()}"
    temporary.write_bytes(archive.finish())
    return temporary.replace(CACHE / "initrd-python")

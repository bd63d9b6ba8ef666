"""Builds mooncache._native: CMake + nanobind, called from setuptools' build_ext.

Everything declarative lives in pyproject.toml. Here is only what needs code: the package list (folder
services/ is the package mooncache) and the native build. Its folder, build/release, is also that of the
native tests, so nothing is compiled twice; it is begun anew for another Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
NATIVE = ROOT / "native"


def build_folder() -> Path:
    """Where the native code is built, without what another Python left there."""
    folder = Path(os.environ.get("MOONCACHE_BUILD_DIR", ROOT / "build" / "release")).resolve()
    made_for = folder / "made-for"
    tag = str(sysconfig.get_config_var("SOABI"))
    if made_for.exists() and made_for.read_text() != tag:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made_for.write_text(tag)
    return folder


def bindings() -> str:
    """The binding files to compile, as a CMake list (MOONCACHE_BIND overrides)."""
    present = ";".join(sorted(path.stem.removeprefix("bind_") for path in NATIVE.glob("python/bind_*.cpp")))
    return os.environ.get("MOONCACHE_BIND", present)


class CMakeBuild(build_ext):
    """Configures native/ for this interpreter, builds the target _native, copies it into place."""

    def build_extension(self, ext: Extension) -> None:
        build_dir = build_folder()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        configure = [
            *("cmake", "-S", str(NATIVE), "-B", str(build_dir)),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DMOONCACHE_PYTHON=ON",
            f"-DMOONCACHE_BIND={bindings()}",
        ]
        if ninja := shutil.which("ninja"):
            # Isolated builds bring a new ninja each time; the cached path of the last one is gone.
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        # ccache then finds what another folder with the same sources compiled, such as an unpacked sdist.
        environment = {"CCACHE_BASEDIR": str(ROOT), **os.environ}
        subprocess.run(configure, check=True, env=environment)
        build = ["cmake", "--build", str(build_dir), "--target", "_native", "-j", jobs]
        subprocess.run(build, check=True, env=environment)
        built = build_dir / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
        # Replace, never overwrite: a running process may have the old library mapped.
        partial = target.with_name(target.name + ".partial")
        shutil.copy2(built, partial)
        os.replace(partial, target)


setup(
    packages=["mooncache", *(f"mooncache.{name}" for name in find_packages(str(ROOT / "services")))],
    ext_modules=[Extension("mooncache._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)

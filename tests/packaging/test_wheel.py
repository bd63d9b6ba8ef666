"""The wheel as a user gets it: contents, then a put and a get from a fresh environment elsewhere.

`make wheel-test` builds the wheel (through the sdist, in isolation) and names it in MOONCACHE_WHEEL.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMOKE = Path(__file__).with_name("smoke.py")

pytestmark = pytest.mark.wheel


@pytest.fixture(scope="module")
def wheel() -> Path:
    named = os.environ.get("MOONCACHE_WHEEL")
    if not named:
        pytest.skip("no wheel named in MOONCACHE_WHEEL; `make wheel-test` builds one")
    return Path(named).resolve()


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_has_every_module(names: set[str]) -> None:
    services = ROOT / "services"
    modules = {f"mooncache/{path.relative_to(services).as_posix()}" for path in services.rglob("*.py*")}
    wanted = {name for name in modules if name.endswith((".py", ".pyi"))}
    assert {"mooncache/master/__init__.py", "mooncache/store_node/__init__.py"} <= wanted
    assert not sorted(wanted - names), "in services/ but not in the wheel"


def test_wheel_has_the_native_module_types_and_licence(names: set[str]) -> None:
    assert any(name.startswith("mooncache/_native.") and name.endswith(".so") for name in names)
    assert "mooncache/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_has_the_proto_files(names: set[str]) -> None:
    files = {path.name for path in (ROOT / "protos" / "v1").glob("*.proto")}
    assert {f"mooncache/protos/mooncache/proto/v1/{name}" for name in files} <= names


def test_wheel_has_the_files_of_the_console(names: set[str]) -> None:
    folder = ROOT / "services" / "gateway" / "console" / "static"
    files = {f"mooncache/gateway/console/static/{path.name}" for path in folder.iterdir()}
    assert "mooncache/gateway/console/static/index.html" in files
    assert files <= names


def test_wheel_has_nothing_else(names: set[str]) -> None:
    strangers = sorted(name for name in names if not name.startswith("mooncache"))
    assert not strangers
    public = {
        f"mooncache/include/mooncache/{path.name}" for path in (ROOT / "native" / "include").rglob("*.h")
    }
    sources = {name for name in names if name.endswith((".cpp", ".h", ".pyc"))}
    assert sources == public
    assert {"mooncache/cmake/mooncacheConfig.cmake", "mooncache/cmake/mooncacheConfigVersion.cmake"} <= names


@pytest.mark.timeout(600)
def test_put_and_get_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    run(str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel))
    assert "mooncache" in run(str(python.with_name("mooncache")), "--help")
    assert run(str(python), str(SMOKE), str(ROOT)).strip().endswith("ok")

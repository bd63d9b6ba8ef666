"""docs/cpp.md: an installed prefix and the Python package's headers, found by CMake and compiled against."""

from __future__ import annotations

from pathlib import Path

import pytest

import mooncache
from mooncache import _native
from mooncache.auth import Token
from tests.native.building import ROOT, can_build, run

SECRET = bytes(range(32))

pytestmark = pytest.mark.skipif(not can_build(), reason="needs cmake, a C and a C++ compiler")


def project(folder: Path, text: str) -> Path:
    """A CMake project of one source that only compiles."""
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.22)\nproject(mine CXX)\n{text}", encoding="utf-8"
    )
    (folder / "mine.cpp").write_text(
        '#include "mooncache/client.h"\n'
        "static_assert(static_cast<int>(mooncache::Code::kOk) == 0);\n"
        "int main() { return mooncache::kNoNode == 0xffffffff ? 0 : 1; }\n",
        encoding="utf-8",
    )
    return folder


def test_the_example_runs_that_was_built_with_an_installed_prefix(programs: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(Token("default", admin=True, key=SECRET).text, encoding="ascii")
    server = _native.StoreServer({"secret": SECRET, "capacity_bytes": 4 << 20, "huge_pages": False})
    server.start()
    try:
        port = server.endpoints()["tcp_port"]
        assert run(programs / "put_get", "127.0.0.1", str(port), token) == "put and got 4096 bytes: equal\n"
    finally:
        server.stop(2.0)


def test_the_prefix_says_nothing_of_the_folder_where_it_was_built(prefix: Path) -> None:
    installed = sorted(path for path in prefix.rglob("*.cmake"))
    assert {path.name for path in installed} >= {"mooncacheConfig.cmake", "mooncacheTargets.cmake"}
    for path in installed:
        text = path.read_text(encoding="utf-8")
        assert str(ROOT) not in text, path
        assert "-Wconversion" not in text, "our warnings are not those of other projects"
    public = {path.name for path in (ROOT / "native" / "include" / "mooncache").glob("*.h")}
    assert {path.name for path in (prefix / "include" / "mooncache").iterdir()} == public


def test_headers_of_the_python_package_compile(tmp_path: Path) -> None:
    assert (Path(mooncache.get_include()) / "mooncache" / "client.h").is_file()
    text = (
        "find_package(mooncache 0.1 REQUIRED COMPONENTS headers)\n"
        "add_executable(mine mine.cpp)\ntarget_link_libraries(mine PRIVATE mooncache::headers)\n"
    )
    where = f"-Dmooncache_DIR={mooncache.get_cmake_path()}"
    run("cmake", "-S", project(tmp_path / "p", text), "-B", tmp_path / "b", where, "-DCMAKE_CXX_FLAGS=-O0")
    run("cmake", "--build", tmp_path / "b")
    run(tmp_path / "b" / "mine")


@pytest.mark.parametrize(
    ("asked", "says"),
    [("0.1 REQUIRED COMPONENTS client", "has no library client"), ("0.2 REQUIRED", "not accepted")],
)
def test_what_the_python_package_does_not_have_is_said(tmp_path: Path, asked: str, says: str) -> None:
    source = project(tmp_path / "p", f"find_package(mooncache {asked})\n")
    where = f"-Dmooncache_DIR={mooncache.get_cmake_path()}"
    said = run("cmake", "-S", source, "-B", tmp_path / "b", where, fails=True)
    assert says in " ".join(said.split())


def test_the_version_is_that_of_the_package() -> None:
    text = (Path(mooncache.get_cmake_path()) / "mooncacheConfigVersion.cmake").read_text(encoding="utf-8")
    assert f'set(PACKAGE_VERSION "{mooncache.__version__}")' in text

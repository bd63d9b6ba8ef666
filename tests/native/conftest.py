"""What `cmake --install` makes, and the examples as a project of their own builds them with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.building import BUILD, ROOT, is_built, run


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed prefix."""
    if not is_built():
        pytest.skip("the native libraries are not built; run `make native-test`")
    made = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", made, "--component", "mooncache")
    return made


@pytest.fixture(scope="session")
def programs(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the examples, which were built with nothing but the prefix."""
    made = tmp_path_factory.mktemp("programs")
    source = ROOT / "native" / "examples" / "installed"
    flags = ("-DCMAKE_CXX_FLAGS=-O0", "-DCMAKE_C_FLAGS=-Wall -Wextra -Wpedantic -Werror")
    run("cmake", "-S", source, "-B", made, f"-DCMAKE_PREFIX_PATH={prefix}", *flags)
    run("cmake", "--build", made, "-j", "2")
    return made

"""The base image of the container tests, made where no registry answers."""

from __future__ import annotations

import gc
import os
import tarfile
from pathlib import Path

import pytest

from tests.deploy import support

# No registry, no image yet; what is imported is kept for the test to look at.
DOCKER = """#!/bin/sh
case "$1" in
  images) ;;
  pull) echo "no registry answers" >&2; exit 1 ;;
  import) cat > "$KEPT" ;;
esac
"""
DEBOOTSTRAP = """#!/bin/sh
echo 12 > "$3/debian_version"
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {"docker": DOCKER, "debootstrap": DEBOOTSTRAP}.items():
        program = tmp_path / name
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("KEPT", str(tmp_path / "image.tar"))
    monkeypatch.delenv("MOONCACHE_TEST_BASE_IMAGE", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path / "image.tar"


def test_the_first_base_image_leaves_no_pipe_open(kept: Path) -> None:
    assert support.base_image() == support.MADE_BASE
    gc.collect()  # a pipe that is still open warns here, and warnings are errors
    with tarfile.open(kept) as image:
        assert "./debian_version" in image.getnames()


def test_a_base_image_that_could_not_be_packed_is_no_image(kept: Path) -> None:
    (kept.parent / "tar").write_text("#!/bin/sh\nexit 3\n")
    (kept.parent / "tar").chmod(0o755)
    with pytest.raises(support.DockerMissingError, match="tar ended with 3"):
        support.base_image()

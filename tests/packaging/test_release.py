"""The scripts of `make release`, as far as they go without compiling: what is missing is left out and said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "release"


def run(tmp_path: Path, name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    left_out = {
        "RELEASE_LEFT_OUT": str(tmp_path / "left-out.txt"),
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
    }
    return subprocess.run(
        [str(SCRIPTS / name), *arguments],
        env=left_out | env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def left_out(tmp_path: Path) -> str:
    path = tmp_path / "left-out.txt"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTS.iterdir()))
def test_each_script_can_be_read_and_run(name: str) -> None:
    assert os.access(SCRIPTS / name, os.X_OK)
    assert subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=False).returncode == 0
    assert (SCRIPTS / name).read_text().splitlines()[1].startswith("# "), "it says what it does"


def test_pythons_that_are_not_found_are_left_out(tmp_path: Path) -> None:
    done = run(tmp_path, "interpreters.sh", RELEASE_PYTHONS=f"/no/such/python {sys.executable}")
    assert (done.returncode, done.stdout.split()) == (0, [sys.executable]), done.stderr
    mine = f"{sys.version_info[0]}.{sys.version_info[1]}"
    missing = {"3.11", "3.12", "3.13"} - {mine}
    lines = left_out(tmp_path).splitlines()
    assert {line.split()[4].rstrip(":") for line in lines} == missing and done.stderr.splitlines() == lines


def test_without_helm_there_is_no_chart(tmp_path: Path) -> None:
    done = run(tmp_path, "chart.sh", str(tmp_path), PATH="/usr/bin:/bin", MOONCACHE_TEST_HELM="")
    if "no chart" in done.stdout:
        assert "helm" in left_out(tmp_path) and not list(tmp_path.glob("*.tgz"))
    assert done.returncode == 0, done.stderr


def test_without_an_engine_there_are_no_images(tmp_path: Path) -> None:
    nowhere = f"unix://{tmp_path}/no.sock"
    done = run(tmp_path, "images.sh", str(tmp_path), "core hf", DOCKER_HOST=nowhere)
    assert done.returncode == 0, done.stderr
    assert "no images (core hf): no Docker engine answers" in left_out(tmp_path)
    (tmp_path / "left-out.txt").unlink()
    assert run(tmp_path, "images.sh", str(tmp_path), "", DOCKER_HOST=nowhere).returncode == 0
    assert left_out(tmp_path) == "", "none was asked for"


def test_an_image_is_asked_in_words_of_its_entry_point() -> None:
    """An image's entry point is `python -m`: what follows the image's name has to be a module that runs."""
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    asked = re.search(r'--network none "\$image" (.+)\)$', (SCRIPTS / "images.sh").read_text(), re.MULTILINE)
    assert entry and asked
    _, *arguments = json.loads(entry[1])
    said = subprocess.run(
        [sys.executable, *arguments, *asked[1].split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert said.returncode == 0 and said.stdout.strip(), said.stderr


def test_a_wheel_that_cannot_be_installed_fails(tmp_path: Path) -> None:
    wheel = tmp_path / "mooncache-0.0.0-py3-none-any.whl"
    wheel.write_bytes(b"no archive")
    done = run(tmp_path, "check_wheel.sh", sys.executable, str(wheel), TMPDIR=str(tmp_path))
    assert done.returncode != 0
    assert not list(tmp_path.glob("tmp.*")), "it leaves nothing behind"

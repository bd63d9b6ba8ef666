"""Docker for tests: finds an engine, makes a base image and wheels where there are none, runs one Compose project."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
IMAGE, ETCD_IMAGE, PROMETHEUS_IMAGE = "mooncache-test:hf", "mooncache-test:etcd", "mooncache-test:prometheus"
MADE_BASE = "mooncache-test-base:bookworm"
WHEELHOUSE = ROOT / "build" / "wheelhouse"
BASE_PYTHON = (3, 11)  # of Debian 12
_CLASSIC = {"DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"}


class DockerMissingError(Exception):
    """There is no way to run containers here; the text says why."""


def command(*words: str, timeout_s: float = 60.0, env: Mapping[str, str] | None = None) -> str:
    """Output of a command; raises with its last lines when it fails."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **(env or {})},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DockerMissingError(f"{' '.join(words[:3])}: {error}") from None
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise DockerMissingError(f"{' '.join(words[:6])} ended with {done.returncode}:\n{tail}")
    return done.stdout


@functools.cache
def compose_words() -> tuple[str, ...]:
    """How Compose is called here: the plugin, or docker-compose 1.29. Raises DockerMissingError."""
    command("docker", "info", timeout_s=20)
    for words in (("docker", "compose"), ("docker-compose",)):
        try:
            command(*words, "version", timeout_s=20)
        except DockerMissingError:
            continue
        return words
    raise DockerMissingError("neither `docker compose` nor docker-compose is installed")


@functools.cache
def build_env() -> dict[str, str]:
    """BuildKit needs buildx; without it the classic builder is used."""
    try:
        command("docker", "buildx", "version", timeout_s=20)
    except DockerMissingError:
        return _CLASSIC
    return {}


def base_image() -> str:
    """A Debian 12 image: MOONCACHE_TEST_BASE_IMAGE, the official one, or one made by debootstrap."""
    chosen = os.environ.get("MOONCACHE_TEST_BASE_IMAGE")
    if chosen:
        return chosen
    for name in ("debian:12-slim", MADE_BASE):
        if command("docker", "images", "-q", name).strip():
            return name
    try:
        command("docker", "pull", "-q", "debian:12-slim", timeout_s=120)
    except DockerMissingError as error:
        return _bootstrapped(str(error))
    return "debian:12-slim"


def _bootstrapped(why: str) -> str:
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        raise DockerMissingError(f"no base image, and debootstrap needs root and its package; {why}")
    with tempfile.TemporaryDirectory(prefix="mooncache-base-") as folder:
        command("debootstrap", "--variant=minbase", "bookworm", folder, timeout_s=600)
        with subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as packing:
            subprocess.run(
                ["docker", "import", "-", MADE_BASE], stdin=packing.stdout, timeout=300, check=True
            )
        if packing.returncode:
            raise DockerMissingError(f"no base image, because tar ended with {packing.returncode}; {why}")
    return MADE_BASE


def need_packages(image: str) -> None:
    """Raises DockerMissingError when containers cannot install packages: then nothing can be built here."""
    command("docker", "run", "--rm", image, "apt-get", "update", "-qq", "--error-on=any", timeout_s=120)


def wheelhouse() -> bool:
    """Fill build/wheelhouse with this machine's pip; False when that cannot serve the base image."""
    if sys.version_info[:2] != BASE_PYTHON:
        return False
    try:
        command(sys.executable, str(DEPLOY / "wheelhouse.py"), str(WHEELHOUSE), "image-hf", timeout_s=900)
    except DockerMissingError:
        return False
    return True


def context(folder: Path, *, with_wheels: bool) -> Path:
    """A copy of the working tree without tests, to build from; wheels are linked into it."""
    listed = command("git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z").split("\0")
    for name in listed:
        source = ROOT / name
        if name and not name.startswith("tests/") and source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    if with_wheels:
        place = folder / "deploy" / "wheelhouse"
        for wheel in WHEELHOUSE.glob("*.whl"):
            shutil.copy2(wheel, place / wheel.name)
    return folder


class Project:
    """One Compose project of deploy/docker-compose.yml and overlays, with names and ports of its own."""

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: Mapping[str, str],
        overlays: Sequence[str] = (),
        profiles: Sequence[str] = (),
    ) -> None:
        self.name, self.folder = name, folder
        files = ["docker-compose.yml", *(f"compose/{overlay}.yml" for overlay in overlays)]
        self._chosen = [word for file in files for word in ("-f", str(folder / "deploy" / file))]
        self._chosen += [word for profile in profiles for word in ("--profile", profile)]
        self._env = {**settings, **build_env()}
        self.port, self.port_2 = int(settings["GATEWAY_PORT"]), int(settings["GATEWAY_2_PORT"])
        self.prometheus_port = int(settings["PROMETHEUS_PORT"])

    def compose(self, *words: str, timeout_s: float = 120.0) -> str:
        return command(
            *compose_words(), "-p", self.name, *self._chosen, *words, timeout_s=timeout_s, env=self._env
        )

    def container(self, service: str) -> str:
        """Id of a service's container, also when it has ended."""
        wanted = (
            f"label=com.docker.compose.project={self.name}",
            f"label=com.docker.compose.service={service}",
        )
        found = command("docker", "ps", "-aq", "--filter", wanted[0], "--filter", wanted[1]).split()
        assert len(found) == 1, (service, found)
        return found[0]

    def inside(self, service: str, *words: str, timeout_s: float = 60.0) -> str:
        return command("docker", "exec", self.container(service), *words, timeout_s=timeout_s)

    def state(self, service: str) -> dict[str, Any]:
        text = command("docker", "inspect", "--format", "{{json .State}}", self.container(service))
        found: dict[str, Any] = json.loads(text)
        return found

    def health(self, service: str) -> str:
        state = self.state(service)
        return str(state.get("Health", {}).get("Status", "")) if state["Running"] else str(state["Status"])

    def logs(self, service: str) -> str:
        done = subprocess.run(
            ["docker", "logs", self.container(service)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout + done.stderr

    def report(self, services: tuple[str, ...]) -> str:
        """What a failed test shows."""
        parts = []
        for service in services:
            try:
                tail = "\n".join(self.logs(service).splitlines()[-12:])
                parts.append(f"--- {service}: {self.health(service)}\n{tail}")
            except (AssertionError, DockerMissingError, subprocess.SubprocessError) as error:
                parts.append(f"--- {service}: {error}")
        return "\n".join(parts)

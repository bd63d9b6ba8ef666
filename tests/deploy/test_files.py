"""The files in deploy/ agree with each other and with the configuration; no Docker needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mooncache.config import Config
from mooncache.runtime.entry import EXIT_CONFIG
from mooncache.store_node.holder import FILES_MAX
from tests.deploy.compose_files import MAIN, OVERLAYS, VARIABLE, merged

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
ONE_SHOT = {"token", "model"}
PROFILES = {"prometheus": "monitoring", "conductor-2": "standby", "gateway-2": "gateways"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return merged()["services"]


def test_the_services_of_a_cluster_are_there(services: dict[str, Any]) -> None:
    asked_for = {name: service["profiles"] for name, service in services.items() if "profiles" in service}
    assert asked_for == {name: [profile] for name, profile in PROFILES.items()}
    assert set(services) - set(asked_for) == ONE_SHOT | {
        *("etcd", "master-1", "master-2", "node-1", "node-2", "conductor", "gateway", "prefill", "decode")
    }


def test_no_service_waits_for_one_of_a_profile(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert not set(service.get("depends_on", {})) & set(PROFILES), name


def test_every_setting_exists(services: dict[str, Any]) -> None:
    known = {
        f"MOONCACHE_{section}_{field}".upper()
        for section, described in Config.model_fields.items()
        for field in described.annotation.model_fields  # type: ignore[union-attr]
    }
    used = {name for service in services.values() for name in service.get("environment", {})}
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    used |= set(re.findall(r"\b(MOONCACHE_[A-Z_]+)=", dockerfile))
    assert {name for name in used if name.startswith("MOONCACHE_")} - known == {"MOONCACHE_BUILD_DIR"}


def test_services_are_limited_watched_and_without_rights(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert "privileged" not in service, name
        if name not in ONE_SHOT:
            assert service["mem_limit"], name
            assert service["healthcheck"]["test"], name
            assert service["restart"] == "unless-stopped", name


def test_only_gateways_are_reachable_and_on_loopback(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if service.get("ports")}
    assert set(published) == {"gateway", "gateway-2", "prometheus"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert len({str(ports) for ports in published.values()}) == 3, "each has a port of its own"
    ways_out = {name for name, service in services.items() if "edge" in service.get("networks", [])}
    assert ways_out == set(published)
    assert {services[name]["network_mode"] for name in ONE_SHOT} == {"none"}


def test_the_token_is_written_by_one_service_only(services: dict[str, Any]) -> None:
    mounts = {
        name: volume
        for name, service in services.items()
        for volume in service.get("volumes", [])
        if volume.startswith("secret:")
    }
    assert mounts.pop("token") == "secret:/run/mooncache/secret"
    assert set(mounts.values()) == {"secret:/run/mooncache/secret:ro"}
    assert "prometheus" not in mounts, "it has a key of its own"


def test_no_secret_is_in_the_files() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.suffix not in (".whl", ".pyc"):
            assert not re.search(r"mc[ct]1\.[a-z0-9]", path.read_text(encoding="utf-8")), path


def test_the_example_names_every_variable_with_its_default() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (MAIN, *OVERLAYS.values())]
    used = dict(one for text in texts for one in VARIABLE.findall(text))
    assert all(used[name] == default for text in texts for name, default in VARIABLE.findall(text))
    lines = (DEPLOY / "env.example").read_text(encoding="utf-8").splitlines()
    documented = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert documented == used
    assert not [text for text in texts if re.search(r"(?<!\$)\$\{[A-Z0-9_]+\}", text)], (
        "every variable has a default"
    )


def test_the_build_context_has_what_the_image_copies() -> None:
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    assert all((ROOT / name).exists() for name in allowed)
    lines = re.findall(
        r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.M
    )
    for name in (word for line in lines for word in line.split()):
        assert name == "." or any(name == good or name.startswith(f"{good}/") for good in allowed), name


def test_the_unit_of_a_store_node() -> None:
    unit = DEPLOY / "systemd" / "mooncache-store-node.service"
    lines = [line for line in unit.read_text(encoding="utf-8").splitlines() if line and line[0] not in "#["]
    settings = [tuple(line.split("=", 1)) for line in lines]
    one = dict(settings)
    assert one["Type"] == "notify", "or systemd makes no notify socket"
    assert int(one["FileDescriptorStoreMax"]) >= FILES_MAX
    assert one["RestartPreventExitStatus"] == str(EXIT_CONFIG)
    environment = dict(value.split("=", 1) for name, value in settings if name == "Environment")
    assert environment.pop("MOONCACHE_CONFIG") == "/etc/mooncache.toml"
    assert environment.keys() <= {
        f"MOONCACHE_{section}_{field}".upper()
        for section, described in Config.model_fields.items()
        for field in described.annotation.model_fields  # type: ignore[union-attr]
    }
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
        )
        said = [line for line in done.stderr.splitlines() if unit.name in line]
        assert all("/opt/mooncache/bin/python is not executable" in line for line in said), done.stderr

"""Overlays and profiles of the Compose file: they fit the file below them and the configuration; no Docker needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import combinations
from typing import Any

import pytest

from mooncache.config import Config, load
from mooncache.config.accounts_place import DatabaseUrl
from tests.deploy.compose_files import DEPLOY, MAIN, OVERLAYS, merged

CHOICES = [names for count in range(len(OVERLAYS) + 1) for names in combinations(OVERLAYS, count)]
PROCESSES = re.compile(r"mooncache\.(master|store_node|conductor|gateway|worker)")


def bytes_of(text: str) -> int:
    """1GiB, 1536m or 1g, as Compose and the configuration write sizes."""
    number, unit = re.fullmatch(r"(\d+)(GiB|MiB|g|m)", text).groups()  # type: ignore[union-attr]
    return int(number) << (30 if unit in {"GiB", "g"} else 20)


def processes(whole: dict[str, Any]) -> dict[str, Config]:
    """The configuration of each service of mooncache; raises ConfigInvalid for a wrong name or value."""
    return {
        name: load(env={key: str(value) for key, value in service["environment"].items()})
        for name, service in whole["services"].items()
        if service.get("command") and PROCESSES.fullmatch(str(service["command"][0]))
    }


def test_there_is_a_file_for_each_choice() -> None:
    assert set(OVERLAYS) == {"ssd", "tls", "gpu", "rdma", "postgres", "prices"}


@pytest.mark.parametrize("names", CHOICES, ids="+".join)
def test_every_choice_is_a_configuration(names: tuple[str, ...]) -> None:
    whole, main = merged(*names), merged()
    assert len(processes(whole)) == 10
    added = set(whole["services"]) - set(main["services"])
    assert added == ({"certificates"} if "tls" in names else set())
    for name, service in whole["services"].items():
        assert service["cap_drop"] == ["ALL"] and service["read_only"] is True, name
        assert not any(service.get(word) for word in ("privileged", "cap_add", "user")), name
        assert len({volume.split(":")[1] for volume in service.get("volumes", [])}) == len(
            service.get("volumes", [])
        ), f"{name}: two volumes at one place"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert "/" in source or source in whole["volumes"], (name, source)
        assert set(service.get("depends_on", {})) <= set(whole["services"]), name


def test_each_node_has_a_disk_of_its_own() -> None:
    whole = merged("ssd")
    disks = []
    for name, config in processes(whole).items():
        mounts = [one for one in whole["services"][name].get("volumes", []) if one.endswith(":/ssd")]
        node = config.store_node
        assert (node.ssd_bytes > 0, node.ssd_paths) == ((True, ("/ssd",)) if mounts else (False, ())), name
        disks += mounts
    assert len(set(disks)) == 2
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"install -d -o mooncache .*-m 0700[^&]* /ssd \\", image), (
        "a volume gets its owner from there"
    )


@pytest.mark.parametrize("names", [(), ("ssd",)], ids=["memory", "ssd"])
def test_the_limit_of_a_node_has_room_for_all_that_it_keeps(names: tuple[str, ...]) -> None:
    whole = merged(*names)
    for name in ("node-1", "node-2"):
        node = processes(whole)[name].store_node
        disk_index = node.ssd_bytes // (64 << 10) * 61  # docs/storage.md, blocks of 64 KiB
        needed = node.capacity_bytes + (384 << 20) + disk_index + ((40 << 20) if node.ssd_bytes else 0)
        assert bytes_of(whole["services"][name]["mem_limit"]) >= needed, name


def test_a_second_conductor_and_a_second_gateway_differ_in_their_names_alone() -> None:
    services = merged()["services"]
    one, other = (dict(services[name]) for name in ("conductor", "conductor-2"))
    names = [service.pop("environment") for service in (one, other)]
    assert names[0] | {"MOONCACHE_CONDUCTOR_ADVERTISE_HOST": "conductor-2"} == names[1]
    assert one == {key: value for key, value in other.items() if key != "profiles"}
    own = {"ports": 0, "profiles": 0, "volumes": 0}
    one, other = services["gateway"], services["gateway-2"]
    assert one | own == other | own
    differing = set(one["volumes"]) ^ set(other["volumes"])
    assert differing == {"batches:/batches", "batches-2:/batches"}, "two gateways do not share a folder"


def test_gateways_and_no_other_service_take_batches() -> None:
    taking = {
        name: str(config.gateway.batch_dir)
        for name, config in processes(merged()).items()
        if config.gateway.batch_dir is not None
    }
    assert taking == dict.fromkeys(("gateway", "gateway-2"), "/batches")
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"install -d -o mooncache .*-m 0700[^&]* /batches ", image), (
        "a volume gets its owner from there"
    )


def test_all_gateways_and_no_other_service_have_the_prices() -> None:
    whole = merged("prices")
    found = {}
    for name, config in processes(whole).items():
        if config.gateway.price_file is not None:
            mounts = [each.split(":") for each in whole["services"][name]["volumes"]]
            found[name] = [each for each in mounts if each[1] == str(config.gateway.price_file)]
    book = ["./prices.toml", "/etc/mooncache/prices.toml", "ro"]
    assert found == {"gateway": [book], "gateway-2": [book]}


def test_all_know_all_conductors() -> None:
    whole = merged()
    there = {f"{name}:7800" for name in whole["services"] if name.startswith("conductor")}
    for name, config in processes(whole).items():
        assert set(config.cluster.conductor_target.split(",")) == there, name


def test_tls_is_on_everywhere_with_each_service_s_own_certificate() -> None:
    whole = merged("tls")
    services = whole["services"]
    made = set(services["certificates"]["environment"]["HOSTS"].split())
    for name, config in processes(whole).items():
        tls = config.tls
        assert tls.enabled and tls.require_client_cert and not tls.insecure, name
        assert str(tls.cert_file) == f"/run/mooncache/tls/{name}/cert.pem"
        assert str(tls.key_file) == f"/run/mooncache/tls/{name}/key.pem"
        assert str(tls.ca_file) == "/run/mooncache/tls/ca.pem"
        assert config.coordination.etcd_tls == (config.coordination.backend == "etcd"), name
        assert name in made
    written = {
        name for name, service in services.items() if "tls:/run/mooncache/tls" in service.get("volumes", [])
    }
    assert written == {"certificates"}, "nobody else may change a certificate"
    keys = {name for name, service in services.items() if "authority:" in str(service.get("volumes"))}
    assert keys == {"certificates"}, "nobody else may sign one"
    etcd = " ".join(services["etcd"]["command"])
    assert "--client-cert-auth" in etcd and "http://0.0.0.0" not in etcd and "etcd" in made


def test_the_key_of_etcd_can_be_read_by_its_user() -> None:
    """Its image has another user than the one that makes the certificates."""
    assert merged("tls")["services"]["etcd"]["group_add"] == ["10001"]
    assert "--uid 10001 --user-group" in (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def test_prometheus_asks_in_tls_what_it_asks_without(tmp_path: Any) -> None:
    """The overlay makes its configuration with a command: run it on the real file."""
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the configuration")
    script = merged("tls")["services"]["prometheus"]["command"][0].replace("exec prometheus", "exit #")
    script = script.replace("/etc/prometheus/prometheus.yml", str(DEPLOY / "prometheus" / "prometheus.yml"))
    script = script.replace("/tmp/prometheus.yml", str(tmp_path / "made.yml"))
    subprocess.run(["/bin/sh", "-ec", script], check=True, timeout=20)
    plain = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    secure = yaml.safe_load((tmp_path / "made.yml").read_text(encoding="utf-8"))
    assert secure.pop("rule_files") == ["/etc/prometheus/alerts.yml"]
    assert [job["scheme"] for job in secure["scrape_configs"]] == ["https"] * len(plain["scrape_configs"])
    for job in secure["scrape_configs"]:
        assert job.pop("tls_config") == {"ca_file": "/run/mooncache/tls/ca.pem"}
        job.pop("scheme")
    assert secure == {name: value for name, value in plain.items() if name != "rule_files"}


def test_each_worker_has_a_gpu_of_its_own() -> None:
    services = merged("gpu")["services"]
    found = []
    for name in ("prefill", "decode"):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        found += device["device_ids"]
        assert services[name]["build"]["target"] == "vllm-cuda"
        assert services[name]["environment"]["MOONCACHE_WORKER_ENGINE"] == "vllm"
        assert services[name]["image"] != services["gateway"]["image"]
    assert len(set(found)) == 2


def test_all_gateways_and_no_other_service_know_the_database_of_accounts() -> None:
    whole = merged("postgres")
    knowing = {
        name
        for name, config in processes(whole).items()
        if isinstance(config.cluster.accounts_place, DatabaseUrl)
    }
    assert knowing == {"gateway", "gateway-2"}
    text = (DEPLOY / "env.example").read_text(encoding="utf-8")
    url = whole["services"]["gateway"]["environment"]["MOONCACHE_CLUSTER_ACCOUNTS_DIR"]
    assert f"ACCOUNTS_URL={url}\n" in text


def test_what_moves_blocks_has_the_rdma_devices_and_may_lock_memory() -> None:
    services = merged("rdma")["services"]
    having = {name for name, service in services.items() if "/dev/infiniband" in str(service.get("devices"))}
    assert having == {"node-1", "node-2", "prefill", "decode"}
    assert all(services[name]["ulimits"]["memlock"] == {"soft": -1, "hard": -1} for name in having)


def test_every_target_ends_without_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.M | re.S))
    targets = {"core", "hf", "vllm-cpu", "vllm-cuda"}
    assert targets <= set(stages)
    assert set(re.findall(r"--target (\S+) -t", text)) == targets, "the head of the file names each"
    for target in targets:
        assert re.findall(r"^[A-Z]+ .*", stages[target], re.M)[-1] == "USER mooncache", target
    for name, service in merged("gpu")["services"].items():
        if service.get("build", {}).get("dockerfile") == "deploy/Dockerfile":
            assert service["build"]["target"] in targets, name
    assert text.rstrip().endswith("\nFROM hf"), "a build without a target"


@pytest.mark.parametrize("names", [(), *((name,) for name in OVERLAYS), tuple(OVERLAYS)], ids="+".join)
def test_compose_takes_every_choice(names: tuple[str, ...]) -> None:
    """By Compose itself, where docker-compose is installed; no engine is asked."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    files = [word for path in (MAIN, *(OVERLAYS[name] for name in names)) for word in ("-f", str(path))]
    profiles = ["--profile", "standby", "--profile", "gateways", "--profile", "monitoring"]
    done = subprocess.run(
        ["docker-compose", *files, *profiles, "config"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(done.stdout)["services"]
    for name, service in merged(*names)["services"].items():
        assert {key: str(value) for key, value in service.get("environment", {}).items()} == {
            key: str(value) for key, value in found[name].get("environment", {}).items()
        }, name

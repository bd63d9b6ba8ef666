"""Elections by a Lease, as the chart sets them up: rights on one object, files of an account, the API behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncache.config import load
from mooncache.coordination import MasterRecord, make_conductor_coordinator, make_coordinator
from mooncache.coordination.lease import LeaseCoordinator
from mooncache.runtime.clock import SystemClock
from tests.coordination.kubernetes_api import KubernetesApi, running_api
from tests.deploy.chart import (
    NAMESPACE,
    VALUE_SETS,
    Object,
    component,
    container,
    environment,
    named,
    of_kind,
    pod,
    rendered,
    workloads,
)

LEASE = VALUE_SETS[0].with_name("lease.yaml")
PARTS = ("master", "conductor")
parts = pytest.mark.parametrize("part", PARTS)


def workload_of(part: str) -> Object:
    (found,) = (one for one in workloads(rendered(LEASE)) if component(one) == part)
    return found


def role_of(part: str) -> Object:
    (found,) = (one for one in of_kind(rendered(LEASE), "Role") if component(one) == part)
    return found


def lease_of(part: str) -> Object:
    (found,) = (one for one in of_kind(rendered(LEASE), "Lease") if component(one) == part)
    return found


@parts
def test_a_part_may_read_and_write_its_own_lease_and_nothing_else(part: str) -> None:
    objects, account = rendered(LEASE), pod(workload_of(part))["serviceAccountName"]
    (binding,) = (one for one in of_kind(objects, "RoleBinding") if component(one) == part)
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]
    assert named(objects, "ServiceAccount", account)["automountServiceAccountToken"] is False
    assert binding["roleRef"]["name"] == role_of(part)["metadata"]["name"]
    (rule,) = role_of(part)["rules"]
    assert (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"])
    assert set(rule["verbs"]) == {"get", "update"}
    assert rule["resourceNames"] == [lease_of(part)["metadata"]["name"]]
    assert not of_kind(objects, "ClusterRole", "ClusterRoleBinding")


def test_only_what_is_elected_has_a_token_and_it_ends() -> None:
    for workload in workloads(rendered(LEASE)):
        sources = [
            source
            for volume in pod(workload)["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in source
        ]
        assert len(sources) == (component(workload) in PARTS)
        assert all(one["serviceAccountToken"]["expirationSeconds"] <= 3600 for one in sources)
        assert ("serviceAccountName" in pod(workload)) == (component(workload) in PARTS)


@pytest.mark.parametrize("path", VALUE_SETS, ids=lambda path: path.stem)
def test_without_a_lease_nothing_gets_an_account(path: Path) -> None:
    if "lease" in path.read_text(encoding="utf-8").split("coordination:")[-1].partition("\n")[0]:
        pytest.skip("masters of this set are elected by a Lease")
    assert not of_kind(rendered(path), "Lease", "Role", "RoleBinding", "ServiceAccount")


def account_at(folder: Path, api: KubernetesApi, part: str) -> dict[str, str]:
    """The rendered settings, with the rendered mount's files in `folder` instead."""
    settings = environment(container(workload_of(part)))
    (mount,) = (one for one in container(workload_of(part))["volumeMounts"] if one["name"] == "kubernetes")
    assert settings["MOONCACHE_COORDINATION_KUBERNETES_ACCOUNT"] == mount["mountPath"]
    (volume,) = (one for one in pod(workload_of(part))["volumes"] if one["name"] == "kubernetes")
    folder.mkdir()
    for source in volume["projected"]["sources"]:
        for item in (source.get("serviceAccountToken"), *source.get("configMap", {}).get("items", [])):
            if item is not None:
                (folder / item["path"]).write_bytes((api.folder / item["path"]).read_bytes())
    return settings | {
        "MOONCACHE_COORDINATION_KUBERNETES_ACCOUNT": str(folder),
        "MOONCACHE_COORDINATION_KUBERNETES_API": api.url,
    }


@parts
async def test_the_rendered_settings_elect_with_the_rendered_rights(tmp_path: Path, part: str) -> None:
    lease = lease_of(part)
    with running_api(tmp_path / "kubernetes") as api:
        api.verbs = set(role_of(part)["rules"][0]["verbs"])
        api.create(NAMESPACE, {**lease, "metadata": dict(lease["metadata"])})
        config = load(env=account_at(tmp_path / "account", api, part))
        make = make_coordinator if part == "master" else make_conductor_coordinator
        coordinator = make(config, SystemClock())
        assert isinstance(coordinator, LeaseCoordinator)
        await coordinator.start(MasterRecord("pod-0", "pod-0:7700"))
        assert (await coordinator.campaign()).term > 0
        held = api.leases[NAMESPACE, lease["metadata"]["name"]]
        assert held["spec"]["holderIdentity"].startswith("pod-0_")
        assert held["metadata"]["labels"] == lease["metadata"]["labels"]
        await coordinator.close()


def test_conductors_by_etcd_share_its_settings_with_masters() -> None:
    objects = rendered(LEASE.with_name("etcd_conductors.yaml"))
    (master, conductor) = (
        next(one for one in workloads(objects) if component(one) == part) for part in PARTS
    )
    names = [
        name for name in environment(container(master)) if "_COORDINATION_ETCD_" in name or "_PREFIX" in name
    ]
    assert "MOONCACHE_COORDINATION_ETCD_PASSWORD" in names
    for name in names:
        assert environment(container(conductor))[name] == environment(container(master))[name]
    assert load(env=environment(container(conductor))).conductor.election == "etcd"


def test_each_conductor_is_reached_by_its_own_name() -> None:
    objects = rendered(LEASE.with_name("etcd_conductors.yaml"))
    (conductors,) = (one for one in workloads(objects) if component(one) == "conductor")
    name, service = conductors["metadata"]["name"], conductors["spec"]["serviceName"]
    found = load(env=environment(container(conductors))).cluster.conductor_target.split(",")
    assert [target.split(".")[:2] for target in found] == [
        [f"{name}-{number}", service] for number in range(3)
    ]
    advertised = load(env=environment(container(conductors))).conductor.advertise_host
    assert advertised.split(".")[1:] == found[0].rpartition(":")[0].split(".")[1:]
    assert named(objects, "Service", service)["spec"]["publishNotReadyAddresses"] is True

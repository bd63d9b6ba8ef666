"""What the Helm chart mounts: price book, batches, shared tier, keys of tenants, and volumes of the operator's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mooncache.config import Config, load
from mooncache.prices.loading import read_prices
from mooncache.store_node.tenant_keys import read_key_file
from tests.deploy.chart import (
    INSECURE,
    SINGLE,
    VALUE_SETS,
    Object,
    component,
    container,
    environment,
    named,
    of_kind,
    pod,
    rendered,
    template,
    workloads,
)

FULLNAME = "rel-mooncache"


def workload_of(value_set: str, name: str) -> Object:
    objects = rendered(VALUE_SETS[0].with_name(f"{value_set}.yaml"))
    (found,) = (each for each in workloads(objects) if component(each) == name)
    return found


def mounted(workload: Object, path: Path | None) -> Object:
    """The volume that a path of the container is on."""
    assert path is not None
    (name,) = (
        each["name"] for each in container(workload)["volumeMounts"] if path.is_relative_to(each["mountPath"])
    )
    (volume,) = (each for each in pod(workload)["volumes"] if each["name"] == name)
    return dict(volume)


def config_of(workload: Object) -> Config:
    return load(env=environment(container(workload)))


def test_gateways_read_the_price_book_of_the_values(tmp_path: Path) -> None:
    gateway = workload_of("prices_and_batches", "gateway")
    path = config_of(gateway).gateway.price_file
    source = mounted(gateway, path)["configMap"]
    objects = rendered(VALUE_SETS[0].with_name("prices_and_batches.yaml"))
    made = named(objects, "ConfigMap", source["name"])["data"]
    (item,) = source["items"]
    assert path is not None and item["path"] == path.name
    book = tmp_path / "prices.toml"
    book.write_text(made[item["key"]])
    assert read_prices(book).cost.currency == "EUR"
    assert gateway["spec"]["template"]["metadata"]["annotations"]["mooncache/prices"], "new prices, new pods"


def test_endpoint_pickers_read_a_price_book_of_the_operator() -> None:
    picker = workload_of("picker_and_keda", "endpoint_picker")
    source = mounted(picker, config_of(picker).gateway.price_file)["configMap"]
    assert source == {"name": "prices", "items": [{"key": "book.toml", "path": "prices.toml"}]}


def test_batches_are_on_a_volume_of_one_gateway() -> None:
    gateway = workload_of("prices_and_batches", "gateway")
    claim = mounted(gateway, config_of(gateway).gateway.batch_dir)["persistentVolumeClaim"]["claimName"]
    objects = rendered(VALUE_SETS[0].with_name("prices_and_batches.yaml"))
    (made,) = of_kind(objects, "PersistentVolumeClaim")
    assert made["metadata"]["name"] == claim == f"{FULLNAME}-gateway-batches"
    assert made["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert made["spec"]["resources"]["requests"]["storage"] == "50Gi"
    assert gateway["spec"]["replicas"] == 1
    assert gateway["spec"]["strategy"] == {"type": "Recreate"}, "two pods would want one folder"
    other = workload_of("shared_and_encrypted", "gateway")
    assert mounted(other, config_of(other).gateway.batch_dir)["emptyDir"] == {"sizeLimit": "10Gi"}
    assert other["spec"]["strategy"]["type"] == "RollingUpdate"


def test_volumes_of_the_operator_are_beside_those_of_the_chart() -> None:
    gateway = workload_of("prices_and_batches", "gateway")
    captured = mounted(gateway, config_of(gateway).gateway.capture_file)
    assert captured == {"name": "captured", "persistentVolumeClaim": {"claimName": "captured"}}


def test_all_nodes_share_a_folder_or_an_object_store() -> None:
    node = workload_of("shared_and_encrypted", "store_node")
    found = config_of(node).store_node
    assert mounted(node, found.shared_path)["persistentVolumeClaim"] == {"claimName": "shared"}
    assert (found.shared_bytes, found.shared_url) == (2 << 40, "")
    node = workload_of("object_store", "store_node")
    found = config_of(node).store_node
    assert (found.shared_url, found.shared_path) == ("s3://bucket/mooncache", None)
    assert container(node)["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    room = mounted(node, found.shared_spool_path)["emptyDir"]["sizeLimit"]
    assert int(room.removesuffix("Mi")) << 20 > found.shared_spool_bytes, "or the pod is evicted"


def test_keys_of_tenants_become_files_that_nodes_take(tmp_path: Path) -> None:
    node = workload_of("shared_and_encrypted", "store_node")
    (copying,) = pod(node)["initContainers"]
    secrets, keys, target = tmp_path / "from", tmp_path / "tenant-keys", tmp_path / "secret"
    for folder in (secrets, keys / "..data", target):
        folder.mkdir(parents=True)
    (secrets / "cluster.token").write_text("text")
    (keys / "..data" / "team-a.key").write_text("0f" * 32 + "\n")
    (keys / "..data" / "team-a.key").chmod(0o440)
    (keys / "team-a.key").symlink_to(Path("..data") / "team-a.key")
    places = {mount["name"]: mount["mountPath"] for mount in copying["volumeMounts"]}
    folders = {"from": secrets, "tenant-keys": keys, "secret": target}
    assert places.keys() == folders.keys()
    command: list[str] = copying["command"]
    for name, folder in folders.items():
        command = [word.replace(places[name], str(folder)) for word in command]
    subprocess.run(command, check=True, timeout=60)
    where = config_of(node).store_node.tenant_keys_path
    assert where is not None
    made = target / where.relative_to(places["secret"])
    assert read_key_file(made / "team-a.key") == [bytes.fromhex("0f" * 32)]
    assert mounted(node, where)["emptyDir"]["medium"] == "Memory"
    for name in ("master", "gateway"):
        assert "tenant-keys" not in str(pod(workload_of("shared_and_encrypted", name))), "store nodes alone"


UNFIT = {
    "set gateway.replicas=1": "gateway.batches.enabled=true",
    "has a volume and is not enabled": "gateway.batches.existingClaim=a",
    "has both existingClaim and claim.size": (
        "gateway.replicas=1,gateway.batches.enabled=true,gateway.batches.existingClaim=a,gateway.batches.claim.size=1Gi"
    ),
    "has both text and existingConfigMap": "gateway.priceBook.text=a,gateway.priceBook.existingConfigMap=b",
    "is one of existingClaim, hostPath and url": (
        "storeNode.shared.existingClaim=a,storeNode.shared.hostPath=/b"
    ),
    "credentials of storeNode.shared.url": "storeNode.shared.secret=a",
    "config.gateway.batch_dir is set by the chart": (
        "gateway.replicas=1,gateway.batches.enabled=true,config.gateway.batch_dir=/a"
    ),
}


@pytest.mark.parametrize("sentence", UNFIT)
def test_volumes_that_cannot_work_are_refused_with_a_sentence(sentence: str) -> None:
    done = template(*INSECURE, *SINGLE, "--set", UNFIT[sentence])
    assert done.returncode != 0
    assert sentence in done.stderr


WRONG = {
    "a volume under a name of the chart": ("gateway.extraVolumes[0].name", "secret"),
    "a mount over the secrets": ("gateway.extraVolumeMounts[0].mountPath", "/run/mooncache/secret"),
    "credentials in a URL": ("storeNode.shared.url", "s3://key:word@bucket"),
    "a size in another unit": ("storeNode.shared.size", "16GB"),
    "a word for a switch": ("storeNode.keepMemory", "perhaps"),
    "a volume under the holder's name": ("storeNode.extraVolumes[0].name", "holder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_schema_refuses_volumes_that_are_none(name: str) -> None:
    value, text = WRONG[name]
    more = ("--set", "gateway.extraVolumeMounts[0].name=a") if value.endswith("mountPath") else ()
    done = template(*INSECURE, *SINGLE, *more, "--set", f"{value}={text}")
    assert done.returncode != 0
    assert "don't meet the specifications of the schema" in done.stderr, done.stderr

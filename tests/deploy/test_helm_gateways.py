"""What the Helm chart makes for gateways and controllers of others: Envoy with an InferencePool, and KEDA."""

from __future__ import annotations

from mooncache.config import load
from tests.deploy.chart import (
    VALUE_SETS,
    Object,
    component,
    container,
    environment,
    named,
    of_kind,
    pod,
    rendered,
    selected,
    workloads,
)


def one(name: str) -> tuple[Object, ...]:
    return rendered(VALUE_SETS[0].with_name(f"{name}.yaml"))


def test_keda_asks_the_conductor_about_each_set() -> None:
    objects = one("picker_and_keda")
    (conductor,) = (each for each in workloads(objects) if component(each) == "conductor")
    config = load(env=environment(container(conductor)))
    assert config.conductor.scaler_enabled
    scaled = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "ScaledObject")}
    assert set(scaled) == {"rel-mooncache-worker-prefill", "rel-mooncache-worker-decode"}
    for name, spec in scaled.items():
        target = spec["scaleTargetRef"]
        workload = named(objects, target["kind"], target["name"])
        worker = load(env=environment(container(workload))).worker
        (trigger,) = spec["triggers"]
        host, _, port = trigger["metadata"]["scalerAddress"].rpartition(":")
        service = named(objects, "Service", host.partition(".")[0])
        assert selected(service, objects) == [conductor]
        assert int(port) == config.conductor.scaler_port
        assert (trigger["type"], trigger["metadata"]["role"]) == ("external", worker.role)
        assert trigger["metadata"]["model"] == "m", "the name that a worker gives a model of this folder"
        assert spec["minReplicaCount"] == (2 if name.endswith("decode") else 1)
        assert spec["maxReplicaCount"] == 8
        authentication = named(objects, "TriggerAuthentication", trigger["authenticationRef"]["name"])
        assert {each["name"] for each in authentication["spec"]["secretTargetRef"]} == {"rel-mooncache-tls"}
        (certificate,) = of_kind(objects, "Certificate")
        assert host in certificate["spec"]["dnsNames"], "KEDA compares it"


def test_gateways_and_no_other_pod_have_the_database_of_accounts() -> None:
    knowing = set()
    for workload in workloads(one("keys_and_extras")):
        for entry in container(workload)["env"]:
            if entry["name"] == "MOONCACHE_CLUSTER_ACCOUNTS_DIR":
                assert entry["valueFrom"] == {"secretKeyRef": {"name": "accounts", "key": "url"}}
                knowing.add(component(workload))
        sources = str(pod(workload)["volumes"])
        assert ("accounts-ca.crt" in sources) == (component(workload) == "gateway")
        seen = environment(container(workload))
        assert (seen.get("PGSSLROOTCERT") == "/run/mooncache/secret/accounts-ca.crt") == (
            component(workload) == "gateway"
        )
    assert knowing == {"gateway"}


def test_an_inference_pool_has_the_instances_that_generate() -> None:
    objects = one("picker_and_keda")
    (pool,) = of_kind(objects, "InferencePool")
    (picked,) = selected({"spec": {"selector": pool["spec"]["selector"]["matchLabels"]}}, objects)
    assert load(env=environment(container(picked))).worker.role == "decode"
    config = load(env=environment(container(picked)))
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [config.worker.engine_port]
    reference = pool["spec"]["endpointPickerRef"]
    service = named(objects, "Service", reference["name"])
    (picker,) = selected(service, objects)
    assert component(picker) == "endpoint_picker"
    assert reference["port"]["number"] == load(env=environment(container(picker))).endpoint_picker.port
    (policy,) = (
        each
        for each in of_kind(objects, "NetworkPolicy")
        if each["metadata"]["name"] == "rel-mooncache-worker"
    )
    assert len(policy["spec"]["ingress"][0]["from"]) == 2, "Envoy reaches the engines"

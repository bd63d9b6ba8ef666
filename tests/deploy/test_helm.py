"""The Helm chart over a dozen value sets: what is rendered is valid, hardened, consistent, and our own parsers take it.

What real processes say of it is in test_helm_processes.py. How to run both: docs/kubernetes.md.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from mooncache.cli.app import build
from mooncache.config import Config, load
from tests.deploy.chart import (
    CHART,
    INSECURE,
    NAMESPACE,
    RELEASE,
    ROOT,
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
    run_helm,
    schema,
    selected,
    template,
    texts,
    workloads,
)

KUBERNETES = ("1.28", "1.32", "1.37")
GROUPS_OF_OTHERS = ("cert-manager.io", "inference.networking.k8s.io", "keda.sh", "monitoring.coreos.com")
sets = pytest.mark.parametrize("path", VALUE_SETS, ids=lambda path: path.stem)


def one(name: str) -> tuple[Object, ...]:
    return rendered(VALUE_SETS[0].with_name(f"{name}.yaml"))


def test_there_are_a_dozen_value_sets() -> None:
    assert len(VALUE_SETS) >= 12


@sets
def test_lint_finds_nothing(path: Path) -> None:
    done = run_helm("lint", "--strict", str(CHART), "--values", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "funcMap fail" not in done.stderr, "a check of the chart refuses the value set"


@sets
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_object(path: Path, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")
    found = 0
    for thing in rendered(path):
        if not thing["apiVersion"].startswith(GROUPS_OF_OTHERS):
            validate.validate(thing, version, strict=True)
            found += 1
    assert found > 5


@sets
def test_names_are_short_and_used_once(path: Path) -> None:
    names = [(thing["kind"], thing["metadata"]["name"]) for thing in rendered(path)]
    assert len(names) == len(set(names))
    assert all(len(name) <= 52 for _, name in names), "a StatefulSet adds a hash of ten to its pods' label"


@sets
def test_pods_have_no_rights(path: Path) -> None:
    for workload in workloads(rendered(path)):
        spec = pod(workload)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001, "the user of deploy/Dockerfile"
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in (*spec["initContainers"], *spec["containers"]):
            rights = each["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert each["resources"]["limits"]["memory"]
            assert "ports" not in each or all("hostPort" not in port for port in each["ports"])


@sets
def test_secrets_are_files_and_in_no_variable(path: Path) -> None:
    for workload in workloads(rendered(path)):
        for entry in container(workload)["env"]:
            if entry["name"] in ("MOONCACHE_CLIENT_TOKEN", "MOONCACHE_COORDINATION_ETCD_PASSWORD"):
                assert "secretKeyRef" in entry["valueFrom"], entry["name"]
        assert not [text for text in texts(workload) if "mcc1." in text]
        mounts = {mount["name"]: mount for mount in container(workload)["volumeMounts"]}
        assert "from" not in mounts, "only the container that copies sees the Secrets as they are mounted"
        assert mounts["secret"]["readOnly"] is True
        volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
        assert volumes["secret"]["emptyDir"]["medium"] == "Memory"
        assert {mount["name"] for mount in container(workload)["volumeMounts"]} <= set(volumes) | {"ssd"}


@sets
def test_every_variable_is_a_setting_and_the_configuration_loads(path: Path) -> None:
    known = {
        f"MOONCACHE_{section}_{field}".upper()
        for section, described in Config.model_fields.items()
        for field in described.annotation.model_fields  # type: ignore[union-attr]
    }
    for workload in workloads(rendered(path)):
        seen = environment(container(workload))
        assert {name for name in seen if name.startswith("MOONCACHE_")} <= known
        assert "$(" not in "".join(seen.values()), "a variable refers to one that is not defined before it"
        config = load(env=seen)
        assert not (config.tls.enabled and config.tls.insecure)
        assert pod(workload)["enableServiceLinks"] is False, "or Services would appear as settings"


@sets
def test_every_command_line_is_one_of_ours(path: Path) -> None:
    modules = {"master", "store_node", "conductor", "gateway", "worker", "endpoint_picker"}
    elsewhere = {"gateway.picker": "endpoint_picker"}
    for workload in workloads(rendered(path)):
        (module,) = container(workload)["args"]
        assert "command" not in container(workload), "the image's entry point runs modules"
        name = module.removeprefix("mooncache.")
        assert elsewhere.get(name, name) == component(workload)
        assert component(workload) in modules
        assert importlib.util.find_spec(f"{module}.__main__") is not None
        hook = container(workload).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if hook[:1] == ["/bin/bash"]:
            words = hook[2].split()
            assert words[:2] == ["exec", "mooncache"]
            command, bound, _ = build().parse_args(words[2:], print_error=False, exit_on_error=False)
            assert command.__name__ == "drain"
            assert bound.arguments["where"].timeout.endswith("s")


@sets
def test_what_services_are_told_of_each_other_is_there(path: Path) -> None:
    objects = rendered(path)
    by_component: dict[str, list[Object]] = {}
    for workload in workloads(objects):
        by_component.setdefault(component(workload), []).append(workload)
    (masters,) = by_component["master"]
    for workload in workloads(objects):
        config = load(env=environment(container(workload)))
        assert len(config.cluster.master_targets) == masters["spec"]["replicas"]
        for number, target in enumerate(config.cluster.master_targets):
            pod_name, service_name, namespace, rest = target.split(".", 3)
            assert (pod_name, namespace) == (f"{masters['metadata']['name']}-{number}", NAMESPACE)
            assert masters["spec"]["serviceName"] == service_name
            assert rest.startswith("svc.")
            service = named(objects, "Service", service_name)
            assert selected(service, objects) == [masters]
            assert service["spec"]["publishNotReadyAddresses"] is True
            assert int(target.rpartition(":")[2]) in port_numbers(container(masters))
        if "conductor" in by_component:
            (conductors,) = by_component["conductor"]
            targets = config.cluster.conductor_target.split(",")
            assert len(targets) == conductors["spec"]["replicas"]
            for target in targets:
                service = named(objects, "Service", target.split(".")[0 if len(targets) == 1 else 1])
                assert selected(service, objects) == [conductors]
                assert int(target.rpartition(":")[2]) in {port["port"] for port in service["spec"]["ports"]}
    advertised = load(env=environment(container(masters))).master.advertise_host
    assert advertised.split(".", 1)[1] == config.cluster.master_targets[0].partition(".")[2].removesuffix(
        ":7700"
    )


def port_numbers(of: Object) -> set[int]:
    return {port["containerPort"] for port in of["ports"]}


@sets
def test_ports_are_those_that_processes_open(path: Path) -> None:
    objects = rendered(path)
    for workload in workloads(objects):
        config = load(env=environment(container(workload)))
        section: Any = getattr(config, component(workload))
        opened = {section.port, section.metrics_port}
        opened |= {getattr(section, name) for name in ("data_port", "engine_port") if hasattr(section, name)}
        if getattr(section, "scaler_enabled", False):
            opened.add(section.scaler_port)
        assert port_numbers(container(workload)) == opened
        names = {port["name"] for port in container(workload)["ports"]}
        services = [one for one in of_kind(objects, "Service") if workload in selected(one, objects)]
        assert services
        for service in services:
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
        assert "metrics" in {port["name"] for service in services for port in service["spec"]["ports"]}


@sets
def test_ports_beyond_loopback_have_tls_or_a_word_for_it(path: Path) -> None:
    for workload in workloads(rendered(path)):
        config = load(env=environment(container(workload)))
        assert config.tls.enabled or config.tls.insecure
        (source,) = (volume for volume in pod(workload)["volumes"] if volume["name"] == "from")
        files = {item["path"] for each in source["projected"]["sources"] for item in each["secret"]["items"]}
        named_files = [config.cluster.token_path, config.gateway.keys_file]
        named_files += [config.tls.cert_file, config.tls.key_file, config.tls.ca_file]
        assert {path.name for path in named_files if path is not None} <= files
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container(workload)[probe]["httpGet"]
            assert asked["scheme"] == ("HTTPS" if config.tls.enabled else "HTTP")
            assert asked["port"] == "metrics"


@sets
def test_what_registers_is_ready_only_then(path: Path) -> None:
    for workload in workloads(rendered(path)):
        probe = container(workload)["readinessProbe"]["httpGet"]["path"]
        registers = component(workload) in ("store_node", "worker")
        assert probe == ("/serving" if registers else "/ready"), component(workload)


@sets
def test_drains_end_before_pods_are_killed(path: Path) -> None:
    for workload in workloads(rendered(path)):
        config = load(env=environment(container(workload)))
        own = {
            "gateway": config.gateway.drain_timeout_s,
            "endpoint_picker": config.gateway.drain_timeout_s,
            "worker": config.worker.drain_timeout_s,
        }
        drain_s = own.get(component(workload), 5.0)
        hook = container(workload).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if hook:
            drain_s += float(hook[-1].rpartition(" ")[2].rstrip("s"))
        assert pod(workload)["terminationGracePeriodSeconds"] >= drain_s + 20


@sets
def test_several_pods_are_spread_and_not_all_taken_at_once(path: Path) -> None:
    objects = rendered(path)
    off = path.stem == "all_off"
    budgets = {
        tuple(sorted(budget["spec"]["selector"]["matchLabels"].items())): budget["spec"]
        for budget in of_kind(objects, "PodDisruptionBudget")
    }
    for workload in workloads(objects):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        scaled = component(workload) == "worker" and "replicas" not in workload["spec"]  # by KEDA
        if (scaled or workload["spec"].get("replicas", 1) > 1) and not off:
            for constraint in pod(workload)["topologySpreadConstraints"]:
                assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()
            keys = {constraint["topologyKey"] for constraint in pod(workload)["topologySpreadConstraints"]}
            assert keys == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}
            mine = [budget for selector, budget in budgets.items() if set(selector) <= labels.items()]
            assert [budget["maxUnavailable"] for budget in mine] == [1]
        else:
            assert not [selector for selector in budgets if set(selector) <= labels.items()]


@sets
def test_policies_let_in_every_port_and_nothing_else(path: Path) -> None:
    objects = rendered(path)
    policies = of_kind(objects, "NetworkPolicy")
    if path.stem in ("all_off", "daemonset_rdma"):
        assert not policies
        return
    for workload in workloads(objects):
        labels = workload["spec"]["template"]["metadata"]["labels"].items()
        (policy,) = (one for one in policies if one["spec"]["podSelector"]["matchLabels"].items() <= labels)
        rules = policy["spec"]["ingress"]
        allowed = {port["port"] for rule in rules for port in rule["ports"]}
        assert allowed == port_numbers(container(workload))
        for rule in rules:
            if component(workload) != "gateway" and {"port": 9100, "protocol": "TCP"} not in rule["ports"]:
                assert rule["from"], "control, data and engine ports are for the release"


def test_shared_memory_has_one_host_name_at_both_ends() -> None:
    for workload in workloads(one("ssd_hosts_shared_memory")):
        config = load(env=environment(container(workload)))
        mounts = {mount["name"] for mount in container(workload)["volumeMounts"]}
        if component(workload) == "store_node":
            assert config.store_node.host_id == config.client.host_id != ""
            assert config.store_node.unix_enabled
            assert str(config.store_node.unix_path).startswith("/run/mooncache/sockets/")
        if component(workload) in ("store_node", "worker"):
            assert "sockets" in mounts
    (node,) = (one for one in workloads(one("pool_only")) if component(one) == "store_node")
    assert not load(env=environment(container(node))).store_node.unix_enabled


def test_memory_limits_follow_the_capacity() -> None:
    def limits(name: str) -> dict[str, Any]:
        (node,) = (each for each in workloads(one(name)) if component(each) == "store_node")
        found = container(node)["resources"]
        assert found["requests"]["memory"] == found["limits"]["memory"], "memory that is touched at the start"
        return dict(found["limits"])

    assert limits("pool_only") == {"memory": f"{8192 + 512 + 768}Mi"}
    assert limits("huge_pages") == {"memory": f"{256 + 1024}Mi", "hugepages-2Mi": "4098Mi"}
    assert limits("daemonset_rdma")["rdma/hca_shared_devices_a"] == 1


def test_settings_of_sets_and_of_all_reach_the_processes() -> None:
    objects = one("tls_secrets")
    prefill = named(objects, "StatefulSet", f"{RELEASE}-mooncache-worker-prefill")
    config = load(env=environment(container(prefill)))
    assert config.vllm.max_model_len == 32768
    assert config.vllm.extra_args == ("--tensor-parallel-size", "1")
    assert config.worker.role == "prefill"
    (node,) = (each for each in workloads(one("ssd_claims")) if component(each) == "store_node")
    config = load(env=environment(container(node)))
    assert (config.master.replicas, config.store_node.ssd_dwpd) == (2, 1.5)
    assert config.store_node.labels == ("rack=r1", "zone=zone-a")
    assert config.store_node.ssd_bytes == 400 << 30
    config = load(env=environment(container(named(one("pinned_and_named"), "Deployment", "kv-conductor"))))
    assert (config.conductor.ttft_slo_s, config.store_node.expected_block_bytes) == (2.5, 2 << 20)
    assert config.gateway.cors_origins == ("https://a.example", "https://b.example")


def test_what_is_off_stays_off_in_a_set_of_workers() -> None:
    (none,) = (each for each in workloads(one("all_off")) if component(each) == "worker")
    assert none["spec"]["replicas"] == 0
    assert not of_kind(one("all_off"), "PodDisruptionBudget")
    for workload in workloads(one("all_off")):
        hook = container(workload).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        assert "drain" not in " ".join(hook)


def test_images_by_digest_and_by_tag() -> None:
    objects = one("pinned_and_named")
    for workload in workloads(objects):
        images = {each["image"] for each in (*pod(workload)["initContainers"], container(workload))}
        (image,) = images
        if component(workload) == "worker":
            assert image == "registry.example/mooncache-cuda:1"
        else:
            assert image.startswith("registry.example/mooncache@sha256:")
        assert pod(workload)["imagePullSecrets"] == [{"name": "registry"}]


def test_monitoring_finds_every_service_and_the_jobs_have_their_names() -> None:
    yaml = pytest.importorskip("yaml")
    objects = one("monitoring")
    (monitor,) = of_kind(objects, "ServiceMonitor")
    assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/component"
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    jobs = {
        component(service)
        for service in of_kind(objects, "Service")
        if wanted <= service["metadata"]["labels"].items()
        and "metrics" in {port["name"] for port in service["spec"]["ports"]}
    }
    assert jobs == {"master", "store_node", "conductor", "gateway"}
    (rule,) = of_kind(objects, "PrometheusRule")
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    page = "https://wiki.example/mooncache/runbooks.md"
    assert rule["spec"] == yaml.safe_load(alerts.replace("{{ $externalURL }}/user/runbooks.md", page))
    dashboard = named(objects, "ConfigMap", f"{RELEASE}-mooncache-dashboard")
    sources = {
        path.name: path.read_text(encoding="utf-8") for path in (ROOT / "deploy" / "grafana").glob("*.json")
    }
    assert len(sources) == 3
    assert {name: text.strip() for name, text in dashboard["data"].items()} == {
        name: text.strip() for name, text in sources.items()
    }


def test_objects_of_the_operator_come_along() -> None:
    objects = one("keys_and_extras")
    assert named(objects, "ConfigMap", "plain")["data"] == {"a": "b"}
    made = named(objects, "ConfigMap", f"{RELEASE}-mooncache-text")
    assert made["data"]["targets"].count(":7700") == 2


def test_the_certificate_has_the_name_that_is_checked() -> None:
    objects = one("cert_manager")
    (certificate,) = of_kind(objects, "Certificate")
    for workload in workloads(objects):
        config = load(env=environment(container(workload)))
        assert config.tls.server_name in certificate["spec"]["dnsNames"]
        (source,) = (volume for volume in pod(workload)["volumes"] if volume["name"] == "from")
        secrets = {each["secret"]["name"] for each in source["projected"]["sources"]}
        assert certificate["spec"]["secretName"] in secrets
        tokens = {made["metadata"]["name"] for made in of_kind(objects, "Secret")}
        assert tokens < secrets


WRONG = {
    "an unknown name": "storeNodes.replicas=2",
    "an unknown name in a set of workers": "workers.a.model=/models/m,workers.a.rol=prefill",
    "a word for a number": "gateway.replicas=two",
    "a capacity in another unit": "storeNode.capacity=8GB",
    "no capacity": "storeNode.capacity=0GiB",
    "another kind": "storeNode.kind=Deployment",
    "a wrong role": "workers.a.model=/models/m,workers.a.role=encode",
    "a model that is no folder of the volume": "workers.a.model=meta-llama/Llama-3.1-8B",
    "a set without a model": "workers.a.role=both",
    "a name of a set that no pod can have": "workers.A_b.model=/models/m",
    "a wrong level": "logLevel=chatty",
    "an endpoint without a port": "coordination.etcd.endpoints={etcd}",
    "no master": "master.replicas=0",
    "a section that is none": "config.masters.replicas=2",
    "a digest that is none": "image.digest=sha256:123",
    "a setting past the configuration": "gateway.extraEnv[0].name=MOONCACHE_TLS_ENABLED",
    "a path that is relative": "models.hostPath=models",
    "a limit without memory": "conductor.resources.limits.memory=null",
    "a label that nodes refuse": "storeNode.labels.Rack=r1",
    "no instance at all": "workers.a.model=/models/m,workers.a.autoscaling.minReplicas=0",
    "too many endpoints": "endpointPicker.fallbackCount=9",
}


def test_what_is_made_wrong_below_is_right_before() -> None:
    good = template(*INSECURE, *SINGLE)
    assert good.returncode == 0, good.stderr


@pytest.mark.parametrize("values", WRONG.values(), ids=list(WRONG))
def test_the_schema_refuses(values: str) -> None:
    done = template(*INSECURE, *SINGLE, "--set", values)
    assert done.returncode != 0
    assert "don't meet the specifications of the schema" in done.stderr, done.stderr


UNFIT = {
    "TLS needs certificates": (*SINGLE,),
    "say tls.insecure=true as well": (*SINGLE, "--set", "tls.enabled=false"),
    "are both true": (*SINGLE, "--set", "tls.insecure=true"),
    "needs issuerRef.name": (*SINGLE, "--set", "tls.certManager.enabled=true"),
    "etcd.endpoints is empty": (*INSECURE,),
    "exactly one master": (*INSECURE, "--set", "coordination.backend=embedded"),
    "etcd.tls uses the files": (*INSECURE, *SINGLE, "--set", "coordination.etcd.tls=true"),
    "RDMA is not encrypted": (*SINGLE, "--set", "tls.existingSecret=a,rdma.enabled=true"),
    "needs a place": (*INSECURE, *SINGLE, "--set", "storeNode.ssd.size=1GiB"),
    "keep one": (
        *(*INSECURE, *SINGLE, "--set"),
        "storeNode.ssd.size=1GiB,storeNode.ssd.hostPath=/a,storeNode.ssd.claim.size=2Gi",
    ),
    "has no volume claims": (
        *(*INSECURE, *SINGLE, "--set"),
        "storeNode.kind=DaemonSet,storeNode.ssd.size=1GiB,storeNode.ssd.claim.size=2Gi",
    ),
    "with storeNode.hostNetwork": (*INSECURE, *SINGLE, "--set", "storeNode.hostNetwork=true"),
    "Workers need models": (*INSECURE, *SINGLE, "--set", "workers.a.model=/models/m"),
    "needs keySecret.name": (*INSECURE, *SINGLE, "--set", "metrics.serviceMonitor.enabled=true"),
    "name the pods of your Envoy": (*INSECURE, *SINGLE, "--set", "endpointPicker.enabled=true"),
    "has to keep others from the picker": (
        *(*INSECURE, *SINGLE, "--set"),
        "endpointPicker.enabled=true,endpointPicker.keyRequired=false,networkPolicy.enabled=false",
    ),
    "minReplicas is larger": (
        *(*INSECURE, *SINGLE, "--set"),
        "models.hostPath=/m,workers.a.model=/models/m",
        "--set",
        "workers.a.autoscaling.enabled=true,workers.a.autoscaling.minReplicas=9",
    ),
    "config.gateway.port is set by the chart": (*INSECURE, *SINGLE, "--set", "config.gateway.port=1"),
}


@pytest.mark.parametrize("sentence", UNFIT)
def test_values_that_do_not_fit_together_are_refused_with_a_sentence(sentence: str) -> None:
    done = template(*UNFIT[sentence])
    assert done.returncode != 0
    assert sentence in done.stderr


def test_the_schema_knows_every_value_and_every_section() -> None:
    yaml = pytest.importorskip("yaml")
    described = schema()
    assert described["definitions"]["config"]["propertyNames"]["enum"] == list(Config.model_fields)

    def compare(values: Object, node: Object, at: str) -> None:
        if "properties" not in node:
            return
        names = set(node["properties"]) - {"global", "group"}
        optional = {"repository", "tag", "digest"} if at.endswith("workerDefaults.image") else set()
        assert set(values) | optional == names | optional, at
        for name, value in values.items():
            if isinstance(value, dict):
                compare(value, node["properties"][name], f"{at}.{name}")

    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    compare(values, described, "values")
    of_set, of_all = described["definitions"]["workerSet"], described["properties"]["workerDefaults"]
    assert set(of_set["properties"]) == set(of_all["properties"]) | {"model"}


def test_the_chart_has_the_version_of_the_package() -> None:
    yaml = pytest.importorskip("yaml")
    import mooncache

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == mooncache.__version__

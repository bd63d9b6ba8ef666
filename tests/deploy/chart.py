"""The Helm chart rendered by the real helm, and what its containers say; no cluster needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "mooncache"
VALUE_SETS = sorted((Path(__file__).parent / "helm_values").glob("*.yaml"))
RELEASE, NAMESPACE = "rel", "ns"
INSECURE = ("--set", "tls.enabled=false,tls.insecure=true")
SINGLE = ("--set", "coordination.backend=embedded,master.replicas=1")
Object = dict[str, Any]
# What the kubelet and the cluster put in; a zone label is there as Kubernetes 1.35 and later copy it to pods.
DOWNWARD = {
    "metadata.name": "pod-0",
    "status.podIP": "10.1.2.3",
    "spec.nodeName": "host-7.example",
    "metadata.labels['topology.kubernetes.io/zone']": "zone-a",
}


def helm() -> str:
    """The helm program: $MOONCACHE_TEST_HELM, that of PATH, or that of the environment. Skips where there is none."""
    ours = str(Path(sys.executable).parent)  # scripts/install_helm.py
    found = os.environ.get("MOONCACHE_TEST_HELM") or shutil.which("helm") or shutil.which("helm", path=ours)
    if not found:
        pytest.skip("needs helm on PATH or in MOONCACHE_TEST_HELM")
    return found


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *arguments], capture_output=True, text=True, timeout=120, check=False)


def template(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *arguments)


@cache
def rendered(path: Path) -> tuple[Object, ...]:
    """All objects of a value set."""
    yaml = pytest.importorskip("yaml", reason="PyYAML reads what helm renders")
    done = template("--values", str(path))
    assert done.returncode == 0, done.stderr
    return tuple(found for found in yaml.safe_load_all(done.stdout) if found)


def of_kind(objects: tuple[Object, ...], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def named(objects: tuple[Object, ...], kind: str, name: str) -> Object:
    (found,) = (one for one in of_kind(objects, kind) if one["metadata"]["name"] == name)
    return found


def workloads(objects: tuple[Object, ...]) -> list[Object]:
    return of_kind(objects, "Deployment", "StatefulSet", "DaemonSet")


def component(of: Object) -> str:
    return str(of["metadata"]["labels"]["app.kubernetes.io/component"])


def pod(workload: Object) -> Object:
    found: Object = workload["spec"]["template"]["spec"]
    return found


def container(workload: Object) -> Object:
    """The service itself; a store node that keeps its memory has a holder beside it."""
    name = component(workload).replace("_", "-")
    (found,) = (each for each in pod(workload)["containers"] if each["name"] == name)
    return dict(found)


def environment(of: Object) -> dict[str, str]:
    """The variables as the process would see them: $(NAME) stands for what was defined before, as for the kubelet."""
    seen: dict[str, str] = {}
    for entry in of["env"]:
        assert entry["name"] not in seen, f"{entry['name']} twice"
        source = entry.get("valueFrom", {})
        if "secretKeyRef" in source:
            value = "from-a-secret"
        elif "fieldRef" in source:
            value = DOWNWARD[source["fieldRef"]["fieldPath"]]
        else:
            value = re.sub(r"\$\((\w+)\)", lambda found: seen.get(found[1], found[0]), entry.get("value", ""))
        seen[entry["name"]] = value
    return seen


def selected(service: Object, objects: tuple[Object, ...]) -> list[Object]:
    """The workloads whose pods a selector takes."""
    wanted = service["spec"]["selector"].items()
    return [
        one for one in workloads(objects) if wanted <= one["spec"]["template"]["metadata"]["labels"].items()
    ]


def texts(value: object) -> Iterator[str]:
    """Every text in an object, keys apart."""
    if isinstance(value, dict):
        for one in value.values():
            yield from texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts(one)
    elif isinstance(value, str):
        yield value


def schema() -> Object:
    found: Object = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return found

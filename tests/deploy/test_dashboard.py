"""Every query of the dashboards, the alerts and the runbooks, against the metrics of a running cluster."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
from mooncache.cluster.settings import missing_modules
from tests.conditions import wait_until
from tests.deploy.promql import Selector, queries_of_page, references
from tests.ports import own_port

pytestmark = pytest.mark.timeout(300)

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ADDED_BY_PROMETHEUS = {"job", "instance", "le"}
JOBS = ("master", "store_node", "conductor", "gateway", "worker")
REQUESTS_PER_MINUTE = 12
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
dashboards = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def dashboard_queries() -> list[str]:
    """Of all dashboards; a query that stands in several of them once."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS]
    found = [
        target["expr"] for one in documents for panel in one["panels"] for target in panel.get("targets", ())
    ]
    return list(dict.fromkeys(found))


def alert_queries() -> list[str]:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the alerts")
    document = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    return [rule["expr"] for group in document["groups"] for rule in group["rules"]]


def runbook_queries() -> list[str]:
    return queries_of_page((DEPLOY.parent / "docs" / "runbooks.md").read_text(encoding="utf-8"))


SOURCES = {"dashboard": dashboard_queries, "alerts": alert_queries, "runbooks": runbook_queries}


@dataclass
class Live:
    """Metrics of all services: label sets of each sample name, and names that have no sample yet."""

    addresses: dict[str, list[str]]
    samples: dict[str, list[dict[str, str]]]
    declared: set[str]

    def names(self, selector: Selector) -> list[str]:
        known = set(self.samples) | self.declared
        if selector.pattern:
            return [name for name in known if re.fullmatch(selector.name, name)]
        return [selector.name] if selector.name in known else []

    def has(self, selector: Selector) -> bool:
        """Whether a sample was there that it selects; a status that no answer had has none."""
        return any(
            all(_fits(sample.get(label, ""), op, value) for label, op, value in selector.matchers)
            for sample in self.samples.get(selector.name, ())
        )

    def labels(self, name: str) -> set[str]:
        """Label names of a metric; of one without a sample those that the code declares."""
        found = {label for labels in self.samples.get(name, ()) for label in labels}
        return found | ADDED_BY_PROMETHEUS | declared_labels().get(name, set())


def _fits(found: str, op: str, value: str) -> bool:
    """One matcher, as Prometheus reads it. A label that a sample lacks is empty."""
    same = re.fullmatch(value, found) is not None if "~" in op else found == value
    return same is not op.startswith("!")


def declared_labels() -> dict[str, set[str]]:
    """Labels as the services declare them, for metrics that nothing has moved yet."""
    from mooncache.conductor.shell.instruments import ConductorMetrics
    from mooncache.gateway.metrics import GatewayMetrics
    from mooncache.runtime.metrics import Metrics, RpcMetrics

    found: dict[str, set[str]] = {}
    for job in JOBS:
        metrics = Metrics(job)
        RpcMetrics(metrics)
        metrics.counter("duty_failures", "", ("duty", "code"))
        if job == "gateway":
            GatewayMetrics(metrics)
        if job == "conductor":
            ConductorMetrics(metrics)
        registry: CollectorRegistry = metrics.registry
        for family in list(registry._collector_to_names):
            for name in registry._collector_to_names[family]:
                found[name] = set(getattr(family, "_labelnames", ()))
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    if missing := missing_modules("hf"):
        pytest.skip(f"the small engine needs {', '.join(missing)}: pip install 'mooncache[hf]'")
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("watched"),
        engine="hf",
        capacity_bytes=256 << 20,
        port=0,
        conductor_port=0,
        gateway_port=0,
        extra_env=(
            ("OMP_NUM_THREADS", "1"),
            ("MOONCACHE_CONDUCTOR_ADMISSION_ENABLED", "false"),
            ("MOONCACHE_GATEWAY_REQUESTS_PER_MINUTE", str(REQUESTS_PER_MINUTE)),
        ),
    )
    made = EmbeddedCluster(settings)
    made.start(180)
    yield made
    made.stop()


def ask(cluster: EmbeddedCluster, **fields: Any) -> int:
    """One request as a client sends it; the status."""
    key = cluster.demo_key_path.read_text(encoding="ascii").strip()
    request = urllib.request.Request(
        f"{cluster.layout.gateway_url}/v1/chat/completions",
        data=json.dumps(fields).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=90) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


@pytest.fixture(scope="module")
def live(cluster: EmbeddedCluster) -> Live:
    """What the services show after some requests: good ones, one for a model that is not there, too many."""
    model = cluster.describe_instances()[0]["model"]
    turn = {"role": "user", "content": "What is to be seen on a dashboard, and what is not? " * 20}
    good = {"model": model, "messages": [turn], "max_tokens": 8, "temperature": 0}
    assert ask(cluster, **good) == 200
    assert ask(cluster, **good, stream=True) == 200
    assert ask(cluster, **good, stream=True) == 200
    assert ask(cluster, **{**good, "model": "none-such"}) == 404
    assert 429 in {ask(cluster, **{**good, "max_tokens": 1}) for _ in range(REQUESTS_PER_MINUTE)}
    addresses = metrics_addresses(cluster)
    samples: dict[str, list[dict[str, str]]] = {}
    declared: set[str] = set()
    for places in addresses.values():
        for place in places:
            asked = urllib.request.Request(f"http://{place}/metrics", headers={"Accept": OPENMETRICS})
            with urllib.request.urlopen(asked, timeout=10) as response:
                page = response.read().decode()
            assert list(openmetrics.text_string_to_metric_families(page)), "a page that a strict reader takes"
            with urllib.request.urlopen(f"http://{place}/metrics", timeout=10) as response:
                page = response.read().decode()
            for family in text_string_to_metric_families(page):
                declared.add(family.name + ("_total" if family.type == "counter" else ""))
                if family.type == "histogram":
                    declared.add(f"{family.name}_bucket")
                for sample in family.samples:
                    samples.setdefault(sample.name, []).append(dict(sample.labels))
    return Live(addresses, samples, declared)


def metrics_addresses(cluster: EmbeddedCluster) -> dict[str, list[str]]:
    """job -> host:port of the probe servers, from the services' own words."""
    found: dict[str, list[str]] = {job: [] for job in JOBS}
    for path in sorted((cluster.state_dir / "logs").glob("*.log")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if '"service.ready"' in line:
                said = json.loads(line)
                if said["service"] in found:
                    found[said["service"]].append(said["metrics"])
    assert all(found.values()), found
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_every_name_and_label_exists(live: Live, source: str) -> None:
    queries = SOURCES[source]()
    assert len(queries) > 10
    wrong = []
    for query in queries:
        used = references(query)
        assert used.selectors, query
        names = []
        for selector in used.selectors:
            found = ["up"] if selector.name == "up" else live.names(selector)
            names += found
            if not found:
                wrong.append(f"{selector.name} does not exist: {query}")
            for name in found:
                labels = live.labels(name)
                wrong += [f"{name} has no {m[0]}: {query}" for m in selector.matchers if m[0] not in labels]
                wrong += [
                    f"{name} has no {label}={value!r}: {query}"
                    for label, op, value in selector.matchers
                    if op == "="
                    and name in live.samples
                    and value not in {s.get(label) for s in live.samples[name]}
                ]
        # A label that is grouped by may belong to one side of an operator only.
        wrong += [
            f"nothing has {label}: {query}"
            for label in used.grouped
            if not any(label in live.labels(name) for name in names)
        ]
    assert not wrong, "\n".join(wrong)


def test_most_panels_have_something_to_show(live: Live) -> None:
    """Names that nothing has moved in a healthy cluster are few, and known."""
    silent = {
        selector.name
        for query in dashboard_queries()
        for selector in references(query).selectors
        if not selector.pattern and selector.name not in live.samples
    }
    assert silent <= {
        "mooncache_gateway_retries_total",
        "mooncache_gateway_no_keys_total",
        "mooncache_gateway_conductor_errors_total",
        "mooncache_gateway_waits_timed_out_total",
    }


def test_the_dashboards_are_what_their_source_makes() -> None:
    script = [sys.executable, str(DEPLOY / "grafana" / "dashboard.py"), "--check"]
    assert subprocess.run(script, timeout=60, check=False).returncode == 0, "run deploy/grafana/dashboard.py"


def test_a_file_that_was_changed_by_hand_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "grafana"
    shutil.copytree(DEPLOY / "grafana", folder)
    (folder / DASHBOARDS[0].name).write_text("{}", encoding="utf-8")
    script = [sys.executable, str(folder / "dashboard.py"), "--check"]
    assert subprocess.run(script, timeout=60, check=False).returncode == 1


def test_three_readers_and_one_vocabulary() -> None:
    """Each has a dashboard with a name of its own, and a panel says the same in all of them."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS]
    assert [path.name for path in DASHBOARDS] == [
        "mooncache-capacity.json",
        "mooncache-serving.json",
        "mooncache.json",
    ]
    assert [one["uid"] for one in documents] == [path.stem for path in DASHBOARDS]
    assert all(one["links"][0]["tags"] == one["tags"] == ["mooncache"] for one in documents), (
        "they lead to each other"
    )
    said: dict[str, object] = {}
    for panel in (panel for one in documents for panel in one["panels"] if panel["type"] != "row"):
        what = (panel["description"], panel["targets"], panel["fieldConfig"])
        assert said.setdefault(panel["title"], what) == what, panel["title"]
    page = (DEPLOY.parent / "docs" / "observability.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("|")]
    assert {name for row in rows for name in re.split(r"; |, (?=[A-Z])", row)} >= set(said), (
        "the page has each panel"
    )


@dashboards
def test_a_dashboard_is_complete(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    assert all(panel["description"] and panel["targets"] for panel in panels)
    taken = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken)), "panels lie on each other"


def test_the_check_finds_what_is_wrong(live: Live) -> None:
    used = references(
        'sum by (status, le) (rate(mooncache_gateway_requests_total{endpoint=~"a|b}"}[5m])) > 0'
    )
    assert used.grouped == {"status", "le"}
    assert used.selectors == (
        Selector("mooncache_gateway_requests_total", False, (("endpoint", "=~", "a|b}"),)),
    )
    assert live.names(Selector("mooncache_gateway_request_total", pattern=False, matchers=())) == []
    assert "reason" not in live.labels("mooncache_gateway_requests_total")
    named = references('rate({__name__=~"mooncache_.+_rpc_calls_total", code!="OK"}[1m])').selectors[0]
    assert (named.pattern, named.matchers) == (True, (("code", "!=", "OK"),))
    assert len(live.names(named)) >= 4


class Prometheus:
    """A real one, scraping the cluster every second."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **arguments: str) -> dict[str, Any]:
        address = f"{self.url}{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(address, timeout=10) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))

    def value(self, query: str) -> float:
        found = self.get("/api/v1/query", query=query)["data"]["result"]
        return float(found[0]["value"][1]) if found else 0.0


@pytest.fixture(scope="module")
def prometheus(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed (Debian package prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "prometheus" / "alerts.yml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": places}]}
            for job, places in live.addresses.items()
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    address = f"127.0.0.1:{own_port()}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(program, f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={address}"),
                f"--storage.tsdb.path={folder / 'data'}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        made = Prometheus(f"http://{address}")
        count = sum(len(places) for places in live.addresses.values())

        def scrapes_all() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError):
                return made.value("count(count_over_time(up[1m]) >= 3 and up == 1)") == count
            return False

        wait_until(scrapes_all, (folder / "log").read_text, every_s=0.5)
        yield made
    finally:
        process.terminate()
        process.wait(60)


def test_a_real_prometheus_understands_every_query(prometheus: Prometheus, live: Live) -> None:
    may_be_empty = re.compile(r"[<>!]=?|==")  # comparisons and negative matchers may leave nothing over
    queries = [query for queries_of in SOURCES.values() for query in queries_of()]
    waiting = [query.replace("$__rate_interval", "1m") for query in queries]

    def all_answer() -> bool:
        silent = []
        for query in waiting:
            answer = prometheus.get("/api/v1/query", query=query)
            assert answer["status"] == "success", f"{answer.get('error')}: {query}"
            used = [live.has(selector) for selector in references(query).selectors]
            if not answer["data"]["result"] and not may_be_empty.search(query) and all(used):
                silent.append(query)
        waiting[:] = silent
        return not silent

    # A scrape that a busy machine does not finish in time takes its series away until the next one.
    wait_until(all_answer, lambda: "\n".join(waiting), every_s=1.0)


def test_a_real_prometheus_takes_the_alerts_and_none_burns(prometheus: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        rules = [r for group in prometheus.get("/api/v1/rules")["data"]["groups"] for r in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else []

    rules = wait_until(evaluated, "the rules were evaluated", every_s=0.5)
    assert len(rules) == len(alert_queries())
    assert {rule["name"]: rule["health"] for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def test_the_real_configuration_is_valid(tmp_path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    folder = tmp_path / "prometheus"
    shutil.copytree(DEPLOY / "prometheus", folder)
    token = tmp_path / "token"
    token.write_text("x", encoding="ascii")
    config = folder / "prometheus.yml"
    text = config.read_text(encoding="utf-8").replace("/run/mooncache/metrics/metrics.key", str(token))
    config.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [program, "check", "config", str(config)], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

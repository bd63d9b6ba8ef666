"""An alert that burns in a real Prometheus, set up as the Compose file does, leads to its section of the runbooks."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conditions import wait_until
from tests.deploy.chart import INSECURE, SINGLE, of_kind, template
from tests.ports import own_port

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
ALERTS = (DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
PAGES = "/usr/share/mooncache/pages"


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        found: bytes = response.read()
    return found


@pytest.fixture
def burning(tmp_path: Path) -> Iterator[str]:
    """Address of a Prometheus with our rules at once, that sees a master that is not there."""
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the Compose file")
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed (Debian package prometheus)")
    service = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text(encoding="utf-8"))["services"][
        "prometheus"
    ]
    mounts = dict(volume.split(":")[:2][::-1] for volume in service["volumes"])
    pages = tmp_path / "pages"
    pages.mkdir()
    page = DEPLOY / mounts[f"{PAGES}/runbooks.md"]
    shutil.copy(page, pages / "runbooks.md")
    address = f"127.0.0.1:{own_port()}"
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(tmp_path / "alerts.yml")],
        "scrape_configs": [
            {"job_name": "master", "static_configs": [{"targets": [f"127.0.0.1:{own_port()}"]}]}
        ],
    }
    (tmp_path / "alerts.yml").write_text(re.sub(r"for: \w+", "for: 0s", ALERTS), encoding="utf-8")
    (tmp_path / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    swaps = {
        PAGES: str(pages),
        "http://127.0.0.1:${PROMETHEUS_PORT:-9090}": f"http://{address}",
    }
    options = []
    for option in service["command"]:
        name, _, value = option.partition("=")
        options.append(f"{name}={swaps.get(value, value)}")
    command = [
        *(program, f"--config.file={tmp_path / 'prometheus.yml'}", f"--web.listen-address={address}"),
        *(f"--storage.tsdb.path={tmp_path / 'data'}", *options),
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:

        def ready() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            with contextlib.suppress(OSError):
                return bool(get(f"http://{address}/-/ready"))
            return False

        wait_until(ready, (tmp_path / "log").read_text, every_s=0.2)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(60)


def test_the_link_of_a_burning_alert_leads_to_its_section(burning: str) -> None:
    def down() -> list[dict[str, Any]]:
        found = json.loads(get(f"{burning}/api/v1/alerts"))["data"]["alerts"]
        return [
            alert
            for alert in found
            if alert["labels"]["alertname"] == "MooncacheDown" and alert["state"] == "firing"
        ]

    (alert,) = wait_until(down, "the alert burns", every_s=0.5)
    link = alert["annotations"]["runbook_url"]
    assert link.startswith(f"{burning}/user/runbooks.md#"), link
    page, _, anchor = link.partition("#")
    text = get(page).decode()
    assert anchor in [title.lower() for title in re.findall(r"^## (\w+)$", text, re.MULTILINE)]


def test_the_line_that_changes_the_address_changes_every_link(tmp_path: Path) -> None:
    """The command that the file's head shows."""
    (script,) = re.findall(r"^#\s+sed -i '(.+)' alerts\.yml$", ALERTS, re.MULTILINE)
    copy = tmp_path / "alerts.yml"
    copy.write_text(ALERTS, encoding="utf-8")
    subprocess.run(["sed", "-i", script, str(copy)], check=True, timeout=30)
    links = re.findall(r'runbook_url: "(.+)#', copy.read_text(encoding="utf-8"))
    assert len(links) == ALERTS.count("- alert:")
    assert set(links) == {urllib.parse.urldefrag("https://wiki.example/mooncache/runbooks.md").url}


def test_without_an_address_the_chart_makes_no_links() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads what helm renders")
    done = template(*INSECURE, *SINGLE, "--set", "metrics.prometheusRule.enabled=true")
    assert done.returncode == 0, done.stderr
    (made,) = of_kind(tuple(found for found in yaml.safe_load_all(done.stdout) if found), "PrometheusRule")
    rules = [rule for group in made["spec"]["groups"] for rule in group["rules"]]
    assert len(rules) == ALERTS.count("- alert:")
    assert {tuple(rule["annotations"]) for rule in rules} == {("summary", "action")}

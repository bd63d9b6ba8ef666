"""Each alert has a section in the runbooks that somebody woken by it can follow, and no section is about nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mooncache import errors
from mooncache.runtime.logs import Event
from tests.deploy.promql import queries_of_page, references

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
PARTS = ("Users", "Look first", "Do", "Over when")
FILE_ENDINGS = ("log", "md", "yml", "toml")


def sections() -> dict[str, str]:
    """Name of each section -> its text."""
    pieces = re.split(r"^## (.+)\n", PAGE, flags=re.MULTILINE)[1:]
    assert len(pieces[::2]) == len(set(pieces[::2])), "a section exists twice"
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def alerts() -> dict[str, dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the alerts")
    document = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    assert len(rules) == len({rule["alert"] for rule in rules}), "an alert exists twice"
    return {rule["alert"]: rule for rule in rules}


def parts(section: str) -> dict[str, str]:
    """Name of each part of a section -> its text."""
    pieces = re.split(r"^- \*\*(.+?)\*\*:", section, flags=re.MULTILINE)[1:]
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def test_alerts_and_sections_are_the_same() -> None:
    assert list(sections()) == list(alerts()), "in the order of the alerts"


def test_each_alert_leads_to_its_section() -> None:
    for name, rule in alerts().items():
        link = rule["annotations"]["runbook_url"]
        assert link == "{{ $externalURL }}/user/runbooks.md#" + name.lower()


@pytest.mark.parametrize("name", sections())
def test_a_section_says_what_is_needed(name: str) -> None:
    section, rule = sections()[name], alerts()[name]
    found = parts(section)
    assert tuple(found) == PARTS
    assert all(len(text.split()) >= 6 or queries_of_page(text) for text in found.values())
    watched = {selector.name for selector in references(rule["expr"]).selectors}
    for part in ("Look first", "Over when"):
        queries = queries_of_page(found[part])
        assert queries, f"{part} has no query"
    over = {s.name for query in queries_of_page(found["Over when"]) for s in references(query).selectors}
    assert watched & over, f"the end does not look at what the alert looks at: {watched}"
    assert re.search(r"`mooncache [a-z]", section), "no command"


def test_codes_and_events_exist() -> None:
    codes = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", PAGE))
    assert codes
    assert codes <= {kind.name for kind in errors.catalogue()}
    events = {str(event) for event in Event}
    named = {
        name
        for name in re.findall(r"`([a-z]+\.[a-z_]+)`", PAGE)
        if name.partition(".")[0] in {event.partition(".")[0] for event in events}
        and name.rpartition(".")[2] not in FILE_ENDINGS
    }
    settings = {"store_node.capacity_bytes", "cluster.conductor_target", "cluster.master_targets"}
    assert named - settings <= events
    assert named & events


def test_links_inside_the_page_lead_somewhere() -> None:
    anchors = {name.lower() for name in sections()}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors

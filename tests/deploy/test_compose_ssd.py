"""The Compose file with SSDs, a standby conductor and a second gateway: asked, broken, and still right.

Needs a Docker engine, as test_compose.py does.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conditions import wait_until
from tests.deploy.running import (
    LASTING,
    STORY,
    Asker,
    Built,
    asker_of,
    project_of,
    running,
    said,
    wait_for,
    whole_blocks,
)
from tests.deploy.support import Project, command

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400)]

SERVICES = (*LASTING, "conductor-2", "gateway-2")
NODES, ENGINES = ("node-1", "node-2"), ("prefill", "decode")
CAPACITY_MIB = 8  # of each node; a prompt takes more than 1 MiB
PROMPTS = 24
ASK = """
import sys, urllib.request
asked = urllib.request.Request("http://127.0.0.1:9100/metrics", headers={"Authorization": "Bearer " + sys.argv[1]})
print(urllib.request.urlopen(asked, timeout=5).read().decode())
"""


@pytest.fixture(scope="module")
def project(built: Built) -> Iterator[Project]:
    settings = {"NODE_CAPACITY": f"{CAPACITY_MIB}MiB", "SSD_SIZE": "256MiB"}
    made = project_of(built, "ssd", ["ssd"], ["standby", "gateways"], settings)
    with running(made):
        yield made


@pytest.fixture(scope="module")
def asker(project: Project) -> Asker:
    return asker_of(project, SERVICES)


def count(project: Project, node: str, name: str) -> int:
    """A counter of a store node, over all its labels."""
    key = project.inside(node, "mooncache", "token", "--metrics").strip()
    lines = project.inside(node, "/opt/mooncache/bin/python", "-c", ASK, key).splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(name)))


def leader(project: Project) -> str:
    """The conductor that leads, "" when none does."""
    found = []
    for service in ("conductor", "conductor-2"):
        if project.state(service)["Running"]:
            lines = project.logs(service).splitlines()
            events = [line for line in lines if '"conductor.leads"' in line or '"conductor.follows"' in line]
            if events and '"conductor.leads"' in events[-1]:
                found.append(service)
    return found[0] if len(found) == 1 else ""


def test_both_gateways_answer_alike(asker: Asker, project: Project) -> None:
    text, prompt_tokens, _ = asker.chat(said("Both: " + STORY))
    again, _, cached = Asker(project.port_2, asker.key).chat(said("Both: " + STORY))
    assert again == text
    assert cached >= whole_blocks(prompt_tokens) > 0


def test_blocks_outlive_memory_nodes_and_engines(asker: Asker, project: Project) -> None:
    """More is asked than both memories hold; then every memory is gone, with the containers, and the disks are left."""
    questions = [said(f"Question {number}. {STORY}") for number in range(PROMPTS)]
    expected = [asker.chat(question) for question in questions]
    wait_until(
        lambda: all(count(project, node, "mooncache_store_node_ssd_blocks") for node in NODES),
        lambda: project.report(NODES),
        60,
        every_s=1.0,
    )
    project.compose("kill", *NODES, *ENGINES)
    project.compose("rm", "-f", "-v", *NODES, *ENGINES)
    project.compose("up", "-d", "--no-build", timeout_s=300)
    wait_for(project, SERVICES)
    assert all(count(project, node, "mooncache_store_node_ssd_recovered_blocks") for node in NODES)
    for question, (text, prompt_tokens, _) in list(zip(questions, expected, strict=True))[:4]:
        again, _, cached = asker.chat(question)
        assert again == text
        assert cached >= whole_blocks(prompt_tokens) > 0, project.report(NODES)


def test_the_standby_leads_when_the_conductor_is_killed(asker: Asker, project: Project) -> None:
    text, prompt_tokens, _ = asker.chat(said("Led: " + STORY))
    first = leader(project)
    assert first, project.report(("conductor", "conductor-2"))
    command("docker", "kill", project.container(first))
    again, _, cached = asker.chat(said("Led: " + STORY))
    assert again == text
    assert cached >= whole_blocks(prompt_tokens) > 0
    wait_until(
        lambda: leader(project) not in {"", first},
        lambda: project.report(("conductor", "conductor-2")),
        60,
        every_s=1.0,
    )
    fresh, _, _ = asker.chat(said("Led by another: " + STORY))
    assert Asker(project.port_2, asker.key).chat(said("Led by another: " + STORY))[0] == fresh

"""deploy/docker-compose.yml for real: built, started, asked, broken, and still right.

Needs a Docker engine (DOCKER_HOST is respected). The image is built from the working tree; layers of an earlier run
are used again. Everything that it starts is removed at the end, the images stay.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
    prometheus_value,
    running,
    said,
    start_prometheus,
    wait_for,
    whole_blocks,
)
from tests.deploy.support import Project, command

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def project(built: Built) -> Iterator[Project]:
    with running(project_of(built, "main")) as made:
        yield made


@pytest.fixture(scope="module")
def asker(project: Project) -> Asker:
    return asker_of(project, LASTING)


def leader(project: Project) -> str:
    """The service whose master leads, "" when none does."""
    for service in ("master-1", "master-2"):
        if project.state(service)["Running"]:
            lines = project.logs(service).splitlines()
            events = [line for line in lines if '"election.won"' in line or '"election.lost"' in line]
            if events and '"election.won"' in events[-1]:
                return service
    return ""


def test_a_second_turn_is_cached(asker: Asker) -> None:
    first, prompt_tokens, cached = asker.chat(said(STORY + "one"))
    assert cached == 0
    messages = [*said(STORY + "one"), {"role": "assistant", "content": first}, *said("And then?")]
    _, _, cached = asker.chat(messages)
    assert cached >= whole_blocks(prompt_tokens) > 0


def test_one_request_id_in_the_logs_of_all(asker: Asker, project: Project) -> None:
    wanted = "compose-test-request-1"
    asker.chat(said("Logged: " + STORY), wanted)

    def found(service: str, event: str) -> str:
        lines = project.logs(service).splitlines()
        return next((line for line in lines if wanted in line and f'"{event}"' in line), "")

    wait_until(lambda: found("conductor", "rpc.finished"), lambda: project.report(LASTING), 30, every_s=1.0)
    wait_until(lambda: found("gateway", "http.finished"), lambda: project.report(LASTING), 30, every_s=1.0)
    answered = json.loads(found("gateway", "http.finished"))
    engines = [leg.split(":")[0] for leg in answered["instances"]]
    assert "decode" in engines  # the conductor decides whether prefill has a leg, too

    def logged(engine: str) -> bool:
        return wanted in project.inside(engine, "cat", f"/var/lib/mooncache/logs/{engine}.engine.log")

    wait_until(
        lambda: all(logged(engine) for engine in engines),
        lambda: project.report(("prefill", "decode")),
        30,
        every_s=1.0,
    )


def test_a_wrong_key_is_refused(asker: Asker) -> None:
    status, answer = Asker(asker.port, "mct1.team-a." + "0" * 64).get("GET", "/v1/models")
    assert status == 401
    assert answer["error"]["message"]


def test_processes_have_no_rights(project: Project) -> None:
    for service in LASTING:
        status = project.inside(service, "cat", "/proc/1/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split()[0] != "0", service
        assert int(fields["CapEff"], 16) == 0, service
        assert fields["NoNewPrivs"].strip() == "1", service


def test_nothing_but_the_gateway_is_published(project: Project) -> None:
    for service in LASTING:
        ports = command("docker", "port", project.container(service)).strip()
        assert ports == ("" if service != "gateway" else f"8000/tcp -> 127.0.0.1:{project.port}")


def test_prometheus_sees_every_service(asker: Asker, project: Project) -> None:
    assert asker.get("GET", "/v1/models")[0] == 200
    start_prometheus(project)
    wait_until(
        lambda: prometheus_value(project, "sum(up)") == "8",
        lambda: project.report(("prometheus",)),
        90,
        every_s=1.0,
    )
    assert prometheus_value(project, "count(up)") == "8"  # services of other profiles are no targets
    assert prometheus_value(project, "sum(mooncache_master_leading)") == "1"
    assert prometheus_value(project, "sum(mooncache_worker_engine_up)") == "2"


@pytest.mark.skipif(os.geteuid() != 0, reason="processes of containers belong to other users: needs root")
def test_chaos_keeps_every_promise(asker: Asker, project: Project) -> None:
    """Faults under load, reached from the host, and healed by the restart policy of the file."""
    assert asker.get("GET", "/v1/models")[0] == 200
    faults = ("kill-master", "kill-etcd", "kill-store-node", "stop-conductor", "flip-store-node")
    words = ["chaos", "run", *faults, "--compose", project.name, "--yes", "--json", "--duration", "5s"]
    done = subprocess.run(
        [sys.executable, "-m", "mooncache.cli", *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    found = json.loads(text)
    assert found["kept"] and set(found["requests"]) == {"right"}, text
    assert {each["name"] for each in found["faults"]} == set(faults)
    assert {each["row"] for each in found["faults"]} == {"M2", "T1", "N1", "C2", "L10"}
    assert found["blocks"]["read"] > found["blocks"]["missed"]
    restarts = [
        command("docker", "inspect", "--format", "{{.RestartCount}}", project.container(each["target"]))
        for each in found["faults"]
        if each["name"].startswith("kill-")
    ]
    assert all(int(text) >= 1 for text in restarts), "Docker started what was killed again"
    left = command("docker", "ps", "-aq", "--filter", "name=mooncache-chaos-").split()
    assert not left, "the pool's client is gone with the run"


def test_right_answers_after_the_leader_and_a_node_are_killed(asker: Asker, project: Project) -> None:
    questions = [said(f"Question {number}. {STORY}") for number in range(4)]
    expected = [asker.chat(question)[0] for question in questions]
    old = leader(project)
    assert old, project.report(("master-1", "master-2"))
    command("docker", "kill", project.container(old))
    assert [asker.chat(question)[0] for question in questions] == expected  # while nobody leads
    wait_until(
        lambda: leader(project) not in {"", old},
        lambda: project.report(("master-1", "master-2")),
        60,
        every_s=1.0,
    )
    assert [asker.chat(question)[0] for question in questions] == expected
    command("docker", "kill", project.container("node-1"))
    assert [asker.chat(question)[0] for question in questions] == expected  # with what node-2 has
    fresh = said("After the loss: " + STORY)
    text, prompt_tokens, _ = asker.chat(fresh)
    again, _, cached = asker.chat(fresh)
    assert again == text
    assert cached >= whole_blocks(prompt_tokens) > 0
    for service in (old, "node-1"):
        command("docker", "start", project.container(service))
    wait_for(project, LASTING, 120)
    assert [asker.chat(question)[0] for question in questions] == expected


def test_it_stops_when_asked(asker: Asker, project: Project) -> None:
    """Last in this file: every service drains and ends by itself, none has to be killed."""
    assert asker.get("GET", "/v1/models")[0] == 200
    for service in ("gateway", "decode", "prefill", "conductor", "node-2", "master-2"):
        command("docker", "stop", "--time", "45", project.container(service), timeout_s=90)
        assert project.state(service)["ExitCode"] == 0, project.report((service,))

"""deploy/docker-compose.yml for real: built, started, asked, broken, and still right.

Needs a Docker engine (DOCKER_HOST is respected). The image is built from the working tree; layers of an earlier run
are used again. Everything that it starts is removed at the end, the images stay.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conditions import wait_until
from tests.deploy.support import (
    ETCD_IMAGE,
    IMAGE,
    PROMETHEUS_IMAGE,
    DockerMissingError,
    Project,
    base_image,
    command,
    compose_words,
    context,
    need_packages,
    wheelhouse,
)

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400)]

LASTING = ("etcd", "master-1", "master-2", "node-1", "node-2", "conductor", "gateway", "prefill", "decode")
BLOCK_TOKENS = 32
STORY = "The pool keeps blocks of a conversation so that the next turn need not compute them again. " * 12


class Asker:
    """Asks the gateway as a client does."""

    def __init__(self, port: int, key: str) -> None:
        self.port, self.key = port, key

    def get(self, method: str, path: str, body: Any = None, request_id: str = "") -> tuple[int, Any]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        try:
            link.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = link.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            link.close()

    def chat(self, messages: list[dict[str, str]], request_id: str = "") -> tuple[str, int, int]:
        """Text, prompt tokens, cached tokens of a greedy answer."""
        body = {"model": "tiny-model", "messages": messages, "max_tokens": 24, "temperature": 0}
        status, answer = self.get("POST", "/v1/chat/completions", body, request_id)
        assert status == 200, answer
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    try:
        compose_words()
        base = base_image()
        need_packages(base)
    except DockerMissingError as error:
        pytest.skip(f"no Docker engine to run containers with: {error}")
    with_wheels = wheelhouse()
    folder = context(tmp_path_factory.mktemp("context"), with_wheels=with_wheels)
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, prometheus_port = one.getsockname()[1], other.getsockname()[1]
    settings = {
        "BASE_IMAGE": base,
        "MOONCACHE_IMAGE": IMAGE,
        "ETCD_IMAGE": ETCD_IMAGE,
        "PIP_NO_INDEX": "1" if with_wheels else "0",
        "NODE_CAPACITY": "256MiB",
        "ENGINE_THREADS": "1",
        "GATEWAY_PORT": str(port),
        "PROMETHEUS_IMAGE": PROMETHEUS_IMAGE,
        "PROMETHEUS_PORT": str(prometheus_port),
        "LOG_LEVEL": "debug",
    }
    made = Project(f"mooncache-test-{os.getpid()}", folder, settings)
    try:
        if not os.environ.get("MOONCACHE_TEST_IMAGE_READY"):  # set: images of an earlier run are good enough
            made.compose("build", "token", "etcd", timeout_s=1800)  # one service builds the image for all
        made.compose("up", "-d", "--no-build", timeout_s=600)
        yield made
    finally:
        made.compose("--profile", "monitoring", "down", "-v", "--timeout", "5", timeout_s=180)


@pytest.fixture(scope="module")
def asker(project: Project) -> Asker:
    wait_until(
        lambda: all(project.health(service) == "healthy" for service in LASTING),
        lambda: project.report(LASTING),
        300,
        every_s=1.0,
    )
    key = project.inside("gateway", "mooncache", "token", "--tenant", "team-a").strip()
    made = Asker(project.port, key)
    wait_until(
        lambda: len(made.get("GET", "/v1/models")[1].get("data", [])) == 1,
        lambda: project.report(LASTING),
        60,
        every_s=1.0,
    )
    return made


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
    # All full blocks of the first prompt, less the one in which the template goes on differently.
    assert cached >= (prompt_tokens // BLOCK_TOKENS - 1) * BLOCK_TOKENS > 0


def test_one_request_id_in_the_logs_of_all(asker: Asker, project: Project) -> None:
    wanted = "compose-test-request-1"
    asker.chat(said("Logged: " + STORY), wanted)  # nothing of it is cached, so both legs have work

    def logged(service: str) -> bool:
        if service in {"gateway", "conductor"}:
            return wanted in project.logs(service)
        path = f"/var/lib/mooncache/logs/{service}.engine.log"  # the worker's engine
        return wanted in project.inside(service, "cat", path)

    services = ("gateway", "conductor", "prefill", "decode")
    wait_until(
        lambda: all(logged(service) for service in services),
        lambda: project.report(services),
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
    project.compose("--profile", "monitoring", "build", "prometheus", timeout_s=600)
    project.compose(
        "--profile", "monitoring", "up", "-d", "--no-build", "--no-deps", "prometheus", timeout_s=120
    )

    def value(query: str) -> str:
        link = http.client.HTTPConnection("127.0.0.1", project.prometheus_port, timeout=10)
        try:
            link.request("GET", "/api/v1/query?" + urllib.parse.urlencode({"query": query}))
            found = json.loads(link.getresponse().read())["data"]["result"]
            return str(found[0]["value"][1]) if found else ""
        except (OSError, http.client.HTTPException):
            return ""
        finally:
            link.close()

    wait_until(lambda: value("sum(up)") == "8", lambda: project.report(("prometheus",)), 90, every_s=1.0)
    assert value("sum(mooncache_master_leading)") == "1"
    assert value("sum(mooncache_worker_engine_up)") == "2"


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
    assert cached >= (prompt_tokens // BLOCK_TOKENS - 1) * BLOCK_TOKENS > 0
    for service in (old, "node-1"):
        command("docker", "start", project.container(service))
    wait_until(
        lambda: all(project.health(service) == "healthy" for service in LASTING),
        lambda: project.report(LASTING),
        120,
        every_s=1.0,
    )
    assert [asker.chat(question)[0] for question in questions] == expected


def test_it_stops_when_asked(asker: Asker, project: Project) -> None:
    """Last in this file: every service drains and ends by itself, none has to be killed."""
    assert asker.get("GET", "/v1/models")[0] == 200
    for service in ("gateway", "decode", "prefill", "conductor", "node-2", "master-2"):
        command("docker", "stop", "--time", "45", project.container(service), timeout_s=90)
        assert project.state(service)["ExitCode"] == 0, project.report((service,))

"""A cluster of the Compose file that runs, and a client that asks it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conditions import wait_until
from tests.deploy.support import ETCD_IMAGE, IMAGE, PROMETHEUS_IMAGE, Project

LASTING = ("etcd", "master-1", "master-2", "node-1", "node-2", "conductor", "gateway", "prefill", "decode")
BLOCK_TOKENS = 32
STORY = "The pool keeps blocks of a conversation so that the next turn need not compute them again. " * 12


@dataclass(frozen=True)
class Built:
    """A copy of the working tree, and what its images were built with."""

    folder: Path
    settings: Mapping[str, str]


class Asker:
    """Asks a gateway as a client does; by https when it gets a context."""

    def __init__(self, port: int, key: str, tls: ssl.SSLContext | None = None) -> None:
        self.port, self.key, self._tls = port, key, tls

    def get(self, method: str, path: str, body: Any = None, request_id: str = "") -> tuple[int, Any]:
        link = (
            http.client.HTTPSConnection("127.0.0.1", self.port, timeout=120, context=self._tls)
            if self._tls
            else http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        )
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


def whole_blocks(prompt_tokens: int) -> int:
    """Tokens of all full blocks of a prompt, less the one in which the template goes on differently."""
    return (prompt_tokens // BLOCK_TOKENS - 1) * BLOCK_TOKENS


def project_of(
    built: Built,
    name: str,
    overlays: Sequence[str] = (),
    profiles: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
) -> Project:
    """A project with free ports; nothing of it runs yet. more: variables of deploy/env.example."""
    with ExitStack() as open_until_all_are_known:
        sockets = [open_until_all_are_known.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [str(one.getsockname()[1]) for one in sockets]
    settings = {
        **built.settings,
        **dict(zip(("GATEWAY_PORT", "GATEWAY_2_PORT", "PROMETHEUS_PORT"), ports, strict=True)),
        "MOONCACHE_IMAGE": IMAGE,
        "ETCD_IMAGE": ETCD_IMAGE,
        "PROMETHEUS_IMAGE": PROMETHEUS_IMAGE,
        "NODE_CAPACITY": "256MiB",
        "ENGINE_THREADS": "1",
        "LOG_LEVEL": "debug",
        **(more or {}),
    }
    return Project(f"mooncache-test-{name}-{os.getpid()}", built.folder, settings, overlays, profiles)


@contextmanager
def running(made: Project) -> Iterator[Project]:
    """The project up; nothing is left of it at the end."""
    try:
        made.compose("up", "-d", "--no-build", timeout_s=600)
        yield made
    finally:
        made.compose("--profile", "monitoring", "down", "-v", "--timeout", "5", timeout_s=180)


def wait_for(project: Project, services: Sequence[str], within_s: float = 300) -> None:
    """Until all are healthy."""
    wait_until(
        lambda: all(project.health(service) == "healthy" for service in services),
        lambda: project.report(tuple(services)),
        within_s,
        every_s=1.0,
    )


def asker_of(project: Project, services: Sequence[str], *, tls: bool = False) -> Asker:
    """A client with a key, when all are healthy and the model is listed."""
    wait_for(project, services)
    key = project.inside("gateway", "mooncache", "token", "--tenant", "team-a").strip()
    authority = project.inside("gateway", "cat", "/run/mooncache/tls/ca.pem") if tls else ""
    made = Asker(project.port, key, ssl.create_default_context(cadata=authority) if tls else None)
    wait_until(
        lambda: len(made.get("GET", "/v1/models")[1].get("data", [])) == 1,
        lambda: project.report(tuple(services)),
        60,
        every_s=1.0,
    )
    return made


def start_prometheus(project: Project) -> None:
    monitoring = ("--profile", "monitoring")
    project.compose(*monitoring, "build", "prometheus", timeout_s=600)
    project.compose(*monitoring, "up", "-d", "--no-build", "--no-deps", "prometheus", timeout_s=120)


def prometheus_value(project: Project, query: str) -> str:
    """The first value of a query; "" while there is none."""
    link = http.client.HTTPConnection("127.0.0.1", project.prometheus_port, timeout=10)
    try:
        link.request("GET", "/api/v1/query?" + urllib.parse.urlencode({"query": query}))
        found = json.loads(link.getresponse().read())["data"]["result"]
        return str(found[0]["value"][1]) if found else ""
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        link.close()

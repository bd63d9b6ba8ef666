"""The Compose file with deploy/compose/tls.yml: asked by https, and what comes without is refused.

Needs a Docker engine, as test_compose.py does.
"""

from __future__ import annotations

import http.client
import ssl
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
    whole_blocks,
)
from tests.deploy.support import Project, command

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400)]

SERVICES = (*LASTING, "conductor-2", "gateway-2")

# Begins an HTTP/2 connection (gRPC, etcd) as any process in the network `cluster` can, with a certificate or without.
BEGIN = """
import socket, ssl, sys
host, port, *certificate = sys.argv[1:]
context = ssl.create_default_context(cafile="/run/mooncache/tls/ca.pem")
context.set_alpn_protocols(["h2"])
if certificate:
    context.load_cert_chain(certificate[0] + "/cert.pem", certificate[0] + "/key.pem")
try:
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        with context.wrap_socket(raw, server_hostname=host) as link:
            link.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            print("answered" if link.recv(1) else "refused")
except (ssl.SSLError, ConnectionError):
    print("refused")
"""


@pytest.fixture(scope="module")
def project(built: Built) -> Iterator[Project]:
    with running(project_of(built, "tls", ["tls"], ["standby", "gateways"])) as made:
        yield made


@pytest.fixture(scope="module")
def asker(project: Project) -> Asker:
    return asker_of(project, SERVICES, tls=True)


def test_a_second_turn_is_cached(asker: Asker) -> None:
    text, prompt_tokens, _ = asker.chat(said(STORY))
    again, _, cached = asker.chat(said(STORY))
    assert again == text
    assert cached >= whole_blocks(prompt_tokens) > 0


def test_clients_without_tls_or_without_the_authority_get_nothing(asker: Asker) -> None:
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        Asker(asker.port, asker.key).get("GET", "/v1/models")
    unknown = Asker(asker.port, asker.key, ssl.create_default_context())
    with pytest.raises(ssl.SSLCertVerificationError):
        unknown.get("GET", "/v1/models")


@pytest.mark.parametrize("target", ["master-1 7700", "conductor 7800", "node-1 7710", "etcd 2379"])
def test_a_process_without_a_certificate_is_refused(asker: Asker, project: Project, target: str) -> None:
    assert asker.get("GET", "/v1/models")[0] == 200
    words = ("/opt/mooncache/bin/python", "-c", BEGIN, *target.split())
    assert project.inside("gateway", *words).strip() == "refused"
    assert project.inside("gateway", *words, "/run/mooncache/tls/gateway").strip() == "answered"


def test_prometheus_asks_by_https_and_finds_the_services_of_profiles(asker: Asker, project: Project) -> None:
    assert asker.get("GET", "/v1/models")[0] == 200
    start_prometheus(project)
    wait_until(
        lambda: prometheus_value(project, "sum(up)") == "10",
        lambda: f"{prometheus_value(project, 'sum(up)')} are up\n{project.report(('prometheus',))}",
        90,
        every_s=1.0,
    )
    assert prometheus_value(project, 'up{instance="conductor-2:9100"}') == "1", "by its name"


def test_only_one_service_has_the_key_of_the_authority(project: Project) -> None:
    for service in SERVICES:
        mounts = command("docker", "inspect", "--format", "{{json .Mounts}}", project.container(service))
        assert "authority" not in mounts, service

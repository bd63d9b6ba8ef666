"""The engine's port beyond loopback: HTTPS when TLS is on, not opened at all when it is off."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest

from mooncache.config import load
from mooncache.errors import ConfigInvalid, EngineFailed, EngineUnavailable
from mooncache.gateway.core.faults import Refusal
from mooncache.gateway.shell.engines import Engines
from mooncache.runtime.certificates import make_certificates
from mooncache.runtime.tls import http_client_context
from mooncache.worker.adapters.hf import HfAdapter
from mooncache.worker.adapters.vllm import VllmAdapter
from mooncache.worker.background.run_engine import engine_url
from mooncache.worker.service import WorkerService
from tests.conditions import until
from tests.worker.support import settings
from tests.worker.test_engine_guard import launch


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    return make_certificates(tmp_path_factory.mktemp("pki"), ["localhost"])[0]


async def test_an_engine_beyond_loopback_needs_tls(tmp_path: Path) -> None:
    service = WorkerService(settings(tmp_path, worker__engine_host="0.0.0.0"))
    with pytest.raises(ConfigInvalid, match=r"worker\.engine_host is 0\.0\.0\.0.*tls\.insecure"):
        await service.start()


async def post(key: str, context: ssl.SSLContext | None, url: str) -> Exception:
    """What becomes of a request; the fake engine has no path for one."""
    engines = Engines(lambda: [key], 5.0, context)
    engines.open()
    try:
        await engines.post(url, "/v1/completions", b"{}", "r")
        raise AssertionError("answered")
    except (EngineFailed, EngineUnavailable, Refusal) as error:
        return error
    finally:
        await engines.close()


async def test_worker_and_gateway_speak_tls_with_it(tmp_path: Path, pki: Path) -> None:
    files = {f"tls__{name}_file": pki / f"{name}.pem" for name in ("ca", "cert", "key")}
    config = settings(
        tmp_path,
        tls__enabled=True,
        worker__engine_host="0.0.0.0",
        worker__advertise_host="localhost",
        **files,
    )
    service = WorkerService(config)
    await service.start()
    try:
        await until(lambda: service.state.ready, "the engine answers its worker")
        url = service.state.url
        assert url.startswith("https://localhost:")
        key = service.state.engine_key
        assert "501" in str(await post(key, http_client_context(config.tls), url))
        plain = str(await post(key, None, url.replace("https:", "http:")))
        stranger = str(await post(key, None, url))
        assert "501" not in plain + stranger
    finally:
        await service.stop()


@pytest.mark.parametrize(
    ("host", "enabled", "url"),
    [
        ("127.0.0.1", True, "http://127.0.0.1:1"),
        ("10.0.0.6", True, "https://10.0.0.6:1"),
        ("10.0.0.6", False, "http://10.0.0.6:1"),
        ("fd00::6", True, "https://[fd00::6]:1"),
    ],
)
def test_plain_http_stays_on_the_host(host: str, *, enabled: bool, url: str) -> None:
    assert engine_url(load(env={}, overrides={"worker.engine_host": host, "tls.enabled": enabled}), 1) == url


@pytest.mark.parametrize("adapter", [VllmAdapter, HfAdapter])
def test_engines_are_told_the_files(tmp_path: Path, adapter: Any) -> None:
    made = adapter(load(env={}))
    assert not any(word.startswith("--ssl") for word in made.command(launch(tmp_path)).arguments)
    reported = made.command(launch(tmp_path, tls_cert=Path("/c.pem"), tls_key=Path("/k.pem"))).arguments
    assert reported[reported.index("--ssl-certfile") + 1] == "/c.pem"
    assert reported[reported.index("--ssl-keyfile") + 1] == "/k.pem"

"""A running process takes over what of its configuration needs no restart, and a new certificate when files change."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncache.config import load
from mooncache.errors import ConfigInvalid
from mooncache.proto.v1 import master_pb2 as pb
from mooncache.runtime import logs, service, tls
from mooncache.runtime.certificates import make_certificates
from mooncache.runtime.logs import Event, get_logger
from mooncache.runtime.reload import LIVE, take_over
from tests.conditions import until
from tests.runtime.service.support import TestService, channel

FILE = '[logging]\nlevel = "{level}"\n\n[gateway]\nrequest_count_max = {most}\nport = {port}\n'


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logs.setup("test", level="info", log_format="json", stream=stream)
    yield stream
    logs.reset()


def events(stream: io.StringIO, event: Event) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [row for row in rows if row["event"] == event]


def test_what_can_be_taken_over_is_and_the_rest_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(FILE.format(level="info", most=5, port=8001))
    now = load(path, env={})
    path.write_text(FILE.format(level="debug", most=7, port=8002))
    taken = take_over(now, load(path, env={}))
    assert taken.changed == ("logging.level", "gateway.request_count_max")
    assert taken.waiting == ("gateway.port",)
    assert taken.config.logging.level == "debug"
    assert (taken.config.gateway.request_count_max, taken.config.gateway.port) == (7, 8001)
    assert (now.gateway.request_count_max, now.logging.level) == (5, "info"), "the former one is as it was"
    assert take_over(now, now) == (now, (), ())


def test_every_live_setting_is_one() -> None:
    config = load(env={})
    for name in LIVE:
        section, field = name.split(".")
        assert hasattr(getattr(config, section), field), name


async def test_a_signal_has_it_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: io.StringIO
) -> None:
    path = tmp_path / "m.toml"
    path.write_text(FILE.format(level="info", most=5, port=8001))
    monkeypatch.setenv("MOONCACHE_CONFIG", str(path))
    monkeypatch.setenv("MOONCACHE_CLUSTER_STATE_DIR", str(tmp_path))
    running = TestService(load())
    task = asyncio.create_task(running.run())
    try:
        await until(lambda: running.listening_now, "it runs")
        get_logger("x").debug(Event.SERVICE_READY, mark=1)
        path.write_text(FILE.format(level="debug", most=7, port=8002))
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: events(written, Event.CONFIG_RELOADED), "it has read it")
        (said,) = events(written, Event.CONFIG_RELOADED)
        assert said["changed"] == ["logging.level", "gateway.request_count_max"]
        assert said["needs_restart"] == ["gateway.port"]
        assert running.config.gateway.request_count_max == 7
        get_logger("x").debug(Event.SERVICE_READY, mark=2)
        assert [row["mark"] for row in events(written, Event.SERVICE_READY) if "mark" in row] == [2]
        path.write_text("[gateway]\nno_such_setting = 1\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: events(written, Event.CONFIG_REFUSED), "it has refused it")
        assert "no_such_setting" in str(events(written, Event.CONFIG_REFUSED)[0]["reason"])
        assert running.config.gateway.request_count_max == 7
    finally:
        running.ask_to_stop()
        await task


# --- certificates ------------------------------------------------------------------------------------------------


def shown_by(port: int) -> bytes:
    """The certificate that a port shows to whoever connects now."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection(("127.0.0.1", port), 10) as plain, context.wrap_socket(plain) as wrapped:
        return wrapped.getpeercert(binary_form=True) or b""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
async def test_new_certificate_files_are_shown_to_whoever_connects_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control port and HTTP port change over; a connection that is open goes on; a wrong pair changes nothing."""
    monkeypatch.setattr(service, "CERTIFICATE_LOOK_S", 0.05)
    (first,) = make_certificates(tmp_path / "pki", ["localhost"])
    live = tmp_path / "live"
    shutil.copytree(first, live)
    shutil.rmtree(first)
    (second,) = make_certificates(tmp_path / "pki", ["localhost"])
    names = {f"tls.{name}_file": live / f"{file}.pem" for name, file in (("cert", "cert"), ("key", "key"))}
    settings = {"cluster.state_dir": tmp_path, "tls.enabled": True, "tls.ca_file": live / "ca.pem", **names}
    config = load(env={}, overrides=settings)
    running = TestService(config)
    await running.start()
    caller = channel(running, credentials=tls.channel_credentials(config.tls))
    context = tls.http_server_context(config.tls)
    running.keep_certificate(context)
    http = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    ports = [int(running.grpc_target.rpartition(":")[2]), http.sockets[0].getsockname()[1]]
    try:
        assert (await caller.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 10.0)).leading
        before = [await asyncio.to_thread(shown_by, port) for port in ports]
        assert before[0] == before[1] != b""
        shutil.copyfile(second / "cert.pem", live / "cert.pem")  # without its key: nothing changes
        with pytest.raises(ConfigInvalid):
            tls.CertificateFiles(config.tls).load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        assert [await asyncio.to_thread(shown_by, port) for port in ports] == before
        shutil.copyfile(second / "key.pem", live / "key.pem")

        async def changed() -> bool:
            now = [await asyncio.to_thread(shown_by, port) for port in ports]
            return now[0] == now[1] != before[0]

        await until(changed, "both ports show the new certificate")
        assert (await caller.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 10.0)).leading
        anew = channel(running, credentials=tls.channel_credentials(config.tls))
        assert (await anew.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 10.0)).leading
        await anew.close()
    finally:
        http.close()
        await caller.close()
        await running.stop()

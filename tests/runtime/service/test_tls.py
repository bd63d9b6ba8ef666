"""TLS and mTLS on the control port, with certificates made on the spot."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mooncache import auth, errors
from mooncache.config import Config, load
from mooncache.proto.v1 import master_pb2 as pb
from mooncache.runtime import service as service_module
from mooncache.runtime import tls
from mooncache.runtime.certificates import make_certificates
from mooncache.runtime.grpc_channel import GrpcChannel
from tests.certificates import certificate_until, expired_certificate
from tests.conditions import until
from tests.runtime.service.support import TestService, channel


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, cert.pem and key.pem for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    return make_certificates(tmp_path_factory.mktemp("pki"), ["localhost"])[0]


def config_with(tmp_path: Path, pki: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "cluster.state_dir": tmp_path,
        "tls.enabled": True,
        "tls.cert_file": pki / "cert.pem",
        "tls.key_file": pki / "key.pem",
        "tls.ca_file": pki / "ca.pem",
    }
    return load(env={}, overrides=settings | changes)


async def test_tls_and_mutual_tls(tmp_path: Path, pki: Path) -> None:
    for mutual in (False, True):
        config = config_with(tmp_path, pki, **{"tls.require_client_cert": mutual})
        service = TestService(config)
        await service.start()
        try:
            full = channel(service, credentials=tls.channel_credentials(config.tls))
            assert (await full.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 10.0)).leading
            await full.close()
            only_ca = load(env={}, overrides={"tls.enabled": True, "tls.ca_file": pki / "ca.pem"})
            anonymous = channel(service, credentials=tls.channel_credentials(only_ca.tls))
            if mutual:
                with pytest.raises((errors.MasterUnavailable, errors.DeadlineExceeded)):
                    await anonymous.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 3.0)
            else:
                assert (
                    await anonymous.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 10.0)
                ).leading
            await anonymous.close()
            plain = channel(service)
            with pytest.raises((errors.MasterUnavailable, errors.DeadlineExceeded)):
                await plain.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 3.0)
            await plain.close()
        finally:
            await service.stop()


async def test_an_expired_certificate_is_refused_and_a_new_one_is_taken_at_the_next_start(
    tmp_path: Path, pki: Path
) -> None:
    """The service runs; whoever connects anew refuses it, in bounded time. Its next start reads the new file."""
    expired = expired_certificate(tmp_path, pki)
    for cert, key, good in ((*expired, False), (pki / "cert.pem", pki / "key.pem", True)):
        config = config_with(tmp_path, pki, **{"tls.cert_file": cert, "tls.key_file": key})
        service = TestService(config)
        await service.start()
        caller = channel(service, credentials=tls.channel_credentials(config_with(tmp_path, pki).tls))
        try:
            if good:
                status = await caller.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 10.0)
                assert status.leading
            else:
                with pytest.raises((errors.MasterUnavailable, errors.DeadlineExceeded)):
                    await caller.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 3.0)
        finally:
            await caller.close()
            await service.stop()


async def http_line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Give each line back."""
    with contextlib.suppress(OSError):
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()
    writer.close()


async def test_connections_outlive_their_certificate(
    tmp_path: Path, pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It expires while they are open: they go on, new ones are refused by its name, and new files heal it."""
    monkeypatch.setattr(service_module, "CERTIFICATE_LOOK_S", 0.05)
    for life_s in (3, 10, 40):  # a busy machine may take longer than a life to connect
        end = datetime.now(UTC) + timedelta(seconds=life_s)
        files = certificate_until(tmp_path / f"for-{life_s}", pki, end)
        config = config_with(tmp_path, pki, **{"tls.cert_file": files[0], "tls.key_file": files[1]})
        if await outlived(config, end, pki):
            return
    pytest.fail("each certificate had expired before both ports were connected to")


async def outlived(config: Config, end: datetime, renewed: Path) -> bool:
    """Whether both ports of a service were connected to before the end of its certificate; then all the rest holds."""
    async with contextlib.AsyncExitStack() as stack:
        service = TestService(config)
        await service.start()
        stack.push_async_callback(service.stop)
        server_context = tls.http_server_context(config.tls)
        service.keep_certificate(server_context)
        http = await asyncio.start_server(http_line, "127.0.0.1", 0, ssl=server_context)
        stack.callback(http.close)
        caller = channel(service, credentials=tls.channel_credentials(config.tls))
        stack.push_async_callback(caller.close)

        async def both_go_on() -> bool:
            writer.write(b"still here\n")
            return (await ask(caller)).leading and await reader.readline() == b"still here\n"

        async def both_take_new_ones() -> bool:
            try:
                _, other = await connect(http, config)
                other.close()
                return bool((await ask_anew(service, config)).leading)
            except (errors.MooncacheError, ssl.SSLError):
                return False

        try:
            assert (await ask(caller)).leading
            reader, writer = await connect(http, config)
        except (errors.MooncacheError, ssl.SSLError):
            return False
        stack.callback(writer.close)
        await until(lambda: datetime.now(UTC) > end + timedelta(seconds=1), "its end")
        assert await both_go_on()
        with pytest.raises(errors.MasterUnavailable, match="certificate has expired"):
            await ask_anew(service, config)
        with pytest.raises(ssl.SSLCertVerificationError, match="certificate has expired"):
            await connect(http, config)
        assert config.tls.cert_file is not None and config.tls.key_file is not None
        shutil.copyfile(renewed / "cert.pem", config.tls.cert_file)
        shutil.copyfile(renewed / "key.pem", config.tls.key_file)
        await until(both_take_new_ones, "both ports show the new certificate")
        assert await both_go_on()
    return True


async def ask(caller: GrpcChannel) -> pb.GetStatusResponse:
    return await caller.call("GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse, 30.0)


async def ask_anew(service: TestService, config: Config) -> pb.GetStatusResponse:
    """By a connection of its own."""
    caller = channel(service, credentials=tls.channel_credentials(config.tls))
    try:
        return await ask(caller)
    finally:
        await caller.close()


async def connect(http: asyncio.Server, config: Config) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = http.sockets[0].getsockname()[1]
    return await asyncio.open_connection("localhost", port, ssl=tls.http_client_context(config.tls))


def test_wrong_files_are_named(tmp_path: Path, pki: Path) -> None:
    (tmp_path / "no.pem").write_text("hello")
    with pytest.raises(errors.ConfigInvalid, match=r"tls\.cert_file.*not a PEM"):
        tls.server_credentials(config_with(tmp_path, pki, **{"tls.cert_file": tmp_path / "no.pem"}).tls)
    with pytest.raises(errors.ConfigInvalid, match=r"tls\.key_file.*cannot be read"):
        tls.server_credentials(config_with(tmp_path, pki, **{"tls.key_file": tmp_path / "absent"}).tls)
    with pytest.raises(errors.ConfigInvalid, match="is not set"):
        tls.server_credentials(load(env={}, overrides={"tls.enabled": True}).tls)
    assert tls.server_credentials(load(env={}).tls) is None
    assert tls.channel_credentials(load(env={}).tls) is None


@pytest.mark.parametrize("setting", ["host", "metrics.host"])
async def test_no_port_beyond_loopback_without_tls(tmp_path: Path, pki: Path, setting: str) -> None:
    changes = {"host": "0.0.0.0"} if setting == "host" else {}
    overrides = {"cluster.state_dir": tmp_path} | ({"metrics.host": "0.0.0.0"} if setting != "host" else {})
    refused = TestService(load(env={}, overrides=overrides), **changes)
    with pytest.raises(errors.ConfigInvalid, match=r"tls\.insecure = true"):
        await refused.start()
    assert refused.steps == ["shutdown"], "nothing was opened"
    written = load(env={}, overrides=overrides | {"tls.insecure": True})
    for config in (written, config_with(tmp_path, pki, **overrides)):
        service = TestService(config, **changes)
        await service.start()
        await service.stop()


async def test_metrics_beyond_loopback_speak_tls(tmp_path: Path, pki: Path) -> None:
    config = config_with(tmp_path, pki, **{"metrics.host": "0.0.0.0"})
    service = TestService(config)
    await service.start()
    port = int(service.metrics_address.rpartition(":")[2])

    async def ask(context: ssl.SSLContext | None) -> bytes:
        reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
        key = auth.metrics_key(service.token)
        writer.write(f"GET /metrics HTTP/1.1\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
        try:
            return await asyncio.wait_for(reader.read(), 60)
        except ConnectionError:
            return b""
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    try:
        assert b"200 OK" in await ask(tls.http_client_context(config.tls))
        assert b"HTTP" not in await ask(None)
        with pytest.raises(ssl.SSLError):
            await ask(ssl.create_default_context())
    finally:
        await service.stop()


def test_certificates_are_made_once_and_hosts_can_be_added(tmp_path: Path, pki: Path) -> None:
    assert pki.exists()  # there is an openssl command
    first = make_certificates(tmp_path / "t", ["10.0.0.5", "node-1.example"])
    before = {path: path.read_bytes() for path in (tmp_path / "t").rglob("*.pem")}
    again = make_certificates(tmp_path / "t", ["10.0.0.5", "::1"])
    assert again[0] == first[0]
    assert all(path.read_bytes() == data for path, data in before.items())
    for folder in (*first, again[1]):
        assert (folder / "ca.pem").read_bytes() == (tmp_path / "t" / "ca.pem").read_bytes()
        assert (folder / "key.pem").stat().st_mode & 0o077 == 0
        ssl.create_default_context(cafile=str(folder / "ca.pem")).load_cert_chain(
            folder / "cert.pem", folder / "key.pem"
        )
    assert not (first[0] / "ca.key").exists()
    for wrong in ("", "a b", "../x", "-x", "x" * 300):
        with pytest.raises(errors.InvalidArgument):
            make_certificates(tmp_path / "t", [wrong])

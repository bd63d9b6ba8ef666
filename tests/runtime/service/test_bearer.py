"""The control key as a bearer token: taken on ports with TLS alone, and it is not the token."""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc
import pytest

from mooncache import auth
from mooncache.config import Config
from mooncache.proto.v1 import master_pb2 as pb
from mooncache.runtime import tls
from mooncache.runtime.certificates import make_certificates
from tests.runtime.service.support import TestService
from tests.runtime.service.test_tls import config_with

OPEN, ADMIN = "GetStatus", "ReportBlocks"
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    return make_certificates(tmp_path_factory.mktemp("pki"), ["localhost"])[0]


async def outcome(service: TestService, config: Config, text: str, method: str = OPEN) -> grpc.StatusCode:
    """How a call ends whose caller sends `Bearer <text>`."""
    credentials = tls.channel_credentials(config.tls)
    target = service.grpc_target
    opened = (
        grpc.aio.insecure_channel(target)
        if credentials is None
        else grpc.aio.secure_channel(target, credentials)
    )
    request = pb.GetStatusRequest() if method == OPEN else pb.ReportBlocksRequest()
    async with opened as channel:
        call = channel.unary_unary(f"/mooncache.v1.MasterService/{method}", None, None)(
            request.SerializeToString(), timeout=60, metadata=(("authorization", f"Bearer {text}"),)
        )
        return await call.code()


async def test_over_tls_the_control_key_is_enough_and_tokens_are_refused(tmp_path: Path, pki: Path) -> None:
    config = config_with(tmp_path, pki)
    service = TestService(config)
    await service.start()
    tenant = auth.tenant_token(service.token, "team-a")
    key, tenant_key = auth.control_key(service.token).text, auth.control_key(tenant).text
    try:
        assert await outcome(service, config, key) is grpc.StatusCode.OK
        assert await outcome(service, config, key, ADMIN) is grpc.StatusCode.OK
        assert await outcome(service, config, tenant_key) is grpc.StatusCode.OK
        assert [context.tenant for context in service.state["contexts"]] == ["default", "team-a"]
        assert await outcome(service, config, tenant_key, ADMIN) is DENIED
        other = tenant_key.replace("team-a", "team-b")
        for wrong in ("", "mck1.x", f"mck1.{'0' * 64}", other, service.token.text, tenant.text):
            assert await outcome(service, config, wrong) is UNAUTHENTICATED, wrong[:12]
    finally:
        await service.stop()


@pytest.mark.parametrize("secure", [False, True])
async def test_without_tls_or_where_it_is_switched_off_it_is_refused(
    tmp_path: Path, pki: Path, config: Config, secure: bool
) -> None:
    chosen = config_with(tmp_path, pki, **{"grpc.bearer": False}) if secure else config
    service = TestService(chosen)
    await service.start()
    try:
        assert await outcome(service, chosen, auth.control_key(service.token).text) is UNAUTHENTICATED
        assert "contexts" not in service.state
    finally:
        await service.stop()

"""TLS and mTLS on the control port, with certificates made on the spot."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mooncache import errors, tls
from mooncache.config import Config, load
from mooncache.proto.v1 import master_pb2 as pb
from tests.service.support import TestService, channel


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and a certificate of it for localhost (cert.pem, key.pem)."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    at = tmp_path_factory.mktemp("pki")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req", "-x509", *curve, "-subj", "/CN=ca", "-days", 2, "-keyout", at / "ca.key", "-out", at / "ca.pem"
    )
    openssl("req", *curve, "-subj", "/CN=localhost", "-keyout", at / "key.pem", "-out", at / "csr.pem")
    (at / "ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    signing = (
        "-CA",
        at / "ca.pem",
        "-CAkey",
        at / "ca.key",
        "-CAcreateserial",
        "-days",
        2,
        "-extfile",
        at / "ext",
    )
    openssl("x509", "-req", "-in", at / "csr.pem", *signing, "-out", at / "cert.pem")
    return at


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
            assert (await full.call("GetStatus", pb.GetStatusRequest(), 10.0)).leading
            await full.close()
            only_ca = load(env={}, overrides={"tls.enabled": True, "tls.ca_file": pki / "ca.pem"})
            anonymous = channel(service, credentials=tls.channel_credentials(only_ca.tls))
            if mutual:
                with pytest.raises((errors.MasterUnavailable, errors.DeadlineExceeded)):
                    await anonymous.call("GetStatus", pb.GetStatusRequest(), 3.0)
            else:
                assert (await anonymous.call("GetStatus", pb.GetStatusRequest(), 10.0)).leading
            await anonymous.close()
            plain = channel(service)
            with pytest.raises((errors.MasterUnavailable, errors.DeadlineExceeded)):
                await plain.call("GetStatus", pb.GetStatusRequest(), 3.0)
            await plain.close()
        finally:
            await service.stop()


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

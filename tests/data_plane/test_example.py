"""The C++ example, as `make native-test` builds it, against a real node."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mooncache import _native
from mooncache.auth import Token

EXAMPLE = Path(__file__).parents[2] / "build" / "release" / "example_put_get"
SECRET = bytes(range(32))

pytestmark = pytest.mark.skipif(
    not EXAMPLE.exists(), reason="the C++ example is not built; run `make native-test`"
)


def run_example(port: int, token_file: Path) -> subprocess.CompletedProcess[str]:
    command = [str(EXAMPLE), "127.0.0.1", str(port), str(token_file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("token", [Token("default", admin=True, key=SECRET).text])
def test_the_example_puts_and_gets(tmp_path: Path, token: str) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(token + "\n", encoding="ascii")
    server = _native.StoreServer({"secret": SECRET, "capacity_bytes": 4 << 20, "huge_pages": False})
    server.start()
    try:
        port = server.endpoints()["tcp_port"]
        done = run_example(port, token_file)
        assert (done.returncode, done.stdout) == (0, "put and got 4096 bytes: equal\n"), done.stderr
        token_file.write_text("nonsense\n", encoding="ascii")
        refused = run_example(port, token_file)
        assert refused.returncode == 1
        assert "UNAUTHENTICATED" in refused.stderr
    finally:
        server.stop(2.0)

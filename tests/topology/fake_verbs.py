"""RDMA devices that are not there: the native tests' fake libibverbs, built once, steered from Python."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "native"
FAKE = NATIVE / "tests" / "rdma" / "fake"
STEER = """
#include "rdma/fake/fake_verbs.h"
using mooncache::testing::FakeVerbs;
extern "C" {
FakeVerbs* mooncache_fake_verbs();
void steer_reset(unsigned devices) { mooncache_fake_verbs()->reset(devices); }
void steer_infiniband(unsigned device) { mooncache_fake_verbs()->set_infiniband(device); }
void steer_active(unsigned device, int active) { mooncache_fake_verbs()->set_port_active(device, active != 0); }
void steer_address(unsigned device, unsigned last) { mooncache_fake_verbs()->set_address(device, last); }
void steer_cut(unsigned device, int cut) { mooncache_fake_verbs()->cut_path(device, cut != 0); }
void steer_fail(const char* call, int error) { mooncache_fake_verbs()->fail(call, error); }
}
"""


@cache
def library() -> str:
    """Path of the fake libibverbs."""
    folder = Path(tempfile.mkdtemp(prefix="mooncache-verbs-"))
    steer = folder / "steer.cpp"
    steer.write_text(STEER)
    out = folder / "libfake_ibverbs.so"
    sources = (str(FAKE / "fake_verbs.cpp"), str(FAKE / "network.cpp"), str(steer))
    folders = [f"-I{NATIVE / 'tests'}", f"-I{NATIVE / 'src'}"]
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", *folders]
    subprocess.run([*command, "-o", str(out), *sources], check=True, timeout=300)
    return str(out)


class FakeVerbs:
    """`devices` devices of one active RoCE v2 port each, at 10.77.N.1, fake0 and so on."""

    def __init__(self, devices: int) -> None:
        self.path = library()
        self._lib = ctypes.CDLL(self.path)
        self._lib.steer_reset(devices)

    def infiniband(self, device: int) -> None:
        self._lib.steer_infiniband(device)

    def active(self, device: int, on: bool) -> None:
        self._lib.steer_active(device, int(on))

    def address(self, device: int, last: int) -> None:
        """The last byte of the address; 0 = the port has none."""
        self._lib.steer_address(device, last)

    def cut(self, device: int, on: bool) -> None:
        """Requests of the device end as if the peer did not answer."""
        self._lib.steer_cut(device, int(on))

    def fail(self, call: str, error: int) -> None:
        """That call fails once with an errno."""
        self._lib.steer_fail(call.encode(), error)

"""A machine without the headers of verbs still builds everything, and RDMA says why it is not there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
# Every function that the rest of the code calls, so that nothing is missing when it is linked.
PROGRAM = """
#include <cstdio>
#include "rdma/fabric.h"
int main() {
  using namespace mooncache;
  RdmaConfig config;
  if (!rdma::check(config)) return 2;
  if (rdma::gid_text(rdma::Gid{}).empty()) return 3;
  if (rdma::choose_rail({}, {}, {}) != SIZE_MAX) return 4;
  if (rdma::look_for_rails(config)) return 5;
  const auto fabric = rdma::open_fabric(config);
  if (fabric) return 6;
  std::puts(fabric.status().message.c_str());
  return 0;
}
"""


def test_the_variant_without_headers_links_and_explains(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    (tmp_path / "main.cpp").write_text(PROGRAM)
    (tmp_path / "infiniband").mkdir()
    (tmp_path / "infiniband" / "verbs.h").write_text("#error the headers of verbs are not there\n")
    sources = [
        tmp_path / "main.cpp",
        NATIVE / "src" / "rdma" / "absent.cpp",
        NATIVE / "src" / "rdma" / "choose.cpp",
    ]
    folders = [f"-I{folder}" for folder in (tmp_path, NATIVE / "src", NATIVE / "include")]
    built = subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-Werror=return-type",
            *folders,
            *map(str, sources),
            "-o",
            str(tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    said = subprocess.run([str(tmp_path / "out")], capture_output=True, text=True, timeout=20, check=False)
    assert said.returncode == 0 and "RDMA unavailable, because this build was made without" in said.stdout

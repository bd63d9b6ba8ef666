"""A peer that we did not write: pyverbs on real verbs reads and writes a granted extent, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mooncache import _native
from tests.rdma.guest import speaker
from tests.rdma.vm import interpreter
from tests.rdma.vm.machine import Machine

pytestmark = pytest.mark.timeout(500)
MakeMachine = Callable[..., Machine]
GUEST = Path(__file__).resolve().parent / "guest"
REFUSED = "IBV_WC_REM_ACCESS_ERR"
RUN = """
mkfifo /tmp/life; sleep 600 >/tmp/life &
{python} node.py </tmp/life >node.log 2>&1 &
for i in $(seq 200); do grep -q serving node.log && break; sleep 0.2; done
timeout 120 /usr/bin/python3.11 -B peer.py; code=$?
[ $code = 0 ] || cat node.log
exit $code
"""


def test_the_speaker_computes_what_the_specifications_say() -> None:
    key, data = bytes(range(32)), os.urandom(59)
    assert speaker.crc32c(b"123456789") == 0xE3069283
    assert speaker.blake3_keyed(key, data) == _native.blake3_keyed(key, data)


def test_a_foreign_peer_reaches_what_it_was_granted_and_only_while(vm: MakeMachine, tmp_path: Path) -> None:
    for name in ("node.py", "peer.py", "speaker.py"):
        shutil.copy(GUEST / name, tmp_path / name)
    machine = vm(net="wire", python=True, memory_mib=1536, share=tmp_path)
    ended = machine.run(RUN.format(python=interpreter.COMMAND), timeout_s=400)
    assert ended.ok, ended.output[-6000:]
    said = dict(line.split(": ", 1) for line in ended.output.splitlines() if ": " in line)
    expected = {
        "read": "success",
        "read the block's bytes": "True",
        "write": "success",
        "commit": "0",
        "stored what was written": "True",
        "write to what may be read": REFUSED,
        "read behind the end": REFUSED,
        "read before the begin": REFUSED,
        "write after the commit": REFUSED,
        "the grant still reads": "success",
        "read by another connection": REFUSED,
        "read after the release": REFUSED,
        "a new grant reads": "True",
    }
    assert {what: said.get(what) for what in expected} == expected, ended.output[-6000:]

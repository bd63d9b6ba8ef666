"""An engine's tensors registered on real verbs: blocks go in place between them and a node, over two rails.

Where no tensor may be registered the same blocks are staged, with the same bytes. That is what `guest/engine.py` does;
over the fake library: tests/kvcache/test_in_place.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rdma.guest import engine
from tests.rdma.vm import interpreter
from tests.rdma.vm.machine import Machine

pytestmark = pytest.mark.timeout(700)
MakeMachine = Callable[..., Machine]
GUEST = Path(__file__).resolve().parent / "guest"
BYTES = engine.MOVED * engine.BLOCK_BYTES
PARTS = ("save", "save by layers", "load a", "load b")


def test_tensors_are_read_and_written_in_place_by_real_devices(vm: MakeMachine, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text((GUEST / "engine.py").read_text())
    machine = vm(net="wire", rails=2, python=True, memory_mib=1536, share=tmp_path)
    ended = machine.run(f"{interpreter.COMMAND} engine.py", timeout_s=600)
    assert ended.ok, ended.output[-6000:]
    ways = {said["way"]: said for said in map(json.loads, filter(_is_json, ended.output.splitlines()))}
    for said in ways.values():
        for load in ("load a", "load b"):
            assert (said[load]["right"], said[load]["others untouched"]) == (engine.MOVED, True), said
        assert said["save"]["stored"] == said["save by layers"]["stored"] == engine.MOVED, said
        assert said["moved"]["rdma_bytes"] == 4 * BYTES, said
    in_place, staged = ways["in place"], ways["staged"]
    # With every rail, once: the counter is of buffers.
    assert in_place["registered"]["registrations"] == engine.LAYERS
    assert in_place["moved"]["rdma_direct_bytes"] == 4 * BYTES
    assert [in_place[part]["staged"] for part in PARTS] == [0] * 4
    assert staged["registered"]["registrations"] == staged["moved"]["rdma_direct_bytes"] == 0
    assert [staged[part]["staged"] for part in PARTS] == [BYTES] * 4
    # One RESERVE and one COMMIT for the layers of all blocks, and no layer in a frame.
    assert in_place["requests"].get("requests_write", 0) == 0, in_place["requests"]


def _is_json(line: str) -> bool:
    return line.startswith("{")

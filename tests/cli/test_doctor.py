"""Every sentence of the doctor, from snapshots made by hand."""

import time
from typing import Any

from mooncache.cli.doctor import Finding, findings
from mooncache.cli.snapshot import ClusterSnapshot
from mooncache.errors import MasterUnavailable
from mooncache.proto.v1 import common_pb2, master_pb2


def status(*states: int) -> master_pb2.GetStatusResponse:
    answer = master_pb2.GetStatusResponse(directory_complete=True)
    for number, state in enumerate(states):
        answer.nodes.add(node=common_pb2.NodeInfo(node_id=f"node-{number}", state=state))  # type: ignore[arg-type]
    return answer


def row(name: str, **change: Any) -> dict[str, Any]:
    usual = {
        "role": "both",
        "state": "ready",
        "reason": "",
        "engine": "vllm",
        "model": "m",
        "pool": True,
        "apart": "",
    }
    return {"instance_id": name, **usual, **change}


def seen(*rows: dict[str, Any], **change: Any) -> ClusterSnapshot:
    snapshot = ClusterSnapshot(time.monotonic())
    snapshot.status, snapshot.instances, snapshot.gateway_reason = status(1), list(rows), ""
    for name, value in change.items():
        setattr(snapshot, name, value)
    return snapshot


def findings_of(snapshot: ClusterSnapshot) -> list[Finding]:
    return findings(snapshot, conductor_target="c:1", gateway_url="http://g:1")


def test_all_is_well() -> None:
    assert {
        finding.grade for finding in findings_of(seen(row("a", role="prefill"), row("b", role="decode")))
    } == {"ok"}


def test_settings_that_make_vllm_answer_garbage_are_named() -> None:
    problem = "On a CPU vLLM answers garbage"
    found = findings(seen(), conductor_target="", gateway_url="", engine_problem=problem)
    assert [(one.grade, one.found) for one in found if one.what == "vLLM's settings"] == [("bad", problem)]


def test_a_pool_alone_is_fine() -> None:
    assert {finding.grade for finding in findings(seen(), conductor_target="", gateway_url="")} == {"ok"}


def test_what_is_wrong_is_named_with_advice() -> None:
    cases = [
        (
            seen(row("a"), status=None, master_error=MasterUnavailable("nobody there")),
            "master",
            "nobody there",
        ),
        (seen(row("a"), status=status(1, 4)), "store nodes", "node-1"),
        (seen(row("a"), status=status()), "store nodes", "none is active"),
        (seen(row("a"), conductor_error="no answer"), "conductor", "no answer"),
        (seen(row("a"), gateway_reason="starting"), "gateway", "starting"),
        (seen(), "engines", "none"),
        (seen(row("a", state="suspect", reason="silent")), "engine a", "silent"),
        (seen(row("a", pool=False)), "engine a", "does not use the pool"),
        (seen(row("a"), row("b", apart="cannot share: weights_digest")), "engine b", "weights_digest"),
        (seen(row("a", role="prefill")), "model m", "no engine that decodes"),
    ]
    for snapshot, what, text in cases:
        wrong = [finding for finding in findings_of(snapshot) if finding.grade != "ok"]
        assert [finding.what for finding in wrong] == [what], text
        assert text in wrong[0].found
        assert wrong[0].advice


def test_rdma_that_is_offered_is_used_here_or_not() -> None:
    snapshot = seen()
    snapshot.status.nodes[0].node.rails.add(device="mlx5_0", port=1, up=True)
    (used,) = (
        f for f in findings(snapshot, conductor_target="", gateway_url="", rdma_reason="") if f.what == "RDMA"
    )
    assert (used.grade, "offered by 1 of 1 nodes" in used.found) == ("ok", True)
    (unused,) = (
        f
        for f in findings(snapshot, conductor_target="", gateway_url="", rdma_reason="no RDMA port is usable")
        if f.what == "RDMA"
    )
    assert (unused.grade, "no RDMA port is usable" in unused.found) == ("warn", True)
    assert "doctor rdma" in unused.advice
    snapshot.status.nodes[0].node.rails[0].up = False
    assert "RDMA" not in {
        f.what for f in findings(snapshot, conductor_target="", gateway_url="", rdma_reason="x")
    }

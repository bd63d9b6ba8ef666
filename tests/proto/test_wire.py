"""Golden bytes: a message that an older version wrote must mean the same forever."""

from __future__ import annotations

from google.protobuf.message import Message

from mooncache.proto.v1 import common_pb2, master_pb2, store_node_pb2

GOLDEN: dict[str, tuple[Message, str]] = {
    "report": (
        master_pb2.ReportBlocksRequest(
            node_id="n1",
            incarnation=2**64 - 1,
            kind=master_pb2.REPORT_KIND_FULL_PART,
            report_id=7,
            first_seq=1,
            last_seq=300,
            part_index=2,
            records=b"\x01\x02",
        ),
        "0a026e3110ffffffffffffffffff01180320072801" + "30ac02" + "3802" + "42020102",
    ),
    "report answer": (
        master_pb2.ReportBlocksResponse(acked_seq=300, need_full=True, next_part_index=3),
        "08ac0210011803",
    ),
    "map": (
        common_pb2.ClusterMap(
            epoch=5,
            term=9,
            leader="a:1",
            nodes=[
                common_pb2.NodeInfo(
                    index=1,
                    node_id="n",
                    endpoints=common_pb2.Endpoints(grpc_target="h:1", tcp_port=80, tls=True),
                    state=common_pb2.NODE_STATE_DRAINING,
                    weight=0.5,
                )
            ],
        ),
        "080510091a03613a31221b08011201" + "6e2a090a03683a3118502801" + "300349000000000000e03f",
    ),
    "locate": (master_pb2.LocateRequest(keys=b"\xaa" * 4, tenant="t"), "0a04aaaaaaaa120174"),
    "heartbeat": (
        master_pb2.HeartbeatRequest(node_id="n", tenant_names={3: "x"}, last_seq=4),
        "0a016e4a05080312017850" + "04",
    ),
    "copy": (
        store_node_pb2.CopyBlocksRequest(tenant_id=1, tenant="t", keys=b"k", timeout_ms=100),
        "08011201741a016b2864",
    ),
}


def test_golden_bytes() -> None:
    for name, (message, expected) in GOLDEN.items():
        written = message.SerializeToString(deterministic=True)
        assert written.hex() == expected, name
        assert type(message).FromString(bytes.fromhex(expected)) == message, name


def test_fields_of_a_newer_version_are_survived() -> None:
    newer = bytes.fromhex("0a016e") + bytes.fromhex("f8ff0701") + bytes.fromhex("fa7f03616263")
    assert master_pb2.GetTaskRequest.FromString(newer).task_id == "n"

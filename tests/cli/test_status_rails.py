"""What `mooncache status` makes of the rails that nodes told, and what Prometheus gets of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncache.cli import cluster
from mooncache.master.messages import rails_of
from mooncache.proto.v1 import common_pb2, master_pb2
from mooncache.reporting.output import console
from mooncache.store_node.metrics import rail_families
from mooncache.topology import counters

RAIL = {"device": "mlx5_0", "port": 1, "up": True, "connections": 2, "grants": 5, "granted_bytes": 4096}


def answer(*rails: common_pb2.RdmaRail) -> master_pb2.GetStatusResponse:
    node = common_pb2.NodeInfo(node_id="node-1", state=common_pb2.NODE_STATE_ACTIVE, rails=rails)
    return master_pb2.GetStatusResponse(master_id="m", leading=True, nodes=[master_pb2.NodeStatus(node=node)])


def test_rails_are_in_the_document_and_in_the_table() -> None:
    up = common_pb2.RdmaRail(
        **RAIL, address="10.9.0.2", link_layer="RoCE v2", numa_node=1, megabits_per_s=100_000, mtu_bytes=4096
    )
    down = common_pb2.RdmaRail(device="mlx5_1", port=1, numa_node=-1)
    document = cluster.status_document(answer(up, down))
    first, second = document["nodes"][0]["rails"]
    assert (first["device"], first["up"], first["granted_bytes"]) == ("mlx5_0:1", True, 4096)
    assert (first["gbit_per_s"], first["numa_node"], second["numa_node"]) == (100.0, 1, None)
    with console.capture() as capture:
        cluster._show_pool(document)
    lines = [line for line in capture.get().splitlines() if "mlx5_" in line]
    assert "up" in lines[0] and "4.0 KiB" in lines[0] and "down" in lines[1]


def test_what_a_node_says_is_shown_and_does_nothing() -> None:
    """Names are neither markup, whose mistakes are exceptions, nor orders to the terminal."""
    (said,) = rails_of(
        [common_pb2.RdmaRail(device="[/x]\x1b[2J", port=1, address="[red]", link_layer="a\nb")]
    )
    reported = common_pb2.RdmaRail(
        device=said.device, port=1, address=said.address, link_layer=said.link_layer
    )
    with console.capture() as capture:
        cluster._show_pool(cluster.status_document(answer(reported)))
    (line,) = (line for line in capture.get().splitlines() if "[/x]" in line)
    assert "[/x]?[2J:1" in line and "a?b [red]" in line


def test_without_rails_there_is_no_table() -> None:
    with console.capture() as capture:
        cluster._show_pool(cluster.status_document(answer()))
    assert "rail" not in capture.get()


@pytest.mark.parametrize(("up", "value"), [(True, 1.0), (False, 0.0)])
def test_metrics_have_a_series_for_each_rail(up: bool, value: float) -> None:
    rail = RAIL | {"up": up, "failures": 3}
    families = {family.name: family for family in rail_families([rail], lambda device, port: {device: port})}
    by_name = {name: family.samples[0] for name, family in families.items()}
    assert by_name["mooncache_store_node_rail_up"].labels == {"rail": "mlx5_0:1"}
    assert by_name["mooncache_store_node_rail_up"].value == value
    assert by_name["mooncache_store_node_rail_granted_bytes"].value == 4096
    assert by_name["mooncache_store_node_rail_failures"].value == 3
    event = by_name["mooncache_store_node_rail_device_events"]
    assert (event.labels, event.value) == ({"rail": "mlx5_0:1", "counter": "mlx5_0"}, 1.0)


def test_the_ports_own_counters_are_the_known_ones_that_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    for name, text in (
        ("hw_counters/packet_seq_err", "12\n"),
        ("hw_counters/made_up_by_a_driver", "5\n"),
        ("hw_counters/out_of_buffer", "N/A (no PMA)\n"),
        ("counters/link_downed", "1\n"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert counters.trouble_of("mlx5_0", 1, tmp_path) == {"packet_seq_err": 12, "link_downed": 1}
    assert counters.trouble_of("none", 1, tmp_path) == {}


def test_status_says_why_this_host_does_without(tmp_path: Path) -> None:
    document = cluster.status_document(answer(common_pb2.RdmaRail(device="mlx5_0", port=1, up=True)))
    with console.capture() as capture:
        cluster._show_pool(document | {"no_rdma_here": "no RDMA port [is] usable"})
        cluster._show_pool(document | {"no_rdma_here": ""})
    assert capture.get().count("this host does not use RDMA: no RDMA port [is] usable") == 1

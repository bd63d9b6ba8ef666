"""Made-up machines below a folder: what is read, what is chosen, what is advised."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncache.cli import app
from mooncache.topology import machine
from mooncache.topology.core import choose, findings
from mooncache.topology.core.distance import Distance, between
from mooncache.topology.core.model import Host, PciLocation
from tests.topology.tree import Tree, two_socket_server


@pytest.fixture
def server(tmp_path: Path) -> Host:
    return machine.look(two_socket_server(tmp_path / "server").root)


def test_a_server_is_read_whole(server: Host) -> None:
    assert [node.cpus for node in server.numa] == ["0-7", "8-15"]
    assert server.numa[0].memory_bytes == 64 << 30
    assert server.numa[1].huge_pages_free == 12
    assert [device.name for device in server.devices] == ["mlx5_0", "mlx5_1", "mlx5_2"]
    port = server.devices[0].ports[0]
    assert (port.state, port.physical, port.rate_gbps, port.lid) == ("ACTIVE", "LinkUp", 200.0, 0x1F)
    assert (port.netdev, port.netdev_mtu_bytes, port.mtu_bytes) == ("eth-mlx5_0", 9000, 4096)
    assert len(port.gids) == 2, "addresses that are not set are left out"
    assert [(gpu.index, gpu.model) for gpu in server.gpus] == [(0, "NVIDIA H100"), (1, "NVIDIA H100")]
    assert server.gpus[1].pci.numa_node == 1
    assert server.gpus[0].pci.bytes_per_s == pytest.approx(31.5e9, rel=0.01)


def test_distances_are_those_of_the_tree(server: Host) -> None:
    near, far, bridge = (device.pci for device in server.devices)
    gpu = server.gpus[1].pci
    assert between(far, gpu) is Distance.PIX
    assert between(bridge, gpu) is Distance.PHB
    assert between(near, gpu) is Distance.SYS
    assert between(near, replace(gpu, numa_node=0)) is Distance.NODE
    assert between(None, gpu) is Distance.UNKNOWN
    deeper = replace(gpu, path=(*gpu.path[:3], "0000:bb:00.0", "0000:bc:00.0", "0000:bd:00.0"))
    assert between(far, deeper) is Distance.PXB


def test_the_nearest_ports_carry_the_bytes_and_the_others_wait(server: Host) -> None:
    places = {place.name: place for place in choose.places(server)}
    assert sorted(places) == ["cpu:0", "cpu:1", "cuda:0", "cuda:1"]
    assert [rail.device for rail in places["cuda:1"].preferred] == ["mlx5_1"]
    assert [rail.device for rail in places["cuda:1"].reserve] == ["mlx5_2", "mlx5_0"]
    assert [rail.device for rail in places["cpu:1"].preferred] == ["mlx5_1", "mlx5_2"]
    assert "2 ports together" in places["cpu:1"].reason


def test_a_port_that_is_down_is_never_chosen(tmp_path: Path) -> None:
    tree = two_socket_server(tmp_path / "server")
    tree.write("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    host = machine.look(tree.root)
    for place in choose.places(host):
        assert "mlx5_1" not in {rail.device for rail in (*place.preferred, *place.reserve)}
    down = next(f for f in findings.of_host(host) if f.what == "mlx5_1/1")
    assert (down.grade, "DOWN" in down.found) == ("warn", True)
    assert "ip link set eth-mlx5_1 up" in down.advice


def test_the_address_is_rocev2_over_ipv4(server: Host) -> None:
    verdict = choose.verdict_of(server.devices[0].ports[0])
    assert verdict.gid is not None
    assert (verdict.gid.index, verdict.gid.address, verdict.gid.family) == (1, "10.9.0.1", "ipv4")
    assert verdict.gid_reason == "RoCE v2 over IPv4"


def test_old_roce_and_infiniband_are_told_apart(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "old")
    tree.numa(0)
    tree.nic("old_0", None, kind="IB/RoCE v1")
    tree.nic("ib_0", None, layer="InfiniBand", kind="IB/RoCE v1", number=2)
    host = machine.look(tree.root)
    by_name = {device.name: device.ports[0] for device in host.devices}
    old = choose.verdict_of(by_name["old_0"])
    assert (old.usable, "has no RoCE v2 GID" in old.reason) == (False, True)
    found = {finding.what: finding for finding in findings.of_host(host)}
    assert "only RoCE v1" in found["old_0/1"].advice
    chosen = choose.verdict_of(by_name["ib_0"])
    assert chosen.gid is not None
    assert (chosen.gid.index, chosen.gid.family) == (0, "ib")
    assert by_name["ib_0"].mtu_bytes == 0, "InfiniBand's MTU has nothing to do with the interface's"


def test_what_is_slow_or_missing_is_named_with_a_remedy(tmp_path: Path) -> None:
    tree = two_socket_server(tmp_path / "server")
    tree.write("sys/class/net/eth-mlx5_0/mtu", "1500")
    host = replace(machine.look(tree.root), memlock_bytes=65536)
    found = {finding.what: finding for finding in findings.of_host(host) if finding.grade != "ok"}
    assert "path MTU is 1024 of 4096" in found["mlx5_0/1"].found
    assert "mtu 4200" in found["mlx5_0/1"].advice
    assert "x8" in found["mlx5_2"].found
    assert "LimitMEMLOCK" in found["locked memory"].advice
    assert "nvidia-peermem" in found["GPUDirect"].advice
    assert findings.of_host(replace(host, privileged=True))[-2].grade != "bad"


def test_dmabuf_wants_the_open_driver_and_a_new_kernel(tmp_path: Path) -> None:
    tree = two_socket_server(tmp_path / "server")
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1")
    assert machine.look(tree.root).dmabuf
    tree.write("proc/sys/kernel/osrelease", "5.4.0-42")
    old = machine.look(tree.root)
    assert (old.dmabuf, old.dmabuf_missing) == (False, "the kernel is older than 5.12")
    tree.write("sys/module/nvidia_peermem/refcnt", "0")
    assert machine.look(tree.root).peermem


def test_a_device_says_itself_how_it_reaches_gpu_memory(tmp_path: Path) -> None:
    host = machine.look(two_socket_server(tmp_path / "server").root)
    why = "none, because mlx5_1 and its driver cannot register a dma-buf"
    ways = ("dma-buf", why, "")
    asked = replace(
        host,
        devices=tuple(replace(d, gpu_direct=how) for d, how in zip(host.devices, ways, strict=True)),
    )
    lines = [(f.grade, f.what, f.found) for f in findings.of_host(asked) if "GPU memory by" in f.found]
    assert lines == [
        ("ok", "mlx5_0", "reaches GPU memory by: dma-buf"),
        ("warn", "mlx5_1", f"reaches GPU memory by: {why}"),
    ]


def test_hosts_pair_their_rails_and_name_the_smaller_mtu(tmp_path: Path) -> None:
    here = machine.look(two_socket_server(tmp_path / "here").root)
    tree = two_socket_server(tmp_path / "there")
    for name in ("mlx5_0", "mlx5_1", "mlx5_2"):
        tree.write(f"sys/class/net/eth-{name}/mtu", "1500")
    there = machine.look(tree.root)
    pairs = choose.rails_between(here, there)
    assert {(pair.here, pair.there, pair.mtu_bytes) for pair in pairs} == {
        (f"mlx5_{n}/1", f"mlx5_{n}/1", 1024) for n in range(3)
    }
    kind, reason = choose.transport_between(here, there)
    assert (kind, "600 Gb/s" in reason) == ("rdma", True)
    assert any(f.grade == "warn" and "differ" in f.found for f in findings.between_hosts(here, there))
    assert choose.transport_between(here, here)[0] == "shm"
    alone = replace(there, devices=())
    assert choose.transport_between(here, alone) == ("tcp", "there: no RDMA port is usable")
    without = replace(here, verbs_missing="libibverbs.so.1 cannot be loaded")
    assert choose.transport_between(without, there)[0] == "tcp"


def test_a_machine_without_anything_says_so(tmp_path: Path) -> None:
    host = machine.look(Tree(tmp_path / "bare").root)
    assert (host.devices, host.gpus, len(host.numa)) == ((), (), 1)
    assert "TCP" in findings.of_host(host)[-1].found
    assert "TCP" in choose.places(host)[0].reason
    for missing, fix in (
        ("libibverbs.so.1 cannot be loaded", "libibverbs1"),
        ("ibv_get_device_list failed", "modprobe"),
    ):
        advice = [
            f.advice for f in findings.of_host(replace(host, verbs_missing=missing)) if f.what == "libibverbs"
        ]
        assert fix in advice[0]


def test_links_out_of_the_root_are_not_followed(tmp_path: Path) -> None:
    outside = Tree(tmp_path / "outside")
    place = outside.pci("pci0000:3a", "0000:3a:00.0")
    tree = Tree(tmp_path / "inside")
    tree.nic("odd_0", None)
    (tree.root / "sys/class/infiniband/odd_0/device").symlink_to(outside.root / place)
    assert machine.look(tree.root).devices[0].pci is None


def test_the_command_prints_what_the_other_host_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = two_socket_server(tmp_path / "server").root
    assert app.run(["topology", "--root", str(root), "--json"]) == 0
    saved = tmp_path / "here.json"
    text = capsys.readouterr().out
    saved.write_text(text)
    assert json.loads(text)["places"][3]["preferred"] == ["mlx5_1/1"]
    other = two_socket_server(tmp_path / "other").root
    assert app.run(["topology", "--root", str(other), "--peer", str(saved)]) == 0
    printed = capsys.readouterr().out
    assert "rdma: 3 rail(s)" in printed
    assert "PIX" in printed
    saved.write_text('{"host": {"name": 3}}')
    assert app.run(["doctor", "rdma", "--root", str(other), "--peer", str(saved)]) == 2
    assert "--peer" in capsys.readouterr().err


def test_a_root_that_is_none_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["topology", "--root", str(tmp_path)]) == 2
    assert "no folder sys" in capsys.readouterr().err


def test_this_machine_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["doctor", "rdma"]) in {0, 1}
    assert "libibverbs" in capsys.readouterr().out


LOCATIONS = st.builds(
    lambda root, path, numa: PciLocation(path[-1], root, tuple(path), numa),
    st.sampled_from(["pci0000:00", "pci0000:80"]),
    st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4),
    st.sampled_from([0, 1, None]),
)


@given(LOCATIONS, LOCATIONS)
def test_distance_is_symmetric(one: PciLocation, other: PciLocation) -> None:
    assert between(one, other) is between(other, one)

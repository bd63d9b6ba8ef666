"""What is shown of ports is what the native engine decides: its verdicts, its reasons, its pairs, its configuration."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from mooncache import _native
from mooncache.cli import app
from mooncache.config import load
from mooncache.topology import machine
from mooncache.topology.core import choose, findings
from mooncache.topology.core.distance import Distance
from mooncache.topology.core.model import (
    Gid,
    GidKind,
    Gpu,
    Host,
    LinkLayer,
    NumaNode,
    PciLocation,
    Port,
    PortState,
    RdmaDevice,
    Verdict,
)
from tests.topology.fake_verbs import FakeVerbs

LINK_LOCAL = "fe80:0000:0000:0000:0000:0000:0000:0001"
GLOBAL = "fd00:0000:0000:0000:0000:0000:0000:0001"
IPV4 = Gid.read(0, "10.9.0.1", GidKind.ROCE_V2).value


def devices(count: int, layer: LinkLayer = LinkLayer.ETHERNET) -> list[RdmaDevice]:
    """What the kernel's files say of the fake devices; the address there is stale on purpose."""
    port = Port(
        1,
        PortState.ACTIVE,
        layer,
        100.0,
        gids=(Gid(0, GLOBAL, GidKind.ROCE_V1, "eth9"), Gid(1, GLOBAL, GidKind.ROCE_V1, "eth0")),
    )
    return [RdmaDevice(f"fake{index}", (port,)) for index in range(count)]


def judged(found: list[RdmaDevice], verbs: FakeVerbs, **settings: object) -> list[Verdict]:
    named = {f"rdma_{name}": value for name, value in settings.items()}
    after, missing = machine._judged(found, {"rdma_library": verbs.path, **named})
    assert missing == ""
    return [choose.verdict_of(port) for device in after for port in device.ports]


def test_address_reason_and_speed_are_those_of_the_engine() -> None:
    verbs = FakeVerbs(3)
    verbs.active(1, False)
    verbs.address(2, 0)
    first, down, bare = judged(devices(3), verbs)
    assert first.usable and first.gid is not None
    assert (first.gid.address, first.gid.index, first.gid.netdev) == ("10.77.0.1", 1, "eth0")
    assert first.gid_reason == "RoCE v2 over IPv4"
    assert first.megabits_per_s == 100_000
    assert (down.usable, "the port is not active" in down.reason) == (False, True)
    assert (bare.usable, "has no RoCE v2 GID" in bare.reason) == (False, True)


def test_the_configuration_is_the_engines(tmp_path: Path) -> None:
    verbs = FakeVerbs(2)
    used, other = judged(devices(2), verbs, devices=["fake0"])
    assert used.usable and not other.usable
    assert "the configuration names other devices" in other.reason
    (fixed,) = judged(devices(1), FakeVerbs(1), gid_index=0)
    assert "GID 0 is empty" in fixed.reason
    config = tmp_path / "mooncache.toml"
    config.write_text('[rdma]\ndevices = ["mlx5_1"]\nrails_max = 2\nenabled = false\n')
    host = machine.look(config=load(config, env={}))
    assert (host.rails_max, host.rdma_off) == (2, "RDMA is switched off (rdma.enabled)")


def test_a_device_that_cannot_be_opened_or_is_not_listed_says_so() -> None:
    verbs = FakeVerbs(2)
    verbs.fail("ibv_open_device", errno.EACCES)
    closed, open_one, unknown = judged(devices(3), verbs)
    assert "cannot be opened: Permission denied" in closed.reason
    assert open_one.usable
    assert "does not list it" in unknown.reason


def test_without_a_library_its_own_sentence_is_kept() -> None:
    found = devices(1)
    same, missing = machine._judged(found, {"rdma_library": "libnothing-of-this-name.so"})
    assert same == tuple(found)
    assert "libnothing-of-this-name.so cannot be opened" in missing
    host = Host("here", devices=same, verbs_missing=missing)
    assert choose.usable_ports(host) == []
    assert choose.transport_between(host, replace(host, name="there"))[1] == f"here: {missing}"


@pytest.mark.parametrize(
    ("layer", "table", "chosen"),
    [
        (LinkLayer.ETHERNET, [(0, GLOBAL, GidKind.ROCE_V1)], None),
        (LinkLayer.ETHERNET, [(0, LINK_LOCAL, GidKind.ROCE_V1), (1, LINK_LOCAL, GidKind.ROCE_V2)], 1),
        (LinkLayer.ETHERNET, [(1, LINK_LOCAL, GidKind.ROCE_V2), (3, GLOBAL, GidKind.ROCE_V2)], 3),
        (
            LinkLayer.ETHERNET,
            [(1, GLOBAL, GidKind.ROCE_V2), (4, IPV4, GidKind.ROCE_V2), (5, IPV4, GidKind.ROCE_V2)],
            4,
        ),
        (LinkLayer.ETHERNET, [], None),
        (LinkLayer.INFINIBAND, [(2, LINK_LOCAL, GidKind.IB), (3, GLOBAL, GidKind.IB)], 2),
        (LinkLayer.INFINIBAND, [], None),
    ],
)
def test_files_from_elsewhere_are_judged_by_the_engines_rule(
    layer: LinkLayer, table: list[tuple[int, str, GidKind]], chosen: int | None
) -> None:
    gids = tuple(Gid(index, value, kind) for index, value, kind in table)
    verdict = choose.verdict_of(Port(1, PortState.ACTIVE, layer, 100.0, gids=gids))
    assert verdict.usable == (chosen is not None)
    assert (verdict.gid.index if verdict.gid is not None else None) == chosen
    assert verdict.gid_reason if verdict.usable else "not used, because" in verdict.reason


def host(
    name: str, *ports: tuple[str, float], layer: LinkLayer = LinkLayer.ETHERNET, rails_max: int = 4
) -> Host:
    """A host with one port per (address, Gb/s)."""
    kind = GidKind.ROCE_V2 if layer == LinkLayer.ETHERNET else GidKind.IB
    found = [
        RdmaDevice(f"nic{index}", (Port(1, PortState.ACTIVE, layer, gbps, gids=(Gid.read(1, text, kind),)),))
        for index, (text, gbps) in enumerate(ports)
    ]
    return Host(name, numa=(NumaNode(0, "0-7", 1 << 30),), devices=tuple(found), rails_max=rails_max)


def pairs(here: Host, there: Host) -> list[tuple[str, str]]:
    return [(pair.here, pair.there) for pair in choose.rails_between(here, there)]


def test_ports_of_one_subnet_meet_and_not_the_equally_fast_ones() -> None:
    here = host("here", ("10.1.0.1", 400), ("10.2.0.1", 100))
    there = host("there", ("10.2.0.9", 400), ("10.1.0.9", 100))
    assert pairs(here, there) == [("nic0/1", "nic1/1"), ("nic1/1", "nic0/1")]
    assert "200 Gb/s together" in choose.transport_between(here, there)[1]


def test_a_port_of_the_node_may_answer_two_and_is_counted_once() -> None:
    here = host("here", ("10.1.0.1", 200), ("10.1.0.2", 200))
    there = host("there", ("10.1.0.9", 200))
    assert pairs(here, there) == [("nic0/1", "nic0/1"), ("nic1/1", "nic0/1")]
    assert "200 Gb/s together" in choose.transport_between(here, there)[1]
    assert pairs(there, here) == [("nic0/1", "nic0/1")]


def test_link_local_ports_are_used_as_the_engine_uses_them() -> None:
    here, there = host("here", (LINK_LOCAL, 100)), host("there", (LINK_LOCAL[:-1] + "2", 100))
    assert pairs(here, there) == [("nic0/1", "nic0/1")]
    assert any("link-local" in finding.found for finding in findings.of_host(here))


def test_kinds_of_addresses_that_do_not_meet_are_no_pair() -> None:
    four, six = host("here", ("10.1.0.1", 100)), host("there", (GLOBAL, 100))
    assert pairs(four, six) == []
    assert pairs(four, host("there", (GLOBAL, 100), layer=LinkLayer.INFINIBAND)) == []
    assert choose.transport_between(four, six) == (
        "tcp",
        "the ports of the two hosts have no common type of address",
    )


def test_no_more_rails_than_configured_and_the_fastest_first() -> None:
    here = host("here", ("10.1.0.1", 100), ("10.2.0.1", 400), ("10.3.0.1", 200), rails_max=2)
    there = host("there", *((f"10.{subnet}.0.9", 400.0) for subnet in (1, 2, 3)))
    assert pairs(here, there) == [("nic1/1", "nic1/1"), ("nic2/1", "nic2/1")]
    assert {rail.device for rail in choose.places(here)[0].preferred} == {"nic1", "nic2"}


def test_the_memory_of_a_gpu_takes_near_ports_before_fast_ones() -> None:
    def at(slot: str) -> PciLocation:
        return PciLocation(slot, "pci0000:3a", ("0000:3a:00.0", f"0000:3b:{slot}", f"0000:3c:{slot}"), 0)

    far = PciLocation("0000:ba:00.0", "pci0000:ba", ("0000:ba:00.0",), 1)
    here = host("here", ("10.1.0.1", 400), ("10.2.0.1", 100), rails_max=1)
    fast, near = here.devices
    here = replace(
        here, devices=(replace(fast, pci=far), replace(near, pci=at("01.0"))), gpus=(Gpu(0, "x", at("02.0")),)
    )
    places = {place.name: place for place in choose.places(here)}
    assert [rail.device for rail in places["cuda:0"].preferred] == ["nic1"]
    assert places["cuda:0"].preferred[0].distance is Distance.PIX
    assert [rail.device for rail in places["cpu:0"].preferred] == ["nic0"]


def test_a_configuration_without_rdma_is_the_answer_for_everything() -> None:
    here = replace(host("here", ("10.1.0.1", 100)), rdma_off="TLS is configured (tls.enabled), and so on")
    there = host("there", ("10.1.0.2", 100))
    assert choose.transport_between(here, there) == (
        "tcp",
        "here: TLS is configured (tls.enabled), and so on",
    )
    assert choose.transport_between(there, here)[0] == "tcp"
    assert "TLS is configured" in choose.places(here)[0].reason
    (said,) = [finding for finding in findings.of_host(here) if finding.what == "RDMA"]
    assert (said.grade, "TLS is configured" in said.found) == ("warn", True)


def test_the_commands_print_the_engines_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "not used, because GID 7 is empty or not routable (RoCE v2)"
    port = {"device": "fake0", "port": 1, "usable": False, "reason": reason, "gpu_direct": "", "gid": ""}
    port |= {
        "link_layer": "RoCE v2",
        "gid_index": 0,
        "gid_reason": "",
        "mtu_bytes": 4096,
        "megabits_per_s": 100_000,
    }
    asked: list[dict[str, object]] = []

    def rdma_ports(settings: dict[str, object]) -> list[dict[str, object]]:
        asked.append(settings)
        return [port]

    monkeypatch.setattr(_native, "rdma_ports", rdma_ports)
    monkeypatch.setattr(machine.sysfs, "rdma_devices", lambda _: devices(1))
    monkeypatch.setattr(machine, "_openable", lambda device: device)
    monkeypatch.setenv("MOONCACHE_RDMA_GID_INDEX", "7")
    assert app.run(["doctor", "rdma", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {"grade": "warn", "what": "fake0/1", "found": f"is {reason}"}.items() <= found[1].items()
    assert asked[0]["rdma_gid_index"] == 7
    assert app.run(["topology"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "GID 7 is empty" in printed and "no RDMA port is usable" in printed

"""Builds the kernel's files of a made-up machine below a folder."""

from __future__ import annotations

from pathlib import Path

IPV4_GID = "0000:0000:0000:0000:0000:ffff:0a09:{:04x}"
LINK_LOCAL_GID = "fe80:0000:0000:0000:0000:0000:0000:0001"


class Tree:
    """Files of one machine; every method adds something."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/sys/kernel/osrelease", "6.1.0")
        self.write("proc/sys/kernel/hostname", root.name)

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(self.root / target)

    def numa(self, index: int, *, gib: int = 64) -> None:
        base = f"sys/devices/system/node/node{index}"
        self.write(f"{base}/cpulist", f"{index * 8}-{index * 8 + 7}")
        self.write(f"{base}/meminfo", f"Node {index} MemTotal:       {gib << 20} kB")
        self.write(f"{base}/hugepages/hugepages-2048kB/free_hugepages", "12")

    def pci(self, root: str, *path: str, numa: int = 0, lanes: int = 16, lanes_max: int = 16) -> str:
        place = "/".join(("sys/devices", root, *path))
        self.write(f"{place}/numa_node", str(numa))
        self.write(f"{place}/current_link_speed", "16.0 GT/s PCIe")
        self.write(f"{place}/max_link_speed", "16.0 GT/s PCIe")
        self.write(f"{place}/current_link_width", str(lanes))
        self.write(f"{place}/max_link_width", str(lanes_max))
        return place

    def nic(
        self,
        name: str,
        place: str | None,
        *,
        number: int = 1,
        state: str = "4: ACTIVE",
        rate: str = "200 Gb/sec (4X HDR)",
        mtu: int = 9000,
        layer: str = "Ethernet",
        kind: str = "RoCE v2",
    ) -> None:
        base = f"sys/class/infiniband/{name}"
        self.write(f"{base}/fw_ver", "20.31.1014")
        port = f"{base}/ports/1"
        self.write(f"{port}/state", state)
        self.write(f"{port}/phys_state", "5: LinkUp")
        self.write(f"{port}/rate", rate)
        self.write(f"{port}/link_layer", layer)
        self.write(f"{port}/lid", "0x1f")
        gids = [LINK_LOCAL_GID, IPV4_GID.format(number), "0000:0000:0000:0000:0000:0000:0000:0000"]
        for index, gid in enumerate(gids):
            self.write(f"{port}/gids/{index}", gid)
            self.write(f"{port}/gid_attrs/types/{index}", kind)
            self.write(f"{port}/gid_attrs/ndevs/{index}", f"eth-{name}")
        self.write(f"sys/class/net/eth-{name}/mtu", str(mtu))
        self.write(f"sys/class/infiniband_verbs/uverbs{number}/ibdev", name)
        if place is not None:
            self.link(f"{base}/device", place)

    def gpu(self, place: str) -> None:
        address = place.rsplit("/", 1)[1]
        self.write(f"{place}/vendor", "0x10de")
        self.write(f"{place}/class", "0x030200")
        self.write(f"{place}/device", "0x2330")
        self.link(f"sys/bus/pci/devices/{address}", place)
        self.write(f"proc/driver/nvidia/gpus/{address}/information", "Model: \t\t NVIDIA H100\nIRQ: 5")


def two_socket_server(root: Path) -> Tree:
    """Two NUMA nodes; below each a switch with a GPU and a NIC; a third NIC right at the second host bridge."""
    tree = Tree(root)
    for node, bus in ((0, "3a"), (1, "ba")):
        tree.numa(node)
        bridge = (f"pci0000:{bus}", f"0000:{bus}:00.0", f"0000:{bus}:01.0")
        nic = tree.pci(*bridge, f"0000:{bus}:02.0", f"0000:{bus}:03.0", numa=node)
        tree.nic(f"mlx5_{node}", nic, number=node + 1)
        tree.gpu(tree.pci(*bridge, f"0000:{bus}:02.1", f"0000:{bus}:04.0", numa=node))
    tree.nic("mlx5_2", tree.pci("pci0000:ba", "0000:ba:10.0", "0000:ba:11.0", numa=1, lanes=8), number=3)
    return tree

// Where devices and memory sit in this machine, as the kernel shows it. What it does not show is unknown, and
// nothing here fails: a place only decides what is used first.
#pragma once

#include <string>

#include "mooncache/bytes.h"
#include "rdma/choose.h"

namespace mooncache::rdma {

// `folder`: the device's own below sysfs, a link or not ("/sys/bus/pci/devices/0000:3b:00.0").
PciPlace place_of_device(const std::string& folder);
// Of a PCI address as drivers write it: "0000:3b:00.0", "00000000:3B:00.0".
PciPlace place_of_address(const std::string& sysfs_folder, const std::string& address);
// The NUMA node that all of the memory lies on, as far as a few of its pages tell; -1 = unknown.
int node_of_memory(Slice memory);
bool has_several_nodes(const std::string& sysfs_folder);
// Pages that are touched from now on come from that node while it has any. Whole pages. False: no matter.
bool prefer_node(Slice memory, int node);

}  // namespace mooncache::rdma

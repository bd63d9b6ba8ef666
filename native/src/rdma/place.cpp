#include "rdma/place.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <fstream>

namespace mooncache::rdma {

namespace {

namespace fs = std::filesystem;

constexpr size_t kAddressLength = sizeof("0000:00:00.0") - 1;
constexpr int kNodesMax = 1024;

// "0000:3b:00.0"; a device may be shown below its PCI function, as a part of it.
bool is_address(const std::string& name) {
  return name.size() >= kAddressLength && std::count(name.begin(), name.end(), ':') == 2 &&
         name[name.size() - 2] == '.';
}

}  // namespace

PciPlace place_of_device(const std::string& folder) {
  PciPlace place;
  std::ifstream file(folder + "/numa_node");
  if (int node = -1; file >> node) place.numa_node = node;
  std::error_code error;
  const fs::path real = fs::canonical(folder, error);
  if (error) return place;
  for (const fs::path& part : real) {
    const std::string name = part.string();
    const bool root = name.starts_with("pci") && name.find(':') != std::string::npos;
    if (root || (!place.path.empty() && is_address(name))) place.path += (root ? "" : "/") + name;
  }
  return place;
}

PciPlace place_of_address(const std::string& sysfs_folder, const std::string& address) {
  if (address.size() < kAddressLength || address.find('/') != std::string::npos) return {};
  std::string name =
      address.substr(address.size() - kAddressLength);  // the kernel's domains have four digits
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return place_of_device(sysfs_folder + "/bus/pci/devices/" + name);
}

int node_of_memory(Slice memory) {
  if (memory.size == 0) return -1;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(memory.data);
  std::array<void*, 3> pages{};
  for (size_t i = 0; i < pages.size(); ++i) {
    const uintptr_t at = begin + (memory.size - 1) / (pages.size() - 1) * i;
    pages[i] = reinterpret_cast<void*>(at & ~(page - 1));
  }
  std::array<int, 3> nodes{-1, -1, -1};  // or a negative errno: a page that was never touched has none
  if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) != 0) return -1;
  return nodes[0] >= 0 && nodes[1] == nodes[0] && nodes[2] == nodes[0] ? nodes[0] : -1;
}

bool has_several_nodes(const std::string& sysfs_folder) {
  std::error_code error;
  return fs::exists(sysfs_folder + "/devices/system/node/node0", error) &&
         fs::exists(sysfs_folder + "/devices/system/node/node1", error);
}

bool prefer_node(Slice memory, int node) {
  if (node < 0 || node >= kNodesMax) return false;
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kNodesMax / kBits> mask{};
  mask[static_cast<size_t>(node) / kBits] = 1ul << (static_cast<size_t>(node) % kBits);
  return syscall(SYS_mbind, memory.data, memory.size, MPOL_PREFERRED, mask.data(), kNodesMax + 1, 0) == 0;
}

}  // namespace mooncache::rdma

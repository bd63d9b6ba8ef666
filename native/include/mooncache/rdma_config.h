// The RDMA settings of a client or a node. The defaults use every active port where there is one, and
// fall back to TCP, with a reason, everywhere else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mooncache {

struct RdmaConfig {
  bool enabled = true;
  std::string library = "libibverbs.so.1";  // a soname, or the path of another one
  std::string sysfs_folder = "/sys";        // where the kernel shows modules and the places of devices
  // "mlx5_0" (all its ports) or "mlx5_0:1"; empty = every active port.
  std::vector<std::string> devices;
  uint32_t rails_max = 4;    // of one connection, 8 at most
  int gid_index = -1;        // -1 = chosen: RoCE v2 over IPv4, then IPv6
  uint8_t ack_timeout = 14;  // 4.096 us * 2^n until a packet is sent again: 14 = 67 ms
  uint8_t retry_count = 6;   // 6 at most: 7 means "forever" to some devices, and a dead peer is never seen
  uint8_t traffic_class = 0;
  uint8_t service_level = 0;
};

}  // namespace mooncache

// The cluster map: which nodes there are. The leading master publishes it; every store node hands it out on
// its data port, so a client needs no other protocol to follow the cluster.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mooncache {

enum class NodeHealth : uint8_t { kActive, kSuspect, kDraining, kDead };

inline constexpr size_t kMapNodesMax = 65'534;     // indices are below this
inline constexpr size_t kMapTextBytesMax = 1024;   // of a name, an address, a label
inline constexpr size_t kMapLabelsMax = 16;        // of one node
inline constexpr size_t kMapBytesMax = 64u << 20;  // of one map, encoded

// One node as the master published it.
struct MapNode {
  uint32_t index = 0;  // dense handle, given by the master
  uint64_t incarnation = 0;
  NodeHealth state = NodeHealth::kActive;
  bool rdma = false;  // it answers on an RDMA port that is up
  std::string node_id;
  std::string host_id;
  std::string tcp_host;
  uint16_t tcp_port = 0;  // 0: none
  std::string unix_path;
  std::string arena;  // kind of its memory: "memory", "gpu", "dax", ...
  uint64_t free_bytes = 0;
  double weight = 0.0;                                        // finite, 0 or more; see NodeInfo
  std::vector<std::pair<std::string, std::string>> labels{};  // "zone", "rack" and what else people name
  bool operator==(const MapNode&) const = default;
};

// Maps are ordered by (term, epoch); the larger one is newer.
struct ClusterMap {
  uint64_t term = 0;   // fencing term of the master that made it
  uint64_t epoch = 0;  // grows with every change within a term
  std::vector<MapNode> nodes;
  bool operator==(const ClusterMap&) const = default;
};

}  // namespace mooncache

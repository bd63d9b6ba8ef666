// CLUSTER_MAP: a node answers what it knows of the cluster, in pages. Each node's record says how long it is,
// so that a later version may say more of a node, and this one passes over it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "mooncache/cluster_map.h"
#include "wire/messages.h"

namespace mooncache::wire {

// Records of one page; a larger map takes several. At least one record is in a page, whatever its size.
inline constexpr size_t kMapPageBytes = 128u << 10;

struct ClusterMapRequest {
  // The map that the peer has: no node is answered while it is the one that this node has.
  uint64_t known_term = 0;
  uint64_t known_epoch = 0;
  // Of the same map, the number of nodes that earlier pages brought. A node that has another map by then
  // answers its first page.
  uint32_t first = 0;
  void encode(Writer& out) const;
  static std::optional<ClusterMapRequest> decode(Meta meta);
};

struct ClusterMapResponse {
  uint64_t term = 0;
  uint64_t epoch = 0;
  uint32_t node_count = 0;  // of the whole map
  uint32_t first = 0;       // nodes before this page
  std::vector<MapNode> nodes;
  void encode(Writer& out) const;
  static std::optional<ClusterMapResponse> decode(Reader& in);
};

// Whether a map may be published: limits of texts and labels, indices below kMapNodesMax that differ, weights
// that are numbers.
bool map_valid(const ClusterMap& map);
void encode_map_node(Writer& out, const MapNode& node);

}  // namespace mooncache::wire

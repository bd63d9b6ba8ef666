#include "client/map_follower.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>

namespace mooncache {

namespace {

NodeInfo node_info(const MapNode& node) {
  NodeInfo info;
  info.index = node.index;
  info.node_id = node.node_id;
  info.host_id = node.host_id;
  info.incarnation = node.incarnation;
  info.tcp_host = node.tcp_host;
  info.tcp_port = node.tcp_port;
  info.unix_path = node.unix_path;
  info.free_bytes = node.free_bytes;
  info.weight = node.weight;
  info.state = node.state;
  info.medium = medium_of(node.arena);
  info.mappable = mappable_arena(node.arena);
  info.rdma = node.rdma;
  return info;
}

}  // namespace

bool MapFollower::hear(ClusterMap map, uint64_t now_ms) {
  if (map.term == known_.term && map.epoch <= known_.epoch) {
    refusals_ = 0;
    return false;
  }
  if (map.term < known_.term) {
    if (refusals_ == 0) refused_since_ms_ = now_ms;
    ++refusals_;
    if (refusals_ < kRefusalsMin || now_ms - refused_since_ms_ < kPatienceMs) return false;
  }
  refusals_ = 0;
  if (known_.term != 0 && map.term != known_.term) {
    carried_ = nodes();
    carry_until_ms_ = now_ms + kCarryMs;
  }
  known_ = std::move(map);
  return true;
}

bool MapFollower::expire(uint64_t now_ms) {
  if (carried_.empty() || now_ms < carry_until_ms_) return false;
  carried_.clear();
  return true;
}

std::vector<NodeInfo> MapFollower::nodes() const {
  std::vector<NodeInfo> infos;
  std::unordered_set<std::string_view> listed;
  std::unordered_set<uint32_t> taken;
  for (const MapNode& node : known_.nodes) {
    listed.insert(node.node_id);
    taken.insert(node.index);
    if (node.state != NodeHealth::kDead) infos.push_back(node_info(node));
  }
  uint32_t index = kMapNodesMax;  // no master gives these out
  for (const NodeInfo& node : carried_) {
    if (listed.contains(node.node_id)) continue;
    while (index > 0 && taken.contains(index)) --index;
    infos.push_back(node);
    infos.back().index = index;
    taken.insert(index);
  }
  return infos;
}

}  // namespace mooncache

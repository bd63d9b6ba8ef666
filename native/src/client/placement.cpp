// Weighted rendezvous hashing. No state and no clock: client and master compute the same places.
#include <algorithm>
#include <cmath>

#include "mooncache/client.h"

namespace mooncache {

namespace {

uint64_t splitmix64(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

uint64_t fnv1a64(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) {
    hash ^= static_cast<uint8_t>(c);
    hash *= 0x100000001b3ull;
  }
  return hash;
}

struct Scored {
  uint32_t position;
  bool local;
  double score;
};

}  // namespace

Medium medium_of(std::string_view arena) {
  if (arena == "gpu") return Medium::kHbm;
  if (arena == "dax" || arena == "fsdax") return Medium::kDax;
  return arena == "file" ? Medium::kFile : Medium::kDram;
}

bool mappable_arena(std::string_view arena) {
  return arena.empty() || arena == "memory" || arena == "dax";
}

bool takes_new_blocks(const NodeInfo& node) {
  return node.state == NodeHealth::kActive && node.weight > 0;
}

bool takes_from_its_host(const NodeInfo& node, std::string_view host_id) {
  return !host_id.empty() && node.host_id == host_id && node.medium != Medium::kHbm;
}

double placement_score(const Key& key, std::string_view node_id, double weight) {
  const uint64_t hash = splitmix64(key.word(0) ^ splitmix64(fnv1a64(node_id)));
  // 53 bits make an exact double; 0 would give ln(0)
  const double uniform = std::max(static_cast<double>(hash >> 11) * 0x1p-53, 0x1p-53);
  return -weight / std::log(uniform);
}

std::vector<uint32_t> place(const Key& key, std::span<const NodeInfo> nodes, std::string_view host_id,
                            size_t count) {
  std::vector<Scored> scored;
  scored.reserve(nodes.size());
  for (uint32_t i = 0; i < nodes.size(); ++i) {
    if (!takes_new_blocks(nodes[i])) continue;
    scored.push_back(
        {i, takes_from_its_host(nodes[i], host_id), placement_score(key, nodes[i].node_id, nodes[i].weight)});
  }
  const auto better = [&](const Scored& a, const Scored& b) {
    if (a.score != b.score) return a.score > b.score;
    return nodes[a.position].node_id < nodes[b.position].node_id;
  };
  count = std::min(count, scored.size());
  std::vector<uint32_t> chosen;
  if (count == 0) return chosen;
  if (count == 1) {  // the common case needs no order of all nodes
    const auto local_first = [&](const Scored& a, const Scored& b) {
      return a.local != b.local ? a.local : better(a, b);
    };
    chosen.push_back(std::min_element(scored.begin(), scored.end(), local_first)->position);
    return chosen;
  }
  std::sort(scored.begin(), scored.end(), better);
  std::vector<bool> taken(scored.size(), false);
  const auto take = [&](size_t i) {
    taken[i] = true;
    chosen.push_back(scored[i].position);
  };
  const auto local =
      std::find_if(scored.begin(), scored.end(), [](const Scored& node) { return node.local; });
  if (local != scored.end()) take(static_cast<size_t>(local - scored.begin()));
  for (const bool new_hosts_only : {true, false}) {
    for (size_t i = 0; i < scored.size() && chosen.size() < count; ++i) {
      if (taken[i]) continue;
      const std::string& host = nodes[scored[i].position].host_id;
      const bool host_used = std::any_of(chosen.begin(), chosen.end(),
                                         [&](uint32_t position) { return nodes[position].host_id == host; });
      if (!new_hosts_only || !host_used) take(i);
    }
  }
  return chosen;
}

}  // namespace mooncache

// Which cluster map counts, pure: time is passed in. Maps come from several nodes, some of which may be cut
// off from the master and still have an old one, so a map is followed only if it is newer by (term, epoch).
//
// The rules are those of the Python client (services/client/map_keeper.py, terms.py). An older term counts
// for nothing, unless it was heard several times over kPatienceMs and nothing newer meanwhile: then the
// cluster's terms began anew. A new master starts with an empty map and hears of the nodes within a
// heartbeat; the nodes that it does not list yet stay for kCarryMs.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "mooncache/client.h"
#include "mooncache/cluster_map.h"

namespace mooncache {

class MapFollower {
 public:
  static constexpr uint64_t kPatienceMs = 15'000;
  static constexpr int kRefusalsMin = 3;
  static constexpr uint64_t kCarryMs = 15'000;

  // A node answered this map. True: it is the one that counts now.
  bool hear(ClusterMap map, uint64_t now_ms);
  // A node has the map that counts.
  void confirm() { refusals_ = 0; }
  // True: carried nodes have left.
  bool expire(uint64_t now_ms);

  uint64_t term() const { return known_.term; }
  uint64_t epoch() const { return known_.epoch; }
  // For Client::set_map, without dead nodes.
  std::vector<NodeInfo> nodes() const;

 private:
  ClusterMap known_;  // as the master published it
  std::vector<NodeInfo> carried_;
  uint64_t carry_until_ms_ = 0;
  int refusals_ = 0;  // answers under an older term since the newest one was heard last
  uint64_t refused_since_ms_ = 0;
};

}  // namespace mooncache

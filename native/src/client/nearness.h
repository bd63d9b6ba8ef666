// Which holder of a block is read first. Pure: what is known of the nodes is passed in.
//
// The idea: a sound node before a failing one, then by the way its bytes take (mapped memory of the own host,
// the own host, RDMA, TCP), and only among those with the same way by what the memory itself is. Memory of a
// GPU never goes before mapped memory: it is not mapped here, its bytes go over a socket.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "mooncache/client.h"

namespace mooncache {

// How bytes come from a node to this process, the shortest way first.
enum class Reach : uint8_t { kMapped, kHost, kRdma, kTcp };

struct ReadingHost {
  std::string_view host_id;  // empty: no node is on this host
  bool maps = true;          // shared memory may be used
  bool rdma = false;         // RDMA may be used, as far as is known
};

inline Reach reach_of(const NodeInfo& node, const ReadingHost& here) {
  if (!here.host_id.empty() && node.host_id == here.host_id)
    return here.maps && node.mappable && !node.unix_path.empty() ? Reach::kMapped : Reach::kHost;
  return here.rdma && node.rdma ? Reach::kRdma : Reach::kTcp;
}

// The smaller, the sooner a node is read.
constexpr uint32_t read_rank(bool sound, Reach reach, Medium medium) {
  return (sound ? 0u : 1u) << 16 | static_cast<uint32_t>(reach) << 8 | static_cast<uint32_t>(medium);
}

// Of all holders that are offered the two to be read first; of equal ones those that were offered first.
struct NearestTwo {
  uint32_t first = kNoNode;
  uint32_t second = kNoNode;

  // `rank`: position -> read_rank. Asked only when there is something to compare.
  template <typename Rank>
  void offer(uint32_t position, Rank&& rank) {
    if (position == first || position == second) return;
    if (first == kNoNode) {
      first = position;
    } else if (rank(position) < rank(first)) {
      second = first;
      first = position;
    } else if (second == kNoNode || rank(position) < rank(second)) {
      second = position;
    }
  }
};

}  // namespace mooncache

// Which holder of a block is read first. Pure: what is known of the nodes is passed in.
//
// The idea: a sound node before a failing one, then by the way its bytes take (mapped memory of the own host,
// the own host, RDMA, TCP), and only among those with the same way by what the memory itself is. Memory of a
// GPU never goes before mapped memory: it is not mapped here, its bytes go over a socket. Holders that are
// equal in all of this share the reading: the one with the fewest bytes under way goes first, and of those
// with as many the one that a hash of client and key names, so that clients that know nothing of each other
// read different copies. A copy that lies on a disk goes behind all that lie in some memory of a sound node.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
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

// Added to the rank of a node for a copy that it has on a disk alone.
inline constexpr uint32_t kDiskRank = 1u << 15;

// A node that fails or is slow goes behind all others.
inline constexpr uint32_t kUnsoundRank = 1u << 16;

// The smaller, the sooner a node is read.
constexpr uint32_t read_rank(bool sound, Reach reach, Medium medium) {
  return (sound ? 0u : kUnsoundRank) | static_cast<uint32_t>(reach) << 8 | static_cast<uint32_t>(medium);
}

// Spreads numbers that differ in few bits over all of 64.
constexpr uint64_t spread_bits(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// Of equal holders the one with the largest number goes first. `seed` is of a client and a key.
constexpr uint64_t turn_of(uint64_t seed, uint32_t node_index) {
  return spread_bits(seed ^ spread_bits(node_index));
}

// Of all holders that are offered the few to be read first; of equal ones those that were offered first.
struct Nearest {
  static constexpr size_t kMax = 4;
  std::array<uint32_t, kMax> positions{};
  std::array<bool, kMax> on_disk{};  // the copy is on a disk alone
  std::array<bool, kMax> shared{};   // and that disk is the shared directory
  size_t count = 0;

  uint32_t first() const { return count > 0 ? positions[0] : kNoNode; }
  std::span<const uint32_t> all() const { return std::span(positions).first(count); }

  // `rank`: position, on_disk -> a number, the smaller the sooner. Asked only when there is something to
  // compare.
  template <typename Rank>
  void offer(uint32_t position, bool is_on_disk, Rank&& rank, bool is_shared = false) {
    const auto known = all();
    if (std::find(known.begin(), known.end(), position) != known.end()) return;
    size_t at = count;
    if (count > 0) {
      const auto own = rank(position, is_on_disk);
      while (at > 0 && own < rank(positions[at - 1], on_disk[at - 1])) --at;
    }
    if (at == kMax) return;
    if (count < kMax) ++count;
    for (size_t i = count - 1; i > at; --i) {
      positions[i] = positions[i - 1];
      on_disk[i] = on_disk[i - 1];
      shared[i] = shared[i - 1];
    }
    positions[at] = position;
    on_disk[at] = is_on_disk;
    shared[at] = is_shared;
  }
};

// Shares the blocks of one call out to equal holders.
class ReadSpread {
 public:
  // A batch goes to one node in pieces of so many bytes: a small one costs one request, a large one is read
  // from all its holders at once.
  static constexpr uint64_t kPieceBytes = 128 << 10;

  // One of `holders` (positions, at least one). `under_way`: position -> bytes that this client has under way
  // with the node, those of this call not counted. `turn`: position -> turn_of().
  template <typename UnderWay, typename Turn>
  uint32_t choose(std::span<const uint32_t> holders, uint64_t bytes, UnderWay&& under_way, Turn&& turn) {
    if (holders.size() == 1) return holders[0];
    const bool stays =
        piece_bytes_ < kPieceBytes && std::find(holders.begin(), holders.end(), last_) != holders.end();
    if (!stays) {
      uint64_t least = 0, best_turn = 0;
      last_ = kNoNode;
      for (const uint32_t position : holders) {
        const uint64_t load = under_way(position) + given(position);
        const uint64_t own_turn = turn(position);
        if (last_ != kNoNode && (load > least || (load == least && own_turn <= best_turn))) continue;
        last_ = position;
        least = load;
        best_turn = own_turn;
      }
      piece_bytes_ = 0;
    }
    piece_bytes_ += bytes;
    if (last_ >= given_.size()) given_.resize(last_ + 1);
    given_[last_] += bytes;
    return last_;
  }

 private:
  uint64_t given(uint32_t position) const { return position < given_.size() ? given_[position] : 0; }

  std::vector<uint64_t> given_;  // by position: bytes of this call
  uint32_t last_ = kNoNode;
  uint64_t piece_bytes_ = 0;
};

}  // namespace mooncache

// Which of the coldest blocks makes room for one that comes up from a disk: the decision as a plain function.
//
// A put evicts what the policy names first. A read from a disk has time to look: the disk costs it more than
// a few looks, and what it brings up lies below already, so it should not cost a block that lies nowhere
// else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace mooncache::store {

// What the node loses when a block leaves its memory now.
enum class Loss : uint8_t {
  kNothing,   // a copy below the memory can be read
  kBlock,     // there is no other copy
  kUnderWay,  // its copy is being written, and cannot be read yet
};

// Candidates that are looked at for one victim, coldest first.
inline constexpr uint32_t kMostLooks = 32;
// Of a shard with so many blocks: what is warmer than the coldest eighth of the memory is no candidate.
inline constexpr uint64_t kColdPart = 8;
inline constexpr uint64_t kMostLooksOfShard = 8;
inline uint32_t looks_of_shard(uint64_t blocks) {
  const uint64_t cold = blocks / kColdPart;
  return static_cast<uint32_t>(cold < 1 ? 1 : cold > kMostLooksOfShard ? kMostLooksOfShard : cold);
}

// The place of the block that goes: the coldest one that costs nothing; without one the coldest one at all
// whose copy is not under way. Nothing: all of them are under way.
inline std::optional<size_t> first_to_go(std::span<const Loss> coldest) {
  std::optional<size_t> lost;
  for (size_t at = 0; at < coldest.size() && at < kMostLooks; ++at) {
    if (coldest[at] == Loss::kNothing) return at;
    if (coldest[at] == Loss::kBlock && !lost) lost = at;
  }
  for (size_t at = kMostLooks; at < coldest.size() && !lost; ++at) {
    if (coldest[at] != Loss::kUnderWay) lost = at;
  }
  return lost;
}

}  // namespace mooncache::store

// Who loses first when memory or a disk is full, and who may move bytes now: decisions as plain functions.
//
// A tenant's reserved share is never evicted for others. What is not reserved is for all, and who uses
// most of it beyond its own share loses first. Without any share the eviction policy alone decides.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mooncache::store {

// Bytes beyond the share; 0 = within it.
inline uint64_t over_share(uint64_t used_bytes, uint64_t share_bytes) {
  return used_bytes > share_bytes ? used_bytes - share_bytes : 0;
}

// A meter that runs over at `bytes_per_s`: bytes are admitted while it holds something, and may take it below
// zero, so a block of any size passes once. It holds what a second brings.
class RateMeter {
 public:
  bool admits(uint64_t bytes_per_s, uint64_t now_ms) {
    if (bytes_per_s == 0) return true;
    const auto full = static_cast<int64_t>(std::min<uint64_t>(bytes_per_s, 1ull << 50));
    if (!known_) level_ = full;
    const uint64_t passed_ms =
        known_ && now_ms > at_ms_ ? std::min<uint64_t>(now_ms - at_ms_, kLongestMs) : 0;
    level_ = std::min(full, level_ + static_cast<int64_t>(static_cast<double>(full) *
                                                          static_cast<double>(passed_ms) / 1000.0));
    known_ = true;
    at_ms_ = std::max(at_ms_, now_ms);
    return level_ > 0;
  }
  void take(uint64_t bytes) {
    const auto taken = static_cast<int64_t>(std::min<uint64_t>(bytes, 1ull << 50));
    level_ = std::max(level_ - taken, -(int64_t{1} << 55));
  }

 private:
  static constexpr uint64_t kLongestMs = 3'600'000;
  bool known_ = false;
  int64_t level_ = 0;
  uint64_t at_ms_ = 0;
};

}  // namespace mooncache::store

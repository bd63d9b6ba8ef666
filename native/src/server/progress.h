// Whether bytes move while they have to: a peer that sends or takes too few of them is too slow.
#pragma once

#include <cstdint>

namespace mooncache::server {

class Progress {
 public:
  void moved(uint64_t bytes) { moved_bytes_ += bytes; }
  // Something begins to be due: a new window.
  void restart(uint64_t now_ms) {
    since_ms_ = now_ms;
    moved_before_ = moved_bytes_;
  }
  // `due`: bytes have to move now. True at the end of a window of `window_ms` in which fewer than `min_bytes`
  // did.
  bool too_slow(bool due, uint64_t now_ms, uint64_t window_ms, uint64_t min_bytes) {
    if (due && now_ms - since_ms_ < window_ms) return false;
    const bool slow = due && moved_bytes_ - moved_before_ < min_bytes;
    restart(now_ms);
    return slow;
  }

 private:
  uint64_t since_ms_ = 0;
  uint64_t moved_bytes_ = 0, moved_before_ = 0;
};

}  // namespace mooncache::server

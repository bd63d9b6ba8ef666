// Blocks that were nowhere a moment ago, pure: time is passed in. In a cluster whose nodes are too many to
// ask for each miss, a reader that waits for a block would have all of them asked every few milliseconds. The
// pause before a key is looked for again grows with the time for which it has been awaited. The rules are
// those of the Python client (services/client/locator.py).
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "mooncache/types.h"

namespace mooncache {

class AbsentKeys {
 public:
  static constexpr uint64_t kPauseMinMs = 100;
  static constexpr uint64_t kPauseMaxMs = 1000;
  static constexpr uint64_t kPauseShare = 8;
  static constexpr uint64_t kForgetMs = 10'000;
  static constexpr size_t kKeysMax = 65'536;

  // Whether to look for it now.
  bool due(const Key& key, uint64_t now_ms) const {
    const std::lock_guard lock(mutex_);
    const auto found = absent_.find(key);
    return found == absent_.end() || found->second.until_ms <= now_ms;
  }
  // It was looked for everywhere.
  void remember(const Key& key, bool found, uint64_t now_ms) {
    const std::lock_guard lock(mutex_);
    const auto known = absent_.find(key);
    if (found) {
      if (known != absent_.end()) absent_.erase(known);
      return;
    }
    uint64_t first_ms = known == absent_.end() ? now_ms : known->second.first_ms;
    if (known != absent_.end() && now_ms - known->second.until_ms > kForgetMs) first_ms = now_ms;
    const uint64_t pause_ms = std::clamp((now_ms - first_ms) / kPauseShare, kPauseMinMs, kPauseMaxMs);
    if (known == absent_.end() && absent_.size() >= kKeysMax) absent_.clear();  // it only saves questions
    absent_[key] = {first_ms, now_ms + pause_ms};
  }

 private:
  struct Absence {
    uint64_t first_ms = 0;
    uint64_t until_ms = 0;
  };
  mutable std::mutex mutex_;
  std::unordered_map<Key, Absence> absent_;
};

}  // namespace mooncache

// The policy "mooncache" behind a leaf mutex, in the store's terms: ids are the store's hashes of (tenant,
// key), time is its now_ms. What it believes may lag behind the shards; being wrong only misplaces a block.
// Who calls stored(), discard() or set_aside() for a block holds the block's shard, so these come in the
// order of their causes.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/reuse.h"

namespace mooncache::store {

class Advisor {
 public:
  // Its time goes `speed` times as fast as the store's.
  explicit Advisor(uint32_t speed) : speed_(speed) {}

  void seen(std::span<const uint64_t> ids, std::span<const uint8_t> here, uint64_t now_ms,
            uint64_t owner = 0) {
    asked_.store(true, std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    policy_.seen(ids, seconds_at(now_ms), here, owner);
  }
  bool stored(uint64_t id, uint64_t now_ms) {
    if (knows_nothing()) return false;
    const std::lock_guard lock(mutex_);
    return policy_.stored(id, seconds_at(now_ms));
  }
  void discard(uint64_t id) {
    if (knows_nothing()) return;
    const std::lock_guard lock(mutex_);
    policy_.discard(id);
  }
  void set_aside(uint64_t id) {
    const std::lock_guard lock(mutex_);
    policy_.set_aside(id);
  }
  std::optional<uint64_t> victim(uint64_t incoming, uint64_t now_ms) {
    if (knows_nothing()) return std::nullopt;
    const std::lock_guard lock(mutex_);
    const auto found = policy_.victim(seconds_at(now_ms), incoming);
    return found ? std::optional(found->id) : std::nullopt;
  }
  void next_victims(uint32_t limit, uint64_t now_ms, std::vector<Reuse::NextVictim>& out,
                    const Reuse::Which& which) {
    if (knows_nothing()) return;
    const std::lock_guard lock(mutex_);
    policy_.next_victims(seconds_at(now_ms), limit, out, which);
  }
  uint64_t memory_bytes() const {
    const std::lock_guard lock(mutex_);
    return policy_.memory_bytes();
  }
  bool check(std::string* why) const {
    const std::lock_guard lock(mutex_);
    return policy_.check(why);
  }

 private:
  // Where no chain was ever asked for, puts and evictions take no lock of the policy's.
  bool knows_nothing() const { return !asked_.load(std::memory_order_relaxed); }
  // Threads read the clock before they take the mutex; the policy's time never falls.
  double seconds_at(uint64_t now_ms) {
    now_s_ = std::max(now_s_, static_cast<double>(now_ms * speed_) / 1000.0);
    return now_s_;
  }

  mutable std::mutex mutex_;
  Reuse policy_;
  double now_s_ = 0;
  uint32_t speed_;
  std::atomic<bool> asked_{false};
};

}  // namespace mooncache::store

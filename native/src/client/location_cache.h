// Where blocks were seen last: a hint, never a truth. Fixed memory: buckets of eight, CLOCK inside a bucket.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <mutex>
#include <vector>

#include "mooncache/types.h"

namespace mooncache {

class LocationCache {
 public:
  explicit LocationCache(uint64_t keys)
      : buckets_(std::bit_ceil(std::max<uint64_t>(keys, kWays) / kWays)),
        locks_(std::make_unique<std::array<std::mutex, 64>>()) {}

  // Node index, or UINT32_MAX.
  uint32_t find(const Key& key) {
    const size_t at = index(key);
    const std::lock_guard lock((*locks_)[at % 64]);
    for (Entry& entry : buckets_[at].entries) {
      if (entry.used && entry.key == key) {
        entry.recent = true;
        return entry.node;
      }
    }
    return UINT32_MAX;
  }

  void learn(const Key& key, uint32_t node) {
    const size_t at = index(key);
    const std::lock_guard lock((*locks_)[at % 64]);
    Bucket& bucket = buckets_[at];
    Entry* place = nullptr;
    for (Entry& entry : bucket.entries) {
      if (entry.used && entry.key == key) {
        entry.node = node;
        entry.recent = true;
        return;
      }
      if (!entry.used) place = &entry;
    }
    while (place == nullptr) {
      Entry& entry = bucket.entries[bucket.hand++ % kWays];
      if (!entry.recent) place = &entry;
      entry.recent = false;
    }
    *place = {key, node, true, false};
  }

  // Forgets the key if it is still thought to be on `node`. True when it was.
  bool forget(const Key& key, uint32_t node) {
    const size_t at = index(key);
    const std::lock_guard lock((*locks_)[at % 64]);
    for (Entry& entry : buckets_[at].entries) {
      if (entry.used && entry.key == key && entry.node == node) {
        entry.used = false;
        return true;
      }
    }
    return false;
  }

 private:
  static constexpr size_t kWays = 8;
  struct Entry {
    Key key;
    uint32_t node = 0;
    bool used = false;
    bool recent = false;
  };
  struct Bucket {
    std::array<Entry, kWays> entries;
    size_t hand = 0;
  };
  size_t index(const Key& key) const { return key.word(1) & (buckets_.size() - 1); }

  std::vector<Bucket> buckets_;
  std::unique_ptr<std::array<std::mutex, 64>> locks_;
};

}  // namespace mooncache

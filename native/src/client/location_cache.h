// Where blocks were seen last, up to two nodes for each: a hint, never a truth. Fixed memory: buckets of
// eight, CLOCK inside a bucket.
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

  static constexpr uint32_t kNowhere = UINT32_MAX;
  // Indices of nodes, or kNowhere.
  struct Places {
    uint32_t first = kNowhere;
    uint32_t second = kNowhere;
  };

  Places find(const Key& key) {
    const size_t at = index(key);
    const std::lock_guard lock((*locks_)[at % 64]);
    for (Entry& entry : buckets_[at].entries) {
      if (entry.used && entry.key == key) {
        entry.recent = true;
        return entry.places;
      }
    }
    return {};
  }

  // One node that was one of two before changes nothing: the other one was not asked.
  void learn(const Key& key, uint32_t node, uint32_t other = kNowhere) {
    const size_t at = index(key);
    const std::lock_guard lock((*locks_)[at % 64]);
    Bucket& bucket = buckets_[at];
    Entry* place = nullptr;
    for (Entry& entry : bucket.entries) {
      if (entry.used && entry.key == key) {
        if (other != kNowhere || (entry.places.first != node && entry.places.second != node))
          entry.places = {node, other};
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
    *place = {key, {node, other}, true, false};
  }

  // The key is not on `node`. True when it was thought to be.
  bool forget(const Key& key, uint32_t node) {
    const size_t at = index(key);
    const std::lock_guard lock((*locks_)[at % 64]);
    for (Entry& entry : buckets_[at].entries) {
      if (!entry.used || entry.key != key) continue;
      if (entry.places.second == node) {
        entry.places.second = kNowhere;
        return true;
      }
      if (entry.places.first != node) return false;
      entry.places = {entry.places.second, kNowhere};
      entry.used = entry.places.first != kNowhere;
      return true;
    }
    return false;
  }

 private:
  static constexpr size_t kWays = 8;
  struct Entry {
    Key key;
    Places places;
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

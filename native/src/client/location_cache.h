// Where blocks were seen last, up to four nodes for each: a hint, never a truth. Fixed memory: buckets of
// eight, CLOCK inside a bucket.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "mooncache/types.h"

namespace mooncache {

class LocationCache {
 public:
  explicit LocationCache(uint64_t keys)
      : buckets_(std::bit_ceil(std::max<uint64_t>(keys, kWays) / kWays)),
        locks_(std::make_unique<std::array<std::mutex, 64>>()) {}

  static constexpr uint32_t kNowhere = UINT32_MAX;
  static constexpr size_t kPlaces = 4;
  static constexpr uint32_t kNeverAsked = 0;
  // Indices of nodes, the one to read first at the front; behind the last one kNowhere.
  struct Places {
    std::array<uint32_t, kPlaces> nodes = {kNowhere, kNowhere, kNowhere, kNowhere};
    std::array<bool, kPlaces> on_disk{};  // when they were asked, the copy was on a disk alone
    uint32_t asked_s =
        kNeverAsked;  // when all nodes were asked for the block; else copies may be missing here
  };

  Places find(const Key& key) {
    Places places;
    const size_t at = index(key);
    const std::lock_guard lock((*locks_)[at % 64]);
    for (Entry& entry : buckets_[at].entries) {
      if (!entry.used || entry.key != key) continue;
      entry.recent = true;
      for (size_t i = 0; i < kPlaces && entry.nodes[i] != kNone; ++i) {
        places.nodes[i] = entry.nodes[i];
        places.on_disk[i] = (entry.on_disk >> i & 1) != 0;
      }
      places.asked_s = entry.asked_s;
      break;
    }
    return places;
  }

  // One node that was among those known before changes nothing: the other ones were not asked; but what was
  // read there is in its memory now. `asked_s`: of an answer of all nodes, when it was given. `on_disk`: of
  // each node, or empty: in memory.
  void learn(const Key& key, std::span<const uint32_t> nodes, uint32_t asked_s = kNeverAsked,
             std::span<const bool> on_disk = {}) {
    Nodes packed;
    packed.fill(kNone);
    size_t count = 0;
    uint8_t disks = 0;
    for (size_t i = 0; i < nodes.size() && count < kPlaces; ++i) {
      if (nodes[i] >= kNone) continue;
      if (i < on_disk.size() && on_disk[i]) disks = static_cast<uint8_t>(disks | 1u << count);
      packed[count++] = static_cast<uint16_t>(nodes[i]);
    }
    if (count == 0) return;
    const size_t at = index(key);
    const std::lock_guard lock((*locks_)[at % 64]);
    Bucket& bucket = buckets_[at];
    Entry* place = nullptr;
    for (Entry& entry : bucket.entries) {
      if (entry.used && entry.key == key) {
        entry.recent = true;
        const auto known = std::find(entry.nodes.begin(), entry.nodes.end(), packed[0]);
        if (count == 1 && asked_s == kNeverAsked && known != entry.nodes.end()) {
          const auto bit = static_cast<size_t>(known - entry.nodes.begin());
          entry.on_disk = static_cast<uint8_t>((entry.on_disk & ~(1u << bit)) | unsigned{disks} << bit);
          return;
        }
        entry.nodes = packed;
        entry.asked_s = asked_s;
        entry.on_disk = disks;
        return;
      }
      if (!entry.used) place = &entry;
    }
    while (place == nullptr) {
      Entry& entry = bucket.entries[bucket.hand++ % kWays];
      if (!entry.recent) place = &entry;
      entry.recent = false;
    }
    *place = {key, packed, asked_s, disks, true, false};
  }
  void learn(const Key& key, uint32_t node) { learn(key, std::span(&node, 1)); }

  // The key is not on `node`. True when it was thought to be.
  bool forget(const Key& key, uint32_t node) {
    const size_t at = index(key);
    const std::lock_guard lock((*locks_)[at % 64]);
    for (Entry& entry : buckets_[at].entries) {
      if (!entry.used || entry.key != key || node >= kNone) continue;
      const auto place = std::find(entry.nodes.begin(), entry.nodes.end(), static_cast<uint16_t>(node));
      if (place == entry.nodes.end()) return false;
      const auto gone = static_cast<unsigned>(place - entry.nodes.begin());
      const unsigned before = (1u << gone) - 1;
      entry.on_disk = static_cast<uint8_t>((entry.on_disk & before) | (entry.on_disk >> 1 & ~before));
      std::copy(place + 1, entry.nodes.end(), place);
      entry.nodes.back() = kNone;
      entry.used = entry.nodes[0] != kNone;
      return true;
    }
    return false;
  }

 private:
  static constexpr size_t kWays = 8;
  static constexpr uint16_t kNone = UINT16_MAX;  // the wire has 16 bits for a node's index
  using Nodes = std::array<uint16_t, kPlaces>;
  struct Entry {
    Key key;
    Nodes nodes{};
    uint32_t asked_s = kNeverAsked;
    uint8_t on_disk = 0;  // bit i: the copy on nodes[i]
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

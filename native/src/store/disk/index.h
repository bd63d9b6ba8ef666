// Where each block lies on one disk: 48 bytes a block and 5 to 9 for its cell in the table. Its owner's lock
// guards it.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "mooncache/store.h"
#include "mooncache/types.h"
#include "store/disk/end_of_life.h"
#include "store/slab.h"
#include "store/slot_index.h"

namespace mooncache::store::disk {

struct DiskEntry {
  Key key;
  uint32_t next = kNone;   // free chain; while in use: the unit in the segment
  uint32_t size : 28 = 0;  // 0: not in use
  uint32_t written : 1 = 0;
  uint32_t encrypted : 1 = 0;
  uint16_t segment = 0;
  uint16_t tenant = 0;          // its number here
  uint32_t hits : 8 = 0;        // since it was written
  uint32_t end : kEndBits = 0;  // end_of_life.h
};
static_assert(sizeof(DiskEntry) == 48);
inline constexpr uint32_t kMostIndexedBytes = (1u << 28) - 1;  // a block is smaller than its segment

struct Location {
  uint32_t segment = 0, unit = 0;
  bool operator==(const Location&) const = default;
};

class DiskIndex {
 public:
  explicit DiskIndex(uint64_t seed) : seed_(seed | 1) {}

  uint32_t find(TenantId tenant, const Key& key) const {
    return cells_.find(hash_of(tenant, key), [&](uint32_t at) {
      return entries_[at].key == key && tenants_[entries_[at].tenant] == tenant;
    });
  }
  // Replaces what is known of the key. kNone: the table is full.
  uint32_t put(TenantId tenant, const Key& key, uint32_t size, Location at, bool written,
               bool encrypted = false, uint32_t end = 0) {
    if (size > kMostIndexedBytes) return kNone;
    uint32_t number = find(tenant, key);
    if (number == kNone) {
      const uint32_t name = number_of(tenant);
      if (name == kNone || cells_.count() >= SlotIndex::kMaxEntries) return kNone;
      number = entries_.allocate();
      if (number == kNone) return kNone;
      entries_[number].key = key;
      entries_[number].tenant = static_cast<uint16_t>(name);
      cells_.insert(hash_of(tenant, key), number, [this](uint32_t other) { return hash_at(other); });
      ++uses_[name].blocks;
    } else {
      uses_[entries_[number].tenant].bytes -= entries_[number].size;
      bytes_ -= entries_[number].size;
      with_end_ -= entries_[number].end != 0 ? 1 : 0;
    }
    DiskEntry& entry = entries_[number];
    entry.size = size & kMostIndexedBytes;
    entry.next = at.unit;
    entry.segment = static_cast<uint16_t>(at.segment);
    entry.hits = 0;
    entry.written = written;
    entry.encrypted = encrypted;
    entry.end = end & kMaxEnd;
    with_end_ += end != 0 ? 1 : 0;
    bytes_ += size;
    uses_[entry.tenant].bytes += size;
    return number;
  }
  void erase(uint32_t number) {
    cells_.erase(hash_at(number), number, [this](uint32_t other) { return hash_at(other); });
    bytes_ -= entries_[number].size;
    uses_[entries_[number].tenant].bytes -= entries_[number].size;
    --uses_[entries_[number].tenant].blocks;
    with_end_ -= entries_[number].end != 0 ? 1 : 0;
    entries_[number].size = 0;
    entries_.release(number);
  }
  DiskEntry& operator[](uint32_t number) { return entries_[number]; }
  const DiskEntry& operator[](uint32_t number) const { return entries_[number]; }
  TenantId tenant_of(const DiskEntry& entry) const { return tenants_[entry.tenant]; }
  const std::vector<DiskUse>& uses() const { return uses_; }
  uint64_t bytes_of(const DiskEntry& entry) const { return uses_[entry.tenant].bytes; }
  uint64_t bytes_of(TenantId tenant) const {
    const auto found = numbers_.find(tenant);
    return found == numbers_.end() ? 0 : uses_[found->second].bytes;
  }
  static Location location_of(const DiskEntry& entry) { return {entry.segment, entry.next}; }
  uint32_t slots() const { return entries_.size(); }  // numbers below were in use at least once
  uint32_t count() const { return cells_.count(); }
  uint32_t with_end() const { return with_end_; }  // blocks
  uint64_t bytes() const { return bytes_; }
  uint64_t memory_bytes() const { return entries_.memory_bytes() + cells_.memory_bytes(); }

 private:
  static constexpr uint32_t kMaxTenants = 65'535;

  uint32_t number_of(TenantId tenant) {
    const auto found = numbers_.find(tenant);
    if (found != numbers_.end()) return found->second;
    if (tenants_.size() >= kMaxTenants) return kNone;
    const auto number = static_cast<uint16_t>(tenants_.size());
    tenants_.push_back(tenant);
    uses_.push_back({tenant, 0, 0});
    numbers_.emplace(tenant, number);
    return number;
  }
  // Keyed, because clients choose keys.
  uint64_t hash_of(TenantId tenant, const Key& key) const {
    uint64_t hash = seed_ ^ tenant;
    for (size_t word = 0; word < 4; ++word) {
      const auto product = static_cast<unsigned __int128>(hash ^ key.word(word)) * (seed_ + 2 * word);
      hash = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    return hash;
  }
  uint64_t hash_at(uint32_t number) const {
    return hash_of(tenants_[entries_[number].tenant], entries_[number].key);
  }

  const uint64_t seed_;
  Slab<DiskEntry, 1024> entries_;
  SlotIndex cells_;
  std::vector<TenantId> tenants_;
  std::vector<DiskUse> uses_;  // by the same numbers
  std::unordered_map<TenantId, uint16_t> numbers_;
  uint64_t bytes_ = 0;
  uint32_t with_end_ = 0;
};

}  // namespace mooncache::store::disk

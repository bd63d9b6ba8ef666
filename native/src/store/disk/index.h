// Where each block lies on one disk: 48 bytes a block and 5 to 9 for its cell in the table. Its owner's lock
// guards it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
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
  uint32_t hidden : 1 = 0;  // no longer served, but a start may find its record: see DiskIndex::hide()
  uint16_t segment = 0;
  uint16_t owner = 0;           // number here of its tenant and writer
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
      return entries_[at].key == key && uses_[entries_[at].owner].tenant == tenant;
    });
  }
  // Replaces what is known of the key. kNone: the table is full.
  uint32_t put(TenantId tenant, const Key& key, uint32_t size, Location at, bool written,
               bool encrypted = false, uint32_t end = 0, const Origin& origin = {}) {
    if (size > kMostIndexedBytes) return kNone;
    uint32_t number = find(tenant, key);
    if (number == kNone && cells_.count() >= SlotIndex::kMaxEntries) return kNone;
    const uint32_t owner = owner_of(tenant, origin.writer);
    if (owner == kNone) return kNone;
    ++uses_[owner].blocks;
    if (number == kNone) {
      number = entries_.allocate();
      if (number == kNone) {
        leave(owner);
        return kNone;
      }
      entries_[number].key = key;
      entries_[number].owner = static_cast<uint16_t>(owner);
      cells_.insert(hash_of(tenant, key), number, [this](uint32_t other) { return hash_at(other); });
    } else {
      take_out(entries_[number]);
    }
    DiskEntry& entry = entries_[number];
    entry.owner = static_cast<uint16_t>(owner);
    entry.size = size & kMostIndexedBytes;
    entry.next = at.unit;
    entry.segment = static_cast<uint16_t>(at.segment);
    entry.hits = 0;
    entry.written = written;
    entry.encrypted = encrypted;
    entry.hidden = 0;
    entry.end = end & kMaxEnd;
    with_end_ += end != 0 ? 1 : 0;
    bytes_ += size;
    DiskUse& use = uses_[owner];
    use.bytes += size;
    tenant_bytes_[tenant] += size;
    if (origin.written_s != 0)
      use.first_s = use.first_s == 0 ? origin.written_s : std::min(use.first_s, origin.written_s);
    use.last_s = std::max(use.last_s, origin.written_s);
    return number;
  }
  void erase(uint32_t number) {
    cells_.erase(hash_at(number), number, [this](uint32_t other) { return hash_at(other); });
    take_out(entries_[number]);
    entries_[number].size = 0;
    entries_[number].hidden = 0;
    entries_.release(number);
  }
  // What the disk did not give back, or may have written. It counts as no block of its tenant or writer, but
  // who removes it finds it.
  void hide(uint32_t number) {
    DiskEntry& entry = entries_[number];
    if (entry.hidden != 0) return;
    uncount(entry);
    entry.hidden = entry.written = 1;
    ++hidden_;
    ++hidden_of_[entry.owner];
  }
  DiskEntry& operator[](uint32_t number) { return entries_[number]; }
  const DiskEntry& operator[](uint32_t number) const { return entries_[number]; }
  TenantId tenant_of(const DiskEntry& entry) const { return uses_[entry.owner].tenant; }
  uint64_t writer_of(const DiskEntry& entry) const { return uses_[entry.owner].writer; }
  std::vector<DiskUse> uses() const {
    std::vector<DiskUse> served = uses_;
    for (const auto& [owner, hidden] : hidden_of_) served[owner].blocks -= hidden;
    return served;
  }
  uint64_t bytes_of(const DiskEntry& entry) const { return bytes_of(tenant_of(entry)); }
  uint64_t bytes_of(TenantId tenant) const {
    const auto found = tenant_bytes_.find(tenant);
    return found == tenant_bytes_.end() ? 0 : found->second;
  }
  static Location location_of(const DiskEntry& entry) { return {entry.segment, entry.next}; }
  uint32_t slots() const { return entries_.size(); }  // numbers below were in use at least once
  uint32_t count() const { return cells_.count() - hidden_; }
  uint32_t with_end() const { return with_end_; }  // blocks
  uint64_t bytes() const { return bytes_; }
  uint64_t memory_bytes() const { return entries_.memory_bytes() + cells_.memory_bytes(); }

 private:
  static constexpr uint32_t kMaxOwners = 65'535;
  static constexpr uint32_t kMaxKnownOwners = 49'152;  // the rest is for tenants with unknown writers

  // The number of an owner without blocks is used again. Without a number left a block is one of an unknown
  // writer.
  uint32_t owner_of(TenantId tenant, uint64_t writer) {
    const auto found = numbers_.find({tenant, writer});
    if (found != numbers_.end()) return found->second;
    if (writer != 0 && numbers_.size() >= kMaxKnownOwners) return owner_of(tenant, 0);
    uint32_t number = static_cast<uint32_t>(uses_.size());
    if (!free_owners_.empty()) {
      number = free_owners_.back();
      free_owners_.pop_back();
    } else if (number < kMaxOwners) {
      uses_.emplace_back();
    } else {
      return kNone;
    }
    uses_[number] = {};
    uses_[number].tenant = tenant;
    uses_[number].writer = writer;
    numbers_.emplace(std::pair(tenant, writer), static_cast<uint16_t>(number));
    return number;
  }
  // One block less.
  void leave(uint32_t owner) {
    DiskUse& use = uses_[owner];
    if (--use.blocks > 0) return;
    numbers_.erase({use.tenant, use.writer});
    free_owners_.push_back(static_cast<uint16_t>(owner));
    const auto rest = tenant_bytes_.find(use.tenant);
    if (rest != tenant_bytes_.end() && rest->second == 0) tenant_bytes_.erase(rest);
  }
  void uncount(const DiskEntry& entry) {
    bytes_ -= entry.size;
    uses_[entry.owner].bytes -= entry.size;
    tenant_bytes_[uses_[entry.owner].tenant] -= entry.size;
  }
  void take_out(const DiskEntry& entry) {
    if (entry.hidden == 0) {
      uncount(entry);
    } else {
      --hidden_;
      if (--hidden_of_[entry.owner] == 0) hidden_of_.erase(entry.owner);
    }
    with_end_ -= entry.end != 0 ? 1 : 0;
    leave(entry.owner);
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
    return hash_of(tenant_of(entries_[number]), entries_[number].key);
  }

  const uint64_t seed_;
  Slab<DiskEntry, 1024> entries_;
  SlotIndex cells_;
  std::vector<DiskUse> uses_;  // by the numbers of owners, with hidden blocks; without blocks: not in use
  std::map<std::pair<TenantId, uint64_t>, uint16_t> numbers_;
  std::vector<uint16_t> free_owners_;
  std::unordered_map<TenantId, uint64_t> tenant_bytes_;
  std::unordered_map<uint16_t, uint64_t> hidden_of_;  // blocks, by the numbers of owners
  uint64_t bytes_ = 0;
  uint32_t with_end_ = 0, hidden_ = 0;
};

}  // namespace mooncache::store::disk

// Open addressing from a 64-bit hash to the number of an entry, in 8 bytes per slot.
//
// The table is cut into 256 independent shards by the low byte of the hash. A shard grows alone, so
// one insertion never moves more than 1/256 of the slots (about a millisecond at 100 million blocks),
// and the shards' load limits are staggered between 0.60 and 0.85 so that they do not all grow at
// the same moment. A slot keeps 32 bits of the hash, which also give its home: growing never touches
// the entries. Removal shifts the following slots back; there are no tombstones.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

namespace mooncache::index {

inline constexpr uint32_t kNoEntry = 0xffffffff;

class SlotTable {
 public:
  struct Slot {
    uint32_t tag = 0;    // upper 32 bits of the hash
    uint32_t entry = 0;  // number of the entry + 1; 0 is an empty slot
  };

  SlotTable() {
    for (size_t i = 0; i < shards_.size(); ++i) resize(shards_[i], i, kBitsMin);
  }

  void prefetch(uint64_t hash) const {
    const Shard& shard = shard_of(hash);
    __builtin_prefetch(&shard.slots[home(shard, tag_of(hash))]);
  }

  // First entry with this tag, without looking at its key: good enough to prefetch it.
  uint32_t candidate(uint64_t hash) const {
    return find(hash, [](uint32_t) { return true; });
  }

  // The entry for which is_same(entry) holds, or kNoEntry.
  template <typename IsSame>
  uint32_t find(uint64_t hash, IsSame is_same) const {
    const Shard& shard = shard_of(hash);
    const uint32_t tag = tag_of(hash);
    for (uint32_t at = home(shard, tag);; at = (at + 1) & shard.mask) {
      const Slot slot = shard.slots[at];
      if (slot.entry == 0) return kNoEntry;
      if (slot.tag == tag && is_same(slot.entry - 1)) return slot.entry - 1;
    }
  }

  // The entry must not be in the table yet.
  void insert(uint64_t hash, uint32_t entry) {
    Shard& shard = shards_[hash & 0xff];
    if (shard.count == shard.limit) resize(shard, hash & 0xff, shard.bits + 1);
    place(shard, {tag_of(hash), entry + 1});
    ++shard.count;
    ++size_;
  }

  // The entry must be in the table.
  void erase(uint64_t hash, uint32_t entry) {
    Shard& shard = shards_[hash & 0xff];
    uint32_t hole = home(shard, tag_of(hash));
    while (shard.slots[hole].entry != entry + 1) hole = (hole + 1) & shard.mask;
    for (uint32_t at = (hole + 1) & shard.mask; shard.slots[at].entry != 0; at = (at + 1) & shard.mask) {
      // A slot may move back into the hole unless its home lies after the hole.
      const uint32_t distance_home = (at - home(shard, shard.slots[at].tag)) & shard.mask;
      const uint32_t distance_hole = (at - hole) & shard.mask;
      if (distance_home < distance_hole) continue;
      shard.slots[hole] = shard.slots[at];
      hole = at;
    }
    shard.slots[hole] = {};
    --shard.count;
    --size_;
  }

  uint64_t size() const { return size_; }
  uint64_t memory_bytes() const {
    uint64_t total = sizeof *this;
    for (const Shard& shard : shards_) total += (uint64_t{shard.mask} + 1) * sizeof(Slot);
    return total;
  }

  // Calls visit(shard, slot) for every used slot; false when one cannot be reached from its home.
  template <typename Visit>
  bool for_each(Visit visit) const {
    uint64_t total = 0;
    for (size_t i = 0; i < shards_.size(); ++i) {
      const Shard& shard = shards_[i];
      uint32_t count = 0;
      for (uint32_t at = 0; at <= shard.mask; ++at) {
        const Slot slot = shard.slots[at];
        if (slot.entry == 0) continue;
        ++count;
        for (uint32_t step = home(shard, slot.tag); step != at; step = (step + 1) & shard.mask) {
          if (shard.slots[step].entry == 0) return false;
        }
        visit(i, slot);
      }
      if (count != shard.count || count > shard.limit) return false;
      total += count;
    }
    return total == size_;
  }

 private:
  static constexpr uint32_t kBitsMin = 4;

  struct Shard {
    std::unique_ptr<Slot[]> slots;
    uint32_t bits = 0;
    uint32_t mask = 0;
    uint32_t count = 0;
    uint32_t limit = 0;
  };

  static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }
  // The upper bits of the tag, so that growth keeps the order of slots and runs through memory forwards.
  static uint32_t home(const Shard& shard, uint32_t tag) { return tag >> (32 - shard.bits); }
  const Shard& shard_of(uint64_t hash) const { return shards_[hash & 0xff]; }

  static void place(Shard& shard, Slot slot) {
    uint32_t at = home(shard, slot.tag);
    while (shard.slots[at].entry != 0) at = (at + 1) & shard.mask;
    shard.slots[at] = slot;
  }

  static void resize(Shard& shard, size_t number, uint32_t bits) {
    const std::unique_ptr<Slot[]> old = std::move(shard.slots);
    const uint64_t old_size = old == nullptr ? 0 : uint64_t{shard.mask} + 1;
    const uint64_t size = uint64_t{1} << bits;
    shard.slots = std::make_unique<Slot[]>(size);
    shard.bits = bits;
    shard.mask = static_cast<uint32_t>(size - 1);
    shard.limit = static_cast<uint32_t>(size * (60 + number * 25 / 255) / 100);
    for (uint64_t at = 0; at < old_size; ++at) {
      if (old[at].entry != 0) place(shard, old[at]);
    }
  }

  std::array<Shard, 256> shards_;
  uint64_t size_ = 0;
};

}  // namespace mooncache::index

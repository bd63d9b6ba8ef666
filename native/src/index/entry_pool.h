// The blocks themselves: one cache line each, in chunks that never move.
//
// An entry holds the whole key, the tenant and three replicas of 8 bytes. A block with more replicas
// keeps two in line and the others in a list sorted by holder, whose number stands in the third
// place. Invariants: replicas in line are packed from the front; a list has at least two; a free
// entry has no replica and its tenant field links the free list.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "mooncache/block_index.h"

namespace mooncache::index {

// A replica in 64 bits: size 0..39, tier 40..41, epoch 42, used 43, list 44, holder 48..63.
struct Packed {
  static constexpr uint64_t kSizeMask = (1ull << 40) - 1;
  static constexpr int kTierShift = 40;
  static constexpr uint64_t kEpoch = 1ull << 42;
  static constexpr uint64_t kUsed = 1ull << 43;
  static constexpr uint64_t kList = 1ull << 44;  // the size field is the number of a list
  static constexpr int kHolderShift = 48;

  uint64_t bits = 0;

  static Packed make(uint32_t holder, uint8_t tier, uint64_t size_bytes, bool epoch) {
    return {size_bytes | uint64_t{tier} << kTierShift | (epoch ? kEpoch : 0) | kUsed |
            uint64_t{holder} << kHolderShift};
  }
  static Packed list(uint32_t number) { return {uint64_t{number} | kUsed | kList}; }

  bool used() const { return (bits & kUsed) != 0; }
  bool is_list() const { return (bits & kList) != 0; }
  uint32_t list_number() const { return static_cast<uint32_t>(bits & kSizeMask); }
  uint32_t holder() const { return static_cast<uint32_t>(bits >> kHolderShift); }
  uint64_t size_bytes() const { return bits & kSizeMask; }
  uint8_t tier() const { return (bits >> kTierShift) & 3; }
  bool epoch() const { return (bits & kEpoch) != 0; }
  BlockReplica unpack() const {
    return {static_cast<uint16_t>(holder()), static_cast<Tier>(tier()), size_bytes()};
  }
};

struct alignas(64) IndexEntry {
  Key key;
  uint64_t tenant;
  std::array<Packed, 3> replicas;
};
static_assert(sizeof(IndexEntry) == 64);

class EntryPool {
 public:
  static constexpr uint32_t kChunkBits = 15;
  static constexpr uint32_t kChunkEntries = 1u << kChunkBits;  // 2 MiB: one huge page

  IndexEntry& operator[](uint32_t number) {
    return chunks_[number >> kChunkBits][number & (kChunkEntries - 1)];
  }
  const IndexEntry& operator[](uint32_t number) const {
    return chunks_[number >> kChunkBits][number & (kChunkEntries - 1)];
  }

  uint32_t allocate() {
    if (free_ != kNone) {
      const uint32_t number = free_;
      free_ = static_cast<uint32_t>((*this)[number].tenant);
      return number;
    }
    if (used_ == chunks_.size() << kChunkBits) chunks_.push_back(new_chunk(!chunks_.empty()));
    return used_++;
  }
  void release(uint32_t number) {
    IndexEntry& entry = (*this)[number];
    entry.replicas = {};
    entry.tenant = free_;
    free_ = number;
  }
  // Numbers below this were handed out at some time.
  uint32_t high_water() const { return used_; }

  std::vector<Packed>& list(uint32_t number) { return lists_[number]; }
  const std::vector<Packed>& list(uint32_t number) const { return lists_[number]; }
  uint64_t list_count() const { return lists_.size() - free_lists_.size(); }

  Packed* find(IndexEntry& entry, uint32_t holder) {
    for (Packed& replica : entry.replicas) {
      if (!replica.used()) return nullptr;
      if (replica.is_list()) return find_in(lists_[replica.list_number()], holder);
      if (replica.holder() == holder) return &replica;
    }
    return nullptr;
  }

  // The holder must not have a replica yet.
  void add(IndexEntry& entry, Packed replica) {
    for (Packed& place : entry.replicas) {
      if (!place.used()) {
        place = replica;
        return;
      }
    }
    Packed& last = entry.replicas[2];
    if (!last.is_list()) {
      const uint32_t number = new_list();
      lists_[number].push_back(last);
      last = Packed::list(number);
    }
    auto& list = lists_[last.list_number()];
    list.insert(lower_bound(list, replica.holder()), replica);
  }

  // Removes what find() returned.
  void remove(IndexEntry& entry, Packed* replica) {
    Packed& last = entry.replicas[2];
    if (!last.is_list()) {
      Packed* end = entry.replicas.data() + 3;
      std::copy(replica + 1, end, replica);
      entry.replicas[2] = {};
      return;
    }
    auto& list = lists_[last.list_number()];
    if (replica == &entry.replicas[0] || replica == &entry.replicas[1]) {
      *replica = list.back();
      list.pop_back();
    } else {
      list.erase(list.begin() + (replica - list.data()));
    }
    if (list.size() == 1) {
      const uint32_t number = last.list_number();
      last = list.front();
      list = {};
      free_lists_.push_back(number);
    } else if (list.capacity() > 16 && list.size() * 4 < list.capacity()) {
      list.shrink_to_fit();
    }
  }

  template <typename Visit>
  void for_each(const IndexEntry& entry, Visit visit) const {
    for (const Packed& replica : entry.replicas) {
      if (!replica.used()) return;
      if (replica.is_list()) {
        for (const Packed& item : lists_[replica.list_number()]) visit(item);
        return;
      }
      visit(replica);
    }
  }

  uint64_t memory_bytes() const {
    uint64_t total = (uint64_t{chunks_.size()} << kChunkBits) * sizeof(IndexEntry);
    total += chunks_.capacity() * sizeof(Chunk) + free_lists_.capacity() * sizeof(uint32_t);
    total += lists_.capacity() * sizeof(std::vector<Packed>);
    for (const auto& list : lists_) total += list.capacity() * sizeof(Packed);
    return total;
  }

 private:
  static constexpr uint32_t kNone = 0xffffffff;
  struct Free {
    void operator()(IndexEntry* entries) const { std::free(entries); }
  };
  using Chunk = std::unique_ptr<IndexEntry[], Free>;

  static Chunk new_chunk(bool huge) {
    constexpr size_t kBytes = kChunkEntries * sizeof(IndexEntry);
    void* memory = std::aligned_alloc(kBytes, kBytes);
    if (memory == nullptr) throw std::bad_alloc();
    // Not for the first chunk: a small index should stay small. A refusal only costs speed.
    if (huge) static_cast<void>(madvise(memory, kBytes, MADV_HUGEPAGE));
    return Chunk(static_cast<IndexEntry*>(memory));
  }

  static std::vector<Packed>::iterator lower_bound(std::vector<Packed>& list, uint32_t holder) {
    return std::lower_bound(list.begin(), list.end(), holder,
                            [](const Packed& item, uint32_t wanted) { return item.holder() < wanted; });
  }
  static Packed* find_in(std::vector<Packed>& list, uint32_t holder) {
    const auto at = lower_bound(list, holder);
    return at != list.end() && at->holder() == holder ? &*at : nullptr;
  }
  uint32_t new_list() {
    if (!free_lists_.empty()) {
      const uint32_t number = free_lists_.back();
      free_lists_.pop_back();
      return number;
    }
    lists_.emplace_back();
    return static_cast<uint32_t>(lists_.size() - 1);
  }

  std::vector<Chunk> chunks_;
  uint32_t used_ = 0;
  uint32_t free_ = kNone;
  std::vector<std::vector<Packed>> lists_;
  std::vector<uint32_t> free_lists_;
};

}  // namespace mooncache::index

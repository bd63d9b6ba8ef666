// Which block goes first. Two decisions as plain functions (which queue a block belongs to, which queue
// loses its coldest block) over intrusive queues of entries; replace the functions and the policy is
// another one.
//
// "2q": a block starts in the probation queue. It moves to the protected queue when it is read again
// (later than `correlated_ms` after its commit: a decode that loads what its prefill just wrote is the
// same use), or at its commit when its key was evicted not long ago (a ghost). Probation loses blocks while
// it holds more than its share, so a flood of blocks that are never read again passes through
// probation and leaves the protected ones alone.
// Measured on a public conversation trace (12,031 requests, 512-token blocks, prefix hits / references):
//   blocks              1,000   10,000   30,000   50,000
//   lru                 .0445    .2116    .3257    .3546
//   2q, 25 % probation  .0573    .2050    .3061    .3442
//   2q, 50 % probation  .0558    .2242    .3251    .3526   <- with 4 ghosts per block
// "lru": all blocks in one queue, the least recently used one goes.
// "mooncache": the protected queue holds the blocks of chains that clients asked for; which of those goes
// first the advisor says (advisor.h). Probation holds the blocks of no known chain. Its least recently used
// one goes when it is older than the advisor's victim, so a store that is never asked for chains works as
// with "lru".
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <utility>

#include "store/slab.h"
#include "store/zeroed_array.h"

namespace mooncache::store {

inline constexpr size_t kQueues = 2;
enum class Queue : uint8_t { kProbation = 0, kProtected = 1 };

enum class Policy : uint8_t { kTwoQueues, kLru, kChains };

struct EvictionRules {
  Policy policy = Policy::kChains;
  uint32_t probation_percent = 50;
  uint64_t correlated_ms = 2000;
};

// `in_chain`: a chain of the block is known (kChains only).
inline Queue queue_on_commit(const EvictionRules& rules, bool evicted_recently, bool in_chain) {
  switch (rules.policy) {
    case Policy::kTwoQueues:
      return evicted_recently ? Queue::kProtected : Queue::kProbation;
    case Policy::kChains:
      return in_chain ? Queue::kProtected : Queue::kProbation;
    default:
      return Queue::kProtected;
  }
}

// `in_chain`: it was asked for as a part of a chain.
inline Queue queue_on_hit(const EvictionRules& rules, Queue current, uint64_t age_ms, bool in_chain) {
  switch (rules.policy) {
    case Policy::kTwoQueues:
      return age_ms >= rules.correlated_ms ? Queue::kProtected : current;
    case Policy::kChains:
      return in_chain ? Queue::kProtected : current;
    default:
      return Queue::kProtected;
  }
}

// Bytes are those that can be evicted now.
inline Queue victim_queue(const EvictionRules& rules, uint64_t probation_bytes, uint64_t protected_bytes) {
  if (protected_bytes == 0) return Queue::kProbation;
  if (probation_bytes == 0) return Queue::kProtected;
  if (rules.policy == Policy::kChains) return Queue::kProbation;
  const uint64_t share = (probation_bytes + protected_bytes) / 100 * rules.probation_percent;
  return probation_bytes > share ? Queue::kProbation : Queue::kProtected;
}

// How much of each queue goes next when `bytes` are evicted: what victim_queue() says, over and over. With
// chains it is up to the advisor and the age of blocks which queue that is.
struct QueueDepths {
  uint64_t probation = 0, protect = 0;
};
inline QueueDepths evicted_next(const EvictionRules& rules, uint64_t probation_bytes,
                                uint64_t protected_bytes, uint64_t bytes) {
  QueueDepths next{std::min(bytes, probation_bytes), std::min(bytes, protected_bytes)};
  if (rules.policy != Policy::kTwoQueues) return next;
  const uint64_t total = probation_bytes + protected_bytes;
  const uint64_t left = total - std::min(bytes, total);
  // Afterwards probation has its share of what is left, unless it had less before.
  const uint64_t share = left / 100 * rules.probation_percent;
  next.probation = std::min(next.probation, probation_bytes - std::min(probation_bytes, share));
  next.protect = std::min(next.protect, bytes - std::min(bytes, next.probation));
  return next;
}

// Doubly linked list of entry indexes, hottest at the head. Previous and Next say which of the entry's
// links the list uses, so that one entry can be in several lists.
struct EntryList {
  uint32_t head = kNone;
  uint32_t tail = kNone;
};

template <uint32_t Previous, uint32_t Next, typename Entries>
void push_front(EntryList& list, Entries& entries, uint32_t index) {
  auto& links = entries[index].links;
  links[Previous] = kNone;
  links[Next] = list.head;
  if (list.head != kNone) entries[list.head].links[Previous] = index;
  list.head = index;
  if (list.tail == kNone) list.tail = index;
}

template <uint32_t Previous, uint32_t Next, typename Entries>
void unlink(EntryList& list, Entries& entries, uint32_t index) {
  auto& links = entries[index].links;
  if (links[Previous] != kNone) entries[links[Previous]].links[Next] = links[Next];
  if (links[Next] != kNone) entries[links[Next]].links[Previous] = links[Previous];
  if (list.head == index) list.head = links[Next];
  if (list.tail == index) list.tail = links[Previous];
}

// Keys evicted not long ago, as 32-bit fingerprints. Each bucket is a first-in first-out row of eight, so
// the whole remembers about as many evictions as it has places; a false memory only misplaces a block.
//
// It grows in steps, as the index does. The row is a part of the fingerprint, so what an old row holds
// belongs to known rows of the larger table, and nothing remembered is lost.
class Ghosts {
 public:
  bool contains(uint32_t print) const {
    if (rows_.empty()) return false;
    for (const uint32_t seen : row(print)) {
      if (seen == print) return true;
    }
    return false;
  }
  void forget(uint32_t print) {
    if (rows_.empty()) return;
    for (uint32_t& seen : row(print)) {
      if (seen == print) seen = 0;
    }
  }
  void remember(uint32_t print, uint64_t wanted_places) {
    if (wanted_places == 0) return;
    if (!old_.empty()) {
      for (int step = 0; step < kMovedRows && !old_.empty(); ++step) move_row();
    } else if (rows_.empty() || rows_.size() * kRow * 2 <= wanted_places) {
      old_ = std::exchange(rows_, Rows(std::bit_floor(std::max<uint64_t>(wanted_places / kRow, 1))));
      swept_ = 0;
    }
    push(row(print), print);
  }
  bool growing() const { return !old_.empty(); }
  uint64_t memory_bytes() const { return rows_.bytes() + old_.bytes(); }

 private:
  static constexpr size_t kRow = 8;
  static constexpr int kMovedRows = 4;
  using Row = std::array<uint32_t, kRow>;
  using Rows = ZeroedArray<Row>;

  Row& row(uint32_t print) { return const_cast<Row&>(std::as_const(*this).row(print)); }
  const Row& row(uint32_t print) const {
    const size_t before = print & (old_.size() - 1);
    if (!old_.empty() && before >= swept_) return old_[before];
    return rows_[print & (rows_.size() - 1)];
  }
  static void push(Row& places, uint32_t print) {
    for (size_t at = kRow - 1; at > 0; --at) places[at] = places[at - 1];
    places[0] = print;
  }
  void move_row() {
    const Row places = old_[swept_++];
    for (size_t at = kRow; at-- > 0;) {
      if (places[at] != 0) push(rows_[places[at] & (rows_.size() - 1)], places[at]);
    }
    if (swept_ % kReleasedRows == 0) old_.release(swept_ - kReleasedRows, swept_);
    if (swept_ == old_.size()) old_ = Rows();
  }

  static constexpr size_t kReleasedRows = 8 << 10;
  Rows rows_;
  Rows old_;  // while it grows: rows from swept_ on have not moved yet
  size_t swept_ = 0;
};

}  // namespace mooncache::store

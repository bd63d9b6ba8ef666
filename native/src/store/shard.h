// One shard: its slots, its part of the index, its queues, pins and reservations, all under one mutex.
// A slot number holds its shard in the low bits, so a handle leads to its lock without any lookup.
//
// States of a slot:  free -> reserved -> visible -> free
//                                \-> free    \-> zombie (removed, still pinned) -> free
// A visible block is in its queue (and its tenant's list of that queue) exactly when it may be evicted: no
// live pin, no retention pin. So the tail of a queue is always a legal victim and eviction never searches.
//
// Bookkeeping per block: entry 120 B, allocator node 28 B, generation 8 B, index 4.6-9.2 B, ghosts 8-16 B
// (factor 4): 169-181 B, plus 28 B for each free extent between blocks.
// Measured with all parts and 64 shards when the entry had 112 B: 169 B at 100,000 blocks, 187 B at 30,000;
// fixed parts weigh more below (206 B at 10,000 blocks). Now 184 B at 131,072 blocks of 512 B.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hash/write_ranges.h"
#include "mooncache/store.h"
#include "store/eviction.h"
#include "store/slab.h"
#include "store/slot_index.h"

namespace mooncache::store {

enum class State : uint8_t { kFree = 0, kReserved, kVisible, kZombie };

// links[]: which list, which direction.
inline constexpr uint32_t kQueuePrevious = 0, kQueueNext = 1, kTenantPrevious = 2, kTenantNext = 3;

// What the SSD tier made of a block in memory, as far as memory knows.
enum class OnDisk : uint8_t { kUnknown = 0, kWritten = 1, kRefused = 2 };

struct BlockEntry {
  Key key;
  TenantId tenant = 0;
  uint64_t size = 0;
  uint64_t tick = 0;  // order of last use over all shards
  uint64_t committed_ms = 0;
  uint64_t retained_until_ms = 0;  // retention pin; 0 = none
  uint32_t offset = 0;             // quanta
  uint32_t next = kNone;           // free chain; while in use: the node of the arena's allocator
  uint32_t crc = 0;
  uint32_t pins = 0;
  uint32_t hits = 0;
  uint32_t links[4] = {kNone, kNone, kNone, kNone};
  uint16_t arena = 0;
  State state : 7 = State::kFree;
  uint8_t purged : 1 = 0;  // its bytes are overwritten before its memory is given back
  Queue queue : 2 = Queue::kProbation;
  uint8_t linked : 1 = 0;    // in its queue: can be evicted
  uint8_t in_heap : 1 = 0;   // the retention heap has an element for it
  uint8_t aside : 1 = 0;     // the advisor named it while it could not go
  uint8_t demoting : 1 = 0;  // one of its pins is a disk's, which copies it; that one leaves it in its queue
  OnDisk on_disk : 2 = OnDisk::kUnknown;
  uint32_t written_s = 0;   // Origin::written_s
  WriterNumber writer = 0;  // it holds the number
  uint8_t removed : 1 = 0;  // on demand, while it was held: what a disk copied of it meanwhile goes, too
};
static_assert(sizeof(BlockEntry) == 120);

// The block of this slot may go, and it lies there. A caller that took the slot's number from an arena has
// let go of the arena's lock since: the slot may hold another block by now, which is warm and lies elsewhere.
inline bool is_victim_at(const BlockEntry& entry, uint32_t arena, uint32_t offset) {
  return entry.state == State::kVisible && entry.linked != 0 && entry.arena == arena &&
         entry.offset == offset;
}

struct PinRecord {
  uint32_t next = kNone;  // free chain; while live: the entry
  uint32_t generation = 1;
  uint32_t live = 0;
};

struct ShardCounters {
  uint64_t visible = 0, zombies = 0, reservations = 0, retained = 0;
  uint64_t commits = 0, aborts = 0, races_lost = 0, incomplete = 0, mismatch = 0;
  uint64_t removed[kRemoveReasons] = {};
  uint64_t evicted_bytes = 0, evicted_by_queue[kQueues] = {}, evicted_quota = 0;
  uint64_t hits = 0, misses_unknown = 0, misses_evicted = 0, match_present = 0, match_absent = 0,
           by_ghost = 0;
};

// What a tenant has in the queues: a list of each, in the same order.
struct TenantQueues {
  EntryList lists[kQueues];
  uint64_t bytes[kQueues] = {};
  uint32_t blocks[kQueues] = {};
};

struct alignas(64) Shard {
  mutable std::mutex mutex;
  uint32_t number = 0;
  Slab<BlockEntry, 32> entries;
  SlotIndex index;
  EntryList queues[kQueues];
  std::unordered_map<TenantId, TenantQueues> tenant_queues;
  Ghosts ghosts;
  Slab<PinRecord, 32> pins;
  std::unordered_map<uint32_t, WriteRanges> writes;  // by entry; only reservations written in ranges
  // Ends of retention pins, earliest on top: (end, slot number, low generation). Elements go stale when
  // their block is freed or unpinned; they are dropped when they surface or when most are stale.
  struct RetentionEnd {
    uint64_t at_ms;
    uint32_t entry;
    uint32_t generation;
    bool operator>(const RetentionEnd& other) const { return at_ms > other.at_ms; }
  };
  std::vector<RetentionEnd> retention_ends;
  std::vector<uint32_t> leaving;  // entries that are zombies while a disk copies them: at most what it took
  ShardCounters count;
};

}  // namespace mooncache::store

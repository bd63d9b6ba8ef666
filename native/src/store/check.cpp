// Verifies every invariant with the world stopped: reservations held off by the gate, all shards locked.
#include <algorithm>
#include <map>
#include <unordered_map>

#include "store/core.h"

namespace mooncache {

using store::kNone;
using store::State;

struct Store::Core::Census {
  struct Piece {
    uint16_t arena;
    uint32_t offset;
    uint32_t node;
    uint32_t slot;
  };
  std::vector<Piece> pieces;
  std::unordered_map<TenantId, TenantUsage> tenants;
  uint64_t queue_bytes[store::kQueues] = {};
  uint64_t reserved_bytes = 0;
  uint64_t pins = 0;
};

namespace {
bool fail(std::string* why, const char* what) {
  *why = what;
  return false;
}
}  // namespace

bool Store::Core::check_shard(const Shard& shard, Census& census, std::string* why) const {
  uint64_t by_state[4] = {};
  uint64_t retained = 0, pins = 0;
  for (uint32_t index = 0; index < shard.entries.size(); ++index) {
    const BlockEntry& entry = shard.entries[index];
    const uint64_t current = generation(slot_of(shard, index));
    ++by_state[static_cast<size_t>(entry.state)];
    if (entry.state == State::kFree) {
      if (current % 2 == 0) return fail(why, "a free slot has a live generation");
      continue;
    }
    census.pieces.push_back({entry.arena, entry.offset, entry.next, slot_of(shard, index)});
    TenantUsage& use = census.tenants[entry.tenant];
    use.bytes += entry.size;
    pins += entry.pins - entry.demoting;
    retained += entry.retained_until_ms != 0 ? 1 : 0;
    if (entry.state == State::kReserved) census.reserved_bytes += extent_bytes(entry.size);
    if (entry.state == State::kZombie && entry.pins == 0)
      return fail(why, "a removed block without pins keeps its memory");
    if ((current % 2 == 0) != (entry.state == State::kVisible) && entry.state != State::kZombie) {
      return fail(why, "generation parity does not agree with visibility");
    }
    const bool found = find(shard, hash_of(entry.tenant, entry.key), entry.tenant, entry.key) == index;
    if (found != (entry.state == State::kVisible)) return fail(why, "index does not agree with visibility");
    const bool evictable =
        entry.state == State::kVisible && entry.pins == entry.demoting && entry.retained_until_ms == 0;
    // The end of a demotion puts it back where it was taken out meanwhile.
    if (evictable != (entry.linked != 0) && (entry.demoting == 0 || entry.linked != 0))
      return fail(why, "a block is in a queue that may not, or not in one that must");
    if (entry.retained_until_ms != 0 && entry.in_heap == 0)
      return fail(why, "a retention pin without an end");
    if (entry.aside != 0 && entry.linked != 0) return fail(why, "a block is aside that can go");
    if (entry.state == State::kVisible) ++use.blocks;
  }
  uint64_t live = 0;
  for (uint32_t pin = 0; pin < shard.pins.size(); ++pin) live += shard.pins[pin].live;
  census.pins += live;
  const store::ShardCounters& count = shard.count;
  if (live != pins || live != shard.pins.used()) return fail(why, "pin records do not agree with pin counts");
  if (by_state[1] != count.reservations || by_state[2] != count.visible || by_state[3] != count.zombies ||
      retained != count.retained) {
    return fail(why, "counts of states");
  }
  if (shard.index.count() != count.visible) return fail(why, "index size");
  if (shard.entries.used() != by_state[1] + by_state[2] + by_state[3]) return fail(why, "slots in use");
  if (shard.writes.size() > count.reservations) return fail(why, "write ranges without a reservation");
  if (shard.retention_ends.size() > 2 * count.retained + 128)
    return fail(why, "too many stale retention ends");
  return check_queues(shard, census, why);
}

bool Store::Core::check_queues(const Shard& shard, Census& census, std::string* why) const {
  uint64_t in_queues = 0;
  for (size_t queue = 0; queue < store::kQueues; ++queue) {
    uint64_t newer = kNever;
    uint32_t previous = kNone;
    for (uint32_t at = shard.queues[queue].head; at != kNone;
         at = shard.entries[at].links[store::kQueueNext]) {
      const BlockEntry& entry = shard.entries[at];
      if (entry.linked == 0 || static_cast<size_t>(entry.queue) != queue || entry.tick >= newer ||
          entry.links[store::kQueuePrevious] != previous) {
        return fail(why, "queue order or links");
      }
      newer = entry.tick;
      previous = at;
      census.queue_bytes[queue] += extent_bytes(entry.size);
      if (++in_queues > shard.entries.used()) return fail(why, "queue longer than the slots");
    }
    if (shard.queues[queue].tail != previous) return fail(why, "queue tail");
    if (cold[queue][shard.number].load() != newer) return fail(why, "published coldest tick");
  }
  uint64_t in_lists = 0;
  for (const auto& [tenant, own] : shard.tenant_queues) {
    for (size_t queue = 0; queue < store::kQueues; ++queue) {
      uint32_t previous = kNone, blocks = 0;
      uint64_t bytes = 0;
      for (uint32_t at = own.lists[queue].head; at != kNone;
           at = shard.entries[at].links[store::kTenantNext]) {
        const BlockEntry& entry = shard.entries[at];
        if (entry.tenant != tenant || entry.linked == 0 || static_cast<size_t>(entry.queue) != queue ||
            entry.links[store::kTenantPrevious] != previous)
          return fail(why, "tenant list links");
        previous = at;
        ++blocks;
        bytes += extent_bytes(entry.size);
        if (++in_lists > in_queues) return fail(why, "tenant lists longer than the queues");
      }
      if (own.lists[queue].tail != previous) return fail(why, "tenant list tail");
      if (own.blocks[queue] != blocks || own.bytes[queue] != bytes) return fail(why, "tenant list sums");
    }
    if (own.blocks[0] + own.blocks[1] == 0) return fail(why, "a tenant without blocks has lists");
  }
  return in_lists == in_queues || fail(why, "a block is in a queue but not in its tenant's list");
}

bool Store::Core::check_totals(Census& census, std::string* why) const {
  std::sort(census.pieces.begin(), census.pieces.end(), [](const auto& a, const auto& b) {
    return a.arena != b.arena ? a.arena < b.arena : a.offset < b.offset;
  });
  uint64_t used = 0;
  std::vector<uint32_t> per_arena(arenas.size());
  uint64_t end = 0;
  uint16_t arena_before = 0;
  for (const auto& piece : census.pieces) {
    const auto& extents = arenas[piece.arena]->extents;
    if (extents.offset_of(piece.node) != piece.offset) return fail(why, "an entry and its extent disagree");
    const uint32_t slot = piece.slot;
    const BlockEntry& entry = shards[slot & shard_mask].entries[slot >> shard_bits];
    if (extents.size_of(piece.node) != quanta_for(entry.size))
      return fail(why, "an extent has another size than its block");
    if (piece.arena == arena_before && piece.offset < end) return fail(why, "two extents overlap");
    arena_before = piece.arena;
    end = uint64_t{piece.offset} + extents.size_of(piece.node);
    used += extent_bytes(entry.size);
    ++per_arena[piece.arena];
  }
  uint64_t free_bytes = 0;
  for (size_t number = 0; number < arenas.size(); ++number) {
    const std::lock_guard lock(arenas[number]->mutex);
    if (!arenas[number]->extents.check(why)) return false;
    if (arenas[number]->extents.used_extents() != per_arena[number])
      return fail(why, "an extent without an entry");
    free_bytes += uint64_t{arenas[number]->extents.free_quanta()} * config.quantum_bytes;
  }
  if (used + free_bytes != config.capacity_bytes || used != used_bytes.load())
    return fail(why, "used + free is not the capacity");
  if (census.queue_bytes[0] != queue_bytes[0].load() || census.queue_bytes[1] != queue_bytes[1].load())
    return fail(why, "queue bytes");
  if (census.reserved_bytes != reserved_bytes.load() || census.pins != live_pins.load())
    return fail(why, "reserved bytes or pins");
  for (const TenantUsage& use : tenants.usage()) {
    const TenantUsage& counted = census.tenants[use.tenant];
    if (counted.bytes != use.bytes || counted.blocks != use.blocks) return fail(why, "tenant usage");
    census.tenants.erase(use.tenant);
  }
  return census.tenants.empty() || fail(why, "a tenant with blocks is not accounted");
}

bool Store::check(std::string* why) const {
  std::string ignored;
  if (why == nullptr) why = &ignored;
  const std::unique_lock gate(core_->reserve_gate);
  std::vector<std::unique_lock<std::mutex>> locks;
  for (uint32_t number = 0; number < core_->config.shards; ++number)
    locks.emplace_back(core_->shards[number].mutex);
  Core::Census census;
  for (uint32_t number = 0; number < core_->config.shards; ++number) {
    if (!core_->check_shard(core_->shards[number], census, why)) return false;
  }
  if (core_->advisor && !core_->advisor->check(why)) return false;
  return core_->check_totals(census, why);
}

}  // namespace mooncache

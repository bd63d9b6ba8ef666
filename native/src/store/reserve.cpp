// Reservations and the room they need: admission of the request, eviction of the coldest blocks, and, when
// enough is free but in pieces, eviction of the few blocks between the pieces.
#include <algorithm>
#include <vector>

#include "store/core.h"

namespace mooncache {

using store::kNone;
using store::State;

bool Store::Core::allocate(uint64_t size, Space* space) {
  const auto quanta = static_cast<uint32_t>(quanta_for(size));
  for (uint16_t number = 0; number < arenas.size(); ++number) {
    Arena& arena = *arenas[number];
    const std::lock_guard lock(arena.mutex);
    const auto got = arena.extents.allocate(quanta);
    if (got.node == kNone) continue;
    used_bytes.fetch_add(extent_bytes(size), std::memory_order_relaxed);
    *space = {number, got.node, got.offset};
    return true;
  }
  return false;
}

void Store::Core::give_back(const Space& space) {
  Arena& arena = *arenas[space.arena];
  const std::lock_guard lock(arena.mutex);
  used_bytes.fetch_sub(uint64_t{arena.extents.size_of(space.node)} * config.quantum_bytes,
                       std::memory_order_relaxed);
  arena.extents.free(space.node);
}

void Store::Core::evict_entry(Shard& shard, uint32_t index, Pressure& pressure) {
  const BlockEntry& entry = shard.entries[index];
  const uint64_t freed = extent_bytes(entry.size);
  const auto queue = static_cast<size_t>(entry.queue);
  const auto print = static_cast<uint32_t>(hash_of(entry.tenant, entry.key) >> 16) | 1u;
  shard.ghosts.remember(print, shard.count.visible * config.ghost_factor);
  ++shard.count.evicted_by_queue[queue];
  shard.count.evicted_bytes += freed;
  pressure.evicted_bytes += freed;
  tenants.count(entry.tenant, &TenantUsage::evicted_blocks, &TenantUsage::evicted_bytes, entry.size);
  --pressure.victims_left;
  hide(shard, index, RemoveReason::kEvicted);
}

bool Store::Core::evict_tail(Shard& shard, Queue queue, Pressure& pressure) {
  return evict_end(shard, shard.queues[static_cast<size_t>(queue)].tail, store::kQueuePrevious, pressure);
}

// The published ticks may be stale by the time that they are acted on.
std::pair<uint64_t, uint32_t> Store::Core::coldest(size_t queue) const {
  std::pair<uint64_t, uint32_t> found{kNever, kNone};
  for (uint32_t number = 0; number < config.shards; ++number) {
    const uint64_t seen = cold[queue][number].load(std::memory_order_relaxed);
    if (seen < found.first) found = {seen, number};
  }
  return found;
}

// The advisor's victim; false when it has none that can go, or a block of no known chain is older.
bool Store::Core::evict_advised(Pressure& pressure) {
  constexpr int kTriesMax = 64;
  for (int tries = 0; tries < kTriesMax; ++tries) {
    const auto id = advisor->victim(pressure.incoming, pressure.now_ms);
    if (!id) return false;
    Shard& shard = shard_of(*id);
    const Lock lock(shard.mutex);
    const uint32_t index = find_hash(shard, *id);
    if (index == kNone) {  // it left between a chain's look at the shards and its report
      advisor->discard(*id);
      continue;
    }
    BlockEntry& entry = shard.entries[index];
    if (entry.linked == 0) {
      advisor->set_aside(*id);
      entry.aside = 1;
      continue;
    }
    if (coldest(static_cast<size_t>(Queue::kProbation)).first < entry.tick) return false;
    evict_entry(shard, index, pressure);
    return true;
  }
  return false;
}

// The published ticks may be stale by the time the shard is locked; then its tail is still a cold block
// of that shard, or the scan is repeated.
bool Store::Core::evict_coldest(Pressure& pressure) {
  constexpr int kScansMax = 16;
  for (int scan = 0; scan < kScansMax; ++scan) {
    auto queue =
        static_cast<size_t>(store::victim_queue(rules, queue_bytes[0].load(std::memory_order_relaxed),
                                                queue_bytes[1].load(std::memory_order_relaxed)));
    uint32_t number = coldest(queue).second;
    if (number == kNone) number = coldest(queue = 1 - queue).second;
    if (number == kNone) return false;
    const Lock lock(shards[number].mutex);
    if (evict_tail(shards[number], static_cast<Queue>(queue), pressure)) return true;
  }
  return false;
}

// With reserved shares: whoever is furthest over its share, among those with a block that can go.
bool Store::Core::evict_by_share(Pressure& pressure) {
  constexpr size_t kTriesMax = 64;
  if (!tenants.any_share()) return false;
  TenantId loser = 0;
  for (std::vector<TenantId> without; without.size() < kTriesMax; without.push_back(loser)) {
    if (!tenants.furthest_over(without, &loser)) return false;
    if (evict_of_tenant(loser, pressure)) return true;
  }
  return false;
}

bool Store::Core::tenant_has_victim(TenantId tenant) const {
  for (uint32_t number = 0; number < config.shards; ++number) {
    const Lock lock(shards[number].mutex);
    if (shards[number].tenant_queues.contains(tenant)) return true;
  }
  return false;
}

// Enough is free, but in pieces: evict the blocks that separate the largest piece from its neighbours,
// however warm they are. Bounded by the request's own size.
bool Store::Core::clear_neighbourhood(uint64_t size, Pressure& pressure, Space* space) {
  constexpr uint32_t kRanks = 4;
  const auto quanta = static_cast<uint32_t>(quanta_for(size));
  for (uint32_t number = 0; number < arenas.size(); ++number) {
    Arena& arena = *arenas[number];
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      std::vector<store::ExtentAllocator::Owned> owners;
      {
        const std::lock_guard lock(arena.mutex);
        owners = arena.extents.owners_around(quanta, rank);
      }
      bool cleared = !owners.empty();
      for (const auto& [slot, offset] : owners) {
        if (pressure.victims_left == 0) return false;
        Shard& shard = shards[slot & shard_mask];
        const Lock lock(shard.mutex);
        const uint32_t index = slot >> shard_bits;
        cleared = store::is_victim_at(shard.entries[index], number, offset) &&
                  (!tenants.any_share() || tenants.is_over(shard.entries[index].tenant)) &&
                  (!pressure.comes_up || loss_of(shard.entries[index]) != store::Loss::kUnderWay);
        if (!cleared) break;
        evict_entry(shard, index, pressure);
      }
      if (cleared && allocate(size, space)) return true;
    }
  }
  return false;
}

void Store::Core::expire_all_retention(uint64_t now_ms) {
  for (uint32_t number = 0; number < config.shards; ++number) {
    if (retention_next[number].load(std::memory_order_relaxed) > now_ms) continue;
    const Lock lock(shards[number].mutex);
    expire_retention(shards[number], now_ms);
  }
}

bool Store::Core::make_room(uint64_t size, uint64_t now_ms, Pressure& pressure, Space* space) {
  if (allocate(size, space)) return true;
  expire_all_retention(now_ms);
  const uint64_t needed = extent_bytes(size);
  uint64_t clear_at = 2 * needed;
  while (pressure.victims_left > 0) {
    // Nothing is evicted for a request that cannot be served.
    const uint64_t evictable =
        queue_bytes[0].load(std::memory_order_relaxed) + queue_bytes[1].load(std::memory_order_relaxed);
    if (used_bytes.load(std::memory_order_relaxed) + needed > config.capacity_bytes + evictable) return false;
    const bool evicted =
        evict_by_share(pressure) ||
        (pressure.comes_up ? evict_for_read(pressure)
                           : (advisor && evict_advised(pressure)) || evict_coldest(pressure));
    if (!evicted) return false;
    if (allocate(size, space)) return true;
    if (pressure.evicted_bytes >= clear_at) {
      if (clear_neighbourhood(size, pressure, space)) return true;
      clear_at = pressure.evicted_bytes + 2 * needed;
    }
  }
  return false;
}

Code Store::Core::charge(TenantId tenant, uint64_t size, uint64_t now_ms, Pressure& pressure) {
  bool expired = false;
  for (;;) {
    const auto charged = tenants.charge(tenant, size);
    if (charged == store::Tenants::Charge::kOk) return Code::kOk;
    if (charged == store::Tenants::Charge::kNeverFits) break;
    if (!expired) expire_all_retention(now_ms);
    expired = true;
    if (pressure.victims_left == 0) {
      if (tenant_has_victim(tenant)) return Code::kNoSpace;
      break;
    }
    if (!evict_of_tenant(tenant, pressure)) break;
  }
  quota_refusals.fetch_add(1, std::memory_order_relaxed);
  tenants.count(tenant, &TenantUsage::refused, nullptr, 0);
  return Code::kQuotaExceeded;
}

// A block of this shard, of a tenant over its share when there are shares.
bool Store::Core::evict_in_shard(Shard& shard, Pressure& pressure) {
  if (tenants.any_share()) {
    for (const auto& [tenant, own] : shard.tenant_queues) {
      if (!tenants.is_over(tenant)) continue;
      const auto queue = static_cast<size_t>(store::victim_queue(rules, own.bytes[0], own.bytes[1]));
      const uint32_t tails[] = {own.lists[queue].tail, own.lists[1 - queue].tail};
      // The tenant's lists may end with what is evicted: nothing of them is used afterwards.
      if (evict_end(shard, tails[0], store::kTenantPrevious, pressure) ||
          evict_end(shard, tails[1], store::kTenantPrevious, pressure))
        return true;
    }
  }
  return evict_tail(shard, Queue::kProbation, pressure) || evict_tail(shard, Queue::kProtected, pressure);
}

// All slots of the key's shard may be in use although bytes are free: then the shard's own coldest goes.
Result<Reservation> Store::Core::take_slot(TenantId tenant, const Key& key, uint64_t size, const Space& space,
                                           Pressure& pressure, WriterNumber writer) {
  const uint64_t hash = hash_of(tenant, key);
  Shard& shard = shard_of(hash);
  const Lock lock(shard.mutex);
  if (find(shard, hash, tenant, key) != kNone) return {Code::kAlreadyExists, {}};
  uint32_t index = shard.entries.allocate();
  if (index == kNone && pressure.victims_left > 0 && evict_in_shard(shard, pressure))
    index = shard.entries.allocate();
  if (index == kNone) return {Code::kNoSpace, "no free slot: blocks are smaller than expected_block_bytes"};
  if (catalogue.is_open()) catalogue.prefetch(slot_of(shard, index));
  BlockEntry& entry = shard.entries[index];
  entry = BlockEntry{};
  entry.key = key;
  entry.tenant = tenant;
  entry.size = size;
  entry.offset = space.offset;
  entry.next = space.node;
  entry.arena = space.arena;
  entry.state = State::kReserved;
  own(entry, writer);
  const uint32_t slot = slot_of(shard, index);
  {
    const std::lock_guard leaf(arenas[space.arena]->mutex);
    arenas[space.arena]->extents.set_owner(space.node, slot);
  }
  const uint64_t old = generation(slot);
  set_generation(slot, old % 2 == 0 ? old + 1 : old + 2);
  if (catalogue.is_open())
    catalogue.reserve(slot, {key, tenant, size, 0, 0, entry.offset, 0, entry.arena, 0}, writer);
  reserved_bytes.fetch_add(extent_bytes(size), std::memory_order_relaxed);
  ++shard.count.reservations;
  const Extent extent = extent_of(shard, index);
  const uint64_t id = (extent.generation << 32) | slot;
  return Reservation{static_cast<ReservationId>(id), extent};
}

Result<Reservation> Store::Core::reserve(TenantId tenant, const Key& key, uint64_t size, uint64_t now_ms,
                                         bool* more_to_evict, bool from_disk, WriterNumber writer) {
  if (size == 0) return {Code::kInvalidArgument, "a block has at least one byte"};
  if (size > config.max_block_bytes || quanta_for(size) > arenas[0]->extents.capacity())
    return {Code::kTooLarge, {}};
  if (from_disk ? arena_gone.load(std::memory_order_relaxed) : takes_no_blocks()) {
    draining_refusals.fetch_add(1, std::memory_order_relaxed);
    return {Code::kDraining, {}};
  }
  const uint64_t hash = hash_of(tenant, key);
  {
    const Shard& shard = shard_of(hash);
    const Lock lock(shard.mutex);
    if (find(shard, hash, tenant, key) != kNone) return {Code::kAlreadyExists, {}};
    if (!from_disk && is_on_disk(tenant, key)) return {Code::kAlreadyExists, {}};
  }
  if (!from_disk && !tenants.admits(tenant, now_ms))
    return {Code::kBackPressure, "the tenant's limit of bytes per second"};
  const std::shared_lock gate(reserve_gate);
  Pressure pressure{config.max_victims, 0, hash, now_ms, from_disk};
  if (const Code code = charge(tenant, size, now_ms, pressure); code != Code::kOk) {
    if (code == Code::kNoSpace) {
      no_space.fetch_add(1, std::memory_order_relaxed);
      has_waiters.store(true, std::memory_order_seq_cst);
      *more_to_evict = true;
    }
    return {code, {}};
  }
  Space space;
  bool found = make_room(size, now_ms, pressure, &space);
  if (!found) {
    // Announce the wait before the last look: a release in between either frees for it or sees the flag.
    has_waiters.store(true, std::memory_order_seq_cst);
    found = make_room(size, now_ms, pressure, &space);
  }
  Result<Reservation> result =
      found ? take_slot(tenant, key, size, space, pressure, writer) : Result<Reservation>{Code::kNoSpace, {}};
  if (result && !from_disk) tenants.moves(tenant, size);
  if (result) return result;
  if (found) give_back(space);
  tenants.give_back(tenant, size);
  if (result.code() == Code::kNoSpace) {
    no_space.fetch_add(1, std::memory_order_relaxed);
    // There was more to evict than one call may: what went is free, and the rest goes at once.
    *more_to_evict = pressure.victims_left == 0;
  }
  return result;
}

}  // namespace mooncache

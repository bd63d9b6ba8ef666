// Walks over all slots in pages, and the statistics. A cursor is (shard, entry): shards are walked one
// after the other, each page under one shard's lock. A block stays in its slot for life, so a walk meets
// every block that is there from its start to its end.
#include <algorithm>

#include "store/core.h"

namespace mooncache {

using store::State;

namespace {

constexpr uint32_t kPageMax = 4096;
constexpr uint32_t kSlotsPerLock = 4096;  // looked at under one lock
constexpr uint32_t kSlotsPerPage = 1u << 16;

// Calls visit(entry) for visible entries from `cursor` on until it returned true `limit` times or enough
// slots were seen. Returns the next cursor, 0 at the end.
template <typename Shards, typename Visit>
uint64_t walk(Shards& shards, uint32_t shard_count, uint64_t cursor, uint32_t limit, const Visit& visit) {
  uint64_t number = cursor >> 32;
  auto at = static_cast<uint32_t>(cursor);
  uint32_t taken = 0;
  uint32_t seen = 0;
  while (number < shard_count) {
    auto& shard = shards[number];
    const std::unique_lock lock(shard.mutex);
    const uint32_t end = std::min<uint64_t>(shard.entries.size(), uint64_t{at} + kSlotsPerLock) & 0xffffffffu;
    for (; at < end; ++at) {
      if (taken >= limit || seen >= kSlotsPerPage) return (number << 32) | at;
      ++seen;
      if (shard.entries[at].state == State::kVisible && visit(shard.entries[at])) ++taken;
    }
    if (at >= shard.entries.size()) {
      ++number;
      at = 0;
    }
  }
  return 0;
}

std::vector<std::pair<std::string, uint64_t>> disk_stats(const store::disk::SsdTier& tier) {
  std::vector<std::pair<std::string, uint64_t>> named;
  const store::disk::DeviceStats disk = tier.stats(), log = tier.shared_stats();
  for (const auto& [name, field] : store::disk::kDeviceCounters) {
    if (tier.has_disks()) named.emplace_back("ssd_" + std::string(name), disk.*field);
    if (tier.has_shared()) named.emplace_back("shared_" + std::string(name), log.*field);
  }
  const store::disk::SharedStats others = tier.others_stats();
  for (const auto& [name, field] : store::disk::kSharedCounters) {
    if (tier.has_shared()) named.emplace_back("shared_" + std::string(name), others.*field);
  }
  return named;
}

}  // namespace

// Blocks on disks alone come behind those in memory: their cursors go on where the shards' end.
uint64_t Store::Core::walk_disks(uint64_t cursor, uint32_t limit, const Visit& visit, bool hidden) {
  const uint64_t base = uint64_t{config.shards} << 32;
  const auto visit_here = [&](TenantId tenant, const Key& key, uint64_t size, uint32_t hits) {
    const uint64_t hash = hash_of(tenant, key);
    const Shard& shard = shard_of(hash);
    const Lock lock(shard.mutex);
    // It may have been removed since the disk named it, and the log has said so.
    if (find(shard, hash, tenant, key) != store::kNone) return;
    const auto lies = tier_below(tenant, key);
    if (lies || hidden) visit(lies.value_or(Tier::kSsd), tenant, key, size, hits);
  };
  const uint64_t next = tier->walk(cursor - base, limit, visit_here, hidden);
  return next == 0 ? 0 : base + next;
}

ListPage Store::list(TenantId tenant, uint64_t cursor, uint32_t limit) const {
  ListPage page;
  limit = std::clamp(limit, 1u, kPageMax);
  const uint64_t disks = uint64_t{core_->config.shards} << 32;
  if (core_->tier && cursor >= disks) {
    page.next_cursor = core_->walk_disks(
        cursor, limit, [&](Tier lies, TenantId owner, const Key& key, uint64_t size, uint32_t hits) {
          if (owner == tenant) page.items.push_back({key, size, lies, hits});
        });
    return page;
  }
  page.next_cursor =
      walk(core_->shards, core_->config.shards, cursor, limit, [&](const store::BlockEntry& entry) {
        if (entry.tenant != tenant) return false;
        page.items.push_back({entry.key, entry.size, core_->config.tier, entry.hits});
        return true;
      });
  if (core_->tier && page.next_cursor == 0) page.next_cursor = disks;
  return page;
}

SnapshotPage Store::snapshot(uint64_t cursor, uint32_t max) const {
  SnapshotPage page;
  max = std::clamp(max, 1u, kSlotsPerPage);
  const auto add = [&](Tier tier, TenantId tenant, const Key& key, uint64_t size) {
    const size_t at = page.records.size();
    page.records.resize(at + kBlockRecordBytes);
    store::pack_record({RecordKind::kAdd, tier, RemoveReason::kNone, tenant, size, key},
                       page.records.data() + at);
  };
  const uint64_t disks = uint64_t{core_->config.shards} << 32;
  if (core_->tier && cursor >= disks) {
    page.next_cursor = core_->walk_disks(
        cursor, max, [&](Tier lies, TenantId tenant, const Key& key, uint64_t size, uint32_t) {
          add(lies, tenant, key, size);
        });
    return page;
  }
  page.next_cursor =
      walk(core_->shards, core_->config.shards, cursor, max, [&](const store::BlockEntry& entry) {
        add(core_->config.tier, entry.tenant, entry.key, entry.size);
        return true;
      });
  if (core_->tier && page.next_cursor == 0) page.next_cursor = disks;
  return page;
}

namespace {

// `Kept` is Core::KeptState, which only members can name.
template <typename Kept>
std::vector<std::pair<std::string, uint64_t>> kept_stats(const Kept& kept) {
  return {{"kept_blocks_adopted", kept.found.blocks},
          {"kept_bytes_adopted", kept.found.bytes},
          {"kept_records_refused", kept.found.refused},
          {"kept_blocks_checked", kept.checked_blocks.load(std::memory_order_relaxed)},
          {"kept_blocks_damaged", kept.damaged_blocks.load(std::memory_order_relaxed)},
          {"kept_blocks_unchecked", kept.left.load(std::memory_order_relaxed)},
          {"kept_extents_held", kept.held_blocks.load(std::memory_order_relaxed)}};
}

}  // namespace

StoreStats Store::stats() const {
  StoreStats stats;
  stats.capacity_bytes = core_->config.capacity_bytes;
  const uint64_t quantum = core_->config.quantum_bytes;
  for (const auto& arena : core_->arenas) {
    const std::lock_guard lock(arena->mutex);
    stats.free_bytes += arena->extents.free_quanta() * quantum;
    stats.free_extents += arena->extents.free_extents();
    stats.largest_free_bytes =
        std::max<uint64_t>(stats.largest_free_bytes, arena->extents.largest_free() * quantum);
    stats.bookkeeping_bytes += arena->extents.memory_bytes();
  }
  for (uint32_t number = 0; number < core_->config.shards; ++number) {
    const store::Shard& shard = core_->shards[number];
    const std::lock_guard lock(shard.mutex);
    const store::ShardCounters& count = shard.count;
    stats.blocks += count.visible;
    stats.zombie_blocks += count.zombies;
    stats.retained_blocks += count.retained;
    stats.reservations += count.reservations;
    stats.commits += count.commits;
    stats.aborts += count.aborts;
    stats.commit_races_lost += count.races_lost;
    stats.commit_incomplete += count.incomplete;
    stats.commit_mismatch += count.mismatch;
    for (size_t reason = 0; reason < kRemoveReasons; ++reason) stats.removed[reason] += count.removed[reason];
    stats.evicted_bytes += count.evicted_bytes;
    stats.evicted_probation += count.evicted_by_queue[0];
    stats.evicted_protected += count.evicted_by_queue[1];
    stats.evicted_quota += count.evicted_quota;
    stats.hits += count.hits;
    stats.misses_unknown += count.misses_unknown;
    stats.misses_evicted += count.misses_evicted;
    stats.match_present += count.match_present;
    stats.match_absent += count.match_absent;
    stats.admitted_by_ghost += count.by_ghost;
    stats.bookkeeping_bytes += shard.entries.memory_bytes() + shard.index.memory_bytes() +
                               shard.ghosts.memory_bytes() + shard.pins.memory_bytes() + sizeof shard +
                               shard.retention_ends.capacity() * sizeof(store::Shard::RetentionEnd);
  }
  stats.bookkeeping_bytes += core_->generations.resident_bytes() + core_->unlimited.memory_bytes() +
                             core_->catalogue.file().resident_bytes();
  stats.sampled = core_->unlimited.counts();
  if (core_->catalogue.is_open()) stats.kept = kept_stats(core_->kept);
  if (core_->advisor) stats.bookkeeping_bytes += core_->advisor->memory_bytes();
  stats.used_bytes = stats.capacity_bytes - stats.free_bytes;
  const uint64_t probation = core_->queue_bytes[0].load(std::memory_order_relaxed);
  stats.probation_bytes = probation;
  stats.evictable_bytes = probation + core_->queue_bytes[1].load(std::memory_order_relaxed);
  stats.reserved_bytes = core_->reserved_bytes.load(std::memory_order_relaxed);
  const uint64_t unpinned = stats.evictable_bytes + stats.reserved_bytes;
  stats.pinned_bytes = stats.used_bytes > unpinned ? stats.used_bytes - unpinned : 0;
  stats.fragmentation_ppm =
      stats.free_bytes == 0
          ? 0
          : 1'000'000 - static_cast<uint64_t>(1e6 * static_cast<double>(stats.largest_free_bytes) /
                                              static_cast<double>(stats.free_bytes));
  stats.pins = core_->live_pins.load(std::memory_order_relaxed);
  stats.no_space = core_->no_space.load(std::memory_order_relaxed);
  stats.quota_refusals = core_->quota_refusals.load(std::memory_order_relaxed);
  stats.draining_refusals = core_->draining_refusals.load(std::memory_order_relaxed);
  stats.event_seq = core_->events->last_seq();
  stats.event_overflows = core_->events->overflows();
  stats.events_pending = core_->events->pending();
  stats.event_log_bytes = core_->events->memory_bytes();
  stats.draining = draining() ? 1 : 0;
  stats.arena_gone = arena_gone() ? 1 : 0;
  if (core_->tier) stats.disk = disk_stats(*core_->tier);
  return stats;
}

std::vector<std::pair<std::string_view, uint64_t>> StoreStats::named() const {
  return {{"capacity_bytes", capacity_bytes},
          {"used_bytes", used_bytes},
          {"free_bytes", free_bytes},
          {"evictable_bytes", evictable_bytes},
          {"pinned_bytes", pinned_bytes},
          {"reserved_bytes", reserved_bytes},
          {"probation_bytes", probation_bytes},
          {"largest_free_bytes", largest_free_bytes},
          {"free_extents", free_extents},
          {"fragmentation_ppm", fragmentation_ppm},
          {"blocks", blocks},
          {"zombie_blocks", zombie_blocks},
          {"pins", pins},
          {"retained_blocks", retained_blocks},
          {"reservations", reservations},
          {"commits", commits},
          {"aborts", aborts},
          {"commit_races_lost", commit_races_lost},
          {"commit_incomplete", commit_incomplete},
          {"commit_mismatch", commit_mismatch},
          {"removed_other", removed[0]},
          {"removed_evicted", removed[1]},
          {"removed_requested", removed[2]},
          {"removed_corrupt", removed[3]},
          {"removed_drained", removed[4]},
          {"removed_replaced", removed[5]},
          {"evicted_bytes", evicted_bytes},
          {"evicted_probation", evicted_probation},
          {"evicted_protected", evicted_protected},
          {"evicted_quota", evicted_quota},
          {"hits", hits},
          {"misses_unknown", misses_unknown},
          {"misses_evicted", misses_evicted},
          {"match_present", match_present},
          {"match_absent", match_absent},
          {"sampled_asked", sampled.asked},
          {"sampled_found", sampled.found},
          {"sampled_unlimited", sampled.unlimited},
          {"admitted_by_ghost", admitted_by_ghost},
          {"no_space", no_space},
          {"quota_refusals", quota_refusals},
          {"draining_refusals", draining_refusals},
          {"event_seq", event_seq},
          {"event_overflows", event_overflows},
          {"events_pending", events_pending},
          {"bookkeeping_bytes", bookkeeping_bytes},
          {"event_log_bytes", event_log_bytes},
          {"draining", draining},
          {"arena_gone", arena_gone}};
}

}  // namespace mooncache

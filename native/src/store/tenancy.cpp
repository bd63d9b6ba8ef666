// What tenants have, may have and lose: figures, limits, the end of old blocks, and the purge of one tenant.
#include <algorithm>
#include <array>

#include "store/core.h"

namespace mooncache {

using store::kNone;
using store::State;

namespace {

constexpr uint32_t kPurgedPerLock = 64;
constexpr uint32_t kLooksPerLock = 4096;
constexpr uint32_t kLoserLooks = 64;  // blocks of each shard that may go down ahead for who loses first

}  // namespace

// Memory that the processor does not address takes zeros as it takes other bytes. What a device refuses now
// it has lost anyway.
void Store::Core::overwrite(const BlockEntry& entry) {
  static constexpr std::array<std::byte, 64 << 10> kZeros{};
  const Place place = place_of(entry);
  for (uint64_t at = 0; at < entry.size; at += kZeros.size()) {
    const uint64_t length = std::min<uint64_t>(kZeros.size(), entry.size - at);
    if (!place.memory->copy_in(place.offset + at, {kZeros.data(), length})) return;
  }
}

std::optional<uint32_t> Store::Core::end_below(const BlockEntry& entry, uint64_t now_ms,
                                               uint64_t wall_ms) const {
  const uint64_t ttl_ms = tenants.any_ttl() ? tenants.limits(entry.tenant).ttl_ms : 0;
  if (ttl_ms == 0) return 0;
  return store::disk::end_of(store::disk::age_ms(entry.committed_ms, now_ms), ttl_ms, wall_ms);
}

// With shares the next victims are those of whoever is furthest over its own: what evict_of_tenant() would
// choose, over and over.
void Store::Core::take_cold_of_loser(ColdLimits& limits, std::vector<store::disk::ColdBlock>& out) {
  TenantId loser = 0;
  if (!tenants.furthest_over({}, &loser)) return;
  const bool is_advised = advisor && take_cold_advised(loser, limits, out);
  const uint32_t first = rotation.load(std::memory_order_relaxed);
  for (uint32_t step = 0; step < config.shards && limits.bytes_left > 0; ++step) {
    Shard& shard = shards[(first + step) & shard_mask];
    const Lock lock(shard.mutex);
    const auto own = shard.tenant_queues.find(loser);
    if (own == shard.tenant_queues.end()) continue;
    const auto [probation, protect] = store::evicted_next(rules, own->second.bytes[0], own->second.bytes[1],
                                                          limits.deep_bytes / config.shards);
    const uint64_t deep_bytes[] = {probation, is_advised ? 0 : protect};
    for (size_t queue = 0; queue < store::kQueues; ++queue) {
      uint64_t seen_bytes = 0;
      uint32_t at = own->second.lists[queue].tail;
      for (uint32_t looks = 0; at != kNone && looks < kLoserLooks && seen_bytes < deep_bytes[queue];
           ++looks) {
        const uint32_t index = std::exchange(at, shard.entries[at].links[store::kTenantPrevious]);
        seen_bytes += extent_bytes(shard.entries[index].size);
        if (!take_cold_block(shard, index, -1, limits, out)) return;
      }
    }
  }
}

void Store::Core::expire_blocks(uint64_t now_ms, uint32_t max_slots) {
  if (!tenants.any_ttl()) return;
  auto number = static_cast<uint32_t>(expiry_cursor >> 32);
  auto at = static_cast<uint32_t>(expiry_cursor);
  for (uint32_t seen = 0, shards_seen = 0; seen < max_slots && shards_seen <= config.shards;) {
    if (number >= config.shards) number = 0;
    Shard& shard = shards[number];
    const Lock lock(shard.mutex);
    const uint32_t end = std::min(shard.entries.size(), at + kLooksPerLock);
    for (; at < end; ++at, ++seen) {
      const BlockEntry& entry = shard.entries[at];
      if (entry.state != State::kVisible) continue;
      const uint64_t ttl_ms = tenants.limits(entry.tenant).ttl_ms;
      const int64_t lived_ms = store::disk::age_ms(entry.committed_ms, now_ms);
      if (ttl_ms == 0 || lived_ms < 0 || static_cast<uint64_t>(lived_ms) < ttl_ms) continue;
      tenants.count(entry.tenant, &TenantUsage::expired_blocks, nullptr, 0);
      // Its record may say a later end, or none: the TTL was another one when it was written.
      if (tier) (void)tier->remove(entry.tenant, entry.key, {});
      hide(shard, at, RemoveReason::kRemoved);
    }
    if (at < shard.entries.size()) continue;
    at = 0;
    ++number;
    ++shards_seen;
  }
  expiry_cursor = uint64_t{number} << 32 | at;
  notify_space();
}

void Store::tend_tenants(uint64_t now_ms, uint32_t max_slots) {
  const std::lock_guard lock(core_->tend_mutex);
  core_->tenants.pass_time(now_ms, core_->tier ? core_->tier->uses() : std::vector<DiskUse>{});
  core_->expire_blocks(now_ms, max_slots);
}

std::vector<TenantUsage> Store::tenants() const {
  return core_->tenants.usage();
}

TenantUsage Store::other_tenants() const {
  return core_->tenants.rest();
}

void Store::set_limits(TenantId tenant, const TenantLimits& limits) {
  core_->keyring->require(tenant, limits.encrypted);
  core_->tenants.set_limits(tenant, limits);
}

Status Store::set_keys(TenantId tenant, const std::vector<DiskKey>& keys) {
  return core_->keyring->set(tenant, keys);
}

// Records on disks; what a disk does not take is invisible, but not overwritten.
void Store::Core::purge_records(TenantId tenant, std::span<const Key> keys, Purged& done) {
  if (!tier || keys.empty()) return;
  uint64_t blocks = 0;
  for (const Key& key : keys) {
    const auto bytes = tier->purge(tenant, key);
    if (!bytes) {
      ++(bytes.code() == Code::kBackPressure ? done.held_blocks : done.failed_blocks);
    } else if (*bytes > 0) {
      ++blocks;
      done.disk_bytes += *bytes;
    }
  }
  if (blocks == 0) return;
  (tier->sync_purged() ? done.disk_blocks : done.failed_blocks) += blocks;
}

// Memory first, whose blocks go with their records on disks, then what is on disks alone.
Purged Store::purge(TenantId tenant, uint64_t cursor) {
  Purged done;
  std::vector<Key> keys;
  const uint64_t disks = uint64_t{core_->config.shards} << 32;
  if (cursor >= disks) {
    if (cursor == disks && core_->tier) core_->tier->forget_of_others(tenant);
    const auto visit = [&](Tier lies, TenantId owner, const Key& key, uint64_t size, uint32_t) {
      if (owner != tenant) return;
      core_->events->append({RecordKind::kRemove, lies, RemoveReason::kRemoved, tenant, size, key});
      keys.push_back(key);
    };
    done.next_cursor = core_->tier ? core_->walk_disks(cursor, kPurgedPerLock, visit, true) : 0;
    core_->purge_records(tenant, keys, done);
    return done;
  }
  const auto number = static_cast<uint32_t>(cursor >> 32);
  auto at = static_cast<uint32_t>(cursor);
  {
    Core::Shard& shard = core_->shards[number];
    const Core::Lock lock(shard.mutex);
    const uint32_t end = std::min(shard.entries.size(), at + kLooksPerLock);
    for (; at < end && keys.size() < kPurgedPerLock; ++at) {
      store::BlockEntry& entry = shard.entries[at];
      if (entry.state == State::kFree || entry.tenant != tenant) continue;
      entry.purged = 1;
      const bool held = entry.state != State::kVisible || entry.pins > 0;
      ++(held ? done.held_blocks : done.blocks);
      (held ? done.held_bytes : done.bytes) += entry.size;
      if (entry.state != State::kVisible) {
        core_->end_record(core_->slot_of(shard, at), entry);
        if (entry.demoting == 0) continue;
        entry.removed = 1;
        keys.push_back(entry.key);  // a disk may have it by now
        continue;
      }
      keys.push_back(entry.key);
      core_->unlimited.removed(core_->hash_of(tenant, entry.key));
      core_->hide(shard, at, RemoveReason::kRemoved);
    }
    const bool through = at >= shard.entries.size();
    done.next_cursor = through ? uint64_t{number + 1} << 32 : uint64_t{number} << 32 | at;
  }
  if (done.next_cursor == disks && !core_->tier) done.next_cursor = 0;
  core_->purge_records(tenant, keys, done);
  core_->notify_space();
  return done;
}

}  // namespace mooncache

// Between memory and the disks below it: what is about to be evicted goes down while there is time, what is
// asked for comes up. A block that is written below is evicted for nothing; one that is not yet is dropped:
// no reserve() waits for a disk.
#include <string.h>

#include <algorithm>
#include <chrono>

#include "mooncache/crc32c.h"
#include "store/core.h"

namespace mooncache {

using store::kNone;
using store::OnDisk;
using store::State;
using store::disk::ColdBlock;
using store::disk::Demotion;

namespace {

// Blocks go down from the moment when less than this part of the memory is free.
constexpr uint64_t kAheadPart = 8;
constexpr uint32_t kMinLooks = 4, kMaxLooks = 256;  // entries of a queue that are looked at under one lock
constexpr uint32_t kMaxAdvised = 4096;              // blocks that the advisor names at a time
// What comes up is written where a cold block lay, which is in no cache: fetching its lines first costs the
// disk's thread half of the copy again, more than it costs another processor to read them from memory.
constexpr uint64_t kUpTogetherBytes = 1 << 20;

uint64_t steady_ms() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

}  // namespace

class Store::Core::MemoryAbove final : public store::disk::Memory {
 public:
  // `tier`: of what lies below it.
  MemoryAbove(Store& store, Core& core, Tier tier) : store_(store), core_(core), tier_(tier) {}

  void take_cold(uint32_t device, const store::disk::ColdWish& wish, std::vector<ColdBlock>& out) override {
    core_.take_cold(device, wish, out);
  }
  Status copy_out(const ColdBlock& block, uint64_t offset, Slice to) override {
    Place place;
    {
      const Shard& shard = core_.shards[block.slot & core_.shard_mask];
      const Lock lock(shard.mutex);
      const store::BlockEntry& entry = shard.entries[block.slot >> core_.shard_bits];
      if (entry.removed != 0) return {Code::kNotFound, {}};  // and the disk did not know of it
      place = core_.place_of(entry);
    }
    return place.memory->copy_out(place.offset + offset, to);
  }
  void end_demotion(const ColdBlock& block, Demotion end) override { core_.end_demotion(block.slot, end); }

  Result<Reservation> reserve(TenantId tenant, const Key& key, uint64_t size) override {
    bool more_to_evict = false;
    return core_.reserve(tenant, key, size, steady_ms(), &more_to_evict, true);
  }
  Status write(ReservationId id, uint64_t offset, ConstSlice from) override {
    const Slice to = store_.writable(id);
    uint32_t crc = 0;
    if (to.data != nullptr) {
      crc = copy_crc32c(to.data + offset, from.data, from.size, 0, kUpTogetherBytes);
    } else {
      if (Status written = store_.write(id, offset, from); !written) return written;
      crc = crc32c({from.data, from.size});
    }
    return store_.note_written(id, offset, from.size, crc);
  }
  // Under the lock under which it would be removed.
  Code commit(ReservationId id, TenantId tenant, const Key& key, uint32_t crc, uint32_t end,
              const Origin& origin) override {
    const Status status = core_.with_reserved(id, [&](Shard& shard, uint32_t index) {
      const auto written = shard.writes.find(index);
      Code code = written == shard.writes.end() ? Code::kIncomplete
                                                : written->second.verify(shard.entries[index].size, crc);
      const bool is_own = core_.is_on_disk(tenant, key);
      if (!is_own && !core_.is_others(tenant, key)) code = Code::kNotFound;
      if (code == Code::kOk) {
        const uint64_t ttl_ms = end == 0 ? 0 : core_.tenants.limits(tenant).ttl_ms;
        const uint64_t now_ms = steady_ms();
        const uint64_t since_ms = store::disk::committed_ms_of(
            end, ttl_ms, store::disk::wall_ms(core_.config.disk.wall_clock), now_ms);
        const Status published = core_.publish(shard, index, crc, now_ms, CameUp{since_ms, origin});
        // What lies in the shared directory may still go to a disk of this node.
        if (published && tier_ == Tier::kShared && !core_.config.disk.paths.empty())
          shard.entries[index].on_disk = OnDisk::kUnknown;
        return published;
      }
      core_.end_reservation(shard, index);
      core_.free_entry(shard, index);
      return Status{code, {}};
    });
    core_.notify_space();
    return status.code;
  }
  void abort(ReservationId id) override { store_.abort(id); }

  void written(TenantId tenant, const Key& key, uint64_t size) override {
    // It may have been removed since.
    core_.tenants.count(tenant, &TenantUsage::down_blocks, &TenantUsage::down_bytes, size);
    with_entry(tenant, key, [&](const BlockEntry* entry) {
      if (entry != nullptr || core_.tier_below(tenant, key) != tier_) return;
      core_.events->append({RecordKind::kAdd, tier_, RemoveReason::kNone, tenant, size, key});
    });
  }
  void lost(TenantId tenant, const Key& key, uint64_t size, RemoveReason reason) override {
    with_entry(tenant, key, [&](BlockEntry* entry) {
      const auto still = core_.tier_below(tenant, key);
      if (entry != nullptr) {
        if (!still || tier_ == Tier::kSsd) entry->on_disk = OnDisk::kUnknown;
      } else if (!still) {
        core_.events->append({RecordKind::kRemove, tier_, reason, tenant, size, key});
      } else if (*still != tier_ && tier_ == Tier::kSsd) {
        core_.events->append({RecordKind::kMoveTier, *still, RemoveReason::kNone, tenant, size, key});
      }
    });
  }
  store::disk::Claim claim(TenantId tenant, uint64_t disk_bytes) override {
    if (!core_.tenants.any_disk_limit()) return store::disk::Claim::kNone;
    const TierLimits limits = core_.tenants.limits(tenant).disk;
    if (limits.quota_bytes != 0 && disk_bytes > limits.quota_bytes) return store::disk::Claim::kOver;
    if (limits.share_bytes == 0) return store::disk::Claim::kNone;
    return disk_bytes > limits.share_bytes ? store::disk::Claim::kOver : store::disk::Claim::kReserved;
  }
  bool may_hold(TenantId tenant, uint64_t bytes) override {
    const store::disk::SsdTier* disks = core_.below.load(std::memory_order_acquire);
    if (!core_.tenants.any_disk_limit() || disks == nullptr) return true;
    const uint64_t quota = core_.tenants.limits(tenant).disk.quota_bytes;
    return quota == 0 || disks->bytes_of(tenant) + bytes <= quota;
  }
  void hand_down(const ColdBlock& block, std::vector<std::byte> body) override {
    store::disk::SsdTier* disks = core_.below.load(std::memory_order_acquire);
    if (disks != nullptr) disks->hand_down(block, std::move(body));
  }
  void take_back(TenantId tenant, const Key& key) override {
    store::disk::SsdTier* disks = core_.below.load(std::memory_order_acquire);
    if (disks != nullptr) disks->take_back(tenant, key);
  }
  void log(uint8_t level, const char* event, std::string message) override {
    if (core_.config.disk.log) core_.config.disk.log(level, event, std::move(message));
  }

 private:
  template <typename Act>
  void with_entry(TenantId tenant, const Key& key, const Act& act) {
    const uint64_t hash = core_.hash_of(tenant, key);
    Shard& shard = core_.shard_of(hash);
    const Lock lock(shard.mutex);
    const uint32_t index = core_.find(shard, hash, tenant, key);
    act(index == kNone ? nullptr : &shard.entries[index]);
  }

  Store& store_;
  Core& core_;
  const Tier tier_;
};

Status Store::Core::open_tier(Store& store) {
  const bool is_shared = !config.disk.shared_path.empty();
  if (config.disk.paths.empty() && !is_shared) return Status::ok();
  if (config.disk.paths.size() > 16) return {Code::kConfigInvalid, "more than 16 disks"};
  for (auto& [tenant, keys] : config.disk.keys) {
    (void)keyring->set(tenant, keys);  // without libcrypto it refuses the tenant; set_keys() says so
    for (DiskKey& key : keys) ::explicit_bzero(key.data(), key.size());
  }
  for (const TenantId tenant : config.disk.encrypted) keyring->require(tenant, true);
  above = std::make_unique<MemoryAbove>(store, *this, Tier::kSsd);
  above_shared = std::make_unique<MemoryAbove>(store, *this, Tier::kShared);
  std::vector<store::disk::DeviceOptions> options;
  for (const std::string& path : config.disk.paths) {
    store::disk::DeviceOptions one;
    one.path = path;
    one.capacity_bytes = config.disk.bytes;
    one.node_id = config.disk.node_id;
    one.write_bytes_per_s = config.disk.write_bytes_per_s;
    one.stall_ms = config.disk.stall_ms;
    one.allow_uring = config.disk.allow_uring;
    one.ahead_bytes = config.capacity_bytes / kAheadPart / config.disk.paths.size();
    one.keyring = keyring;
    one.wall_clock = config.disk.wall_clock;
    options.push_back(std::move(one));
  }
  auto opened = store::disk::SsdTier::open(std::move(options), *above,
                                           is_shared ? std::optional(shared_directory()) : std::nullopt);
  if (!opened) return opened.status();
  tier = std::move(*opened);
  below.store(tier.get(), std::memory_order_release);
  return Status::ok();
}

// With disks they hand down what they give up; without, it takes what memory gives up, like a disk.
store::disk::SharedDirectory Store::Core::shared_directory() const {
  store::disk::SharedDirectory shared;
  shared.memory = above_shared.get();
  shared.log.path = config.disk.shared_path;
  shared.log.capacity_bytes = config.disk.shared_bytes;
  shared.log.node_id = config.disk.node_id;
  shared.log.write_bytes_per_s = config.disk.shared_write_bytes_per_s;
  shared.log.stall_ms = config.disk.stall_ms;
  shared.log.allow_uring = config.disk.allow_uring;
  shared.log.number = config.disk.paths.empty() ? 0 : store::kNone;
  shared.log.ahead_bytes = config.capacity_bytes / kAheadPart;
  shared.log.keyring = shared.reader.keyring = keyring;
  shared.log.wall_clock = shared.reader.wall_clock = config.disk.wall_clock;
  shared.reader.scan_ms = config.disk.shared_scan_ms;
  shared.reader.stall_ms = config.disk.stall_ms;
  shared.spool.requests = config.disk.shared_objects;
  shared.spool.most_unsent_bytes = config.disk.shared_spool_bytes;
  shared.spool.timeout_ms = config.disk.shared_timeout_ms;
  shared.spool.upload_ms = config.disk.shared_upload_ms;
  return shared;
}

// What the policy would evict next, as deep as what is to be free soon: the tails of the queues, and with
// chains what the advisor says instead of the tail of the protected queue.
void Store::Core::take_cold(uint32_t device, const store::disk::ColdWish& wish, std::vector<ColdBlock>& out) {
  const uint64_t ahead = config.capacity_bytes / kAheadPart;
  const uint64_t free = config.capacity_bytes - used_bytes.load(std::memory_order_relaxed);
  if (free >= ahead || device == store::kNone) return;
  const auto devices = static_cast<uint32_t>(std::max<size_t>(1, config.disk.paths.size()));
  ColdLimits limits{device, devices, ahead - free, wish.small_bytes, wish.bytes, wish.takes_large ? 1u : 0u};
  limits.now_ms = steady_ms();
  limits.wall_ms = store::disk::wall_ms(config.disk.wall_clock);
  if (tenants.any_share()) take_cold_of_loser(limits, out);
  const auto [probation, protect] =
      store::evicted_next(rules, queue_bytes[0].load(std::memory_order_relaxed),
                          queue_bytes[1].load(std::memory_order_relaxed), limits.deep_bytes);
  const uint32_t first = rotation.load(std::memory_order_relaxed);
  for (uint32_t step = 0; step < config.shards && limits.bytes_left > 0; ++step) {
    Shard& shard = shards[(first + step) & shard_mask];
    take_cold_tail(shard, Queue::kProbation, probation / config.shards, limits, out);
    if (!advisor) take_cold_tail(shard, Queue::kProtected, protect / config.shards, limits, out);
  }
  if (advisor) (void)take_cold_advised({}, limits, out);
}

void Store::Core::take_cold_tail(Shard& shard, Queue queue, uint64_t deep_bytes, ColdLimits& limits,
                                 std::vector<ColdBlock>& out) {
  if (deep_bytes == 0) return;
  const Lock lock(shard.mutex);
  uint64_t seen_bytes = 0;
  uint32_t looks = 0;
  for (uint32_t at = shard.queues[static_cast<size_t>(queue)].tail;
       at != kNone && looks < kMaxLooks && (looks < kMinLooks || seen_bytes <= deep_bytes); ++looks) {
    const BlockEntry& entry = shard.entries[at];
    const uint32_t index = std::exchange(at, entry.links[store::kQueuePrevious]);
    seen_bytes += extent_bytes(entry.size);
    if (!take_cold_block(shard, index, -1, limits, out)) return;
  }
}

// The advisor may lag behind the shards: what it names may have gone, or may not go.
bool Store::Core::take_cold_advised(std::optional<TenantId> tenant, ColdLimits& limits,
                                    std::vector<ColdBlock>& out) {
  if (limits.bytes_left == 0) return true;
  std::vector<store::Reuse::NextVictim> next;
  advisor->next_victims(kMaxAdvised, steady_ms(), next, {{}, tenant});
  uint64_t seen_bytes = 0;
  for (const auto& [id, chance] : next) {
    if (seen_bytes > limits.deep_bytes) break;
    Shard& shard = shard_of(id);
    const Lock lock(shard.mutex);
    const uint32_t index = find_hash(shard, id);
    if (index == kNone || shard.entries[index].linked == 0) continue;
    seen_bytes += extent_bytes(shard.entries[index].size);
    if (!take_cold_block(shard, index, chance, limits, out)) break;
  }
  return !next.empty();
}

// False: no more bytes are wanted. The disk's pin leaves the block in its queue: it is as cold as before when
// the copy is made.
bool Store::Core::take_cold_block(Shard& shard, uint32_t index, double chance, ColdLimits& limits,
                                  std::vector<ColdBlock>& out) {
  BlockEntry& entry = shard.entries[index];
  if (entry.on_disk != OnDisk::kUnknown || entry.demoting != 0) return true;
  const bool is_large = entry.size > limits.small_bytes;
  if (is_large && limits.large_left == 0) return true;
  if (store::disk::SsdTier::device_of(entry.tenant, entry.key, limits.devices) != limits.device) return true;
  const auto end = end_below(entry, limits.now_ms, limits.wall_ms);
  if (!end) return true;
  if (config.disk.paths.empty() && is_others(entry.tenant, entry.key)) {
    entry.on_disk = OnDisk::kWritten;  // one copy in the shared directory is enough
    return true;
  }
  if (!is_large && entry.size > limits.bytes_left) {
    limits.bytes_left = 0;
    return false;
  }
  if (is_large) {
    --limits.large_left;
  } else {
    limits.bytes_left -= entry.size;
  }
  entry.demoting = 1;
  ++entry.pins;
  const bool good = entry.queue == Queue::kProtected && rules.policy == store::Policy::kTwoQueues;
  out.push_back({slot_of(shard, index),
                 entry.tenant,
                 entry.key,
                 static_cast<uint32_t>(entry.size),
                 entry.crc,
                 entry.hits,
                 good,
                 chance,
                 *end,
                 {writers.id_of(entry.writer), entry.written_s}});
  return true;
}

bool Store::Core::end_leaving(Shard& shard, TenantId tenant, const Key& key) {
  bool found = false;
  for (const uint32_t index : shard.leaving) {
    BlockEntry& entry = shard.entries[index];
    if (entry.tenant != tenant || entry.key != key || entry.removed != 0) continue;
    entry.removed = 1;
    found = true;
  }
  return found;
}

void Store::Core::end_demotion(uint32_t slot, Demotion end) {
  {
    Shard& shard = shards[slot & shard_mask];
    const Lock lock(shard.mutex);
    const uint32_t index = slot >> shard_bits;
    BlockEntry& entry = shard.entries[index];
    entry.demoting = 0;
    std::erase(shard.leaving, index);
    // It was removed while the disk copied it, and the disk did not know of it yet.
    if (entry.removed != 0 && end == Demotion::kWritten && tier)
      (void)tier->remove(entry.tenant, entry.key, {});
    entry.on_disk = end == Demotion::kWritten   ? OnDisk::kWritten
                    : end == Demotion::kRefused ? OnDisk::kRefused
                                                : OnDisk::kUnknown;
    if (--entry.pins > 0) return;
    if (entry.state == State::kZombie) {
      --shard.count.zombies;
      free_entry(shard, index);
    } else {
      link_if_idle(shard, index);
    }
  }
  notify_space();
}

bool Store::fetch(TenantId tenant, const Key& key, std::function<void()> done) {
  if (core_->tier == nullptr) return false;
  {
    const uint64_t hash = core_->hash_of(tenant, key);
    const Core::Shard& shard = core_->shard_of(hash);
    const Core::Lock lock(shard.mutex);
    if (core_->find(shard, hash, tenant, key) != kNone) return false;
  }
  return core_->tier->fetch(tenant, key, std::move(done));
}

Prefetched Store::prefetch(TenantId tenant, std::span<const Key> keys, uint64_t max_bytes,
                           uint64_t until_ms) {
  Prefetched begun;
  if (core_->tier == nullptr) return begun;
  for (const Key& key : keys) {
    {
      const uint64_t hash = core_->hash_of(tenant, key);
      const Core::Shard& shard = core_->shard_of(hash);
      const Core::Lock lock(shard.mutex);
      if (core_->find(shard, hash, tenant, key) != kNone) continue;
    }
    const auto bytes = core_->tier->prefetch(tenant, key, max_bytes - begun.bytes, until_ms);
    if (!bytes) break;
    begun.blocks += *bytes > 0 ? 1 : 0;
    begun.bytes += *bytes;
  }
  return begun;
}

bool Store::has_disk() const {
  return core_->tier != nullptr;
}

void Store::close_disk() {
  if (core_->tier) core_->tier->close();
}

}  // namespace mooncache

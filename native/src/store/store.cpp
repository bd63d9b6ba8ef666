// The public face: each call finds its shard, takes its lock and lets Core act.
#include "mooncache/store.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "store/arena_view.h"
#include "store/core.h"

namespace mooncache {

using store::kNone;
using store::State;

Store::Store(std::unique_ptr<Core> core) : core_(std::move(core)) {}
Store::~Store() {
  close_disk();
}

Result<std::unique_ptr<Store>> Store::open(StoreConfig config) {
  auto core = std::make_unique<Core>(std::move(config));
  if (Status status = core->start(); !status) return status;
  std::unique_ptr<Store> store(new Store(std::move(core)));
  if (Status opened = store->core_->open_tier(*store); !opened) return opened;
  return store;
}

Result<Reservation> Store::reserve(TenantId tenant, const Key& key, uint64_t size, uint64_t now_ms,
                                   WriterNumber writer) {
  bool more_to_evict = false;
  auto reservation = core_->reserve(tenant, key, size, now_ms, &more_to_evict, false, writer);
  // A put that waits for space need not wait for a reader: the next try evicts the next victims.
  if (more_to_evict) core_->notify_space();
  return reservation;
}

namespace {

Status check_range(const store::BlockEntry& entry, uint64_t offset, uint64_t length) {
  if (offset > entry.size || length > entry.size - offset)
    return {Code::kInvalidArgument, "range outside the block"};
  return Status::ok();
}

Status check_written(const store::BlockEntry& entry, uint64_t offset, uint64_t length) {
  if (length == 0) return {Code::kInvalidArgument, "range without bytes"};
  return check_range(entry, offset, length);
}

}  // namespace

Status Store::commit(ReservationId id, uint32_t crc, uint64_t now_ms) {
  Status status = core_->with_reserved(
      id, [&](Core::Shard& shard, uint32_t index) { return core_->publish(shard, index, crc, now_ms); });
  core_->notify_space();
  return status;
}

Status Store::note_written(ReservationId id, uint64_t offset, uint64_t length, uint32_t crc) {
  return core_->with_reserved(id, [&](Core::Shard& shard, uint32_t index) {
    if (Status status = check_written(shard.entries[index], offset, length); !status) return status;
    const Code code = shard.writes[index].note(offset, length, crc, core_->config.max_ranges);
    return Status{code, code == Code::kInvalidArgument ? "range overlaps one written before" : ""};
  });
}

Status Store::note_damaged(ReservationId id, uint64_t offset, uint64_t length) {
  return core_->with_reserved(id, [&](Core::Shard& shard, uint32_t index) {
    if (Status status = check_written(shard.entries[index], offset, length); !status) return status;
    const auto written = shard.writes.find(index);
    if (written != shard.writes.end()) written->second.damage(offset, length);
    return Status::ok();
  });
}

Status Store::commit_written(ReservationId id, uint32_t crc, uint64_t now_ms) {
  Status status = core_->with_reserved(id, [&](Core::Shard& shard, uint32_t index) {
    const auto written = shard.writes.find(index);
    const Code code = written == shard.writes.end() ? Code::kIncomplete
                                                    : written->second.verify(shard.entries[index].size, crc);
    if (code == Code::kOk) return core_->publish(shard, index, crc, now_ms);
    ++(code == Code::kIncomplete ? shard.count.incomplete : shard.count.mismatch);
    core_->end_reservation(shard, index);
    core_->free_entry(shard, index);
    return Status{code, {}};
  });
  core_->notify_space();
  return status;
}

void Store::abort(ReservationId id) {
  (void)core_->with_reserved(id, [&](Core::Shard& shard, uint32_t index) {
    ++shard.count.aborts;
    core_->end_reservation(shard, index);
    core_->free_entry(shard, index);
    return Status::ok();
  });
  core_->notify_space();
}

Slice Store::writable(ReservationId id) {
  const auto bytes = core_->with_reserved(id, [&](const Core::Shard& shard, uint32_t index) {
    return Result<Slice>(core_->slice_of(shard.entries[index]));
  });
  return bytes ? *bytes : Slice{};
}

// The extent is the caller's as long as the reservation lives: the copy needs no lock.
Status Store::write(ReservationId id, uint64_t offset, ConstSlice from) {
  const auto place = core_->with_reserved(id, [&](const Core::Shard& shard, uint32_t index) {
    const Status inside = check_range(shard.entries[index], offset, from.size);
    return inside ? Result<Core::Place>(core_->place_of(shard.entries[index])) : inside;
  });
  return place ? place->memory->copy_in(place->offset + offset, from) : place.status();
}

Status Store::read(PinId id, uint64_t offset, Slice to) const {
  const auto place = core_->with_pinned(id, [&](const Core::Shard& shard, uint32_t index) {
    const Status inside = check_range(shard.entries[index], offset, to.size);
    return inside ? Result<Core::Place>(core_->place_of(shard.entries[index])) : inside;
  });
  return place ? place->memory->copy_out(place->offset + offset, to) : place.status();
}

bool Store::addressable() const {
  return core_->arenas.front()->memory->data() != nullptr;
}

Result<Extent> Store::reservation_extent(ReservationId id) const {
  return core_->with_reserved(id, [&](const Core::Shard& shard, uint32_t index) {
    return Result<Extent>(core_->extent_of(shard, index));
  });
}

Result<Pinned> Store::acquire(TenantId tenant, const Key& key, uint64_t now_ms) {
  const uint64_t hash = core_->hash_of(tenant, key);
  Core::Shard& shard = core_->shard_of(hash);
  const Core::Lock lock(shard.mutex);
  const uint32_t index = core_->find(shard, hash, tenant, key);
  if (index == kNone && (core_->is_on_disk(tenant, key) || core_->is_others(tenant, key)))
    return {Code::kNotFound, "it is on a disk"};
  if (index == kNone) {
    const bool evicted = shard.ghosts.contains(static_cast<uint32_t>(hash >> 16) | 1u);
    ++(evicted ? shard.count.misses_evicted : shard.count.misses_unknown);
    core_->tenants.count(tenant, &TenantUsage::misses, nullptr, 0);
    return {Code::kNotFound, {}};
  }
  if (!core_->tenants.admits(tenant, now_ms))
    return {Code::kBackPressure, "the tenant's limit of bytes per second"};
  const auto pin = core_->pin_entry(shard, index);
  if (!pin) return pin.status();
  store::BlockEntry& entry = shard.entries[index];
  core_->touch(shard, index, now_ms, false);
  if (entry.hits != ~0u) ++entry.hits;
  ++shard.count.hits;
  core_->tenants.count(tenant, &TenantUsage::hits, &TenantUsage::hit_bytes, entry.size);
  core_->tenants.moves(tenant, entry.size);
  return Pinned{*pin, core_->info_of(shard, index, now_ms)};
}

void Store::release(PinId id) {
  {
    Core::Shard& shard = core_->shard_of(id);
    const Core::Lock lock(shard.mutex);
    const uint32_t index = core_->pinned_entry(shard, id);
    if (index == kNone) return;
    const uint32_t number = static_cast<uint32_t>(static_cast<uint64_t>(id)) >> core_->shard_bits;
    store::PinRecord& pin = shard.pins[number];
    pin.live = 0;
    if (++pin.generation == 0) pin.generation = 1;
    shard.pins.release(number);
    core_->live_pins.fetch_sub(1, std::memory_order_relaxed);
    store::BlockEntry& entry = shard.entries[index];
    if (--entry.pins > 0) return;
    if (entry.state == State::kZombie) {
      --shard.count.zombies;
      core_->free_entry(shard, index);
    } else {
      core_->link_if_idle(shard, index);
    }
  }
  core_->notify_space();
}

ConstSlice Store::readable(PinId id) const {
  const auto bytes = core_->with_pinned(id, [&](const Core::Shard& shard, uint32_t index) {
    return Result<Slice>(core_->slice_of(shard.entries[index]));
  });
  return bytes ? ConstSlice(*bytes) : ConstSlice{};
}

Result<BlockInfo> Store::pin_info(PinId id, uint64_t now_ms) const {
  return core_->with_pinned(id, [&](const Core::Shard& shard, uint32_t index) {
    return Result<BlockInfo>(core_->info_of(shard, index, now_ms));
  });
}

void Store::quarantine(PinId id) {
  (void)core_->with_pinned(id, [&](Core::Shard& shard, uint32_t index) {
    const uint32_t slot = core_->slot_of(shard, index);
    const uint64_t generation = core_->generation(slot);
    // One-sided readers that are copying right now must not trust what they get either.
    if (generation % 2 == 0) core_->set_generation(slot, generation + 1);
    if (shard.entries[index].state == State::kVisible) core_->hide(shard, index, RemoveReason::kCorrupt);
    return Status::ok();
  });
}

MatchResult Store::match(TenantId tenant, std::span<const Key> keys, bool touch, uint64_t now_ms) {
  MatchResult result;
  result.bitmap.resize((keys.size() + 7) / 8);
  store::Advisor* const advisor = touch ? core_->advisor.get() : nullptr;
  std::vector<uint64_t> hashes(advisor != nullptr ? keys.size() : 0);
  std::vector<store::Unlimited::Asked> sampled;
  size_t behind_a_hole = 0;  // of `sampled`
  for (size_t at = keys.size(); at-- > 0;) {
    const uint64_t hash = core_->hash_of(tenant, keys[at]);
    if (advisor != nullptr) hashes[at] = hash;
    Core::Shard& shard = core_->shard_of(hash);
    const Core::Lock lock(shard.mutex);
    const uint32_t index = core_->find(shard, hash, tenant, keys[at]);
    auto lies = index == kNone ? core_->tier_below(tenant, keys[at]) : std::nullopt;
    const bool is_own = lies.has_value();
    if (index == kNone && !lies && core_->is_others(tenant, keys[at])) lies = Tier::kShared;
    const bool on_disk = lies.has_value();
    if (touch && core_->unlimited.samples(hash)) sampled.push_back({hash, index != kNone || on_disk});
    if (index == kNone && !on_disk) {
      ++shard.count.match_absent;
      // It was here: what lies behind it is no use.
      if (behind_a_hole < sampled.size() && shard.ghosts.contains(static_cast<uint32_t>(hash >> 16) | 1u))
        behind_a_hole = sampled.size();
      continue;
    }
    ++shard.count.match_present;
    ++result.present;
    auto& bits = result.bitmap[at / 8];
    bits = static_cast<uint8_t>(bits | (1u << (at % 8)));
    if (on_disk) {
      result.on_disk.resize(result.bitmap.size());
      result.on_disk[at / 8] = static_cast<uint8_t>(result.on_disk[at / 8] | (1u << (at % 8)));
      if (*lies == Tier::kShared) {
        result.shared.resize(result.bitmap.size());
        result.shared[at / 8] = static_cast<uint8_t>(result.shared[at / 8] | (1u << (at % 8)));
      }
      if (touch && is_own) core_->tier->touch(tenant, keys[at]);
    } else if (touch) {
      core_->touch(shard, index, now_ms, true);
    }
  }
  if (advisor != nullptr) advisor->seen(hashes, result.bitmap, now_ms, tenant);
  for (size_t at = 0; at < behind_a_hole; ++at) sampled[at].found = false;
  core_->unlimited.asked(sampled);
  while (result.leading_run < keys.size() &&
         ((result.bitmap[result.leading_run / 8] >> (result.leading_run % 8)) & 1) != 0) {
    ++result.leading_run;
  }
  return result;
}

Result<BlockInfo> Store::stat(TenantId tenant, const Key& key, uint64_t now_ms) const {
  const uint64_t hash = core_->hash_of(tenant, key);
  const Core::Shard& shard = core_->shard_of(hash);
  const Core::Lock lock(shard.mutex);
  const uint32_t index = core_->find(shard, hash, tenant, key);
  const auto on_disk = core_->tier ? core_->tier->find(tenant, key) : std::nullopt;
  const uint64_t disk_pin_ms = on_disk && on_disk->pinned_until_ms > now_ms ? on_disk->pinned_until_ms : 0;
  BlockInfo info;
  if (index != kNone) {
    info = core_->info_of(shard, index, now_ms);
    info.pinned_until_ms = std::max(info.pinned_until_ms, disk_pin_ms);
    return info;
  }
  if (!on_disk) {
    const auto of_others = core_->tier ? core_->tier->find_of_others(tenant, key) : std::nullopt;
    if (!of_others) return {Code::kNotFound, {}};
    info.tier = Tier::kShared;
    info.extent.size = *of_others;
    return info;
  }
  info.pinned_until_ms = disk_pin_ms;
  info.tier = on_disk->tier;
  info.extent.size = on_disk->size;
  info.hits = on_disk->hits;
  return info;
}

// From the disk first: what is hidden after that does not go on there.
Code Store::remove(TenantId tenant, const Key& key, RemoveReason reason, uint64_t now_ms, bool force,
                   std::function<void()> lasts) {
  if (static_cast<size_t>(reason) >= kRemoveReasons) return Code::kInvalidArgument;
  std::function<void()> at_once = lasts;
  {
    const uint64_t hash = core_->hash_of(tenant, key);
    Core::Shard& shard = core_->shard_of(hash);
    const Core::Lock lock(shard.mutex);
    const uint32_t index = core_->find(shard, hash, tenant, key);
    const auto on_disk = core_->tier ? core_->tier->find(tenant, key) : std::nullopt;
    const bool of_others = !on_disk && core_->is_others(tenant, key);
    const bool retained = !force && ((index != kNone && shard.entries[index].retained_until_ms > now_ms) ||
                                     (on_disk && on_disk->pinned_until_ms > now_ms));
    const bool was_leaving = !retained && core_->end_leaving(shard, tenant, key);
    if (core_->tier && !retained && core_->tier->remove(tenant, key, std::move(lasts))) at_once = {};
    if (!retained) core_->unlimited.removed(hash);
    if (index == kNone && on_disk) {
      core_->events->append({RecordKind::kRemove, on_disk->tier, reason, tenant, on_disk->size, key});
    } else if (index != kNone && !retained) {
      core_->hide(shard, index, reason);
    }
    if (retained || (index == kNone && !on_disk)) {
      if (at_once) at_once();
      if (retained) return Code::kPinned;
      // This node no longer answers with it.
      return of_others || was_leaving ? Code::kOk : Code::kNotFound;
    }
  }
  if (at_once) at_once();
  core_->notify_space();
  return Code::kOk;
}

Code Store::pin(TenantId tenant, const Key& key, uint64_t ttl_ms, uint64_t now_ms) {
  if (ttl_ms == 0 || ttl_ms > core_->config.max_pin_ttl_ms) return Code::kInvalidArgument;
  const uint64_t hash = core_->hash_of(tenant, key);
  Core::Shard& shard = core_->shard_of(hash);
  const Core::Lock lock(shard.mutex);
  const uint32_t index = core_->find(shard, hash, tenant, key);
  const uint64_t until_ms = now_ms + ttl_ms;
  if (index == kNone) return core_->tier ? core_->tier->pin(tenant, key, until_ms, now_ms) : Code::kNotFound;
  store::BlockEntry& entry = shard.entries[index];
  const bool earlier = until_ms < entry.retained_until_ms;
  if (entry.linked != 0) core_->unlink(shard, index);
  if (entry.retained_until_ms == 0) ++shard.count.retained;
  entry.retained_until_ms = until_ms;
  // A later end is found when the element that is there comes up.
  if (entry.in_heap == 0 || earlier) {
    const auto generation = static_cast<uint32_t>(core_->generation(core_->slot_of(shard, index)));
    shard.retention_ends.push_back({until_ms, index, generation});
    std::push_heap(shard.retention_ends.begin(), shard.retention_ends.end(), std::greater<>());
    entry.in_heap = 1;
    core_->compact_retention(shard);
    core_->retention_next[shard.number].store(shard.retention_ends.front().at_ms, std::memory_order_relaxed);
  }
  return Code::kOk;
}

Code Store::unpin(TenantId tenant, const Key& key) {
  {
    const uint64_t hash = core_->hash_of(tenant, key);
    Core::Shard& shard = core_->shard_of(hash);
    const Core::Lock lock(shard.mutex);
    const uint32_t index = core_->find(shard, hash, tenant, key);
    const Code below = core_->tier ? core_->tier->unpin(tenant, key) : Code::kNotFound;
    if (index == kNone) return below;
    core_->end_retention(shard, index);
  }
  core_->notify_space();
  return Code::kOk;
}

Code Store::flip_bit(TenantId tenant, const Key& key, uint64_t bit) {
  const uint64_t hash = core_->hash_of(tenant, key);
  Core::Shard& shard = core_->shard_of(hash);
  const Core::Lock lock(shard.mutex);
  const uint32_t index = core_->find(shard, hash, tenant, key);
  if (index == kNone) return Code::kNotFound;
  if (bit / 8 >= shard.entries[index].size) return Code::kInvalidArgument;
  const Core::Place place = core_->place_of(shard.entries[index]);
  std::byte byte{};
  Status moved = place.memory->copy_out(place.offset + bit / 8, {&byte, 1});
  byte ^= static_cast<std::byte>(1u << (bit % 8));
  if (moved) moved = place.memory->copy_in(place.offset + bit / 8, {&byte, 1});
  return moved.code;
}

EventBatch Store::drain_events(uint64_t max_events) {
  return core_->events->drain(max_events);
}
uint64_t Store::event_seq() const {
  return core_->events->last_seq();
}
void Store::set_draining(bool draining) {
  core_->is_draining.store(draining, std::memory_order_relaxed);
}
bool Store::draining() const {
  return core_->takes_no_blocks();
}
const std::vector<SegmentFd>& Store::segments() const {
  return core_->segment_fds;
}
const StoreConfig& Store::config() const {
  return core_->config;
}
ArenaInfo Store::arena() const {
  ArenaInfo info = core_->arenas.front()->memory->info();
  info.size_bytes = core_->config.capacity_bytes;
  info.resident_bytes = 0;
  for (const auto& arena : core_->arenas) info.resident_bytes += arena->memory->resident_bytes();
  return info;
}

Status Store::populate(uint64_t offset, uint64_t length, uint32_t threads) {
  constexpr uint64_t kPieceBytes = 32 << 20;
  struct Piece {
    store::ArenaMemory* memory;
    uint64_t offset, length;
  };
  std::vector<Piece> pieces;
  const uint64_t end = length > ~uint64_t{0} - offset ? ~uint64_t{0} : offset + length;
  uint64_t begin = 0;  // of the arena in the row
  for (const auto& arena : core_->arenas) {
    const uint64_t size = arena->memory->size_bytes();
    const uint64_t stop = std::min(end, begin + size);
    for (uint64_t at = std::max(offset, begin); at < stop; at += kPieceBytes)
      pieces.push_back({arena->memory.get(), at - begin, std::min(kPieceBytes, stop - at)});
    begin += size;
  }
  std::atomic<size_t> next{0};
  std::mutex mutex;
  Status failed;
  const auto work = [&] {
    for (size_t at = next++; at < pieces.size(); at = next++) {
      const Status status = pieces[at].memory->populate(pieces[at].offset, pieces[at].length);
      if (status) continue;
      const std::lock_guard lock(mutex);
      failed = status;
      next = pieces.size();
    }
  };
  std::vector<std::jthread> helpers;
  for (size_t count = 1; count < std::min<size_t>(threads, pieces.size()); ++count)
    helpers.emplace_back(work);
  work();
  helpers.clear();
  return failed;
}

uint64_t Store::lost_bytes() {
  uint64_t lost = 0;
  for (const auto& arena : core_->arenas) lost += arena->memory->lost_bytes();
  core_->arena_gone.store(lost > 0 && !addressable(), std::memory_order_relaxed);
  return lost;
}
bool Store::arena_gone() const {
  return core_->arena_gone.load(std::memory_order_relaxed);
}
ArenaView Store::arena_view() {
  return {*core_->arenas.front()->memory, core_->config.capacity_bytes};
}
void Store::set_commit_callback(std::function<void(TenantId, const Key&)> callback) {
  core_->commit_callback = std::move(callback);
}

void Store::set_space_callback(std::function<void()> callback) {
  core_->space_callback = std::move(callback);
}

}  // namespace mooncache

// Who wrote which block, and the recall of what one writer wrote. Memory first, whose blocks go with their
// records on disks, then what is on disks alone: the cursors are those of a purge (tenancy.cpp).
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>

#include "store/core.h"

namespace mooncache {

using store::kNone;
using store::State;

namespace {

constexpr uint32_t kRecalledPerPage = 256;
constexpr uint32_t kLooksPerLock = 4096;
constexpr auto kLastsWithin = std::chrono::seconds(5);

// Counts removals until disks have said that they last.
struct Lasting {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t left = 0;
  void one_less() {
    const std::lock_guard lock(mutex);
    --left;
    changed.notify_all();
  }
};

}  // namespace

// kOriginEpochUnixS is the epoch of the ends on disks, too.
uint32_t Store::Core::now_written_s() const {
  const uint64_t now_s = store::disk::wall_ms(config.disk.wall_clock) / 1000;
  return static_cast<uint32_t>(now_s > kOriginEpochUnixS ? now_s - kOriginEpochUnixS : 0);
}

void Store::Core::own(BlockEntry& entry, WriterNumber writer) {
  writers.hold(writer);
  writers.release(entry.writer);
  entry.writer = writer;
}

WriterNumber Store::open_writer(const BlockWriter& writer) {
  return core_->writers.open(writer);
}

void Store::close_writer(WriterNumber number) {
  core_->writers.release(number);
}

uint64_t Store::writers_refused() const {
  return core_->writers.refused();
}

std::vector<WriterUse> Store::writers() const {
  std::map<uint64_t, WriterUse> all;
  for (WriterUse& use : core_->writers.uses()) all.emplace(use.writer.id, std::move(use));
  for (const DiskUse& use : core_->tier ? core_->tier->uses() : std::vector<DiskUse>{}) {
    if (use.blocks == 0) continue;
    WriterUse& to = all[use.writer];
    to.writer.id = use.writer;
    to.disk_blocks += use.blocks;
    to.disk_bytes += use.bytes;
    if (use.first_s != 0) to.first_s = to.first_s == 0 ? use.first_s : std::min(to.first_s, use.first_s);
    to.last_s = std::max(to.last_s, use.last_s);
  }
  std::vector<WriterUse> sorted;
  for (auto& [id, use] : all) sorted.push_back(std::move(use));
  return sorted;
}

std::vector<Origin> Store::origins(TenantId tenant, std::span<const Key> keys) const {
  std::vector<Origin> all(keys.size());
  for (size_t at = 0; at < keys.size(); ++at) {
    const uint64_t hash = core_->hash_of(tenant, keys[at]);
    const Core::Shard& shard = core_->shard_of(hash);
    bool in_memory = false;
    {
      const Core::Lock lock(shard.mutex);
      const uint32_t index = core_->find(shard, hash, tenant, keys[at]);
      in_memory = index != kNone;
      if (in_memory) {
        const store::BlockEntry& entry = shard.entries[index];
        all[at] = {core_->writers.id_of(entry.writer), entry.written_s};
      }
    }
    if (!in_memory && core_->tier) all[at] = core_->tier->origin(tenant, keys[at]);
  }
  return all;
}

Code Store::set_origin(TenantId tenant, const Key& key, const Origin& origin) {
  const WriterNumber number = core_->writers.open({origin.writer, {}, {}, 0});
  const uint64_t hash = core_->hash_of(tenant, key);
  Core::Shard& shard = core_->shard_of(hash);
  Code code = Code::kNotFound;
  {
    const Core::Lock lock(shard.mutex);
    const uint32_t index = core_->find(shard, hash, tenant, key);
    if (index != kNone && core_->recalls.covers(origin.writer, origin.written_s)) {
      if (core_->tier) (void)core_->tier->remove(tenant, key, {});
      core_->hide(shard, index, RemoveReason::kRemoved);
      code = Code::kReservationUnknown;
    } else if (index != kNone) {
      store::BlockEntry& entry = shard.entries[index];
      core_->writers.went(entry.writer, entry.size);
      core_->own(entry, number);
      entry.written_s = origin.written_s;
      core_->writers.appeared(entry.writer, entry.size, entry.written_s);
      if (core_->catalogue.is_open()) {
        core_->catalogue.set_origin(core_->slot_of(shard, index), entry.tick,
                                    static_cast<uint8_t>(entry.queue), entry.writer, entry.written_s);
      }
      code = Code::kOk;
    }
  }
  core_->writers.release(number);
  return code;
}

// What to remove of one page, and its counts. The next cursor.
uint64_t Store::Core::recall_page(const RecallRequest& request, uint64_t cursor,
                                  std::vector<std::pair<TenantId, Key>>& out, Recalled& done) {
  const uint64_t disks = uint64_t{config.shards} << 32;
  if (cursor >= disks) {
    if (!tier) return 0;
    const uint64_t next = tier->walk_writer(cursor - disks, kRecalledPerPage, request,
                                            [&](TenantId tenant, const Key& key, uint64_t size) {
                                              const uint64_t hash = hash_of(tenant, key);
                                              const Shard& shard = shard_of(hash);
                                              const Lock lock(shard.mutex);
                                              if (find(shard, hash, tenant, key) != kNone)
                                                return;  // counted with those in memory
                                              ++done.disk_blocks;
                                              done.disk_bytes += size;
                                              out.emplace_back(tenant, key);
                                            });
    return next == 0 ? 0 : disks + next;
  }
  const auto number = static_cast<uint32_t>(cursor >> 32);
  auto at = static_cast<uint32_t>(cursor);
  const WriterNumber writer = writers.find(request.writer);
  Shard& shard = shards[number];
  const Lock lock(shard.mutex);
  const uint32_t end = writer == 0 ? 0 : std::min(shard.entries.size(), at + kLooksPerLock);
  for (; at < end && out.size() < kRecalledPerPage; ++at) {
    BlockEntry& entry = shard.entries[at];
    if (entry.state == State::kFree || entry.writer != writer) continue;
    // One that was evicted while a disk copies it arrives there, unless it is removed.
    if (entry.state == State::kZombie && (entry.demoting == 0 || entry.removed != 0)) continue;
    if (entry.state == State::kReserved) {
      // Not written yet: its commit fails, when it would have come in the recalled time.
      if (!request.covers(now_written_s())) continue;
      ++done.held_blocks;
      if (!request.dry_run) entry.purged = 1;
      continue;
    }
    // What is of an unknown time is recalled, too: it is computed again, and the rest is not served.
    if (entry.written_s != 0 && !request.covers(entry.written_s)) continue;
    ++done.blocks;
    done.bytes += entry.size;
    done.held_blocks += entry.pins > entry.demoting ? 1 : 0;
    out.emplace_back(entry.tenant, entry.key);
  }
  if (writer != 0 && at < shard.entries.size()) return uint64_t{number} << 32 | at;
  const uint64_t next = uint64_t{number + 1} << 32;
  return next == disks && !tier ? 0 : next;
}

Recalled Store::recall(const RecallRequest& request, uint64_t cursor, uint64_t now_ms) {
  Recalled done;
  if (request.writer == 0) return done;
  if (cursor == 0 && !request.dry_run) {
    const uint32_t now_s = core_->now_written_s();
    core_->recalls.add(request.writer, request.since_s, std::min(request.until_s, now_s));
    if (request.refuse_s != 0) {
      const bool has_end = request.refuse_s != RecallRequest::kUntilLifted;
      core_->recalls.add(request.writer, now_s, has_end ? now_s + request.refuse_s : store::Recalls::kNoEnd);
    }
    if (core_->tier) core_->tier->forget_of_others_by(request.writer);
  }
  std::vector<std::pair<TenantId, Key>> found;
  done.next_cursor = core_->recall_page(request, cursor, found, done);
  if (request.dry_run || found.empty()) return done;
  const auto lasting = std::make_shared<Lasting>();
  lasting->left = found.size();
  for (const auto& [tenant, key] : found) {
    (void)remove(tenant, key, RemoveReason::kRemoved, now_ms, true, [lasting] { lasting->one_less(); });
  }
  std::unique_lock lock(lasting->mutex);
  lasting->changed.wait_for(lock, kLastsWithin, [&] { return lasting->left == 0; });
  done.failed_blocks = lasting->left;
  return done;
}

void Store::lift(uint64_t writer) {
  core_->recalls.lift(writer);
}

}  // namespace mooncache

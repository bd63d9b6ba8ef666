// How blocks go, so that no start brings them back: the record of a removal, which lies behind every record
// that it removes, and what the index keeps of blocks that are no longer served.
#include <iterator>
#include <utility>

#include "store/disk/append.h"
#include "store/disk/device.h"

namespace mooncache::store::disk {

namespace {

constexpr size_t kMaxRemovals = 1 << 16;

}  // namespace

// Asked by any thread -----------------------------------------------------------------------------------

bool Device::remove(TenantId tenant, const Key& key, Done done) {
  const std::lock_guard lock(mutex_);
  const uint32_t number = index_.find(tenant, key);
  const bool was_handed = end_handed(tenant, key);
  const bool was_appended = end_appended(tenant, key);
  // Another removal of it is on its way: this one does not last before.
  const bool is_unlasting = done && unlasting_.contains({tenant, key});
  if (number == kNone && !was_handed && !was_appended && !is_unlasting) return false;
  if (number != kNone) forget(number);  // who reads it finds that it is gone
  if (stopping_) return false;
  // Of blocks of the index there are no more than it has room for, and each leaves it.
  const bool has_room = removals_.size() < kMaxRemovals && unlasting_.size() < kMaxRemovals;
  if (number != kNone || has_room) want_removal(tenant, key, std::move(done));
  return true;
}

// mutex_ is held.
void Device::want_removal(TenantId tenant, const Key& key, Done done) {
  ++unlasting_[{tenant, key}];
  removals_.push_back({tenant, key, std::move(done)});
  queue_->wake();
}

// It is being copied to the disk, and its record will be none (append.h). mutex_ is held.
bool Device::end_appended(TenantId tenant, const Key& key) {
  if (!appended_ || *appended_ != std::pair(tenant, key)) return false;
  is_cut_ = true;
  return true;
}

// No start finds a segment that is given up, and its place gets another record. mutex_ is held.
void Device::hide(uint32_t number) {
  const Segment::State state = segments_[index_[number].segment].state;
  if (state == Segment::State::kGivenUp || state == Segment::State::kFree) return forget(number);
  fetches_.erase(number);
  end_pin(number);
  index_.hide(number);
}

// The thread ----------------------------------------------------------------------------------------------

void Device::write_removals() {
  if (now_ms_ < next_removal_ms_) return;
  for (;;) {
    Removal removal;
    {
      const std::lock_guard lock(mutex_);
      if (removals_.empty()) return;
    }
    if (!room_for(kRecordHeaderBytes)) return;
    {
      const std::lock_guard lock(mutex_);
      if (removals_.empty()) return seal_chunk();
      removal = std::move(removals_.front());
      removals_.pop_front();
    }
    append_removal(std::move(removal));
  }
}

// To a start it removes every record before it, also of a block that was put again and written meanwhile:
// that one goes here, too.
void Device::append_removal(Removal removal) {
  uint64_t lost_bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    const uint32_t number = index_.find(removal.tenant, removal.key);
    if (number != kNone) {
      const DiskEntry& entry = index_[number];
      if (entry.hidden == 0) lost_bytes = entry.size;
      forget(number);
    }
  }
  if (lost_bytes > 0) memory_.lost(removal.tenant, removal.key, lost_bytes, RemoveReason::kEvicted);
  RecordHeader header;
  header.flags = RecordHeader::kRemoval;
  header.sequence = segments_[open_].sequence;
  header.key = removal.key;
  header.tenant = removal.tenant;
  PendingRecord record;
  record.done = std::move(removal.done);
  (void)append(header, std::move(record), nullptr, [](uint64_t, Slice) { return true; });
  removals_waiting_ = true;
}

// A removal lasts when the device was asked to keep it, and said that it does.
void Device::synced(bool whole) {
  auto dones = std::exchange(syncing_, {});
  if (!whole) {
    std::move(dones.begin(), dones.end(), std::back_inserter(to_sync_));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    for (const Removal& removal : dones) {
      const auto known = unlasting_.find({removal.tenant, removal.key});
      if (known != unlasting_.end() && --known->second == 0) unlasting_.erase(known);
    }
  }
  for (const Removal& removal : dones) {
    if (removal.done) removal.done();
  }
}

}  // namespace mooncache::store::disk

// From one log into the one below it: blocks of the oldest segment of a disk, which the shared directory
// takes.
#include "store/disk/append.h"
#include "store/disk/device.h"

namespace mooncache::store::disk {

namespace {

constexpr uint64_t kMostHandedBytes = 64 << 20;

}  // namespace

// Of the disk above -------------------------------------------------------------------------------------

// mutex_ is held.
void Device::want_down(const DiskEntry& entry) {
  auto fetch = std::make_shared<Fetch>();
  fetch->tenant = index_.tenant_of(entry);
  fetch->key = entry.key;
  fetch->size = entry.size;
  fetch->at = DiskIndex::location_of(entry);
  fetch->keep = fetch->down = true;
  fetch->hits = static_cast<uint8_t>(entry.hits);
  fetch->encrypted = entry.encrypted != 0;
  fetch->end = entry.end;
  fetch->origin.writer = index_.writer_of(entry);
  ++segments_[fetch->at.segment].reads;
  wanted_.push_back(std::move(fetch));
}

bool Device::holds(const Fetch& fetch) const {
  const std::lock_guard lock(mutex_);
  const uint32_t number = index_.find(fetch.tenant, fetch.key);
  return number != kNone && index_[number].hidden == 0 && DiskIndex::location_of(index_[number]) == fetch.at;
}

// Who removes the block looks here first, then below. So it is looked for here once more when it is below.
void Device::finish_down(Fetch& fetch, Code code) {
  if (code == Code::kOk && holds(fetch)) {
    ColdBlock block;
    block.tenant = fetch.tenant;
    block.key = fetch.key;
    block.size = fetch.size;
    block.crc32c = fetch.crc32c;
    block.hits = fetch.hits;
    block.end = fetch.end;
    block.origin = fetch.origin;
    memory_.hand_down(block, std::move(fetch.body));
    if (!holds(fetch)) memory_.take_back(fetch.tenant, fetch.key);
  }
  drop(fetch, RemoveReason::kEvicted);
  const std::lock_guard lock(stats_mutex_);
  ++count_.reclaimed;
}

// Of the log below --------------------------------------------------------------------------------------

void Device::take_handed(const ColdBlock& block, std::vector<std::byte> body) {
  bool is_much = false;
  {
    const std::lock_guard lock(mutex_);
    // One is always taken, however large it is.
    const bool is_behind = !handed_.empty() && handed_bytes_ + body.size() > kMostHandedBytes;
    is_much = stopping_ || !answering() || is_behind;
    if (!is_much) {
      handed_bytes_ += body.size();
      handed_.push_back(std::make_shared<Handed>(Handed{block, std::move(body), false}));
      queue_->wake();
    }
  }
  if (!is_much) return;
  const std::lock_guard lock(stats_mutex_);
  ++count_.dropped;
}

// It is on its way to the disk; what is appended of it meanwhile does not count. mutex_ is held.
bool Device::end_handed(TenantId tenant, const Key& key) {
  bool found = false;
  for (const auto& handed : handed_) {
    if (handed->block.tenant != tenant || handed->block.key != key) continue;
    found = found || !handed->removed;
    handed->removed = true;
  }
  return found;
}

void Device::write_handed() {
  DeviceStats seen;
  for (;;) {
    std::shared_ptr<Handed> handed;
    bool is_wanted = false;
    {
      const std::lock_guard lock(mutex_);
      if (handed_.empty()) break;
      handed = handed_.front();
      is_wanted = !handed->removed && find_readable(handed->block.tenant, handed->block.key) == kNone;
      if (is_wanted) begin_append(handed->block);
    }
    const bool is_later = is_wanted && write(*handed, seen) == Demotion::kLater;
    {
      const std::lock_guard lock(mutex_);
      appended_.reset();
      if (is_later) break;
      handed_.pop_front();
      handed_bytes_ -= handed->block.size;
    }
    begin_next(is_wanted ? handed->block.size : 0);
  }
  const std::lock_guard lock(stats_mutex_);
  count_.admitted += seen.admitted;
  count_.admitted_bytes += seen.admitted_bytes;
  count_.refused += seen.refused;
  count_.too_large += seen.too_large;
}

// kLater: there is no room for it now.
Demotion Device::write(Handed& handed, DeviceStats& seen) {
  const ColdBlock& block = handed.block;
  if (block.size > largest_block()) {
    refuse_large(block, seen);
    return Demotion::kRefused;
  }
  const uint64_t bytes = record_bytes(block.size);
  const double draw = static_cast<double>(random_() >> 11) * 0x1p-53;
  const Keyring::Writing writing = writing_of(block.tenant);
  const bool is_worth =
      !writing.refused && queue_->takes_blocks() && !has_ended(block.end) && budget_.allows(bytes, now_ms_) &&
      worth_writing({block.hits, block.known_good, block.chance}, budget_.slack(now_ms_), draw) &&
      memory_.may_hold(block.tenant, block.size);
  if (!is_worth) {
    ++seen.refused;
    return Demotion::kRefused;
  }
  if (!leaves_room_to_move(bytes) || !room_for(bytes)) return Demotion::kLater;
  const bool copied =
      append(header_of(segments_[open_].sequence, block), {}, writing.key, [&](uint64_t offset, Slice to) {
        std::memcpy(to.data, handed.body.data() + offset, to.size);
        return true;
      });
  if (!copied) return Demotion::kRefused;
  ++seen.admitted;
  seen.admitted_bytes += block.size;
  return Demotion::kWritten;
}

}  // namespace mooncache::store::disk

// What stays on a disk whose oldest segment is given up: blocks that were read, and pinned ones.
#include "store/disk/device.h"

namespace mooncache::store::disk {

namespace {

constexpr uint64_t kPinnedPart = 4;    // of the disk, that pins may hold
constexpr uint64_t kReservedPart = 2;  // of a segment, that moves on for tenants within their shares

}  // namespace

// A pin is a promise of the memory that the device runs in: it ends with the process.
Code Device::pin(TenantId tenant, const Key& key, uint64_t until_ms, uint64_t now_ms) {
  const std::lock_guard lock(mutex_);
  const uint32_t number = answering() ? find_readable(tenant, key) : kNone;
  if (number == kNone || !index_[number].written) return Code::kNotFound;
  const auto known = pins_.find(number);
  if (known != pins_.end()) {
    known->second = until_ms;
    return Code::kOk;
  }
  const uint64_t bytes = record_bytes(index_[number].size);
  const uint64_t most = layout_.segments * layout_.segment_bytes / kPinnedPart;
  if (pinned_bytes_ + bytes > most) expire_pins(now_ms);
  if (pinned_bytes_ + bytes > most) return Code::kLimitExceeded;
  pins_.emplace(number, until_ms);
  pinned_bytes_ += bytes;
  return Code::kOk;
}

Code Device::unpin(TenantId tenant, const Key& key) {
  const std::lock_guard lock(mutex_);
  const uint32_t number = index_.find(tenant, key);
  if (number == kNone || index_[number].hidden != 0) return Code::kNotFound;
  end_pin(number);
  return Code::kOk;
}

// mutex_ is held.
void Device::expire_pins(uint64_t now_ms) {
  for (auto pin = pins_.begin(); pin != pins_.end();) {
    const uint32_t number = pin->first;
    const bool over = pin->second <= now_ms;
    ++pin;
    if (over) end_pin(number);
  }
}

bool Device::fits_open(uint64_t bytes) const {
  const uint64_t footer = FooterTrailer::entries_bytes(footer_.size() + 1) + kPageBytes;
  return open_ != kNone && open_fill_ + bytes + kPageBytes + footer <= layout_.segment_bytes;
}

// What is pinned has to move out of the oldest segment, so the last free one is not for new blocks.
bool Device::leaves_room_to_move(uint64_t bytes) {
  if (free_segments_.size() > 1 || fits_open(bytes)) return true;
  const std::lock_guard lock(mutex_);
  return pins_.empty();
}

// Whether a block of the oldest segment gets another turn. mutex_ is held.
bool Device::moves_on(const DiskEntry& entry) const {
  const uint64_t bytes = record_bytes(entry.size);
  const Claim claim = memory_.claim(index_.tenant_of(entry), index_.bytes_of(entry));
  if (claim == Claim::kOver) return false;
  if (claim == Claim::kReserved) return kept_bytes_ + bytes <= layout_.segment_bytes / kReservedPart;
  return worth_keeping(entry.hits, kept_bytes_, bytes, layout_.segment_bytes);
}

// mutex_ is held.
void Device::want_kept(const DiskEntry& entry, bool pinned) {
  auto fetch = std::make_shared<Fetch>();
  fetch->tenant = index_.tenant_of(entry);
  fetch->key = entry.key;
  fetch->size = entry.size;
  fetch->at = DiskIndex::location_of(entry);
  fetch->keep = true;
  fetch->pinned = pinned;
  fetch->encrypted = entry.encrypted != 0;
  fetch->end = entry.end;
  fetch->origin.writer = index_.writer_of(entry);
  ++segments_[fetch->at.segment].reads;
  kept_bytes_ += record_bytes(entry.size);
  wanted_.push_back(std::move(fetch));
}

// There was no room for it for a moment, and it is pinned: it is read once more.
void Device::keep_again(const std::shared_ptr<Fetch>& fetch) {
  fetch->begun = fetch->header_sound = false;
  fetch->queued = true;
  fetch->body.clear();
  wanted_.push_back(fetch);
}

}  // namespace mooncache::store::disk

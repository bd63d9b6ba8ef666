#include "store/disk/shared_index.h"

#include <algorithm>

namespace mooncache::store::disk {

uint32_t SharedIndex::add_place(uint32_t file, uint32_t number, uint64_t sequence) {
  uint32_t at = kNone;
  if (!free_.empty()) {
    at = free_.back();
    free_.pop_back();
  } else if (places_.size() < kMostPlaces) {
    at = static_cast<uint32_t>(places_.size());
    places_.emplace_back();
  } else {
    return kNone;
  }
  places_[at] = {file, number, sequence, Place::State::kLive};
  return at;
}

void SharedIndex::take(uint32_t place, const RecordHeader& header, uint32_t unit, bool sealed,
                       uint32_t known_to, uint32_t minute) {
  const uint32_t known = entries_.find(header.tenant, header.key);
  if (unit < known_to) {
    if (known == kNone) return;
    DiskEntry& entry = entries_[known];
    if (entry.segment == place && entry.next == unit) entry.written = entry.written != 0 || sealed;
    return;
  }
  if (header.removal() || header.foreign() || (header.end() != 0 && minute >= header.end())) {
    // A writer removes what it wrote; the copy of another one is that one's to remove.
    if (known != kNone && places_[entries_[known].segment].file == places_[place].file) entries_.erase(known);
    return;
  }
  if (known == kNone && entries_.count() >= most_blocks_) {
    ++left_out_;
    return;
  }
  if (entries_.put(header.tenant, header.key, header.size, {place, unit}, sealed, header.encrypted(),
                   header.end(), header.origin) == kNone)
    ++left_out_;
}

bool SharedIndex::forget(TenantId tenant, const Key& key, uint32_t place, uint32_t unit) {
  const uint32_t known = entries_.find(tenant, key);
  if (known == kNone) return false;
  const DiskEntry& entry = entries_[known];
  if (place != kNone && (entry.segment != place || entry.next != unit)) return false;
  const bool was_here = places_[entry.segment].state == Place::State::kLive;
  entries_.erase(known);
  return was_here;
}

uint32_t SharedIndex::sweep(uint32_t from, std::optional<TenantId> tenant, uint32_t minute, uint64_t writer) {
  const auto end =
      static_cast<uint32_t>(std::min<uint64_t>(entries_.slots(), uint64_t{from} + kSweptPerStep));
  for (uint32_t at = from; at < end; ++at) {
    const DiskEntry& entry = entries_[at];
    if (entry.size == 0) continue;
    const bool gone =
        places_[entry.segment].state != Place::State::kLive || (entry.end != 0 && minute >= entry.end);
    if (gone || (tenant && entries_.tenant_of(entry) == *tenant) ||
        (writer != 0 && entries_.writer_of(entry) == writer))
      entries_.erase(at);
  }
  return end >= entries_.slots() ? 0 : end;
}

void SharedIndex::end_sweep() {
  for (uint32_t at = 0; at < places_.size(); ++at) {
    if (places_[at].state != Place::State::kDropped) continue;
    places_[at].state = Place::State::kFree;
    free_.push_back(at);
  }
  has_dropped_ = false;
}

}  // namespace mooncache::store::disk

// Blocks that come up before a get has asked for them. A get that comes meanwhile joins what is under way
// and makes it urgent.
#include "store/disk/device.h"

namespace mooncache::store::disk {

namespace {

constexpr size_t kMaxAhead = 256;
// Fetches that gets wait for; with more of them nothing more comes up ahead.
constexpr size_t kBehind = 64;

}  // namespace

std::optional<uint64_t> Device::prefetch(TenantId tenant, const Key& key, uint64_t max_bytes,
                                         uint64_t until_ms) {
  if (!answering()) return 0;
  std::unique_lock lock(mutex_);
  const uint32_t number = find_readable(tenant, key);
  if (number == kNone || !index_[number].written || fetches_.contains(number)) return 0;
  DiskEntry& entry = index_[number];
  const bool is_behind = fetches_.size() >= kBehind + ahead_count_;
  const bool is_much = ahead_count_ >= kMaxAhead || ahead_bytes_ + entry.size > options_.ahead_bytes;
  if (stopping_ || is_behind || is_much || entry.size > max_bytes) {
    lock.unlock();
    const std::lock_guard counting(stats_mutex_);
    ++count_.prefetch_given_up;
    return std::nullopt;
  }
  if (entry.hits < 255) ++entry.hits;
  auto fetch = std::make_shared<Fetch>();
  fetch->tenant = tenant;
  fetch->key = key;
  fetch->size = entry.size;
  fetch->at = DiskIndex::location_of(entry);
  fetch->encrypted = entry.encrypted != 0;
  fetch->end = entry.end;
  fetch->origin.writer = index_.writer_of(entry);
  fetch->ahead = true;
  fetch->until_ms = until_ms;
  ++segments_[fetch->at.segment].reads;
  ++ahead_count_;
  ahead_bytes_ += entry.size;
  fetches_.emplace(number, fetch);
  asked_ahead_.push_back(std::move(fetch));
  queue_->wake();
  return uint64_t{entry.size};
}

void Device::take_asked() {
  const std::lock_guard lock(mutex_);
  ahead_.insert(ahead_.end(), asked_ahead_.begin(), asked_ahead_.end());
  asked_ahead_.clear();
  for (std::shared_ptr<Fetch>& fetch : asked_) {
    no_longer_ahead(*fetch);
    if (fetch->queued) wanted_.push_back(std::move(fetch));
  }
  asked_.clear();
}

// mutex_ is held.
void Device::no_longer_ahead(Fetch& fetch) {
  if (!fetch.ahead) return;
  fetch.ahead = false;
  --ahead_count_;
  ahead_bytes_ -= fetch.size;
}

void Device::drop_late_prefetches() {
  while (!ahead_.empty()) {
    const std::shared_ptr<Fetch> fetch = ahead_.front();
    const bool is_late = fetch->ahead && !fetch->begun && now_ms_ > fetch->until_ms;
    if (fetch->ahead && !is_late) return;
    ahead_.pop_front();
    if (!is_late) continue;
    fetch->failed = true;
    fetch->queued = false;
    finish(fetch);
  }
}

}  // namespace mooncache::store::disk

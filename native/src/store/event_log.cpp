#include "store/event_log.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace mooncache::store {
namespace {

template <typename T>
std::byte* put(std::byte* out, T value) {
  std::memcpy(out, &value, sizeof value);
  return out + sizeof value;
}

}  // namespace

void pack_record(const BlockRecord& record, std::byte* out) {
  out = put(out, static_cast<uint8_t>(record.kind));
  out = put(out, static_cast<uint8_t>(record.tier));
  out = put(out, static_cast<uint8_t>(record.reason));
  out = put(out, uint8_t{0});
  out = put(out, uint32_t{0});
  out = put(out, record.tenant);
  out = put(out, record.size_bytes);
  std::memcpy(out, record.key.bytes.data(), kKeyBytes);
}

// Mapped rather than allocated: a log that never fills costs only the pages that it used.
EventLog::EventLog(uint64_t capacity) : capacity_(capacity) {
  void* at = ::mmap(nullptr, memory_bytes(), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at != MAP_FAILED) ring_ = static_cast<std::byte*>(at);
}

EventLog::~EventLog() {
  if (ring_ != nullptr) ::munmap(ring_, memory_bytes());
}

void EventLog::append(const BlockRecord& record) {
  std::byte packed[kBlockRecordBytes];
  pack_record(record, packed);
  const std::lock_guard lock(mutex_);
  std::memcpy(ring_ + (last_seq_ % capacity_) * kBlockRecordBytes, packed, kBlockRecordBytes);
  ++last_seq_;
}

void EventLog::skip_lost() {
  if (last_seq_ + 1 - next_read_ <= capacity_) return;
  next_read_ = last_seq_ + 1 - capacity_;
  ++overflows_;
}

EventBatch EventLog::drain(uint64_t max_events) {
  EventBatch batch;
  const std::lock_guard lock(mutex_);
  const uint64_t before = next_read_;
  skip_lost();
  batch.overflow = next_read_ != before;
  const uint64_t count = std::min({max_events, kDrainMax, last_seq_ + 1 - next_read_});
  batch.first_seq = next_read_;
  batch.last_seq = next_read_ + count - 1;
  batch.records.resize(count * kBlockRecordBytes);
  const uint64_t from = (next_read_ - 1) % capacity_;
  const uint64_t first_part = std::min(count, capacity_ - from);
  if (count > 0) {
    std::memcpy(batch.records.data(), ring_ + from * kBlockRecordBytes, first_part * kBlockRecordBytes);
    std::memcpy(batch.records.data() + first_part * kBlockRecordBytes, ring_,
                (count - first_part) * kBlockRecordBytes);
  }
  next_read_ += count;
  return batch;
}

uint64_t EventLog::last_seq() const {
  const std::lock_guard lock(mutex_);
  return last_seq_;
}

uint64_t EventLog::pending() const {
  const std::lock_guard lock(mutex_);
  return std::min(last_seq_ + 1 - next_read_, capacity_);
}

uint64_t EventLog::overflows() const {
  const std::lock_guard lock(mutex_);
  return overflows_;
}

}  // namespace mooncache::store

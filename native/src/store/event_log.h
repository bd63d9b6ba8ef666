// The bounded log of what became visible or invisible. Records are numbered from 1; a reader that falls
// behind by more than the capacity loses the oldest and learns so (it then takes a snapshot).
// Leaf lock: append is called under a shard's lock, which makes the order per key that of the effects.
#pragma once

#include <cstdint>
#include <mutex>

#include "mooncache/store.h"

namespace mooncache::store {

struct BlockRecord {
  RecordKind kind;
  Tier tier;
  RemoveReason reason;
  TenantId tenant;
  uint64_t size_bytes;
  Key key;
};
// Writes kBlockRecordBytes bytes.
void pack_record(const BlockRecord& record, std::byte* out);

class EventLog {
 public:
  static constexpr uint64_t kDrainMax = 16384;  // records copied under the lock at most

  explicit EventLog(uint64_t capacity);
  ~EventLog();
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  bool ok() const { return ring_ != nullptr; }
  void append(const BlockRecord& record);
  EventBatch drain(uint64_t max_events);
  uint64_t last_seq() const;
  uint64_t pending() const;
  uint64_t overflows() const;
  uint64_t memory_bytes() const { return capacity_ * kBlockRecordBytes; }

 private:
  void skip_lost();
  mutable std::mutex mutex_;
  std::byte* ring_ = nullptr;
  const uint64_t capacity_;
  uint64_t last_seq_ = 0;
  uint64_t next_read_ = 1;
  uint64_t overflows_ = 0;
};

}  // namespace mooncache::store

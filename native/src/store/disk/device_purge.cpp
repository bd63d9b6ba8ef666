// What a tenant has on a disk, and how it goes for good: its record is overwritten where it lies.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "store/disk/device.h"

namespace mooncache::store::disk {

namespace {

constexpr uint64_t kOverwriteBytes = 1 << 20;

bool move_all(int fd, std::byte* bytes, uint64_t size, uint64_t offset, bool write) {
  while (size > 0) {
    const auto at = static_cast<off_t>(offset);
    const ssize_t moved = write ? ::pwrite(fd, bytes, size, at) : ::pread(fd, bytes, size, at);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    bytes += moved;
    size -= static_cast<uint64_t>(moved);
    offset += static_cast<uint64_t>(moved);
  }
  return true;
}

}  // namespace

std::vector<DiskUse> Device::uses() const {
  const std::lock_guard lock(mutex_);
  return index_.uses();
}

uint64_t Device::bytes_of(TenantId tenant) const {
  const std::lock_guard lock(mutex_);
  return index_.bytes_of(tenant);
}

Result<uint64_t> Device::purge(TenantId tenant, const Key& key) {
  Location at;
  RecordHeader purged;
  purged.flags = RecordHeader::kPurged;
  purged.key = key;
  purged.tenant = tenant;
  {
    const std::lock_guard lock(mutex_);
    const uint32_t number = index_.find(tenant, key);
    if (end_handed(tenant, key) && number == kNone) want_removal(tenant, key, {});
    if (end_appended(tenant, key)) return {Code::kBackPressure, "its record is being written"};
    if (number == kNone) return uint64_t{0};
    const DiskEntry& entry = index_[number];
    if (!entry.written) return {Code::kBackPressure, "its record is being written"};
    at = DiskIndex::location_of(entry);
    purged.size = entry.size;
    purged.sequence = segments_[at.segment].sequence;
    ++segments_[at.segment].reads;  // the segment is not used again meanwhile
    forget(number);
    want_removal(tenant, key, {});
  }
  const bool done = answering() && overwrite(at, purged);
  const std::lock_guard lock(mutex_);
  --segments_[at.segment].reads;
  if (!done) return {Code::kInternal, "the disk did not take the overwrite"};
  return uint64_t{purged.size};
}

// Pages at both ends hold parts of other records, which stay. One purge at a time, so that none of them
// brings back what another one has overwritten there.
bool Device::overwrite(Location at, const RecordHeader& purged) {
  std::array<std::byte, kRecordHeaderBytes> head{};
  purged.encode(layout_.uuid, head);
  const uint64_t bytes = record_bytes(purged.size);
  const std::lock_guard lock(purge_mutex_);
  const uint64_t begin = segment_offset(at.segment) + uint64_t{at.unit} * kUnitBytes;
  const uint64_t end = begin + bytes;
  if (queue_->overwrite_elsewhere(begin, bytes, head)) return true;
  const AlignedMemory memory(kOverwriteBytes);
  for (uint64_t from = begin / kPageBytes * kPageBytes; from < end; from += kOverwriteBytes) {
    const uint64_t length = std::min(kOverwriteBytes, round_up(end, kPageBytes) - from);
    const bool whole = from >= begin && from + length <= end;
    if (!whole && !move_all(file_.fd(), memory.data(), length, from, false)) return false;
    const uint64_t first = std::max(from, begin) - from;
    std::memset(memory.data() + first, 0, std::min(from + length, end) - from - first);
    if (from <= begin) std::memcpy(memory.data() + first, head.data(), head.size());
    if (!move_all(file_.fd(), memory.data(), length, from, true)) return false;
  }
  return true;
}

bool Device::sync_purged() {
  return answering() && ::fdatasync(file_.fd()) == 0 && queue_->sync_overwritten();
}

}  // namespace mooncache::store::disk

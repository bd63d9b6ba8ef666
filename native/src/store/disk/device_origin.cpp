// Who wrote what lies on a disk. The index knows the writer; when it was written says the record alone, which
// is read where it lies.
#include <unistd.h>

#include <vector>

#include "store/disk/device.h"

namespace mooncache::store::disk {

namespace {

constexpr uint32_t kSlotsPerLock = 16'384;

}  // namespace

// Nothing: the record is not there yet, or no longer, or not on this host (device.h: a log of an object
// store).
std::optional<Origin> Device::recorded(Location at, uint64_t sequence) const {
  const uint64_t begin = segment_offset(at.segment) + uint64_t{at.unit} * kUnitBytes;
  const uint64_t page = begin / kPageBytes * kPageBytes;
  const AlignedMemory memory(2 * kPageBytes);
  const ssize_t got = ::pread(file_.fd(), memory.data(), memory.size(), static_cast<off_t>(page));
  if (got < static_cast<ssize_t>(begin - page + kRecordHeaderBytes)) return std::nullopt;
  const std::span<const std::byte> bytes(memory.data() + (begin - page), kRecordHeaderBytes);
  const auto header = RecordHeader::decode(layout_.uuid, sequence, bytes.first<kRecordHeaderBytes>());
  return header ? std::optional(header->origin) : std::nullopt;
}

std::optional<Origin> Device::origin(TenantId tenant, const Key& key) const {
  Origin origin;
  Location at;
  uint64_t sequence = 0;
  {
    const std::lock_guard lock(mutex_);
    const uint32_t number = index_.find(tenant, key);
    if (number == kNone || index_[number].hidden != 0) return std::nullopt;
    origin.writer = index_.writer_of(index_[number]);
    at = DiskIndex::location_of(index_[number]);
    sequence = segments_[at.segment].sequence;
  }
  const auto found = answering() ? recorded(at, sequence) : std::nullopt;
  if (found && found->writer == origin.writer) origin.written_s = found->written_s;
  return origin;
}

// A block whose time cannot be read counts as written in the time that is asked for: what is recalled without
// need is computed again, what is not recalled is served.
uint64_t Device::walk_writer(uint64_t cursor, uint32_t limit, const RecallRequest& request,
                             const VisitWritten& visit) const {
  struct Seen {
    TenantId tenant;
    Key key;
    uint32_t size;
    Location at;
    uint64_t sequence;
  };
  std::vector<Seen> seen;
  auto at = static_cast<uint32_t>(cursor);
  {
    const std::lock_guard lock(mutex_);
    const auto end = static_cast<uint32_t>(std::min<uint64_t>(index_.slots(), uint64_t{at} + kSlotsPerLock));
    for (; at < end && seen.size() < limit; ++at) {
      const DiskEntry& entry = index_[at];
      if (entry.size == 0 || index_.writer_of(entry) != request.writer) continue;
      const Location location = DiskIndex::location_of(entry);
      seen.push_back(
          {index_.tenant_of(entry), entry.key, entry.size, location, segments_[location.segment].sequence});
    }
    if (at >= index_.slots()) at = 0;
  }
  for (const Seen& one : seen) {
    if (!request.all_times()) {
      const auto found = answering() ? recorded(one.at, one.sequence) : std::nullopt;
      if (found && found->written_s != 0 && !request.covers(found->written_s)) continue;
    }
    visit(one.tenant, one.key, one.size);
  }
  return at;
}

}  // namespace mooncache::store::disk

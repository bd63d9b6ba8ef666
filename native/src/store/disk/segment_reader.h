// What lies in a segment, read from its footer or, where there is none, from the headers of its records. For
// the start of a device, and for those who read the log of another node.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "store/disk/file.h"
#include "store/disk/format.h"

namespace mooncache::store::disk {

// One writing of a segment.
struct SegmentPlace {
  Uuid uuid{};
  uint64_t segment_bytes = 0;
  uint64_t offset = 0;  // of the file
  uint64_t sequence = 0;
};

// Fills `to` from the file's offset on, which is a multiple of a page. False: not all of it.
using ReadAt = std::function<bool(uint64_t offset, std::span<std::byte> to)>;
using VisitRecord = std::function<void(const RecordHeader&, uint32_t unit)>;

// False: there is no whole footer of this writing, and nothing was visited. `buffer` has at least a page.
bool read_footer(const SegmentPlace& place, const AlignedMemory& buffer, const ReadAt& read,
                 const VisitRecord& visit);

// Record after record from the unit `from` on, until there is none. The unit behind the last one, where a
// later call goes on. `buffer` has at least two pages.
uint32_t walk_records(const SegmentPlace& place, uint32_t from, const AlignedMemory& buffer,
                      const ReadAt& read, const VisitRecord& visit);

inline constexpr uint32_t kFirstUnit = kPageBytes / kUnitBytes;  // of a segment's records

}  // namespace mooncache::store::disk

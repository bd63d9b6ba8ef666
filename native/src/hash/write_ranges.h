// Which ranges of a reservation were written, and with which CRC: as its node sees it, and as its writer
// does. Touching ranges are joined (their CRCs combine), so a block written in order is one range however
// many writes it took.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "mooncache/crc32c.h"
#include "mooncache/status.h"

namespace mooncache {

class WriteRanges {
 public:
  // INVALID_ARGUMENT on overlap (the ranges stay spoiled from then on), LIMIT_EXCEEDED on too many holes.
  Code note(uint64_t offset, uint64_t length, uint32_t crc, size_t max_ranges) {
    if (overlaps(offset, length)) {
      spoiled_ = true;
      return Code::kInvalidArgument;
    }
    const auto after = ranges_.begin() + (first_behind(offset) - ranges_.cbegin());
    const bool joins_before = after != ranges_.begin() && (after - 1)->offset + (after - 1)->length == offset;
    const bool joins_after = after != ranges_.end() && offset + length == after->offset;
    if (joins_before) {
      Range& before = *(after - 1);
      before.crc = crc32c_combine(before.crc, crc, length);
      before.length += length;
      if (joins_after) {
        before.crc = crc32c_combine(before.crc, after->crc, after->length);
        before.length += after->length;
        ranges_.erase(after);
      }
    } else if (joins_after) {
      after->crc = crc32c_combine(crc, after->crc, after->length);
      after->length += length;
      after->offset = offset;
    } else {
      if (ranges_.size() >= max_ranges) return Code::kLimitExceeded;
      ranges_.insert(after, Range{offset, length, crc});
    }
    return Code::kOk;
  }

  // Bytes other than the noted ones were written here: what overlaps them is no longer what was noted.
  void damage(uint64_t offset, uint64_t length) {
    if (overlaps(offset, length)) spoiled_ = true;
  }

  // `length` is not 0.
  bool overlaps(uint64_t offset, uint64_t length) const {
    const auto after = first_behind(offset);
    const bool hits_before = after != ranges_.begin() && (after - 1)->offset + (after - 1)->length > offset;
    return hits_before || (after != ranges_.end() && after->offset - offset < length);
  }

  // Bytes from the first on that were written without a gap, and their CRC.
  uint64_t leading_bytes() const { return starts_at_zero() ? ranges_[0].length : 0; }
  uint32_t leading_crc() const { return starts_at_zero() ? ranges_[0].crc : 0; }

  // OK, INCOMPLETE or CHECKSUM_MISMATCH.
  Code verify(uint64_t size, uint32_t crc) const {
    if (spoiled_ || ranges_.size() != 1 || ranges_[0].offset != 0 || ranges_[0].length != size)
      return Code::kIncomplete;
    return ranges_[0].crc == crc ? Code::kOk : Code::kChecksumMismatch;
  }

 private:
  struct Range {
    uint64_t offset;
    uint64_t length;
    uint32_t crc;
  };
  bool starts_at_zero() const { return !ranges_.empty() && ranges_[0].offset == 0; }
  std::vector<Range>::const_iterator first_behind(uint64_t offset) const {
    return std::upper_bound(ranges_.begin(), ranges_.end(), offset,
                            [](uint64_t at, const Range& range) { return at < range.offset; });
  }

  std::vector<Range> ranges_;
  bool spoiled_ = false;
};

}  // namespace mooncache

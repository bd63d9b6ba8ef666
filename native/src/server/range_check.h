// Proves a block and computes the CRC of a range of it from the same traversal of memory. The range's CRC is
// only worth something because of that: computed from bytes read a second time it would vouch for whatever
// they had become in between. A bit that flips after the traversal is seen by the receiver.
//
// The first traversal covers the whole block and yields the CRC of each chunk; with them a later one covers
// only the chunks that the range touches.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/crc32c.h"

namespace mooncache::server {

class RangeCheck {
 public:
  static constexpr uint64_t kStepBytes = 1 << 20;
  static constexpr uint64_t kChunksMax = 256;  // what a grant has to remember is 1 KiB at most

  static uint64_t chunk_bytes(uint64_t block_bytes) {
    return std::max(kStepBytes, std::bit_ceil((block_bytes + kChunksMax - 1) / kChunksMax));
  }

  RangeCheck() = default;
  // The range must lie inside the block. `known_chunks`: CRCs that chunks() of a sound traversal gave; empty
  // = none, the block must have the CRC `block_crc`.
  RangeCheck(uint64_t block_bytes, uint32_t block_crc, uint64_t offset, uint64_t length,
             std::span<const uint32_t> known_chunks)
      : block_bytes_(block_bytes),
        chunk_bytes_(chunk_bytes(block_bytes)),
        range_from_(offset),
        range_to_(offset + length),
        block_crc_(block_crc) {
    if (known_chunks.empty()) {
      end_ = block_bytes;
      return;
    }
    const uint64_t first = offset / chunk_bytes_;
    const uint64_t behind = length == 0 ? first : (range_to_ - 1) / chunk_bytes_ + 1;
    at_ = first * chunk_bytes_;
    end_ = std::min(block_bytes, behind * chunk_bytes_);
    known_.assign(known_chunks.begin() + static_cast<ptrdiff_t>(first),
                  known_chunks.begin() + static_cast<ptrdiff_t>(behind));
    by_chunk_ = true;
  }

  // Goes on for at most about `budget` bytes, which are taken off it. False: not finished.
  bool advance(ConstSlice block, uint64_t& budget) {
    return advance(
        [&](uint64_t offset, uint64_t length) {
          return ConstSlice{block.data + offset, static_cast<size_t>(length)};
        },
        budget);
  }
  // `bytes_at(offset, length)`: that part of the block, kStepBytes at most, valid until the next call; empty
  // when it cannot be read, and the block is not sound then.
  template <typename BytesAt>
  bool advance(const BytesAt& bytes_at, uint64_t& budget) {
    while (at_ < end_) {
      if (budget == 0) return false;
      const uint64_t chunk_end = std::min(block_bytes_, (at_ / chunk_bytes_ + 1) * chunk_bytes_);
      const bool inside = at_ >= range_from_ && at_ < range_to_;
      uint64_t to = std::min(chunk_end, at_ + kStepBytes);
      if (at_ < range_from_) to = std::min(to, range_from_);
      if (inside) to = std::min(to, range_to_);
      const uint64_t step = to - at_;
      const ConstSlice bytes = bytes_at(at_, step);
      if (bytes.size != step) {
        unreadable_ = true;
        at_ = end_;
        return true;
      }
      const uint32_t crc = crc32c({bytes.data, bytes.size});
      chunk_crc_ = chunk_have_ == 0 ? crc : crc32c_combine(chunk_crc_, crc, step);
      chunk_have_ += step;
      if (inside) range_crc_ = at_ == range_from_ ? crc : crc32c_combine(range_crc_, crc, step);
      at_ = to;
      budget -= std::min(budget, step);
      if (at_ == chunk_end) end_chunk();
    }
    return true;
  }

  // After advance() was true.
  bool sound() const { return !unreadable_ && (by_chunk_ ? intact_ : whole_crc_ == block_crc_); }
  bool unreadable() const { return unreadable_; }
  uint32_t range_crc() const { return range_crc_; }
  // Of a sound traversal of the whole block that has more than one chunk; else empty.
  std::vector<uint32_t> take_chunks() {
    if (by_chunk_ || chunks_.size() < 2) return {};
    return std::move(chunks_);
  }

 private:
  void end_chunk() {
    if (by_chunk_) {
      intact_ = intact_ && known_[seen_++] == chunk_crc_;
    } else {
      whole_crc_ = crc32c_combine(whole_crc_, chunk_crc_, chunk_have_);
      if (block_bytes_ > chunk_bytes_) chunks_.push_back(chunk_crc_);
    }
    chunk_crc_ = 0;
    chunk_have_ = 0;
  }

  uint64_t block_bytes_ = 0, chunk_bytes_ = kStepBytes;
  uint64_t range_from_ = 0, range_to_ = 0;
  uint64_t at_ = 0, end_ = 0;
  uint64_t chunk_have_ = 0;
  uint32_t block_crc_ = 0, whole_crc_ = 0, range_crc_ = 0, chunk_crc_ = 0;
  bool by_chunk_ = false, intact_ = true, unreadable_ = false;
  size_t seen_ = 0;
  std::vector<uint32_t> known_, chunks_;
};

}  // namespace mooncache::server

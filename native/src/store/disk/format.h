// What lies on the disk, and how bytes from it become numbers. All of it is hostile: a disk returns what was
// torn, spliced, or written by another program.
//
//   page 0, page 1     superblock, twice
//   from kDataOffset   segments of one size
//   a segment          header page | records | footer (at the end: one page, before it the entries)
//   a record           header of 128 bytes | payload; starts at a multiple of kUnitBytes
//
// The payload of a record may be encrypted (cipher.h). Then its CRC is, too, and the header has what reading
// takes: which of the tenant's keys, the nonce, and the tag, which covers the whole header.
//
// Each writing of a segment has a sequence number of its own, which every record and the footer repeat: what
// an earlier writing left behind is never taken for the present one. A later record of a key replaces an
// earlier one; a removal is a record too. Segments are used again in the order in which they were written, so
// a removal is overwritten only after every record that it removes.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "mooncache/types.h"
#include "store/disk/cipher.h"
#include "store/disk/end_of_life.h"
#include "store/disk/io_queue.h"

namespace mooncache::store::disk {

inline constexpr uint32_t kFormatVersion = 1;
inline constexpr uint64_t kUnitBytes = 64;
inline constexpr uint64_t kRecordHeaderBytes = 128;
inline constexpr uint64_t kFooterEntryBytes = 64;
inline constexpr uint64_t kDataOffset = 64 << 10;
inline constexpr uint64_t kMinSegmentBytes = 256 << 10;
inline constexpr uint64_t kMaxSegmentBytes = 256 << 20;
inline constexpr uint32_t kMaxSegments = 65'535;
inline constexpr size_t kMaxNodeIdBytes = 128;

using Page = std::span<std::byte, kPageBytes>;
using ConstPage = std::span<const std::byte, kPageBytes>;
using Uuid = std::array<std::byte, 16>;

inline uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}
inline uint64_t record_bytes(uint64_t size) {
  return round_up(kRecordHeaderBytes + size, kUnitBytes);
}

// Enough of them that giving one up costs little.
inline uint64_t segment_bytes_for(uint64_t capacity_bytes) {
  return std::clamp<uint64_t>(std::bit_floor(capacity_bytes / 32), kMinSegmentBytes, kMaxSegmentBytes);
}

struct Superblock {
  Uuid uuid{};
  uint64_t segment_bytes = 0;
  uint32_t segments = 0;
  std::string node_id;
  void encode(Page out) const;
  // NOT_FOUND: nothing but zeros, so nothing is lost by writing here. VERSION_SKEW: of another version.
  // CHECKSUM_MISMATCH: one of ours, damaged. PROTOCOL_ERROR: something else lies here.
  static Result<Superblock> decode(ConstPage in);
};

// A segment's first page.
struct SegmentHeader {
  uint64_t sequence = 0;
  void encode(const Uuid& uuid, Page out) const;
  static Result<SegmentHeader> decode(const Uuid& uuid, ConstPage in);
};

struct RecordHeader {
  static constexpr uint32_t kRemoval = 1, kEncrypted = 2;
  // In the place of a record that was purged: its payload is zeros. Nothing is served from it, and those who
  // walk from record to record find the next one.
  static constexpr uint32_t kPurged = 4;
  // Above these: when the block ends (end_of_life.h); 0 = it has no end.
  static constexpr uint32_t kEndShift = 32 - kEndBits;
  uint32_t flags = 0;
  uint64_t sequence = 0;  // of its segment's writing
  Key key;
  TenantId tenant = 0;
  uint32_t size = 0;
  uint32_t crc32c = 0;  // of the payload; encrypted as the payload is
  // Who wrote the block. Zeros where former versions wrote it, which also read past it. In a footer the time
  // is in minutes. The header of an encrypted record has no room for it: there the footer alone says it.
  Origin origin{};
  // Of an encrypted payload.
  uint32_t key_id = 0;
  Nonce nonce{};
  Tag tag{};
  bool removal() const { return (flags & kRemoval) != 0; }
  bool encrypted() const { return (flags & kEncrypted) != 0; }
  uint32_t end() const { return flags >> kEndShift; }
  void set_end(uint32_t end) { flags = (flags & ~(kMaxEnd << kEndShift)) | end << kEndShift; }
  // Purged, or of a kind that this version does not know: nothing is served from it, as from a removal.
  bool foreign() const {
    const uint32_t kind = flags & ((1u << kEndShift) - 1);
    return (kind & ~(kRemoval | kEncrypted)) != 0 || (removal() && flags != kRemoval);
  }
  // All of the header but what is encrypted, and the tag: what the tag covers beside the payload.
  static constexpr size_t kAssociatedBytes = 104;
  std::array<std::byte, kAssociatedBytes> associated(const Uuid& uuid) const;
  void encode(const Uuid& uuid, std::span<std::byte, kRecordHeaderBytes> out) const;
  // Any difference, also of the sequence number: nothing that may be used.
  static Result<RecordHeader> decode(const Uuid& uuid, uint64_t sequence,
                                     std::span<const std::byte, kRecordHeaderBytes> in);
};

// A record as the footer of its segment names it.
struct FooterEntry {
  RecordHeader header;
  uint32_t unit = 0;  // where the record starts in the segment
  // `writers`: of the segment's trailer.
  void encode(std::span<std::byte, kFooterEntryBytes> out, std::span<const uint64_t> writers = {}) const;
  static FooterEntry decode(std::span<const std::byte, kFooterEntryBytes> in,
                            std::span<const uint64_t> writers = {});
};
inline constexpr size_t kFooterWriters = 255;

// A segment's last page.
struct FooterTrailer {
  uint64_t sequence = 0;
  uint32_t count = 0;
  uint32_t entries_crc32c = 0;    // of whole entries: as former versions write it and compare it
  uint32_t entries_checksum = 0;  // 0: a former version wrote it
  std::vector<uint64_t> writers;  // kFooterWriters at most; entries name them by their place, from 1
  void cover(std::span<const std::byte> entries);
  bool covers(std::span<const std::byte> entries) const;
  void encode(const Uuid& uuid, Page out) const;
  // `segment_bytes` bounds the count, before anything is read or allocated for it.
  static Result<FooterTrailer> decode(const Uuid& uuid, uint64_t segment_bytes, ConstPage in);
  // What entries_checksum is, never 0: of whole entries, without the CRC at the end of each.
  static uint32_t checksum(std::span<const std::byte> entries);
  static uint64_t entries_bytes(uint64_t count) { return round_up(count * kFooterEntryBytes, kPageBytes); }
};

// Whether a record of this size at this place lies inside its segment.
bool fits(uint64_t segment_bytes, uint64_t unit, uint64_t size);

}  // namespace mooncache::store::disk

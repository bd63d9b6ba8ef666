#include "store/disk/segment_reader.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace mooncache::store::disk {

bool read_footer(const SegmentPlace& place, const AlignedMemory& buffer, const ReadAt& read,
                 const VisitRecord& visit) {
  const uint64_t end = place.offset + place.segment_bytes - kPageBytes;
  if (!read(end, {buffer.data(), kPageBytes})) return false;
  const auto trailer =
      FooterTrailer::decode(place.uuid, place.segment_bytes, ConstPage(buffer.data(), kPageBytes));
  if (!trailer || trailer->sequence != place.sequence) return false;
  const uint64_t bytes = FooterTrailer::entries_bytes(trailer->count);
  if (bytes == 0) return true;
  std::vector<std::byte> memory(bytes);
  for (uint64_t at = 0; at < bytes;) {
    const uint64_t piece = std::min<uint64_t>(bytes - at, buffer.size());
    if (!read(end - bytes + at, {buffer.data(), piece})) return false;
    std::memcpy(memory.data() + at, buffer.data(), piece);
    at += piece;
  }
  const auto entries = std::span<const std::byte>(memory).first(trailer->count * kFooterEntryBytes);
  if (!trailer->covers(entries)) return false;
  for (uint32_t at = 0; at < trailer->count; ++at) {
    const auto entry = FooterEntry::decode(entries.subspan(at * kFooterEntryBytes).first<kFooterEntryBytes>(),
                                           trailer->writers);
    visit(entry.header, entry.unit);
  }
  return true;
}

// Behind the last record of a write comes what pads it to a page, then the next write.
uint32_t walk_records(const SegmentPlace& place, uint32_t from, const AlignedMemory& buffer,
                      const ReadAt& read, const VisitRecord& visit) {
  uint64_t at = uint64_t{from} * kUnitBytes;
  uint64_t behind = at;
  uint64_t window = ~uint64_t{0}, window_bytes = 0;  // in the segment, of what lies in the buffer
  while (at + kRecordHeaderBytes + kPageBytes <= place.segment_bytes) {
    if (window == ~uint64_t{0} || at < window || at + kRecordHeaderBytes > window + window_bytes) {
      window = at / kPageBytes * kPageBytes;
      window_bytes = std::min<uint64_t>(buffer.size(), place.segment_bytes - window);
      if (!read(place.offset + window, {buffer.data(), window_bytes})) break;
    }
    const std::span<const std::byte> bytes(buffer.data() + (at - window), kRecordHeaderBytes);
    const auto header = RecordHeader::decode(place.uuid, place.sequence, bytes.first<kRecordHeaderBytes>());
    if (header && fits(place.segment_bytes, at / kUnitBytes, header->size)) {
      visit(*header, static_cast<uint32_t>(at / kUnitBytes));
      at += record_bytes(header->size);
      behind = at;
      continue;
    }
    if (at % kPageBytes == 0) break;
    at = round_up(at, kPageBytes);
  }
  return static_cast<uint32_t>(behind / kUnitBytes);
}

}  // namespace mooncache::store::disk

#include "store/disk/format.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "mooncache/crc32c.h"

namespace mooncache::store::disk {

namespace {

constexpr uint64_t kMagic = 0x0a4453534e4f4f4dull;                            // "MOONSSD\n"
constexpr size_t kOriginOffset = kRecordHeaderBytes - sizeof(uint32_t) - 12;  // before the CRC
constexpr size_t kChecksumOffset = kPageBytes - 2 * sizeof(uint32_t);         // before the CRC
constexpr std::array<std::byte, kPageBytes> kZeros{};
constexpr uint32_t kSegmentMagic = 0x47455343, kRecordMagic = 0x43455243, kFooterMagic = 0x544f4643;

// Zeros behind what was written, then the CRC of all before it in the last four bytes.
void finish(Writer& writer, std::span<std::byte> out) {
  const auto body = writer.view();
  std::fill(std::copy(body.begin(), body.end(), out.begin()), out.end(), std::byte{0});
  const uint32_t crc = crc32c(out.first(out.size() - sizeof(uint32_t)));
  std::memcpy(out.data() + out.size() - sizeof crc, &crc, sizeof crc);
}

bool intact(std::span<const std::byte> in) {
  uint32_t crc = 0;
  std::memcpy(&crc, in.data() + in.size() - sizeof crc, sizeof crc);
  return crc == crc32c(in.first(in.size() - sizeof crc));
}

template <typename Bytes>
Bytes take_array(Reader& reader) {
  Bytes out{};
  const auto bytes = reader.take(out.size());
  if (bytes.size() == out.size()) std::copy(bytes.begin(), bytes.end(), out.begin());
  return out;
}

Uuid take_uuid(Reader& reader) {
  return take_array<Uuid>(reader);
}

Status damaged(const char* what) {
  return {Code::kChecksumMismatch, what};
}

}  // namespace

bool fits(uint64_t segment_bytes, uint64_t unit, uint64_t size) {
  const uint64_t begin = unit * kUnitBytes;
  const uint64_t end = segment_bytes - kPageBytes;  // the trailer's page
  return begin >= kPageBytes && begin < end && record_bytes(size) <= end - begin;
}

void Superblock::encode(Page out) const {
  Writer writer(kPageBytes);
  writer.u64(kMagic);
  writer.u32(kFormatVersion);
  writer.raw(uuid);
  writer.u64(segment_bytes);
  writer.u32(segments);
  writer.str16(node_id);
  finish(writer, out);
}

Result<Superblock> Superblock::decode(ConstPage in) {
  Reader reader(in);
  const uint64_t magic = reader.u64();
  const uint32_t version = reader.u32();
  if (magic != kMagic) {
    const bool empty = std::all_of(in.begin(), in.end(), [](std::byte byte) { return byte == std::byte{0}; });
    return empty ? Status{Code::kNotFound, "empty"}
                 : Status{Code::kProtocolError, "it holds something else than blocks"};
  }
  // Each version has the checksum in this place, so one bad bit makes no newer version.
  if (version != kFormatVersion && !intact(in))
    return {Code::kProtocolError, "it has another format, or its superblock is damaged"};
  if (version != kFormatVersion)
    return {Code::kVersionSkew, "it has format " + std::to_string(version) + ", this version writes format " +
                                    std::to_string(kFormatVersion)};
  if (!intact(in)) return damaged("its superblock is damaged");
  Superblock found;
  found.uuid = take_uuid(reader);
  found.segment_bytes = reader.u64();
  found.segments = reader.u32();
  found.node_id = reader.str16();
  const bool sane = found.segment_bytes >= kMinSegmentBytes && found.segment_bytes <= kMaxSegmentBytes &&
                    found.segment_bytes % kPageBytes == 0 && found.segments > 0 &&
                    found.segments <= kMaxSegments && found.node_id.size() <= kMaxNodeIdBytes;
  if (!reader.ok() || !sane) return damaged("its superblock makes no sense");
  return found;
}

void SegmentHeader::encode(const Uuid& uuid, Page out) const {
  Writer writer(kPageBytes);
  writer.u32(kSegmentMagic);
  writer.raw(uuid);
  writer.u64(sequence);
  finish(writer, out);
}

Result<SegmentHeader> SegmentHeader::decode(const Uuid& uuid, ConstPage in) {
  Reader reader(in);
  if (reader.u32() != kSegmentMagic || take_uuid(reader) != uuid) return {Code::kNotFound, "not in use"};
  if (!intact(in)) return damaged("a segment's header is damaged");
  return SegmentHeader{reader.u64()};
}

std::array<std::byte, RecordHeader::kAssociatedBytes> RecordHeader::associated(const Uuid& uuid) const {
  Writer writer(kAssociatedBytes);
  writer.u32(kRecordMagic);
  writer.u32(flags);
  writer.raw(uuid);
  writer.u64(sequence);
  writer.key(key);
  writer.u64(tenant);
  writer.u32(size);
  writer.u32(key_id);
  writer.raw(nonce);
  std::array<std::byte, kAssociatedBytes> out{};
  std::copy_n(writer.view().begin(), out.size(), out.begin());
  return out;
}

void RecordHeader::encode(const Uuid& uuid, std::span<std::byte, kRecordHeaderBytes> out) const {
  Writer writer(kRecordHeaderBytes);
  writer.u32(kRecordMagic);
  writer.u32(flags);
  writer.raw(uuid);
  writer.u64(sequence);
  writer.key(key);
  writer.u64(tenant);
  writer.u32(size);
  writer.u32(crc32c);
  if (encrypted()) {
    writer.u32(key_id);
    writer.raw(nonce);
    writer.raw(tag);
  }
  if (!encrypted() && origin.writer != 0) {
    writer.raw(std::span(kZeros).first(kOriginOffset - writer.view().size()));
    writer.u64(origin.writer);
    writer.u32(origin.written_s);
  }
  finish(writer, out);
}

Result<RecordHeader> RecordHeader::decode(const Uuid& uuid, uint64_t sequence,
                                          std::span<const std::byte, kRecordHeaderBytes> in) {
  Reader reader(in);
  if (reader.u32() != kRecordMagic || !intact(in)) return damaged("a record's header is damaged");
  RecordHeader header;
  header.flags = reader.u32();
  const bool ours = take_uuid(reader) == uuid;
  header.sequence = reader.u64();
  header.key = reader.key();
  header.tenant = reader.u64();
  header.size = reader.u32();
  header.crc32c = reader.u32();
  if (header.encrypted()) {
    header.key_id = reader.u32();
    header.nonce = take_array<Nonce>(reader);
    header.tag = take_array<Tag>(reader);
  } else {
    Reader origin(in.subspan<kOriginOffset, 12>());
    header.origin.writer = origin.u64();
    if (header.origin.writer != 0) header.origin.written_s = origin.u32();
  }
  if (!ours || header.sequence != sequence) return {Code::kGenerationChanged, "a record of an earlier time"};
  if (header.removal() != (header.size == 0)) return damaged("a record's header makes no sense");
  return header;
}

void FooterEntry::encode(std::span<std::byte, kFooterEntryBytes> out,
                         std::span<const uint64_t> writers) const {
  Writer writer(kFooterEntryBytes);
  writer.key(header.key);
  writer.u64(header.tenant);
  writer.u32(header.size);
  writer.u32(header.crc32c);
  writer.u32(header.flags);
  writer.u32(unit);
  const auto known = std::find(writers.begin(), writers.end(), header.origin.writer);
  const auto place = known == writers.end() ? 0u : static_cast<uint32_t>(known - writers.begin()) + 1;
  writer.u32(place == 0 ? 0 : place << kEndBits | std::min(header.origin.written_s / 60, kMaxEnd));
  finish(writer, out);
}

FooterEntry FooterEntry::decode(std::span<const std::byte, kFooterEntryBytes> in,
                                std::span<const uint64_t> writers) {
  Reader reader(in);
  FooterEntry entry;
  entry.header.key = reader.key();
  entry.header.tenant = reader.u64();
  entry.header.size = reader.u32();
  entry.header.crc32c = reader.u32();
  entry.header.flags = reader.u32();
  entry.unit = reader.u32();
  const uint32_t origin = reader.u32();
  const uint32_t place = origin >> kEndBits;
  if (place != 0 && place <= writers.size())
    entry.header.origin = {writers[place - 1], (origin & kMaxEnd) * 60};
  return entry;
}

// A CRC of what ends with its own CRC is the same for all contents: it would tell numbers of entries apart,
// and not the entries of an earlier writing from those of this one.
uint32_t FooterTrailer::checksum(std::span<const std::byte> entries) {
  uint32_t crc = 0;
  for (size_t at = 0; at < entries.size(); at += kFooterEntryBytes)
    crc = crc32c(entries.subspan(at, kFooterEntryBytes - sizeof(uint32_t)), crc);
  return std::max(crc, 1u);
}

void FooterTrailer::cover(std::span<const std::byte> entries) {
  entries_crc32c = crc32c(entries);
  entries_checksum = checksum(entries);
}

bool FooterTrailer::covers(std::span<const std::byte> entries) const {
  return entries_crc32c == crc32c(entries) &&
         (entries_checksum == 0 || entries_checksum == checksum(entries));
}

void FooterTrailer::encode(const Uuid& uuid, Page out) const {
  Writer writer(kPageBytes);
  writer.u32(kFooterMagic);
  writer.raw(uuid);
  writer.u64(sequence);
  writer.u32(count);
  writer.u32(entries_crc32c);
  writer.u32(static_cast<uint32_t>(writers.size()));
  for (const uint64_t id : writers) writer.u64(id);
  writer.raw(std::span(kZeros).first(kChecksumOffset - writer.view().size()));
  writer.u32(entries_checksum);
  finish(writer, out);
}

Result<FooterTrailer> FooterTrailer::decode(const Uuid& uuid, uint64_t segment_bytes, ConstPage in) {
  Reader reader(in);
  if (reader.u32() != kFooterMagic || take_uuid(reader) != uuid || !intact(in))
    return damaged("a segment has no footer");
  FooterTrailer trailer;
  trailer.sequence = reader.u64();
  trailer.count = reader.u32();
  trailer.entries_crc32c = reader.u32();
  const uint32_t writers = reader.u32();
  if (writers > kFooterWriters) return damaged("a footer names too many writers");
  for (uint32_t at = 0; at < writers; ++at) trailer.writers.push_back(reader.u64());
  trailer.entries_checksum = Reader(in.subspan<kChecksumOffset, sizeof(uint32_t)>()).u32();
  if (entries_bytes(trailer.count) + 2 * kPageBytes > segment_bytes)
    return damaged("a footer is larger than its segment");
  return trailer;
}

}  // namespace mooncache::store::disk

// Fuzzes what is read from a disk of the SSD tier: superblock, segment header, record header, footer. The
// first byte says which. What is accepted lies inside its segment, and encodes to bytes that are accepted
// again.
//
//   fuzz_disk native/fuzz/fuzz_disk_corpus
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "mooncache/crc32c.h"
#include "store/disk/format.h"

namespace {

using namespace mooncache;
using namespace mooncache::store::disk;

constexpr uint64_t kSegmentBytes = 1 << 20;

void demand(bool holds) {
  if (!holds) std::abort();
}

void superblock(ConstPage page) {
  const auto found = Superblock::decode(page);
  if (!found) return;
  std::vector<std::byte> again(kPageBytes);
  found->encode(Page(again.data(), kPageBytes));
  const auto second = Superblock::decode(ConstPage(again.data(), kPageBytes));
  demand(second.is_ok() && second->node_id == found->node_id && second->segments == found->segments);
  demand(found->segment_bytes <= kMaxSegmentBytes && found->segments <= kMaxSegments);
}

void record(std::span<const std::byte, kRecordHeaderBytes> bytes, const Uuid& uuid, uint64_t sequence) {
  const auto found = RecordHeader::decode(uuid, sequence, bytes);
  if (!found) return;
  demand(found->sequence == sequence && found->removal() == (found->size == 0));
  demand(found->end() <= kMaxEnd && (found->foreign() || !found->removal() || found->end() == 0));
  RecordHeader other = *found;
  other.set_end(kMaxEnd - found->end());
  demand(other.removal() == found->removal() && other.encrypted() == found->encrypted());
  other.set_end(found->end());
  demand(other.flags == found->flags);
  std::array<std::byte, kRecordHeaderBytes> again{};
  found->encode(uuid, again);
  const auto second = RecordHeader::decode(uuid, sequence, again);
  demand(second.is_ok() && second->flags == found->flags && second->size == found->size);
  const auto entry = FooterEntry::decode(bytes.first<kFooterEntryBytes>());
  if (fits(kSegmentBytes, entry.unit, entry.header.size))
    demand(entry.unit * kUnitBytes + record_bytes(entry.header.size) <= kSegmentBytes);
}

void footer(ConstPage page, const Uuid& uuid) {
  const auto found = FooterTrailer::decode(uuid, kSegmentBytes, page);
  if (found) demand(FooterTrailer::entries_bytes(found->count) < kSegmentBytes);
}

// Puts the checksum right, or nothing but refusals would be tried.
void seal(std::span<std::byte> bytes) {
  const uint32_t crc = crc32c(bytes.first(bytes.size() - sizeof(uint32_t)));
  std::copy_n(std::as_bytes(std::span(&crc, 1)).begin(), sizeof crc, bytes.end() - sizeof crc);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::vector<std::byte> page(kPageBytes);
  std::transform(data + 1, data + std::min(size, kPageBytes + 1), page.begin(),
                 [](uint8_t value) { return std::byte{value}; });
  const bool is_record = data[0] % 4 == 2;
  if ((data[0] & 0x80) != 0) seal(std::span(page).first(is_record ? kRecordHeaderBytes : kPageBytes));
  Uuid uuid{};
  const size_t uuid_at = data[0] % 4 == 0 ? 12 : is_record ? 8 : 4;
  std::copy_n(page.begin() + static_cast<std::ptrdiff_t>(uuid_at), uuid.size(), uuid.begin());
  const ConstPage whole(page.data(), kPageBytes);
  switch (data[0] % 4) {
    case 0:
      superblock(whole);
      break;
    case 1:
      (void)SegmentHeader::decode(uuid, whole);
      break;
    case 2: {
      uint64_t sequence = 0;
      std::copy_n(page.begin() + 24, sizeof sequence,
                  std::as_writable_bytes(std::span(&sequence, 1)).begin());
      record(whole.first<kRecordHeaderBytes>(), uuid, sequence);
      break;
    }
    default:
      footer(whole, uuid);
  }
  return 0;
}

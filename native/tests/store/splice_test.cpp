// A disk that gives back what lies elsewhere on it, or lay there earlier: records, sectors and segments of a
// plain file in each other's places. All of it has right checksums. Each read is a miss or the right bytes.
#include "store/disk/format.h"
#include "store/disk_fixture.h"
#include "store/fault_seed.h"

namespace mooncache::test {
namespace {

using store::disk::kDataOffset;
using store::disk::kRecordHeaderBytes;
using store::disk::kUnitBytes;
using store::disk::record_bytes;
using store::disk::RecordHeader;
using store::disk::SegmentHeader;
using store::disk::Superblock;

// DiskFaults*: with many seeds in `make soak`.
class DiskFaultsSplice : public DiskTest {
 protected:
  static constexpr uint64_t kBlocks = 100;
  static constexpr size_t kSize = 20'000;  // of all: what is exchanged fits
  static constexpr uint64_t kSegment = 512 << 10, kSector = 512, kPage = 4096;
  using Bytes = std::vector<std::byte>;

  void write(uint64_t from, uint64_t count) {
    ASSERT_TRUE(open());
    for (uint64_t i = from; i < from + count; ++i) memory_->offer(i, kSize);
    ASSERT_TRUE(memory_->wait_written(count));
    device_.reset();
  }
  Bytes load() {
    std::ifstream in(file(), std::ios::binary);
    Bytes bytes(std::filesystem::file_size(file()));
    in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return bytes;
  }
  void store(const Bytes& bytes) {
    std::ofstream(file(), std::ios::binary | std::ios::in)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
  static std::span<const std::byte, kPage> page(const Bytes& bytes, uint64_t at) {
    return std::span<const std::byte, kPage>(bytes.data() + at, kPage);
  }
  // Where the records begin that count.
  static std::vector<uint64_t> records(const Bytes& bytes) {
    std::vector<uint64_t> found;
    const auto superblock = Superblock::decode(page(bytes, 0));
    for (uint64_t at = kDataOffset; superblock && at + kSegment <= bytes.size(); at += kSegment) {
      const auto segment = SegmentHeader::decode(superblock->uuid, page(bytes, at));
      for (uint64_t in = at + kPage; segment && in + kPage < at + kSegment; in += kUnitBytes) {
        const std::span<const std::byte, kRecordHeaderBytes> head(bytes.data() + in, kRecordHeaderBytes);
        if (RecordHeader::decode(superblock->uuid, segment->sequence, head)) found.push_back(in);
      }
    }
    return found;
  }
  static void exchange(Bytes& bytes, uint64_t a, uint64_t b, uint64_t size) {
    if (a > b) std::swap(a, b);
    if (a + size > b || b + size > bytes.size()) return;
    std::swap_ranges(bytes.begin() + static_cast<ptrdiff_t>(a),
                     bytes.begin() + static_cast<ptrdiff_t>(a + size),
                     bytes.begin() + static_cast<ptrdiff_t>(b));
  }
  // Blocks that came; each of them right.
  uint64_t read_all() {
    uint64_t came = 0;
    EXPECT_EQ(open().message, "");
    for (uint64_t i = 0; i < kBlocks; ++i) came += read(i, kSize) ? 1 : 0;
    EXPECT_EQ(memory_->open_reservations(), 0u);
    device_.reset();
    return came;
  }
};

TEST_F(DiskFaultsSplice, RecordsInEachOthersPlaces) {
  write(0, kBlocks);
  const Bytes sound = load();
  const auto places = records(sound);
  ASSERT_EQ(places.size(), kBlocks);
  std::mt19937_64 random(fault_seed());
  for (const bool headers_too : {true, false}) {
    SCOPED_TRACE("seed " + std::to_string(fault_seed()) + (headers_too ? ", records" : ", payloads"));
    Bytes bytes = sound;
    auto order = places;
    std::shuffle(order.begin(), order.end(), random);
    const uint64_t skip = headers_too ? 0 : kRecordHeaderBytes;
    for (size_t i = 0; i + 1 < kBlocks / 2; i += 2)
      exchange(bytes, order[i] + skip, order[i + 1] + skip, record_bytes(kSize) - skip);
    store(bytes);
    EXPECT_EQ(read_all(), kBlocks - kBlocks / 2) << "those that were not moved, and no other";
  }
}

TEST_F(DiskFaultsSplice, SectorsAndPagesInEachOthersPlaces) {
  write(0, kBlocks);
  const Bytes sound = load();
  const uint64_t data = kBlocks * record_bytes(kSize);
  std::mt19937_64 random(fault_seed());
  for (int round = 0; round < 6; ++round) {
    SCOPED_TRACE("seed " + std::to_string(fault_seed()) + ", round " + std::to_string(round));
    Bytes bytes = sound;
    const uint64_t unit = round % 2 == 0 ? kSector : kPage;
    for (int i = 0; i < 20; ++i) {
      const uint64_t a = kDataOffset + random() % (data / unit) * unit;
      exchange(bytes, a, kDataOffset + random() % (data / unit) * unit, unit);
    }
    store(bytes);
    EXPECT_LT(read_all(), kBlocks);
  }
}

TEST_F(DiskFaultsSplice, SegmentsInEachOthersPlacesOrTwice) {
  write(0, kBlocks);
  const Bytes sound = load();
  Bytes bytes = sound;
  exchange(bytes, kDataOffset, kDataOffset + kSegment, kSegment);
  store(bytes);
  EXPECT_EQ(read_all(), kBlocks) << "a segment says itself what it is";
  bytes = sound;
  std::copy_n(bytes.begin() + kDataOffset, kSegment, bytes.begin() + kDataOffset + kSegment);
  store(bytes);
  EXPECT_LT(read_all(), kBlocks);
  // The header and the footer of one around the records of the other.
  bytes = sound;
  exchange(bytes, kDataOffset + kPage, kDataOffset + kSegment + kPage, kSegment - 2 * kPage);
  store(bytes);
  EXPECT_LT(read_all(), kBlocks);
}

// A disk loses writes and gives back what a place had before: a segment as a whole, or parts of it, which
// carry the number of an earlier writing.
TEST_F(DiskFaultsSplice, AnOlderCopyOfASegment) {
  write(0, kBlocks);
  const Bytes older = load();
  for (uint64_t from = 1000; from < 1400; from += kBlocks) write(from, kBlocks);  // once over
  write(0, kBlocks / 2);
  const Bytes newer = load();
  std::mt19937_64 random(fault_seed());
  for (int round = 0; round < 8; ++round) {
    SCOPED_TRACE("seed " + std::to_string(fault_seed()) + ", round " + std::to_string(round));
    Bytes bytes = newer;
    for (uint64_t at = kDataOffset; at + kSegment <= bytes.size(); at += kSegment) {
      const uint64_t fate = random() % 3;  // as it is, the older one, or a mixture of both
      for (uint64_t in = at; in < at + kSegment; in += kSector) {
        if (fate == 0 || (fate == 2 && random() % 8 != 0)) continue;
        std::copy_n(older.begin() + static_cast<ptrdiff_t>(in), kSector,
                    bytes.begin() + static_cast<ptrdiff_t>(in));
      }
    }
    store(bytes);
    (void)read_all();
  }
}

}  // namespace
}  // namespace mooncache::test

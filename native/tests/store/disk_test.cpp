// One disk with nothing wrong: blocks go down and come up, through restarts, in a bounded file.
#include "store/disk/benchmark.h"
#include "store/disk/segment_reader.h"
#include "store/disk/tier.h"
#include "store/disk_fixture.h"

namespace mooncache::test {
namespace {

using store::disk::AlignedMemory;
using store::disk::DiskIndex;
using store::disk::FooterEntry;
using store::disk::FooterTrailer;
using store::disk::kFirstUnit;
using store::disk::kFooterEntryBytes;
using store::disk::kPageBytes;
using store::disk::RecordHeader;
using store::disk::SegmentPlace;

TEST_F(DiskTest, BlocksOfAllSizesComeBack) {
  ASSERT_TRUE(open());
  const size_t sizes[] = {1, 63, 64, 3968, 4096, 65'536, 100'001, 400'000};
  for (size_t i = 0; i < std::size(sizes); ++i) memory_->offer(i, sizes[i]);
  ASSERT_TRUE(memory_->wait_written(std::size(sizes)));
  for (size_t i = 0; i < std::size(sizes); ++i) {
    EXPECT_TRUE(read(i, sizes[i])) << sizes[i];
    EXPECT_EQ(device_->find(kTenant, key_of(i))->size, sizes[i]);
  }
  EXPECT_FALSE(device_->find(kTenant + 1, key_of(0))) << "another tenant's block";
  EXPECT_FALSE(read(77, 1));
  EXPECT_EQ(device_->stats().reads, std::size(sizes));
  EXPECT_EQ(memory_->open_reservations(), 0u);
}

TEST_F(DiskTest, ThreadsServeWhereUringIsRefused) {
  auto with = options();
  with.allow_uring = false;
  ASSERT_TRUE(open(with));
  for (uint64_t i = 0; i < 20; ++i) memory_->offer(i, 30'000);
  ASSERT_TRUE(memory_->wait_written(20));
  for (uint64_t i = 0; i < 20; ++i) EXPECT_TRUE(read(i, 30'000));
}

TEST_F(DiskTest, AnOrderlyEndAndAStartKeepAll) {
  ASSERT_TRUE(open());
  for (uint64_t i = 0; i < 40; ++i) memory_->offer(i, 20'000);
  ASSERT_TRUE(memory_->wait_written(40));
  EXPECT_TRUE(remove(3));
  ASSERT_TRUE(open());
  EXPECT_EQ(device_->stats().recovered, 39u);
  for (uint64_t i = 0; i < 40; ++i) EXPECT_EQ(read(i, 20'000), i != 3) << i;
}

// Several readers of one block share its read.
TEST_F(DiskTest, ManyAskForOneBlock) {
  ASSERT_TRUE(open());
  memory_->offer(1, 200'000);
  ASSERT_TRUE(memory_->wait_written(1));
  std::atomic<int> ends{0};
  for (int i = 0; i < 50; ++i) EXPECT_TRUE(device_->fetch(kTenant, key_of(1), [&] { ++ends; }));
  EXPECT_TRUE(memory_->wait_for([&] { return true; }));
  device_->close();
  EXPECT_EQ(ends, 50);
}

TEST_F(DiskTest, TheFileNeverGrowsAndTheOldestGoFirst) {
  ASSERT_TRUE(open());
  const uint64_t size = std::filesystem::file_size(file());
  EXPECT_LE(size, 8 * kMiB);
  constexpr uint64_t kBlocks = 400;  // 40 MB
  for (uint64_t i = 0; i < kBlocks; ++i) {
    memory_->offer(i, 100'000);
    if (i % 20 != 19) continue;
    ASSERT_TRUE(memory_->wait_written(i + 1));
  }
  EXPECT_EQ(std::filesystem::file_size(file()), size);
  EXPECT_FALSE(read(0, 100'000));
  for (uint64_t i = kBlocks - 20; i < kBlocks; ++i) EXPECT_TRUE(read(i, 100'000)) << i;
  const auto stats = device_->stats();
  EXPECT_GT(stats.reclaimed, 200u);
  EXPECT_EQ(memory_->lost_count(), stats.reclaimed) << "each loss is said";
  EXPECT_LE(static_cast<double>(stats.written_bytes), 1.1 * static_cast<double>(stats.admitted_bytes));
}

// A pinned block moves on when its segment is given up, read or not, until the pin ends.
TEST_F(DiskTest, APinnedBlockStaysUntilItsPinEnds) {
  ASSERT_TRUE(open());
  constexpr uint64_t kFar = ~uint64_t{0};
  for (uint64_t i = 0; i < 10; ++i) memory_->offer(i, 100'000);
  ASSERT_TRUE(memory_->wait_written(10));
  for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(device_->pin(kTenant, key_of(i), kFar, 0), Code::kOk);
  EXPECT_EQ(device_->pin(kTenant, key_of(4), 1, 0), Code::kOk) << "one that is over at once";
  EXPECT_EQ(device_->pin(kTenant, key_of(99), kFar, 0), Code::kNotFound);
  EXPECT_EQ(device_->find(kTenant, key_of(0))->pinned_until_ms, kFar);
  EXPECT_GE(device_->stats().pinned_bytes, 500'000u);
  for (uint64_t i = 10; i < 300; ++i) {
    memory_->offer(i, 100'000);
    if (i % 10 == 9) {
      ASSERT_TRUE(memory_->wait_written(i + 1)) << i;
    }
  }
  for (uint64_t i = 0; i < 4; ++i) EXPECT_TRUE(read(i, 100'000)) << i;
  for (uint64_t i = 4; i < 10; ++i) EXPECT_FALSE(device_->find(kTenant, key_of(i))) << i;
  EXPECT_EQ(device_->unpin(kTenant, key_of(0)), Code::kOk);
  EXPECT_EQ(device_->find(kTenant, key_of(0))->pinned_until_ms, 0u);
  EXPECT_EQ(device_->unpin(kTenant, key_of(99)), Code::kNotFound);
}

TEST_F(DiskTest, PinsHoldAQuarterOfTheDiskAtMost) {
  ASSERT_TRUE(open());
  for (uint64_t i = 0; i < 40; ++i) memory_->offer(i, 100'000);
  ASSERT_TRUE(memory_->wait_written(40));
  uint64_t pinned = 0;
  Code last = Code::kOk;
  for (uint64_t i = 0; i < 40 && last == Code::kOk; ++i) {
    last = device_->pin(kTenant, key_of(i), 1000, 0);
    pinned += last == Code::kOk ? 1 : 0;
  }
  EXPECT_EQ(last, Code::kLimitExceeded);
  EXPECT_GE(pinned, 18u);
  EXPECT_LE(device_->stats().pinned_bytes, 2 * kMiB);
  EXPECT_EQ(device_->pin(kTenant, key_of(39), 3000, 2000), Code::kOk) << "those that are over make room";
  EXPECT_LE(device_->stats().pinned_bytes, 101'000u);
}

// What left the index does not come back: a later removal of such a key finds nothing to write a record of.
TEST_F(DiskTest, WhatWasGivenUpStaysGone) {
  ASSERT_TRUE(open());
  constexpr uint64_t kBlocks = 200;  // 20 MB
  for (uint64_t i = 0; i < kBlocks; ++i) {
    memory_->offer(i, 100'000);
    if (i % 20 != 19) continue;
    ASSERT_TRUE(memory_->wait_written(i + 1));
  }
  device_->close();
  const uint64_t blocks = device_->stats().blocks;
  EXPECT_LT(blocks, 80u);
  ASSERT_TRUE(open());
  EXPECT_EQ(device_->stats().recovered, blocks);
}

// What is read moves on when its segment is given up; what is not goes.
TEST_F(DiskTest, WhatIsReadStays) {
  ASSERT_TRUE(open());
  memory_->offer(1'000'000, 10'000);
  ASSERT_TRUE(memory_->wait_written(1));
  for (uint64_t i = 0; i < 1500; ++i) {
    memory_->offer(i, 20'000);
    if (i % 50 != 49) continue;
    ASSERT_TRUE(memory_->wait_written(i + 2));
    EXPECT_TRUE(read(1'000'000, 10'000)) << i;
  }
  EXPECT_GT(device_->stats().kept, 0u);
}

TEST_F(DiskTest, ARemovalIsThereAtOnceAndLasts) {
  ASSERT_TRUE(open());
  for (uint64_t i = 0; i < 10; ++i) memory_->offer(i, 5000);
  ASSERT_TRUE(memory_->wait_written(10));
  EXPECT_TRUE(remove(4));
  EXPECT_FALSE(device_->find(kTenant, key_of(4)));
  EXPECT_FALSE(device_->remove(kTenant, key_of(4), {}));
  memory_->offer(4, 6000);
  ASSERT_TRUE(memory_->wait_for([&] { return true; }));
  for (int tries = 0; tries < 1000 && !device_->find(kTenant, key_of(4)); ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  ASSERT_TRUE(open());
  EXPECT_TRUE(read(4, 6000)) << "what came after the removal is another block";
}

TEST_F(DiskTest, AnotherNodeAndASecondProcessAreRefused) {
  ASSERT_TRUE(open());
  FakeMemory other;
  auto second = Device::open(options(), other);
  EXPECT_EQ(second.code(), Code::kConfigInvalid);
  EXPECT_NE(second.status().message.find("another process"), std::string::npos) << second.status().message;
  auto with = options();
  with.node_id = "node-2";
  const Status status = open(with);
  EXPECT_EQ(status.code, Code::kConfigInvalid);
  EXPECT_NE(status.message.find("node-1"), std::string::npos) << status.message;
}

TEST_F(DiskTest, ForeignFilesAreNotTouched) {
  const std::string text = std::string(20'000, 'x');
  std::ofstream(file()) << text;
  EXPECT_EQ(open().code, Code::kConfigInvalid);
  std::ifstream in(file());
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), text);
}

// All that wears the disk is counted: headers, footers, what pads a write, and blocks that move.
TEST_F(DiskTest, TheWriteBudgetCountsEveryByte) {
  auto with = options();
  with.write_bytes_per_s = 100'000;  // 6 MB are saved up at the start
  ASSERT_TRUE(open(with));
  const auto begun = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < 12'000; ++i) memory_->offer(i, 1'000);
  ASSERT_TRUE(memory_->wait_written(4'000));
  // What the start has saved up is used by now, or soon.
  for (uint64_t before = 0; device_->stats().admitted > before + 200;) {
    before = device_->stats().admitted;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  device_->close();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  EXPECT_LE(static_cast<double>(device_->stats().written_bytes), 100'000 * (60 + seconds) + 64'000);
}

// The benchmarks do what they say: every block that came up was whole, and a start finds all.
TEST_F(DiskTest, WhatTheBenchmarksMeasureIsRight) {
  DiskRatesOptions rates;
  rates.path = folder_.string();
  rates.disk_bytes = 32 * kMiB;
  rates.memory_bytes = 8 * kMiB;
  rates.block_bytes = 64 << 10;
  rates.write_ms = rates.read_ms = 100;
  const auto moved = disk_rates_benchmark(rates);
  ASSERT_TRUE(moved) << moved.status().message;
  EXPECT_GT(moved->reads_per_s, 0);
  EXPECT_GE(moved->admitted_bytes, rates.disk_bytes);
  EXPECT_GE(moved->written_bytes, moved->admitted_bytes / 2);
  EXPECT_EQ(moved->corrupt_blocks, 0u);
  rates.disk_bytes = rates.memory_bytes;
  EXPECT_EQ(disk_rates_benchmark(rates).code(), Code::kInvalidArgument);
  std::filesystem::remove(file());
  const auto start = disk_start_benchmark({folder_.string(), 5'000});
  ASSERT_TRUE(start) << start.status().message;
  EXPECT_EQ(start->records, 5'000u);
  EXPECT_GT(start->cpu_s, 0);
  EXPECT_EQ(disk_start_benchmark({folder_.string(), 0}).code(), Code::kInvalidArgument);
}

TEST(DiskIndexTest, ABlockCostsAtMost64Bytes) {
  DiskIndex index(7);
  for (uint64_t i = 0; i < 300'000; ++i) {
    ASSERT_NE(index.put(kTenant, key_of(i), 4096, {1, 64}, true), store::kNone);
    if (i < 100'000 || i % 10'000 != 0) continue;
    EXPECT_LE(static_cast<double>(index.memory_bytes()) / index.count(), 64) << i;
  }
  for (uint64_t i = 0; i < 300'000; i += 2) index.erase(index.find(kTenant, key_of(i)));
  for (uint64_t i = 0; i < 300'000; ++i)
    ASSERT_EQ(index.find(kTenant, key_of(i)) != store::kNone, i % 2 == 1) << i;
}

// The end of a segment: entries of 100 bytes each, and the trailer.
class FooterTest : public ::testing::Test {
 protected:
  void write_entries(uint64_t first) {
    for (uint64_t at = 0; at < trailer_.count; ++at) {
      FooterEntry entry;
      entry.header.key = key_of(first + at);
      entry.header.size = 100;
      entry.unit = static_cast<uint32_t>(kFirstUnit + 4 * at);
      entry.encode(entries_.subspan(at * kFooterEntryBytes).first<kFooterEntryBytes>());
    }
  }
  std::array<std::byte, kPageBytes> write_trailer() {
    std::array<std::byte, kPageBytes> page{};
    trailer_.encode(place_.uuid, page);
    std::ranges::copy(page, segment_.end() - kPageBytes);
    return page;
  }
  // The keys that a start finds; nothing: it does not take it for a footer.
  std::set<Key> keys() {
    const AlignedMemory buffer(4 * kPageBytes);
    std::set<Key> found;
    const auto read = [&](uint64_t offset, std::span<std::byte> to) {
      std::memcpy(to.data(), segment_.data() + offset, to.size());
      return true;
    };
    const bool whole = read_footer(place_, buffer, read,
                                   [&](const RecordHeader& header, uint32_t) { found.insert(header.key); });
    return whole ? found : std::set<Key>{};
  }

  const SegmentPlace place_{.uuid = {std::byte{7}}, .segment_bytes = 1 << 20, .sequence = 9};
  std::vector<std::byte> segment_ = std::vector<std::byte>(place_.segment_bytes);
  FooterTrailer trailer_{.sequence = 9, .count = 3, .writers = {}};
  const std::span<std::byte> entries_ = std::span(segment_).last(2 * kPageBytes).first(3 * kFooterEntryBytes);
};

// Each version reads the footers of the other: what the newer one adds lies where there were zeros.
TEST_F(FooterTest, AFooterOfAFormerVersionIsRead) {
  write_entries(0);
  trailer_.entries_crc32c = crc32c(entries_);
  const auto former = write_trailer();
  EXPECT_EQ(keys().size(), 3u) << "of a former version";
  trailer_.cover(entries_);
  EXPECT_EQ(trailer_.entries_crc32c, crc32c(entries_)) << "what a former version compares";
  const auto page = write_trailer();
  EXPECT_EQ(keys().size(), 3u);
  EXPECT_TRUE(std::equal(page.begin(), page.end() - 8, former.begin())) << "all that a former version reads";
  EXPECT_FALSE(std::ranges::equal(page, former));
  ++trailer_.entries_crc32c;
  write_trailer();
  EXPECT_EQ(keys().size(), 0u);
}

// A power cut in the write of a footer may leave the new trailer behind the entries of an earlier writing.
TEST_F(FooterTest, EntriesOfAnEarlierWritingAreNone) {
  write_entries(0);
  trailer_.cover(entries_);
  write_trailer();
  write_entries(100);
  EXPECT_EQ(trailer_.entries_crc32c, crc32c(entries_)) << "which tells numbers of entries apart";
  EXPECT_EQ(keys().size(), 0u);
}

// A torn footer may have the entries of an earlier writing of its segment, as many as its own.
TEST(DiskFormat, AFootersChecksumTellsItsEntriesFromOthers) {
  std::set<uint32_t> checksums;
  for (uint64_t number = 0; number < 20; ++number) {
    std::vector<std::byte> entries(3 * store::disk::kFooterEntryBytes);
    for (size_t at = 0; at < 3; ++at) {
      store::disk::FooterEntry entry;
      entry.header.key = key_of(3 * number + at);
      entry.header.size = 100;
      entry.encode(std::span(entries)
                       .subspan(at * store::disk::kFooterEntryBytes)
                       .first<store::disk::kFooterEntryBytes>());
    }
    checksums.insert(store::disk::FooterTrailer::checksum(entries));
  }
  EXPECT_EQ(checksums.size(), 20u);
}

}  // namespace
}  // namespace mooncache::test

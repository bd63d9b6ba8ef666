// Blocks that are larger than what the buffers of a disk take: written from memory of their own, one after
// the other.
#include "store/disk_fixture.h"

namespace mooncache::test {
namespace {

constexpr uint64_t kDataBytes = 64 << 10;  // before the first segment

class LargeBlocksTest : public DiskTest {
 protected:
  DeviceOptions with_segments(uint64_t segment_bytes, uint64_t count = 6) {
    DeviceOptions with = options(kDataBytes + count * segment_bytes);
    with.segment_bytes = segment_bytes;
    with.sparse = true;
    with.stall_ms = 60'000;  // a busy machine is no stalled disk
    return with;
  }
  uint64_t count_of(store::disk::DeviceCounter counter) { return device_->stats().*counter; }
  using DeviceStats = store::disk::DeviceStats;
};

TEST_F(LargeBlocksTest, GoDownAndComeUpAlsoAfterARestart) {
  const std::vector<size_t> sizes = {16 * kMiB, 1000, 64 * kMiB + 5, 5 * kMiB, 16 * kMiB + 63, 12 * kMiB, 77};
  ASSERT_TRUE(open(with_segments(128 * kMiB)));
  for (uint64_t i = 0; i < sizes.size(); ++i) memory_->offer(i, sizes[i]);
  ASSERT_TRUE(memory_->wait_written(sizes.size()));
  for (uint64_t i = 0; i < sizes.size(); ++i) EXPECT_TRUE(read(i, sizes[i])) << i;
  ASSERT_TRUE(open(with_segments(128 * kMiB)));
  EXPECT_EQ(count_of(&DeviceStats::recovered), sizes.size());
  for (uint64_t i = 0; i < sizes.size(); ++i) EXPECT_TRUE(read(i, sizes[i])) << i;
  EXPECT_EQ(count_of(&DeviceStats::corrupt), 0u);
}

TEST_F(LargeBlocksTest, ADamagedByteIsAMiss) {
  ASSERT_TRUE(open(with_segments(64 * kMiB)));
  memory_->offer(0, 16 * kMiB);
  ASSERT_TRUE(memory_->wait_written(1));
  device_->close();
  {
    std::fstream file(this->file(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(kDataBytes + 15 * kMiB));
    file.put('\x55').put('\xaa').put('\x55');
  }
  ASSERT_TRUE(open(with_segments(64 * kMiB)));
  EXPECT_FALSE(read(0, 16 * kMiB));
  EXPECT_EQ(count_of(&DeviceStats::corrupt), 1u);
}

TEST_F(LargeBlocksTest, WhatNoSegmentTakesIsRefusedAndSaidOnce) {
  ASSERT_TRUE(open(with_segments(16 * kMiB)));
  for (uint64_t i = 0; i < 3; ++i) memory_->offer(i, 16 * kMiB);
  memory_->offer(3, 15 * kMiB);
  ASSERT_TRUE(memory_->wait_written(1)) << "they do not stand in the way of others";
  EXPECT_TRUE(read(3, 15 * kMiB));
  EXPECT_EQ(memory_->ends(Demotion::kRefused), 3u);
  EXPECT_EQ(count_of(&DeviceStats::too_large), 3u);
  EXPECT_EQ(memory_->event_count("ssd_block_too_large"), 1u);
}

TEST_F(LargeBlocksTest, AFailedWriteLosesTheBlockAndNoOther) {
  faulty_ = true;
  ASSERT_TRUE(open(with_segments(64 * kMiB)));
  memory_->offer(0, 1000);
  ASSERT_TRUE(memory_->wait_written(1));
  faults_->write_error = ENOSPC;
  memory_->offer(1, 16 * kMiB);
  ASSERT_TRUE(eventually([&] { return device_->stats().no_space > 0; }));
  faults_->write_error = 0;
  memory_->offer(2, 16 * kMiB);
  ASSERT_TRUE(memory_->wait_written(2));
  EXPECT_TRUE(read(0, 1000));
  EXPECT_TRUE(read(2, 16 * kMiB));
}

// A block from a disk above is taken, however large.
TEST_F(LargeBlocksTest, AreHandedDown) {
  ASSERT_TRUE(open(with_segments(128 * kMiB)));
  auto bytes = content_of(9, 70 * kMiB);
  ColdBlock block;
  block.tenant = kTenant;
  block.key = key_of(9);
  block.size = static_cast<uint32_t>(bytes.size());
  block.crc32c = crc32c(bytes);
  block.hits = 1;
  device_->take_handed(block, std::move(bytes));
  ASSERT_TRUE(memory_->wait_written(1));
  EXPECT_TRUE(read(9, 70 * kMiB));
}

}  // namespace
}  // namespace mooncache::test

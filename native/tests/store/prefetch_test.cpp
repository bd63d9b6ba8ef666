// Blocks that come up from a disk before anybody asks: what bounds them, what they are given up for, and a
// get that comes meanwhile.
#include <optional>

#include "store/disk_fixture.h"

namespace mooncache::test {
namespace {

constexpr size_t kSize = 20'000;
constexpr uint64_t kEver = UINT64_MAX;

class PrefetchTest : public DiskTest {
 protected:
  void SetUp() override {
    faulty_ = true;
    DiskTest::SetUp();
  }
  // With `count` blocks on the disk, of which `blocks_ahead` may come up ahead at once.
  void open_filled(uint64_t count, uint64_t blocks_ahead) {
    DeviceOptions with = options();
    with.stall_ms = 600'000;
    with.ahead_bytes = blocks_ahead * kSize;
    ASSERT_TRUE(open(std::move(with)));
    for (uint64_t i = 0; i < count; ++i) memory_->offer(i, kSize);
    ASSERT_TRUE(memory_->wait_written(count));
  }
  std::optional<uint64_t> prefetch(uint64_t number, uint64_t until_ms = kEver, uint64_t max_bytes = kEver) {
    return device_->prefetch(kTenant, key_of(number), max_bytes, until_ms);
  }
  uint64_t prefetched() { return device_->stats().prefetched; }
  uint64_t given_up() { return device_->stats().prefetch_given_up; }
  template <typename Until>
  bool wait_until(const Until& until) {
    for (int tries = 0; tries < 4000; ++tries) {
      if (until()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
};

TEST_F(PrefetchTest, BlocksComeUp) {
  open_filled(8, 8);
  for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(prefetch(i), kSize) << i;
  EXPECT_EQ(prefetch(100), 0u) << "it is not here";
  ASSERT_TRUE(wait_until([&] { return prefetched() == 5; }));
  for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(memory_->taken_up(i), content_of(i, kSize));
  EXPECT_EQ(device_->stats().reads, 5u);
  EXPECT_EQ(given_up(), 0u);
}

TEST_F(PrefetchTest, NoMoreThanTheBoundsAtOnce) {
  open_filled(8, 2);
  faults_->stalled = true;
  EXPECT_EQ(prefetch(0), kSize);
  EXPECT_EQ(prefetch(0), 0u) << "it is on its way";
  EXPECT_FALSE(prefetch(1, kEver, kSize - 1)) << "more than was asked for";
  EXPECT_EQ(prefetch(1), kSize);
  EXPECT_FALSE(prefetch(2)) << "much comes up already";
  EXPECT_EQ(given_up(), 2u);
  faults_->stalled = false;
  ASSERT_TRUE(wait_until([&] { return prefetched() == 2; }));
  EXPECT_EQ(prefetch(2), kSize);
  ASSERT_TRUE(wait_until([&] { return prefetched() == 3; }));
}

TEST_F(PrefetchTest, NothingComesUpAheadWhileFetchesAreBehind) {
  open_filled(80, 8);
  faults_->stalled = true;
  std::atomic<int> ended{0};
  for (uint64_t i = 0; i < 64; ++i) ASSERT_TRUE(device_->fetch(kTenant, key_of(i), [&] { ++ended; })) << i;
  EXPECT_FALSE(prefetch(70));
  EXPECT_EQ(given_up(), 1u);
  faults_->stalled = false;
  ASSERT_TRUE(wait_until([&] { return ended == 64; }));
  EXPECT_EQ(prefetch(70), kSize);
  ASSERT_TRUE(wait_until([&] { return prefetched() == 1; }));
}

// The bound is one block: what is not taken off the books shows with the next one.
TEST_F(PrefetchTest, AGetJoinsWhatComesUp) {
  open_filled(40, 1);
  for (uint64_t i = 0; i < 40; ++i) {
    faults_->stalled = i % 2 == 0;
    ASSERT_TRUE(wait_until([&] { return prefetch(i) == kSize; })) << i;
    const auto ended = std::make_shared<std::atomic<int>>(0);
    int joined = 0;
    for (int twice = 0; twice < 2; ++twice)
      joined += device_->fetch(kTenant, key_of(i), [ended] { ++*ended; }) ? 1 : 0;
    EXPECT_TRUE(i % 2 != 0 || joined == 2) << "it was on its way";
    faults_->stalled = false;
    ASSERT_TRUE(wait_until([&] { return *ended == joined; })) << i;
    ASSERT_TRUE(wait_until([&] { return memory_->taken_up(i) == content_of(i, kSize); })) << i;
  }
  EXPECT_TRUE(wait_until([&] { return memory_->open_reservations() == 0; }));
}

TEST_F(PrefetchTest, WhatIsLateFailsOrFindsNoRoomIsGivenUpAndStillThere) {
  open_filled(8, 1);
  EXPECT_EQ(prefetch(0, 0), kSize);
  ASSERT_TRUE(wait_until([&] { return given_up() == 1; })) << "it was late";
  memory_->is_full = true;
  EXPECT_EQ(prefetch(1), kSize);
  ASSERT_TRUE(wait_until([&] { return given_up() == 2; })) << "there is no room";
  memory_->is_full = false;
  faults_->read_error = EIO;
  EXPECT_EQ(prefetch(2), kSize);
  ASSERT_TRUE(wait_until([&] { return given_up() == 3; })) << "the disk failed";
  faults_->read_error = 0;
  EXPECT_EQ(prefetched(), 0u);
  EXPECT_EQ(device_->stats().read_misses, 0u) << "no get missed it";
  for (uint64_t i = 0; i < 8; ++i) EXPECT_TRUE(read(i, kSize)) << i;
  EXPECT_EQ(memory_->open_reservations(), 0u);
}

TEST_F(PrefetchTest, ADiskThatEndsForgetsWhatWasComingUp) {
  open_filled(8, 8);
  faults_->stalled = true;
  for (uint64_t i = 0; i < 8; ++i) EXPECT_EQ(prefetch(i), kSize);
  std::promise<void> done;
  ASSERT_TRUE(device_->fetch(kTenant, key_of(3), [&] { done.set_value(); }));
  device_->close();
  EXPECT_EQ(done.get_future().wait_for(std::chrono::seconds(0)), std::future_status::ready);
  EXPECT_EQ(prefetch(1).value_or(0), 0u);
}

}  // namespace
}  // namespace mooncache::test

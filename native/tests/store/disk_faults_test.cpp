// What a disk may do: it is killed at each of its writes, lies, fails, answers late or not at all, and holds
// bytes that were never written. Nothing wrong is returned, what was removed stays removed, and whoever waits
// is released.
#include "store/disk_fixture.h"
#include "store/fault_seed.h"

namespace mooncache::test {
namespace {

class DiskFaultsTest : public DiskTest {
 protected:
  void SetUp() override {
    DiskTest::SetUp();
    faulty_ = true;
  }
  void fill_disk(uint64_t from, uint64_t count, size_t size) {
    for (uint64_t i = from; i < from + count; ++i) memory_->offer(i, size);
    ASSERT_TRUE(memory_->wait_written(count));
  }
  template <typename Until>
  static bool wait_until(const Until& until) {
    for (int tries = 0; tries < 4000; ++tries) {
      if (until()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
  // Changes bytes of the file behind the device's back.
  void scribble(uint64_t offset, size_t bytes, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::fstream out(file(), std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(static_cast<std::streamoff>(offset));
    for (size_t i = 0; i < bytes; ++i) out.put(static_cast<char>(random()));
  }
};

// Every write of a small history is the last one that reaches the disk, and that one only in part and in any
// order.
TEST_F(DiskFaultsTest, KilledAtEachWrite) {
  constexpr size_t kSize = 30'000;
  bool ended = false;
  int64_t at = 0;
  for (; !ended && at < 400; ++at) {
    SCOPED_TRACE("killed at write " + std::to_string(at));
    faults_ = std::make_shared<Faults>();
    faults_->seed = static_cast<uint64_t>(at) * 31 + fault_seed();
    faults_->kill_at_write = at;
    std::filesystem::remove(file());
    std::set<uint64_t> removed;
    if (open()) {
      for (uint64_t round = 0; round < 3; ++round) {
        for (uint64_t i = 0; i < 20; ++i) memory_->offer(round * 20 + i, kSize);
        ASSERT_TRUE(memory_->wait_written(round * 20 + 20));
        const uint64_t victim = round * 20 + 5;
        ASSERT_TRUE(remove(victim));
        if (!faults_->killed) removed.insert(victim);
      }
      device_->close();
      ended = !faults_->killed;
    }
    device_.reset();
    faults_ = std::make_shared<Faults>();
    ASSERT_EQ(open().message, "") << "also when it was killed in its first superblock";
    for (uint64_t i = 0; i < 60; ++i) {
      const bool came = read(i, kSize);
      EXPECT_FALSE(came && removed.contains(i)) << "removed block " << i << " came back";
      if (ended) {
        EXPECT_EQ(came, !removed.contains(i)) << i;
      }
    }
    // And it works.
    memory_->offer(1000, 100);
    ASSERT_TRUE(memory_->wait_written(1));
    EXPECT_TRUE(read(1000, 100));
  }
  EXPECT_TRUE(ended) << "the history is longer than what was tried";
  EXPECT_GT(at, 8);
}

TEST_F(DiskFaultsTest, DamageIsAMissAndIsNotAskedForAgain) {
  ASSERT_TRUE(open());
  fill_disk(0, 30, 20'000);
  scribble(64 << 10 | 150'000, 60'000, 3);
  uint64_t misses = 0;
  for (uint64_t i = 0; i < 30; ++i) misses += read(i, 20'000) ? 0 : 1;
  EXPECT_GE(misses, 3u);
  EXPECT_LE(misses, 6u);
  EXPECT_EQ(device_->stats().corrupt, misses);
  EXPECT_EQ(memory_->lost_count(), misses);
  EXPECT_EQ(memory_->open_reservations(), 0u);
  EXPECT_EQ(device_->stats().blocks, 30 - misses);
}

// A start on damaged segments, footers and headers: fewer blocks, none of them wrong.
TEST_F(DiskFaultsTest, AStartOnDamage) {
  for (uint64_t number = 0; number < 12; ++number) {
    const uint64_t seed = fault_seed() * 12 + number;
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::filesystem::remove(file());
    ASSERT_TRUE(open());
    fill_disk(0, 60, 20'000);
    device_->close();
    device_.reset();
    std::mt19937_64 random(seed);
    for (int i = 0; i < 8; ++i) scribble((64 << 10) + random() % (3 << 20), random() % 5000, random());
    ASSERT_TRUE(open());
    for (uint64_t i = 0; i < 60; ++i) (void)read(i, 20'000);
    EXPECT_EQ(memory_->open_reservations(), 0u);
  }
}

TEST_F(DiskFaultsTest, ADamagedSuperblockHasACopy) {
  ASSERT_TRUE(open());
  fill_disk(0, 5, 1000);
  device_.reset();
  scribble(0, 500, 1);
  EXPECT_EQ(open().code, Code::kOk) << "the second copy is sound";
  EXPECT_TRUE(read(3, 1000));
  device_.reset();
  scribble(0, 500, 1);
  scribble(4096, 500, 1);
  EXPECT_EQ(open().code, Code::kConfigInvalid);
}

// Only a start that did not end leaves a damaged first copy and an empty second one.
TEST_F(DiskFaultsTest, AnEmptySuperblockBeforeADamagedOneIsNoNewDisk) {
  ASSERT_TRUE(open());
  fill_disk(0, 5, 1000);
  device_.reset();
  std::fstream(file(), std::ios::in | std::ios::out | std::ios::binary)
      .write(std::string(4096, 0).data(), 4096);
  scribble(4096 + 600, 50, 1);  // behind what says whose file it is
  EXPECT_EQ(open().code, Code::kConfigInvalid);
}

TEST_F(DiskFaultsTest, ThreeErrorsInARowAreTheEndOfADisk) {
  ASSERT_TRUE(open());
  fill_disk(0, 20, 10'000);
  faults_->read_error = EIO;
  for (uint64_t i = 0; i < 5; ++i) EXPECT_FALSE(read(i, 10'000));
  ASSERT_TRUE(memory_->wait_event("ssd_off"));
  EXPECT_FALSE(device_->answering());
  faults_->read_error = 0;
  EXPECT_FALSE(read(7, 10'000));
  EXPECT_TRUE(memory_->wait_lost(20)) << "the loss of each block is said";
}

TEST_F(DiskFaultsTest, ShortReadsAndStaleEndsAreMisses) {
  ASSERT_TRUE(open());
  fill_disk(0, 10, 300'000);
  faults_->short_reads = true;
  EXPECT_FALSE(read(1, 300'000));
  faults_->short_reads = false;
  faults_->stale_ends = true;
  for (uint64_t i = 0; i < 10; ++i) EXPECT_TRUE(read(i, 300'000)) << i;
}

TEST_F(DiskFaultsTest, AFullFileSystemIsNoFailureOfTheDisk) {
  ASSERT_TRUE(open());
  fill_disk(0, 5, 10'000);
  faults_->write_error = ENOSPC;
  for (uint64_t i = 10; i < 20; ++i) memory_->offer(i, 10'000);
  EXPECT_TRUE(wait_until([&] { return device_->stats().no_space > 0; }));
  EXPECT_TRUE(wait_until([&] { return memory_->reason_of_loss(10) == RemoveReason::kEvicted; }))
      << "memory may send it down again";
  EXPECT_TRUE(device_->answering());
  EXPECT_TRUE(read(3, 10'000));
  EXPECT_FALSE(read(12, 10'000));
  faults_->write_error = 0;
  for (uint64_t i = 30; i < 40; ++i) memory_->offer(i, 10'000);
  EXPECT_TRUE(memory_->wait_written(15));
  EXPECT_TRUE(wait_until([&] { return device_->find(kTenant, key_of(35)).has_value(); }));
  EXPECT_TRUE(read(35, 10'000));
}

TEST_F(DiskFaultsTest, ARemovalWaitsForTheSyncThatSucceeds) {
  ASSERT_TRUE(open());
  fill_disk(0, 5, 10'000);
  faults_->sync_error = ENOSPC;
  std::promise<void> lasts;
  auto done = lasts.get_future();
  ASSERT_TRUE(device_->remove(kTenant, key_of(3), [&] { lasts.set_value(); }));
  const uint64_t before = device_->stats().no_space;
  ASSERT_TRUE(wait_until([&] { return device_->stats().no_space > before + 2; }));
  EXPECT_NE(done.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  faults_->sync_error = 0;
  EXPECT_EQ(done.wait_for(std::chrono::seconds(20)), std::future_status::ready);
}

// Behind a write that failed a start finds nothing more: what is removed then is written elsewhere.
TEST_F(DiskFaultsTest, ARemovalBehindAFailedWriteLasts) {
  ASSERT_TRUE(open());
  fill_disk(0, 10, 10'000);
  faults_->write_error = ENOSPC;
  memory_->offer(20, 10'000);
  ASSERT_TRUE(wait_until([&] { return device_->stats().no_space > 0; }));
  faults_->write_error = 0;
  ASSERT_TRUE(remove(4));
  faults_->kill_at_write = static_cast<int64_t>(faults_->writes.load());  // no footer
  device_.reset();
  faults_ = std::make_shared<Faults>();
  ASSERT_TRUE(open());
  for (uint64_t i = 0; i < 10; ++i) EXPECT_EQ(read(i, 10'000), i != 4) << i;
}

// What was a miss for a moment may be put again and removed: its old record must not come back.
TEST_F(DiskFaultsTest, WhatWasAMissOnceDoesNotComeBack) {
  ASSERT_TRUE(open());
  fill_disk(0, 10, 10'000);
  faults_->flipped_reads = true;
  for (const uint64_t number : {4, 5, 6}) EXPECT_FALSE(read(number, 10'000));
  faults_->flipped_reads = false;
  EXPECT_EQ(memory_->reason_of_loss(4), RemoveReason::kCorrupt);
  faults_->late_write_error = EIO;
  memory_->offer(20, 10'000);
  ASSERT_TRUE(wait_until([&] { return device_->stats().io_errors > 0; }));
  faults_->late_write_error = 0;
  EXPECT_EQ(device_->stats().blocks, 7u) << "they count as no blocks";
  EXPECT_EQ(device_->bytes_of(kTenant), 70'000u) << "and not for the quota of their tenant";
  ASSERT_EQ(device_->uses().size(), 1u);
  EXPECT_EQ(device_->uses()[0].blocks, 7u);
  EXPECT_EQ(device_->uses()[0].bytes, 70'000u);
  EXPECT_EQ(device_->unpin(kTenant, key_of(4)), Code::kNotFound);
  EXPECT_FALSE(device_->find(kTenant, key_of(4)));
  EXPECT_FALSE(read(4, 10'000));
  for (const uint64_t number : {4, 20}) EXPECT_TRUE(remove(number)) << "a start could find it";
  EXPECT_FALSE(remove(4)) << "now none could";
  ASSERT_EQ(device_->purge(kTenant, key_of(5)).value(), 10'000u) << "its bytes lie there";
  EXPECT_TRUE(device_->sync_purged());
  device_.reset();
  ASSERT_TRUE(open());
  for (uint64_t i = 0; i < 10; ++i) EXPECT_EQ(read(i, 10'000), i != 4 && i != 5) << i;
  EXPECT_FALSE(read(20, 10'000));
}

// A purge and a recall go through what is not served, too; a list does not.
TEST_F(DiskFaultsTest, WhatWasAMissOnceIsFoundByWhoRemovesAll) {
  ASSERT_TRUE(open());
  fill_disk(0, 10, 10'000);
  faults_->flipped_reads = true;
  EXPECT_FALSE(read(4, 10'000));
  faults_->flipped_reads = false;
  std::set<Key> listed, purged, recalled;
  const auto seen = [](std::set<Key>& into) {
    return [&into](TenantId, const Key& key, uint64_t, uint32_t) { into.insert(key); };
  };
  EXPECT_EQ(device_->walk(0, 100, seen(listed)), 0u);
  EXPECT_EQ(device_->walk(0, 100, seen(purged), true), 0u);
  EXPECT_EQ(
      device_->walk_writer(0, 100, {}, [&](TenantId, const Key& key, uint64_t) { recalled.insert(key); }),
      0u);
  EXPECT_EQ(listed.size(), 9u);
  EXPECT_FALSE(listed.contains(key_of(4)));
  EXPECT_TRUE(purged.contains(key_of(4)));
  EXPECT_TRUE(recalled.contains(key_of(4)));
  // The place of what is not served is used again with its segment, and nothing of it is left in the index.
  for (uint64_t i = 100; i < 900; ++i) {
    memory_->offer(i, 10'000);
    if (i % 20 == 0) {
      ASSERT_TRUE(memory_->wait_written(i - 100));
    }
  }
  ASSERT_TRUE(memory_->wait_written(810));
  purged.clear();
  for (uint64_t at = device_->walk(0, 10'000, seen(purged), true); at != 0;)
    at = device_->walk(at, 10'000, seen(purged), true);
  EXPECT_FALSE(purged.contains(key_of(4)));
  EXPECT_EQ(memory_->reason_of_loss(4), RemoveReason::kCorrupt) << "it is lost once";
}

// The record of a removal that failed is written again, and lies behind what was written of the key
// meanwhile: the disk says now what a start will find.
TEST_F(DiskFaultsTest, ARemovalThatFailedTakesWhatWasWrittenMeanwhile) {
  ASSERT_TRUE(open());
  fill_disk(0, 10, 10'000);
  faults_->write_error = EIO;
  std::promise<void> lasts;
  ASSERT_TRUE(device_->remove(kTenant, key_of(4), [&] { lasts.set_value(); }));
  ASSERT_TRUE(wait_until([&] { return device_->stats().io_errors > 0; }));
  faults_->write_error = 0;
  ColdBlock again;
  again.tenant = kTenant;
  again.key = key_of(4);
  again.size = 10'000;
  auto body = content_of(4, 10'000);
  again.crc32c = crc32c(body);
  again.hits = 1;
  device_->take_handed(again, std::move(body));
  ASSERT_EQ(lasts.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  device_->close();
  const bool was_lost = memory_->reason_of_loss(4) == RemoveReason::kEvicted;
  device_.reset();
  ASSERT_TRUE(open());
  for (uint64_t i = 0; i < 10; ++i) EXPECT_EQ(read(i, 10'000), i != 4) << i;
  EXPECT_TRUE(was_lost) << "and said so";
}

// Three ways in which memory loses a block while the disk copies it: nothing of it reaches the disk.
TEST_F(DiskFaultsTest, WhatIsRemovedInMidCopyDoesNotComeBack) {
  ASSERT_TRUE(open());
  std::promise<void> lasts;
  memory_->copied = [&](uint64_t number) {
    if (number == 5) {
      EXPECT_TRUE(device_->remove(kTenant, key_of(5), [&] { lasts.set_value(); }));
    }
    if (number == 7) {
      EXPECT_EQ(device_->purge(kTenant, key_of(7)).code(), Code::kBackPressure);
    }
    return number != 6;  // all of its bytes are there
  };
  for (uint64_t i = 0; i < 10; ++i) memory_->offer(i, 10'000);
  ASSERT_TRUE(memory_->wait_written(7));
  ASSERT_EQ(lasts.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(memory_->ends(Demotion::kRefused), 3u);
  EXPECT_EQ(device_->purge(kTenant, key_of(7)).value(), 0u);
  faults_->kill_at_write = static_cast<int64_t>(faults_->writes.load());  // no footer
  device_.reset();
  faults_ = std::make_shared<Faults>();
  ASSERT_TRUE(open());
  EXPECT_EQ(device_->stats().blocks, 7u);
  for (uint64_t i = 0; i < 10; ++i) EXPECT_EQ(read(i, 10'000), i < 5 || i > 7) << i;
  std::ifstream in(file(), std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(in), {}};
  for (uint64_t i = 0; i < 10; ++i) {
    const auto bytes = content_of(i, 10'000);
    const std::string_view payload(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    EXPECT_EQ(all.find(payload) != std::string::npos, i < 5 || i > 7) << i;
  }
}

// However many removals wait, each block that leaves the index gets its record.
TEST_F(DiskFaultsTest, MoreRemovalsThanMayWaitForADisk) {
  constexpr uint64_t kBlocks = (1 << 16) + 3;
  ASSERT_TRUE(open(options(64 * kMiB)));
  fill_disk(0, kBlocks, 1);
  faults_->stalled = true;
  std::promise<void> lasts;
  for (uint64_t i = 0; i + 1 < kBlocks; ++i) ASSERT_TRUE(device_->remove(kTenant, key_of(i), {}));
  ASSERT_TRUE(device_->remove(kTenant, key_of(kBlocks - 1), [&] { lasts.set_value(); }));
  faults_->stalled = false;
  ASSERT_EQ(lasts.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  device_.reset();
  ASSERT_TRUE(open(options(64 * kMiB)));
  EXPECT_EQ(device_->stats().blocks, 0u);
}

// A second removal is not answered before the first one lasts: both mean the same record on the disk.
TEST_F(DiskFaultsTest, ARemovalBehindAnotherOneWaitsForIt) {
  ASSERT_TRUE(open());
  fill_disk(0, 5, 10'000);
  faults_->sync_error = ENOSPC;
  ASSERT_TRUE(device_->remove(kTenant, key_of(3), {}));  // as a put of the same key does
  std::promise<void> lasts;
  auto done = lasts.get_future();
  ASSERT_TRUE(device_->remove(kTenant, key_of(3), [&] { lasts.set_value(); }));
  EXPECT_FALSE(device_->remove(kTenant, key_of(3), {})) << "nothing waits for a third one";
  const uint64_t before = device_->stats().no_space;
  ASSERT_TRUE(wait_until([&] { return device_->stats().no_space > before + 2; }));
  EXPECT_NE(done.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  faults_->sync_error = 0;
  EXPECT_EQ(done.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_FALSE(remove(3));
}

// A stalled disk is no disk: who waits is released, and when it answers again it serves again.
TEST_F(DiskFaultsTest, AStallReleasesWhoWaits) {
  auto with = options();
  with.stall_ms = 500;
  ASSERT_TRUE(open(with));
  fill_disk(0, 10, 10'000);
  faults_->stalled = true;
  EXPECT_FALSE(read(1, 10'000));
  ASSERT_TRUE(memory_->wait_event("ssd_stalled"));
  EXPECT_FALSE(device_->find(kTenant, key_of(2)));
  EXPECT_FALSE(read(2, 10'000));
  faults_->stalled = false;
  ASSERT_TRUE(memory_->wait_event("ssd_back"));
  EXPECT_TRUE(read(2, 10'000));
  EXPECT_EQ(memory_->open_reservations(), 0u);
}

}  // namespace
}  // namespace mooncache::test

// Blocks with a TTL below the memory: their records say when they end, to a later start and to other nodes,
// too.
#include "store/disk/end_of_life.h"

#include <atomic>
#include <cstring>
#include <fstream>
#include <limits>

#include "store/disk/format.h"
#include "store/shared_fixture.h"

namespace mooncache::test {
namespace {

using store::disk::committed_ms_of;
using store::disk::end_of;
using store::disk::FooterEntry;
using store::disk::FooterTrailer;
using store::disk::is_over;
using store::disk::kFooterEntryBytes;
using store::disk::kLifeEpochMs;
using store::disk::kMaxEnd;
using store::disk::kMinuteMs;
using store::disk::kPageBytes;
using store::disk::minute_of;
using store::disk::RecordHeader;
using store::disk::Superblock;

constexpr uint64_t kHourMs = 60 * kMinuteMs;
constexpr uint64_t kNoonMs = kLifeEpochMs + 500'000 * kMinuteMs;
constexpr uint32_t kNoon = 500'000;
constexpr uint64_t kEndingBlock = 40'000;

TEST(EndOfLife, IsRoundedDownToAMinute) {
  EXPECT_EQ(end_of(0, kHourMs, kNoonMs), kNoon + 60);
  EXPECT_EQ(end_of(1, kHourMs, kNoonMs), kNoon + 59);
  EXPECT_EQ(end_of(59 * 60'000 - 1, kHourMs, kNoonMs), kNoon + 1);
  EXPECT_EQ(end_of(59 * 60'000 + 1, kHourMs, kNoonMs), std::nullopt) << "less than a minute";
  EXPECT_EQ(end_of(2 * 3'600'000, kHourMs, kNoonMs), std::nullopt) << "over";
  EXPECT_EQ(end_of(-5000, kHourMs, kNoonMs), kNoon + 60) << "a clock that was set makes no block older";
  EXPECT_FALSE(is_over(kNoon + 1, kNoonMs + kMinuteMs - 1));
  EXPECT_TRUE(is_over(kNoon + 1, kNoonMs + kMinuteMs));
  EXPECT_FALSE(is_over(0, std::numeric_limits<uint64_t>::max())) << "no end";
}

TEST(EndOfLife, AClockThatCannotSayItKeepsBlocksInMemory) {
  EXPECT_EQ(end_of(0, kHourMs, 1'000'000), std::nullopt) << "1970";
  EXPECT_EQ(end_of(0, kHourMs, kLifeEpochMs + (uint64_t{kMaxEnd} + 1) * kMinuteMs), std::nullopt) << "2057";
  EXPECT_EQ(end_of(0, std::numeric_limits<uint64_t>::max(), kNoonMs), std::nullopt);
  EXPECT_FALSE(is_over(1, 1'000'000));
  EXPECT_TRUE(is_over(kMaxEnd, std::numeric_limits<uint64_t>::max()));
}

// The host's clock may be younger than the block.
TEST(EndOfLife, WhatComesUpKeepsItsAge) {
  for (const uint64_t now_ms : {5000ull, 1'000'000'000ull}) {
    const uint64_t since_ms = committed_ms_of(kNoon + 10, kHourMs, kNoonMs, now_ms);
    EXPECT_EQ(store::disk::age_ms(since_ms, now_ms), 50 * 60'000);
    EXPECT_EQ(store::disk::age_ms(since_ms, now_ms + 10 * kMinuteMs), 60 * 60'000);
    EXPECT_EQ(committed_ms_of(0, kHourMs, kNoonMs, now_ms), now_ms) << "no end";
    EXPECT_EQ(committed_ms_of(kNoon + 10, 0, kNoonMs, now_ms), now_ms) << "no TTL any more";
    EXPECT_EQ(committed_ms_of(kMaxEnd, kHourMs, kNoonMs, now_ms), now_ms) << "never more than the TTL";
    EXPECT_EQ(store::disk::age_ms(committed_ms_of(kNoon - 5, kHourMs, kNoonMs, now_ms), now_ms), 60 * 60'000);
  }
}

TEST(EndOfLife, StandsAboveTheFlagsOfARecord) {
  RecordHeader header;
  header.flags = RecordHeader::kEncrypted;
  EXPECT_EQ(header.end(), 0u);
  header.set_end(kMaxEnd);
  EXPECT_EQ(header.end(), kMaxEnd);
  EXPECT_TRUE(header.encrypted() && !header.foreign());
  header.set_end(7);
  EXPECT_EQ(header.end(), 7u);
  EXPECT_EQ(header.flags, 7u << 8 | RecordHeader::kEncrypted);
  for (uint32_t bit = 2; bit < 8; ++bit) {
    header.flags = 7u << 8 | 1u << bit;
    EXPECT_TRUE(header.foreign()) << bit;
  }
  header.flags = 7u << 8 | RecordHeader::kRemoval;
  EXPECT_TRUE(header.foreign()) << "a removal has no end";
}

class EndingTest : public SharedTest {
 protected:
  DeviceOptions with_clock() {
    DeviceOptions with = options();
    with.path = log_of("node-1");
    with.wall_clock = [clock = clock_] { return clock->load(); };
    return with;
  }
  void pass(uint64_t minutes) { *clock_ += minutes * kMinuteMs; }
  void write_ending(uint64_t from, uint64_t until, uint32_t end) {
    const size_t before = memory_->written_count();
    for (uint64_t i = from; i < until; ++i) memory_->offer(i, kEndingBlock, 1, end);
    ASSERT_TRUE(memory_->wait_written(before + (until - from)));
  }
  bool found(uint64_t number) { return device_->find(kTenant, key_of(number)).has_value(); }
  // Changes the flags of each entry in the footers, and puts their checksums right.
  template <typename Change>
  size_t change_footers(const Change& change) {
    std::fstream file(log_of("node-1"), std::ios::in | std::ios::out | std::ios::binary);
    std::vector<char> chars(std::filesystem::file_size(log_of("node-1")));
    file.read(chars.data(), static_cast<std::streamsize>(chars.size()));
    std::span<std::byte> all(reinterpret_cast<std::byte*>(chars.data()), chars.size());
    const auto page_at = [&](uint64_t at) { return store::disk::Page(all.data() + at, kPageBytes); };
    const auto layout = Superblock::decode(page_at(0));
    if (!layout) return 0;
    size_t changed = 0;
    for (uint32_t number = 0; number < layout->segments; ++number) {
      const uint64_t end = store::disk::kDataOffset + (number + 1) * layout->segment_bytes - kPageBytes;
      auto trailer = FooterTrailer::decode(layout->uuid, layout->segment_bytes, page_at(end));
      if (!trailer) continue;
      const auto entries =
          all.subspan(end - FooterTrailer::entries_bytes(trailer->count), trailer->count * kFooterEntryBytes);
      for (uint32_t at = 0; at < trailer->count; ++at) {
        const auto bytes = entries.subspan(at * kFooterEntryBytes).template first<kFooterEntryBytes>();
        FooterEntry entry = FooterEntry::decode(bytes);
        change(entry.header);
        entry.encode(bytes);
        ++changed;
      }
      trailer->cover(entries);
      trailer->encode(layout->uuid, page_at(end));
    }
    file.clear();
    file.seekp(0);
    file.write(chars.data(), static_cast<std::streamsize>(chars.size()));
    return changed;
  }

  std::shared_ptr<std::atomic<uint64_t>> clock_ = std::make_shared<std::atomic<uint64_t>>(kNoonMs);
};

TEST_F(EndingTest, ABlockWhoseTimeIsOverIsAMissAndIsLetGo) {
  ASSERT_TRUE(open(with_clock()));
  write_ending(0, 5, kNoon + 10);
  write_ending(5, 8, 0);
  ASSERT_TRUE(read(1, kEndingBlock));
  EXPECT_EQ(memory_->end_of_last(), kNoon + 10) << "the memory learns when it ends";
  pass(9);
  EXPECT_TRUE(found(1));
  pass(1);
  EXPECT_FALSE(found(1)) << "at once, before anything swept";
  EXPECT_FALSE(read(2, kEndingBlock));
  EXPECT_EQ(device_->prefetch(kTenant, key_of(3), kMiB, ~0ull), 0u);
  EXPECT_EQ(device_->pin(kTenant, key_of(3), ~0ull, 0), Code::kNotFound);
  ASSERT_TRUE(memory_->wait_lost(5)) << "the master hears of each";
  EXPECT_TRUE(wait([&] { return device_->stats().expired == 5; }));
  EXPECT_EQ(device_->stats().blocks, 3u);
  EXPECT_EQ(device_->stats().removals, 0u) << "it costs no write";
  for (uint64_t i = 5; i < 8; ++i) EXPECT_TRUE(read(i, kEndingBlock)) << "without an end";
  EXPECT_EQ(memory_->end_of_last(), 0u);
}

TEST_F(EndingTest, AStartFindsTheEndInFootersAndInRecords) {
  ASSERT_TRUE(open(with_clock()));
  write_ending(0, 30, kNoon + 10);  // more than two segments, the last one of which has no footer yet
  device_->close();
  for (const bool with_footers : {true, false}) {
    if (!with_footers) {
      std::fstream file(log_of("node-1"), std::ios::in | std::ios::out | std::ios::binary);
      const std::vector<char> zeros(kPageBytes);
      for (uint64_t number = 0; number < 15; ++number) {
        const uint64_t trailer = store::disk::kDataOffset + (number + 1) * (512 << 10) - kPageBytes;
        file.seekp(static_cast<std::streamoff>(trailer));
        file.write(zeros.data(), static_cast<std::streamsize>(zeros.size()));
      }
    }
    ASSERT_TRUE(open(with_clock()));
    EXPECT_EQ(device_->stats().recovered, 30u);
    for (uint64_t i = 0; i < 30; ++i) {
      EXPECT_TRUE(read(i, kEndingBlock)) << i;
      EXPECT_EQ(memory_->end_of_last(), kNoon + 10);
    }
  }
  pass(10);
  ASSERT_TRUE(open(with_clock()));
  EXPECT_EQ(device_->stats().recovered, 0u);
  EXPECT_FALSE(found(0) || found(29));
}

// A clock that is set back: what was let go before its time by that clock is in the log until it is reused.
TEST_F(EndingTest, AClockThatJumpsMovesTheEndByAsMuch) {
  ASSERT_TRUE(open(with_clock()));
  write_ending(0, 5, kNoon + 10);
  *clock_ -= 3 * kHourMs;
  EXPECT_TRUE(read(0, kEndingBlock)) << "it lives longer by the jump";
  *clock_ += 6 * kHourMs;
  ASSERT_TRUE(memory_->wait_lost(5)) << "or shorter";
  *clock_ -= 3 * kHourMs;
  EXPECT_FALSE(found(0)) << "what was let go does not come back";
  ASSERT_TRUE(open(with_clock()));
  EXPECT_TRUE(read(0, kEndingBlock)) << "but with the next start";
}

TEST_F(EndingTest, ABlockThatMovesKeepsItsEnd) {
  ASSERT_TRUE(open(with_clock()));
  write_ending(0, 1, kNoon + 10);
  ASSERT_EQ(device_->pin(kTenant, key_of(0), ~0ull, 0), Code::kOk);
  for (uint64_t next = 1; device_->stats().kept == 0 && next < 2000; next += 10)
    write_ending(next, next + 10, 0);
  ASSERT_GT(device_->stats().kept, 0u);
  EXPECT_TRUE(read(0, kEndingBlock));
  EXPECT_EQ(memory_->end_of_last(), kNoon + 10);
  device_->close();
  ASSERT_TRUE(open(with_clock()));
  EXPECT_TRUE(read(0, kEndingBlock));
  EXPECT_EQ(memory_->end_of_last(), kNoon + 10);
}

TEST_F(EndingTest, AFooterThatProlongsALifeIsNotBelieved) {
  ASSERT_TRUE(open(with_clock()));
  write_ending(0, 30, kNoon + 10);
  device_->close();
  ASSERT_EQ(change_footers([](RecordHeader& header) { header.set_end(kMaxEnd); }), 30u);
  ASSERT_TRUE(open(with_clock()));
  pass(60);
  for (uint64_t i = 0; i < 30; ++i) EXPECT_FALSE(read(i, kEndingBlock)) << i;
  EXPECT_GT(device_->stats().corrupt, 0u);
  device_->close();
  // Bits that no version has set.
  ASSERT_EQ(change_footers([](RecordHeader& header) { header.flags = 0xfffffff8; }), 30u);
  ASSERT_TRUE(open(with_clock()));
  EXPECT_EQ(device_->stats().recovered, 0u);
}

TEST_F(EndingTest, OtherNodesSeeItEndToo) {
  ASSERT_TRUE(open(with_clock()));
  write_ending(0, 20, kNoon + 10);
  write_ending(20, 25, 0);
  SharedOptions with;
  with.folder = std::make_shared<FaultySharedFolder>(folder_.string(), shared_faults_);
  with.own_name = "node-2.mooncache";
  with.scan_ms = 10;
  with.stall_ms = 60'000;
  with.threads = 2;
  with.wall_clock = [clock = clock_] { return clock->load(); };
  reader_ = std::make_unique<SharedReader>(with, above_);
  ASSERT_TRUE(wait([&] { return reader_->stats().blocks == 25; }));
  EXPECT_TRUE(get(3));
  EXPECT_EQ(above_.end_of_last(), kNoon + 10);
  pass(10);
  EXPECT_FALSE(knows(3) || get(4));
  EXPECT_TRUE(wait([&] { return reader_->stats().blocks == 5; })) << "the index lets go of them";
  EXPECT_TRUE(get(22));
  // One that begins later does not find them.
  reader_ = std::make_unique<SharedReader>(with, above_);
  ASSERT_TRUE(wait([&] { return reader_->stats().scans >= 2; }));
  EXPECT_EQ(reader_->stats().blocks, 5u);
}

}  // namespace
}  // namespace mooncache::test

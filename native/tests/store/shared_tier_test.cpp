// Stores that share a directory: what one of them lets go of, the others still answer with, also when it is
// gone.
#include <atomic>
#include <bit>
#include <filesystem>
#include <fstream>
#include <future>
#include <optional>
#include <set>
#include <thread>

#include "store/shared_fixture.h"

namespace mooncache::test {
namespace {

class SharedTierTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = test_folder();
    std::filesystem::create_directories(folder_ / "shared");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  StoreConfig config(const std::string& node, bool with_disk = false) const {
    StoreConfig config = small_config(4 * kMiB);
    config.eviction = "lru";
    config.disk.node_id = node;
    config.disk.shared_path = (folder_ / "shared").string();
    config.disk.shared_bytes = 64 * kMiB;
    config.disk.shared_scan_ms = 20;
    config.disk.stall_ms = 60'000;  // a busy machine is no slow server
    if (with_disk) {
      std::filesystem::create_directories(folder_ / node);
      config.disk.paths = {(folder_ / node).string()};
      config.disk.bytes = 8 * kMiB;
    }
    return config;
  }
  // At a pace that the directory keeps up with.
  static void fill_up(Store& store, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      ASSERT_EQ(put(store, i, kSharedBlock, clock_ms()), Code::kOk);
      if (i < 55) continue;
      ASSERT_TRUE(eventually([&] {
        return disk_counter(store, "shared_admitted_blocks") + disk_counter(store, "shared_refused_blocks") +
                   62 >
               i;
      })) << i;
    }
  }
  // So that no block is dropped before it is on the disk.
  static void put_when_the_disk_follows(Store& store, uint64_t number) {
    ASSERT_EQ(put(store, number, kSharedBlock, clock_ms()), Code::kOk);
    if (number < 55) return;
    ASSERT_TRUE(eventually([&] {
      return disk_counter(store, "ssd_admitted_blocks") + disk_counter(store, "ssd_refused_blocks") + 62 >
             number;
    })) << number;
  }
  static Believed reported(const Store& store) {
    Believed seen;
    uint64_t cursor = 0;
    do {
      const SnapshotPage page = store.snapshot(cursor, 1000);
      apply_records(seen, page.records);
      cursor = page.next_cursor;
    } while (cursor != 0);
    return seen;
  }

  std::filesystem::path folder_;
};

TEST_F(SharedTierTest, WhatOneNodeWroteAnotherOneReads) {
  auto writer = open_store(config("node-1"));
  auto reader = open_store(config("node-2"));
  ASSERT_TRUE(writer && reader);
  fill_up(*writer, 200);
  const auto below = blocks_in(*writer, Tier::kShared);
  ASSERT_GT(below.size(), 60u);
  ASSERT_TRUE(eventually([&] {
    const auto there = blocks_in(*reader, Tier::kShared);
    return std::includes(there.begin(), there.end(), below.begin(), below.end());
  }));
  EXPECT_TRUE(reported(*reader).empty()) << "they are nobody's here";
  std::vector<Key> keys;
  for (const uint64_t i : below) keys.push_back(key_of(i));
  const MatchResult match = reader->match(kTenant, keys, true, clock_ms());
  EXPECT_EQ(match.present, keys.size());
  uint64_t marked = 0;
  for (const uint8_t bits : match.shared) marked += std::popcount(bits);
  EXPECT_EQ(marked, keys.size());
  EXPECT_EQ(match.shared, match.on_disk);
  for (const uint64_t i : below) EXPECT_TRUE(read_by(*reader, i)) << i;
  EXPECT_EQ(disk_counter(*reader, "shared_other_reads"), below.size());
  EXPECT_EQ(disk_counter(*reader, "shared_admitted_blocks"), 0u) << "one copy in the directory is enough";
  EXPECT_SOUND(*reader);
  EXPECT_SOUND(*writer);
  // The writer reads its own log as well.
  EXPECT_TRUE(read_by(*writer, *below.begin()));
  EXPECT_EQ(disk_counter(*writer, "shared_reads"), 1u);
}

TEST_F(SharedTierTest, BlocksOutliveTheirWriterWhichTakesThemOver) {
  auto writer = open_store(config("node-1"));
  auto reader = open_store(config("node-2"));
  fill_up(*writer, 150);
  const auto below = blocks_in(*writer, Tier::kShared);
  writer.reset();
  ASSERT_TRUE(eventually([&] {
    const auto there = blocks_in(*reader, Tier::kShared);
    return std::includes(there.begin(), there.end(), below.begin(), below.end());
  }));
  EXPECT_TRUE(read_by(*reader, *below.rbegin()));
  writer = open_store(config("node-1"));
  EXPECT_GE(disk_counter(*writer, "shared_recovered_blocks"), below.size());
  EXPECT_GE(reported(*writer).size(), below.size()) << "the master hears of them";
  EXPECT_TRUE(read_by(*writer, *below.begin()));
}

TEST_F(SharedTierTest, TwoWritersWithOneNameAreRefused) {
  auto writer = open_store(config("node-1"));
  const auto second = Store::open(config("node-1"));
  EXPECT_EQ(second.code(), Code::kConfigInvalid);
  EXPECT_NE(second.status().message.find("another process uses it"), std::string::npos);
  EXPECT_EQ(Store::open(config("../node-2")).code(), Code::kConfigInvalid);
  StoreConfig nowhere = config("node-2");
  nowhere.disk.shared_path += "/missing";
  EXPECT_EQ(Store::open(nowhere).code(), Code::kConfigInvalid) << "what is not mounted is not made";
  writer.reset();
  // Another node's log under its name.
  std::filesystem::rename(folder_ / "shared/node-1.mooncache", folder_ / "shared/node-2.mooncache");
  EXPECT_EQ(Store::open(config("node-2")).code(), Code::kConfigInvalid);
}

TEST_F(SharedTierTest, ARemovalReachesTheOthersAndStays) {
  auto writer = open_store(config("node-1"));
  auto reader = open_store(config("node-2"));
  fill_up(*writer, 150);
  const auto below = blocks_in(*writer, Tier::kShared);
  const uint64_t gone = *below.begin(), purged_too = *below.rbegin();
  ASSERT_TRUE(eventually([&] { return blocks_in(*reader).contains(gone); }));
  auto lasts = std::make_shared<std::promise<void>>();
  ASSERT_EQ(writer->remove(kTenant, key_of(gone), RemoveReason::kRemoved, clock_ms(), false,
                           [lasts] { lasts->set_value(); }),
            Code::kOk);
  lasts->get_future().wait();
  ASSERT_TRUE(eventually([&] { return !blocks_in(*reader).contains(gone); }));
  EXPECT_FALSE(read_by(*reader, gone));
  for (uint64_t cursor = 0;;) {
    cursor = writer->purge(kTenant, cursor).next_cursor;
    if (cursor == 0) break;
  }
  EXPECT_FALSE(read_by(*reader, purged_too)) << "its bytes are overwritten";
  ASSERT_TRUE(eventually([&] { return blocks_in(*reader).empty(); }));
  writer.reset();
  writer = open_store(config("node-1"));
  EXPECT_TRUE(blocks_in(*writer).empty());
}

// A writer that is gone cannot remove: who has its blocks in sight lets go of them.
TEST_F(SharedTierTest, BlocksOfAWriterThatIsGoneCanBeRemoved) {
  auto writer = open_store(config("node-1"));
  auto reader = open_store(config("node-2"));
  fill_up(*writer, 150);
  const auto below = blocks_in(*writer, Tier::kShared);
  writer.reset();
  ASSERT_TRUE(eventually([&] { return blocks_in(*reader).size() >= below.size(); }));
  const auto remove = [&](uint64_t number) {
    return reader->remove(kTenant, key_of(number), RemoveReason::kRemoved, clock_ms());
  };
  EXPECT_EQ(remove(*below.begin()), Code::kOk);
  EXPECT_EQ(remove(*below.begin()), Code::kNotFound);
  EXPECT_FALSE(read_by(*reader, *below.begin()));
  // Another content under the same key is not replaced by what lies there.
  const uint64_t again = *below.rbegin();
  ASSERT_EQ(put(*reader, again, kSharedBlock, clock_ms()), Code::kOk);
  EXPECT_EQ(remove(again), Code::kOk);
  EXPECT_FALSE(read_by(*reader, again));
}

TEST_F(SharedTierTest, WhatLeavesADiskGoesIntoTheDirectory) {
  auto writer = open_store(config("node-1", true));
  for (uint64_t i = 0; i < 400; ++i) put_when_the_disk_follows(*writer, i);
  ASSERT_TRUE(eventually([&] { return blocks_in(*writer, Tier::kShared).size() > 150; }));
  EXPECT_FALSE(blocks_in(*writer, Tier::kSsd).empty());
  EXPECT_TRUE(eventually([&] { return reported(*writer).size() == blocks_in(*writer).size(); }));
  auto reader = open_store(config("node-2", true));
  ASSERT_TRUE(eventually([&] { return blocks_in(*reader, Tier::kShared).size() > 100; }));
  const auto there = blocks_in(*reader, Tier::kShared);
  size_t found = 0;
  for (const uint64_t i : there) found += read_by(*reader, i) ? 1 : 0;
  EXPECT_GT(found, there.size() * 9 / 10) << "the writer may give some up meanwhile";
  EXPECT_SOUND(*writer);
  EXPECT_SOUND(*reader);
  // A removal is of both.
  const uint64_t gone = *blocks_in(*writer, Tier::kShared).begin();
  EXPECT_EQ(writer->remove(kTenant, key_of(gone), RemoveReason::kRemoved, clock_ms()), Code::kOk);
  EXPECT_FALSE(present(*writer, gone));
}

// What the master hears, change by change, is what a full report says.
TEST_F(SharedTierTest, ChangesSayWhatAReportSays) {
  auto writer = open_store(config("node-1", true));
  Believed heard;
  const auto listen = [&] { apply_records(heard, writer->drain_events(1 << 20).records); };
  for (uint64_t i = 0; i < 400; ++i) {
    put_when_the_disk_follows(*writer, i);
    if (i % 50 == 49) (void)writer->remove(kTenant, key_of(i / 2), RemoveReason::kRemoved, clock_ms());
    listen();
  }
  EXPECT_TRUE(eventually([&] {
    listen();
    return heard == reported(*writer);
  }));
  EXPECT_FALSE(blocks_in(*writer, Tier::kShared).empty());
}

// An hour for each block: on a disk, in the log below it, and for those who read the log.
TEST_F(SharedTierTest, BlocksWithATtlEndOnAllNodes) {
  for (const bool with_disk : {false, true}) {
    const auto wall = std::make_shared<std::atomic<uint64_t>>(store::disk::kLifeEpochMs + 60'000'000'000);
    const auto open_node = [&](std::string node) {
      node += with_disk ? "-disk" : "";
      StoreConfig with = config(node, with_disk && node == "node-1-disk");
      with.disk.wall_clock = [wall] { return wall->load(); };
      auto store = open_store(with);
      store->set_limits(kTenant, {.ttl_ms = 3'600'000});
      return store;
    };
    auto writer = open_node("node-1");
    auto reader = open_node("node-2");
    if (with_disk) {
      for (uint64_t i = 0; i < 300; ++i) put_when_the_disk_follows(*writer, i);
    } else {
      fill_up(*writer, 200);
    }
    ASSERT_TRUE(eventually([&] { return blocks_in(*reader, Tier::kShared).size() > 60; }));
    const uint64_t number = *blocks_in(*reader, Tier::kShared).begin();
    const uint64_t below = *blocks_in(*writer, Tier::kShared).rbegin();
    writer.reset();  // what goes down later would have a later end, as only one of the clocks goes on
    *wall += 50 * 60'000;
    ASSERT_TRUE(read_by(*reader, number));
    reader->tend_tenants(clock_ms() + 7 * 60'000, 1 << 20);
    EXPECT_TRUE(present(*reader, number));
    reader->tend_tenants(clock_ms() + 11 * 60'000, 1 << 20);
    EXPECT_FALSE(present(*reader, number)) << "it is as old as at the other node";
    *wall += 11 * 60'000;
    EXPECT_TRUE(blocks_in(*reader).empty());
    EXPECT_FALSE(read_by(*reader, below));
    writer = open_node("node-1");
    EXPECT_TRUE(blocks_in(*writer).empty());
  }
}

}  // namespace
}  // namespace mooncache::test

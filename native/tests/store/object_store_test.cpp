// Stores that share an object store: what one of them lets go of the others read there, whatever the store
// does meanwhile.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <future>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "store/disk/object_log.h"
#include "store/fault_seed.h"
#include "store/object_fixture.h"
#include "store/shared_fixture.h"

namespace mooncache::test {
namespace {

using store::disk::SegmentObject;

constexpr uint64_t kFilled = 200;

class ObjectStoreTest : public ::testing::Test {
 protected:
  void SetUp() override { folder_ = test_folder(); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  StoreConfig config(const std::string& node, uint64_t shared_bytes = 32 * kMiB) {
    StoreConfig config = small_config(4 * kMiB);
    config.eviction = "lru";
    config.disk.node_id = node;
    std::filesystem::create_directories(folder_ / node);
    config.disk.shared_path = (folder_ / node).string();
    config.disk.shared_bytes = shared_bytes;
    config.disk.shared_scan_ms = 20;
    config.disk.shared_objects = bucket_.open();
    config.disk.shared_timeout_ms = 30'000;  // a busy machine is no slow store
    config.disk.shared_upload_ms = 50;
    return config;
  }
  static void fill_up(Store& store, uint64_t count, uint64_t from = 0) {
    for (uint64_t i = from; i < from + count; ++i) {
      ASSERT_EQ(put(store, i, kSharedBlock, clock_ms()), Code::kOk);
      if (i - from < 55) continue;
      ASSERT_TRUE(eventually([&] {
        return disk_counter(store, "shared_admitted_blocks") + disk_counter(store, "shared_refused_blocks") +
                   62 + from >
               i;
      })) << i;
    }
  }
  bool sees(Store& reader, const std::set<uint64_t>& blocks) {
    return eventually([&] {
      const auto there = blocks_in(reader);
      return std::includes(there.begin(), there.end(), blocks.begin(), blocks.end());
    });
  }

  std::filesystem::path folder_;
  Bucket bucket_;
};

TEST(SegmentObject, NamesComeBack) {
  const SegmentObject object{17, 0x1234567890, 8192, 4096};
  const std::string name = object.name("node-1.mooncache");
  EXPECT_EQ(name, "node-1.mooncache/0011-0000001234567890-00002000-00001000");
  EXPECT_EQ(SegmentObject::parse(name.substr(name.find('/') + 1)), object);
  EXPECT_TRUE(SegmentObject::parse("11-2-0-0")->is_end());
  for (const char* wrong :
       {"", "-", "1-2-3", "0-1-1001-0", "0-1-0-1000", "0-0-1000-0", "x-1-1000-0", "0-1-1000-0-0",
        "ffffffff-1-1000-0", "0-1-fffffffff000-0", "0-1-1000-fffffffffffff000"})
    EXPECT_EQ(SegmentObject::parse(wrong), std::nullopt) << wrong;
}

// A listing is what the store says: names, sizes and lengths of anything.
TEST(ObjectListing, DrawnListings) {
  const uint64_t seed = fault_seed();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 300; ++round) {
    Writer listing;
    for (uint64_t count = random() % 12; count > 0; --count) {
      const SegmentObject object{static_cast<uint32_t>(random() % 4), random() % 3, random() % 4 * 4096,
                                 random() % 3 * 4096};
      std::string name = random() % 5 == 0 ? "n.mooncache/superblock" : object.name("n.mooncache");
      if (random() % 3 == 0) name[random() % name.size()] = static_cast<char>(random());
      listing.str16(name);
      listing.u64(random() % 3 == 0 ? random() : object.size());
      listing.u64(random());
    }
    std::vector<std::byte> bytes = listing.take();
    if (!bytes.empty() && random() % 3 == 0) bytes.resize(random() % bytes.size());
    if (!bytes.empty() && random() % 3 == 0)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    ObjectRequests requests;
    std::thread server([&] {
      const auto taken = requests.take(60'000);
      if (taken) requests.complete(taken->id, {0, bytes});
    });
    std::map<std::string, store::disk::ObjectListing> logs;
    (void)store::disk::list_logs(requests, "", 60'000, logs);
    server.join();
    for (const auto& [log, found] : logs) {
      for (const auto& [number, object] : found.segments) {
        EXPECT_EQ(number, object.number) << seed;
        EXPECT_GE(object.used, 4096u) << seed;
        EXPECT_LE(object.size(), store::disk::kMaxSegmentBytes) << seed;
        for (const SegmentObject& former : found.former)
          EXPECT_TRUE(former.number != number || former.is_end() || !(object < former)) << seed;
      }
    }
  }
}

TEST_F(ObjectStoreTest, WhatOneNodeWroteAnotherOneReadsWhenItIsGone) {
  auto writer = open_store(config("node-1"));
  auto reader = open_store(config("node-2"));
  ASSERT_TRUE(writer && reader);
  fill_up(*writer, kFilled);
  const auto below = blocks_in(*writer, Tier::kShared);
  ASSERT_GT(below.size(), 60u);
  ASSERT_TRUE(sees(*reader, below));
  writer.reset();
  for (const uint64_t i : below) EXPECT_TRUE(read_by(*reader, i)) << i;
  EXPECT_EQ(disk_counter(*reader, "shared_other_corrupt_blocks"), 0u);
  EXPECT_SOUND(*reader);
}

TEST_F(ObjectStoreTest, AWriterReadsItsOwnFromTheStoreAlsoOnAnotherHost) {
  auto writer = open_store(config("node-1"));
  fill_up(*writer, kFilled);
  const auto below = blocks_in(*writer, Tier::kShared);
  const uint64_t before = bucket_.reads;
  for (const uint64_t i : below) EXPECT_TRUE(read_by(*writer, i)) << i;
  EXPECT_GT(bucket_.reads, before) << "sealed segments are no longer in the file";
  EXPECT_EQ(disk_counter(*writer, "shared_corrupt_blocks"), 0u);
  const auto kept = blocks_in(*writer);
  writer.reset();
  for (const bool same_host : {true, false}) {
    if (!same_host) std::filesystem::remove_all(folder_);
    writer = open_store(config("node-1"));
    const auto found = blocks_in(*writer, Tier::kShared);
    EXPECT_GE(found.size(), below.size() / 2) << same_host;
    for (const uint64_t i : found) EXPECT_TRUE(read_by(*writer, i)) << i << same_host;
    EXPECT_EQ(disk_counter(*writer, "shared_corrupt_blocks"), 0u) << same_host;
    writer.reset();
  }
}

TEST_F(ObjectStoreTest, ItNeverTakesMoreThanItsCapacity) {
  auto writer = open_store(config("node-1", 8 * kMiB));
  fill_up(*writer, 600);
  EXPECT_GT(disk_counter(*writer, "shared_reclaimed_blocks"), 100u);
  const auto below = blocks_in(*writer, Tier::kShared);
  EXPECT_TRUE(eventually([&] { return bucket_.bytes() <= 8 * kMiB + 1 * kMiB; })) << bucket_.bytes();
  for (const uint64_t i : below) (void)read_by(*writer, i);
  EXPECT_EQ(disk_counter(*writer, "shared_corrupt_blocks"), 0u);
}

TEST_F(ObjectStoreTest, ARemovalIsInTheStoreWhenItIsAnswered) {
  auto writer = open_store(config("node-1"));
  auto reader = open_store(config("node-2"));
  fill_up(*writer, kFilled);
  const auto below = blocks_in(*writer, Tier::kShared);
  ASSERT_TRUE(sees(*reader, below));
  const uint64_t gone = *below.begin();
  auto lasts = std::make_shared<std::promise<void>>();
  ASSERT_EQ(writer->remove(kTenant, key_of(gone), RemoveReason::kRemoved, clock_ms(), false,
                           [lasts] { lasts->set_value(); }),
            Code::kOk);
  lasts->get_future().wait();
  bucket_.write_error = EIO;  // nothing more gets there
  ASSERT_TRUE(eventually([&] { return !blocks_in(*reader).contains(gone); }));
  EXPECT_FALSE(read_by(*reader, gone));
  writer.reset();
  bucket_.write_error = 0;
  std::filesystem::remove_all(folder_ / "node-1");
  writer = open_store(config("node-1"));
  EXPECT_FALSE(blocks_in(*writer).contains(gone)) << "also without the file";
}

TEST_F(ObjectStoreTest, APurgeOverwritesObjects) {
  auto writer = open_store(config("node-1"));
  auto reader = open_store(config("node-2"));
  fill_up(*writer, kFilled);
  const auto below = blocks_in(*writer, Tier::kShared);
  ASSERT_TRUE(sees(*reader, below));
  Purged done;
  for (uint64_t cursor = 0;;) {
    const Purged page = writer->purge(kTenant, cursor);
    done.disk_blocks += page.disk_blocks;
    done.failed_blocks += page.failed_blocks;
    cursor = page.next_cursor;
    if (cursor == 0) break;
  }
  EXPECT_GE(done.disk_blocks, below.size());
  EXPECT_EQ(done.failed_blocks, 0u);
  for (const uint64_t i : below) EXPECT_FALSE(read_by(*reader, i)) << i;
}

TEST_F(ObjectStoreTest, DamagedObjectsAreMisses) {
  auto writer = open_store(config("node-1"));
  auto reader = open_store(config("node-2"));
  fill_up(*writer, kFilled);
  const auto below = blocks_in(*writer, Tier::kShared);
  ASSERT_TRUE(sees(*reader, below));
  ASSERT_GT(below.size(), 60u);
  int number = 0;
  bucket_.each([&](const std::string& name, std::vector<std::byte>& bytes) {
    if (name.ends_with("superblock")) return true;
    switch (number++ % 3) {
      case 0:
        for (size_t at = 4096 + 500; at + 8192 < bytes.size(); at += 4096) bytes[at] ^= std::byte{1};
        return true;
      case 1:
        bytes.resize(bytes.size() / 2);
        return true;
      default:
        return false;
    }
  });
  bucket_.put("foreign.mooncache/superblock", std::vector<std::byte>(4096, std::byte{7}));
  bucket_.put("foreign.mooncache/0000-0000000000000001-00001000-00000000", std::vector<std::byte>(4096));
  bucket_.put("node-1.mooncache/notes.txt", {});
  size_t misses = 0;
  for (const uint64_t i : below) misses += read_by(*reader, i) ? 0 : 1;  // right bytes, or none
  EXPECT_GT(misses, 0u);
  for (const uint64_t i : below) (void)read_by(*writer, i);
  EXPECT_SOUND(*reader);
  EXPECT_SOUND(*writer);
}

TEST_F(ObjectStoreTest, AStoreThatFailsIsGoneUntilItAnswers) {
  StoreConfig short_of_time = config("node-1");
  short_of_time.disk.shared_timeout_ms = 300;
  auto writer = open_store(short_of_time);
  fill_up(*writer, kFilled);
  ASSERT_TRUE(eventually([&] { return disk_counter(*writer, "shared_answering") == 1; }));
  const auto below = blocks_in(*writer, Tier::kShared);
  ASSERT_GT(below.size(), 60u);
  for (const bool hangs : {false, true}) {
    bucket_.hangs = hangs;
    bucket_.error = hangs ? 0 : EIO;
    ASSERT_TRUE(eventually([&] {
      for (const uint64_t i : below) (void)read_by(*writer, i);  // each ends
      return disk_counter(*writer, "shared_devices_answering") == 0;
    })) << hangs;
    EXPECT_TRUE(blocks_in(*writer, Tier::kShared).empty());
    EXPECT_EQ(put(*writer, 1000 + hangs, kSharedBlock, clock_ms()), Code::kOk) << "memory goes on";
    bucket_.hangs = false;
    bucket_.error = 0;
    ASSERT_TRUE(eventually([&] { return disk_counter(*writer, "shared_devices_answering") == 1; })) << hangs;
    EXPECT_TRUE(eventually([&] { return read_by(*writer, *below.begin()); })) << hangs;
  }
  EXPECT_EQ(disk_counter(*writer, "shared_corrupt_blocks"), 0u);
}

TEST_F(ObjectStoreTest, AStoreThatTakesNothingStopsWritesAlone) {
  StoreConfig little = config("node-1");
  little.disk.shared_spool_bytes = 2 * kMiB;
  auto writer = open_store(little);
  bucket_.write_error = ENOSPC;
  for (uint64_t i = 0; i < 400; ++i) {
    ASSERT_EQ(put(*writer, i, kSharedBlock, clock_ms()), Code::kOk);
    if (i % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const auto below = blocks_in(*writer, Tier::kShared);
  EXPECT_LT(below.size() * kSharedBlock, 8 * kMiB);
  EXPECT_GT(below.size(), 5u);
  for (const uint64_t i : below) EXPECT_TRUE(read_by(*writer, i)) << i;
  bucket_.write_error = 0;
  EXPECT_TRUE(eventually([&] { return bucket_.bytes() > kMiB; }));
}

TEST_F(ObjectStoreTest, AStoreThatIsNotThereAtTheStartLeavesMemoryAlone) {
  bucket_.error = EIO;
  auto writer = open_store(config("node-1"));
  ASSERT_TRUE(writer);
  EXPECT_EQ(put(*writer, 1, kSharedBlock, clock_ms()), Code::kOk);
  EXPECT_TRUE(read_by(*writer, 1));
}

TEST_F(ObjectStoreTest, AnotherNodesLogUnderThisNameIsRefused) {
  bucket_.put("node-1.mooncache/superblock", std::vector<std::byte>(4096, std::byte{7}));
  const auto opened = Store::open(config("node-1"));
  EXPECT_EQ(opened.code(), Code::kConfigInvalid);
  EXPECT_NE(opened.status().message.find("node-1.mooncache"), std::string::npos) << opened.status().message;
}

TEST_F(ObjectStoreTest, BlocksWithATtlEndInTheStoreToo) {
  const auto wall = std::make_shared<std::atomic<uint64_t>>(store::disk::kLifeEpochMs + 60'000'000'000);
  const auto open_node = [&](const std::string& node) {
    StoreConfig with = config(node);
    with.disk.wall_clock = [wall] { return wall->load(); };
    auto store = open_store(with);
    store->set_limits(kTenant, {.ttl_ms = 3'600'000});
    return store;
  };
  auto writer = open_node("node-1");
  auto reader = open_node("node-2");
  fill_up(*writer, kFilled);
  const auto below = blocks_in(*writer, Tier::kShared);
  ASSERT_TRUE(sees(*reader, below));
  EXPECT_TRUE(read_by(*reader, *below.begin()));
  writer.reset();  // what goes down later would have a later end, as only one of the clocks goes on
  *wall += 61 * 60'000;
  EXPECT_TRUE(blocks_in(*reader, Tier::kShared).empty());
  EXPECT_FALSE(read_by(*reader, *below.rbegin()));
  std::filesystem::remove_all(folder_ / "node-1");
  writer = open_node("node-1");  // another host, which has the log from the store
  EXPECT_TRUE(blocks_in(*writer).empty());
}

}  // namespace
}  // namespace mooncache::test

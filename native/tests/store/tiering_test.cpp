// A store with a disk below it: blocks that left memory come back, also after a crash, and removed ones do
// not.
#include <atomic>
#include <bit>
#include <filesystem>
#include <fstream>
#include <future>
#include <optional>
#include <random>
#include <thread>

#include "store/disk/end_of_life.h"
#include "store/shared_fixture.h"

namespace mooncache::test {
namespace {

constexpr uint64_t kBlock = 64 << 10;

class TieringTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = test_folder();
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    store_.reset();
    std::filesystem::remove_all(folder_);
  }
  void open(uint64_t capacity = 4 * kMiB, const char* eviction = "lru", uint32_t shards = 8) {
    store_.reset();
    StoreConfig config = small_config(capacity);
    config.eviction = eviction;
    config.shards = shards;
    config.disk.paths = {folder_.string()};
    config.disk.bytes = 64 * kMiB;
    config.disk.stall_ms = 60'000;  // a busy machine is no stalled disk
    store_ = open_store(config);
  }
  static uint64_t now_ms() {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                     std::chrono::steady_clock::now().time_since_epoch())
                                     .count());
  }
  uint64_t disk(const std::string& name) {
    for (const auto& [found, value] : store_->stats().disk) {
      if (found == "ssd_" + name) return value;
    }
    ADD_FAILURE() << name;
    return 0;
  }
  template <typename Until>
  bool wait_for(const Until& until) {
    for (int tries = 0; tries < 4000; ++tries) {
      if (until()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
  // Puts blocks at a pace that the disk keeps up with. A put never waits for a disk, so a few may be dropped.
  void put_many(uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      ASSERT_EQ(put(*store_, i, kBlock, now_ms()), Code::kOk);
      ASSERT_TRUE(wait_for([&] { return i < 62 || disk("blocks") + 45 > i; })) << i;
    }
    // Blocks that are being written lie nowhere meanwhile, which takes longer on a busy machine.
    if (!wait_for([&] { return all_present().size() > count * 19 / 20; })) {
      ASSERT_GT(all_present().size(), count * 4 / 5);
    }
  }
  std::vector<uint64_t> all_present(std::optional<Tier> tier = {}) {
    std::vector<uint64_t> found;
    for (uint64_t i = 0; i < 400; ++i) {
      const auto info = store_->stat(kTenant, key_of(i), 0);
      if (info && (!tier || info->tier == *tier)) found.push_back(i);
    }
    return found;
  }
  bool get(uint64_t number) { return read_by(*store_, number); }
  bool removed_for_good(uint64_t number) {
    auto lasts = std::make_shared<std::promise<void>>();
    const Code code = store_->remove(kTenant, key_of(number), RemoveReason::kRemoved, now_ms(), false,
                                     [lasts] { lasts->set_value(); });
    return code == Code::kOk &&
           lasts->get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  }
  Believed believed() {
    Believed seen;
    uint64_t cursor = 0;
    do {
      const SnapshotPage page = store_->snapshot(cursor, 1000);
      apply_records(seen, page.records);
      cursor = page.next_cursor;
    } while (cursor != 0);
    return seen;
  }

  std::filesystem::path folder_;
  std::unique_ptr<Store> store_;
};

TEST_F(TieringTest, WhatLeftMemoryComesBack) {
  open();
  put_many(300);  // 19 MiB through 4
  const auto below = all_present(Tier::kSsd);
  std::vector<Key> keys;
  for (const uint64_t i : all_present()) keys.push_back(key_of(i));
  const MatchResult match = store_->match(kTenant, keys, false, now_ms());
  EXPECT_EQ(match.leading_run, keys.size());
  uint64_t marked = 0;
  for (const uint8_t bits : match.on_disk) marked += std::popcount(bits);
  // What is still on its way down arrives meanwhile.
  EXPECT_GE(marked, below.size());
  EXPECT_LE(marked, all_present(Tier::kSsd).size());
  for (const uint64_t i : below) EXPECT_TRUE(get(i)) << i;
  EXPECT_GT(disk("reads"), 150u);
  EXPECT_EQ(disk("corrupt_blocks"), 0u);
  EXPECT_SOUND(*store_);
}

TEST_F(TieringTest, ABlockOnADiskIsThereAlready) {
  open();
  put_many(200);
  const auto below = all_present(Tier::kSsd);
  ASSERT_GT(below.size(), 100u);
  EXPECT_EQ(put(*store_, below[5], kBlock / 2, now_ms()), Code::kAlreadyExists);
  EXPECT_TRUE(removed_for_good(below[5]));
  EXPECT_EQ(put(*store_, below[5], kBlock / 2, now_ms()), Code::kOk);
}

// What a reader of the log believes is what is there, wherever a block went.
TEST_F(TieringTest, EventsAndSnapshotTellOfTheDisk) {
  open();
  put_many(200);
  const auto here = all_present();
  for (size_t i = 0; i < here.size(); i += 7) EXPECT_TRUE(removed_for_good(here[i]));
  for (size_t i = 1; i < here.size(); i += 7) (void)get(here[i]);  // the head of memory may be dropped by it
  Believed replayed;
  for (;;) {
    const EventBatch batch = store_->drain_events(1 << 14);
    ASSERT_FALSE(batch.overflow);
    if (batch.records.empty()) break;
    apply_records(replayed, batch.records);
  }
  for (uint64_t i = 0; i < 200; ++i)
    EXPECT_EQ(replayed.contains({kTenant, key_of(i)}), present(*store_, i)) << i;
  EXPECT_EQ(replayed, believed());
  uint64_t listed = 0, cursor = 0;
  do {
    const ListPage page = store_->list(kTenant, cursor, 50);
    listed += page.items.size();
    cursor = page.next_cursor;
  } while (cursor != 0);
  EXPECT_EQ(listed, replayed.size());
}

TEST_F(TieringTest, ARestartFindsTheDiskAndNothingThatWasRemoved) {
  open();
  put_many(200);
  const auto below = all_present(Tier::kSsd);
  ASSERT_GT(below.size(), 100u);
  EXPECT_TRUE(removed_for_good(below[3]));
  open();
  EXPECT_GE(disk("recovered_blocks"), below.size() - 1);
  for (const uint64_t i : below) EXPECT_EQ(get(i), i != below[3]) << i;
  EXPECT_SOUND(*store_);
}

// A removal while the block comes up wins.
TEST_F(TieringTest, ARemovedBlockIsNotBroughtUp) {
  open();
  put_many(100);
  const auto below = all_present(Tier::kSsd);
  ASSERT_GT(below.size(), 20u);
  for (const uint64_t i : below) {
    auto done = std::make_shared<std::promise<void>>();
    ASSERT_TRUE(store_->fetch(kTenant, key_of(i), [done] { done->set_value(); }));
    EXPECT_EQ(store_->remove(kTenant, key_of(i), RemoveReason::kRemoved, now_ms()), Code::kOk);
    done->get_future().wait();
    EXPECT_FALSE(present(*store_, i)) << i;
  }
  EXPECT_SOUND(*store_);
}

// A pin of a block that lies on the disk alone: it cannot be removed without force, `stat` shows it, and it
// outlives what is written after it, also when it comes up meanwhile.
TEST_F(TieringTest, APinHoldsABlockOnTheDisk) {
  open();
  put_many(200);
  const auto below = all_present(Tier::kSsd);
  ASSERT_GT(below.size(), 100u);
  const uint64_t held = below[2];
  EXPECT_EQ(store_->pin(kTenant, key_of(held), 3'600'000, now_ms()), Code::kOk);
  EXPECT_GT(store_->stat(kTenant, key_of(held), now_ms())->pinned_until_ms, now_ms());
  EXPECT_EQ(store_->remove(kTenant, key_of(held), RemoveReason::kRemoved, now_ms()), Code::kPinned);
  EXPECT_TRUE(get(held));
  EXPECT_GT(store_->stat(kTenant, key_of(held), now_ms())->pinned_until_ms, now_ms()) << "in memory, too";
  // A reclaimed segment is counted a moment after its blocks are gone.
  for (uint64_t i = 1000; i < 50'000 && (present(*store_, below[3]) || disk("reclaimed_blocks") == 0); ++i)
    ASSERT_EQ(put(*store_, i, kBlock, now_ms()), Code::kOk);
  EXPECT_GT(disk("reclaimed_blocks"), 0u);
  EXPECT_TRUE(get(held));
  EXPECT_FALSE(get(below[3])) << "its neighbour, without a pin";
  EXPECT_EQ(store_->unpin(kTenant, key_of(held)), Code::kOk);
  EXPECT_EQ(store_->stat(kTenant, key_of(held), now_ms())->pinned_until_ms, 0u);
  EXPECT_EQ(store_->remove(kTenant, key_of(held), RemoveReason::kRemoved, now_ms()), Code::kOk);
  EXPECT_EQ(store_->pin(kTenant, key_of(held), 1000, now_ms()), Code::kNotFound);
  EXPECT_SOUND(*store_);
}

// What goes down is what the policy evicts next: of chains that were asked for, the one that is worth least.
TEST_F(TieringTest, ThePolicyChoosesWhatGoesDown) {
  open(4 * kMiB, "mooncache");
  const auto ask = [&](uint64_t first, uint64_t blocks) {
    std::vector<Key> keys;
    for (uint64_t at = 0; at < blocks; ++at) keys.push_back(key_of(first + at));
    (void)store_->match(kTenant, keys, true, now_ms());
  };
  ask(0, 20);  // of 64 blocks; the oldest chain, so the first to go
  for (uint64_t i = 0; i < 20; ++i) ASSERT_EQ(put(*store_, i, kBlock, now_ms()), Code::kOk);
  ask(100, 43);
  for (uint64_t i = 100; i < 138; ++i) ASSERT_EQ(put(*store_, i, kBlock, now_ms()), Code::kOk);
  ASSERT_TRUE(wait_for([&] { return disk("admitted_blocks") > 0; }));
  ASSERT_TRUE(wait_for([&] { return disk("admitted_blocks") == disk("blocks"); }));
  // Two of its blocks are to be free soon: its end went down, its beginning and the other chain did not.
  for (uint64_t i = 138; i < 143; ++i) ASSERT_EQ(put(*store_, i, kBlock, now_ms()), Code::kOk);
  ASSERT_TRUE(wait_for([&] { return disk("admitted_blocks") >= 4; }));
  for (uint64_t i = 0; i < 20; ++i)
    (void)store_->remove(kTenant, key_of(i), RemoveReason::kRemoved, now_ms());
  EXPECT_EQ(disk("blocks"), 0u) << "only blocks of the first chain were on the disk";
  EXPECT_SOUND(*store_);
}

// What comes up takes the room of blocks that lie below already; the colder ones, which no disk takes, stay.
TEST_F(TieringTest, AReadFromTheDiskCostsNoBlockThatLiesNowhereElse) {
  constexpr TenantId kNotOnDisks = 99;
  open();
  put_many(200);
  for (const char* eviction : {"lru", "2q", "mooncache"}) {
    SCOPED_TRACE(eviction);
    open(4 * kMiB, eviction, 1);  // what is in memory from here on was read from the disk
    store_->set_limits(kNotOnDisks, {.disk = {.quota_bytes = 1}});
    std::vector<Key> chain;
    for (uint64_t i = 0; i < 4; ++i) {
      ASSERT_EQ(put(*store_, i, kBlock, now_ms(), kNotOnDisks), Code::kOk);
      chain.push_back(key_of(i));
    }
    (void)store_->match(kNotOnDisks, chain, true, now_ms());
    const auto below = all_present(Tier::kSsd);
    ASSERT_GT(below.size(), 150u);
    for (size_t at = 0; at < below.size(); ++at) {
      if (at % 10 == 0) {  // a chain of ten; the oldest chain is the one that goes first
        chain.clear();
        for (size_t i = at; i < std::min(at + 10, below.size()); ++i) chain.push_back(key_of(below[i]));
        (void)store_->match(kTenant, chain, true, now_ms());
      }
      EXPECT_TRUE(get(below[at])) << below[at];
    }
    for (uint64_t i = 0; i < 4; ++i) EXPECT_TRUE(present(*store_, i, kNotOnDisks)) << i;
    EXPECT_EQ(all_present().size(), below.size()) << "and of the others all lie on the disk";
    EXPECT_SOUND(*store_);
  }
}

// Where the coldest block lies below already, no other one goes: the short way of a read chooses like the
// long one, whichever shard the block is in.
TEST_F(TieringTest, AReadFromTheDiskEvictsTheColdestBlockThatLiesBelow) {
  open();
  put_many(200);
  for (const char* eviction : {"lru", "2q", "mooncache"}) {
    SCOPED_TRACE(eviction);
    open(4 * kMiB, eviction);
    const auto below = all_present(Tier::kSsd);
    ASSERT_GT(below.size(), 150u);
    const auto last = below.begin() + 120;
    for (auto at = below.begin(); at != last; ++at) ASSERT_TRUE(get(*at)) << *at;
    const auto kept = all_present(Tier::kDram);
    ASSERT_GT(kept.size(), 40u);
    EXPECT_EQ(kept, std::vector<uint64_t>(last - static_cast<ptrdiff_t>(kept.size()), last));
    EXPECT_SOUND(*store_);
  }
}

TEST_F(TieringTest, WithoutADiskNothingChanges) {
  StoreConfig config = small_config(4 * kMiB);
  store_ = open_store(config);
  EXPECT_FALSE(store_->has_disk());
  for (uint64_t i = 0; i < 200; ++i) EXPECT_EQ(put(*store_, i, kBlock, i), Code::kOk);
  EXPECT_FALSE(store_->fetch(kTenant, key_of(0), [] {}));
  EXPECT_TRUE(store_->stats().disk.empty());
}

TEST_F(TieringTest, ThreadsPutGetAndRemoveAtOnce) {
  open();
  std::vector<std::jthread> threads;
  for (uint64_t thread = 0; thread < 3; ++thread) {
    threads.emplace_back([this, thread] {
      std::mt19937_64 random(thread);
      for (int i = 0; i < 1500; ++i) {
        const uint64_t number = random() % 200;
        if (random() % 20 == 0)
          (void)store_->remove(kTenant, key_of(number), RemoveReason::kRemoved, now_ms());
        if (!get(number)) (void)put(*store_, number, 8192 + number * 64, now_ms());
      }
    });
  }
  threads.clear();
  EXPECT_SOUND(*store_);
  EXPECT_EQ(disk("corrupt_blocks"), 0u);
}

TEST_F(TieringTest, APurgeOverwritesRecordsOfTheTenantAlone) {
  open();
  const auto content_of = [](uint64_t number) {
    std::mt19937_64 random(number);
    std::vector<std::byte> bytes(kBlock);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() >> 56);
    return bytes;
  };
  const auto put_content = [&](uint64_t number, TenantId tenant) {
    const auto bytes = content_of(number);
    auto reservation = store_->reserve(tenant, key_of(number), kBlock, now_ms());
    ASSERT_TRUE(reservation);
    ASSERT_TRUE(store_->write(reservation->id, 0, {bytes.data(), kBlock}));
    ASSERT_TRUE(store_->commit(reservation->id, crc32c({bytes.data(), kBlock}), now_ms()));
  };
  for (uint64_t i = 0; i < 200; ++i) {
    put_content(i, kTenant);
    ASSERT_TRUE(wait_for([&] { return i < 62 || disk("blocks") + 45 > i; })) << i;
  }
  for (uint64_t i = 0; i < 60; ++i) put_content(1000 + i, 99);
  ASSERT_TRUE(wait_for([&] {
    store_->tend_tenants(now_ms(), 1);
    for (const TenantUsage& use : store_->tenants()) {
      if (use.tenant == kTenant && use.disk_blocks > 100) return true;
    }
    return false;
  }));
  const auto records_with = [&](uint64_t number) {
    std::vector<std::byte> wanted = content_of(number);
    wanted.resize(kBlock / 2);
    std::vector<char> bytes(std::filesystem::file_size(folder_ / "mooncache.ssd"));
    std::ifstream file(folder_ / "mooncache.ssd", std::ios::binary);
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return ::memmem(bytes.data(), bytes.size(), wanted.data(), wanted.size()) != nullptr;
  };
  const auto on_disk = all_present(Tier::kSsd);
  ASSERT_FALSE(on_disk.empty());
  ASSERT_TRUE(records_with(on_disk[0]));
  uint64_t purged = 0;
  ASSERT_TRUE(wait_for([&] {
    uint64_t cursor = 0, busy = 0;
    do {
      const Purged page = store_->purge(kTenant, cursor);
      EXPECT_EQ(page.failed_blocks, 0u);
      purged += page.disk_blocks;
      busy += page.held_blocks;
      cursor = page.next_cursor;
    } while (cursor != 0);
    return busy == 0 && all_present().empty();
  }));
  EXPECT_GT(purged, 100u);
  for (const uint64_t number : {on_disk.front(), on_disk[on_disk.size() / 2], on_disk.back()})
    EXPECT_FALSE(records_with(number)) << number;
  for (const auto& [name, size] : believed()) EXPECT_NE(name.first, kTenant);
  open();
  EXPECT_TRUE(all_present().empty()) << "nor do they come back";
}

TEST_F(TieringTest, ADiskQuotaKeepsBlocksInMemory) {
  open();
  store_->set_limits(kTenant, {.disk = {.quota_bytes = 20 * kBlock}});
  for (uint64_t i = 0; i < 300; ++i) {
    ASSERT_EQ(put(*store_, i, kBlock, now_ms()), Code::kOk);
    ASSERT_EQ(put(*store_, i, kBlock, now_ms(), 99), Code::kOk);
    if (i % 50 == 49) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ASSERT_TRUE(wait_for([&] { return disk("blocks") > 0; }));
  store_->tend_tenants(now_ms(), 1);
  for (const TenantUsage& use : store_->tenants()) {
    EXPECT_LE(use.disk_bytes, use.tenant == kTenant ? 20 * kBlock : ~0ull);
  }
}

// An hour for each block, of which the disk knows by the clock on the wall.
class TtlTest : public TieringTest {
 protected:
  static constexpr uint64_t kMinute = 60'000, kHour = 60 * kMinute;
  void open_with_ttl(uint64_t ttl_ms = kHour) {
    store_.reset();
    StoreConfig config = small_config(4 * kMiB);
    config.eviction = "lru";
    config.disk.paths = {folder_.string()};
    config.disk.bytes = 64 * kMiB;
    config.disk.stall_ms = 60'000;
    config.disk.wall_clock = [wall = wall_] { return wall->load(); };
    store_ = open_store(config);
    store_->set_limits(kTenant, {.ttl_ms = ttl_ms});
  }
  void tend(uint64_t later_ms) {
    for (int turn = 0; turn < 4; ++turn) store_->tend_tenants(now_ms() + later_ms, 1 << 20);
  }
  bool in_memory(uint64_t number) {
    const auto info = store_->stat(kTenant, key_of(number), 0);
    return info && info->tier == Tier::kDram;
  }
  std::shared_ptr<std::atomic<uint64_t>> wall_ =
      std::make_shared<std::atomic<uint64_t>>(store::disk::kLifeEpochMs + 1'000'000 * kMinute);
};

TEST_F(TtlTest, BlocksGoDownAndEndThere) {
  open_with_ttl();
  put_many(200);
  const auto below = all_present(Tier::kSsd);
  ASSERT_GT(below.size(), 80u);
  open_with_ttl();  // what is in memory alone is gone
  EXPECT_GE(all_present(Tier::kSsd).size(), below.size());
  EXPECT_TRUE(get(below.front()));
  *wall_ += 61 * kMinute;
  EXPECT_TRUE(all_present(Tier::kSsd).empty());
  std::vector<Key> keys;
  for (const uint64_t i : below) keys.push_back(key_of(i));
  const MatchResult match = store_->match(kTenant, {keys.data() + 1, keys.size() - 1}, false, now_ms());
  EXPECT_EQ(match.leading_run, 0u) << "nor does MATCH say that they are there";
  EXPECT_FALSE(get(below.back()));
  EXPECT_EQ(put(*store_, below.back(), kBlock, now_ms()), Code::kOk) << "it can be put again";
  EXPECT_TRUE(wait_for([&] { return believed().size() == 2; })) << "reports say what is left";
  open_with_ttl();
  EXPECT_TRUE(all_present().empty()) << "nor after a restart";
}

TEST_F(TtlTest, WhatComesUpIsAsOldAsBefore) {
  open_with_ttl();
  put_many(200);
  const uint64_t number = all_present(Tier::kSsd).front();
  *wall_ += 50 * kMinute;
  ASSERT_TRUE(get(number));
  ASSERT_TRUE(in_memory(number));
  tend(7 * kMinute);
  EXPECT_TRUE(in_memory(number));
  tend(11 * kMinute);
  EXPECT_FALSE(present(*store_, number)) << "it has not begun a new hour, nor is it below";
  open_with_ttl();
  EXPECT_FALSE(present(*store_, number));
}

TEST_F(TtlTest, AShorterTtlEndsWhatLiesInMemoryOnTheDiskToo) {
  open_with_ttl(24 * kHour);
  put_many(200);
  const auto below = all_present(Tier::kSsd);
  for (const uint64_t number : {below[0], below[1]}) ASSERT_TRUE(get(number));
  store_->set_limits(kTenant, {.ttl_ms = kHour});
  tend(2 * kHour);
  for (const uint64_t number : {below[0], below[1]}) EXPECT_FALSE(present(*store_, number));
  EXPECT_TRUE(present(*store_, below[2])) << "on the disk alone it has the end that it was written with";
  open_with_ttl(24 * kHour);
  for (const uint64_t number : {below[0], below[1]}) EXPECT_FALSE(present(*store_, number));
  EXPECT_TRUE(present(*store_, below[2]));
}

TEST_F(TtlTest, AClockBefore2025KeepsThemInMemory) {
  *wall_ = 1'000'000;
  open_with_ttl();
  for (uint64_t i = 0; i < 120; ++i) ASSERT_EQ(put(*store_, i, kBlock, now_ms()), Code::kOk);
  for (uint64_t i = 0; i < 120; ++i) ASSERT_EQ(put(*store_, i, kBlock, now_ms(), 99), Code::kOk);
  ASSERT_TRUE(wait_for([&] { return disk("blocks") > 10; })) << "others go down";
  EXPECT_TRUE(all_present(Tier::kSsd).empty());
}

TEST_F(TieringTest, LargeBlocksGoDownAndComeUp) {
  constexpr uint64_t kLarge = 16 * kMiB, kCount = 12;
  const auto open_large = [&] {
    store_.reset();
    StoreConfig config = small_config(100 * kMiB);
    config.eviction = "lru";
    config.expected_block_bytes = 1 << 20;
    config.disk.paths = {folder_.string()};
    config.disk.bytes = 1 << 30;
    config.disk.stall_ms = 60'000;
    store_ = open_store(config);
  };
  open_large();
  for (uint64_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(put(*store_, i, kLarge, now_ms()), Code::kOk);
    ASSERT_EQ(put(*store_, 100 + i, kBlock, now_ms()), Code::kOk);
    ASSERT_TRUE(wait_for([&] { return i < 5 || disk("blocks") + 8 > 2 * i; })) << i;
  }
  ASSERT_TRUE(wait_for([&] { return all_present(Tier::kSsd).size() > kCount / 2; }));
  const auto below = all_present(Tier::kSsd);
  EXPECT_EQ(disk("too_large_blocks"), 0u);
  for (const uint64_t number : below) EXPECT_TRUE(get(number)) << number;
  open_large();
  for (const uint64_t number : below) EXPECT_TRUE(get(number)) << number;
  EXPECT_EQ(disk("corrupt_blocks"), 0u);
}

}  // namespace
}  // namespace mooncache::test

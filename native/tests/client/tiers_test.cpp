// Blocks that a node has on a disk alone: what a client hears of them, and which copy it reads.
#include <filesystem>

#include "client/location_cache.h"
#include "client/nearness.h"
#include "client/pool.h"

namespace mooncache::testing {
namespace {

TEST(Nearness, MemoryOfAnyNodeGoesBeforeADiskButAfterNoFailingNode) {
  const uint32_t near = read_rank(true, Reach::kMapped, Medium::kDram) | kDiskRank;
  EXPECT_LT(read_rank(true, Reach::kTcp, Medium::kFile), near);
  EXPECT_LT(near, read_rank(true, Reach::kTcp, Medium::kDram) | kDiskRank);
  EXPECT_LT(near, read_rank(false, Reach::kMapped, Medium::kDram));
  const auto rank = [](uint32_t position, bool on_disk) { return position | (on_disk ? kDiskRank : 0u); };
  Nearest nearest;
  nearest.offer(0, true, rank);
  nearest.offer(3, false, rank);
  nearest.offer(1, true, rank);
  nearest.offer(2, false, rank);
  EXPECT_EQ(nearest.positions, (std::array<uint32_t, 4>{2, 3, 0, 1}));
  EXPECT_EQ(nearest.on_disk, (std::array<bool, 4>{false, false, true, true}));
}

TEST(Nearness, TheCacheKeepsWhatIsOnADiskUntilItIsRead) {
  LocationCache cache(64);
  const Key key = key_of(2);
  using Disks = std::array<bool, LocationCache::kPlaces>;
  cache.learn(key, std::vector<uint32_t>{70'000, 4, 3, 2, 1}, 77, Disks{true, false, true, true});
  EXPECT_EQ(cache.find(key).on_disk, (Disks{false, true, true, false})) << "the first one is no node";
  EXPECT_TRUE(cache.forget(key, 4));
  EXPECT_EQ(cache.find(key).on_disk, (Disks{true, true, false, false}));
  cache.learn(key, 2);
  EXPECT_EQ(cache.find(key).on_disk, (Disks{true, false, false, false})) << "it came up for the read";
  EXPECT_EQ(cache.find(key).asked_s, 77u);
  cache.learn(key, std::vector<uint32_t>{3, 2}, 78);
  EXPECT_EQ(cache.find(key).on_disk, Disks{});
}

class DiskNodes : public ::testing::Test {
 protected:
  static constexpr uint64_t kBlock = 64 << 10;

  DiskNodes() {
    for (uint32_t i = 0; i < 2; ++i) {
      nodes_.push_back(std::make_unique<TestNode>(i, 4 << 20, "host-" + std::to_string(i)));
      const auto folder = folder_ / std::to_string(i);
      std::filesystem::create_directories(folder);
      nodes_[i]->stop();
      nodes_[i]->config.store.eviction = "lru";
      nodes_[i]->config.store.disk.paths = {folder.string()};
      nodes_[i]->config.store.disk.bytes = 64 << 20;
      nodes_[i]->start();
    }
    client_ = client_for({nodes_[0]->info, nodes_[1]->info}, client_config(false));
  }
  ~DiskNodes() override {
    nodes_.clear();
    std::filesystem::remove_all(folder_);
  }
  uint64_t disk(uint32_t node, const std::string& name) {
    for (const auto& [found, value] : nodes_[node]->server->store().stats().disk) {
      if (found == name) return value;
    }
    ADD_FAILURE() << name;
    return 0;
  }
  // At a pace that the disk keeps up with: a put never waits for it.
  void put_many(uint32_t node, uint64_t count) {
    CallOptions there;
    there.node = node;
    for (uint64_t i = 0; i < count; ++i) {
      ASSERT_EQ(put_one(*client_, key_of(i), bytes_of(i, kBlock), 1, there).code, Code::kOk);
      ASSERT_TRUE(eventually([&] { return i < 62 || disk(node, "ssd_blocks") + 45 > i; })) << i;
    }
  }
  Tier tier_on(uint32_t node, const Key& key) {
    CallOptions there;
    there.node = node;
    BlockStat stat;
    EXPECT_TRUE(client_->stat(std::span(&key, 1), there, std::span(&stat, 1)));
    return stat.code == Code::kOk ? stat.tier : Tier::kShared;
  }
  // The number of the first block that is on the node's disk alone.
  uint64_t cold_on(uint32_t node, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      if (tier_on(node, key_of(i)) == Tier::kSsd) return i;
    }
    ADD_FAILURE() << "nothing is on the disk";
    return 0;
  }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("mooncache-tiers-" + std::to_string(::getpid()));
  std::vector<std::unique_ptr<TestNode>> nodes_;
  std::unique_ptr<Client> client_;
};

TEST_F(DiskNodes, AMatchNamesTheTierOfEachCopyAndAReadTakesTheOneInMemory) {
  put_many(0, 160);
  const uint64_t cold = cold_on(0, 160);
  CallOptions other;
  other.node = 1;
  ASSERT_EQ(put_one(*client_, key_of(1000), bytes_of(1000, kBlock), 1, other).code, Code::kOk);
  const std::vector<Key> keys{key_of(cold), key_of(159), key_of(1000), key_of(5000)};
  const auto found = client_->match(keys, false, {});
  ASSERT_TRUE(found) << found.status().message;
  const auto place = [&](size_t i) { return found->places[found->place_of[i]]; };
  EXPECT_EQ(place(0), (std::vector<BlockCopy>{{0, Tier::kSsd}}));
  EXPECT_EQ(place(1), (std::vector<BlockCopy>{{0, Tier::kDram}}));
  EXPECT_EQ(place(2), (std::vector<BlockCopy>{{1, Tier::kDram}}));
  EXPECT_TRUE(place(3).empty());
  EXPECT_EQ(found->leading_run, 3u);

  ASSERT_EQ(put_one(*client_, keys[0], bytes_of(cold, kBlock), 1, other).code, Code::kOk);
  const auto both = client_->match(keys, false, {});
  ASSERT_TRUE(both);
  EXPECT_EQ(both->places[both->place_of[0]], (std::vector<BlockCopy>{{1, Tier::kDram}, {0, Tier::kSsd}}));
  const uint64_t reads = disk(0, "ssd_reads");
  std::vector<std::byte> copy(kBlock);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(get_one(*client_, keys[0], copy).node_index, 1u);
  EXPECT_TRUE(copy == bytes_of(cold, kBlock));
  EXPECT_EQ(disk(0, "ssd_reads"), reads) << "no disk was needed";
}

}  // namespace
}  // namespace mooncache::testing

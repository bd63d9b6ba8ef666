// The rules by which blocks go down, and the disk of the simulator, which follows them.
#include <gtest/gtest.h>

#include "store/disk/model.h"
#include "store/eviction.h"

namespace mooncache::test {
namespace {

using store::disk::DeviceModel;
using store::disk::worth_writing;

TEST(AdmissionTest, TheLikelyAreWrittenAndTheBudgetRaisesTheBar) {
  EXPECT_FALSE(worth_writing({5, true, 0.01}, 1, 0)) << "hardly ever used again, whatever it was";
  EXPECT_TRUE(worth_writing({0, false, 0.1}, 1, 1));
  EXPECT_FALSE(worth_writing({0, false, 0.1}, 0, 0)) << "nothing is left of the budget";
  EXPECT_TRUE(worth_writing({0, false, 0.85}, 0, 1));
  EXPECT_TRUE(worth_writing({1, false}, 0, 1)) << "unknown, but it was read";
  EXPECT_FALSE(worth_writing({0, false}, 0.5, 0.7));
  EXPECT_TRUE(worth_writing({0, false}, 0.5, 0.3));
}

// What is said to be evicted next is what victim_queue() evicts, one block after the other.
TEST(EvictionRulesTest, QueuesAreAsDeepAsTheyWillBeEvicted) {
  for (const auto policy : {store::Policy::kTwoQueues, store::Policy::kLru}) {
    store::EvictionRules rules;
    rules.policy = policy;
    for (const uint64_t probation : {0, 200, 500, 900}) {
      uint64_t left[2] = {policy == store::Policy::kLru ? 0 : probation, 1000 - probation};
      const auto next = store::evicted_next(rules, left[0], left[1], 100);
      uint64_t gone[2] = {0, 0};
      for (int step = 0; step < 100; ++step) {
        const auto queue = static_cast<size_t>(store::victim_queue(rules, left[0], left[1]));
        if (left[queue] == 0) break;
        --left[queue];
        ++gone[queue];
      }
      EXPECT_NEAR(static_cast<double>(next.probation), static_cast<double>(gone[0]), 60) << probation;
      EXPECT_NEAR(static_cast<double>(next.protect), static_cast<double>(gone[1]), 60) << probation;
    }
  }
}

TEST(DeviceModelTest, TheOldestGoAndWhatWasReadMovesOn) {
  DeviceModel disk({64 << 20, 100'000, 0, 1});
  std::vector<uint64_t> lost;
  for (uint64_t id = 0; id < 2000; ++id) {
    disk.offer(id, 1, -1, 1, lost);
    disk.touch(7);
  }
  EXPECT_FALSE(disk.contains(0));
  EXPECT_TRUE(disk.contains(7)) << "it was read again and again";
  EXPECT_TRUE(disk.contains(1999));
  EXPECT_EQ(lost.size() + disk.blocks(), 2000u);
  EXPECT_EQ(lost.front(), 0u);
  EXPECT_LT(disk.blocks() * 100'000, 64u << 20);
  EXPECT_GT(disk.blocks() * 100'000, 48u << 20);
  EXPECT_EQ(disk.counts().admitted, 2000u);
  EXPECT_GT(disk.counts().kept, 0u);
}

TEST(DeviceModelTest, TheBudgetIsKept) {
  DeviceModel disk({64 << 20, 100'000, 10'000, 1});  // 600 kB in the burst, then 10 kB a second
  std::vector<uint64_t> lost;
  for (uint64_t id = 0; id < 1000; ++id) disk.offer(id, 1, -1, static_cast<double>(id), lost);
  EXPECT_LE(disk.counts().written_bytes, 600'000u + 1000u * 10'000u + 100'160u);
  EXPECT_GT(disk.counts().written_bytes, 9'000'000u);
  EXPECT_GT(disk.counts().dropped, 0u);
}

TEST(DeviceModelTest, ADiskTooSmallForAnythingTakesNothing) {
  DeviceModel disk({1000, 100'000, 0, 1});
  std::vector<uint64_t> lost;
  disk.offer(1, 1, 0.9, 0, lost);
  EXPECT_EQ(disk.blocks(), 0u);
  EXPECT_TRUE(lost.empty());
}

}  // namespace
}  // namespace mooncache::test

// The extent allocator alone: tiling, joining, and that blocks of one size can fill an arena again and again.
#include "store/extent_allocator.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace mooncache::store {
namespace {

#define EXPECT_WHOLE(allocator)                  \
  do {                                           \
    std::string why;                             \
    EXPECT_TRUE((allocator).check(&why)) << why; \
  } while (false)

TEST(ExtentAllocator, RandomHistoryNeverOverlaps) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    std::mt19937_64 random(seed);
    ExtentAllocator allocator(100'000);
    std::vector<uint32_t> live;
    for (int step = 0; step < 5000; ++step) {
      if (random() % 5 < 3) {
        const auto size = static_cast<uint32_t>(1 + random() % (random() % 10 == 0 ? 20'000 : 300));
        const auto got = allocator.allocate(size);
        if (got.node != kNone) {
          EXPECT_EQ(allocator.size_of(got.node), size);
          live.push_back(got.node);
        } else {
          // Classes are 1/32 apart: what is free in one piece and clearly larger must be found.
          EXPECT_LT(allocator.largest_free(), size + size / 16 + 1);
        }
      } else if (!live.empty()) {
        const size_t at = random() % live.size();
        allocator.free(live[at]);
        live[at] = live.back();
        live.pop_back();
      }
      if (step % 100 == 0) {
        EXPECT_WHOLE(allocator);
      }
    }
    for (const uint32_t node : live) allocator.free(node);
    EXPECT_WHOLE(allocator);
    EXPECT_EQ(allocator.largest_free(), 100'000u);
    EXPECT_EQ(allocator.free_extents(), 1u);
  }
}

TEST(ExtentAllocator, OneSizeFillsCompletely) {
  for (const uint32_t size : {1u, 3u, 33u, 100u, 1000u, 4097u}) {
    ExtentAllocator allocator(size * 50);
    std::vector<uint32_t> live;
    for (int count = 0; count < 50; ++count) live.push_back(allocator.allocate(size).node);
    EXPECT_EQ(allocator.free_quanta(), 0u);
    for (size_t at = 0; at < live.size(); at += 3) {
      allocator.free(live[at]);
      live[at] = allocator.allocate(size).node;
      EXPECT_NE(live[at], kNone);
    }
    EXPECT_WHOLE(allocator);
  }
}

TEST(ExtentAllocator, OwnersBetweenFreePieces) {
  ExtentAllocator allocator(40);
  std::vector<uint32_t> nodes;
  for (uint32_t owner = 0; owner < 4; ++owner) {
    nodes.push_back(allocator.allocate(10).node);
    allocator.set_owner(nodes.back(), owner);
  }
  allocator.free(nodes[0]);
  allocator.free(nodes[2]);
  EXPECT_EQ(allocator.allocate(15).node, kNone);
  const auto owners = allocator.owners_around(15, 0);
  ASSERT_EQ(owners.size(), 1u);
  EXPECT_EQ(owners[0].offset, 10 * owners[0].owner);
  allocator.free(nodes[owners[0].owner]);
  EXPECT_NE(allocator.allocate(15).node, kNone);
  EXPECT_TRUE(allocator.owners_around(41, 0).empty());
  EXPECT_WHOLE(allocator);
}

}  // namespace
}  // namespace mooncache::store

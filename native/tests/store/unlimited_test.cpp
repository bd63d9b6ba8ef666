// What a memory without limit would have found, estimated beside what was found.
#include "store/unlimited.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "store/store_fixture.h"

namespace mooncache::test {
namespace {

using store::Unlimited;

TEST(UnlimitedTest, WhatWasEverStoredWouldStillBeThere) {
  Unlimited sample;
  sample.stored(1);
  sample.stored(2);
  const Unlimited::Asked asked[] = {{1, true}, {2, false}, {3, false}};
  sample.asked(asked);
  EXPECT_EQ(sample.counts().asked, 3u);
  EXPECT_EQ(sample.counts().found, 1u);
  EXPECT_EQ(sample.counts().unlimited, 2u);
  sample.removed(2);
  sample.asked(std::span(asked).subspan(1, 1));
  EXPECT_EQ(sample.counts().asked, 4u);
  EXPECT_EQ(sample.counts().unlimited, 2u);
}

TEST(UnlimitedTest, WhatAStartFoundOnADiskCounts) {
  Unlimited sample;
  const Unlimited::Asked found[] = {{7, true}}, gone[] = {{7, false}};
  sample.asked(found);
  sample.asked(gone);
  EXPECT_EQ(sample.counts().found, 1u);
  EXPECT_EQ(sample.counts().unlimited, 2u);
}

// Many more blocks than the sample holds: its size is bounded, and the estimate is near the truth.
TEST(UnlimitedTest, ABoundedSampleIsNearTheTruth) {
  Unlimited sample(1024);
  std::mt19937_64 random(5);
  std::vector<uint64_t> blocks(200'000);
  for (uint64_t& block : blocks) block = random();
  uint64_t asked = 0, found = 0, unlimited = 0;
  std::set<uint64_t> ever;
  for (int use = 0; use < 300'000; ++use) {
    const size_t at = random() % blocks.size();
    const bool here = ever.contains(blocks[at]) && random() % 3 == 0;
    ++asked;
    found += here ? 1 : 0;
    unlimited += ever.contains(blocks[at]) ? 1 : 0;
    if (sample.samples(blocks[at])) {
      const Unlimited::Asked one[] = {{blocks[at], here}};
      sample.asked(one);
    }
    ever.insert(blocks[at]);
    sample.stored(blocks[at]);
    ASSERT_LE(sample.size(), 1024u);
  }
  const auto near = [](uint64_t estimate, uint64_t truth) {
    return static_cast<double>(estimate) > 0.9 * static_cast<double>(truth) &&
           static_cast<double>(estimate) < 1.1 * static_cast<double>(truth);
  };
  EXPECT_TRUE(near(sample.counts().asked, asked)) << sample.counts().asked << " " << asked;
  EXPECT_TRUE(near(sample.counts().found, found)) << sample.counts().found << " " << found;
  EXPECT_TRUE(near(sample.counts().unlimited, unlimited)) << sample.counts().unlimited << " " << unlimited;
}

std::vector<Key> chain_of(uint64_t first, uint64_t blocks) {
  std::vector<Key> keys;
  for (uint64_t at = 0; at < blocks; ++at) keys.push_back(key_of(first + at));
  return keys;
}

// A store of eight blocks: the second chain pushes the first one out, which an unlimited store would have.
TEST(UnlimitedTest, AStoreCountsWhatItEvicted) {
  StoreConfig config = small_config(8 * 4096);
  config.eviction = "lru";
  const auto store = open_store(config);
  for (const uint64_t first : {0, 100, 0}) {
    const auto keys = chain_of(first, 6);
    (void)store->match(kTenant, keys, true, 1);
    for (uint64_t at = 0; at < 6; ++at) (void)put(*store, first + at, 4096, 1);
  }
  const StoreStats::Sampled seen = store->stats().sampled;
  EXPECT_EQ(seen.asked, 18u);
  EXPECT_EQ(seen.unlimited, 6u);
  EXPECT_EQ(seen.found, 0u) << "blocks behind the hole at the beginning are no use";
  EXPECT_EQ(store->remove(kTenant, key_of(0), RemoveReason::kRemoved, 1), Code::kOk);
  (void)store->match(kTenant, chain_of(0, 1), true, 1);
  EXPECT_EQ(store->stats().sampled.unlimited, 6u);
  // A look that is no use counts nowhere.
  (void)store->match(kTenant, chain_of(0, 6), false, 1);
  EXPECT_EQ(store->stats().sampled.asked, 19u);
}

}  // namespace
}  // namespace mooncache::test

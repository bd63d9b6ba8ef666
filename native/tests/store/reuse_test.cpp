// Invariants of the policy alone, under any moves; that it decides as the simulator does is tested from
// Python (tests/native/test_reuse.py).
#include "store/reuse.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "store/advisor.h"

namespace mooncache::store {
namespace {

#define EXPECT_HOLDS(policy)                  \
  do {                                        \
    std::string why;                          \
    EXPECT_TRUE((policy).check(&why)) << why; \
  } while (false)

// A node of `capacity` blocks that some sessions use, with what nodes do besides.
class Sessions {
 public:
  Sessions(uint64_t seed, size_t capacity, ReuseLimits limits)
      : random_(seed), capacity_(capacity), policy(limits) {}

  void step() {
    now_s_ += static_cast<double>(random_() % 1000) * (random_() % 20 == 0 ? 1.0 : 0.02);
    std::vector<uint64_t>& chain = chains_[random_() % chains_.size()];
    if (chain.size() > 60 || random_() % 12 == 0) chain.resize(random_() % (chain.size() + 1));
    if (chain.empty()) chain = {1, 2, 3};
    for (uint64_t grown = random_() % 9; grown-- > 0;) chain.push_back(fresh_ += 1 + random_() % 5);
    std::vector<uint8_t> here(chain.size() / 8 + 1);
    for (size_t at = 0; at < chain.size(); ++at)
      here[at / 8] = static_cast<uint8_t>(here[at / 8] | (stored.contains(chain[at]) ? 1u << (at % 8) : 0u));
    policy.seen(chain, now_s_, here);
    for (const uint64_t id : chain) {
      if (random_() % 3 == 0 || stored.contains(id)) continue;
      while (stored.size() >= capacity_) make_room(id);
      if (policy.stored(id, now_s_)) stored.insert(id);  // not when it just made room for a block before it
    }
    if (random_() % 5 == 0 && !stored.empty()) remove(*stored.begin());
  }

  size_t victims() const { return victims_; }

 private:
  void make_room(uint64_t incoming) {
    const auto victim = policy.victim(now_s_, incoming);
    if (!victim) return remove(*stored.begin());
    ++victims_;
    EXPECT_TRUE(policy.knows(victim->id));
    EXPECT_TRUE(stored.contains(victim->id)) << "it names what is not here";
    if (random_() % 10 == 0) {
      policy.set_aside(victim->id);
      EXPECT_FALSE(policy.knows(victim->id));
    } else {
      remove(victim->id);
    }
  }
  void remove(uint64_t id) {
    stored.erase(id);
    policy.discard(id);
  }

  std::mt19937_64 random_;
  size_t capacity_;
  double now_s_ = 0;
  uint64_t fresh_ = 10;
  size_t victims_ = 0;
  std::vector<std::vector<uint64_t>> chains_ = std::vector<std::vector<uint64_t>>(12);

 public:
  Reuse policy;
  std::set<uint64_t> stored;
};

TEST(Reuse, InvariantsHoldUnderAnyMoves) {
  for (uint64_t seed = 1; seed <= 12 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Sessions sessions(seed, 5 + seed * 7, {static_cast<uint32_t>(5 + seed), seed % 2 == 0 ? 0u : 40u});
    for (int step = 0; step < 300; ++step) {
      sessions.step();
      EXPECT_HOLDS(sessions.policy);
    }
    EXPECT_GT(sessions.victims(), 20u);
  }
}

TEST(Reuse, MemoryStopsGrowing) {
  Sessions sessions(3, 500, {200, 512});
  for (int step = 0; step < 12'000; ++step) sessions.step();
  const uint64_t bytes = sessions.policy.memory_bytes();
  for (int step = 0; step < 6'000; ++step) sessions.step();
  EXPECT_LE(sessions.policy.memory_bytes(), bytes + bytes / 50);
  EXPECT_LE(sessions.policy.chains(), 500 + 200 + Reuse::kExpectedMax);
  EXPECT_HOLDS(sessions.policy);
}

TEST(Reuse, AChainGoesFromItsEndAndTheOldestGoesFirstAtTheStart) {
  Reuse policy;
  const std::vector<uint64_t> old_chain = {1, 2, 3}, new_chain = {11, 12, 13};
  policy.seen(old_chain, 0, std::vector<uint8_t>{0b111});
  policy.seen(new_chain, 1, std::vector<uint8_t>{0b111});
  for (const uint64_t id : {3, 2, 1, 13, 12, 11}) {
    const auto victim = policy.victim(2);
    ASSERT_TRUE(victim);
    EXPECT_EQ(victim->id, id);
    policy.discard(id);
  }
  EXPECT_FALSE(policy.victim(2));
}

TEST(Reuse, WhatCannotGoIsNotNamedUntilItIsStored) {
  Reuse policy;
  policy.seen(std::vector<uint64_t>{1, 2, 3}, 0, std::vector<uint8_t>{0b111});
  policy.set_aside(3);
  EXPECT_EQ(policy.victim(1)->id, 2u);
  EXPECT_TRUE(policy.stored(3, 1));
  EXPECT_EQ(policy.victim(1)->id, 3u);
}

TEST(Reuse, BlocksOfNoKnownChainStayUnknown) {
  Reuse policy;
  EXPECT_FALSE(policy.stored(5, 0));
  EXPECT_FALSE(policy.knows(5));
  EXPECT_FALSE(policy.victim(0));
  policy.discard(5);
  policy.set_aside(5);
  EXPECT_HOLDS(policy);
}

// Far more is asked for than is stored: old expectations are dropped, the blocks come as unknown ones.
TEST(Reuse, ExpectationsAreBounded) {
  Reuse policy;
  std::vector<uint64_t> chain(100'000);
  for (size_t at = 0; at < chain.size(); ++at) chain[at] = at + 1;
  policy.seen(chain, 0);
  EXPECT_FALSE(policy.stored(1, 0));
  EXPECT_TRUE(policy.stored(chain.back(), 0));
  EXPECT_LE(policy.memory_bytes(), 100'000u * 40u + 500'000u);
  EXPECT_HOLDS(policy);
}

TEST(Advisor, ItsTimeNeverFalls) {
  Advisor advisor(1);
  const std::vector<uint64_t> chain = {1, 2};
  advisor.seen(chain, std::vector<uint8_t>{0b11}, 5'000);
  advisor.seen(chain, std::vector<uint8_t>{0b11}, 4'000);  // read on another thread before
  EXPECT_TRUE(advisor.stored(2, 0));
  EXPECT_EQ(advisor.victim(99, 1), 2u);
  EXPECT_HOLDS(advisor);
}

// What is said to go next goes next, in that order, when nothing else happens.
TEST(ReuseTest, NextVictimsAreThoseThatGo) {
  for (const uint64_t start_uses : {uint64_t{0}, uint64_t{512}}) {
    Reuse policy({1u << 16, start_uses});
    uint64_t next_id = 1;
    std::vector<std::vector<uint64_t>> chains;
    double now_s = 0;
    for (int use = 0; use < 60; ++use) {
      std::vector<uint64_t> ids;
      if (use % 3 == 2) ids = chains[static_cast<size_t>(use) / 2];
      for (int more = 0; more < 4 + use % 17; ++more) ids.push_back(next_id++);
      chains.push_back(ids);
      policy.seen(ids, now_s);
      for (const uint64_t id : ids) policy.stored(id, now_s);
      now_s += 5;
    }
    const uint32_t limit = policy.blocks() / 2;
    std::vector<Reuse::NextVictim> next;
    (void)policy.victim(now_s);  // worths are computed anew by it
    policy.next_victims(now_s, limit, next);
    ASSERT_EQ(next.size(), limit);
    for (const auto& [id, chance] : next) {
      EXPECT_GE(chance, 0.0);
      EXPECT_LT(chance, 1.0);
      const auto victim = policy.victim(now_s);
      ASSERT_TRUE(victim);
      EXPECT_EQ(victim->id, id);
      policy.discard(id);
    }
    std::string why;
    EXPECT_TRUE(policy.check(&why)) << why;
  }
}

}  // namespace
}  // namespace mooncache::store

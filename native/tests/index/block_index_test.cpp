#include "mooncache/block_index.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "index/index_benchmark.h"
#include "index/model.h"

namespace mooncache {
namespace {

std::vector<BlockReplica> sorted(std::vector<BlockReplica> list) {
  std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.holder < b.holder; });
  return list;
}

TEST(BlockIndex, RepeatsChangeNothing) {
  BlockIndex index;
  const auto add = pack({{kRecordAdd, 1, 7, 100, test_key(1)}});
  const auto remove = pack({{kRecordRemove, 0, 7, 0, test_key(1)}});
  ASSERT_TRUE(index.apply(3, remove).is_ok());
  EXPECT_EQ(index.stats().blocks, 0u);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(index.apply(3, add).is_ok());
  EXPECT_EQ(index.stats().blocks, 1u);
  EXPECT_EQ(index.stats().bytes, 100u);
  ASSERT_TRUE(index.apply(4, remove).is_ok()) << "another holder's block";
  EXPECT_EQ(index.stats().replicas, 1u);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(index.apply(3, remove).is_ok());
  EXPECT_EQ(index.stats().blocks, 0u);
  EXPECT_TRUE(index.tenant_usage().empty());
  EXPECT_EQ(index.check(), "");
}

TEST(BlockIndex, TenantsDoNotSeeEachOther) {
  BlockIndex index;
  ASSERT_TRUE(index.apply(0, pack({{kRecordAdd, 1, 7, 100, test_key(1)}})).is_ok());
  const auto keys = pack_keys({test_key(1)});
  EXPECT_EQ(index.match(7, keys)->leading_run, 1u);
  EXPECT_EQ(index.match(8, keys)->leading_run, 0u);
  EXPECT_TRUE(index.locate(8, keys)->front().empty());
}

TEST(BlockIndex, HostileRecordsAreRefusedWhole) {
  BlockIndex index({.hash_seed = 1, .blocks_max = 2});
  const TestRecord good{kRecordAdd, 1, 1, 5, test_key(1)};
  auto cut = pack({good, good});
  cut.pop_back();
  EXPECT_EQ(index.apply(0, cut).code, Code::kInvalidArgument);
  for (const uint8_t kind : std::initializer_list<uint8_t>{0, 4, 255}) {
    EXPECT_EQ(index.apply(0, pack({good, {kind, 1, 1, 5, test_key(2)}})).code, Code::kInvalidArgument);
  }
  EXPECT_EQ(index.apply(0, pack({good, {kRecordAdd, 4, 1, 5, test_key(2)}})).code, Code::kInvalidArgument);
  EXPECT_EQ(index.apply(0, pack({good, {kRecordAdd, 1, 1, 1ull << 40, test_key(2)}})).code, Code::kTooLarge);
  EXPECT_EQ(index.apply(kIndexHoldersMax, pack({good})).code, Code::kInvalidArgument);
  EXPECT_EQ(index.apply(0, pack({good, good, good})).code, Code::kLimitExceeded);
  EXPECT_EQ(index.stats().blocks, 0u) << "nothing of a refused batch may be applied";
  EXPECT_EQ(index.locate(1, std::vector<std::byte>(31)).code(), Code::kInvalidArgument);
  EXPECT_EQ(index.match(1, std::vector<std::byte>(33)).code(), Code::kInvalidArgument);
  EXPECT_EQ(index.begin_full(kIndexHoldersMax).code, Code::kInvalidArgument);
  EXPECT_EQ(index.end_full(0).code(), Code::kInvalidArgument);
  EXPECT_EQ(index.drop_holder(kIndexHoldersMax).code(), Code::kInvalidArgument);
  EXPECT_TRUE(index.apply(0, {}).is_ok());
}

TEST(BlockIndex, FullReportDropsWhatItDoesNotMention) {
  BlockIndex index;
  std::vector<TestRecord> all;
  for (uint64_t i = 0; i < 100; ++i) all.push_back({kRecordAdd, 1, 1, 10, test_key(i)});
  ASSERT_TRUE(index.apply(0, pack(all)).is_ok());
  ASSERT_TRUE(index.apply(1, pack(all)).is_ok());
  ASSERT_TRUE(index.begin_full(0).is_ok());
  EXPECT_EQ(index.stats().replicas, 200u) << "blocks stay visible while the report runs";
  ASSERT_TRUE(index.apply(0, pack({all.begin(), all.begin() + 60})).is_ok());
  ASSERT_TRUE(index.begin_full(0).is_ok()) << "the report was cut off and starts again";
  EXPECT_EQ(index.check(), "");
  ASSERT_TRUE(index.apply(0, pack({all.begin() + 50, all.begin() + 80})).is_ok());
  EXPECT_EQ(*index.end_full(0), 70u);
  EXPECT_EQ(index.stats().replicas, 130u);
  EXPECT_EQ(index.check(), "");
  ASSERT_TRUE(index.begin_full(0).is_ok());
  EXPECT_EQ(*index.end_full(0), 30u);
  EXPECT_EQ(*index.drop_holder(1), 100u);
  EXPECT_EQ(*index.drop_holder(1), 0u);
  EXPECT_EQ(index.stats().blocks, 0u);
  EXPECT_EQ(index.check(), "");
}

TEST(BlockIndex, APopularBlockHasManyHolders) {
  BlockIndex index;
  const auto record = pack({{kRecordAdd, 2, 1, 10, test_key(1)}});
  for (uint32_t holder = 0; holder < 1000; ++holder)
    ASSERT_TRUE(index.apply(holder * 7 % 1000, record).is_ok());
  const auto keys = pack_keys({test_key(1), test_key(2)});
  EXPECT_EQ(index.locate(1, keys)->front().size(), 1000u);
  EXPECT_EQ(index.locate(1, keys, 5)->front().size(), 5u);
  EXPECT_EQ(index.match(1, keys)->holders.size(), 1000u);
  EXPECT_EQ(index.stats().popular_blocks, 1u);
  EXPECT_EQ(index.check(), "");
  for (uint32_t holder = 0; holder < 999; ++holder) ASSERT_EQ(*index.drop_holder(holder), 1u);
  EXPECT_EQ(index.stats().popular_blocks, 0u);
  EXPECT_EQ(index.locate(1, keys)->front(), (std::vector<BlockReplica>{{999, Tier::kSsd, 10}}));
}

TEST(BlockIndex, RunsAreCountedPerTier) {
  BlockIndex index;
  // holder 0: HBM, DRAM, HBM, -, SSD; holder 1: SSD, SSD
  ASSERT_TRUE(index
                  .apply(0, pack({{kRecordAdd, 0, 1, 1, test_key(0)},
                                  {kRecordAdd, 1, 1, 1, test_key(1)},
                                  {kRecordAdd, 0, 1, 1, test_key(2)},
                                  {kRecordAdd, 2, 1, 1, test_key(4)}}))
                  .is_ok());
  ASSERT_TRUE(
      index.apply(1, pack({{kRecordAdd, 2, 1, 1, test_key(0)}, {kRecordAdd, 2, 1, 1, test_key(1)}})).is_ok());
  const auto keys = pack_keys({test_key(0), test_key(1), test_key(2), test_key(3), test_key(4)});
  const auto match = *index.match(1, keys);
  EXPECT_EQ(match.leading_run, 3u);
  ASSERT_EQ(match.holders.size(), 2u);
  EXPECT_EQ(match.holders[0].holder, 0u);
  EXPECT_EQ(match.holders[0].run_up_to_tier, (std::array<uint32_t, 4>{1, 3, 3, 3}));
  EXPECT_EQ(match.holders[1].run_up_to_tier, (std::array<uint32_t, 4>{0, 0, 2, 2}));
  EXPECT_EQ(*index.present(1, keys), std::vector<std::byte>{std::byte{0b10111}});
  ASSERT_TRUE(index.apply(0, pack({{kRecordMove, 3, 1, 1, test_key(1)}})).is_ok());
  EXPECT_EQ(index.match(1, keys)->holders[0].run_up_to_tier, (std::array<uint32_t, 4>{1, 1, 1, 3}));
}

struct History {
  explicit History(uint64_t seed) : rng(seed), index({.hash_seed = seed}) {}

  uint64_t below(uint64_t limit) { return rng() % limit; }

  void records() {
    const auto holder = static_cast<uint32_t>(below(holders));
    std::vector<TestRecord> list;
    const uint64_t first = below(keys);
    for (uint64_t i = 0, count = below(90); i < count; ++i) {
      const uint64_t roll = below(100);
      const uint8_t kind = roll < add_percent ? kRecordAdd : roll < 95 ? kRecordRemove : kRecordMove;
      list.push_back({kind, static_cast<uint8_t>(below(4)), 1 + below(3), below(1000),
                      test_key(below(4) == 0 ? below(keys) : (first + i) % keys)});
    }
    model.apply(holder, list);
    ASSERT_TRUE(index.apply(holder, pack(list)).is_ok());
  }

  void step() {
    const auto holder = static_cast<uint32_t>(below(holders));
    const uint64_t roll = below(100);
    if (roll < 80) {
      records();
    } else if (roll < 90) {
      model.begin_full(holder);
      ASSERT_TRUE(index.begin_full(holder).is_ok());
    } else if (roll < 98) {
      if (model.full_open(holder)) {
        ASSERT_EQ(*index.end_full(holder), model.end_full(holder));
      } else {
        ASSERT_FALSE(index.end_full(holder).is_ok());
      }
    } else if (roll == 98) {
      ASSERT_EQ(*index.drop_holder(holder), model.drop_holder(holder));
    } else {
      add_percent = 20 + below(70);  // phases of growth and of shrinking
    }
  }

  void compare() {
    ASSERT_EQ(index.check(), "");
    ASSERT_EQ(index.stats().blocks, model.size());
    const auto tenants = index.tenant_usage();
    ASSERT_EQ((std::map<TenantId, IndexUsage>(tenants.begin(), tenants.end())), model.tenant_usage());
    const auto by_holder = index.holder_usage();
    ASSERT_EQ((std::map<uint32_t, IndexUsage>(by_holder.begin(), by_holder.end())), model.holder_usage());
    const TenantId tenant = 1 + below(3);
    std::vector<Key> chain;
    const uint64_t first = below(keys);
    for (uint64_t i = 0, count = below(100); i < count; ++i) chain.push_back(test_key((first + i) % keys));
    const auto packed = pack_keys(chain);
    const auto located = *index.locate(tenant, packed);
    const auto present = *index.present(tenant, packed);
    Writer wire;
    for (size_t i = 0; i < chain.size(); ++i) {
      ASSERT_EQ(sorted(located[i]), model.locate(tenant, chain[i]));
      ASSERT_EQ((present[i / 8] & std::byte{1} << (i % 8)) != std::byte{0}, !located[i].empty());
      wire.u16(static_cast<uint16_t>(located[i].size()));
      for (const BlockReplica& replica : located[i]) {
        wire.u16(replica.holder);
        wire.u16(static_cast<uint16_t>(replica.tier));
        wire.u64(replica.size_bytes);
      }
    }
    ASSERT_EQ(*index.locate_packed(tenant, packed), wire.take());
    const auto runs = model.match(tenant, chain);
    const auto match = *index.match(tenant, packed);
    ASSERT_EQ(match.holders.size(), runs.size());
    for (const HolderMatch& item : match.holders) ASSERT_EQ(item.run_up_to_tier, runs.at(item.holder));
  }

  std::mt19937_64 rng;
  BlockIndex index;
  ModelIndex model;
  uint64_t holders = 12;
  uint64_t keys = 3000;
  uint64_t add_percent = 80;
};

TEST(BlockIndex, AgreesWithTheModelOverRandomHistories) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    History history(seed);
    history.holders = seed % 3 == 0 ? 40 : 5;
    history.keys = seed % 2 == 0 ? 400 : 6000;
    for (int step = 0; step < 600; ++step) {
      history.step();
      if (step % 20 == 19) history.compare();
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(BlockIndex, AnAuditFindsWhatIsShortAndWhatIsClose) {
  BlockIndex index;
  const auto record = [](uint64_t number, TenantId tenant = 1, uint8_t tier = 1) {
    return TestRecord{kRecordAdd, tier, tenant, 100, test_key(number)};
  };
  // Holders 0 and 1 are in domain 0, holder 2 in domain 1; copies on holder 3 do not count.
  ASSERT_TRUE(index.apply(0, pack({record(1), record(2), record(3), record(4, 9), record(6)})).is_ok());
  ASSERT_TRUE(index.apply(1, pack({record(2), record(6)})).is_ok());
  ASSERT_TRUE(index.apply(2, pack({record(3), record(6, 1, 2)})).is_ok());
  ASSERT_TRUE(index.apply(3, pack({record(1), record(5)})).is_ok());
  IndexAudit audit{.wanted = {{1, 2}}, .domains = {0, 0, 1, kNoDomain}, .domain_count = 2};
  AuditPage page = index.audit(audit, 0, 1000, 1000);
  ASSERT_EQ(page.found.size(), 2u) << "not the whole one, not another tenant's, not one that lasts nowhere";
  EXPECT_EQ(page.next, 0u);
  EXPECT_EQ(page.found[0].key, test_key(1));
  EXPECT_EQ(page.found[0].copies, 1u);
  EXPECT_FALSE(page.found[0].close);
  EXPECT_EQ(page.found[1].key, test_key(2));
  EXPECT_TRUE(page.found[1].close);
  EXPECT_EQ(page.short_blocks, 1u);
  EXPECT_EQ(page.missing_bytes, 100u);
  EXPECT_EQ(page.close_blocks, 1u);
  EXPECT_EQ(page.close_bytes, 100u);

  audit.domain_count = 1;
  EXPECT_EQ(index.audit(audit, 0, 1000, 1000).close_blocks, 0u) << "there is no other domain";
  audit.wanted_of_others = 4;
  page = index.audit(audit, 0, 1000, 0);
  EXPECT_TRUE(page.found.empty());
  EXPECT_EQ(page.short_blocks, 2u);
  EXPECT_EQ(page.missing_bytes, 400u);
}

TEST(BlockIndex, AnAuditGoesOnWhereItStopped) {
  BlockIndex index;
  std::vector<TestRecord> all;
  for (uint64_t i = 0; i < 100; ++i) all.push_back({kRecordAdd, 1, 1, 10, test_key(i)});
  ASSERT_TRUE(index.apply(0, pack(all)).is_ok());
  const IndexAudit audit{.wanted = {}, .wanted_of_others = 2, .domains = {0}};
  for (const auto& [entries, found] : {std::pair{7u, 100u}, {1000u, 3u}, {5u, 4u}}) {
    std::set<Key> seen;
    uint32_t at = 0;
    do {
      const AuditPage page = index.audit(audit, at, entries, found);
      EXPECT_LE(page.found.size(), found);
      for (const AuditedBlock& block : page.found) EXPECT_TRUE(seen.insert(block.key).second);
      at = page.next;
    } while (at != 0);
    EXPECT_EQ(seen.size(), 100u);
  }
  EXPECT_EQ(index.audit(audit, 0xffffffff, 10, 10).next, 0u) << "a start beyond the end";
  EXPECT_EQ(index.audit(audit, 0, 0, 10).next, 0u) << "nothing was to be looked at";
}

TEST(BlockIndex, GrowsAndShrinksThroughManyBlocks) {
  BlockIndex index({.hash_seed = 5});
  constexpr uint64_t kBlocks = 60'000;
  std::vector<TestRecord> list;
  std::vector<Key> keys;
  for (uint64_t i = 0; i < kBlocks; ++i) {
    list.push_back({kRecordAdd, 1, 1, i, test_key(i)});
    keys.push_back(test_key(i));
  }
  for (int round = 0; round < 2; ++round) {  // the second time on recycled entries
    for (auto& record : list) record.kind = kRecordAdd;
    ASSERT_TRUE(index.apply(1, pack(list)).is_ok());
    EXPECT_EQ(index.match(1, pack_keys(keys))->leading_run, kBlocks);
    EXPECT_EQ(index.check(), "");
    const uint64_t memory_bytes = index.memory_bytes();
    for (auto& record : list) record.kind = kRecordRemove;
    ASSERT_TRUE(index.apply(1, pack(list)).is_ok());
    EXPECT_EQ(index.stats().blocks, 0u);
    EXPECT_EQ(index.check(), "");
    EXPECT_LE(index.memory_bytes(), memory_bytes);
  }
}

TEST(BlockIndex, ReadersRunBesideWriters) {
  BlockIndex index({.hash_seed = 9});
  std::vector<TestRecord> list;
  std::vector<Key> keys;
  for (uint64_t i = 0; i < 500; ++i) {
    list.push_back({kRecordAdd, 1, 1, 1, test_key(i)});
    keys.push_back(test_key(i));
  }
  const auto records = pack(list);
  const auto packed = pack_keys(keys);
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        EXPECT_LE(index.match(1, packed)->leading_run, 500u);
        EXPECT_EQ(index.locate(1, packed)->size(), 500u);
        EXPECT_EQ(index.check(), "");
      }
    });
  }
  std::thread other([&] {
    for (int i = 0; i < 30; ++i) EXPECT_TRUE(index.apply(9, records).is_ok());
  });
  for (uint32_t round = 0; round < 30; ++round) {
    ASSERT_TRUE(index.apply(round % 6, records).is_ok());
    if (round % 3 == 0) {
      ASSERT_TRUE(index.begin_full(round % 6).is_ok());
      ASSERT_TRUE(index.end_full(round % 6).is_ok());
    }
    if (round % 5 == 0) {
      ASSERT_TRUE(index.drop_holder(round % 6).is_ok());
    }
  }
  other.join();
  stop = true;
  for (auto& reader : readers) reader.join();
  EXPECT_EQ(index.check(), "");
}

TEST(IndexBenchmark, CountsWhatItDid) {
  const auto result =
      index_benchmark({.blocks = 2000, .holders = 10, .operations = 4000, .hash_seed = 1}).value();
  EXPECT_EQ(result.blocks, 2000u);
  EXPECT_GE(result.operations, 4000u);
  EXPECT_GT(result.apply_per_s, 0.0);
  EXPECT_GT(result.locate_per_s, 0.0);
  EXPECT_GT(result.match_per_s, 0.0);
  EXPECT_EQ(index_benchmark({.blocks = 0}).code(), Code::kInvalidArgument);
  EXPECT_EQ(index_benchmark({.blocks = 1ull << 40}).code(), Code::kTooLarge);
}

}  // namespace
}  // namespace mooncache

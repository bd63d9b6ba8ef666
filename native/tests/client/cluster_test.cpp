// Several real nodes: placement, replicas, failed nodes, breakers, and the pure parts.
#include <sys/socket.h>

#include <map>
#include <set>

#include "client/breaker.h"
#include "client/location_cache.h"
#include "client/pool.h"
#include "compare.h"
#include "net/socket.h"

namespace mooncache::testing {
namespace {

NodeInfo named(uint32_t index, std::string host, double weight = 1.0) {
  NodeInfo node;
  node.index = index;
  node.node_id = "node-" + std::to_string(index);
  node.host_id = std::move(host);
  node.weight = weight;
  return node;
}

TEST(Placement, LocalFirstThenDistinctHosts) {
  std::vector<NodeInfo> nodes;
  for (uint32_t i = 0; i < 6; ++i) nodes.push_back(named(i, "host-" + std::to_string(i / 2)));
  for (uint64_t k = 0; k < 200; ++k) {
    const auto three = place(key_of(k), nodes, "host-1", 3);
    ASSERT_EQ(three.size(), 3u);
    EXPECT_EQ(nodes[three[0]].host_id, "host-1");
    std::set<std::string> hosts;
    for (const uint32_t position : three) hosts.insert(nodes[position].host_id);
    EXPECT_EQ(hosts.size(), 3u);
    EXPECT_EQ(place(key_of(k), nodes, "host-1", 1)[0], three[0]);
  }
}

TEST(Placement, WeightsShareAndOneChangeMovesOnlyItsBlocks) {
  std::vector<NodeInfo> nodes{named(0, "a", 1), named(1, "b", 3), named(2, "c", 0), named(3, "d", 4)};
  nodes[3].state = NodeHealth::kDraining;
  std::map<uint32_t, int> share;
  std::vector<uint32_t> before;
  for (uint64_t k = 0; k < 4000; ++k) {
    before.push_back(place(key_of(k), nodes, "", 1)[0]);
    ++share[before.back()];
  }
  EXPECT_EQ(share[2] + share[3], 0);
  EXPECT_NEAR(share[1] / 4000.0, 0.75, 0.03);
  nodes[0].weight = 2;
  for (uint64_t k = 0; k < 4000; ++k) {
    const uint32_t now = place(key_of(k), nodes, "", 1)[0];
    EXPECT_TRUE(now == before[k] || now == 0u);
  }
}

TEST(BreakerTest, OpensProbesAndCloses) {
  Breaker breaker(3, 100, 1000);
  EXPECT_FALSE(breaker.failure(0));
  EXPECT_FALSE(breaker.failure(0));
  EXPECT_TRUE(breaker.allow(0));
  EXPECT_TRUE(breaker.failure(0));
  EXPECT_FALSE(breaker.allow(99));
  EXPECT_TRUE(breaker.allow(100));   // the probe
  EXPECT_FALSE(breaker.allow(101));  // others wait for it
  EXPECT_TRUE(breaker.failure(110));
  EXPECT_FALSE(breaker.allow(300));
  EXPECT_TRUE(breaker.allow(310));
  breaker.success(310);
  EXPECT_TRUE(breaker.allow(311));
}

TEST(BreakerTest, OneThatRefusesAtOnceIsFoundAnEighthLater) {
  for (const uint64_t away_ms : {100u, 900u, 1400u, 30'000u}) {
    Breaker breaker(3, 200, 10'000);
    for (int i = 0; i < 3; ++i) (void)breaker.failure(0, true);
    uint64_t now_ms = 0, probes = 0;
    for (; now_ms < away_ms || !breaker.allow(now_ms); ++now_ms) {
      if (now_ms >= away_ms || !breaker.allow(now_ms)) continue;
      EXPECT_TRUE(breaker.failure(now_ms, true));
      ++probes;
    }
    EXPECT_LE(now_ms, away_ms + away_ms / 8 + 27) << away_ms;
    EXPECT_LE(probes, 60u) << away_ms;
  }
}

TEST(BreakerTest, OneThatStallsIsLeftAloneForTheWholePause) {
  Breaker breaker(1, 200, 1000);
  EXPECT_TRUE(breaker.failure(0, true));
  EXPECT_TRUE(breaker.allow(26));
  EXPECT_FALSE(breaker.allow(29)) << "others wait for the probe's verdict";
  EXPECT_TRUE(breaker.failure(30));
  EXPECT_FALSE(breaker.allow(229));
  EXPECT_TRUE(breaker.allow(230));
  EXPECT_TRUE(breaker.failure(900'000, true));
  EXPECT_FALSE(breaker.allow(900'999)) << "no pause is longer than the longest one";
  EXPECT_TRUE(breaker.allow(901'000));
}

TEST(BreakerTest, AShareOfTheTrafficComesBackFirstThenAllOfIt) {
  Breaker breaker(2, 100, 1000, 1000);
  EXPECT_EQ(breaker.percent(0), 100u);
  EXPECT_FALSE(breaker.failure(0));
  EXPECT_TRUE(breaker.failure(0));
  EXPECT_EQ(breaker.percent(0), 0u);
  EXPECT_FALSE(breaker.prefers(99, 0));
  EXPECT_TRUE(breaker.prefers(100, 99)) << "the probe, whatever the roll";
  EXPECT_FALSE(breaker.prefers(101, 0)) << "one at a time";
  breaker.success(150);
  EXPECT_EQ(breaker.percent(150), 10u);
  EXPECT_EQ(breaker.percent(149), 10u) << "another thread looked at its clock before";
  EXPECT_TRUE(breaker.prefers(150, 109));
  EXPECT_FALSE(breaker.prefers(150, 110));
  EXPECT_TRUE(breaker.allow(150)) << "whoever can go nowhere else";
  breaker.success(600);
  EXPECT_EQ(breaker.percent(650), 55u);
  EXPECT_EQ(breaker.percent(1149), 99u);
  EXPECT_EQ(breaker.percent(1150), 100u);
  EXPECT_FALSE(breaker.at_rest());
  breaker.success(1200);
  EXPECT_TRUE(breaker.at_rest());
}

TEST(BreakerTest, AFailureDuringTheSlowStartOpensAtOnceAndForLonger) {
  Breaker breaker(3, 100, 1000, 1000);
  for (int i = 0; i < 3; ++i) (void)breaker.failure(0);
  EXPECT_TRUE(breaker.allow(100));
  breaker.success(100);
  breaker.success(200);
  EXPECT_TRUE(breaker.failure(300));
  EXPECT_TRUE(breaker.is_open(499));
  EXPECT_FALSE(breaker.is_open(500));
  EXPECT_TRUE(breaker.allow(500));
  breaker.success(500);
  breaker.success(1500);  // it lasted
  EXPECT_FALSE(breaker.failure(1600));
}

TEST(BreakerTest, RetriesAreAShareOfTheOperations) {
  RetryBudget budget(20, 2);
  EXPECT_EQ(budget.spend(5), 2u);
  budget.operations(10);
  EXPECT_EQ(budget.spend(5), 2u);
  EXPECT_EQ(budget.spend(1), 0u);
}

TEST(LocationCacheTest, BoundedAndCorrectable) {
  LocationCache cache(64);
  for (uint64_t k = 0; k < 1000; ++k) cache.learn(key_of(k), static_cast<uint32_t>(k));
  size_t known = 0;
  for (uint64_t k = 0; k < 1000; ++k) {
    const uint32_t node = cache.find(key_of(k)).nodes[0];
    if (node == LocationCache::kNowhere) continue;
    ++known;
    EXPECT_EQ(node, k);
  }
  EXPECT_GT(known, 0u);
  EXPECT_LE(known, 64u);
  cache.learn(key_of(5000), 3);
  EXPECT_FALSE(cache.forget(key_of(5000), 4));
  EXPECT_TRUE(cache.forget(key_of(5000), 3));
  EXPECT_EQ(cache.find(key_of(5000)).nodes[0], LocationCache::kNowhere);
}

class ClusterTest : public ::testing::Test {
 protected:
  ClusterTest() {
    for (uint32_t i = 0; i < 3; ++i)
      nodes_.push_back(std::make_unique<TestNode>(i, 64 << 20, "host-" + std::to_string(i)));
    client_ = client_for(infos(), client_config(false));
  }
  std::vector<NodeInfo> infos() const {
    std::vector<NodeInfo> list;
    for (const auto& node : nodes_) list.push_back(node->info);
    return list;
  }
  TestNode& holder(const Key& key, bool primary = true) {
    const auto order = place(key, infos(), "", 2);
    return *nodes_[order[primary ? 0 : 1]];
  }
  std::vector<std::unique_ptr<TestNode>> nodes_;
  std::unique_ptr<Client> client_;
};

TEST_F(ClusterTest, BatchSpreadsAndComesBack) {
  std::vector<std::vector<std::byte>> sources, copies;
  std::vector<ConstSlice> from;
  std::vector<Slice> to;
  const size_t count = 200;
  for (size_t i = 0; i < count; ++i) sources.push_back(bytes_of(i, 20'000));
  copies.assign(count, std::vector<std::byte>(20'000));
  for (size_t i = 0; i < count; ++i) {
    from.emplace_back(sources[i].data(), sources[i].size());
    to.push_back({copies[i].data(), copies[i].size()});
  }
  std::vector<PutBlock> puts;
  std::vector<GetBlock> gets;
  for (size_t i = 0; i < count; ++i) {
    puts.push_back({key_of(i), std::span(&from[i], 1)});
    gets.push_back({key_of(i), std::span(&to[i], 1)});
  }
  std::vector<PutOutcome> stored(count);
  ASSERT_TRUE(client_->put(puts, 2, {}, stored));
  std::set<uint32_t> used;
  for (const PutOutcome& outcome : stored) {
    ASSERT_EQ(outcome.code, Code::kOk);
    EXPECT_EQ(outcome.copies, 2u);
    used.insert(outcome.node_index);
  }
  EXPECT_EQ(used.size(), 3u);
  nodes_[1]->stop();  // with two copies nothing is lost
  std::vector<GetOutcome> got(count);
  ASSERT_TRUE(client_->get(gets, {}, {}, got));
  for (size_t i = 0; i < count; ++i) {
    ASSERT_EQ(got[i].code, Code::kOk) << i << " " << code_name(got[i].code);
    ASSERT_TRUE(copies[i] == sources[i]);
  }
}

TEST_F(ClusterTest, FindsABlockThatIsNowhereNearItsPlace) {
  const Key key = key_of(77);
  const auto order = place(key, infos(), "", 3);
  CallOptions there;
  there.node = order[2];
  const auto source = bytes_of(77, 5000);
  ASSERT_EQ(put_one(*client_, key, source, 1, there).code, Code::kOk);
  auto stranger = client_for(infos(), client_config(false));
  std::vector<std::byte> copy(5000);
  const GetOutcome got = get_one(*stranger, key, copy);
  EXPECT_EQ(got.code, Code::kOk);
  EXPECT_EQ(got.node_index, order[2]);
  EXPECT_TRUE(same_bytes(copy, source));
  EXPECT_EQ(get_one(*stranger, key_of(78), copy).code, Code::kNotFound);
}

TEST_F(ClusterTest, CorruptCopyFallsToTheOtherReplica) {
  const Key key = key_of(5);
  const auto source = bytes_of(5, 100'000);
  ASSERT_EQ(put_one(*client_, key, source, 2).copies, 2u);
  std::vector<std::byte> copy(source.size());
  const uint32_t chosen = get_one(*client_, key, copy).node_index;  // an idle client reads the same one again
  TestNode& first = chosen == holder(key).info.index ? holder(key) : holder(key, false);
  ASSERT_EQ(first.server->store().flip_bit(first.tenant(), key, 9), Code::kOk);
  const GetOutcome got = get_one(*client_, key, copy);
  EXPECT_EQ(got.code, Code::kOk);
  EXPECT_NE(got.node_index, first.info.index);
  EXPECT_TRUE(same_bytes(copy, source));
  EXPECT_EQ(stat_of(*client_, "miss_checksum"), 1u);
}

TEST_F(ClusterTest, FullNodePassesThePutOn) {
  const Key key = key_of(6);
  TestNode& first = holder(key);
  first.server->store().set_draining(true);
  const PutOutcome outcome = put_one(*client_, key, bytes_of(6, 1000));
  EXPECT_EQ(outcome.code, Code::kOk);
  EXPECT_NE(outcome.node_index, first.info.index);
}

TEST_F(ClusterTest, SilentNodeCostsABoundedDelayAndOpensItsBreaker) {
  const Key key = key_of(9);
  const auto source = bytes_of(9, 10'000);
  ClientConfig config = client_config(false);
  config.connect_timeout_ms = 1000;
  client_ = client_for(infos(), config);
  ASSERT_EQ(put_one(*client_, key, source, 2).copies, 2u);
  TestNode& first = holder(key);
  first.stop();
  // takes connections and never says a word
  auto silent = net::listen_tcp("127.0.0.1", 0);
  ASSERT_TRUE(silent);
  first.info.tcp_port = *net::local_port(silent->get());
  first.info.unix_path.clear();
  client_->set_map(2, infos());
  std::vector<std::byte> copy(source.size());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(get_one(*client_, key, copy).code, Code::kOk);
  CallOptions only;
  only.node = first.info.index;
  for (int i = 0; i < 4; ++i) (void)get_one(*client_, key, copy, only);
  EXPECT_GE(stat_of(*client_, "breaker_opens"), 1u);
  EXPECT_EQ(get_one(*client_, key, copy, only).code, Code::kNodeUnavailable);
  const auto match = client_->match(std::span(&key, 1), false, {});
  ASSERT_TRUE(match);
  EXPECT_EQ(match->leading_run, 1u);
  EXPECT_EQ(match->unreachable_nodes, 1u);
}

TEST_F(ClusterTest, DeadlineHoldsAgainstASilentNode) {
  auto silent = net::listen_tcp("127.0.0.1", 0);
  ASSERT_TRUE(silent);
  NodeInfo node = named(0, "x");
  node.tcp_host = "127.0.0.1";
  node.tcp_port = *net::local_port(silent->get());
  auto lonely = client_for({node}, client_config(false));
  CallOptions options;
  options.deadline = Deadline::after_ms(50);
  std::vector<std::byte> copy(10);
  EXPECT_EQ(get_one(*lonely, key_of(1), copy, options).code, Code::kDeadlineExceeded);
  EXPECT_EQ(put_one(*client_for({}, client_config(false)), key_of(1), copy).code, Code::kNoNodes);
}

TEST_F(ClusterTest, LocationsFromTheDirectory) {
  ClientConfig config = client_config(false);
  config.fanout_nodes_max = 2;
  auto client = client_for(infos(), config);
  const std::vector<Key> keys{key_of(1), key_of(2)};
  EXPECT_EQ(client->unlocated(keys).size(), 2u);
  Writer packed;
  packed.u16(1);
  packed.u16(2);
  packed.u16(0);
  packed.u64(100);
  packed.u16(0);
  ASSERT_TRUE(client->learn_locations(keys, packed.view()));
  EXPECT_EQ(client->unlocated(keys), std::vector<uint32_t>{1});
  EXPECT_EQ(client->learn_locations(keys, packed.view().first(5)).code, Code::kInvalidArgument);
}

}  // namespace
}  // namespace mooncache::testing

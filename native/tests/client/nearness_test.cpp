// Which holder is read first: the order itself, what the cache keeps, and clients over real nodes.
#include "client/nearness.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "client/location_cache.h"
#include "client/pool.h"
#include "net/socket.h"

namespace mooncache::testing {
namespace {

NodeInfo node_at(uint32_t index, std::string host, std::string_view arena) {
  NodeInfo node;
  node.index = index;
  node.node_id = "node-" + std::to_string(index);
  node.host_id = std::move(host);
  node.unix_path = "/run/" + node.node_id;
  node.medium = medium_of(arena);
  node.mappable = mappable_arena(arena);
  return node;
}

uint32_t rank_of(const NodeInfo& node, const ReadingHost& here, bool sound = true) {
  return read_rank(sound, reach_of(node, here), node.medium);
}

TEST(Nearness, SoundThenTheWayThenTheMemory) {
  const ReadingHost here{"a", true, true};
  NodeInfo over_rdma = node_at(4, "b", "dax");
  over_rdma.rdma = true;
  const std::vector<NodeInfo> sorted{
      node_at(0, "a", "memory"),
      node_at(1, "a", "dax"),
      node_at(2, "a", "gpu"),
      node_at(3, "a", "file"),
      over_rdma,
      node_at(5, "b", "gpu"),
      node_at(6, "c", "tmpfs"),
      node_at(7, "c", "something"),
      node_at(8, "b", "fsdax"),
      node_at(9, "b", "file"),
  };
  for (size_t i = 1; i < sorted.size(); ++i)
    EXPECT_LE(rank_of(sorted[i - 1], here), rank_of(sorted[i], here));
  EXPECT_EQ(rank_of(sorted[6], here), rank_of(sorted[7], here)) << "what is not known counts as memory";
  EXPECT_LT(rank_of(sorted[5], here), rank_of(sorted[6], here));
  EXPECT_LT(rank_of(sorted[9], here), rank_of(sorted[0], here, false)) << "a failing node is the last choice";
}

TEST(Nearness, WhatIsSwitchedOffIsNoWay) {
  const NodeInfo same = node_at(0, "a", "memory");
  EXPECT_EQ(reach_of(same, {"a", true, false}), Reach::kMapped);
  EXPECT_EQ(reach_of(same, {"a", false, false}), Reach::kHost);
  EXPECT_EQ(reach_of(node_at(0, "a", "gpu"), {"a", true, false}), Reach::kHost);
  NodeInfo other = node_at(1, "", "memory");
  EXPECT_EQ(reach_of(other, {"", true, true}), Reach::kTcp) << "no name is nobody's host";
  other.rdma = true;
  EXPECT_EQ(reach_of(other, {"a", true, true}), Reach::kRdma);
  EXPECT_EQ(reach_of(other, {"a", true, false}), Reach::kTcp);
}

TEST(Nearness, NearestAreTheSmallestInOrderOfOffers) {
  std::mt19937 source(7);
  const auto random = [&] { return static_cast<uint32_t>(source()); };
  for (int run = 0; run < 2000; ++run) {
    std::vector<uint32_t> ranks(1 + random() % 8), offers(1 + random() % 12);
    for (uint32_t& rank : ranks) rank = random() % 3;
    for (uint32_t& offer : offers) offer = random() % static_cast<uint32_t>(ranks.size());
    Nearest nearest;
    for (const uint32_t offer : offers)
      nearest.offer(offer, false, [&](uint32_t at, bool) { return ranks[at]; });
    std::vector<uint32_t> order;
    for (const uint32_t offer : offers) {
      if (std::find(order.begin(), order.end(), offer) == order.end()) order.push_back(offer);
    }
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return ranks[a] < ranks[b]; });
    order.resize(std::min(order.size(), Nearest::kMax));
    EXPECT_EQ(nearest.first(), order[0]);
    EXPECT_EQ(std::vector<uint32_t>(nearest.all().begin(), nearest.all().end()), order);
  }
  EXPECT_EQ(Nearest{}.first(), kNoNode);
}

TEST(Nearness, TheCacheKeepsTwoPlaces) {
  LocationCache cache(64);
  const Key key = key_of(1);
  const auto places = [&] {
    const auto found = cache.find(key).nodes;
    EXPECT_EQ(found[2], LocationCache::kNowhere);
    return std::pair(found[0], found[1]);
  };
  const auto learn_two = [&](uint32_t first, uint32_t second) {
    cache.learn(key, std::vector<uint32_t>{first, second});
  };
  const uint32_t none = LocationCache::kNowhere;
  learn_two(3, 5);
  cache.learn(key, 5);  // read there: the other copy was not asked about
  EXPECT_EQ(places(), std::pair(3u, 5u));
  EXPECT_FALSE(cache.forget(key, 4));
  EXPECT_TRUE(cache.forget(key, 3));
  EXPECT_EQ(places(), std::pair(5u, none));
  learn_two(6, 7);
  EXPECT_TRUE(cache.forget(key, 7));
  EXPECT_EQ(places(), std::pair(6u, none));
  EXPECT_TRUE(cache.forget(key, 6));
  EXPECT_EQ(places(), std::pair(none, none));
  learn_two(8, 9);
  cache.learn(key, 1);
  EXPECT_EQ(places(), std::pair(1u, none));
}

TEST(Nearness, TheCacheKeepsFourPlacesAndWhenAllNodesWereAsked) {
  LocationCache cache(64);
  const Key key = key_of(2);
  using Nodes = std::array<uint32_t, LocationCache::kPlaces>;
  const uint32_t none = LocationCache::kNowhere;
  EXPECT_EQ(cache.find(key).asked_s, LocationCache::kNeverAsked);
  cache.learn(key, std::vector<uint32_t>{4, 3, 2, 1, 0}, 77);
  EXPECT_EQ(cache.find(key).nodes, (Nodes{4, 3, 2, 1})) << "those to read first";
  cache.learn(key, 2);
  EXPECT_EQ(cache.find(key).asked_s, 77u) << "a read of a known copy says nothing about others";
  EXPECT_TRUE(cache.forget(key, 3));
  EXPECT_EQ(cache.find(key).nodes, (Nodes{4, 2, 1, none}));
  cache.learn(key, std::vector<uint32_t>{2}, 90);
  EXPECT_EQ(cache.find(key).nodes, (Nodes{2, none, none, none})) << "all nodes said so";
  EXPECT_EQ(cache.find(key).asked_s, 90u);
  cache.learn(key, 9);
  EXPECT_EQ(cache.find(key).asked_s, LocationCache::kNeverAsked);
  cache.learn(key_of(3), 70'000);  // an index that no message can name
  EXPECT_EQ(cache.find(key_of(3)).nodes[0], none);
}

constexpr auto kIdle = [](uint32_t) { return uint64_t{0}; };
auto turns(uint64_t seed) {
  return [seed](uint32_t position) { return turn_of(seed, position); };
}

TEST(ReadSpread, TheHolderWithTheFewestBytesUnderWayGoesFirst) {
  const std::vector<uint32_t> holders{0, 1, 2};
  const std::vector<uint64_t> busy{300, 100, 200};
  for (uint64_t seed = 0; seed < 50; ++seed) {
    ReadSpread spread;
    EXPECT_EQ(spread.choose(
                  holders, 1, [&](uint32_t at) { return busy[at]; }, turns(seed)),
              1u);
  }
  ReadSpread alone;
  const std::vector<uint32_t> only{2};
  EXPECT_EQ(alone.choose(
                only, 1 << 20, [&](uint32_t at) { return busy[at]; }, turns(1)),
            2u);
}

TEST(ReadSpread, ClientsThatKnowNothingOfEachOtherReadDifferentCopies) {
  const std::vector<uint32_t> holders{0, 1, 2, 3};
  std::vector<uint32_t> reads(4);
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    ReadSpread one, again;
    const uint32_t chosen = one.choose(holders, 4096, kIdle, turns(seed));
    EXPECT_EQ(again.choose(holders, 4096, kIdle, turns(seed)), chosen);
    ++reads[chosen];
  }
  for (const uint32_t count : reads) EXPECT_NEAR(count, 1000, 150);
}

TEST(ReadSpread, ASmallBatchGoesToOneNodeAndALargeOneToAll) {
  const std::vector<uint32_t> holders{0, 1, 2};
  for (uint64_t seed = 0; seed < 50; ++seed) {
    ReadSpread small, large;
    std::vector<uint64_t> of_small(3), of_large(3);
    for (uint64_t k = 0; k < 16; ++k)
      of_small[small.choose(holders, 4096, kIdle, turns(seed * 1000 + k))] += 4096;
    EXPECT_EQ(*std::max_element(of_small.begin(), of_small.end()), 16u * 4096);
    for (uint64_t k = 0; k < 64; ++k)
      of_large[large.choose(holders, 100'000, kIdle, turns(seed * 1000 + k))] += 100'000;
    const auto [least, most] = std::minmax_element(of_large.begin(), of_large.end());
    EXPECT_LE(*most - *least, 200'000u) << "no more than a piece apart";
  }
}

TEST(ReadSpread, ABlockThatTheLastNodeLacksGoesElsewhere) {
  ReadSpread spread;
  const std::vector<uint32_t> all{0, 1, 2};
  const uint32_t first = spread.choose(all, 10, kIdle, turns(5));
  std::vector<uint32_t> others;
  for (const uint32_t at : all) {
    if (at != first) others.push_back(at);
  }
  EXPECT_NE(spread.choose(others, 10, kIdle, turns(5)), first);
}

TEST(Placement, GpuMemoryHasItsShareAndNoMore) {
  std::vector<NodeInfo> nodes{node_at(0, "a", "gpu"), node_at(1, "b", "memory")};
  nodes[0].weight = 1;
  nodes[1].weight = 9;
  size_t on_gpu = 0;
  for (uint64_t k = 0; k < 4000; ++k) on_gpu += place(key_of(k), nodes, "a", 1)[0] == 0 ? 1 : 0;
  EXPECT_NEAR(static_cast<double>(on_gpu) / 4000, 0.1, 0.02);
  nodes[0].medium = Medium::kDram;
  EXPECT_EQ(place(key_of(1), nodes, "a", 1), std::vector<uint32_t>{0});
}

// Three nodes, each on a host of its own; the last one says that it is a GPU's memory.
class TierTest : public ::testing::Test {
 protected:
  TierTest() {
    for (uint32_t i = 0; i < 3; ++i)
      nodes_.push_back(std::make_unique<TestNode>(i, 64 << 20, "host-" + std::to_string(i)));
    nodes_[2]->info.medium = Medium::kHbm;
    nodes_[2]->info.mappable = false;
  }
  std::vector<NodeInfo> infos() const {
    std::vector<NodeInfo> list;
    for (const auto& node : nodes_) list.push_back(node->info);
    return list;
  }
  // As the master packs where a block is.
  Writer located_on(std::initializer_list<uint16_t> where) {
    Writer packed;
    packed.u16(static_cast<uint16_t>(where.size()));
    for (const uint16_t index : where) {
      packed.u16(index);
      packed.u16(0);
      packed.u64(source_.size());
    }
    return packed;
  }
  void store_on(Client& client, const Key& key, std::initializer_list<uint32_t> where) {
    for (const uint32_t index : where) {
      CallOptions there;
      there.node = index;
      ASSERT_EQ(put_one(client, key, source_, 1, there).code, Code::kOk);
    }
  }
  uint32_t read(Client& client, const Key& key) {
    std::vector<std::byte> copy(source_.size());
    const GetOutcome got = get_one(client, key, copy);
    EXPECT_EQ(got.code, Code::kOk) << code_name(got.code);
    EXPECT_TRUE(copy == source_);
    return got.node_index;
  }
  std::vector<std::unique_ptr<TestNode>> nodes_;
  ClientConfig config_ = client_config(false);
  const std::vector<std::byte> source_ = bytes_of(1, 50'000);
};

TEST_F(TierTest, AMatchLearnsTheFastestAndTheNextOneAnswersWhenItDies) {
  auto writer = client_for(infos(), config_);
  auto reader = client_for(infos(), config_);
  std::vector<Key> keys;
  for (uint64_t k = 0; k < 20; ++k) {
    keys.push_back(key_of(k));
    store_on(*writer, keys.back(), {static_cast<uint32_t>(k % 2), 2});
  }
  const auto found = reader->match(keys, false, {});
  ASSERT_TRUE(found);
  for (uint32_t k = 0; k < 20; ++k) {
    EXPECT_EQ(found->places[found->place_of[k]],
              (std::vector<BlockCopy>{{2, Tier::kHbm}, {k % 2, Tier::kDram}}));
  }
  EXPECT_EQ(found->places.size(), 3u) << "nowhere, and two kinds";
  for (const Key& key : keys) EXPECT_EQ(read(*reader, key), 2u);
  nodes_[2]->stop();
  for (uint64_t k = 0; k < 20; ++k) EXPECT_EQ(read(*reader, keys[k]), k % 2);
}

TEST_F(TierTest, APutOfTwoCopiesAndTheDirectoryTeachTheSame) {
  ClientConfig config = config_;
  config.fanout_nodes_max = 1;  // as in a large cluster: nobody is asked beside the guesses
  auto writer = client_for(infos(), config);
  uint32_t on_gpu = 0;
  for (uint64_t k = 0; k < 40; ++k) {
    const Key key = key_of(100 + k);
    ASSERT_EQ(put_one(*writer, key, source_, 2).copies, 2u);
    const auto order = place(key, infos(), "", 2);
    const bool there = order[0] == 2 || order[1] == 2;
    const uint32_t from = read(*writer, key);
    if (there)
      EXPECT_EQ(from, 2u);
    else
      EXPECT_TRUE(from == order[0] || from == order[1]) << from;
    EXPECT_EQ(read(*writer, key), from) << "an idle client does not go from one to the other";
    on_gpu += there ? 1 : 0;
  }
  EXPECT_GT(on_gpu, 10u);
  auto reader = client_for(infos(), config);
  const Key key = key_of(7);
  store_on(*writer, key, {0, 1, 2});
  ASSERT_TRUE(reader->learn_locations(std::span(&key, 1), located_on({0, 1, 2}).view()));
  EXPECT_EQ(read(*reader, key), 2u);
}

TEST_F(TierTest, MappedMemoryOfTheOwnHostGoesBeforeAGpu) {
  ClientConfig config = config_;
  config.host_id = "host-0";
  config.shm_enabled = true;
  auto client = client_for(infos(), config);
  const Key key = key_of(3);
  store_on(*client, key, {0, 1, 2});
  ASSERT_TRUE(client->match(std::span(&key, 1), false, {}));
  EXPECT_EQ(read(*client, key), 0u);
}

TEST_F(TierTest, AFailingNodeIsNotPreferred) {
  ClientConfig config = config_;
  config.breaker_failures = 1;
  config.breaker_min_ms = 60'000;
  config.breaker_max_ms = 60'000;
  auto client = client_for(infos(), config);
  const Key key = key_of(4), other = key_of(5);
  store_on(*client, key, {0, 2});
  store_on(*client, other, {0, 2});
  ASSERT_TRUE(client->match(std::span(&key, 1), false, {}));
  nodes_[2]->stop();
  CallOptions only;
  only.node = 2;
  std::vector<std::byte> copy(source_.size());
  EXPECT_NE(get_one(*client, other, copy, only).code, Code::kOk);
  const uint64_t retries = stat_of(*client, "retries");
  EXPECT_EQ(read(*client, key), 0u);  // known on both; the dead one is not even tried
  EXPECT_EQ(stat_of(*client, "retries"), retries);
  EXPECT_EQ(stat_of(*client, "breaker_skips"), 0u);
  // a map that calls the node suspect does the same before anything failed
  auto fresh = client_for(infos(), config_);
  std::vector<NodeInfo> doubted = infos();
  doubted[2].state = NodeHealth::kSuspect;
  ASSERT_TRUE(fresh->set_map(2, doubted));
  ASSERT_TRUE(fresh->learn_locations(std::span(&key, 1), located_on({2, 0}).view()));
  EXPECT_EQ(read(*fresh, key), 0u);
}

TEST_F(TierTest, StatNamesEveryCopyInTheOrderOfReading) {
  auto client = client_for(infos(), config_);
  const Key key = key_of(6);
  store_on(*client, key, {0, 1, 2});
  std::vector<BlockStat> stats(1);
  ASSERT_TRUE(client->stat(std::span(&key, 1), {}, stats));
  ASSERT_EQ(stats[0].copies.size(), 3u);
  EXPECT_EQ(stats[0].copies[0].node_index, 2u);
  EXPECT_EQ(stats[0].node_index, 2u);
  EXPECT_EQ(stats[0].size, source_.size());
  const Key missing = key_of(999);
  ASSERT_TRUE(client->stat(std::span(&missing, 1), {}, stats));
  EXPECT_EQ(stats[0].code, Code::kNotFound);
  EXPECT_TRUE(stats[0].copies.empty());
}

// Three nodes on hosts of their own, with the same blocks; readers are elsewhere.
class CopiesTest : public ::testing::Test {
 protected:
  static constexpr size_t kBlockBytes = 64 << 10;
  static constexpr uint64_t kBlocks = 48;

  CopiesTest() {
    config_.survey_ms = config_.connect_timeout_ms = 10'000;  // a busy machine
    for (uint32_t i = 0; i < 3; ++i)
      nodes_.push_back(std::make_unique<TestNode>(i, 64 << 20, "host-" + std::to_string(i)));
    auto writer = client_for(infos(), config_);
    for (uint64_t k = 0; k < kBlocks; ++k) {
      for (uint32_t index = 0; index < 3; ++index) {
        CallOptions there;
        there.node = index;
        EXPECT_EQ(put_one(*writer, key_of(k), source_, 1, there).code, Code::kOk);
      }
    }
  }
  std::vector<NodeInfo> infos() const {
    std::vector<NodeInfo> list;
    for (const auto& node : nodes_) list.push_back(node->info);
    return list;
  }
  // Reads blocks [0, count) at once; the bytes that came from each node.
  std::vector<uint64_t> read(Client& client, uint64_t count = kBlocks) {
    std::vector<std::vector<std::byte>> copies(count, std::vector<std::byte>(kBlockBytes));
    std::vector<Slice> slices;
    for (auto& copy : copies) slices.push_back({copy.data(), copy.size()});
    std::vector<GetBlock> blocks;
    for (uint64_t k = 0; k < count; ++k) blocks.push_back({key_of(k), std::span(&slices[k], 1)});
    std::vector<GetOutcome> outcomes(count);
    EXPECT_TRUE(client.get(blocks, {}, {}, outcomes));
    std::vector<uint64_t> bytes(3);
    for (uint64_t k = 0; k < count; ++k) {
      EXPECT_EQ(outcomes[k].code, Code::kOk) << code_name(outcomes[k].code);
      EXPECT_TRUE(copies[k] == source_);
      if (outcomes[k].code == Code::kOk) bytes[outcomes[k].node_index] += outcomes[k].size;
    }
    return bytes;
  }
  static double busiest_over_mean(const std::vector<uint64_t>& bytes) {
    const uint64_t total = std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
    return static_cast<double>(*std::max_element(bytes.begin(), bytes.end()) * bytes.size()) /
           static_cast<double>(total);
  }
  std::vector<std::unique_ptr<TestNode>> nodes_;
  ClientConfig config_ = client_config(false);
  const std::vector<std::byte> source_ = bytes_of(3, kBlockBytes);
};

TEST_F(CopiesTest, TwelveReadersShareThreeCopiesWithAndWithoutAMatch) {
  std::vector<Key> keys;
  for (uint64_t k = 0; k < kBlocks; ++k) keys.push_back(key_of(k));
  for (const bool matches : {false, true}) {
    std::vector<uint64_t> bytes(3);
    for (int reader = 0; reader < 12; ++reader) {
      auto client = client_for(infos(), config_);
      if (matches) {
        ASSERT_TRUE(client->match(keys, false, {}));
      }
      const auto own = read(*client);
      for (size_t i = 0; i < 3; ++i) bytes[i] += own[i];
      EXPECT_EQ(stat_of(*client, "surveys"), matches ? 0u : 1u);
      read(*client);
      EXPECT_EQ(stat_of(*client, "surveys"), matches ? 0u : 1u) << "what was asked a moment ago is known";
    }
    EXPECT_LE(busiest_over_mean(bytes), 1.3);
  }
}

TEST_F(CopiesTest, LittleIsReadWithoutAQuestion) {
  auto client = client_for(infos(), config_);
  const auto bytes = read(*client, 4);
  EXPECT_EQ(stat_of(*client, "surveys"), 0u);
  EXPECT_EQ(std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}), 4 * kBlockBytes);
}

TEST_F(CopiesTest, WhatIsOnTheOwnHostIsReadThere) {
  ClientConfig config = config_;
  config.host_id = "host-1";
  config.shm_enabled = true;
  auto client = client_for(infos(), config);
  EXPECT_EQ(read(*client), (std::vector<uint64_t>{0, kBlocks * kBlockBytes, 0}));
  EXPECT_EQ(stat_of(*client, "surveys"), 0u) << "nothing is nearer";
  auto writer = client_for(infos(), config_);
  CallOptions there;
  there.node = 1;
  std::vector<Key> keys;
  for (uint64_t k = 0; k < kBlocks; ++k) keys.push_back(key_of(k));
  std::vector<Code> codes(kBlocks);
  ASSERT_TRUE(writer->remove(keys, there, codes));
  auto fresh = client_for(infos(), config);
  const auto bytes = read(*fresh);
  EXPECT_EQ(bytes[1], 0u);
  EXPECT_LE(bytes[0], bytes[2] + 256'000) << "the others share it";
  EXPECT_LE(bytes[2], bytes[0] + 256'000);
}

TEST_F(CopiesTest, ADeadCopyAndADamagedOneLeaveTheReadingToTheOthers) {
  auto client = client_for(infos(), config_);
  read(*client);
  for (uint64_t k = 0; k < kBlocks; ++k)
    ASSERT_EQ(nodes_[0]->server->store().flip_bit(nodes_[0]->tenant(), key_of(k), 99), Code::kOk);
  nodes_[1]->stop();
  EXPECT_EQ(read(*client), (std::vector<uint64_t>{0, 0, kBlocks * kBlockBytes}));
  EXPECT_GT(stat_of(*client, "miss_checksum"), 0u);
}

TEST_F(CopiesTest, ANodeThatDoesNotAnswerAtOnceIsNotWaitedForAgain) {
  auto silent = net::listen_tcp("127.0.0.1", 0);
  ASSERT_TRUE(silent);
  std::vector<NodeInfo> list = infos();
  list.push_back(list[2]);
  list[3].index = 3;
  list[3].node_id = "silent";
  list[3].host_id = "host-3";
  list[3].unix_path.clear();
  list[3].tcp_port = *net::local_port(silent->get());
  list[3].weight = 0;
  ClientConfig config = config_;
  config.survey_ms = 500;
  auto client = client_for(list, config);
  const auto bytes = read(*client);
  EXPECT_GT(bytes[0], 0u);
  EXPECT_GT(bytes[1], 0u);
  EXPECT_GT(bytes[2], 0u);
  EXPECT_EQ(stat_of(*client, "surveys"), 1u);
  EXPECT_EQ(stat_of(*client, "deadline_exceeded"), 1u);
  const uint64_t other = 1000;
  auto writer = client_for(infos(), config_);
  std::vector<GetBlock> blocks;
  std::vector<std::vector<std::byte>> copies(20, std::vector<std::byte>(kBlockBytes));
  std::vector<Slice> slices;
  for (auto& copy : copies) slices.push_back({copy.data(), copy.size()});
  for (uint64_t k = 0; k < 20; ++k) {
    CallOptions there;
    there.node = 2;
    ASSERT_EQ(put_one(*writer, key_of(other + k), source_, 1, there).code, Code::kOk);
    blocks.push_back({key_of(other + k), std::span(&slices[k], 1)});
  }
  std::vector<GetOutcome> outcomes(20);
  ASSERT_TRUE(client->get(blocks, {}, {}, outcomes));
  for (const GetOutcome& outcome : outcomes) EXPECT_EQ(outcome.code, Code::kOk);
  EXPECT_EQ(stat_of(*client, "surveys"), 2u);
  EXPECT_EQ(stat_of(*client, "deadline_exceeded"), 1u) << "it was asked again";
}

}  // namespace
}  // namespace mooncache::testing

// ClusterClient against real nodes that hand maps out, and against one that lies.
#include "mooncache/cluster_client.h"

#include <sys/wait.h>

#include "client/lying_node.h"
#include "wire/cluster_map.h"

namespace mooncache::testing {
namespace {

MapNode line_of(const TestNode& node) {
  MapNode line;
  line.index = node.info.index;
  line.incarnation = node.info.incarnation;
  line.node_id = node.info.node_id;
  line.host_id = node.info.host_id;
  line.tcp_host = node.info.tcp_host;
  line.tcp_port = node.info.tcp_port;
  line.unix_path = node.info.unix_path;
  line.arena = "memory";
  line.weight = 1.0;
  return line;
}

struct Cluster {
  explicit Cluster(uint32_t count, bool unix_socket = false) {
    for (uint32_t i = 0; i < count; ++i)
      nodes.push_back(std::make_unique<TestNode>(i, 64 << 20, "host-" + std::to_string(unix_socket ? 0 : i),
                                                 unix_socket));
    publish();
  }
  // The nodes that run, to each of them.
  void publish() {
    ClusterMap map{1, ++epoch, {}};
    for (const auto& node : nodes)
      if (node->server) map.nodes.push_back(line_of(*node));
    for (const auto& node : nodes) {
      if (node->server) {
        ASSERT_TRUE(node->server->set_cluster_map(map));
      }
    }
  }
  std::string seed(size_t i) const {
    return nodes[i]->info.tcp_host + ":" + std::to_string(nodes[i]->info.tcp_port);
  }

  std::vector<std::unique_ptr<TestNode>> nodes;
  uint64_t epoch = 0;
};

ClusterConfig config_of(std::vector<std::string> seeds) {
  ClusterConfig config;
  config.seeds = std::move(seeds);
  config.client = client_config(false);
  config.refresh_ms = 20;
  config.connect_timeout_ms = 10'000;
  return config;
}

std::unique_ptr<ClusterClient> connected(ClusterConfig config) {
  auto made = ClusterClient::connect(std::move(config));
  EXPECT_TRUE(made) << made.status().message;
  return made ? std::move(*made) : nullptr;
}

Code put_block(ClusterClient& client, uint64_t number) {
  const auto bytes = bytes_of(number, 3000);
  const ConstSlice slice(bytes.data(), bytes.size());
  const PutBlock block{key_of(number), std::span(&slice, 1)};
  PutOutcome outcome;
  const Status status = client.put(std::span(&block, 1), 1, within_ms(10'000), std::span(&outcome, 1));
  return status ? outcome.code : status.code;
}

Code get_block(ClusterClient& client, uint64_t number) {
  std::vector<std::byte> bytes(3000);
  const Slice slice{bytes.data(), bytes.size()};
  const GetBlock block{key_of(number), std::span(&slice, 1)};
  GetOutcome outcome;
  const Status status = client.get(std::span(&block, 1), {}, within_ms(10'000), std::span(&outcome, 1));
  if (!status) return status.code;
  if (outcome.code == Code::kOk) {
    EXPECT_EQ(bytes, bytes_of(number, 3000));
  }
  return outcome.code;
}

TEST(ClusterClientTest, OneSeedIsEnoughForAllNodes) {
  Cluster cluster(3);
  const auto client = connected(config_of({cluster.seed(1)}));
  ASSERT_TRUE(client);
  EXPECT_EQ(client->state().nodes, 3u);
  for (uint64_t k = 0; k < 30; ++k) ASSERT_EQ(put_block(*client, k), Code::kOk);
  for (uint64_t k = 0; k < 30; ++k) ASSERT_EQ(get_block(*client, k), Code::kOk);
  for (const auto& node : cluster.nodes)
    EXPECT_GT(node->server->store().stats().blocks, 0u) << "spread as placed";
  std::vector<Key> keys{key_of(0), key_of(99)};
  std::vector<Code> codes(2);
  ASSERT_TRUE(client->exists(keys, within_ms(10'000), codes));
  EXPECT_EQ(codes, (std::vector{Code::kOk, Code::kNotFound}));
  ASSERT_TRUE(client->remove(keys, within_ms(10'000), codes));
  EXPECT_EQ(codes, (std::vector{Code::kOk, Code::kNotFound}));
  EXPECT_EQ(get_block(*client, 0), Code::kNotFound);
}

TEST(ClusterClientTest, AMapWithoutNodesIsAskedForAgain) {
  TestNode first(0, 64 << 20, "host-0", false);
  ASSERT_TRUE(
      first.server->set_cluster_map(ClusterMap{1, 1, {}}));  // it joined, and has not heard of that yet
  const std::string seed = first.info.tcp_host + ":" + std::to_string(first.info.tcp_port);
  auto impatient = config_of({seed});
  impatient.connect_timeout_ms = 200;
  EXPECT_EQ(ClusterClient::connect(std::move(impatient)).code(), Code::kNoNodes);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_TRUE(first.server->set_cluster_map(ClusterMap{1, 2, {line_of(first)}}));
  });
  const auto client = connected(config_of({seed}));
  later.join();
  ASSERT_TRUE(client);
  EXPECT_EQ(client->state().nodes, 1u);
  EXPECT_EQ(put_block(*client, 1), Code::kOk);
}

TEST(ClusterClientTest, NodesThatJoinAreUsedAndTheSeedMayGo) {
  Cluster cluster(1);
  const auto client = connected(config_of({cluster.seed(0)}));
  ASSERT_TRUE(client);
  ASSERT_EQ(put_block(*client, 1), Code::kOk);
  cluster.nodes.push_back(std::make_unique<TestNode>(1, 64 << 20, "host-1", false));
  cluster.publish();
  ASSERT_TRUE(eventually([&] { return client->state().nodes == 2; }));
  cluster.nodes[0]->stop();  // the seed
  cluster.publish();
  ASSERT_TRUE(eventually([&] { return client->state().nodes == 1; }));
  EXPECT_EQ(put_block(*client, 2), Code::kOk);
  EXPECT_EQ(get_block(*client, 2), Code::kOk);
  EXPECT_EQ(get_block(*client, 1), Code::kNotFound) << "it was on the node that is gone";
}

TEST(ClusterClientTest, ANodeThatStartsElsewhereIsFoundByItsSeed) {
  Cluster cluster(2);
  auto config = config_of({cluster.seed(0), cluster.seed(1)});
  config.refresh_ms = 600'000;  // only calls that fail have the map asked for
  const auto client = connected(std::move(config));
  ASSERT_TRUE(client);
  cluster.nodes[0]->stop();
  cluster.nodes[0]->config.incarnation = 77;
  cluster.nodes[0]->start();  // on another port
  cluster.publish();
  const uint64_t epoch = cluster.epoch;
  ASSERT_TRUE(eventually([&] {
    for (uint64_t k = 0; k < 8; ++k) (void)put_block(*client, k);
    return client->state().epoch == epoch;
  }));
  EXPECT_TRUE(eventually(
      [&] { return put_block(*client, 500) == Code::kOk || get_block(*client, 500) == Code::kOk; }));
  for (uint64_t k = 100; k < 130; ++k) EXPECT_EQ(put_block(*client, k), Code::kOk);
  EXPECT_GT(cluster.nodes[0]->server->store().stats().blocks, 0u);
}

TEST(ClusterClientTest, MissesOfALargeClusterAreLookedForOnAllNodes) {
  Cluster cluster(5);
  auto config = config_of({cluster.seed(0)});
  config.client.fanout_nodes_max = 1;  // so this one is large
  const auto client = connected(std::move(config));
  ASSERT_TRUE(client);
  std::vector<NodeInfo> infos;
  for (const auto& node : cluster.nodes) infos.push_back(node->info);
  const auto other = client_for(infos, client_config(false));
  for (uint64_t k = 0; k < 20; ++k) {  // where placement does not look: on the last one that it names
    CallOptions there = within_ms(10'000);
    there.node = place(key_of(k), infos, "", 5).back();
    ASSERT_EQ(put_one(*other, key_of(k), bytes_of(k, 3000), 1, there).code, Code::kOk);
  }
  for (uint64_t k = 0; k < 10; ++k) EXPECT_EQ(get_block(*client, k), Code::kOk);
  std::vector<Key> keys;
  for (uint64_t k = 0; k < 21; ++k) keys.push_back(key_of(k));
  std::vector<Code> codes(keys.size());
  ASSERT_TRUE(client->exists(keys, within_ms(10'000), codes));
  EXPECT_EQ(std::count(codes.begin(), codes.end(), Code::kOk), 20);
  EXPECT_EQ(codes.back(), Code::kNotFound);
  ASSERT_TRUE(client->remove(keys, within_ms(10'000), codes));
  EXPECT_EQ(std::count(codes.begin(), codes.end(), Code::kOk), 20);
  EXPECT_EQ(get_block(*client, 3), Code::kNotFound);
}

TEST(ClusterClientTest, ItsHostIsFoundByANodeOnIt) {
  Cluster cluster(2, true);
  auto config = config_of({"unix:" + cluster.nodes[0]->info.unix_path});
  config.client.host_id.clear();
  config.client.shm_enabled = true;
  config.client.shm_min_bytes = 1;
  const auto client = connected(std::move(config));
  ASSERT_TRUE(client);
  ASSERT_EQ(put_block(*client, 1), Code::kOk);
  EXPECT_EQ(get_block(*client, 1), Code::kOk);
  EXPECT_GT(stat_of(client->client(), "shm_bytes"), 0u) << "over shared memory";
}

TEST(ClusterClientTest, WhatCannotBeConnectedSaysWhy) {
  const auto refused = [](ClusterConfig config) {
    config.connect_timeout_ms = 300;
    return ClusterClient::connect(std::move(config)).code();
  };
  EXPECT_EQ(refused(config_of({})), Code::kInvalidArgument);
  EXPECT_EQ(refused(config_of({"nowhere"})), Code::kInvalidArgument);
  auto token = config_of({"127.0.0.1:1"});
  token.token = "mcc1.nonsense";
  EXPECT_EQ(refused(token), Code::kUnauthenticated);
  EXPECT_EQ(refused(config_of({"127.0.0.1:1"})), Code::kNodeUnavailable);
  TestNode alone(0, 16 << 20, "host-a", false);
  const std::string seed = alone.info.tcp_host + ":" + std::to_string(alone.info.tcp_port);
  EXPECT_EQ(refused(config_of({seed})), Code::kMasterUnavailable);
  auto stranger = config_of({seed});
  stranger.client.credentials.key.fill(std::byte{1});
  EXPECT_EQ(refused(stranger), Code::kUnauthenticated);
  LyingNode older([](const wire::FrameHeader&) { return std::vector<std::byte>{}; });
  EXPECT_EQ(refused(config_of({"127.0.0.1:" + std::to_string(older.info.tcp_port)})), Code::kUnsupported);
}

// Pages that a test makes, one for each question.
std::vector<std::byte> answer_of(const wire::FrameHeader& asked, const wire::ClusterMapResponse& page) {
  Writer meta;
  wire::encode_status(meta, Status::ok());
  page.encode(meta);
  return LyingNode::frame(asked, meta.view());
}

Code told_by(const std::function<wire::ClusterMapResponse(int)>& pages) {
  int asked = 0;
  LyingNode node([&](const wire::FrameHeader& header) { return answer_of(header, pages(asked++)); },
                 wire::AuthResponse::kHasMap);
  const auto client = client_for({node.info}, client_config(false));
  return client->cluster_map(0, 0, 0, within_ms(10'000)).code();
}

TEST(ClusterClientTest, PagesThatMakeNoMapAreRefused) {
  MapNode node;
  node.node_id = "a";
  EXPECT_EQ(told_by([&](int) { return wire::ClusterMapResponse{1, 1, 1, 0, {node}}; }), Code::kOk);
  EXPECT_EQ(told_by([&](int) {
              return wire::ClusterMapResponse{1, 1, 9, 0, {}};
            }),
            Code::kProtocolError)
      << "no progress";
  EXPECT_EQ(told_by([&](int) {
              return wire::ClusterMapResponse{1, 1, 9, 1, {node}};
            }),
            Code::kProtocolError)
      << "not the first page";
  EXPECT_EQ(told_by([&](int) {
              return wire::ClusterMapResponse{1, 1, 9, 0, {node}};
            }),
            Code::kProtocolError)
      << "the first page again";
  EXPECT_EQ(told_by([&](int i) {
              return wire::ClusterMapResponse{1, uint64_t(i) + 1, 9, 0, {node}};
            }),
            Code::kIncomplete)
      << "another map each time";
  EXPECT_EQ(told_by([&](int i) {
              return wire::ClusterMapResponse{1, 1, 2, uint32_t(i), {node}};
            }),
            Code::kProtocolError)
      << "the same node twice";
}

// Pages whose fields are drawn, mostly near to right ones; what comes of them is a map, or a refusal.
TEST(ClusterClientTest, AnyPagesMakeAMapOrAreRefused) {
  std::mt19937_64 random(5);
  int maps = 0;
  LyingNode node(
      [&](const wire::FrameHeader& header) {
        wire::ClusterMapResponse page{
            1 + random() % 2, 1, uint32_t(random() % 4), uint32_t(random() % 3), {}};
        for (uint64_t count = random() % 3; count > 0; --count) {
          page.nodes.emplace_back();
          page.nodes.back().index = static_cast<uint32_t>(random() % 3);
        }
        auto answer = answer_of(header, page);
        if (random() % 8 == 0) {
          Writer meta;
          for (uint64_t left = random() % 60; left > 0; --left) meta.u8(static_cast<uint8_t>(random()));
          answer = LyingNode::frame(header, meta.view());
        }
        return answer;
      },
      wire::AuthResponse::kHasMap);
  auto config = client_config(false);
  config.breaker_failures = 1'000'000;
  const auto client = client_for({node.info}, config);
  for (int i = 0; i < 300; ++i) {
    const auto map = client->cluster_map(0, 1, 1, within_ms(10'000));
    if (!map) {
      EXPECT_TRUE(map.code() == Code::kProtocolError || map.code() == Code::kIncomplete ||
                  map.code() == Code::kConnectionLost)
          << code_name(map.code());
    } else if (*map) {
      EXPECT_TRUE(wire::map_valid(**map));
      ++maps;
    }
  }
  EXPECT_GT(maps, 10);
}

TEST(ClusterClientTest, AChildOfForkIsRefusedAndEnds) {
  Cluster cluster(1);
  auto client = connected(config_of({cluster.seed(0)}));
  ASSERT_TRUE(client);
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = put_block(*client, 1) == Code::kClosed && get_block(*client, 1) == Code::kClosed;
    client->refresh();
    client.reset();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(put_block(*client, 1), Code::kOk) << "the parent goes on";
  client->close();
  EXPECT_EQ(get_block(*client, 1), Code::kClosed);
}

TEST(ClusterClientTest, AReplacedTokenIsTakenOver) {
  Cluster cluster(1);
  const auto client = connected(config_of({cluster.seed(0)}));
  ASSERT_TRUE(client);
  ASSERT_EQ(put_block(*client, 1), Code::kOk);
  wire::Bytes32 next;
  next.fill(std::byte{9});
  ASSERT_TRUE(cluster.nodes[0]->server->set_secrets({secret(), next}));
  std::string token = "mcc1.";
  for (int i = 0; i < 32; ++i) token += "09";
  ASSERT_TRUE(client->set_token(token));
  ASSERT_TRUE(cluster.nodes[0]->server->set_secrets({next}));
  EXPECT_TRUE(eventually([&] { return get_block(*client, 1) == Code::kOk; }));
  cluster.nodes.push_back(std::make_unique<TestNode>(1, 64 << 20, "host-1", false));
  cluster.publish();
  EXPECT_TRUE(eventually([&] { return client->state().nodes == 2; })) << "the map is followed with it";
  EXPECT_EQ(client->set_token("mct1.team-a." + token.substr(5)).code, Code::kInvalidArgument);
}

}  // namespace
}  // namespace mooncache::testing

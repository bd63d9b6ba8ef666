// BlockWatch and give_up against real nodes, and against a node that lies.
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <thread>

#include "client/pool.h"
#include "net/socket.h"

namespace mooncache::testing {
namespace {

using wire::Opcode;
using Positions = std::vector<uint32_t>;

CallOptions within_ms(int span_ms) {
  CallOptions options;
  options.deadline = Deadline::after_ms(span_ms);
  return options;
}

uint64_t server_stat(const TestNode& node, const std::string& name) {
  for (const auto& [known, value] : node.server->stats()) {
    if (known == name) return value;
  }
  ADD_FAILURE() << "no counter " << name;
  return 0;
}

std::vector<Key> keys_from(uint64_t first, size_t count) {
  std::vector<Key> keys;
  for (size_t i = 0; i < count; ++i) keys.push_back(key_of(first + i));
  return keys;
}

// Until all these watches have ended: what each of them said, in one news.
std::map<std::string, WatchNews> ends_of(BlockWatch& watch, size_t count) {
  std::map<std::string, WatchNews> ends, open;
  const Deadline until = Deadline::after_ms(20'000);
  while (ends.size() < count && !until.expired()) {
    CallOptions options;
    options.deadline = until;
    const auto news = watch.next(options);
    if (!news) {
      ADD_FAILURE() << news.status().message;
      break;
    }
    for (const WatchNews& item : *news) {
      WatchNews& all = open[item.name];
      EXPECT_FALSE(ends.contains(item.name)) << "news after the end";
      all.positions.insert(all.positions.end(), item.positions.begin(), item.positions.end());
      all.state = item.state;
      all.code = item.code;
      std::sort(all.positions.begin(), all.positions.end());
      if (item.state != WatchState::kMore) ends[item.name] = all;
    }
  }
  EXPECT_EQ(ends.size(), count);
  return ends;
}

// Runs next() in the background until `name` waits at the node.
class WatchTest : public ::testing::TestWithParam<bool> {
 protected:
  std::unique_ptr<Client> client(std::vector<NodeInfo> nodes) {
    return client_for(std::move(nodes), client_config(GetParam()));
  }
  static bool waits_at(BlockWatch& watch, const TestNode& node, uint64_t count) {
    return eventually([&] {
      const auto news = watch.next(within_ms(1));
      EXPECT_TRUE(news && news->empty());
      return server_stat(node, "waits_open") == count;
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Routes, WatchTest, ::testing::Bool(),
                         [](const auto& route) { return route.param ? "Unix" : "Tcp"; });

TEST_P(WatchTest, LateCommitsAndWhatIsThere) {
  TestNode node(0);
  const auto client = this->client({node.info});
  const auto watch = client->watch();
  EXPECT_EQ(put_one(*client, key_of(1), bytes_of(1, 1000)).code, Code::kOk);
  ASSERT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(60'000), 0, 0));
  ASSERT_TRUE(waits_at(*watch, node, 1));
  EXPECT_EQ(put_one(*client, key_of(0), bytes_of(0, 1000)).code, Code::kOk);
  EXPECT_EQ(put_one(*client, key_of(2), bytes_of(2, 300'000)).code, Code::kOk);
  const auto ends = ends_of(*watch, 1);
  EXPECT_EQ(ends.at("a").state, WatchState::kAll);
  EXPECT_EQ(ends.at("a").positions, (Positions{0, 1, 2}));
  EXPECT_EQ(server_stat(node, "requests_wait"), 1u) << "one call, however long it takes";
  ASSERT_TRUE(watch->add("a", {key_of(2)}, Deadline::after_ms(60'000), 0, 0)) << "the name is free again";
  EXPECT_EQ(ends_of(*watch, 1).at("a").state, WatchState::kAll);
}

TEST_P(WatchTest, NewsComeOneByOne) {
  TestNode node(0);
  const auto client = this->client({node.info});
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(60'000), 0, 1));
  ASSERT_TRUE(waits_at(*watch, node, 1));
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(put_one(*client, key_of(i), bytes_of(i, 1000)).code, Code::kOk);
    const auto news = watch->next(within_ms(20'000));
    ASSERT_TRUE(news && news->size() == 1);
    EXPECT_EQ((*news)[0].positions, Positions{i});
    EXPECT_EQ((*news)[0].state, i < 2 ? WatchState::kMore : WatchState::kAll);
  }
}

TEST_P(WatchTest, GivenUpBeforeAndAfterTheWait) {
  TestNode node(0);
  const auto client = this->client({node.info});
  const auto watch = client->watch();
  const auto none = client->give_up(keys_from(0, 2), within_ms(20'000));
  ASSERT_TRUE(none);
  EXPECT_EQ(*none, 0u);
  ASSERT_TRUE(watch->add("late", keys_from(1, 3), Deadline::after_ms(60'000), 0, 0));
  EXPECT_EQ(ends_of(*watch, 1).at("late").state, WatchState::kGivenUp);
  ASSERT_TRUE(watch->add("early", keys_from(10, 3), Deadline::after_ms(60'000), 0, 0));
  ASSERT_TRUE(watch->add("other", keys_from(20, 3), Deadline::after_ms(60'000), 0, 0));
  ASSERT_TRUE(waits_at(*watch, node, 2));
  CallOptions there = within_ms(20'000);
  there.node = 0;
  const auto ended = client->give_up(keys_from(11, 5), there);
  ASSERT_TRUE(ended);
  EXPECT_EQ(*ended, 1u);
  EXPECT_EQ(ends_of(*watch, 1).at("early").state, WatchState::kGivenUp);
  EXPECT_EQ(server_stat(node, "waits_open"), 1u);
  there.node = 9;
  EXPECT_EQ(client->give_up(keys_from(0, 1), there).code(), Code::kUnknownNode);
}

TEST_P(WatchTest, TimeIsOverAtTheNodeAndWithoutIt) {
  TestNode node(0);
  const auto client = this->client({node.info});
  const auto watch = client->watch();
  EXPECT_EQ(put_one(*client, key_of(1), bytes_of(1, 1000)).code, Code::kOk);
  ASSERT_TRUE(watch->add("a", keys_from(0, 2), Deadline::after_ms(100), 0, 0));
  const auto ends = ends_of(*watch, 1);
  EXPECT_EQ(ends.at("a").state, WatchState::kTimeout);
  EXPECT_EQ(ends.at("a").positions, Positions{1}) << "what came until then";
  ASSERT_TRUE(watch->add("past", keys_from(0, 2), Deadline::after_ms(-5), 0, 0));
  EXPECT_EQ(ends_of(*watch, 1).at("past").state, WatchState::kTimeout);
}

TEST_P(WatchTest, RemovedWatchesAreWithdrawn) {
  TestNode node(0);
  const auto client = this->client({node.info});
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("a", keys_from(0, 2), Deadline::after_ms(60'000), 0, 0));
  ASSERT_TRUE(watch->add("b", keys_from(0, 2), Deadline::after_ms(60'000), 0, 0));
  ASSERT_TRUE(waits_at(*watch, node, 2));
  EXPECT_TRUE(watch->remove("a"));
  EXPECT_FALSE(watch->remove("a"));
  ASSERT_TRUE(watch->add("a", {key_of(7)}, Deadline::after_ms(60'000), 0, 0)) << "the name is free";
  EXPECT_TRUE(eventually([&] {
    (void)watch->next(within_ms(1));
    return server_stat(node, "waits_withdrawn") == 1 && server_stat(node, "waits_open") == 2;
  }));
  EXPECT_EQ(put_one(*client, key_of(7), bytes_of(7, 1000)).code, Code::kOk);
  EXPECT_EQ(ends_of(*watch, 1).at("a").positions, Positions{0});
}

TEST_P(WatchTest, TwoHundredWatchesShareAConnection) {
  TestNode node(0);
  const auto client = this->client({node.info});
  const auto watch = client->watch();
  constexpr size_t kWatches = 200, kKeys = 30;
  for (size_t i = 0; i < kWatches; ++i) {
    ASSERT_TRUE(watch->add("w" + std::to_string(i), keys_from(i, kKeys), Deadline::after_ms(60'000), 0, 0));
  }
  ASSERT_TRUE(waits_at(*watch, node, kWatches));
  EXPECT_EQ(server_stat(node, "connections_accepted"), 1u);
  std::thread writer([&] {
    for (size_t i = 0; i < kWatches + kKeys; ++i)
      EXPECT_EQ(put_one(*client, key_of(i), bytes_of(i, 200)).code, Code::kOk);
  });
  for (const auto& [name, news] : ends_of(*watch, kWatches)) {
    EXPECT_EQ(news.state, WatchState::kAll) << name;
    EXPECT_EQ(news.positions.size(), kKeys);
  }
  writer.join();
  EXPECT_EQ(server_stat(node, "requests_wait"), kWatches);
}

TEST_P(WatchTest, ManyKeysAreSeveralWaits) {
  TestNode node(0);
  const auto client = this->client({node.info});
  const auto watch = client->watch();
  const auto keys = keys_from(0, 2 * wire::kMaxItems + 10);
  ASSERT_TRUE(watch->add("a", keys, Deadline::after_ms(60'000), 0, 0));
  ASSERT_TRUE(waits_at(*watch, node, 3));
  const std::vector<uint64_t> present{0, wire::kMaxItems, 2 * wire::kMaxItems + 9};
  for (const uint64_t i : present) EXPECT_EQ(put_one(*client, key_of(i), bytes_of(i, 100)).code, Code::kOk);
  CallOptions options = within_ms(20'000);
  EXPECT_TRUE(eventually([&] {
    (void)watch->next(within_ms(20));
    return server_stat(node, "waits_open") == 3;
  }));
  const auto ended = client->give_up(std::span(keys).subspan(wire::kMaxItems + 1, 1), options);
  ASSERT_TRUE(ended);
  const auto ends = ends_of(*watch, 1);
  EXPECT_EQ(ends.at("a").state, WatchState::kGivenUp);
  EXPECT_TRUE(eventually([&] {
    (void)watch->next(within_ms(1));
    return server_stat(node, "waits_open") == 0;
  })) << "the other two were withdrawn";
}

TEST_P(WatchTest, AllNodesTogether) {
  TestNode one(0, 64 << 20, "host-x"), two(1, 64 << 20, "host-y");
  const auto client = this->client({one.info, two.info});
  const auto watch = client->watch();
  CallOptions there;
  there.node = 0;
  EXPECT_EQ(put_one(*client, key_of(0), bytes_of(0, 100), 1, there).code, Code::kOk);
  ASSERT_TRUE(watch->add("a", keys_from(0, 2), Deadline::after_ms(60'000), std::nullopt, 0));
  ASSERT_TRUE(watch->add("b", keys_from(5, 2), Deadline::after_ms(60'000), std::nullopt, 0));
  EXPECT_TRUE(eventually([&] {
    EXPECT_TRUE(watch->next(within_ms(1)));
    return server_stat(one, "waits_open") == 2 && server_stat(two, "waits_open") == 2;
  }));
  there.node = 1;
  EXPECT_EQ(put_one(*client, key_of(1), bytes_of(1, 100), 1, there).code, Code::kOk);
  const auto ends = ends_of(*watch, 1);
  EXPECT_EQ(ends.at("a").state, WatchState::kAll) << "one block here, the other there";
  EXPECT_EQ(ends.at("a").positions, (Positions{0, 1}));
  const auto ended = client->give_up(keys_from(6, 1), within_ms(20'000));
  ASSERT_TRUE(ended);
  EXPECT_EQ(*ended, 2u) << "at both nodes";
  EXPECT_EQ(ends_of(*watch, 1).at("b").state, WatchState::kGivenUp);
  EXPECT_TRUE(eventually([&] {
    (void)watch->next(within_ms(1));
    return server_stat(one, "waits_open") == 0 && server_stat(two, "waits_open") == 0;
  })) << "what is not needed any longer was withdrawn";
}

TEST_P(WatchTest, ANodeThatDiesEndsItsWatches) {
  TestNode one(0), two(1);
  const auto client = this->client({one.info, two.info});
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("here", keys_from(0, 2), Deadline::after_ms(60'000), 0, 0));
  ASSERT_TRUE(watch->add("there", keys_from(0, 2), Deadline::after_ms(60'000), 1, 0));
  ASSERT_TRUE(watch->add("both", keys_from(0, 2), Deadline::after_ms(60'000), std::nullopt, 0));
  ASSERT_TRUE(waits_at(*watch, one, 2));
  ASSERT_TRUE(waits_at(*watch, two, 2));
  one.stop();
  const auto ends = ends_of(*watch, 2);
  EXPECT_EQ(ends.at("here").state, WatchState::kUnreachable);
  EXPECT_NE(ends.at("here").code, Code::kOk);
  EXPECT_EQ(ends.at("both").state, WatchState::kUnreachable) << "what was counted there is gone";
  CallOptions there = within_ms(20'000);
  there.node = 1;
  for (uint64_t i = 0; i < 2; ++i)
    EXPECT_EQ(put_one(*client, key_of(i), bytes_of(i, 100), 1, there).code, Code::kOk);
  EXPECT_EQ(ends_of(*watch, 1).at("there").state, WatchState::kAll);
  // a node that cannot be reached from the beginning has no part in what others can answer
  ASSERT_TRUE(watch->add("again", keys_from(0, 2), Deadline::after_ms(60'000), std::nullopt, 0));
  EXPECT_EQ(ends_of(*watch, 1).at("again").state, WatchState::kAll);
  ASSERT_TRUE(watch->add("dead", keys_from(0, 2), Deadline::after_ms(60'000), 0, 0));
  EXPECT_EQ(ends_of(*watch, 1).at("dead").state, WatchState::kUnreachable);
  EXPECT_EQ(stat_of(*client, "watches_unreachable"), 3u);
}

TEST_P(WatchTest, ARestartedNodeIsReachedAgain) {
  TestNode node(0);
  const auto client = this->client({node.info});
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("a", {key_of(0)}, Deadline::after_ms(60'000), 0, 0));
  ASSERT_TRUE(waits_at(*watch, node, 1));
  node.stop();
  EXPECT_EQ(ends_of(*watch, 1).at("a").state, WatchState::kUnreachable);
  node.start();
  ASSERT_TRUE(client->set_map(2, {node.info}));
  ASSERT_TRUE(watch->add("a", {key_of(0)}, Deadline::after_ms(60'000), 0, 0));
  ASSERT_TRUE(waits_at(*watch, node, 1));
  EXPECT_EQ(put_one(*client, key_of(0), bytes_of(0, 100)).code, Code::kOk);
  EXPECT_EQ(ends_of(*watch, 1).at("a").state, WatchState::kAll);
}

TEST_P(WatchTest, ALimitOfTheNodeIsNamed) {
  TestNode node(0);
  node.stop();
  node.config.max_waits_per_connection = 1;
  node.start();
  const auto client = this->client({node.info});
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("a", {key_of(0)}, Deadline::after_ms(60'000), 0, 0));
  ASSERT_TRUE(waits_at(*watch, node, 1));
  ASSERT_TRUE(watch->add("b", {key_of(0)}, Deadline::after_ms(60'000), 0, 0));
  const auto ends = ends_of(*watch, 1);
  EXPECT_EQ(ends.at("b").state, WatchState::kUnreachable);
  EXPECT_EQ(ends.at("b").code, Code::kLimitExceeded);
}

TEST_P(WatchTest, WakeCloseAndOtherThreads) {
  TestNode node(0);
  const auto client = this->client({node.info});
  const auto watch = client->watch();
  watch->wake();
  auto news = watch->next(within_ms(60'000));
  ASSERT_TRUE(news && news->empty()) << "a wake-up before next() counts";
  std::atomic<bool> inside{false};
  std::thread waiter([&] {
    inside = true;
    const auto end = watch->next(within_ms(60'000));
    EXPECT_EQ(end.code(), Code::kClosed);
  });
  while (!inside) sleep_ms(1);
  EXPECT_TRUE(eventually([&] { return watch->next(within_ms(0)).code() == Code::kInvalidArgument; }))
      << "one thread at a time";
  ASSERT_TRUE(watch->add("a", {key_of(0)}, Deadline::after_ms(60'000), 0, 0));
  EXPECT_TRUE(eventually([&] { return server_stat(node, "waits_open") == 1; })) << "next() takes it over";
  watch->close();
  waiter.join();
  EXPECT_TRUE(eventually([&] { return server_stat(node, "waits_open") == 0; }));
  EXPECT_EQ(watch->add("b", {key_of(0)}, Deadline::after_ms(60'000), 0, 0).code, Code::kClosed);
  const auto second = client->watch();
  client->close();
  EXPECT_EQ(second->next(within_ms(60'000)).code(), Code::kClosed);
}

TEST_P(WatchTest, WhatMakesNoSense) {
  TestNode node(0);
  ClientConfig config = client_config(GetParam());
  config.fanout_nodes_max = 1;
  const auto client = client_for({node.info,
                                  [&] {
                                    NodeInfo other = node.info;
                                    other.index = 1;
                                    other.node_id = "other";
                                    return other;
                                  }()},
                                 config);
  const auto watch = client->watch();
  const Deadline soon = Deadline::after_ms(60'000);
  EXPECT_EQ(watch->add("a", {}, soon, 0, 0).code, Code::kInvalidArgument);
  EXPECT_EQ(watch->add("a", {key_of(0)}, Deadline::never(), 0, 0).code, Code::kInvalidArgument);
  EXPECT_EQ(watch->add("a", keys_from(0, (1 << 16) + 1), soon, 0, 0).code, Code::kLimitExceeded);
  EXPECT_EQ(watch->add("a", {key_of(0)}, soon, 5, 0).code, Code::kUnknownNode);
  EXPECT_EQ(watch->add("a", {key_of(0)}, soon, std::nullopt, 0).code, Code::kLimitExceeded)
      << "too many nodes to ask all of them";
  ASSERT_TRUE(watch->add("a", {key_of(0)}, soon, 0, 0));
  EXPECT_EQ(watch->add("a", {key_of(0)}, soon, 0, 0).code, Code::kInvalidArgument);
  for (int i = 1; i < 4096; ++i) ASSERT_TRUE(watch->add(std::to_string(i), {key_of(0)}, soon, 0, 0));
  EXPECT_EQ(watch->add("one more", {key_of(0)}, soon, 0, 0).code, Code::kLimitExceeded);
  CancelToken token;
  token.cancel();
  CallOptions cancelled = within_ms(60'000);
  cancelled.cancel = &token;
  EXPECT_EQ(client->watch()->next(cancelled).code(), Code::kCancelled);
}

TEST_P(WatchTest, AForkedChildDoesNotTouchTheParentsWatch) {
  TestNode node(0);
  const auto client = this->client({node.info});
  auto watch = client->watch();
  ASSERT_TRUE(watch->add("a", {key_of(0)}, Deadline::after_ms(60'000), 0, 0));
  ASSERT_TRUE(waits_at(*watch, node, 1));
  const pid_t child = ::fork();
  if (child == 0) {
    watch->wake();
    const bool refused = watch->next(within_ms(0)).code() == Code::kClosed && !watch->remove("a");
    watch.reset();
    ::_exit(refused ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(put_one(*client, key_of(0), bytes_of(0, 100)).code, Code::kOk);
  EXPECT_EQ(ends_of(*watch, 1).at("a").state, WatchState::kAll);
}

TEST_P(WatchTest, WritersAndWatchersAtOnce) {
  TestNode one(0), two(1);
  const auto client = this->client({one.info, two.info});
  const auto watch = client->watch();
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      const auto news = watch->next(within_ms(50));
      if (!news) return;
    }
  });
  std::vector<std::thread> adders;
  for (uint64_t t = 0; t < 3; ++t) {
    adders.emplace_back([&, t] {
      for (uint64_t i = 0; i < 60; ++i) {
        const std::string name = std::to_string(t) + "-" + std::to_string(i);
        const auto node = i % 3 == 0 ? std::nullopt : std::optional<uint32_t>(i % 2);
        EXPECT_TRUE(watch->add(name, keys_from(i, 4), Deadline::after_ms(i % 5 * 20), node, i % 2));
        if (i % 4 == 0) (void)watch->remove(name);
        (void)put_one(*client, key_of(i + t), bytes_of(i, 100));
        if (i % 7 == 0) (void)client->give_up(keys_from(i + 2, 2), within_ms(20'000));
      }
    });
  }
  for (std::thread& adder : adders) adder.join();
  EXPECT_TRUE(
      eventually([&] { return server_stat(one, "waits_open") == 0 && server_stat(two, "waits_open") == 0; }));
  stop = true;
  watch->wake();
  reader.join();
}

TEST(PreferredNode, TakesTheFirstCopyWhenItCan) {
  TestNode one(0, 64 << 20, "host-x"), two(1, 64 << 20, "host-y"), three(2, 64 << 20, "host-z");
  std::vector<NodeInfo> nodes{one.info, two.info, three.info};
  const auto client = client_for(nodes, client_config(false));
  CallOptions options;
  for (uint32_t prefer = 0; prefer < 3; ++prefer) {
    options.prefer_node = prefer;
    for (uint64_t i = 0; i < 5; ++i) {
      const PutOutcome outcome = put_one(*client, key_of(10 * prefer + i), bytes_of(i, 1000), 1, options);
      EXPECT_EQ(outcome.code, Code::kOk);
      EXPECT_EQ(outcome.node_index, prefer);
    }
  }
  const PutOutcome twice = put_one(*client, key_of(100), bytes_of(1, 1000), 2, options);
  EXPECT_EQ(twice.node_index, 2u);
  EXPECT_EQ(twice.copies, 2u) << "the other copy goes where placement says";
  options.prefer_node = 77;
  EXPECT_EQ(put_one(*client, key_of(101), bytes_of(1, 1000), 1, options).code, Code::kOk)
      << "a node that the map does not list is no preference";
  options.prefer_node = 1;
  two.server->store().set_draining(true);
  PutOutcome elsewhere = put_one(*client, key_of(102), bytes_of(1, 1000), 1, options);
  EXPECT_EQ(elsewhere.code, Code::kOk);
  EXPECT_NE(elsewhere.node_index, 1u);
  nodes[1].state = NodeHealth::kDraining;
  ASSERT_TRUE(client->set_map(2, nodes));
  const uint64_t before = server_stat(two, "requests_put");
  elsewhere = put_one(*client, key_of(103), bytes_of(1, 1000), 1, options);
  EXPECT_EQ(elsewhere.code, Code::kOk);
  EXPECT_EQ(server_stat(two, "requests_put"), before) << "the map says so";
  nodes[1].state = NodeHealth::kActive;
  ASSERT_TRUE(client->set_map(3, nodes));
  two.stop();
  elsewhere = put_one(*client, key_of(104), bytes_of(1, 1000), 1, options);
  EXPECT_EQ(elsewhere.code, Code::kOk) << "unreachable";
  EXPECT_NE(elsewhere.node_index, 1u);
}

// ---- a node that lies

// Takes one connection at a time, proves itself, then answers the first frame with what a test wants.
class LyingNode {
 public:
  using Answer = std::function<std::vector<std::byte>(const wire::FrameHeader&)>;
  explicit LyingNode(Answer answer, uint32_t capabilities = wire::AuthResponse::kCanWait)
      : answer_(std::move(answer)), capabilities_(capabilities) {
    auto fd = net::listen_tcp("127.0.0.1", 0);
    EXPECT_TRUE(fd);
    listener_ = std::move(*fd);
    info.node_id = "liar";
    info.host_id = "host-b";
    info.tcp_host = "127.0.0.1";
    info.tcp_port = *net::local_port(listener_.get());
    info.weight = 1.0;
    thread_ = std::thread([this] { serve(); });
  }
  ~LyingNode() {
    stop_ = true;
    thread_.join();
  }
  static std::vector<std::byte> frame(wire::FrameHeader header, std::span<const std::byte> meta) {
    header.response = true;
    const auto head = wire::encode_header(header, meta);
    std::vector<std::byte> bytes(head.begin(), head.end());
    bytes.insert(bytes.end(), meta.begin(), meta.end());
    return bytes;
  }
  static std::vector<std::byte> news(uint64_t id, uint32_t state, std::vector<uint32_t> positions,
                                     Opcode opcode = Opcode::kWait) {
    Writer meta;
    wire::encode_status(meta, Status::ok());
    meta.u32(state);
    meta.u32(static_cast<uint32_t>(positions.size()));
    for (const uint32_t position : positions) meta.u32(position);
    wire::FrameHeader header;
    header.opcode = opcode;
    header.request_id = id;
    return frame(header, meta.view());
  }

  NodeInfo info;
  std::atomic<int> frames{0};  // after the handshake

 private:
  bool receive(int fd, std::span<std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t count = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (count > 0) {
        bytes = bytes.subspan(static_cast<size_t>(count));
        continue;
      }
      if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK) || stop_) return false;
      (void)net::wait_ready(fd, POLLIN, -1, Deadline::after_ms(10));
    }
    return true;
  }
  bool send(int fd, std::span<const std::byte> bytes) {
    return ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  void serve() {
    while (!stop_) {
      if (!net::wait_ready(listener_.get(), POLLIN, -1, Deadline::after_ms(10))) continue;
      int error = 0;
      const net::UniqueFd fd = net::accept_connection(listener_.get(), {}, &error);
      while (fd.valid() && one_frame(fd.get())) {
      }
    }
  }
  bool one_frame(int fd) {
    wire::HeaderBytes head;
    if (!receive(fd, head)) return false;
    const auto header = wire::decode_header(head);
    if (!header) return false;
    std::vector<std::byte> meta(header->meta_bytes);
    if (!receive(fd, meta)) return false;
    Writer answer;
    wire::encode_status(answer, Status::ok());
    if (header->opcode == Opcode::kHello) {
      nonce_ = wire::HelloRequest::decode(meta)->client_nonce;
      wire::HelloResponse{}.encode(answer);
      return send(fd, frame(*header, answer.view()));
    }
    if (header->opcode == Opcode::kAuth) {
      wire::AuthResponse auth;
      auth.server_mac = wire::auth_mac(false, wire::tenant_key(secret(), "default"), {}, nonce_, "default");
      auth.capabilities = capabilities_;
      auth.node_id = "liar";
      auth.encode(answer);
      return send(fd, frame(*header, answer.view()));
    }
    ++frames;
    const auto bytes = answer_(*header);
    return bytes.empty() || send(fd, bytes);
  }

  Answer answer_;
  uint32_t capabilities_;
  wire::Bytes16 nonce_{};
  net::UniqueFd listener_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

WatchNews first_end(LyingNode& node) {
  const auto client = client_for({node.info}, client_config(false));
  const auto watch = client->watch();
  EXPECT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(60'000), 0, 0));
  return ends_of(*watch, 1).at("a");
}

TEST(LyingNodes, EndTheirOwnWatches) {
  const std::vector<LyingNode::Answer> lies{
      [](const auto& asked) { return LyingNode::news(asked.request_id, 1, {3}); },  // no such key
      [](const auto& asked) { return LyingNode::news(asked.request_id, 9, {}); },   // no such state
      [](const auto& asked) {
        return LyingNode::news(asked.request_id, 1, {0, 1, 2, 0});
      },  // too many
      [](const auto& asked) {
        return LyingNode::news(asked.request_id, 1, {}, Opcode::kGet);
      },  // other opcode
      [](const auto& asked) {
        auto bytes = LyingNode::news(asked.request_id, 1, {0, 1, 2});
        bytes.back() ^= std::byte{1};
        return bytes;
      },
      [](const auto& asked) {  // a payload
        wire::FrameHeader header;
        header.opcode = Opcode::kWait;
        header.request_id = asked.request_id;
        header.payload_bytes = 1;
        Writer meta;
        wire::encode_status(meta, Status::ok());
        return LyingNode::frame(header, meta.view());
      },
      [](const auto&) { return std::vector<std::byte>(100, std::byte{0x55}); },
  };
  for (size_t i = 0; i < lies.size(); ++i) {
    LyingNode node(lies[i]);
    const WatchNews end = first_end(node);
    EXPECT_EQ(end.state, WatchState::kUnreachable) << "lie " << i;
    EXPECT_EQ(end.code, Code::kProtocolError) << "lie " << i;
    EXPECT_TRUE(end.positions.empty()) << "lie " << i;
  }
}

TEST(LyingNodes, AnswersToOtherRequestsAreNoAnswer) {
  LyingNode node([](const auto& asked) {
    auto bytes = LyingNode::news(asked.request_id + 1000, 1, {0, 1, 2});
    const auto right = LyingNode::news(asked.request_id, 2, {1});
    bytes.insert(bytes.end(), right.begin(), right.end());
    return bytes;
  });
  const WatchNews end = first_end(node);
  EXPECT_EQ(end.state, WatchState::kGivenUp);
  EXPECT_EQ(end.positions, Positions{1});
}

TEST(LyingNodes, ANodeThatSaysAllWithoutThePositionsIsNotBelieved) {
  LyingNode node([](const auto& asked) { return LyingNode::news(asked.request_id, 1, {0}); });
  const WatchNews end = first_end(node);
  EXPECT_EQ(end.state, WatchState::kUnreachable);
  EXPECT_EQ(end.positions, Positions{0});
}

TEST(LyingNodes, AnOlderNodeIsNotAskedToWait) {
  LyingNode node([](const auto&) { return std::vector<std::byte>{}; }, 0);
  const WatchNews end = first_end(node);
  EXPECT_EQ(end.state, WatchState::kUnreachable);
  EXPECT_EQ(end.code, Code::kUnsupported);
  EXPECT_EQ(node.frames, 0);
  const auto client = client_for({node.info}, client_config(false));
  const auto ended = client->give_up(keys_from(0, 2), within_ms(20'000));
  ASSERT_TRUE(ended) << ended.status().message;
  EXPECT_EQ(*ended, 0u);
  EXPECT_EQ(node.frames, 0);
}

TEST(LyingNodes, ANodeThatFallsSilentIsFoundOut) {
  LyingNode node([](const auto&) { return std::vector<std::byte>{}; });
  ClientConfig config = client_config(false);
  config.ping_interval_ms = 50;
  config.connect_timeout_ms = 200;
  const auto client = client_for({node.info}, config);
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(60'000), 0, 0));
  const WatchNews end = ends_of(*watch, 1).at("a");
  EXPECT_EQ(end.state, WatchState::kUnreachable);
  EXPECT_EQ(end.code, Code::kNodeUnavailable);
  EXPECT_EQ(node.frames, 2) << "the WAIT and one PING";
}

TEST(LyingNodes, APatientWatchIsLateByALittleOnly) {
  LyingNode node([](const auto&) { return std::vector<std::byte>{}; });
  const auto client = client_for({node.info}, client_config(false));
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(100), 0, 0));
  EXPECT_EQ(ends_of(*watch, 1).at("a").state, WatchState::kTimeout) << "although the node says nothing";
}

TEST(LyingNodes, NoNodeNoWatch) {
  const auto client = client_for({}, client_config(false));
  const auto watch = client->watch();
  EXPECT_EQ(watch->add("a", keys_from(0, 3), Deadline::after_ms(100), std::nullopt, 0).code, Code::kNoNodes);
  EXPECT_EQ(client->give_up(keys_from(0, 1), within_ms(100)).code(), Code::kNoNodes);
}

}  // namespace
}  // namespace mooncache::testing

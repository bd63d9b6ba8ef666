// BlockWatch, give_up and the preferred node of a put, against real nodes.
#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "client/watches.h"

namespace mooncache::testing {
namespace {

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

TEST_P(WatchTest, ANodeSaysUnaskedThatItLives) {
  TestNode node(0);
  ClientConfig config = client_config(GetParam());
  config.ping_interval_ms = 100;
  config.connect_timeout_ms = 60'000;
  const auto client = client_for({node.info}, config);
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("a", {key_of(0)}, Deadline::after_ms(60'000), 0, 1));
  ASSERT_TRUE(eventually([&] {
    const auto news = watch->next(within_ms(20));
    EXPECT_TRUE(news && news->empty()) << "a sign of life is no news";
    return server_stat(node, "wait_heartbeats") >= 5;
  }));
  EXPECT_EQ(put_one(*client, key_of(0), bytes_of(0, 1000)).code, Code::kOk);
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

TEST_P(WatchTest, ANodeThatLeavesTheMapEndsItsWatches) {
  TestNode one(0), two(1);
  const auto client = this->client({one.info, two.info});
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("here", {key_of(0)}, Deadline::after_ms(60'000), 0, 0));
  ASSERT_TRUE(watch->add("there", {key_of(0)}, Deadline::after_ms(60'000), 1, 0));
  ASSERT_TRUE(waits_at(*watch, one, 1));
  ASSERT_TRUE(client->set_map(2, {two.info}));
  EXPECT_EQ(ends_of(*watch, 1).at("here").code, Code::kNodeUnavailable);
  CallOptions there = within_ms(20'000);
  there.node = 1;
  EXPECT_EQ(put_one(*client, key_of(0), bytes_of(0, 100), 1, there).code, Code::kOk);
  EXPECT_EQ(ends_of(*watch, 1).at("there").state, WatchState::kAll);
  EXPECT_TRUE(eventually([&] { return server_stat(one, "waits_open") == 0; }));
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

}  // namespace
}  // namespace mooncache::testing

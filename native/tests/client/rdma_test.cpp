// Blocks of a pool over RDMA: what is used when, and that every failure of it ends in TCP or in another
// replica, never in a wrong byte.
#include <thread>

#include "client/breaker.h"
#include "client/rdma_pool.h"
#include "compare.h"

namespace mooncache::testing {
namespace {

TEST_F(RdmaPool, BlocksGoAndComeOverRdma) {
  open(1);
  for (const PutOutcome& outcome : put(12)) EXPECT_EQ(outcome.code, Code::kOk);
  EXPECT_GE(stat_of(*client_, "rdma_bytes"), 12 * kBlockBytes);
  EXPECT_EQ(get_all(), 12u);
  EXPECT_GE(stat_of(*client_, "rdma_bytes"), 24 * kBlockBytes);
  EXPECT_LT(stat_of(*client_, "tcp_bytes"), kBlockBytes);
  EXPECT_EQ(stat_of(*client_, "rdma_fallbacks"), 0u);
}

TEST_F(RdmaPool, BothSidesCountByRailAndByPeer) {
  open(2);
  put(12);
  EXPECT_EQ(get_all(), 12u);
  uint64_t by_rail = 0, by_peer = 0, granted = 0, connections = 0;
  for (const auto& [name, value] : client_->stats()) {
    if (name.starts_with("rdma_rail_") && name.ends_with("_bytes")) by_rail += value;
    if (name.starts_with("rdma_peer_") && name.ends_with("_bytes")) by_peer += value;
    if (name.starts_with("rdma_rail_") && name.ends_with("_up")) {
      EXPECT_EQ(value, 1u) << name;
    }
  }
  EXPECT_EQ(by_rail, stat_of(*client_, "rdma_bytes"));
  EXPECT_EQ(by_peer, stat_of(*client_, "rdma_bytes"));
  for (const auto& node : nodes_) {
    const auto rails = node->server->rails();
    EXPECT_GE(rails.size(), 2u);
    for (const RailView& rail : rails) {
      EXPECT_TRUE(rail.up) << rail.device;
      EXPECT_GE(rail.mtu_bytes, 256u);
      granted += rail.granted_bytes;
      connections += rail.connections;
    }
  }
  EXPECT_GE(granted, by_peer);
  EXPECT_GE(connections, 2u);
  client_.reset();
  const auto patience = Deadline::after_ms(10'000);
  for (const auto& node : nodes_) {
    for (size_t i = 0; i < node->server->rails().size(); ++i) {
      while (node->server->rails()[i].connections > 0 && !patience.expired())
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_EQ(node->server->rails()[i].connections, 0u);
    }
  }
}

TEST_F(RdmaPool, SmallBlocksAndRangesGoOverTcp) {
  open(1, 1);
  const auto small = bytes_of(1, 4096);
  EXPECT_EQ(put_one(*client_, key_of(1), small).code, Code::kOk);
  EXPECT_EQ(stat_of(*client_, "rdma_bytes"), 0u);
  put(1);
  const uint64_t before = stat_of(*client_, "rdma_bytes");
  std::vector<std::byte> part(512 << 10);
  GetOptions how;
  how.whole = false;
  EXPECT_EQ(get_one(*client_, key_of(0), part, {}, how, 1000).code, Code::kOk);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), blocks_[0].begin() + 1000));
  EXPECT_EQ(stat_of(*client_, "rdma_bytes"), before);
}

TEST_F(RdmaPool, ANodeThatIsGoneIsAnotherReplicasTurn) {
  open(1, 3);
  for (const PutOutcome& outcome : put(8, 2)) EXPECT_EQ(outcome.copies, 2u);
  EXPECT_EQ(get_all(), 8u);
  nodes_[0]->stop();
  EXPECT_EQ(get_all(), 8u);
}

// On real devices with packets lost: more than a window of them, both ways.
TEST_F(RdmaPool, FortyBlocksGoAndComeWhole) {
  constexpr size_t kBlocks = 40;
  open(2);
  for (const PutOutcome& outcome : put(kBlocks)) EXPECT_EQ(outcome.code, Code::kOk);
  EXPECT_EQ(get_all(), kBlocks);
  EXPECT_GE(stat_of(*client_, "rdma_bytes"), kBlocks * kBlockBytes);
  EXPECT_EQ(stat_of(*client_, "miss_checksum"), 0u);
}

TEST_F(RdmaPool, ManyThreads) {
  ClientConfig config = client_config(false);
  config.stall_timeout_ms = 20'000;  // a busy machine is no sick node
  open(1, 2, config);
  put(8);
  std::vector<std::thread> threads;
  std::atomic<size_t> whole{0};
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { whole += get_all(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(whole.load(), 32u);
}

TEST_F(RdmaPool, EightRailsShareTheBatchesOfTwoThreadsAndSevenMayFail) {
  if (rdma_is_real()) GTEST_SKIP();
  open(8, 1);
  put(16);
  const auto used = [] {
    size_t count = 0;
    for (uint32_t device = 0; device < 8; ++device) count += fake().bytes_moved(device) > 0 ? 1 : 0;
    return count;
  };
  EXPECT_EQ(used(), RdmaConfig{}.rails_max);
  for (uint32_t device = 0; device < 8; ++device) fake().set_latency_us(device, 30'000);
  const auto patience = Deadline::after_ms(30'000);
  while (used() < 8 && !patience.expired()) {  // until both were under way at once
    std::thread other([&] { EXPECT_EQ(get_all(), 16u); });
    EXPECT_EQ(get_all(), 16u);
    other.join();
  }
  EXPECT_EQ(used(), 8u) << "the second connection took the ports that the first one had left";
  for (uint32_t device = 0; device < 8; ++device) fake().set_latency_us(device, 0);
  for (uint32_t device = 1; device < 8; ++device) fake().set_port_active(device, false);
  const auto up = [&] {  // on both sides, which hear of it each by itself
    uint64_t count = 0;
    for (const RailView& rail : nodes_[0]->server->rails()) count += rail.up ? 1 : 0;
    for (const auto& [name, value] : client_->stats())
      count += name.starts_with("rdma_rail_") && name.ends_with("_up") ? value : 0;
    return count;
  };
  while (up() > 2 && !patience.expired()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(up(), 2u);
  const uint64_t before = stat_of(*client_, "rdma_bytes");
  EXPECT_EQ(get_all(), 16u);
  EXPECT_GT(stat_of(*client_, "rdma_bytes"), before);
}

// Ports of a node that are alike for the client: connections spread over them, and one connection's queue
// pairs too.
class RdmaPorts : public RdmaPool {
 protected:
  // One node on `ports` of eight devices; the others are the clients'.
  void open_node(uint32_t ports) {
    if (rdma_is_real()) GTEST_SKIP();
    fake().reset(8);
    RdmaConfig rdma = test_rdma(false);
    for (uint32_t i = 0; i < ports; ++i) rdma.devices.push_back("fake" + std::to_string(i));
    nodes_.push_back(std::make_unique<TestNode>(0, 256 << 20, "host-0", false, rdma));
  }
  // A client of its own that has moved a block.
  std::unique_ptr<Client> client_on(std::vector<std::string> devices) {
    ClientConfig config = client_config(false);
    config.rdma = test_rdma(true);
    config.rdma.devices = std::move(devices);
    auto client = client_for({nodes_[0]->info}, config);
    const auto bytes = bytes_of(blocks_put_, kBlockBytes);
    EXPECT_EQ(put_one(*client, key_of(blocks_put_++), bytes).code, Code::kOk);
    return client;
  }
  std::vector<uint64_t> connections() {
    std::vector<uint64_t> counts;
    for (const RailView& rail : nodes_[0]->server->rails()) counts.push_back(rail.connections);
    return counts;
  }
  void wait_for_connections(const std::vector<uint64_t>& wanted) {
    const auto patience = Deadline::after_ms(10'000);
    while (connections() != wanted && !patience.expired())
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_EQ(connections(), wanted);
  }
  uint64_t blocks_put_ = 0;
};

TEST_F(RdmaPorts, ClientsSpreadOverPortsThatAreAlike) {
  open_node(2);
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 4; ++i) clients.push_back(client_on({"fake4"}));
  EXPECT_EQ(connections(), (std::vector<uint64_t>{2, 2}));
  clients.erase(clients.begin() + 1);
  clients.erase(clients.begin() + 2);
  wait_for_connections({2, 0});
  clients.push_back(client_on({"fake4", "fake5"}));  // both of its ports do not meet at the idle one
  EXPECT_EQ(connections(), (std::vector<uint64_t>{3, 1}));
}

TEST_F(RdmaPorts, ConnectionsAndGrantsCountOnceWhereTwoQueuePairsMeet) {
  open_node(1);
  const auto client = client_on({"fake4", "fake5"});
  EXPECT_GE(stat_of(*client, "rdma_bytes"), kBlockBytes);
  const RailView rail = nodes_[0]->server->rails()[0];
  EXPECT_EQ(rail.connections, 1u);
  EXPECT_EQ(rail.grants, 1u);
  EXPECT_EQ(rail.granted_bytes, kBlockBytes);
}

TEST_F(RdmaPorts, WhatHasNoQueuePairIsNoConnection) {
  open_node(1);
  fake().fail("ibv_create_qp", ENOMEM, 1, 1);  // the node's; the client's came first
  const auto client = client_on({"fake4"});
  EXPECT_EQ(stat_of(*client, "rdma_bytes"), 0u);
  EXPECT_EQ(connections(), (std::vector<uint64_t>{0}));
}

TEST_F(RdmaPool, ARailThatFellAndCameBackIsUsedAgain) {
  if (rdma_is_real()) GTEST_SKIP();
  open(2, 1);
  put(8);
  fake().set_port_active(0, false);
  EXPECT_EQ(get_all(), 8u);
  fake().set_port_active(0, true);
  const uint64_t before = fake().bytes_moved(0);
  const auto patience = Deadline::after_ms(30'000);  // a new connection is allowed after five seconds
  while (fake().bytes_moved(0) == before && !patience.expired()) {
    EXPECT_EQ(get_all(), 8u);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_GT(fake().bytes_moved(0), before);
  EXPECT_EQ(stat_of(*client_, "rdma_fallbacks"), 0u);
  EXPECT_GE(stat_of(*client_, "connects"), 2u);
}

TEST_F(RdmaPorts, ARailThatNeverMeetsIsNoReasonToConnectEachTime) {
  if (rdma_is_real()) GTEST_SKIP();
  open_node(1);
  fake().set_infiniband(5);  // the node has no such port
  const auto client = client_on({"fake4", "fake5"});
  std::vector<std::byte> copy(kBlockBytes);
  const auto begun = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(get_one(*client, key_of(0), copy).code, Code::kOk);
  const std::chrono::milliseconds pause{RailRenewal::kPauseMinMs};
  const auto pauses = (std::chrono::steady_clock::now() - begun) / pause;
  EXPECT_GE(stat_of(*client, "rdma_bytes"), 20 * kBlockBytes);
  EXPECT_LE(stat_of(*client, "connects"), 1u + static_cast<uint64_t>(pauses));
}

TEST_F(RdmaPool, QueuePairsThatNobodyUsesAreGivenUp) {
  if (rdma_is_real()) GTEST_SKIP();
  ClientConfig config = client_config(false);
  config.idle_timeout_ms = 1000;
  open(2, 4, config);
  put(32);
  const auto connections = [&] {
    uint64_t sum = 0;
    for (const auto& node : nodes_) {
      for (const RailView& rail : node->server->rails()) sum += rail.connections;
    }
    return sum;
  };
  EXPECT_GT(connections(), 2u);
  const auto small = bytes_of(1, 4096);
  EXPECT_EQ(put_one(*client_, key_of(1000), small).code, Code::kOk);
  const auto patience = Deadline::after_ms(20'000);
  while (connections() > 2 && !patience.expired()) {  // one node is used, the queue pairs to the others go
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    std::vector<std::byte> copy(small.size());
    EXPECT_EQ(get_one(*client_, key_of(1000), copy).code, Code::kOk);
  }
  EXPECT_EQ(connections(), 2u);
  EXPECT_EQ(get_all(), 32u);
}

TEST_F(RdmaPool, WithoutAPathItIsTcp) {
  if (rdma_is_real()) GTEST_SKIP();
  open(2);
  put(6);
  fake().cut_path(0, true);
  fake().cut_path(1, true);
  EXPECT_EQ(get_all(), 6u);
  EXPECT_GE(stat_of(*client_, "rdma_fallbacks"), 1u);
  EXPECT_GE(stat_of(*client_, "tcp_bytes"), 6 * kBlockBytes);
  const uint64_t requests = fake().requests(0);
  EXPECT_EQ(get_all(), 6u);  // for a while it is not tried again
  EXPECT_EQ(fake().requests(0), requests);
}

TEST_F(RdmaPool, PutsSurviveALostRailAndALostPath) {
  if (rdma_is_real()) GTEST_SKIP();
  open(2);
  fake().fail_after(0, 5);
  for (const PutOutcome& outcome : put(10)) EXPECT_EQ(outcome.code, Code::kOk);
  fake().fail_after(1, 3);
  EXPECT_EQ(get_all(), 10u);
  for (const auto& node : nodes_) {
    std::string why;
    EXPECT_TRUE(node->server->store().check(&why)) << why;
    EXPECT_EQ(node->server->store().stats().reservations, 0u);
  }
}

TEST_F(RdmaPool, AFlippedBitIsAMissAndTheOtherCopyIsRead) {
  if (rdma_is_real()) GTEST_SKIP();
  open(1, 2);
  put(1, 2);
  fake().flip_bits(1);
  EXPECT_EQ(get_all(), 1u);
  EXPECT_GE(stat_of(*client_, "miss_checksum"), 1u);
}

TEST_F(RdmaPool, NoMemoryToRegisterIsTcp) {
  if (rdma_is_real()) GTEST_SKIP();
  open(1, 1);
  put(3);
  fake().fail("ibv_reg_mr_iova", ENOMEM, -1);
  EXPECT_EQ(get_all(), 3u);
  fake().reset(1);
}

TEST_F(RdmaPool, CancelsAtAnyMoment) {
  if (rdma_is_real()) GTEST_SKIP();
  open(2, 1);
  put(4);
  for (uint32_t i = 0; i < 2; ++i) fake().set_latency_us(i, 200);
  for (int round = 0; round < 40; ++round) {
    CancelToken token;
    std::thread cancel([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
      token.cancel();
    });
    auto copies = std::make_unique<std::vector<std::vector<std::byte>>>();
    std::vector<Slice> slices;
    std::vector<GetBlock> items;
    for (const auto& block : blocks_) copies->emplace_back(block.size());
    for (auto& copy : *copies) slices.push_back({copy.data(), copy.size()});
    for (size_t i = 0; i < slices.size(); ++i) items.push_back({key_of(i), std::span(&slices[i], 1)});
    std::vector<GetOutcome> outcomes(items.size());
    CallOptions options;
    options.cancel = &token;
    (void)client_->get(items, {}, options, outcomes);
    for (size_t i = 0; i < outcomes.size(); ++i) {
      if (outcomes[i].code == Code::kOk) {
        EXPECT_TRUE((*copies)[i] == blocks_[i]);
      }
    }
    copies.reset();  // whatever still moved would move into freed memory
    cancel.join();
  }
}

TEST_F(RdmaPool, ACancelledGetLeavesTheCallersMemoryAlone) {
  if (rdma_is_real()) GTEST_SKIP();
  open(1, 1);
  put(32);
  fake().set_latency_us(0, 200'000);
  CancelToken token;
  std::thread cancel([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    token.cancel();
  });
  std::vector<std::byte> copy(blocks_[3].size());
  CallOptions options;
  options.cancel = &token;
  std::vector<Slice> slices(32, Slice{copy.data(), copy.size()});
  std::vector<GetBlock> items;
  for (size_t i = 0; i < 32; ++i) items.push_back({key_of(i % 4), std::span(&slices[i], 1)});
  std::vector<GetOutcome> outcomes(items.size());
  (void)client_->get(items, {}, options, outcomes);
  cancel.join();
  std::fill(copy.begin(), copy.end(), std::byte{0xee});
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  EXPECT_TRUE(all_bytes(copy, std::byte{0xee}));
  EXPECT_EQ(outcomes.back().code, Code::kCancelled);
  // what the node had granted is free again
  for (int i = 0; i < 500 && nodes_[0]->server->store().stats().pins > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(nodes_[0]->server->store().stats().pins, 0u);
}

}  // namespace
}  // namespace mooncache::testing

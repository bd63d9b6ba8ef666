// The benchmark measures what it says: every transport moves whole batches, and what cannot run is told.
#include "mooncache/probe.h"

#include "client/pool.h"

namespace mooncache::testing {
namespace {

class Probe : public ::testing::TestWithParam<std::tuple<const char*, Direction>> {
 protected:
  ProbeOptions options() {
    ProbeOptions options;
    options.transport = std::get<0>(GetParam());
    options.direction = std::get<1>(GetParam());
    options.block_bytes = 10'007;
    options.batch = 5;
    options.threads = 2;
    options.duration_ms = 20;
    options.rdma = test_rdma(true);
    RdmaConfig rdma = test_rdma(false);
    rdma.enabled = options.transport == "rdma";
    node_ = std::make_unique<TestNode>(0, 64 << 20, "host-a", true, rdma);
    options.peer.tcp_host = node_->info.tcp_host;
    options.peer.tcp_port = node_->info.tcp_port;
    options.peer.unix_path = node_->info.unix_path;
    options.peer.credentials.key = wire::tenant_key(secret(), "default");
    return options;
  }
  std::unique_ptr<TestNode> node_;
};

TEST_P(Probe, MovesWholeBatches) {
  const ProbeOptions asked = options();
  const auto result = probe_transfers(asked);
  ASSERT_TRUE(result) << result.status().message;
  EXPECT_GE(result->batch_us.size(), 2u);
  EXPECT_EQ(result->bytes, result->batch_us.size() * 5 * 10'007);
  EXPECT_GE(result->seconds, 0.02);
  for (const double us : result->batch_us) EXPECT_GT(us, 0.0);
  // nothing is left behind but the blocks that were read
  std::string why;
  EXPECT_TRUE(node_->server->store().check(&why)) << why;
}

TEST_P(Probe, MovesBlocksContinuously) {
  ProbeOptions asked = options();
  asked.continuous = true;
  for (const bool verify : {true, false}) {
    asked.verify = verify;
    const auto result = probe_transfers(asked);
    if (asked.transport == "tcp") {  // a node takes a range of a reservation only once
      EXPECT_EQ(result.status().code, Code::kInvalidArgument);
      continue;
    }
    ASSERT_TRUE(result) << result.status().message;
    EXPECT_GE(result->batch_us.size(), 10u);  // a block per place and thread
    EXPECT_EQ(result->bytes, result->batch_us.size() * 10'007);
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, Probe,
                         ::testing::Combine(::testing::Values("loopback", "shm", "tcp", "rdma"),
                                            ::testing::Values(Direction::kRead, Direction::kWrite)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)) +
                                  (std::get<1>(test.param) == Direction::kRead ? "_read" : "_write");
                         });

TEST(ProbeRefuses, WhatCannotBeMeasured) {
  ProbeOptions options;
  options.transport = "carrier-pigeon";
  EXPECT_EQ(probe_transfers(options).status().code, Code::kInvalidArgument);
  options.transport = "loopback";
  options.batch = 0;
  EXPECT_EQ(probe_transfers(options).status().code, Code::kInvalidArgument);
  options.batch = 1024;
  options.block_bytes = 1ull << 40;
  EXPECT_EQ(probe_transfers(options).status().code, Code::kInvalidArgument);
  options.batch = 1;
  options.block_bytes = 10;
  options.duration_ms = UINT64_MAX;
  EXPECT_EQ(probe_transfers(options).status().code, Code::kInvalidArgument);
  options.duration_ms = 500;
  options.transport = "tcp";
  options.peer.tcp_host = "127.0.0.1";
  options.peer.tcp_port = 1;
  EXPECT_FALSE(probe_transfers(options));
}

}  // namespace
}  // namespace mooncache::testing

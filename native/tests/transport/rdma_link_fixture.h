// A link to a node over devices of the fake libibverbs.
#pragma once

#include "rdma/fake/fake_verbs.h"
#include "transport/harness.h"

namespace mooncache::testing {

class RdmaTest : public ::testing::Test {
 protected:
  void open(uint32_t rails, const RdmaConfig& client = test_rdma(true)) {
    fake().reset(rails);
    peer_ = std::make_unique<NodeHarness>("rdma", client);
    link_ = peer_->connect();
    ASSERT_NE(link_, nullptr);
  }
  void SetUp() override {
    if (rdma_is_real()) GTEST_SKIP() << "these break devices on demand";
  }
  void TearDown() override {
    link_.reset();
    peer_.reset();
    EXPECT_EQ(fake().live_objects(), 0u);
    fake().reset(1);
  }
  static FakeVerbs& fake() { return fake_verbs(MOONCACHE_FAKE_VERBS); }
  std::vector<Completion> drain(size_t count, int timeout_ms = 20'000) {
    return drain_link(*link_, count, timeout_ms);
  }
  Transfer transfer(TransferId id, Direction direction, const RemoteExtent& extent,
                    std::span<const Slice> local, RegionHandle region = 0) {
    Transfer made;
    made.id = id;
    made.direction = direction;
    made.remote = extent;
    made.local = local;
    made.region = region;
    return made;
  }
  Completion read(const RemoteExtent& extent, std::vector<std::byte>& into, RegionHandle region = 0) {
    const Slice all{into.data(), into.size()};
    const Transfer one = transfer(1, Direction::kRead, extent, std::span(&all, 1), region);
    EXPECT_EQ(link_->submit(std::span(&one, 1)), 1u);
    const auto done = drain(1);
    EXPECT_EQ(done.size(), 1u);
    return done.empty() ? Completion{} : done[0];
  }
  std::unique_ptr<NodeHarness> peer_;
  std::unique_ptr<Link> link_;
};

}  // namespace mooncache::testing

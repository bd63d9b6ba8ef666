// A pool whose nodes and client have RDMA, over real devices or the fake library.
#pragma once

#include "client/pool.h"
#include "rdma/fake/fake_verbs.h"

namespace mooncache::testing {

// Bytes of a buffer, from `at` on.
inline Slice slice_of(std::vector<std::byte>& bytes, size_t at = 0, size_t size = SIZE_MAX) {
  return {bytes.data() + at, std::min(size, bytes.size() - at)};
}

inline constexpr size_t kBlockBytes = 1 << 20;

class RdmaPool : public ::testing::Test {
 protected:
  void TearDown() override {
    client_.reset();
    nodes_.clear();
    if (!rdma_is_real()) {
      EXPECT_EQ(fake().live_objects(), 0u);
      fake().reset(1);
    }
  }
  static FakeVerbs& fake() { return fake_verbs(MOONCACHE_FAKE_VERBS); }
  void open(uint32_t rails, uint32_t nodes = 2, ClientConfig config = client_config(false)) {
    if (!rdma_is_real()) fake().reset(rails);
    std::vector<NodeInfo> infos;
    for (uint32_t i = 0; i < nodes; ++i) {
      nodes_.push_back(
          std::make_unique<TestNode>(i, 256 << 20, "host-" + std::to_string(i), false, test_rdma(false)));
      infos.push_back(nodes_.back()->info);
    }
    config.rdma = test_rdma(true);
    if (!sysfs_folder_.empty()) config.rdma.sysfs_folder = sysfs_folder_;
    if (rdma_is_real()) config.stall_timeout_ms = 20'000;  // a lost packet costs tens of times what it would
    client_ = client_for(infos, config);
  }
  std::vector<PutOutcome> put(size_t count, uint32_t replicas = 1) {
    blocks_.clear();
    std::vector<ConstSlice> slices;
    for (size_t i = 0; i < count; ++i) {
      blocks_.push_back(bytes_of(i + 1, kBlockBytes + i * 37));
      slices.emplace_back(blocks_.back().data(), blocks_.back().size());
    }
    std::vector<PutBlock> items;
    for (size_t i = 0; i < count; ++i) items.push_back({key_of(i), std::span(&slices[i], 1)});
    std::vector<PutOutcome> outcomes(count);
    EXPECT_TRUE(client_->put(items, replicas, {}, outcomes));
    return outcomes;
  }
  // Reads all blocks; how many came whole. A byte that is wrong fails the test.
  size_t get_all() {
    std::vector<std::vector<std::byte>> copies;
    std::vector<Slice> slices;
    for (const auto& block : blocks_) copies.emplace_back(block.size());
    for (auto& copy : copies) slices.push_back({copy.data(), copy.size()});
    std::vector<GetBlock> items;
    for (size_t i = 0; i < slices.size(); ++i) items.push_back({key_of(i), std::span(&slices[i], 1)});
    std::vector<GetOutcome> outcomes(items.size());
    EXPECT_TRUE(client_->get(items, {}, {}, outcomes));
    size_t whole = 0;
    for (size_t i = 0; i < outcomes.size(); ++i) {
      if (outcomes[i].code != Code::kOk) continue;
      EXPECT_TRUE(copies[i] == blocks_[i]) << i;
      ++whole;
    }
    return whole;
  }
  std::vector<std::unique_ptr<TestNode>> nodes_;
  std::unique_ptr<Client> client_;
  std::string sysfs_folder_;  // of the client, where not the machine's own
  std::vector<std::vector<std::byte>> blocks_;
};

}  // namespace mooncache::testing

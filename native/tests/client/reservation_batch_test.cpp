// Many blocks reserved, written and committed in one call, by every way of frames and through shared memory;
// what becomes of one block, or of one node, costs the others nothing.
#include <thread>

#include "client/pool.h"
#include "compare.h"
#include "store/device_memory.h"

namespace mooncache::testing {
namespace {

constexpr size_t kBlocks = 100;
constexpr size_t kLayers = 5;
constexpr size_t kLayerBytes = 3001;
constexpr size_t kAllLayersBytes = kLayers * kLayerBytes;

// Blocks with keys from `first` on and bytes of their own.
struct Blocks {
  explicit Blocks(size_t count = kBlocks, uint64_t first = 0, size_t size = kAllLayersBytes) {
    for (size_t i = 0; i < count; ++i) {
      keys.push_back(key_of(first + i));
      bytes.push_back(bytes_of(first + i, size));
    }
  }
  // One layer of each, in two slices; of those in `without` nothing.
  Status write(ReservationBatch& into, size_t offset, size_t length, std::vector<Code>& codes,
               const std::vector<size_t>& without = {}, const CallOptions& options = {}) const {
    std::vector<std::array<ConstSlice, 2>> slices;
    for (const auto& block : bytes) {
      slices.push_back({ConstSlice(block.data() + offset, length / 3),
                        ConstSlice(block.data() + offset + length / 3, length - length / 3)});
    }
    std::vector<std::span<const ConstSlice>> sources(slices.begin(), slices.end());
    for (const size_t i : without) sources[i] = {};
    codes.assign(bytes.size(), Code::kInternal);
    return into.write(offset, sources, options, codes);
  }
  void expect_stored(Client& client, const std::vector<size_t>& without = {}) const {
    for (size_t i = 0; i < bytes.size(); ++i) {
      std::vector<std::byte> copy(bytes[i].size());
      const bool wanted = std::find(without.begin(), without.end(), i) == without.end();
      ASSERT_EQ(get_one(client, keys[i], copy).code, wanted ? Code::kOk : Code::kNotFound) << i;
      EXPECT_TRUE(!wanted || same_bytes(copy, bytes[i])) << i;
    }
  }
  std::vector<Key> keys;
  std::vector<std::vector<std::byte>> bytes;
};

std::unique_ptr<ReservationBatch> reserve(Client& client, const Blocks& blocks, CallOptions options = {},
                                          size_t size = kAllLayersBytes) {
  auto made = client.reserve(std::span(blocks.keys), size, options);
  EXPECT_TRUE(made) << made.status().message;
  return made ? std::move(*made) : nullptr;
}

bool all(const std::vector<Code>& codes, Code wanted) {
  return std::all_of(codes.begin(), codes.end(), [&](Code code) { return code == wanted; });
}

enum class Way { kTcp, kUnix, kShm };

class ReservationBatches : public ::testing::TestWithParam<Way> {
 protected:
  ReservationBatches() {
    if (GetParam() == Way::kUnix) {  // memory that no client can map: frames over the unix socket
      node_.stop();
      node_.config.store.open_arena = store::device_arena(0, MOONCACHE_FAKE_CUDA);
      node_.start();
    }
    client_ = client_for({node_.info}, client_config(GetParam() != Way::kTcp));
  }
  TestNode node_{0};
  std::unique_ptr<Client> client_;
};

TEST_P(ReservationBatches, ALayerOfAllBlocksIsOneCall) {
  const Blocks blocks;
  const auto batch = reserve(*client_, blocks);
  ASSERT_TRUE(batch);
  EXPECT_EQ(batch->size(), kBlocks);
  EXPECT_EQ(batch->block_bytes(), kAllLayersBytes);
  std::vector<Code> codes;
  for (const size_t layer : {0u, 3u, 1u, 4u, 2u}) {
    ASSERT_TRUE(blocks.write(*batch, layer * kLayerBytes, kLayerBytes, codes)) << layer;
    EXPECT_TRUE(all(codes, Code::kOk)) << layer;
  }
  std::vector<std::byte> copy(kAllLayersBytes);
  EXPECT_EQ(get_one(*client_, blocks.keys[0], copy).code, Code::kNotFound) << "seen before its commit";
  ASSERT_TRUE(batch->commit({}, codes));
  EXPECT_TRUE(all(codes, Code::kOk));
  EXPECT_EQ(batch->node_index(7), 0u);
  blocks.expect_stored(*client_);
  EXPECT_EQ(server_stat(node_, "requests_reserve"), 1u);
  EXPECT_EQ(server_stat(node_, "requests_write"), GetParam() == Way::kShm ? 0u : kLayers);
  EXPECT_EQ(server_stat(node_, "requests_commit"), 1u);
  ASSERT_TRUE(batch->commit({}, codes));
  EXPECT_TRUE(all(codes, Code::kClosed));
}

TEST_P(ReservationBatches, LongRangesAreCutAndShortOnesShareFrames) {
  constexpr size_t kSize = (2 << 20) + 77;
  const Blocks blocks(3, 0, kSize);
  const auto batch = reserve(*client_, blocks, {}, kSize);
  ASSERT_TRUE(batch);
  std::vector<Code> codes;
  ASSERT_TRUE(blocks.write(*batch, 0, 1, codes));
  ASSERT_TRUE(blocks.write(*batch, 1, kSize - 1, codes));
  EXPECT_TRUE(all(codes, Code::kOk));
  ASSERT_TRUE(batch->commit({}, codes));
  EXPECT_TRUE(all(codes, Code::kOk));
  blocks.expect_stored(*client_);
}

TEST_P(ReservationBatches, EachBlockHasItsOwnCode) {
  Blocks blocks(6);
  ASSERT_EQ(put_one(*client_, blocks.keys[1], blocks.bytes[1]).code, Code::kOk);
  const auto batch = reserve(*client_, blocks);
  ASSERT_TRUE(batch);
  EXPECT_EQ(batch->code(0), Code::kOk);
  EXPECT_EQ(batch->code(1), Code::kAlreadyExists);
  EXPECT_EQ(batch->node_index(1), kNoNode);
  std::vector<Code> codes;
  ASSERT_TRUE(blocks.write(*batch, 0, kAllLayersBytes / 2, codes));
  EXPECT_EQ(codes[1], Code::kAlreadyExists);
  ASSERT_TRUE(
      blocks.write(*batch, kAllLayersBytes / 2, kAllLayersBytes - kAllLayersBytes / 2, codes, {3, 4}));
  EXPECT_EQ(codes[3], Code::kOk) << "nothing was to be written of it";
  // another writer is faster with one of them
  ASSERT_EQ(put_one(*client_, blocks.keys[5], blocks.bytes[5]).code, Code::kOk);
  ASSERT_TRUE(batch->commit({}, codes));
  EXPECT_EQ(codes, (std::vector<Code>{Code::kOk, Code::kAlreadyExists, Code::kOk, Code::kIncomplete,
                                      Code::kIncomplete, Code::kAlreadyExists}));
  blocks.expect_stored(*client_, {3, 4});
  EXPECT_EQ(node_.server->store().stats().reservations, 0u);
}

TEST_P(ReservationBatches, WhatMakesNoSenseWritesNothing) {
  const Blocks blocks(4);
  const auto batch = reserve(*client_, blocks);
  ASSERT_TRUE(batch);
  std::vector<Code> codes;
  ASSERT_TRUE(blocks.write(*batch, 0, 1000, codes, {2}));
  EXPECT_EQ(blocks.write(*batch, 999, 1000, codes, {2}).code, Code::kInvalidArgument) << "overlaps";
  const std::vector<std::byte> long_bytes(kAllLayersBytes + 1);
  const ConstSlice long_slice(long_bytes.data(), long_bytes.size());
  std::vector<std::span<const ConstSlice>> sources(4);
  sources[3] = std::span(&long_slice, 1);
  EXPECT_EQ(batch->write(0, sources, {}, codes).code, Code::kInvalidArgument);
  EXPECT_EQ(batch->write(0, std::span(sources).first(3), {}, codes).code, Code::kInvalidArgument);
  ASSERT_TRUE(blocks.write(*batch, 0, 1000, codes, {0, 1, 3}));  // only now
  ASSERT_TRUE(blocks.write(*batch, 1000, kAllLayersBytes - 1000, codes));
  EXPECT_TRUE(all(codes, Code::kOk));
  ASSERT_TRUE(batch->commit({}, codes));
  EXPECT_TRUE(all(codes, Code::kOk));
  blocks.expect_stored(*client_);
}

TEST_P(ReservationBatches, AbortAndDropGiveTheSpaceBack) {
  const Blocks blocks;
  const auto aborted = reserve(*client_, blocks);
  ASSERT_TRUE(aborted);
  EXPECT_EQ(server_stat(node_, "reservations_held"), kBlocks);
  ASSERT_TRUE(aborted->abort({}));
  EXPECT_EQ(server_stat(node_, "reservations_held"), 0u);
  ASSERT_TRUE(aborted->abort({}));
  std::vector<Code> codes;
  ASSERT_TRUE(blocks.write(*aborted, 0, 10, codes));
  EXPECT_TRUE(all(codes, Code::kClosed));
  auto dropped = reserve(*client_, blocks);
  ASSERT_TRUE(blocks.write(*dropped, 0, 10, codes));
  dropped.reset();
  EXPECT_TRUE(eventually([&] { return server_stat(node_, "reservations_held") == 0; }));
}

TEST_P(ReservationBatches, TwoBatchesShareALaneAndThreadsTakeTurns) {
  std::vector<Blocks> blocks;
  std::vector<std::unique_ptr<ReservationBatch>> batches;
  for (uint64_t i = 0; i < 4; ++i) {
    blocks.emplace_back(10, 100 * i);
    batches.push_back(reserve(*client_, blocks.back()));
  }
  EXPECT_EQ(server_stat(node_, "connections_open"), 1u);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      std::vector<Code> codes;
      for (size_t layer = 0; layer < kLayers; ++layer) {
        EXPECT_TRUE(blocks[i].write(*batches[i], layer * kLayerBytes, kLayerBytes, codes));
        EXPECT_TRUE(all(codes, Code::kOk));
      }
      EXPECT_TRUE(batches[i]->commit({}, codes));
      EXPECT_TRUE(all(codes, Code::kOk));
    });
  }
  for (auto& thread : threads) thread.join();
  for (const Blocks& some : blocks) some.expect_stored(*client_);
}

TEST_P(ReservationBatches, WhatFitsIsReservedAndTheRestHasItsCode) {
  constexpr size_t kSize = 1 << 20;
  TestNode small(1, 8 << 20);
  ClientConfig config = client_config(GetParam() != Way::kTcp);
  config.put_wait_ms = 50;
  auto client = client_for({small.info}, config);
  auto other = client_for({small.info}, config);
  auto held = other->reserve(key_of(99), 4 << 20, {});
  ASSERT_TRUE(held) << held.status().message;
  const Blocks blocks(6, 0, kSize);
  const auto batch = reserve(*client, blocks, {}, kSize);
  ASSERT_TRUE(batch);
  std::vector<size_t> without;
  for (size_t i = 0; i < blocks.keys.size(); ++i) {
    if (batch->code(i) == Code::kOk) continue;
    EXPECT_EQ(batch->code(i), Code::kNoSpace) << i;
    without.push_back(i);
  }
  EXPECT_GE(without.size(), 2u);
  EXPECT_LT(without.size(), 6u);
  std::vector<Code> codes;
  ASSERT_TRUE(blocks.write(*batch, 0, kSize, codes));
  ASSERT_TRUE(batch->commit({}, codes));
  blocks.expect_stored(*client, without);
}

INSTANTIATE_TEST_SUITE_P(Ways, ReservationBatches, ::testing::Values(Way::kTcp, Way::kUnix, Way::kShm),
                         [](const auto& test) {
                           return test.param == Way::kTcp ? "Tcp" : test.param == Way::kUnix ? "Unix" : "Shm";
                         });

// ---- several nodes

class BatchesOnNodes : public ::testing::Test {
 protected:
  BatchesOnNodes() {
    for (uint32_t i = 0; i < 3; ++i)
      nodes_.push_back(std::make_unique<TestNode>(i, 64 << 20, "host-" + std::to_string(i), false));
    for (const auto& node : nodes_) infos_.push_back(node->info);
    client_ = client_for(infos_, client_config(false));
  }
  std::vector<std::unique_ptr<TestNode>> nodes_;
  std::vector<NodeInfo> infos_;
  std::unique_ptr<Client> client_;
};

TEST_F(BatchesOnNodes, BlocksGoWherePutWouldBringThem) {
  const Blocks blocks;
  const auto batch = reserve(*client_, blocks);
  ASSERT_TRUE(batch);
  std::vector<size_t> counts(3);
  for (size_t i = 0; i < kBlocks; ++i) {
    const auto places = place(blocks.keys[i], infos_, "elsewhere", 1);
    EXPECT_EQ(batch->node_index(i), places.front()) << i;
    ++counts[places.front()];
  }
  for (const size_t count : counts) EXPECT_GT(count, 0u);
  std::vector<Code> codes;
  ASSERT_TRUE(blocks.write(*batch, 0, kAllLayersBytes, codes));
  ASSERT_TRUE(batch->commit({}, codes));
  EXPECT_TRUE(all(codes, Code::kOk));
  blocks.expect_stored(*client_);
}

TEST_F(BatchesOnNodes, ThePreferredNodeComesFirstWhereItTakesBlocks) {
  const Blocks blocks(20);
  CallOptions options;
  options.prefer_node = 2;
  {
    const auto batch = reserve(*client_, blocks, options);
    for (size_t i = 0; i < 20; ++i) EXPECT_EQ(batch->node_index(i), 2u);
  }
  infos_[2].state = NodeHealth::kDraining;
  infos_[2].weight = 0;
  ASSERT_TRUE(client_->set_map(2, infos_));
  const auto batch = reserve(*client_, blocks, options);
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(batch->code(i), Code::kOk);
    EXPECT_NE(batch->node_index(i), 2u);
  }
}

TEST_F(BatchesOnNodes, ANodeThatDiesCostsItsOwnBlocks) {
  const Blocks blocks;
  const auto batch = reserve(*client_, blocks);
  ASSERT_TRUE(batch);
  std::vector<Code> codes;
  ASSERT_TRUE(blocks.write(*batch, 0, kLayerBytes, codes));
  nodes_[1]->stop();
  ASSERT_TRUE(blocks.write(*batch, kLayerBytes, kAllLayersBytes - kLayerBytes, codes));
  for (size_t i = 0; i < kBlocks; ++i)
    EXPECT_EQ(codes[i], batch->node_index(i) == 1 ? Code::kConnectionLost : Code::kOk) << i;
  ASSERT_TRUE(batch->commit({}, codes));
  for (size_t i = 0; i < kBlocks; ++i) {
    if (batch->node_index(i) == 1) {
      EXPECT_EQ(codes[i], Code::kClosed) << i;
      continue;
    }
    EXPECT_EQ(codes[i], Code::kOk) << i;
    std::vector<std::byte> copy(kAllLayersBytes);
    EXPECT_EQ(get_one(*client_, blocks.keys[i], copy).code, Code::kOk) << i;
  }
}

TEST_F(BatchesOnNodes, ADeadNodesBlocksGoToOthers) {
  nodes_[1]->stop();
  const Blocks blocks;
  const auto batch = reserve(*client_, blocks);
  ASSERT_TRUE(batch);
  for (size_t i = 0; i < kBlocks; ++i) {
    EXPECT_EQ(batch->code(i), Code::kOk) << i;
    EXPECT_NE(batch->node_index(i), 1u) << i;
  }
}

TEST_F(BatchesOnNodes, AnUnknownNodeOrNoNodeIsSaid) {
  const Blocks blocks(2);
  CallOptions options;
  options.node = 77;
  EXPECT_EQ(client_->reserve(std::span(blocks.keys), kAllLayersBytes, options).code(), Code::kUnknownNode);
  EXPECT_EQ(client_->reserve(std::span(blocks.keys), 0, {}).code(), Code::kInvalidArgument);
  auto lonely = client_for({}, client_config(false));
  EXPECT_EQ(lonely->reserve(std::span(blocks.keys), kAllLayersBytes, {}).code(), Code::kNoNodes);
  const auto none = client_->reserve(std::span<const Key>(), kAllLayersBytes, {});
  ASSERT_TRUE(none);
  EXPECT_EQ((*none)->size(), 0u);
  EXPECT_TRUE((*none)->commit({}, {}));
}

TEST_F(BatchesOnNodes, ACancelledCallSaysSoAndTheBatchCanStillBeUsed) {
  const Blocks blocks(10);
  const auto batch = reserve(*client_, blocks);
  ASSERT_TRUE(batch);
  CancelToken token;
  token.cancel();
  CallOptions options;
  options.cancel = &token;
  std::vector<Code> codes;
  EXPECT_EQ(blocks.write(*batch, 0, 100, codes, {}, options).code, Code::kCancelled);
  ASSERT_TRUE(blocks.write(*batch, 0, kAllLayersBytes, codes));
  ASSERT_TRUE(batch->commit({}, codes));
  EXPECT_TRUE(all(codes, Code::kOk));
}

}  // namespace
}  // namespace mooncache::testing

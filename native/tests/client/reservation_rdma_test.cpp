// Reservations over RDMA: ranges go from the writer's memory into the reserved extent without the node's
// processor, and whatever fails on the way ends in frames, or costs the one reservation.
#include <thread>

#include "client/rdma_pool.h"
#include "compare.h"

namespace mooncache::testing {
namespace {

constexpr size_t kSize = 3 << 20;
constexpr size_t kHalf = kSize / 2;

class RdmaReservations : public RdmaPool {
 protected:
  std::unique_ptr<BlockReservation> reserve(uint64_t number, size_t size = kSize) {
    auto reservation = client_->reserve(key_of(number), size, {});
    EXPECT_TRUE(reservation) << reservation.status().message;
    return reservation ? std::move(*reservation) : nullptr;
  }
  static Status write(BlockReservation& into, const std::vector<std::byte>& source, size_t offset,
                      size_t size, const CallOptions& options = {}) {
    const ConstSlice slice(source.data() + offset, size);
    return into.write(offset, std::span(&slice, 1), options);
  }
  void expect_stored(uint64_t number, const std::vector<std::byte>& source) {
    std::vector<std::byte> copy(source.size());
    ASSERT_EQ(get_one(*client_, key_of(number), copy).code, Code::kOk);
    EXPECT_TRUE(same_bytes(copy, source));
  }
  uint64_t node_stat(const std::string& name) {
    for (const auto& [known, value] : nodes_[0]->server->stats()) {
      if (known == name) return value;
    }
    ADD_FAILURE() << "no counter " << name;
    return 0;
  }
  // A write of `doomed` that is cut while the device is at it.
  void cut_a_write(BlockReservation& doomed, const std::vector<std::byte>& source) {
    fake().set_latency_us(0, 200'000);
    CancelToken token;
    std::thread cancel([&] {
      sleep_ms(50);
      token.cancel();
    });
    CallOptions options;
    options.cancel = &token;
    EXPECT_EQ(write(doomed, source, 0, kSize, options).code, Code::kCancelled);
    cancel.join();
    fake().set_latency_us(0, 0);
    EXPECT_EQ(write(doomed, source, 0, kSize).code, Code::kClosed) << "a torn range must not be committed";
  }
};

TEST_F(RdmaReservations, RangesGoOverRdmaInAnyOrder) {
  open(1, 1);
  const auto source = bytes_of(1, kSize);
  const auto reservation = reserve(1);
  ASSERT_TRUE(reservation);
  ASSERT_TRUE(write(*reservation, source, kHalf, kSize - kHalf));
  EXPECT_EQ(write(*reservation, source, kHalf - 1, 10).code, Code::kInvalidArgument);
  std::vector<std::byte> copy(kSize);
  EXPECT_EQ(get_one(*client_, key_of(1), copy).code, Code::kNotFound);
  ASSERT_TRUE(write(*reservation, source, 0, kHalf));
  EXPECT_EQ(stat_of(*client_, "rdma_bytes"), kSize);
  EXPECT_EQ(node_stat("requests_write"), 0u);
  const Status committed = reservation->commit({});
  ASSERT_TRUE(committed) << committed.message;
  expect_stored(1, source);
}

TEST_F(RdmaReservations, ALayerOfManyBlocksGoesOverRdmaInOneCall) {
  open(2, 2);
  constexpr size_t kRdmaBlocks = 20;
  constexpr size_t kLayer = 100'000;
  std::vector<std::vector<std::byte>> blocks;
  std::vector<Key> keys;
  for (size_t i = 0; i < kRdmaBlocks; ++i) {
    keys.push_back(key_of(i));
    blocks.push_back(bytes_of(i, 4 * kLayer));
  }
  auto made = client_->reserve(std::span(keys), 4 * kLayer, {});
  ASSERT_TRUE(made) << made.status().message;
  std::vector<Code> codes(kRdmaBlocks);
  for (const size_t layer : {2u, 0u, 1u, 3u}) {
    std::vector<ConstSlice> slices;
    for (const auto& block : blocks) slices.emplace_back(block.data() + layer * kLayer, kLayer);
    std::vector<std::span<const ConstSlice>> sources;
    for (const ConstSlice& slice : slices) sources.emplace_back(&slice, 1);
    ASSERT_TRUE((*made)->write(layer * kLayer, sources, {}, codes));
    for (const Code code : codes) EXPECT_EQ(code, Code::kOk);
  }
  EXPECT_EQ(stat_of(*client_, "rdma_bytes"), 4 * kLayer * kRdmaBlocks);
  EXPECT_EQ(node_stat("requests_write"), 0u);
  EXPECT_EQ(node_stat("requests_reserve"), 1u);
  ASSERT_TRUE((*made)->commit({}, codes));
  for (const Code code : codes) EXPECT_EQ(code, Code::kOk);
  for (size_t i = 0; i < kRdmaBlocks; ++i) expect_stored(i, blocks[i]);
}

TEST_F(RdmaReservations, OfABatchWithoutAPathTheRestGoesInFrames) {
  if (rdma_is_real()) GTEST_SKIP();
  open(1, 1);
  constexpr size_t kRdmaBlocks = 5;
  std::vector<std::vector<std::byte>> blocks;
  std::vector<Key> keys;
  for (size_t i = 0; i < kRdmaBlocks; ++i) {
    keys.push_back(key_of(i));
    blocks.push_back(bytes_of(i, kSize));
  }
  auto made = client_->reserve(std::span(keys), kSize, {});
  ASSERT_TRUE(made) << made.status().message;
  std::vector<Code> codes(kRdmaBlocks);
  const auto write_half = [&](size_t offset, size_t length) {
    std::vector<ConstSlice> slices;
    for (const auto& block : blocks) slices.emplace_back(block.data() + offset, length);
    std::vector<std::span<const ConstSlice>> sources;
    for (const ConstSlice& slice : slices) sources.emplace_back(&slice, 1);
    ASSERT_TRUE((*made)->write(offset, sources, {}, codes));
    for (const Code code : codes) EXPECT_EQ(code, Code::kOk);
  };
  write_half(0, kHalf);
  fake().cut_path(0, true);
  write_half(kHalf, kSize - kHalf);
  EXPECT_GE(node_stat("requests_write"), 1u);
  EXPECT_GE(stat_of(*client_, "rdma_fallbacks"), 1u);
  ASSERT_TRUE((*made)->commit({}, codes));
  for (const Code code : codes) EXPECT_EQ(code, Code::kOk);
  for (size_t i = 0; i < kRdmaBlocks; ++i) expect_stored(i, blocks[i]);
}

TEST_F(RdmaReservations, ARegisteredBufferIsReadInPlace) {
  open(1, 1);
  auto source = bytes_of(1, kSize);
  ASSERT_TRUE(client_->register_buffer({source.data(), source.size()}));
  const auto reservation = reserve(1);
  ASSERT_TRUE(reservation);
  ASSERT_TRUE(write(*reservation, source, 0, kSize));
  EXPECT_EQ(stat_of(*client_, "rdma_direct_bytes"), kSize);
  ASSERT_TRUE(reservation->commit({}));
  expect_stored(1, source);
  ASSERT_TRUE(client_->unregister_buffer({source.data(), source.size()}));
}

TEST_F(RdmaReservations, AGapIsSeenAndWhatIsDroppedIsGivenBack) {
  open(1, 1);
  const auto source = bytes_of(1, kSize);
  const auto half = reserve(1);
  ASSERT_TRUE(write(*half, source, 0, kHalf));
  EXPECT_EQ(half->commit({}).code, Code::kIncomplete);
  auto dropped = reserve(2);
  ASSERT_TRUE(write(*dropped, source, 0, kHalf));
  dropped.reset();
  EXPECT_TRUE(eventually([&] { return nodes_[0]->server->store().stats().reservations == 0; }));
}

TEST_F(RdmaReservations, SmallOnesGoInFrames) {
  open(1, 1);
  const auto source = bytes_of(1, 4096);
  const auto reservation = reserve(1, source.size());
  ASSERT_TRUE(reservation);
  ASSERT_TRUE(write(*reservation, source, 0, source.size()));
  EXPECT_EQ(stat_of(*client_, "rdma_bytes"), 0u);
  EXPECT_EQ(node_stat("requests_write"), 1u);
  ASSERT_TRUE(reservation->commit({}));
  expect_stored(1, source);
}

TEST_F(RdmaReservations, WithoutAPathTheRestGoesInFrames) {
  if (rdma_is_real()) GTEST_SKIP();
  open(1, 1);
  const auto source = bytes_of(1, kSize);
  const auto reservation = reserve(1);
  ASSERT_TRUE(write(*reservation, source, 0, kHalf));
  fake().cut_path(0, true);
  const Status rest = write(*reservation, source, kHalf, kSize - kHalf);
  ASSERT_TRUE(rest) << rest.message;
  EXPECT_GE(node_stat("requests_write"), 1u);
  EXPECT_GE(stat_of(*client_, "rdma_fallbacks"), 1u);
  const Status committed = reservation->commit({});
  ASSERT_TRUE(committed) << committed.message;
  expect_stored(1, source);
}

TEST_F(RdmaReservations, ExtentsThatTheNodeCannotOpenGoInFrames) {
  if (rdma_is_real()) GTEST_SKIP();
  open(1, 1);
  put(1);  // staging memory is registered by now
  fake().fail("ibv_reg_mr_iova", ENOMEM, -1);
  const auto source = bytes_of(1, kSize);
  const auto reservation = reserve(100);
  ASSERT_TRUE(reservation);
  ASSERT_TRUE(write(*reservation, source, 0, kSize));
  EXPECT_GE(node_stat("requests_write"), 1u);
  ASSERT_TRUE(reservation->commit({}));
  expect_stored(100, source);
  fake().reset(1);
}

TEST_F(RdmaReservations, ACutWriteCostsItsOwnReservationOnly) {
  if (rdma_is_real()) GTEST_SKIP();
  for (const bool in_place : {false, true}) {
    open(1, 1);
    const auto source = bytes_of(1, kSize);
    auto doomed_source = std::make_unique<std::vector<std::byte>>(bytes_of(2, kSize));
    const Slice doomed_memory{doomed_source->data(), doomed_source->size()};
    if (in_place) {
      ASSERT_TRUE(client_->register_buffer(doomed_memory));
    }
    const auto kept = reserve(1);  // of the same connection
    const auto doomed = reserve(2);
    ASSERT_TRUE(write(*kept, source, 0, kHalf));
    cut_a_write(*doomed, *doomed_source);
    if (in_place) {
      ASSERT_TRUE(client_->unregister_buffer(doomed_memory));
    }
    doomed_source.reset();  // a device that still read it would read freed memory
    const uint64_t before = stat_of(*client_, "rdma_bytes");
    const Status rest = write(*kept, source, kHalf, kSize - kHalf);
    ASSERT_TRUE(rest) << rest.message;
    EXPECT_EQ(stat_of(*client_, "rdma_bytes"), before + kSize - kHalf) << "the link was not opened again";
    const Status committed = kept->commit({});
    ASSERT_TRUE(committed) << committed.message;
    expect_stored(1, source);
    EXPECT_TRUE(eventually([&] { return nodes_[0]->server->store().stats().reservations == 0; }));
    client_.reset();
    nodes_.clear();
  }
}

TEST_F(RdmaReservations, ADeadlineEndsAWrite) {
  if (rdma_is_real()) GTEST_SKIP();
  open(1, 1);
  const auto source = bytes_of(1, kSize);
  const auto reservation = reserve(1);
  fake().set_latency_us(0, 1'000'000);
  CallOptions options;
  options.deadline = Deadline::after_ms(50);
  EXPECT_EQ(write(*reservation, source, 0, kSize, options).code, Code::kDeadlineExceeded);
  fake().set_latency_us(0, 0);
  EXPECT_EQ(reservation->commit({}).code, Code::kClosed);
}

TEST_F(RdmaReservations, QueuePairsOfAConnectionWithoutReservationsAreGivenUp) {
  if (rdma_is_real()) GTEST_SKIP();
  ClientConfig config = client_config(false);
  config.idle_timeout_ms = 300;
  open(1, 1, config);
  const auto connections = [&] { return nodes_[0]->server->rails()[0].connections; };
  auto reservation = reserve(1);
  EXPECT_EQ(connections(), 1u);
  reservation.reset();
  EXPECT_TRUE(eventually([&] {  // calls are what brings it about
    sleep_ms(20);
    EXPECT_TRUE(client_->match(std::span<const Key>(), false, {}));
    (void)put_one(*client_, key_of(9), bytes_of(9, 100));
    return connections() == 0;
  }));
  EXPECT_TRUE(reserve(2));  // on a new one
}

}  // namespace
}  // namespace mooncache::testing

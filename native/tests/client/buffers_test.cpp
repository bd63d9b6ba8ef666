// Blocks in memory that a device may touch on its own. What must hold: a registration is used for memory that
// is listed now, and for no other, however its address was used before.
#include <sys/mman.h>

#include <thread>

#include "client/buffer_book.h"
#include "client/node.h"
#include "client/rdma_pool.h"
#include "client/receive_pool.h"
#include "compare.h"

namespace mooncache::testing {
namespace {

// Gets that learn the size from the node, into memory of the pool or of the heap.
class Lending : public RdmaPool {
 protected:
  struct Got {
    std::vector<std::unique_ptr<LentBuffer>> lent;
    std::vector<std::vector<std::byte>> own;
    std::vector<GetOutcome> outcomes;
    const std::byte* at(size_t i) const { return lent[i] ? lent[i]->data() : own[i].data(); }
  };
  Got get_lent(const std::vector<Key>& keys, bool pool = true) {
    Got got;
    got.lent.resize(keys.size());
    got.own.resize(keys.size());
    got.outcomes.resize(keys.size());
    std::vector<GetBlock> items;
    for (const Key& key : keys) items.push_back({key, {}});
    GetOptions how;
    how.allocate = [&](size_t item, uint64_t size) {
      got.lent[item] = pool ? client_->receive_buffer(size) : nullptr;
      if (got.lent[item]) return got.lent[item]->data();
      got.own[item].resize(size);
      return got.own[item].data();
    };
    EXPECT_TRUE(client_->get(items, how, {}, got.outcomes));
    return got;
  }
  // All blocks of put() that came whole; a wrong byte fails the test.
  size_t whole(const Got& got) {
    size_t count = 0;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (got.outcomes[i].code != Code::kOk) continue;
      EXPECT_EQ(got.outcomes[i].size, blocks_[i].size());
      EXPECT_TRUE(std::equal(blocks_[i].begin(), blocks_[i].end(), got.at(i))) << i;
      ++count;
    }
    return count;
  }
  std::vector<Key> keys() const {
    std::vector<Key> all;
    for (size_t i = 0; i < blocks_.size(); ++i) all.push_back(key_of(i));
    return all;
  }
  uint64_t stat(const std::string& name) { return stat_of(*client_, name); }
};

TEST_F(Lending, BlocksOfUnknownSizeComeOverRdmaIntoThePool) {
  open(2);
  put(12);
  const uint64_t before = stat("rdma_bytes"), tcp = stat("tcp_bytes");
  {
    const Got got = get_lent(keys());
    EXPECT_EQ(whole(got), 12u);
    EXPECT_GE(stat("rdma_bytes") - before, 12 * kBlockBytes) << "also the first time";
    EXPECT_GE(stat("rdma_direct_bytes"), 12 * kBlockBytes);
    EXPECT_LT(stat("tcp_bytes") - tcp, kBlockBytes);
    EXPECT_EQ(stat("receive_pool_misses"), 0u);
  }
  EXPECT_EQ(stat("receive_pool_lent_bytes"), 0u);
  const uint64_t registrations = stat("registrations");
  EXPECT_EQ(whole(get_lent(keys())), 12u);
  EXPECT_EQ(stat("registrations"), registrations) << "slabs stay registered";
}

TEST_F(Lending, MemoryOfTheCallersOwnIsFilledThroughStaging) {
  open(1);
  put(6);
  const uint64_t before = stat("rdma_bytes");
  EXPECT_EQ(whole(get_lent(keys(), false)), 6u);
  EXPECT_GE(stat("rdma_bytes") - before, 6 * kBlockBytes);
  EXPECT_EQ(stat("rdma_direct_bytes"), 0u);
}

TEST_F(Lending, APoolThatIsLentOutIsTheCallersTurn) {
  ClientConfig config = client_config(false);
  config.receive_pool_bytes = 4 << 20;
  open(1, 1, config);
  put(8);
  const Got got = get_lent(keys());
  EXPECT_EQ(whole(got), 8u);
  EXPECT_GE(stat("receive_pool_misses"), 5u);
  EXPECT_LE(stat("receive_pool_mapped_bytes"), 4u << 20);
}

TEST_F(Lending, SmallBlocksTakeOneRoundOverTcpAndMixturesArrive) {
  open(1, 1);
  put(3);
  std::vector<Key> small;
  const auto bytes = bytes_of(77, 5000);
  for (uint64_t i = 0; i < 20; ++i) {
    small.push_back(key_of(1000 + i));
    EXPECT_EQ(put_one(*client_, small.back(), bytes).code, Code::kOk);
  }
  const uint64_t before = stat("rdma_bytes");
  const Got got = get_lent(small);
  for (size_t i = 0; i < small.size(); ++i) {
    ASSERT_EQ(got.outcomes[i].code, Code::kOk);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), got.at(i)));
  }
  EXPECT_EQ(stat("rdma_bytes"), before);
  std::vector<Key> mixed = keys();
  mixed.insert(mixed.end(), small.begin(), small.end());
  mixed.push_back(key_of(999'999));
  for (int round = 0; round < 3; ++round) {  // whatever the guess is by then
    const Got both = get_lent(mixed);
    EXPECT_EQ(whole(both), 3u);
    for (size_t i = 3; i < 3 + small.size(); ++i) EXPECT_EQ(both.outcomes[i].code, Code::kOk);
    EXPECT_EQ(both.outcomes.back().code, Code::kNotFound);
    EXPECT_EQ(whole(get_lent(keys())), 3u);
  }
  EXPECT_EQ(stat("miss_too_small"), 0u);
}

TEST_F(Lending, RegisteredMemoryIsWrittenAndReadInPlace) {
  open(2, 1);
  std::vector<std::byte> arena(8 << 20);
  const Slice all = slice_of(arena);
  ASSERT_TRUE(client_->register_buffer(all));
  const auto block = bytes_of(5, 3 << 20);
  std::copy(block.begin(), block.end(), arena.begin() + 100);
  EXPECT_EQ(put_one(*client_, key_of(1), std::span(arena).subspan(100, block.size())).code, Code::kOk);
  EXPECT_EQ(stat("rdma_direct_bytes"), block.size());
  const std::span<std::byte> into = std::span(arena).subspan(4 << 20, block.size());
  EXPECT_EQ(get_one(*client_, key_of(1), into).code, Code::kOk);
  EXPECT_TRUE(std::equal(block.begin(), block.end(), into.begin()));
  EXPECT_EQ(stat("rdma_direct_bytes"), 2 * block.size());
  EXPECT_EQ(stat("registrations"), 1u);
  ASSERT_TRUE(client_->unregister_buffer(all));
  EXPECT_EQ(stat("registered_bytes"), 0u);
  EXPECT_EQ(get_one(*client_, key_of(1), into).code, Code::kOk);
  EXPECT_EQ(stat("rdma_direct_bytes"), 2 * block.size());
}

// As an engine keeps a block: K and V of each layer, in tensors of their own.
class Scattered : public Lending {
 protected:
  static constexpr size_t kLayers = 12, kBlocks = 8;
  void open_with(uint32_t rails, size_t piece, int gathers = 16) {
    if (!rdma_is_real()) {
      fake().reset(rails);
      for (uint32_t i = 0; i < rails; ++i) fake().set_max_gather(i, gathers);
    }
    for (uint32_t i = 0; i < 1; ++i)
      nodes_.push_back(std::make_unique<TestNode>(i, 256 << 20, "host", false, test_rdma(false)));
    ClientConfig config = client_config(false);
    config.rdma = test_rdma(true);
    client_ = client_for({nodes_[0]->info}, config);
    piece_ = piece;
    for (uint64_t layer = 0; layer < kLayers; ++layer) {
      tensors_.push_back(bytes_of(layer, 2 * kBlocks * piece));
      ASSERT_TRUE(client_->register_buffer(slice_of(tensors_.back())));
      const Status attached = client_->attach_buffer(slice_of(tensors_.back()));
      ASSERT_TRUE(attached) << attached.message;
    }
    EXPECT_EQ(stat("registrations"), kLayers);
  }
  template <typename S>
  std::vector<S> pieces(size_t block) {
    std::vector<S> slices;
    for (auto& tensor : tensors_) {
      for (const size_t which : {block, kBlocks + block})
        slices.push_back(S{tensor.data() + which * piece_, piece_});
    }
    return slices;
  }
  uint64_t bytes() const { return kLayers * 2 * kBlocks * piece_; }
  // All blocks go and come back. Bytes that were staged.
  uint64_t round() {
    std::atomic<uint64_t> staged{0};
    CallOptions options;
    options.staged_bytes = &staged;
    std::vector<std::vector<ConstSlice>> sources;
    std::vector<std::vector<Slice>> targets;
    for (size_t block = 0; block < kBlocks; ++block) {
      sources.push_back(pieces<ConstSlice>(block));
      targets.push_back(pieces<Slice>(block));
    }
    std::vector<PutBlock> puts;
    std::vector<GetBlock> gets;
    for (size_t block = 0; block < kBlocks; ++block) {
      puts.push_back({key_of(block), sources[block]});
      gets.push_back({key_of(block), targets[block], 0});
    }
    std::vector<PutOutcome> put(kBlocks);
    EXPECT_TRUE(client_->put(puts, 1, options, put));
    for (const PutOutcome& outcome : put) EXPECT_EQ(outcome.code, Code::kOk);
    const auto before = tensors_;
    for (auto& tensor : tensors_) std::fill(tensor.begin(), tensor.end(), std::byte{0xee});
    std::vector<GetOutcome> got(kBlocks);
    EXPECT_TRUE(client_->get(gets, {}, options, got));
    for (const GetOutcome& outcome : got) EXPECT_EQ(outcome.code, Code::kOk);
    EXPECT_TRUE(tensors_ == before);
    return staged.load();
  }
  size_t piece_ = 0;
  std::vector<std::vector<std::byte>> tensors_;
};

TEST_F(Scattered, BlocksGoAndComeBetweenManyTensorsInPlace) {
  open_with(2, 40'000);
  EXPECT_EQ(round(), 0u);
  EXPECT_EQ(stat("rdma_direct_bytes"), 2 * bytes());
  EXPECT_EQ(stat("registrations"), kLayers) << "once, at the start";
}

TEST_F(Scattered, SmallPiecesShareARequest) {
  if (rdma_is_real()) GTEST_SKIP();
  open_with(1, 4096 + 3);
  EXPECT_EQ(round(), 0u);
  EXPECT_EQ(stat("rdma_direct_bytes"), 2 * bytes());
  // 24 pieces of a block: 16 in one request, 8 in the next
  EXPECT_EQ(fake().requests(0), 2 * 2 * kBlocks);
}

TEST_F(Scattered, ADeviceThatTakesOneRangeARequestStagesSmallPieces) {
  if (rdma_is_real()) GTEST_SKIP();
  open_with(1, 4096 + 3, 1);
  EXPECT_EQ(round(), 2 * bytes());
  EXPECT_EQ(stat("rdma_direct_bytes"), 0u);
}

TEST_F(Scattered, PiecesOfARailThatFailsGoOverTheOther) {
  if (rdma_is_real()) GTEST_SKIP();
  open_with(2, 40'000);
  fake().fail_after(0, 5);
  EXPECT_EQ(round(), 0u);
  EXPECT_GE(stat("rdma_direct_bytes"), 2 * bytes());
}

TEST_F(Scattered, ATensorThatIsNoLongerRegisteredMakesItsBlocksStaged) {
  open_with(1, 40'000);
  ASSERT_TRUE(client_->unregister_buffer(slice_of(tensors_[3])));
  EXPECT_EQ(round(), 2 * bytes());
}

TEST_F(Scattered, LayersOfManyBlocksAreWrittenInPlace) {
  open_with(1, 40'000);
  std::vector<Key> keys;
  for (size_t i = 0; i < kBlocks; ++i) keys.push_back(key_of(i));
  auto made = client_->reserve(std::span(keys), kLayers * 2 * piece_, {});
  ASSERT_TRUE(made) << made.status().message;
  std::atomic<uint64_t> staged{0};
  CallOptions options;
  options.staged_bytes = &staged;
  std::vector<Code> codes(kBlocks);
  std::vector<std::vector<ConstSlice>> blocks;
  for (size_t block = 0; block < kBlocks; ++block) blocks.push_back(pieces<ConstSlice>(block));
  for (size_t layer = 0; layer < kLayers; ++layer) {
    std::vector<std::span<const ConstSlice>> sources;
    for (const auto& block : blocks) sources.push_back(std::span(block).subspan(2 * layer, 2));
    ASSERT_TRUE((*made)->write(2 * layer * piece_, sources, options, codes));
    for (const Code code : codes) EXPECT_EQ(code, Code::kOk);
  }
  ASSERT_TRUE((*made)->commit({}, codes));
  EXPECT_EQ(staged.load(), 0u);
  EXPECT_EQ(stat("rdma_direct_bytes"), bytes());
  std::vector<std::byte> copy(kLayers * 2 * piece_);
  ASSERT_EQ(get_one(*client_, key_of(2), copy).code, Code::kOk);
  const auto wanted = pieces<ConstSlice>(2);
  for (size_t i = 0; i < wanted.size(); ++i)
    EXPECT_TRUE(std::equal(wanted[i].data, wanted[i].data + piece_,
                           copy.begin() + static_cast<ptrdiff_t>(i * piece_)));
}

// Pages that were freed and mapped anew at the same address: what a device still has of the old ones must not
// be used. On a real device the old registration would move the old pages.
TEST_F(Lending, MemoryMappedAnewAtTheSameAddressHasNoRegistration) {
  open(1, 1);
  const size_t size = 2 << 20;
  const auto map_at = [&](void* where) {
    void* memory = mmap(where, size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | (where != nullptr ? MAP_FIXED : 0), -1, 0);
    EXPECT_NE(memory, MAP_FAILED);
    return static_cast<std::byte*>(memory);
  };
  std::byte* memory = map_at(nullptr);
  uint64_t number = 0;
  for (int round = 0; round < 3; ++round) {
    const auto direct_before = stat("rdma_direct_bytes");
    ASSERT_TRUE(client_->register_buffer({memory, size}));
    const auto block = bytes_of(++number, size);
    std::copy(block.begin(), block.end(), memory);
    EXPECT_EQ(put_one(*client_, key_of(number), {memory, size}).code, Code::kOk);
    EXPECT_EQ(stat("rdma_direct_bytes") - direct_before, size);
    ASSERT_TRUE(client_->unregister_buffer({memory, size}));
    EXPECT_EQ(map_at(memory), memory);  // the same address, other pages
    for (const bool listed : {false, true}) {
      if (listed) {
        ASSERT_TRUE(client_->register_buffer({memory, size}));
      }
      const uint64_t before = stat("rdma_direct_bytes");
      const auto other = bytes_of(++number, size);
      std::copy(other.begin(), other.end(), memory);
      EXPECT_EQ(put_one(*client_, key_of(number), {memory, size}).code, Code::kOk);
      std::fill_n(memory, size, std::byte{0});
      EXPECT_EQ(get_one(*client_, key_of(number), {memory, size}).code, Code::kOk);
      EXPECT_TRUE(std::equal(other.begin(), other.end(), memory));
      EXPECT_EQ(stat("rdma_direct_bytes") - before, listed ? 2 * size : 0);
      if (listed) {
        ASSERT_TRUE(client_->unregister_buffer({memory, size}));
      }
    }
    EXPECT_EQ(map_at(memory), memory);
  }
  EXPECT_EQ(stat("miss_checksum"), 0u);
  munmap(memory, size);
}

TEST_F(Lending, MoreBuffersThanMayBeRegisteredTakeTurns) {
  ClientConfig config = client_config(false);
  config.registered_buffers_max = 2;
  open(1, 1, config);
  std::vector<std::vector<std::byte>> buffers;
  for (uint64_t i = 0; i < 5; ++i) {
    buffers.push_back(bytes_of(i, kBlockBytes));
    ASSERT_TRUE(client_->register_buffer(slice_of(buffers.back())));
  }
  for (int round = 0; round < 2; ++round) {
    for (uint64_t i = 0; i < buffers.size(); ++i) {
      const auto key = key_of(i + 100 * static_cast<uint64_t>(round));
      EXPECT_EQ(put_one(*client_, key, buffers[i]).code, Code::kOk);
    }
  }
  EXPECT_EQ(stat("rdma_direct_bytes"), 10 * kBlockBytes);
  EXPECT_EQ(stat("registrations"), 10u);
  EXPECT_EQ(stat("registration_evictions"), 8u);
  EXPECT_LE(stat("registered_bytes"), 2 * kBlockBytes);
}

TEST_F(Lending, WithoutAPathUnknownSizesComeOverTcp) {
  if (rdma_is_real()) GTEST_SKIP();
  open(2);
  put(6);
  EXPECT_EQ(whole(get_lent(keys())), 6u);
  fake().cut_path(0, true);
  fake().cut_path(1, true);
  const uint64_t tcp = stat("tcp_bytes");
  EXPECT_EQ(whole(get_lent(keys())), 6u);
  EXPECT_GE(stat("rdma_fallbacks"), 1u);
  EXPECT_GE(stat("tcp_bytes") - tcp, 6 * kBlockBytes);
}

TEST_F(Lending, ABufferThatCannotBeRegisteredGoesThroughStaging) {
  if (rdma_is_real()) GTEST_SKIP();
  open(1, 1);
  put(2);  // what the node and the staging register is done
  std::vector<std::byte> arena(2 << 20);
  ASSERT_TRUE(client_->register_buffer(slice_of(arena)));
  fake().fail("ibv_reg_mr_iova", ENOMEM, 1, 1);  // the node's own comes first
  EXPECT_EQ(get_one(*client_, key_of(0), std::span(arena).first(blocks_[0].size())).code, Code::kOk);
  EXPECT_TRUE(std::equal(blocks_[0].begin(), blocks_[0].end(), arena.begin()));
  EXPECT_EQ(stat("rdma_direct_bytes"), 0u);
  EXPECT_EQ(stat("registration_failures"), 1u);
  EXPECT_EQ(stat("rdma_fallbacks"), 0u);
}

TEST_F(Lending, ACancelledGetLeavesRegisteredMemoryAlone) {
  open(1, 1);
  put(4);
  std::vector<std::byte> arena(8 << 20);
  ASSERT_TRUE(client_->register_buffer(slice_of(arena)));
  if (!rdma_is_real()) fake().set_latency_us(0, 20'000);
  std::vector<Slice> slices;
  std::vector<GetBlock> items;
  for (size_t i = 0; i < 4; ++i) slices.push_back(slice_of(arena, i << 21, 2 << 20));
  for (size_t i = 0; i < 4; ++i) items.push_back({key_of(i), std::span(&slices[i], 1)});
  size_t cancelled = 0;
  for (const int after_ms : {2, 10, 30, 100}) {  // emulated devices move megabytes in some of these
    CancelToken token;
    std::thread cancel([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(after_ms));
      token.cancel();
    });
    std::vector<GetOutcome> outcomes(items.size());
    CallOptions options;
    options.cancel = &token;
    (void)client_->get(items, {}, options, outcomes);
    for (const GetOutcome& outcome : outcomes) cancelled += outcome.code == Code::kCancelled ? 1 : 0;
    std::fill(arena.begin(), arena.end(), std::byte{0xee});
    cancel.join();
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    EXPECT_TRUE(all_bytes(arena, std::byte{0xee}));
  }
  EXPECT_GT(cancelled, 0u);
}

TEST_F(Lending, AFlippedBitIsAMissInThePoolToo) {
  if (rdma_is_real()) GTEST_SKIP();
  open(1, 2);
  put(1, 2);
  fake().flip_bits(1);
  EXPECT_EQ(whole(get_lent(keys())), 1u);
  EXPECT_GE(stat("miss_checksum"), 1u);
}

// The same decision for shared memory: blocks of unknown size are copied out of the arena.
TEST(LendingShm, LargeBlocksOfUnknownSizeComeOverSharedMemory) {
  TestNode node(0, 64 << 20, "host-a", true);
  const auto client = client_for({node.info}, client_config(true));
  const auto bytes = bytes_of(3, 1 << 20);
  EXPECT_EQ(put_one(*client, key_of(3), bytes).code, Code::kOk);
  for (int round = 0; round < 2; ++round) {
    const uint64_t before = stat_of(*client, "shm_bytes");
    std::unique_ptr<LentBuffer> lent;
    GetOptions how;
    how.allocate = [&](size_t, uint64_t size) {
      lent = client->receive_buffer(size);
      return lent->data();
    };
    const GetBlock block{key_of(3), {}};
    GetOutcome outcome;
    EXPECT_TRUE(client->get(std::span(&block, 1), how, {}, std::span(&outcome, 1)));
    EXPECT_EQ(outcome.code, Code::kOk);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), lent->data()));
    EXPECT_EQ(stat_of(*client, "shm_bytes") - before, bytes.size());
  }
}

TEST(LendingShm, ALentBufferOutlivesItsClient) {
  TestNode node(0);
  auto client = client_for({node.info}, client_config(false));
  auto lent = client->receive_buffer(100'000);
  ASSERT_NE(lent, nullptr);
  client.reset();
  std::fill_n(lent->data(), lent->size(), std::byte{1});
}

}  // namespace
}  // namespace mooncache::testing

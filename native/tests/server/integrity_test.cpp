// What is served or stored is what was promised: damage between two looks at a block, and damage on the way
// in.
#include "server/peer.h"
#include "server/range_check.h"

namespace mooncache::testing {
namespace {

using IntegrityTest = ServerTest;
using server::RangeCheck;

Bytes part_of(const Bytes& block, uint64_t offset, uint64_t length) {
  return {block.begin() + static_cast<ptrdiff_t>(offset),
          block.begin() + static_cast<ptrdiff_t>(offset + length)};
}

std::optional<Reply> read_range(Peer& peer, uint64_t grant, uint64_t offset, uint64_t length) {
  Writer meta;
  wire::ReadRequest{grant, offset, length}.encode(meta);
  return peer.call(Opcode::kRead, meta);
}

// The PING orders the flip behind the node's last look at the bytes, for the race detector too.
Code flip(StoreServer& node, Peer& peer, uint64_t number, uint64_t bit) {
  const auto answer = peer.call(Opcode::kPing);
  if (!answer || !answer->status) return Code::kConnectionLost;
  return node.store().flip_bit(kDefault, key_of(number), bit);
}

TEST_F(IntegrityTest, DamageUnderAGrantIsSeenByTheNextRead) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const Bytes good = block_of(1, 100'000);
  ASSERT_EQ(peer.put(key_of(1), good), Code::kOk);
  const auto found = peer.lookup(key_of(1));
  ASSERT_TRUE(found && found->code == Code::kOk);
  const auto first = read_range(peer, found->extent.grant, 500, 100);
  ASSERT_TRUE(first && first->status);
  EXPECT_EQ(first->payload, part_of(good, 500, 100));
  ASSERT_EQ(flip(*server, peer, 1, 8 * 510), Code::kOk);
  const auto again = read_range(peer, found->extent.grant, 500, 100);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->status.code, Code::kChecksumMismatch);
  EXPECT_TRUE(again->payload.empty());
  EXPECT_EQ(peer.get(key_of(1)).first, Code::kNotFound);
  EXPECT_EQ(stat("crc_failures_stored"), 1u);
}

// Large blocks: later frames look at the chunks they touch, and nothing damaged in those gets out.
TEST_F(IntegrityTest, LargeBlocksAreReadInFramesAndCheckedByChunk) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const uint64_t size = 5 * kMiB + 12'345;
  const Bytes good = block_of(1, size);
  ASSERT_EQ(peer.put(key_of(1), good), Code::kOk);
  const auto found = peer.lookup(key_of(1));
  ASSERT_TRUE(found && found->code == Code::kOk);
  const uint64_t grant = found->extent.grant;
  const std::pair<uint64_t, uint64_t> ranges[] = {{0, kMiB},          {kMiB, kMiB},  {kMiB - 1, 2},
                                                  {5 * kMiB, 12'345}, {size - 1, 1}, {7, 7},
                                                  {1, 4 * kMiB + 5},  {0, size - 1}, {0, size}};
  for (const auto& [offset, length] : ranges) {
    const auto answer = read_range(peer, grant, offset, length);
    ASSERT_TRUE(answer && answer->status) << offset << "+" << length;
    EXPECT_EQ(answer->payload, part_of(good, offset, length));
    EXPECT_EQ(Reader(answer->body).u32(), crc32c(answer->payload));
  }
  ASSERT_EQ(flip(*server, peer, 1, 8 * (3 * kMiB + 100)), Code::kOk);
  EXPECT_EQ(read_range(peer, grant, kMiB, kMiB)->payload, part_of(good, kMiB, kMiB)) << "sound chunks go on";
  EXPECT_EQ(read_range(peer, grant, 3 * kMiB, 50)->status.code, Code::kChecksumMismatch);
  EXPECT_EQ(peer.get(key_of(1)).first, Code::kNotFound);
}

TEST_F(IntegrityTest, SeveralRangesOfOneBlockInOneGet) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const Bytes large = block_of(1, 3 * kMiB + 1), small = block_of(2, 5'000);
  ASSERT_EQ(peer.put({{key_of(1), large}, {key_of(2), small}}), (std::vector<Code>{Code::kOk, Code::kOk}));
  const auto answer = peer.call(Opcode::kGet, Peer::get_meta({{key_of(1), 2 * kMiB - 3, 6},
                                                              {key_of(1), 10, kMiB},
                                                              {key_of(2), 10, 20},
                                                              {key_of(2), 30, 20},
                                                              {key_of(1), 3 * kMiB, 1}}));
  const auto results = peer.get_results(answer);
  ASSERT_EQ(results.size(), 5u);
  Bytes wanted;
  const std::pair<const Bytes*, std::pair<uint64_t, uint64_t>> parts[] = {{&large, {2 * kMiB - 3, 6}},
                                                                          {&large, {10, kMiB}},
                                                                          {&small, {10, 20}},
                                                                          {&small, {30, 20}},
                                                                          {&large, {3 * kMiB, 1}}};
  for (size_t i = 0; i < results.size(); ++i) {
    const Bytes part = part_of(*parts[i].first, parts[i].second.first, parts[i].second.second);
    EXPECT_EQ(results[i].crc32c, crc32c(part)) << i;
    wanted.insert(wanted.end(), part.begin(), part.end());
  }
  EXPECT_EQ(answer->payload, wanted);
}

TEST_F(IntegrityTest, VerifyChecksABlockWithoutSendingIt) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  for (const uint64_t i : {1, 2}) ASSERT_EQ(peer.put(key_of(i), block_of(i, 2 * kMiB)), Code::kOk);
  ASSERT_EQ(flip(*server, peer, 2, 8 * kMiB), Code::kOk);
  const auto answer =
      peer.call(Opcode::kGet, Peer::get_meta({{key_of(1), 0, 0}, {key_of(2), 0, 0}, {key_of(3), 0, 0}}), {},
                wire::kFlagVerify);
  const auto results = peer.get_results(answer);
  ASSERT_EQ(results.size(), 3u);
  EXPECT_EQ(results[0].code, Code::kOk);
  EXPECT_EQ(results[0].length, 0u);
  EXPECT_EQ(results[0].block_size, 2 * kMiB);
  EXPECT_EQ(results[1].code, Code::kChecksumMismatch);
  EXPECT_EQ(results[2].code, Code::kNotFound);
  EXPECT_TRUE(answer->payload.empty());
  EXPECT_EQ(stat("pins_held"), 0u);
  EXPECT_EQ(stat("store_pins"), 0u);
  EXPECT_EQ(stat("store_removed_corrupt"), 1u);
  EXPECT_EQ(peer.get(key_of(1)), std::pair(Code::kOk, block_of(1, 2 * kMiB)));
  EXPECT_EQ(peer.get(key_of(2)).first, Code::kNotFound);
  // It looks each time, also at what was sound a moment ago.
  ASSERT_EQ(flip(*server, peer, 1, 5), Code::kOk);
  const auto again =
      peer.get_results(peer.call(Opcode::kGet, Peer::get_meta({{key_of(1), 0, 0}}), {}, wire::kFlagVerify));
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].code, Code::kChecksumMismatch);
}

TEST_F(IntegrityTest, DamagedBytesOverGoodOnesAreNotCommitted) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const Bytes good = block_of(1, 1000), bad = block_of(2, 1000);
  const auto place = peer.reserve(key_of(1), 1000);
  ASSERT_TRUE(place && place->code == Code::kOk);
  ASSERT_EQ(peer.write(place->extent.grant, 0, good), Code::kOk);
  EXPECT_EQ(peer.write(place->extent.grant, 0, bad, 123u), Code::kChecksumMismatch);
  EXPECT_EQ(peer.commit(place->extent.grant, crc32c(good)), Code::kIncomplete);
  EXPECT_EQ(peer.get(key_of(1)).first, Code::kNotFound);
  // Beside the good bytes they do no harm, and the range can be written again.
  const auto retry = peer.reserve(key_of(1), 1000);
  ASSERT_TRUE(retry && retry->code == Code::kOk);
  ASSERT_EQ(peer.write(retry->extent.grant, 0, part_of(good, 0, 400)), Code::kOk);
  EXPECT_EQ(peer.write(retry->extent.grant, 400, part_of(bad, 400, 600), 123u), Code::kChecksumMismatch);
  EXPECT_EQ(peer.write(retry->extent.grant, 400, part_of(good, 400, 600)), Code::kOk);
  EXPECT_EQ(peer.commit(retry->extent.grant, crc32c(good)), Code::kOk);
  EXPECT_EQ(peer.get(key_of(1)), std::pair(Code::kOk, good));
}

// Every range, with and without known chunks, in steps of any budget.
TEST(RangeCheckTest, RangeCrcAndVerdictAgreeWithAPlainPass) {
  const uint64_t size = 2 * kMiB + 77;
  Bytes block = block_of(9, size);
  const uint32_t crc = crc32c(block);
  const ConstSlice slice{block.data(), block.size()};
  const auto run = [&](RangeCheck& check) {
    int turns = 0;
    for (uint64_t budget = 1; !check.advance(slice, budget); budget = 700'000) ++turns;
    return turns;
  };
  RangeCheck first(size, crc, 5, 6, {});
  EXPECT_GT(run(first), 0);
  ASSERT_TRUE(first.sound());
  const std::vector<uint32_t> chunks = first.take_chunks();
  ASSERT_EQ(chunks.size(), 3u);
  const std::vector<std::pair<uint64_t, uint64_t>> ranges = {{0, 1},        {kMiB - 1, 1},  {kMiB - 1, 2},
                                                             {kMiB, kMiB},  {2 * kMiB, 77}, {0, size},
                                                             {3, size - 3}, {size, 0}};
  for (const auto& [offset, length] : ranges) {
    for (const bool by_chunk : {false, true}) {
      RangeCheck check(size, crc, offset, length, by_chunk ? chunks : std::vector<uint32_t>{});
      run(check);
      EXPECT_TRUE(check.sound());
      EXPECT_EQ(check.range_crc(), crc32c(std::span(block).subspan(offset, length)));
    }
  }
  block[kMiB + 9] ^= std::byte{1};
  for (const auto& [offset, length] : ranges) {
    RangeCheck whole(size, crc, offset, length, {}), touched(size, crc, offset, length, chunks);
    run(whole);
    run(touched);
    EXPECT_FALSE(whole.sound());
    EXPECT_EQ(touched.sound(), offset + length <= kMiB || offset >= 2 * kMiB) << offset << "+" << length;
  }
  EXPECT_EQ(RangeCheck::chunk_bytes(1), kMiB);
  EXPECT_EQ(RangeCheck::chunk_bytes(1ull << 30), 4 * kMiB);
}

}  // namespace
}  // namespace mooncache::testing

// Decisions about rails, without one.
#include "rdma/choose.h"

#include <gtest/gtest.h>

#include <random>

namespace mooncache::rdma {
namespace {

TEST(Pieces, GrowWithTheTransferAndShrinkWithItsRails) {
  EXPECT_EQ(piece_bytes(1 << 10, 1, 1u << 30), 64u << 10);
  EXPECT_EQ(piece_bytes(1 << 20, 1, 1u << 30), 256u << 10);
  EXPECT_EQ(piece_bytes(1 << 20, 2, 1u << 30), 128u << 10);
  EXPECT_EQ(piece_bytes(1 << 20, 8, 1u << 30), 64u << 10);
  EXPECT_EQ(piece_bytes(1 << 24, 4, 1u << 30), 1u << 20);
  EXPECT_EQ(piece_bytes(1ull << 40, 4, 1u << 30), 1u << 20);
}

TEST(Pieces, NeverExceedWhatADeviceTakes) {
  EXPECT_EQ(piece_bytes(1 << 24, 1, 128 << 10), 128u << 10);
  EXPECT_EQ(piece_bytes(1 << 24, 1, 4096), 4096u);
  EXPECT_EQ(piece_bytes(1 << 24, 1, 0), 1u << 20) << "a device that does not say takes what is usual";
  std::mt19937_64 random(1);
  for (int i = 0; i < 10'000; ++i) {
    const uint64_t length = random() >> (random() % 64);
    const auto most = static_cast<uint32_t>(1 + (random() >> 33) % (64u << 20));
    const uint32_t piece = piece_bytes(length, random() % 9, most);
    EXPECT_GE(piece, std::min(most, kPieceBytesMin));
    EXPECT_LE(piece, std::min(most, kPieceBytesMax));
    if (piece < most) EXPECT_EQ(piece % 4096, 0u) << "a packet that is half empty in each piece";
  }
}

TEST(Order, FastestThenFewestConnectionsThenLeastUnderWay) {
  const std::vector<RailLoad> rails = {
      {100'000, 0, 2}, {200'000, 0, 9}, {100'000, 500, 1}, {100'000, 400, 1}, {25'000, 0, 0}};
  EXPECT_EQ(order_rails(rails, 0), (std::vector<size_t>{1, 3, 2, 0, 4}));
  EXPECT_EQ(order_rails(rails, 3), (std::vector<size_t>{1, 3, 2, 0, 4})) << "the turn is for equals alone";
  EXPECT_TRUE(order_rails({}, 5).empty());
}

TEST(Order, EqualsGoRound) {
  std::vector<RailLoad> rails(8, RailLoad{100'000, 0, 0});
  EXPECT_EQ(order_rails(rails, 13)[0], 5u);
  for (int connection = 0; connection < 4; ++connection) {  // four rails each
    const std::vector<size_t> order = order_rails(rails, 3);
    for (size_t i = 0; i < 4; ++i) ++rails[order[i]].links;
  }
  for (const RailLoad& rail : rails) EXPECT_EQ(rail.links, 2u);
}

TEST(Order, LoadIsEverybodys) {
  EXPECT_LT(time_through({100'000, 0, 3}, 1 << 20), time_through({100'000, 1 << 20, 1}, 1 << 20));
  EXPECT_LT(time_through({400'000, 1 << 20, 1}, 1 << 20), time_through({100'000, 0, 1}, 1 << 20));
  EXPECT_GT(time_through({0, 0, 0}, 1), 0u) << "a speed that is not known";
}

}  // namespace
}  // namespace mooncache::rdma

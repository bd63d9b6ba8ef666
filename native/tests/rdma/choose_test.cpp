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

}  // namespace
}  // namespace mooncache::rdma

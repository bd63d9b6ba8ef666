// Decisions about rails, without one.
#include "rdma/choose.h"

#include <gtest/gtest.h>

#include <array>
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
    EXPECT_TRUE(piece == most || piece % 4096 == 0) << "a packet that is half empty in each piece";
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
  EXPECT_LT(time_through({100'000, 0, 3}, 1 << 20, 1), time_through({100'000, 1 << 20, 1}, 1 << 20, 1));
  EXPECT_LT(time_through({400'000, 1 << 20, 1}, 1 << 20, 1), time_through({100'000, 0, 1}, 1 << 20, 1));
  EXPECT_GT(time_through({0, 0, 0}, 1, 1), 0u) << "a speed that is not known";
}

TEST(Order, NearRailsComeBeforeFasterOnes) {
  const std::vector<RailLoad> rails = {{400'000, 0, 0, true}, {100'000, 9, 9, false}, {100'000, 0, 0, true}};
  EXPECT_EQ(order_rails(rails, 0), (std::vector<size_t>{1, 0, 2}));
}

TEST(Distances, AreThoseOfTopology) {
  const PciPlace nic{"pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:04.0/0000:3d:00.0", 0};
  const PciPlace beside{"pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:08.0/0000:3e:00.0", 0};
  const PciPlace deeper{
      "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:08.0/0000:3e:00.0/0000:3f:01.0/0000:40:00.0", 0};
  const PciPlace other_port{"pci0000:3a/0000:3a:02.0/0000:50:00.0", 0};
  const PciPlace other_bridge{"pci0000:5a/0000:5a:00.0/0000:5b:00.0", 0};
  const PciPlace other_socket{"pci0000:80/0000:80:01.0/0000:81:00.0", 1};
  EXPECT_EQ(distance(nic, beside), Distance::kPix);
  EXPECT_EQ(distance(nic, deeper), Distance::kPxb);
  EXPECT_EQ(distance(nic, other_port), Distance::kPhb);
  EXPECT_EQ(distance(nic, other_bridge), Distance::kNode);
  EXPECT_EQ(distance(nic, other_socket), Distance::kSys);
  EXPECT_EQ(distance(other_socket, nic), Distance::kSys);
  EXPECT_EQ(distance(nic, PciPlace{}), Distance::kUnknown);
  EXPECT_EQ(distance({"pci0000:00", -1}, {"pci0000:01", -1}), Distance::kSys)
      << "two unknown nodes are not one";
  EXPECT_EQ(distance({"pci0000:00", -1}, {"pci0000:00", -1}), Distance::kPhb);
  EXPECT_EQ(distance(1, 1), Distance::kPhb);
  EXPECT_EQ(distance(1, 0), Distance::kSys);
  EXPECT_EQ(distance(-1, -1), Distance::kUnknown);
  EXPECT_STREQ(distance_name(Distance::kNode), "NODE");
}

TEST(Distances, FarRailsWaitUntilNearOnesHaveTwiceAsMuchToDo) {
  using enum Distance;
  const std::array some = {kSys, kPix, kPix, kUnknown};
  EXPECT_EQ(slowness(some), (std::vector<uint32_t>{2, 1, 1, 2}));
  const std::array alike = {kUnknown, kUnknown};
  EXPECT_EQ(slowness(alike), (std::vector<uint32_t>{1, 1})) << "memory of an unknown place has no preference";
  const std::array one_left = {kSys, kSys};
  EXPECT_EQ(slowness(one_left), (std::vector<uint32_t>{1, 1}));
  constexpr uint64_t kPiece = 1 << 20;
  const RailLoad idle{100'000, 0, 1}, busy{100'000, kPiece / 2, 1}, loaded{100'000, 2 * kPiece, 1};
  EXPECT_LT(time_through(busy, kPiece, 1), time_through(idle, kPiece, 2));
  EXPECT_GT(time_through(loaded, kPiece, 1), time_through(idle, kPiece, 2));
}

}  // namespace
}  // namespace mooncache::rdma

// Registered memory, the same for all transports: whether a link needs it or not, bytes go through it, and a
// handle means one registration.
#include <set>

#include "compare.h"
#include "transport/conformance.h"

namespace mooncache::testing {
namespace {

class ConformanceRegions : public Conformance {
 protected:
  RegionHandle enroll(std::span<std::byte> memory) {
    const auto made = peer_->transport().register_region({{memory.data(), memory.size()}, MemoryKind::kHost});
    EXPECT_TRUE(made) << made.status().message;
    return made ? *made : 0;
  }
  Status dismiss(RegionHandle handle) { return peer_->transport().unregister_region(handle); }
  // All of them, in as many rounds as the link's queue needs. How many went well.
  size_t move(std::span<const Transfer> transfers) {
    size_t good = 0;
    while (!transfers.empty()) {
      const size_t taken = link_->submit(transfers);
      const auto done = drain(taken, 60'000);
      if (taken == 0 || done.size() != taken) break;
      for (size_t i = 0; i < taken; ++i) {
        const Slice& own = transfers[i].local[0];
        good += done[i].code == Code::kOk && done[i].crc32c == crc32c({own.data, own.size}) ? 1 : 0;
      }
      transfers = transfers.subspan(taken);
    }
    return good;
  }
  Code move_one(Direction direction, const RemoteExtent& extent, std::span<std::byte> local,
                RegionHandle region) {
    const Slice all{local.data(), local.size()};
    Transfer one = transfer(1, direction, extent, std::span(&all, 1));
    one.region = region;
    EXPECT_EQ(link_->submit(std::span(&one, 1)), 1u);
    const auto done = drain(1, 60'000);
    if (done.size() != 1) return Code::kDeadlineExceeded;
    if (done[0].code == Code::kOk && done[0].crc32c != crc32c(local)) return Code::kChecksumMismatch;
    return done[0].code;
  }
  // The largest message of the link's devices; 8 MiB where there is no device.
  uint64_t largest_message() {
    uint64_t largest = 8 << 20;
    if (const auto* rdma = dynamic_cast<RdmaTransport*>(&peer_->transport())) {
      for (const auto& rail : rdma->shared()->rails)
        largest = std::max<uint64_t>(largest, rail->rail->info().max_message_bytes);
    }
    return largest;
  }
};

TEST_P(ConformanceRegions, AThousandOfThemMoveTheirBytes) {
  constexpr size_t kRegions = 1000, kStride = 1536, kBytes = 1111;
  auto memory = bytes_of(8, kRegions * kStride);
  const RemoteExtent out = peer_->writable(*link_, kRegions * kBytes);
  const auto there = bytes_of(9, kRegions * kBytes);
  const RemoteExtent in = peer_->readable(*link_, there);
  std::vector<Slice> slices;
  std::vector<Transfer> writes, reads;
  std::set<RegionHandle> handles;
  std::vector<std::byte> sent;
  slices.reserve(kRegions);
  for (size_t i = 0; i < kRegions; ++i) {
    const std::span own = std::span(memory).subspan(i * kStride, kBytes);
    sent.insert(sent.end(), own.begin(), own.end());
    slices.push_back({own.data(), own.size()});
    writes.push_back(transfer(i, Direction::kWrite, out, std::span(&slices.back(), 1), i * kBytes));
    reads.push_back(transfer(i, Direction::kRead, in, std::span(&slices.back(), 1), i * kBytes));
    writes.back().region = reads.back().region = enroll(own);
    handles.insert(writes.back().region);
  }
  EXPECT_EQ(handles.size(), kRegions);
  EXPECT_EQ(handles.count(0), 0u);

  EXPECT_EQ(move(writes), kRegions);
  const auto stored = peer_->stored(out);
  ASSERT_EQ(stored.size(), sent.size());
  EXPECT_TRUE(std::equal(stored.begin(), stored.end(), sent.begin()));

  const auto before = memory;
  EXPECT_EQ(move(reads), kRegions);
  size_t right = 0;
  for (size_t i = 0; i < kRegions; ++i) {
    const auto own = memory.begin() + static_cast<ptrdiff_t>(i * kStride);
    const auto gap = own + kBytes;
    const bool came = std::equal(own, gap, there.begin() + static_cast<ptrdiff_t>(i * kBytes));
    const bool beside = std::equal(gap, own + kStride, before.begin() + (gap - memory.begin()));
    right += came && beside ? 1 : 0;
  }
  EXPECT_EQ(right, kRegions);
  for (const RegionHandle handle : handles) EXPECT_TRUE(dismiss(handle));
  EXPECT_EQ(dismiss(*handles.begin()).code, Code::kInvalidArgument);
}

TEST_P(ConformanceRegions, MemoryRegisteredTwiceHasTwoHandles) {
  auto memory = bytes_of(10, 600'000);
  const RegionHandle first = enroll(memory);
  const RegionHandle second = enroll(memory);
  EXPECT_NE(first, second);
  for (const RegionHandle region : {first, second}) {
    const RemoteExtent extent = peer_->writable(*link_, memory.size());
    EXPECT_EQ(move_one(Direction::kWrite, extent, memory, region), Code::kOk);
    const auto stored = peer_->stored(extent);
    EXPECT_TRUE(same_bytes(stored, memory));
    if (region == first) {
      EXPECT_TRUE(dismiss(first));  // the other one goes on
    }
  }
  EXPECT_EQ(dismiss(first).code, Code::kInvalidArgument);
  EXPECT_TRUE(dismiss(second));
  // What is no region any more is memory like any other.
  const auto source = bytes_of(11, memory.size());
  EXPECT_EQ(move_one(Direction::kRead, peer_->readable(*link_, source), memory, second), Code::kOk);
  EXPECT_TRUE(memory == source);
}

TEST_P(ConformanceRegions, WhatIsNoRegionIsRefused) {
  std::byte one{};
  Transport& transport = peer_->transport();
  const auto code = [&](const Region& region) { return transport.register_region(region).code(); };
  EXPECT_EQ(code({{nullptr, 5}}), Code::kInvalidArgument);
  EXPECT_EQ(code({{&one, 0}}), Code::kInvalidArgument);
  EXPECT_EQ(code({{&one, 1}, MemoryKind::kDevice}), Code::kTransportUnavailable);
  EXPECT_EQ(dismiss(0).code, Code::kInvalidArgument);
  EXPECT_EQ(dismiss(12'345).code, Code::kInvalidArgument);
}

TEST_P(ConformanceRegions, OneSliceMayBeLongerThanAnyMessage) {
  const size_t size = std::min<uint64_t>(largest_message(), 32 << 20) + 70'001;
  auto memory = bytes_of(12, size);
  const RegionHandle region = enroll(memory);
  for (const RegionHandle with : {region, RegionHandle{0}}) {  // in place, and through staging
    const RemoteExtent extent = peer_->writable(*link_, size);
    ASSERT_EQ(move_one(Direction::kWrite, extent, memory, with), Code::kOk);
    const auto stored = peer_->stored(extent);
    ASSERT_TRUE(same_bytes(stored, memory));
  }
  const auto source = bytes_of(13, size);
  const RemoteExtent extent = peer_->readable(*link_, source);
  EXPECT_EQ(move_one(Direction::kRead, extent, memory, region), Code::kOk);
  EXPECT_TRUE(memory == source);
  EXPECT_TRUE(dismiss(region));
}

INSTANTIATE_TEST_SUITE_P(Transports, ConformanceRegions, kTransports, transport_name);

}  // namespace
}  // namespace mooncache::testing

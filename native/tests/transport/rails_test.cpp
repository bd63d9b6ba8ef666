// Which rails the links of a process take, and what they see of each other.
#include "transport/rdma_link_fixture.h"

#ifdef MOONCACHE_FAKE_VERBS

namespace mooncache::testing {
namespace {

using RdmaRails = RdmaTest;

TEST_F(RdmaRails, LinksSpreadOverRailsAndLetGoOfThem) {
  open(8);
  auto second = peer_->connect();
  const auto links = [&] {
    std::vector<uint32_t> counts;
    for (const auto& rail : peer_->rdma().shared()->rails) counts.push_back(rail->links.load());
    return counts;
  };
  EXPECT_EQ(links(), std::vector<uint32_t>(8, 1));
  second.reset();
  link_->close();
  EXPECT_EQ(links(), std::vector<uint32_t>(8, 0));
}

TEST_F(RdmaRails, ALinkSeesTheLoadOfTheOthers) {
  open(2);
  const auto& rails = peer_->rdma().shared()->rails;
  const auto source = bytes_of(1, 4 << 20);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> copy(source.size());
  const uint64_t before = fake().bytes_moved(0);
  rails[0]->in_flight_bytes += 1 << 30;  // of another link
  EXPECT_EQ(read(extent, copy).code, Code::kOk);
  EXPECT_EQ(fake().bytes_moved(0), before);
  rails[0]->in_flight_bytes -= 1 << 30;
  EXPECT_EQ(read(extent, copy).code, Code::kOk);
  EXPECT_GT(fake().bytes_moved(0), before);
}

TEST_F(RdmaRails, NothingStaysUnderWayHoweverATransferEnds) {
  open(2);
  const auto source = bytes_of(1, 8 << 20);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> copy(source.size());
  const auto region = peer_->rdma().register_region({{copy.data(), copy.size()}, MemoryKind::kHost});
  const auto under_way = [&] {
    uint64_t sum = 0;
    for (const auto& rail : peer_->rdma().shared()->rails) sum += rail->in_flight_bytes.load();
    return sum;
  };
  for (const RegionHandle handle : {RegionHandle{0}, *region}) {
    EXPECT_EQ(read(extent, copy, handle).code, Code::kOk);
    EXPECT_EQ(under_way(), 0u);
  }
  for (uint32_t i = 0; i < 2; ++i) fake().set_latency_us(i, 2'000);
  const Slice all{copy.data(), copy.size()};
  const Transfer one = transfer(1, Direction::kRead, extent, std::span(&all, 1), *region);
  ASSERT_EQ(link_->submit(std::span(&one, 1)), 1u);
  std::vector<int> fds;
  (void)link_->wait_for(fds);
  EXPECT_GT(under_way(), 0u);
  ASSERT_TRUE(link_->cancel(1));
  EXPECT_EQ(under_way(), 0u);
  link_ = peer_->connect();
  fake().fail_after(0, 3);
  fake().fail_after(1, 5);
  EXPECT_EQ(read(peer_->readable(*link_, source), copy).code, Code::kTransportUnavailable);
  EXPECT_EQ(under_way(), 0u);
  EXPECT_TRUE(peer_->rdma().unregister_region(*region));
}

}  // namespace
}  // namespace mooncache::testing
#endif

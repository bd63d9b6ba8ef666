// Which rails the links of a process take, and what they see of each other.
#include <thread>

#include "rdma/place.h"
#include "rdma/sockets.h"
#include "transport/rdma_link_fixture.h"

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
  expect_sound(*link_);
  EXPECT_EQ(under_way(), 0u);
  link_ = peer_->connect();
  fake().fail_after(0, 3);
  fake().fail_after(1, 5);
  EXPECT_EQ(read(peer_->readable(*link_, source), copy).code, Code::kTransportUnavailable);
  EXPECT_EQ(under_way(), 0u);
  EXPECT_TRUE(peer_->rdma().unregister_region(*region));
}

// Four devices on two sockets, and what each of them has moved.
class RdmaSockets : public RdmaTest {
 protected:
  void open_sockets(uint32_t rails_max = 4) {
    RdmaConfig client = test_rdma(true);
    client.sysfs_folder = machine_.folder();
    client.rails_max = rails_max;
    open(4, client);
  }
  std::vector<bool> used_by(RegionHandle region, uint64_t size) {
    std::vector<uint64_t> before;
    for (uint32_t i = 0; i < 4; ++i) before.push_back(fake().bytes_moved(i));
    const RemoteExtent extent = peer_->readable(*link_, bytes_of(3, size));
    const Slice all{memory().data, size};
    const Transfer one = transfer(1, Direction::kRead, extent, std::span(&all, 1), region);
    EXPECT_EQ(link_->submit(std::span(&one, 1)), 1u);
    EXPECT_EQ(drain(1).at(0).code, Code::kOk);
    std::vector<bool> used;
    for (uint32_t i = 0; i < 4; ++i) used.push_back(fake().bytes_moved(i) > before[i]);
    return used;
  }
  // Memory of a fake GPU at that PCI address.
  RegionHandle gpu_region(const std::string& pci_address) {
    constexpr int kFd = 2000;
    fake().set_dma_buf(kFd, memory().data, kBytes);
    Region region{memory(), MemoryKind::kDevice};
    region.dma_buf_fd = kFd;
    region.pci_address = pci_address;
    auto handle = peer_->rdma().register_region(region);
    EXPECT_TRUE(handle) << handle.status().message;
    return handle ? *handle : 0;
  }
  Slice memory() {  // whole pages
    const auto at = reinterpret_cast<uintptr_t>(bytes_.data());
    return {bytes_.data() + (4096 - at % 4096) % 4096, kBytes};
  }
  static constexpr uint64_t kBytes = 8 << 20;
  static constexpr uint64_t kTwoPieces = 128 << 10;
  std::vector<std::byte> bytes_ = std::vector<std::byte>(kBytes + 4096);
  TwoSockets machine_;
};

TEST_F(RdmaSockets, HostMemoryGoesOverTheRailsOfItsNode) {
  open_sockets();
  for (const int node : {0, 1}) {
    Region region{memory(), MemoryKind::kHost};
    region.numa_node = node;
    const auto handle = peer_->rdma().register_region(region);
    ASSERT_TRUE(handle);
    const std::vector<bool> near{node == 0, node == 0, node == 1, node == 1};
    EXPECT_EQ(used_by(*handle, kTwoPieces), near) << node;
    for (uint32_t i = 0; i < 4; ++i) fake().set_latency_us(i, 2'000);
    EXPECT_EQ(used_by(*handle, kBytes), std::vector<bool>(4, true)) << "the near ones are loaded";
    for (uint32_t i = 0; i < 4; ++i) fake().set_latency_us(i, 0);
    EXPECT_TRUE(peer_->rdma().unregister_region(*handle));
  }
}

TEST_F(RdmaSockets, FarRailsTakeOverWhenTheNearOnesAreDown) {
  open_sockets();
  Region region{memory(), MemoryKind::kHost};
  region.numa_node = 1;
  const auto handle = peer_->rdma().register_region(region);
  ASSERT_TRUE(handle);
  for (const uint32_t device : {2u, 3u}) fake().set_port_active(device, false);
  const auto& rails = peer_->rdma().shared()->rails;
  while (rails[2]->rail->up() || rails[3]->rail->up())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(used_by(*handle, kTwoPieces), (std::vector<bool>{true, true, false, false}));
  EXPECT_TRUE(peer_->rdma().unregister_region(*handle));
}

TEST_F(RdmaSockets, GpuMemoryGoesOverTheRailBesideTheGpu) {
  open_sockets();
  const RegionHandle one = gpu_region("00000000:3D:00.0");  // as drivers write it
  EXPECT_EQ(
      peer_->rdma().describe(one),
      "fake0:1 by dma-buf, PIX; fake1:1 by dma-buf, PHB; fake2:1 by dma-buf, SYS; fake3:1 by dma-buf, SYS");
  EXPECT_EQ(used_by(one, kTwoPieces), (std::vector<bool>{true, false, false, false}));
  EXPECT_TRUE(peer_->rdma().unregister_region(one));
  const RegionHandle two = gpu_region("0000:83:00.0");
  EXPECT_EQ(used_by(two, kTwoPieces), (std::vector<bool>{false, false, true, true}));
  EXPECT_TRUE(peer_->rdma().unregister_region(two));
  const RegionHandle nowhere = gpu_region("");
  EXPECT_EQ(peer_->rdma().describe(nowhere),
            "fake0:1 by dma-buf; fake1:1 by dma-buf; fake2:1 by dma-buf; fake3:1 by dma-buf");
  EXPECT_EQ(used_by(nowhere, 256 << 10), std::vector<bool>(4, true)) << "no preference";
  EXPECT_TRUE(peer_->rdma().unregister_region(nowhere));
}

TEST_F(RdmaSockets, ALinkHasTheRailBesideTheGpu) {
  open_sockets(1);
  for (const char* address : {"0000:3d:00.0", "0000:83:00.0"}) {
    const RegionHandle region = gpu_region(address);
    const auto wants = [&] { return static_cast<RdmaLink&>(*link_).wants_rails(); };
    link_ = peer_->connect();
    EXPECT_FALSE(wants());
    const bool first = address[5] == '3';
    const std::vector<bool> used = used_by(region, kTwoPieces);
    EXPECT_EQ(used[0], first);
    EXPECT_NE(used[2] || used[3], first);
    EXPECT_TRUE(peer_->rdma().unregister_region(region));
    const RegionHandle other = gpu_region(first ? "0000:83:00.0" : "0000:3d:00.0");
    EXPECT_EQ(wants(), true) << "its one queue pair is far from this GPU";
    EXPECT_TRUE(peer_->rdma().unregister_region(other));
    EXPECT_FALSE(wants());
  }
}

TEST_F(RdmaSockets, APlaceThatIsNotKnownIsNoError) {
  open_sockets();
  using rdma::place_of_address;
  for (const char* address : {"", "x", "0000:99:00.0", "../../0000:3d:00.0", "no address at all"})
    EXPECT_EQ(place_of_address(machine_.folder(), address).path, "") << address;
  EXPECT_EQ(place_of_address(machine_.folder(), "0000:3D:00.0").numa_node, 0);
  EXPECT_EQ(rdma::node_of_memory({nullptr, 0}), -1);
  EXPECT_FALSE(rdma::prefer_node({nullptr, 0}, -1));
  EXPECT_TRUE(rdma::has_several_nodes(machine_.folder()));
  EXPECT_FALSE(rdma::has_several_nodes("/nonexistent"));
}

}  // namespace
}  // namespace mooncache::testing

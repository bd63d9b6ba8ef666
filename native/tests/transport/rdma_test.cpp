// What only RDMA does: rails, fail-over, registered memory, staging. Over the fake library.
#include <thread>

#include "compare.h"
#include "transport/rdma_link_fixture.h"

namespace mooncache::testing {
namespace {

TEST_F(RdmaTest, OneTransferUsesAllRails) {
  open(4);
  const auto source = bytes_of(1, 24 << 20);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> copy(source.size());
  for (uint32_t i = 0; i < 4; ++i) fake().set_latency_us(i, 100);
  const Completion done = read(extent, copy);
  EXPECT_EQ(done.code, Code::kOk);
  EXPECT_EQ(done.crc32c, crc32c(source));
  EXPECT_TRUE(same_bytes(copy, source));
  for (uint32_t i = 0; i < 4; ++i) EXPECT_GT(fake().bytes_moved(i), source.size() / 16) << i;
}

TEST_F(RdmaTest, ALinkTakesNoMoreRailsThanAllowed) {
  open(8);
  const auto source = bytes_of(1, 8 << 20);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> copy(source.size());
  EXPECT_EQ(read(extent, copy).code, Code::kOk);
  uint32_t used = 0;
  for (uint32_t i = 0; i < 8; ++i) used += fake().bytes_moved(i) > 0 ? 1 : 0;
  EXPECT_LE(used, 4u);
}

TEST_F(RdmaTest, ARailThatDiesInTheMiddleIsReplacedByTheOthers) {
  for (const bool write : {false, true}) {
    open(2);
    fake().fail_after(0, 7);
    auto source = bytes_of(2, 16 << 20);
    if (write) {
      const RemoteExtent extent = peer_->writable(*link_, source.size());
      const Slice all{source.data(), source.size()};
      const Transfer one = transfer(1, Direction::kWrite, extent, std::span(&all, 1));
      ASSERT_EQ(link_->submit(std::span(&one, 1)), 1u);
      const auto done = drain(1);
      ASSERT_EQ(done.size(), 1u);
      EXPECT_EQ(done[0].code, Code::kOk);
      EXPECT_EQ(done[0].crc32c, crc32c(source));
      const Slice stored = peer_->node().server->store().writable(ReservationId{extent.grant});
      EXPECT_EQ(crc32c({stored.data, stored.size}), crc32c(source));
    } else {
      const RemoteExtent extent = peer_->readable(*link_, source);
      std::vector<std::byte> copy(source.size());
      const Completion done = read(extent, copy);
      EXPECT_EQ(done.code, Code::kOk);
      EXPECT_TRUE(same_bytes(copy, source));
    }
    EXPECT_TRUE(link_->healthy());
    EXPECT_GT(fake().bytes_moved(1), fake().bytes_moved(0));
    TearDown();
  }
  open(1);
}

TEST_F(RdmaTest, AllRailsDownIsAnotherTransportsTurn) {
  open(2);
  const auto source = bytes_of(3, 4 << 20);
  const RemoteExtent extent = peer_->readable(*link_, source);
  fake().cut_path(0, true);
  fake().cut_path(1, true);
  std::vector<std::byte> copy(source.size());
  const Completion done = read(extent, copy);
  EXPECT_EQ(done.code, Code::kTransportUnavailable);
  EXPECT_FALSE(link_->session()->broken());
}

TEST_F(RdmaTest, PortsThatComeBackAreUsedAgain) {
  const auto source = bytes_of(4, 1 << 20);
  // A link gives up after some tens of milliseconds: a busy machine may come back too late, but not each
  // time.
  for (int attempt = 0; attempt < 5; ++attempt) {
    open(1);
    const RemoteExtent extent = peer_->readable(*link_, source);
    std::vector<std::byte> copy(source.size());
    fake().fail_after(0, 2);
    std::thread mend([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      fake().fail_after(0, 0);
      fake().cut_path(0, false);
    });
    Completion done = read(extent, copy);
    mend.join();
    // either the repair came in time, or the next transfer finds the rail again: under the same keys
    if (done.code != Code::kOk) done = read(extent, copy);
    if (done.code == Code::kOk) {
      EXPECT_TRUE(same_bytes(copy, source));
      return;
    }
    TearDown();
  }
  FAIL() << "the port came back, and no link used it";
}

TEST_F(RdmaTest, ADeviceThatIsPulledOutTakesNobodyAlong) {
  open(2);
  for (uint32_t i = 0; i < 2; ++i) fake().set_latency_us(i, 2'000);
  const auto source = bytes_of(5, 16 << 20);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> copy(source.size());
  std::thread pull([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    fake().remove(0);
  });
  const Completion done = read(extent, copy);
  pull.join();
  EXPECT_EQ(done.code, Code::kOk);
  EXPECT_TRUE(same_bytes(copy, source));
}

TEST_F(RdmaTest, RegisteredMemoryIsUsedInPlace) {
  open(2);
  const auto source = bytes_of(6, 5'000'001);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> copy(source.size() + 100);
  const auto region = peer_->rdma().register_region({{copy.data(), copy.size()}, MemoryKind::kHost});
  ASSERT_TRUE(region);
  const auto twice = peer_->rdma().register_region({{copy.data(), copy.size()}, MemoryKind::kHost});
  ASSERT_TRUE(twice);
  const Slice parts[] = {{copy.data() + 7, 1'000'000}, {nullptr, 0}, {copy.data() + 1'000'007, 4'000'001}};
  const Transfer one = transfer(1, Direction::kRead, extent, parts, *region);
  ASSERT_EQ(link_->submit(std::span(&one, 1)), 1u);
  const auto done = drain(1);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].code, Code::kOk);
  EXPECT_EQ(done[0].crc32c, crc32c(source));
  EXPECT_TRUE(std::equal(source.begin(), source.end(), copy.begin() + 7));
  EXPECT_TRUE(peer_->rdma().unregister_region(*region));
  EXPECT_TRUE(peer_->rdma().unregister_region(*twice));
  EXPECT_EQ(peer_->rdma().unregister_region(*region).code, Code::kInvalidArgument);
}

TEST_F(RdmaTest, EachSliceHasARegionOfItsOwnOrAllAreStaged) {
  open(2);
  const auto source = bytes_of(6, 300'000);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> first(200'000), second(100'000);
  const auto one = peer_->rdma().register_region({{first.data(), first.size()}, MemoryKind::kHost});
  const auto two = peer_->rdma().register_region({{second.data(), second.size()}, MemoryKind::kHost});
  ASSERT_TRUE(one && two);
  const Slice parts[] = {
      {first.data(), 100'000}, {nullptr, 0}, {second.data(), 100'000}, {first.data() + 100'000, 100'000}};
  using Regions = std::vector<RegionHandle>;
  const auto requests_with = [&](const Regions& regions) {
    std::fill(first.begin(), first.end(), std::byte{0});
    std::fill(second.begin(), second.end(), std::byte{0});
    const uint64_t before = fake().requests(0) + fake().requests(1);
    Transfer transfer = this->transfer(1, Direction::kRead, extent, parts);
    transfer.regions = regions;
    EXPECT_EQ(link_->submit(std::span(&transfer, 1)), 1u);
    const auto done = drain(1);
    EXPECT_EQ(done.size(), 1u);
    EXPECT_EQ(done.at(0).code, Code::kOk);
    EXPECT_EQ(done.at(0).crc32c, crc32c(source));
    auto at = source.begin();
    for (const Slice& part : parts) {
      EXPECT_TRUE(std::equal(part.data, part.data + part.size, at));
      at += static_cast<ptrdiff_t>(part.size);
    }
    return fake().requests(0) + fake().requests(1) - before;
  };
  const uint64_t staged = requests_with({});
  const uint64_t in_place = requests_with({*one, 0, *two, *one});
  EXPECT_NE(in_place, staged);
  EXPECT_EQ(requests_with({0, 0, *two, *one}), staged) << "a slice without a region";
  EXPECT_EQ(requests_with({*two, 0, *two, *one}), staged) << "a slice beside its region";
  EXPECT_EQ(requests_with({*one, 0, *two}), staged) << "not a region for each slice";
  EXPECT_TRUE(peer_->rdma().unregister_region(*two));
  EXPECT_EQ(requests_with({*one, 0, *two, *one}), staged) << "a region that is gone";
  EXPECT_TRUE(peer_->rdma().unregister_region(*one));
}

TEST_F(RdmaTest, PiecesFitTheTransferItsRailsAndTheDevices) {
  struct Case {
    uint64_t size;
    uint32_t rails;
    uint32_t max_message_bytes;  // of the first device
    bool in_place;
    uint64_t requests;
  };
  const uint32_t usual = 8 << 20;
  for (const Case& one : {Case{16 << 20, 1, usual, true, 16}, Case{1 << 20, 1, usual, true, 4},
                          Case{1 << 20, 2, usual, true, 8}, Case{16 << 20, 2, 96 << 10, true, 171},
                          Case{2 << 20, 1, usual, false, 8}, Case{2 << 20, 2, 96 << 10, false, 22}}) {
    fake().reset(one.rails);
    fake().set_max_message(0, one.max_message_bytes);
    peer_ = std::make_unique<NodeHarness>("rdma");
    link_ = peer_->connect();
    ASSERT_NE(link_, nullptr);
    const auto source = bytes_of(6, one.size);
    const RemoteExtent extent = peer_->readable(*link_, source);
    std::vector<std::byte> copy(source.size());
    RegionHandle region = 0;
    if (one.in_place)
      region = *peer_->rdma().register_region({{copy.data(), copy.size()}, MemoryKind::kHost});
    EXPECT_EQ(read(extent, copy, region).code, Code::kOk);
    EXPECT_TRUE(same_bytes(copy, source));
    uint64_t requests = 0;
    for (uint32_t i = 0; i < one.rails; ++i) requests += fake().requests(i);
    EXPECT_EQ(requests, one.requests) << one.size << " bytes over " << one.rails;
    if (region != 0) {
      EXPECT_TRUE(peer_->rdma().unregister_region(region));
    }
    link_.reset();
    peer_.reset();
  }
}

TEST_F(RdmaTest, ACancelledTransferLeavesRegisteredMemoryAlone) {
  open(1);
  fake().set_latency_us(0, 3'000);
  const auto source = bytes_of(7, 16 << 20);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> copy(source.size());
  const auto region = peer_->rdma().register_region({{copy.data(), copy.size()}, MemoryKind::kHost});
  const Slice all{copy.data(), copy.size()};
  const Transfer one = transfer(1, Direction::kRead, extent, std::span(&all, 1), *region);
  ASSERT_EQ(link_->submit(std::span(&one, 1)), 1u);
  Completion none;
  ASSERT_EQ(link_->poll(std::span(&none, 1), Deadline::after(std::chrono::microseconds(200))), 0u);
  ASSERT_TRUE(link_->cancel(1));
  expect_sound(*link_);
  std::fill(copy.begin(), copy.end(), std::byte{0xee});
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_TRUE(all_bytes(copy, std::byte{0xee}));
  EXPECT_EQ(drain(1).at(0).code, Code::kCancelled);
  // and the link goes on
  const auto more = bytes_of(8, 100'000);
  std::vector<std::byte> second(more.size());
  EXPECT_EQ(read(peer_->readable(*link_, more), second).code, Code::kOk);
  EXPECT_TRUE(second == more);
  EXPECT_TRUE(peer_->rdma().unregister_region(*region));
}

TEST_F(RdmaTest, NoChecksumIsComputedThatNobodyWants) {
  open(1);
  const auto source = bytes_of(5, 3 << 20);
  const RemoteExtent extent = peer_->readable(*link_, source);
  for (const bool in_place : {false, true}) {
    std::vector<std::byte> copy(source.size());
    const auto region =
        in_place ? *peer_->rdma().register_region({{copy.data(), copy.size()}, MemoryKind::kHost}) : 0;
    const Slice all{copy.data(), copy.size()};
    Transfer one = transfer(1, Direction::kRead, extent, std::span(&all, 1), region);
    one.wants_crc = false;
    ASSERT_EQ(link_->submit(std::span(&one, 1)), 1u);
    const auto done = drain(1);
    ASSERT_EQ(done.size(), 1u);
    EXPECT_EQ(done[0].code, Code::kOk);
    EXPECT_FALSE(done[0].checked);
    EXPECT_TRUE(same_bytes(copy, source));
    EXPECT_TRUE(read(extent, copy, region).checked);
    if (in_place) {
      EXPECT_TRUE(peer_->rdma().unregister_region(region));
    }
  }
}

TEST_F(RdmaTest, CancelledBetweenLandingAndCheckNobodyLooksAtTheMemory) {
  for (const bool write : {false, true}) {
    open(1);
    auto bytes = std::make_unique<std::vector<std::byte>>(bytes_of(6, 8 << 20));
    const RemoteExtent extent =
        write ? peer_->writable(*link_, bytes->size()) : peer_->readable(*link_, *bytes);
    auto handle = peer_->rdma().register_region({{bytes->data(), bytes->size()}, MemoryKind::kHost});
    ASSERT_TRUE(handle);
    const Slice all{bytes->data(), bytes->size()};
    const Transfer one =
        transfer(1, write ? Direction::kWrite : Direction::kRead, extent, std::span(&all, 1), *handle);
    ASSERT_EQ(link_->submit(std::span(&one, 1)), 1u);
    std::vector<int> fds;
    for (int i = 0; i < 5; ++i) (void)link_->wait_for(fds);  // posted, some of it landed, less of it checked
    ASSERT_TRUE(link_->cancel(1));
    expect_sound(*link_);
    EXPECT_TRUE(peer_->rdma().unregister_region(*handle));
    bytes.reset();  // a sanitizer sees whoever still reads it
    const auto done = drain(1);
    ASSERT_EQ(done.size(), 1u);
    EXPECT_EQ(done[0].code, Code::kCancelled);
    TearDown();
  }
  open(1);
}

TEST_F(RdmaTest, DeviceMemoryGoesInPlaceOrNotAtAll) {
  open(2);
  constexpr int kFd = 2000;
  const uint64_t size = 3 << 20;
  std::vector<std::byte> vram(size + 4096);
  auto* begin =
      reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(vram.data()) + 4095) & ~uintptr_t{4095});
  fake().set_dma_buf(kFd, begin, size);
  Region region{{begin, size}, MemoryKind::kDevice};
  EXPECT_EQ(peer_->rdma().register_region(region).status().code, Code::kTransportUnavailable);
  region.dma_buf_fd = kFd;
  fake().fail("ibv_reg_dmabuf_mr", EOPNOTSUPP);  // one rail cannot, the other one can
  auto handle = peer_->rdma().register_region(region);
  ASSERT_TRUE(handle) << handle.status().message;
  const std::string how = peer_->rdma().describe(*handle);
  EXPECT_TRUE(how.starts_with("fake0:1 not at all, because ")) << how;
  EXPECT_NE(how.find("fake0 and its driver cannot register a dma-buf"), std::string::npos) << how;
  EXPECT_TRUE(how.ends_with("; fake1:1 by dma-buf")) << how;
  const auto source = bytes_of(7, size);
  const RemoteExtent extent = peer_->readable(*link_, source);
  const Slice all{begin, size};
  const uint64_t before = fake().bytes_moved(0);
  Transfer one = transfer(1, Direction::kRead, extent, std::span(&all, 1), *handle);
  ASSERT_EQ(link_->submit(std::span(&one, 1)), 1u);
  auto done = drain(1);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].code, Code::kOk);
  EXPECT_FALSE(done[0].checked) << "the processor cannot read it";
  EXPECT_TRUE(std::equal(source.begin(), source.end(), begin));
  EXPECT_EQ(fake().bytes_moved(0), before);
  // Without its registration, or beside it, it must never be taken for memory that can be copied.
  const Slice beside{begin + 4096, size};
  for (const bool gone : {false, true}) {
    if (gone) {
      EXPECT_TRUE(peer_->rdma().unregister_region(*handle));
    }
    one.local = std::span(gone ? &all : &beside, 1);
    ASSERT_EQ(link_->submit(std::span(&one, 1)), 1u);
    done = drain(1);
    ASSERT_EQ(done.size(), 1u);
    EXPECT_EQ(done[0].code, Code::kInvalidArgument);
  }
}

TEST_F(RdmaTest, ClosingCostsHungPortsOnePatienceTogether) {
  open(4);
  std::vector<std::byte> copy(8 << 20);
  const RemoteExtent extent = peer_->readable(*link_, bytes_of(8, copy.size()));
  for (uint32_t i = 0; i < 4; ++i) fake().hang(i, true);
  const Slice all{copy.data(), copy.size()};
  const Transfer one = transfer(1, Direction::kRead, extent, std::span(&all, 1));
  ASSERT_EQ(link_->submit(std::span(&one, 1)), 1u);
  std::vector<int> fds;
  (void)link_->wait_for(fds);
  const auto before = std::chrono::steady_clock::now();
  link_->close();
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(2)) << "100 ms, not per port";
  for (uint32_t i = 0; i < 4; ++i) fake().hang(i, false);
}

TEST_F(RdmaTest, AThousandRegions) {
  open(1);
  std::vector<std::byte> memory(1000 * 64);
  const uint64_t before = fake().registrations();
  std::vector<RegionHandle> handles;
  for (size_t i = 0; i < 1000; ++i) {
    const auto made = peer_->rdma().register_region({{memory.data() + i * 64, 64}, MemoryKind::kHost});
    ASSERT_TRUE(made);
    handles.push_back(*made);
  }
  EXPECT_EQ(fake().registrations(), before + 1000);
  for (const RegionHandle handle : handles) EXPECT_TRUE(peer_->rdma().unregister_region(handle));
  EXPECT_EQ(fake().registrations(), before);
}

TEST_F(RdmaTest, AFlippedBitShowsInTheChecksum) {
  open(1);
  const auto source = bytes_of(9, 2 << 20);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> copy(source.size());
  fake().flip_bits(1);
  const Completion done = read(extent, copy);
  EXPECT_EQ(done.code, Code::kOk);
  EXPECT_NE(done.crc32c, crc32c(source));
}

TEST_F(RdmaTest, AnExtentIsOpenOnlyWhileItsGrantIsHeld) {
  open(1);
  const uint64_t before = fake().registrations();
  const auto source = bytes_of(10, 100'000);
  const RemoteExtent extent = peer_->readable(*link_, source);
  EXPECT_EQ(fake().registrations(), before + 1);
  Writer meta;
  const uint64_t grant = extent.grant;
  wire::encode_grants(meta, std::span(&grant, 1));
  ASSERT_TRUE(exchange(*link_->session(), {wire::Opcode::kRelease, 0, std::move(meta), {}},
                       Deadline::after_ms(5000)));
  EXPECT_EQ(fake().registrations(), before);
  std::vector<std::byte> copy(source.size(), std::byte{1});
  EXPECT_EQ(read(extent, copy).code, Code::kTransportUnavailable);
  EXPECT_EQ(copy[0], std::byte{1});
}

TEST_F(RdmaTest, AKeyThatTheDeviceDoesNotForgetEndsWithItsQueuePair) {
  open(1);
  const auto source = bytes_of(10, 100'000);
  const RemoteExtent extent = peer_->readable(*link_, source);
  fake().fail("ibv_dereg_mr", EBUSY, 1);
  Writer meta;
  const uint64_t grant = extent.grant;
  wire::encode_grants(meta, std::span(&grant, 1));
  ASSERT_TRUE(exchange(*link_->session(), {wire::Opcode::kRelease, 0, std::move(meta), {}},
                       Deadline::after_ms(5000)));
  std::vector<std::byte> copy(source.size(), std::byte{1});
  EXPECT_NE(read(extent, copy).code, Code::kOk);
  EXPECT_EQ(copy[0], std::byte{1});
}

TEST_F(RdmaTest, NoKeyWorksOnAnotherConnection) {
  open(1);
  const auto source = bytes_of(11, 10'000);
  const RemoteExtent extent = peer_->readable(*link_, source);
  auto other = peer_->connect();
  std::swap(link_, other);
  std::vector<std::byte> copy(source.size(), std::byte{1});
  EXPECT_EQ(read(extent, copy).code, Code::kTransportUnavailable);
  EXPECT_EQ(copy[0], std::byte{1});
}

TEST_F(RdmaTest, FailuresOfTheNodesDeviceMeanTcp) {
  open(1);
  fake().fail("ibv_reg_mr_iova", ENOMEM, 1);
  const RemoteExtent extent = peer_->readable(*link_, bytes_of(12, 1000));
  EXPECT_FALSE(extent.exposed);
  std::vector<std::byte> copy(1000);
  EXPECT_EQ(read(extent, copy).code, Code::kTransportUnavailable);
}

TEST(RdmaTransportTest, AbsenceIsASentence) {
  RdmaConfig off;
  off.enabled = false;
  EXPECT_EQ(RdmaTransport(off).availability().message,
            "RDMA unavailable, because the configuration switches it off");
  RdmaConfig absent;
  absent.library = "libno-such-verbs.so";
  EXPECT_EQ(RdmaTransport(absent).availability().code, Code::kTransportUnavailable);
  EXPECT_EQ(RdmaTransport(absent).connect({}, Deadline::never()).code(), Code::kTransportUnavailable);
}

}  // namespace
}  // namespace mooncache::testing

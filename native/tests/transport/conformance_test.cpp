// What all transports do alike: order, checksums, hostile extents, cancel, close, death, bounds.
#include "transport/conformance.h"

#include <thread>

#include "compare.h"

namespace mooncache::testing {
namespace {

TEST_P(Conformance, ScatterGatherInOrderWithCrc) {
  const auto source = bytes_of(1, 3'000'001);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> copy(source.size());
  std::vector<std::vector<Slice>> local;
  std::vector<Transfer> transfers;
  const size_t cuts[] = {0, 1, 1, 70'000, 2'500'000, source.size()};
  for (size_t i = 0; i + 1 < std::size(cuts); ++i) {
    const size_t size = cuts[i + 1] - cuts[i];
    local.push_back({{copy.data() + cuts[i], size / 3},
                     {nullptr, 0},
                     {copy.data() + cuts[i] + size / 3, size - size / 3}});
  }
  for (size_t i = 0; i + 1 < std::size(cuts); ++i)
    transfers.push_back(transfer(i + 10, Direction::kRead, extent, local[i], cuts[i]));
  ASSERT_EQ(link_->submit(transfers), transfers.size());
  const auto completions = drain(transfers.size());
  ASSERT_EQ(completions.size(), transfers.size());
  for (size_t i = 0; i < completions.size(); ++i) {
    EXPECT_EQ(completions[i].id, i + 10);
    EXPECT_EQ(completions[i].code, Code::kOk);
    EXPECT_EQ(completions[i].bytes, cuts[i + 1] - cuts[i]);
    EXPECT_EQ(completions[i].crc32c, crc32c(std::span(source).subspan(cuts[i], cuts[i + 1] - cuts[i])));
  }
  EXPECT_TRUE(same_bytes(copy, source));
}

TEST_P(Conformance, WritesManyRegions) {
  for (uint64_t i = 0; i < 40; ++i) {
    auto source = bytes_of(i, 10'000 + i * 50'000);
    const RemoteExtent extent = peer_->writable(*link_, source.size());
    const Slice slices[] = {{source.data(), 100}, {source.data() + 100, source.size() - 100}};
    const Transfer t = transfer(i, Direction::kWrite, extent, slices);
    ASSERT_EQ(link_->submit(std::span(&t, 1)), 1u);
    const auto done = drain(1);
    ASSERT_EQ(done.size(), 1u);
    EXPECT_EQ(done[0].code, Code::kOk) << code_name(done[0].code);
    EXPECT_EQ(done[0].crc32c, crc32c(source));
  }
}

TEST_P(Conformance, ZeroLengthCompletes) {
  const RemoteExtent extent = peer_->readable(*link_, bytes_of(1, 10));
  const Transfer t = transfer(5, Direction::kRead, extent, {}, 10);
  ASSERT_EQ(link_->submit(std::span(&t, 1)), 1u);
  const auto done = drain(1);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].code, Code::kOk);
  EXPECT_EQ(done[0].bytes, 0u);
}

TEST_P(Conformance, HostileExtentsAreErrorsAndOthersGoOn) {
  const auto source = bytes_of(1, 5000);
  const RemoteExtent good = peer_->readable(*link_, source);
  std::vector<std::byte> copy(5000, std::byte{9});
  const Slice all{copy.data(), copy.size()};
  std::vector<RemoteExtent> hostile(6, good);
  hostile[0].segment = 4'000'000'000u;
  hostile[0].grant = 12345;
  hostile[1].offset = UINT64_MAX - 10;
  hostile[1].grant = 12345;
  hostile[2].slot = 0xffffffff;
  hostile[2].grant = 12345;
  hostile[3].generation += 1;
  hostile[3].grant = 0;
  hostile[4].size = 10;  // the local memory is larger than the extent
  hostile[5].offset = 1ull << 62;
  hostile[5].size = UINT64_MAX - 5;
  hostile[5].grant = 99;
  if (good.exposed) {  // over RDMA what counts is what the device is shown
    for (const size_t i : {0u, 2u, 3u}) hostile[i].keys[0] ^= 0x5a5a00;
    hostile[1].address = UINT64_MAX - 10;
    hostile[5].address = 1ull << 62;
  }
  std::vector<Transfer> transfers;
  for (size_t i = 0; i < hostile.size(); ++i)
    transfers.push_back(transfer(i, Direction::kRead, hostile[i], std::span(&all, 1)));
  ASSERT_EQ(link_->submit(transfers), transfers.size());
  for (const Completion& done : drain(transfers.size())) EXPECT_NE(done.code, Code::kOk) << done.id;
  EXPECT_TRUE(all_bytes(copy, std::byte{9}));
  const Transfer t = transfer(50, Direction::kRead, good, std::span(&all, 1));
  ASSERT_EQ(link_->submit(std::span(&t, 1)), 1u);
  const auto done = drain(1);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].code, Code::kOk);
  EXPECT_TRUE(same_bytes(copy, source));
}

TEST_P(Conformance, CancelThenNoByteMoves) {
  const auto source = bytes_of(2, 32 << 20);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> copy(source.size());
  const Slice all{copy.data(), copy.size()};
  const Transfer t = transfer(1, Direction::kRead, extent, std::span(&all, 1));
  ASSERT_EQ(link_->submit(std::span(&t, 1)), 1u);
  Completion done;
  ASSERT_EQ(link_->poll(std::span(&done, 1), Deadline::after(std::chrono::microseconds(300))), 0u);
  ASSERT_TRUE(link_->cancel(1));
  std::fill(copy.begin(), copy.end(), std::byte{0xee});
  const auto completions = drain(1);
  ASSERT_EQ(completions.size(), 1u);
  EXPECT_EQ(completions[0].code, Code::kCancelled);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_TRUE(all_bytes(copy, std::byte{0xee}));
  EXPECT_EQ(link_->cancel(1).code, Code::kNotFound);
}

TEST_P(Conformance, CloseWithWorkInFlight) {
  const auto source = bytes_of(3, 8 << 20);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> copy(source.size());
  const Slice all{copy.data(), copy.size()};
  for (TransferId id = 0; id < 3; ++id) {
    const Transfer t = transfer(id, Direction::kRead, extent, std::span(&all, 1));
    ASSERT_EQ(link_->submit(std::span(&t, 1)), 1u);
  }
  link_->close();
  const auto completions = drain(3);
  ASSERT_EQ(completions.size(), 3u);
  for (const Completion& done : completions) EXPECT_EQ(done.code, Code::kClosed);
  EXPECT_FALSE(link_->healthy());
}

TEST_P(Conformance, PeerDeathEndsTransfers) {
  const auto source = bytes_of(4, 1 << 20);
  const RemoteExtent extent = peer_->readable(*link_, source);
  peer_->kill();
  std::vector<std::byte> copy(source.size());
  const Slice all{copy.data(), copy.size()};
  const Transfer t = transfer(1, Direction::kRead, extent, std::span(&all, 1));
  ASSERT_EQ(link_->submit(std::span(&t, 1)), 1u);
  const auto completions = drain(1);
  ASSERT_EQ(completions.size(), 1u);
  EXPECT_EQ(completions[0].code, Code::kConnectionLost);
}

TEST_P(Conformance, QueueIsBounded) {
  const RemoteExtent extent = peer_->readable(*link_, bytes_of(1, 10));
  std::vector<Transfer> many(10'000, transfer(1, Direction::kRead, extent, {}));
  const size_t taken = link_->submit(many);
  EXPECT_LT(taken, many.size());
  EXPECT_EQ(link_->submit(many), 0u);
  EXPECT_EQ(drain(taken).size(), taken);
}

TEST_P(Conformance, PollKeepsItsDeadline) {
  Completion done;
  EXPECT_EQ(link_->poll(std::span(&done, 1), Deadline::after_ms(1)), 0u);
}

INSTANTIATE_TEST_SUITE_P(Transports, Conformance, kTransports, transport_name);

class Staged : public Conformance {};

TEST_P(Staged, ADeviceThatHangsHoldsNoPollAndNothingIsLost) {
  const auto source = bytes_of(5, 300'000);
  const RemoteExtent extent = peer_->readable(*link_, source);
  std::vector<std::byte> copy(source.size());
  const Slice all{copy.data(), copy.size()};
  const Transfer t = transfer(1, Direction::kRead, extent, std::span(&all, 1));
  gpu_->hang(1);
  ASSERT_EQ(link_->submit(std::span(&t, 1)), 1u);
  EXPECT_TRUE(drain(1, 200).empty());
  EXPECT_EQ(copy[7], std::byte{0});
  gpu_->hang(0);
  const auto done = drain(1);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].code, Code::kOk);
  EXPECT_TRUE(same_bytes(copy, source));
}

TEST_P(Staged, ACopyThatFailsIsTheTransfersErrorAndOthersGoOn) {
  auto source = bytes_of(6, 50'000);
  const Slice all{source.data(), source.size()};
  for (const char* call : {"", "cuLaunchKernel", "", "cuStreamQuery"}) {
    const RemoteExtent extent = peer_->writable(*link_, source.size());
    const Transfer writes = transfer(1, Direction::kWrite, extent, std::span(&all, 1));
    gpu_->fail(call, 700, 0);
    ASSERT_EQ(link_->submit(std::span(&writes, 1)), 1u);
    const auto done = drain(1);
    ASSERT_EQ(done.size(), 1u);
    EXPECT_EQ(done[0].code, *call == 0 ? Code::kOk : Code::kTransportUnavailable) << call;
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, Staged, ::testing::Values("cuda_loopback", "cuda_tcp"),
                         [](const auto& test) { return std::string(test.param); });

TEST(Loopback, SeededFaultsRepeat) {
  const auto run = [](uint64_t seed) {
    auto peer = make_loopback_peer();
    std::vector<std::byte> memory(100);
    const RemoteExtent extent = peer->grant(peer->add_segment(memory), 0, 100, true);
    auto link = make_loopback_transport(
                    peer, {.seed = seed, .error_per_million = 300'000, .bit_flip_per_million = 300'000})
                    ->connect({}, Deadline::never());
    std::string trace;
    for (TransferId id = 0; id < 50; ++id) {
      std::vector<std::byte> copy(100);
      const Slice all{copy.data(), copy.size()};
      Transfer t;
      t.id = id;
      t.remote = extent;
      t.local = std::span(&all, 1);
      Completion done;
      EXPECT_EQ((*link)->submit(std::span(&t, 1)), 1u);
      EXPECT_EQ((*link)->poll(std::span(&done, 1), Deadline::after_ms(1000)), 1u);
      trace += done.code != Code::kOk ? 'e' : done.crc32c != crc32c(memory) ? 'f' : '.';
    }
    return trace;
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
  EXPECT_NE(run(1).find('e'), std::string::npos);
  EXPECT_NE(run(1).find('f'), std::string::npos);
}

TEST(Registry, KnowsItsTransports) {
  EXPECT_EQ(make_transport("carrier-pigeon").code(), Code::kInvalidArgument);
  for (const TransportReport& report : transport_report()) {
    // a machine may be without RDMA, but not without a reason for it
    const bool explained = report.name == "rdma" && report.reason.starts_with("RDMA unavailable, because ");
    EXPECT_TRUE(report.available || explained) << report.reason;
  }
}

}  // namespace
}  // namespace mooncache::testing

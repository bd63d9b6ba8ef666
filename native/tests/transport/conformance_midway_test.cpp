// What befalls transfers while their bytes are under way, the same for all transports.
#include <atomic>
#include <thread>

#include "compare.h"
#include "transport/conformance.h"

namespace mooncache::testing {
namespace {

class ConformanceMidway : public Conformance {
 protected:
  static constexpr size_t kBytes = 4 << 20;
  static constexpr size_t kAtATime = 4;
  static constexpr size_t kExtents = 48;  // to write: a range is written once

  // Keeps transfers under way while another thread kills the peer, until one of them fails. The first that
  // end well prove that bytes were moving.
  void die_during(Direction direction) {
    const bool reads = direction == Direction::kRead;
    const auto source = bytes_of(7, kBytes);
    const uint32_t expected = crc32c(source);
    std::vector<RemoteExtent> extents;
    if (reads) extents.push_back(peer_->readable(*link_, source));
    while (!reads && extents.size() < kExtents) extents.push_back(peer_->writable(*link_, kBytes));
    std::vector<std::vector<std::byte>> own(kAtATime, reads ? std::vector<std::byte>(kBytes) : source);
    std::vector<Slice> slices;
    for (auto& bytes : own) slices.push_back({bytes.data(), bytes.size()});
    std::atomic<bool> strike{false}, killed{false};
    std::thread killer([&] {
      while (!strike) std::this_thread::yield();
      peer_->kill();
      killed = true;
    });
    TransferId submitted = 0, ended = 0;
    size_t good = 0;
    const Deadline deadline = Deadline::after_ms(60'000);
    for (bool healthy = true; (healthy || ended < submitted) && !deadline.expired();) {
      while (healthy && submitted < ended + kAtATime && (reads || submitted < kExtents || killed)) {
        const size_t place = submitted % kAtATime;
        if (reads) std::fill(own[place].begin(), own[place].end(), std::byte{0});
        const RemoteExtent& extent = extents[std::min<size_t>(submitted, extents.size() - 1)];
        const Transfer one = transfer(submitted, direction, extent, std::span(&slices[place], 1));
        EXPECT_EQ(link_->submit(std::span(&one, 1)), 1u);
        ++submitted;
      }
      Completion done;
      if (link_->poll(std::span(&done, 1), Deadline::after_ms(1)) == 0) continue;
      EXPECT_EQ(done.id, ended++) << "in the order of submission";
      if (done.code == Code::kOk) {
        ++good;
        EXPECT_EQ(done.crc32c, expected);
        EXPECT_TRUE(same_bytes(own[done.id % kAtATime], source));
        strike = true;
        continue;
      }
      healthy = false;
      // A key that was withdrawn (RDMA) and a grant that ended (shm) may be seen before the connection's end
      // is; TCP then finds that nobody is there.
      const std::array lost{Code::kConnectionLost, Code::kTransportUnavailable, Code::kGenerationChanged};
      EXPECT_NE(std::find(lost.begin(), lost.end(), done.code), lost.end()) << code_name(done.code);
    }
    strike = true;
    killer.join();
    EXPECT_EQ(ended, submitted);
    EXPECT_GT(good, 0u);
    EXPECT_LT(good, submitted);
  }
};

TEST_P(ConformanceMidway, APeerThatDiesWhileItIsReadEndsTheTransfers) {
  die_during(Direction::kRead);
}

TEST_P(ConformanceMidway, APeerThatDiesWhileItIsWrittenEndsTheTransfers) {
  die_during(Direction::kWrite);
}

TEST_P(ConformanceMidway, ADeadlineThatPassesLeavesTheTransferUnderWay) {
  for (const Direction direction : {Direction::kRead, Direction::kWrite}) {
    const auto source = bytes_of(5, 32 << 20);
    auto own = direction == Direction::kWrite ? source : std::vector<std::byte>(source.size());
    const RemoteExtent extent = direction == Direction::kWrite ? peer_->writable(*link_, source.size())
                                                               : peer_->readable(*link_, source);
    const Slice all{own.data(), own.size()};
    const Transfer one = transfer(3, direction, extent, std::span(&all, 1));
    ASSERT_EQ(link_->submit(std::span(&one, 1)), 1u);
    Completion done;
    EXPECT_EQ(link_->poll(std::span(&done, 1), Deadline::after(std::chrono::microseconds(300))), 0u);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // nobody polls, nobody minds
    EXPECT_EQ(link_->poll(std::span(&done, 1), Deadline::after_ms(0)), 0u);
    const auto ended = drain(1, 60'000);
    ASSERT_EQ(ended.size(), 1u);
    EXPECT_EQ(ended[0].id, 3u);
    EXPECT_EQ(ended[0].code, Code::kOk) << code_name(ended[0].code);
    EXPECT_EQ(ended[0].bytes, source.size());
    EXPECT_EQ(ended[0].crc32c, crc32c(source));
    EXPECT_TRUE(same_bytes(own, source));
    if (direction == Direction::kRead) continue;
    const auto stored = peer_->stored(extent);
    EXPECT_TRUE(same_bytes(stored, source));
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, ConformanceMidway, kTransports, transport_name);

}  // namespace
}  // namespace mooncache::testing

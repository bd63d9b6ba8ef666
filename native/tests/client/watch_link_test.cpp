// Signs of life on a connection that waits: the clock is the test's own.
#include "client/watch_link.h"

#include "client/lying_node.h"
#include "client/watches.h"

namespace mooncache::testing {
namespace {

constexpr uint32_t kPingMs = 5000, kTimeoutMs = 2000, kBeatMs = kPingMs / 2;
constexpr uint32_t kCanBeat = wire::AuthResponse::kCanWait | wire::AuthResponse::kHeartbeats;

class WatchLinkTest : public ::testing::Test {
 protected:
  void connect(uint32_t capabilities) {
    liar = std::make_unique<LyingNode>([](const auto&) { return std::vector<std::byte>{}; }, capabilities);
    node = std::make_shared<Node>(liar->info, config, nullptr, counters,
                                  std::make_shared<RdmaAccess>(no_rdma(), 1 << 20));
    link = std::make_unique<WatchLink>(node, WatchLink::Limits{kTimeoutMs, kPingMs}, now_ms);
    link->wait(1, {600'000, 0, keys_from(0, 3), 0});
    ASSERT_TRUE(eventually([&] { return pump() && link->ready(); }));
    ASSERT_TRUE(node_has_heard(1));
  }
  Status pump() {
    return link->pump(now_ms, true, [&](uint64_t, const Status&, Reader&) {
      ++answers;
      return Status::ok();
    });
  }
  bool node_has_heard(int frames) {
    return eventually([&] { return liar->frames == frames; });
  }
  // So many signs of life arrive at this time of the clock.
  Status beats(uint64_t count, uint64_t request_id = 1) {
    std::vector<std::byte> bytes;
    for (uint64_t i = 0; i <= count; ++i) {
      const bool last = i == count;  // news: when they have come, so have the others
      const auto frame = LyingNode::news(request_id, 0, last ? Positions{0} : Positions{});
      bytes.insert(bytes.end(), frame.begin(), frame.end());
    }
    liar->say(bytes);
    const int before = answers;
    Status status;
    EXPECT_TRUE(eventually([&] { return !(status = pump()) || answers > before; }));
    return status;
  }

  ClientConfig config = client_config(false);
  Counters counters;
  std::unique_ptr<LyingNode> liar;
  std::shared_ptr<Node> node;
  std::unique_ptr<WatchLink> link;
  uint64_t now_ms = 1'000'000;
  int answers = 0;
};

TEST_F(WatchLinkTest, ANodeThatGivesSignsOfLifeIsNotAskedForThem) {
  connect(kCanBeat);
  EXPECT_EQ(liar->beats_asked, 1);
  for (int i = 0; i < 200; ++i) {
    now_ms += kBeatMs;
    ASSERT_TRUE(beats(1));
  }
  EXPECT_EQ(liar->frames, 1) << "the WAIT alone";
}

TEST_F(WatchLinkTest, ANodeThatStopsIsFoundOut) {
  connect(kCanBeat);
  ASSERT_TRUE(beats(1));
  now_ms += kPingMs - 1;
  ASSERT_TRUE(pump());
  EXPECT_EQ(link->due_ms(true), now_ms + 1);
  now_ms += 1;
  ASSERT_TRUE(pump()) << "it is asked once more";
  ASSERT_TRUE(node_has_heard(2));
  now_ms += kTimeoutMs - 1;
  ASSERT_TRUE(pump());
  now_ms += 1;
  EXPECT_EQ(pump().code, Code::kNodeUnavailable);
}

TEST_F(WatchLinkTest, AWaitAtANodeThatWasSilentIsAQuestionToo) {
  connect(kCanBeat);
  now_ms += 10 * kPingMs;
  link->wait(2, {600'000, 0, keys_from(5, 1), 0});
  ASSERT_TRUE(pump());
  ASSERT_TRUE(node_has_heard(2));
  EXPECT_EQ(link->due_ms(true), now_ms + kTimeoutMs);
  now_ms += kTimeoutMs;
  EXPECT_EQ(pump().code, Code::kNodeUnavailable);
  EXPECT_EQ(liar->frames, 2) << "no PING";
}

TEST_F(WatchLinkTest, AnOlderNodeIsAskedAsBefore) {
  connect(wire::AuthResponse::kCanWait);
  EXPECT_EQ(liar->beats_asked, 0);
  now_ms += kPingMs;
  ASSERT_TRUE(pump());
  ASSERT_TRUE(node_has_heard(2));
  ASSERT_TRUE(beats(0)) << "any frame is a sign of life";
  now_ms += kTimeoutMs;
  EXPECT_TRUE(pump());
  now_ms += kPingMs;
  ASSERT_TRUE(pump());
  now_ms += kTimeoutMs;
  EXPECT_EQ(pump().code, Code::kNodeUnavailable);
}

TEST_F(WatchLinkTest, SignsOfLifeOfAWatchThatIsGoneAreSignsOfLife) {
  connect(kCanBeat);
  link->withdraw(1);
  for (int i = 0; i < 20; ++i) {
    now_ms += kBeatMs;
    ASSERT_TRUE(beats(1, 77));
  }
  EXPECT_TRUE(node_has_heard(2)) << "the WAIT and its end";
}

TEST_F(WatchLinkTest, AFloodOfThemEndsTheConnection) {
  connect(kCanBeat);
  EXPECT_TRUE(beats(WatchLink::kBeatsAtOnce));
  EXPECT_EQ(beats(1).code, Code::kProtocolError);
}

TEST_F(WatchLinkTest, ThoseOfATimeInWhichThisProcessDidNotRunComeTogether) {
  connect(kCanBeat);
  now_ms += 600'000;
  EXPECT_TRUE(beats(600'000 / kBeatMs));
  now_ms += 1'000'000'000;
  EXPECT_EQ(beats(WatchLink::kBeatsMax + 1).code, Code::kProtocolError) << "but not without end";
}

TEST_F(WatchLinkTest, AWaitThatWasNotSentYetIsNotWithdrawnAtTheNode) {
  connect(kCanBeat);
  link->wait(2, {600'000, 0, keys_from(0, 1), 0});
  link->withdraw(2);
  link->wait(3, {600'000, 0, keys_from(0, 1), 0});
  ASSERT_TRUE(pump());
  ASSERT_TRUE(node_has_heard(2));
  ASSERT_TRUE(beats(1));
  EXPECT_EQ(liar->frames, 2) << "neither the WAIT nor its end";
}

}  // namespace
}  // namespace mooncache::testing

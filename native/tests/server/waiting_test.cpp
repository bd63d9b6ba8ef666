// Waiting for space, and what must not be waited for.
#include "server/peer.h"

namespace mooncache::testing {
namespace {

using WaitingTest = ServerTest;

TEST_F(WaitingTest, QuotaMakesRoomByManySmallBlocks) {
  config.store.max_victims = 256;
  start();
  ASSERT_TRUE(server->set_limits("default", {.memory = {.quota_bytes = 4 << 20}}));
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  for (uint64_t batch = 0; batch < 64; ++batch) {
    std::vector<std::pair<Key, Bytes>> items;
    for (uint64_t i = 0; i < 64; ++i) items.emplace_back(key_of(batch * 64 + i), block_of(i, 1024));
    for (const Code code : peer.put(items)) ASSERT_EQ(code, Code::kOk);
  }
  EXPECT_EQ(peer.put(key_of(99'999), block_of(1, 3 << 20)), Code::kNoSpace) << "without patience: try again";
  EXPECT_EQ(peer.put(key_of(99'999), block_of(1, 3 << 20), 20'000), Code::kOk);
  EXPECT_EQ(peer.put(key_of(99'998), block_of(1, 5 << 20), 20'000), Code::kQuotaExceeded) << "never fits";
  EXPECT_EQ(stat("parked_total"), 1u);
  EXPECT_EQ(stat("parked_expired"), 0u);
}

// 16 MiB of small blocks, 16 victims a call: with a timer between two calls it would take a minute.
TEST_F(WaitingTest, LargeBlockDoesNotWaitForATimerBetweenVictims) {
  config.store.max_victims = 16;
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  for (uint64_t batch = 0; batch < 256; ++batch) {
    std::vector<std::pair<Key, Bytes>> items;
    for (uint64_t i = 0; i < 64; ++i) items.emplace_back(key_of(batch * 64 + i), block_of(i, 1024));
    for (const Code code : peer.put(items)) ASSERT_EQ(code, Code::kOk);
  }
  EXPECT_EQ(peer.put(key_of(99'999), block_of(1, 12 << 20), 15'000), Code::kOk);
  EXPECT_EQ(stat("parked_expired"), 0u);
}

TEST_F(WaitingTest, ReserveDoesNotWaitForWhatItHolds) {
  config.max_wait_ms = 600'000;  // longer than the test has patience: a wait would fail it
  config.max_reserved_bytes_per_connection = 64 << 20;
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  constexpr uint64_t kFits = 16, kAsked = 20;
  wire::ReserveRequest request{600'000, {}};
  for (uint64_t i = 0; i < kAsked; ++i) request.items.push_back({key_of(i), 1 << 20});
  Writer meta;
  request.encode(meta);
  const auto answer = peer.call(Opcode::kReserve, meta);
  ASSERT_TRUE(answer && answer->status);
  Reader reader(answer->body);
  const auto results = wire::decode_items<wire::ReserveResult>(reader);
  ASSERT_TRUE(results && results->size() == kAsked);
  for (uint64_t i = 0; i < kAsked; ++i) {
    EXPECT_EQ((*results)[i].code, i < kFits ? Code::kOk : Code::kNoSpace) << i;
  }
  EXPECT_EQ(stat("parked_total"), 0u);
  EXPECT_EQ(stat("reservations_held"), kFits);
}

// What is freed goes to who waits longest, and nobody else is asked for nothing.
class ReleaseTest : public ServerTest {
 protected:
  static constexpr uint64_t kPeers = 16, kBlock = 1 << 20;

  void SetUp() override {
    ServerTest::SetUp();
    config.max_wait_ms = 600'000;
    config.max_reserved_bytes_per_connection = kPeers * kBlock;
  }
  // All space is reserved, and everybody waits for as much as one reservation.
  void fill_and_wait() {
    holder_ = std::make_unique<Peer>(*server);
    ASSERT_TRUE(holder_->login());
    for (uint64_t i = 0; i < kPeers; ++i) {
      const auto place = holder_->reserve(key_of(i), kBlock);
      ASSERT_TRUE(place && place->code == Code::kOk);
      held_.push_back(place->extent.grant);
    }
    for (uint64_t i = 0; i < kPeers; ++i) {
      waiters_.push_back(std::make_unique<Peer>(*server));
      ASSERT_TRUE(waiters_.back()->login());
      Writer meta;
      wire::ReserveRequest{600'000, {{key_of(kPeers + i), kBlock}}}.encode(meta);
      ASSERT_TRUE(waiters_.back()->send(Peer::frame(Opcode::kReserve, meta.view())));
      ASSERT_TRUE(eventually("parked_now", i + 1));
    }
  }
  void free_one(uint64_t number) {
    EXPECT_EQ(Peer::codes(holder_->call(Opcode::kAbort, Peer::grants_meta({held_[number]}))),
              std::vector<Code>(1, Code::kOk));
  }

  std::unique_ptr<Peer> holder_;
  std::vector<uint64_t> held_;
  std::vector<std::unique_ptr<Peer>> waiters_;
};

TEST_F(ReleaseTest, OneReleaseWakesOneWaiterAfterTheOther) {
  start();
  fill_and_wait();
  const uint64_t before = stat("parked_woken");
  for (uint64_t i = 0; i < kPeers; ++i) {
    free_one(i);
    const auto answer = waiters_[i]->reply();
    ASSERT_TRUE(answer && answer->status) << "waiter " << i << " came first, and goes first";
    EXPECT_TRUE(eventually("parked_now", kPeers - i - 1));
  }
  EXPECT_LE(stat("parked_woken") - before, 2 * kPeers)
      << "for each release one that got it, and one that did not";
}

TEST_F(ReleaseTest, TheWaitersOfSeveralLoopsAreServed) {
  config.io_threads = 3;
  start();
  fill_and_wait();
  const uint64_t before = stat("parked_woken");
  for (uint64_t i = 0; i < kPeers; ++i) {
    free_one(i);
    EXPECT_TRUE(eventually("parked_now", kPeers - i - 1));
  }
  for (const auto& waiter : waiters_) {
    const auto answer = waiter->reply();
    EXPECT_TRUE(answer && answer->status);
  }
  EXPECT_LE(stat("parked_woken") - before, 4 * kPeers)
      << "one that got it, and one of each loop that did not";
}

// Who asks for little waits for one turn of the loop, however many long transfers there are.
TEST_F(WaitingTest, LongTransfersMoveALittleInEachTurn) {
  constexpr size_t kPeers = 32, kBlock = 4 << 20;
  config.peer_timeout_ms = config.progress_timeout_ms = 600'000;  // the last one is read late
  start();
  Peer small(*server);
  ASSERT_TRUE(small.login());
  const Bytes block = block_of(1, kBlock);
  ASSERT_EQ(small.put(key_of(1), block), Code::kOk);
  const Bytes get = Peer::frame(Opcode::kGet, Peer::get_meta({{key_of(1), 0, UINT64_MAX}}).view());
  std::vector<std::unique_ptr<Peer>> peers;
  for (size_t i = 0; i < kPeers; ++i) {
    peers.push_back(std::make_unique<Peer>(*server));
    ASSERT_TRUE(peers.back()->login());
  }
  for (const auto& peer : peers) ASSERT_TRUE(peer->send(get));
  EXPECT_TRUE(small.call(Opcode::kPing)->status.is_ok());
  for (const auto& peer : peers) {
    const auto answer = peer->reply();
    ASSERT_TRUE(answer && answer->status);
    ASSERT_EQ(answer->payload.size(), kBlock);
    EXPECT_EQ(std::memcmp(answer->payload.data(), block.data(), kBlock), 0);
  }
  EXPECT_LE(stat("turn_bytes_max"), 3u << 20);
}

// A host that is gone sends no FIN. The node sees a connection that is open and silent.
TEST_F(WaitingTest, SilentPeerOnTheNetworkGivesBackWhatItHolds) {
  config.idle_timeout_ms = 0;
  config.grant_timeout_ms = 500;
  config.max_wait_ms = 600'000;
  start();
  Peer gone(*server), other(*server), idle(*server), local(*server, true);
  ASSERT_TRUE(gone.login() && other.login() && idle.login() && local.login());
  ASSERT_EQ(local.reserve(key_of(4), 1 << 20)->code, Code::kOk);
  ASSERT_EQ(other.put(key_of(1), block_of(1, 1000)), Code::kOk);
  ASSERT_EQ(gone.lookup(key_of(1))->code, Code::kOk);
  ASSERT_EQ(gone.reserve(key_of(2), 12 << 20)->code, Code::kOk);
  EXPECT_EQ(other.put(key_of(3), block_of(3, 8 << 20), 600'000), Code::kOk);
  EXPECT_TRUE(gone.closed_by_node());
  EXPECT_EQ(stat("connections_closed_idle"), 1u);
  EXPECT_TRUE(idle.call(Opcode::kPing)->status.is_ok()) << "what holds nothing may be silent";
  EXPECT_EQ(stat("reservations_held"), 1u) << "the end of a process on this host always shows";
}

}  // namespace
}  // namespace mooncache::testing

// WAIT and GIVE_UP: answers that come when there is something to say.
#include <algorithm>

#include "server/peer.h"

namespace mooncache::testing {
namespace {

using wire::WaitState;

constexpr uint32_t kLong = 600'000;

class WaitTest : public ServerTest {
 protected:
  void SetUp() override {
    ServerTest::SetUp();
    start_with_io_threads(1);
  }
  void TearDown() override {
    if (server != nullptr) {
      EXPECT_TRUE(eventually("waits_open", 0)) << "a wait outlived its connection";
      EXPECT_EQ(stat("waited_keys"), 0u);
    }
    ServerTest::TearDown();
  }
  void start_with_io_threads(uint32_t threads) {
    config.io_threads = threads;
    start();
  }
  void restart() {
    server.reset();
    start();
  }
};

std::vector<Key> keys_from(uint64_t first, size_t count) {
  std::vector<Key> keys;
  for (size_t i = 0; i < count; ++i) keys.push_back(key_of(first + i));
  return keys;
}

Bytes wait_frame(uint64_t id, std::vector<Key> keys, uint32_t timeout_ms = kLong, uint32_t news_ms = 0) {
  Writer meta;
  wire::WaitRequest{timeout_ms, news_ms, std::move(keys)}.encode(meta);
  return Peer::frame(Opcode::kWait, meta.view(), {}, 0, id);
}

Bytes beating_frame(uint64_t id, std::vector<Key> keys, uint32_t heartbeat_ms) {
  Writer meta;
  wire::WaitRequest{kLong, 0, std::move(keys), heartbeat_ms}.encode(meta);
  return Peer::frame(Opcode::kWait, meta.view(), {}, wire::kFlagHeartbeats, id);
}

struct Answer {
  uint64_t id = 0;
  Code code = Code::kInternal;
  WaitState state = WaitState::kMore;
  std::vector<uint32_t> positions;
};

// The next frame, of whatever WAIT; kInternal: there was none, or another one.
Answer next_answer(Peer& peer) {
  const auto reply = peer.reply();
  Answer answer;
  if (!reply || reply->header.opcode != Opcode::kWait || !reply->payload.empty()) return answer;
  answer.id = reply->header.request_id;
  answer.code = reply->status.code;
  if (!reply->status) return answer;
  Reader reader(reply->body);
  const auto news = wire::WaitNews::decode(reader, wire::kMaxItems);
  if (!news) return {};
  answer.state = news->state;
  answer.positions = news->positions;
  std::sort(answer.positions.begin(), answer.positions.end());
  return answer;
}

using Positions = std::vector<uint32_t>;

TEST_F(WaitTest, LateCommitAnswers) {
  Peer waiter(*server), writer(*server);
  ASSERT_TRUE(waiter.login() && writer.login());
  ASSERT_TRUE(waiter.send(wait_frame(7, keys_from(0, 2))));
  ASSERT_TRUE(eventually("waits_open", 1));
  EXPECT_EQ(stat("waited_keys"), 2u);
  EXPECT_EQ(writer.put(key_of(1), block_of(1, 1000)), Code::kOk);
  EXPECT_EQ(writer.put(key_of(0), block_of(0, 1000)), Code::kOk);
  const Answer answer = next_answer(waiter);
  EXPECT_EQ(answer.id, 7u);
  EXPECT_EQ(answer.state, WaitState::kAll);
  EXPECT_EQ(answer.positions, (Positions{0, 1}));
  EXPECT_EQ(waiter.get(key_of(0)).first, Code::kOk) << "the connection goes on";
  EXPECT_EQ(stat("waits_answered"), 1u);
}

TEST_F(WaitTest, WhatIsThereIsSaidAtOnce) {
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  EXPECT_EQ(peer.put(key_of(1), block_of(1, 1000)), Code::kOk);
  ASSERT_TRUE(peer.send(wait_frame(1, {key_of(1), key_of(1)})));
  Answer answer = next_answer(peer);
  EXPECT_EQ(answer.state, WaitState::kAll);
  EXPECT_EQ(answer.positions, (Positions{0, 1})) << "a key may be named twice";
  ASSERT_TRUE(peer.send(wait_frame(2, {key_of(0), key_of(1)}, 0)));
  answer = next_answer(peer);
  EXPECT_EQ(answer.state, WaitState::kTimeout) << "no time: only a look";
  EXPECT_EQ(answer.positions, Positions{1});
}

TEST_F(WaitTest, OtherRequestsGoOnAndAnswersComeOutOfOrder) {
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  ASSERT_TRUE(peer.send(wait_frame(11, {key_of(1)})));
  ASSERT_TRUE(peer.send(wait_frame(12, {key_of(2)})));
  ASSERT_TRUE(peer.call(Opcode::kPing)->status) << "a WAIT holds nothing up";
  ASSERT_TRUE(peer.send(Peer::put_frame({{key_of(2), block_of(2, 100)}}, 0, 13)));
  const auto put = peer.reply();
  ASSERT_TRUE(put && put->header.request_id == 13);
  EXPECT_EQ(next_answer(peer).id, 12u);
  EXPECT_EQ(peer.put(key_of(1), block_of(1, 100)), Code::kOk);
  EXPECT_EQ(next_answer(peer).id, 11u);
}

TEST_F(WaitTest, NewsComeAsBlocksDo) {
  Peer waiter(*server), writer(*server);
  ASSERT_TRUE(waiter.login() && writer.login());
  EXPECT_EQ(writer.put(key_of(2), block_of(2, 100)), Code::kOk);
  ASSERT_TRUE(waiter.send(wait_frame(1, keys_from(0, 4), kLong, 1)));
  Answer answer = next_answer(waiter);
  EXPECT_EQ(answer.state, WaitState::kMore);
  EXPECT_EQ(answer.positions, Positions{2});
  EXPECT_EQ(writer.put(key_of(0), block_of(0, 100)), Code::kOk);
  answer = next_answer(waiter);
  EXPECT_EQ(answer.state, WaitState::kMore);
  EXPECT_EQ(answer.positions, Positions{0});
  Positions rest;
  EXPECT_EQ(writer.put({{key_of(1), block_of(1, 100)}, {key_of(3), block_of(3, 100)}}),
            (std::vector<Code>(2, Code::kOk)));
  do {
    answer = next_answer(waiter);
    ASSERT_EQ(answer.code, Code::kOk);
    rest.insert(rest.end(), answer.positions.begin(), answer.positions.end());
  } while (answer.state == WaitState::kMore);
  EXPECT_EQ(answer.state, WaitState::kAll);
  EXPECT_EQ(rest, (Positions{1, 3}));
}

TEST_F(WaitTest, NewsAreCollectedBetweenTwoFrames) {
  Peer waiter(*server), writer(*server);
  ASSERT_TRUE(waiter.login() && writer.login());
  ASSERT_TRUE(waiter.send(wait_frame(1, keys_from(0, 6), kLong, kLong)));
  ASSERT_TRUE(eventually("waits_open", 1));
  for (uint64_t i = 0; i < 6; ++i) EXPECT_EQ(writer.put(key_of(i), block_of(i, 100)), Code::kOk);
  const Answer first = next_answer(waiter);
  EXPECT_EQ(first.state, WaitState::kMore) << "the first news does not wait";
  EXPECT_EQ(first.positions, Positions{0});
  const Answer last = next_answer(waiter);
  EXPECT_EQ(last.state, WaitState::kAll);
  EXPECT_EQ(last.positions, (Positions{1, 2, 3, 4, 5}));
}

TEST_F(WaitTest, GiveUpEndsWaits) {
  Peer waiter(*server), writer(*server);
  ASSERT_TRUE(waiter.login() && writer.login());
  ASSERT_TRUE(waiter.send(wait_frame(1, keys_from(0, 3))));
  ASSERT_TRUE(waiter.send(wait_frame(2, {key_of(9)})));
  ASSERT_TRUE(eventually("waits_open", 2));
  EXPECT_EQ(writer.put(key_of(0), block_of(0, 100)), Code::kOk);
  const auto reply = writer.call(Opcode::kGiveUp, Peer::keys_meta(keys_from(1, 2)));
  ASSERT_TRUE(reply && reply->status);
  Reader reader(reply->body);
  EXPECT_EQ(reader.u32(), 1u) << "two keys of one wait";
  const Answer answer = next_answer(waiter);
  EXPECT_EQ(answer.id, 1u);
  EXPECT_EQ(answer.state, WaitState::kGivenUp);
  EXPECT_EQ(answer.positions, Positions{0}) << "with what had come";
  EXPECT_EQ(stat("waits_open"), 1u) << "the other wait goes on";
  EXPECT_EQ(stat("waits_given_up"), 1u);
}

TEST_F(WaitTest, GiveUpIsRememberedForLateWaitsUntilTheCommit) {
  Peer waiter(*server), writer(*server);
  ASSERT_TRUE(waiter.login() && writer.login());
  ASSERT_TRUE(writer.call(Opcode::kGiveUp, Peer::keys_meta(keys_from(0, 2)))->status);
  ASSERT_TRUE(waiter.send(wait_frame(1, {key_of(1)})));
  EXPECT_EQ(next_answer(waiter).state, WaitState::kGivenUp);
  EXPECT_EQ(writer.put(key_of(0), block_of(0, 100)), Code::kOk);
  ASSERT_TRUE(writer.call(Opcode::kRemove, Peer::keys_meta({key_of(0)}))->status);
  ASSERT_TRUE(waiter.send(wait_frame(2, {key_of(0)}, 1)));
  EXPECT_EQ(next_answer(waiter).state, WaitState::kTimeout) << "the commit erased the memory";
  // and it does not last
  const Deadline until = Deadline::after(kPatience);
  WaitState state = WaitState::kGivenUp;
  while (state == WaitState::kGivenUp && !until.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ASSERT_TRUE(waiter.send(wait_frame(3, {key_of(1)}, 0)));
    state = next_answer(waiter).state;
  }
  EXPECT_EQ(state, WaitState::kTimeout);
}

TEST_F(WaitTest, TheDeadlineEndsAWaitWithoutAnyTraffic) {
  Peer waiter(*server);
  ASSERT_TRUE(waiter.login());
  ASSERT_TRUE(waiter.send(wait_frame(1, keys_from(0, 3), 30)));
  const Answer answer = next_answer(waiter);
  EXPECT_EQ(answer.state, WaitState::kTimeout);
  EXPECT_TRUE(answer.positions.empty());
  EXPECT_EQ(stat("waits_timed_out"), 1u);
}

TEST_F(WaitTest, APeerThatAsksForItHearsThatTheNodeLives) {
  Peer waiter(*server), older(*server), writer(*server);
  ASSERT_TRUE(waiter.login() && older.login() && writer.login());
  ASSERT_TRUE(older.send(wait_frame(1, {key_of(1)})));
  ASSERT_TRUE(waiter.send(beating_frame(1, {key_of(1)}, 20)));
  for (int i = 0; i < 5; ++i) {
    const Answer answer = next_answer(waiter);
    ASSERT_EQ(answer.code, Code::kOk);
    EXPECT_EQ(answer.state, WaitState::kMore);
    EXPECT_TRUE(answer.positions.empty());
  }
  EXPECT_GE(stat("wait_heartbeats"), 5u);
  EXPECT_EQ(writer.put(key_of(1), block_of(1, 100)), Code::kOk);
  EXPECT_EQ(next_answer(older).state, WaitState::kAll) << "its first frame";
  Answer answer = next_answer(waiter);
  while (answer.state == WaitState::kMore) answer = next_answer(waiter);
  EXPECT_EQ(answer.state, WaitState::kAll);
}

TEST_F(WaitTest, AWaitIsWithdrawnByItsRequestId) {
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  ASSERT_TRUE(peer.send(wait_frame(5, keys_from(0, 3))));
  ASSERT_TRUE(peer.send(Peer::frame(Opcode::kWait, {}, {}, wire::kFlagWithdraw, 6)));  // not open: ignored
  ASSERT_TRUE(peer.send(Peer::frame(Opcode::kWait, {}, {}, wire::kFlagWithdraw, 5)));
  const Answer answer = next_answer(peer);
  EXPECT_EQ(answer.id, 5u);
  EXPECT_EQ(answer.state, WaitState::kWithdrawn);
  ASSERT_TRUE(peer.call(Opcode::kPing)->status) << "and nothing else";
  EXPECT_EQ(stat("waits_withdrawn"), 1u);
}

TEST_F(WaitTest, TenantsDoNotHearOfEachOther) {
  Peer one(*server), other(*server);
  ASSERT_TRUE(one.login("one") && other.login("other"));
  ASSERT_TRUE(one.send(wait_frame(1, {key_of(1)}, 200)));
  ASSERT_TRUE(eventually("waits_open", 1));
  EXPECT_EQ(other.put(key_of(1), block_of(1, 100)), Code::kOk);
  const auto reply = other.call(Opcode::kGiveUp, Peer::keys_meta({key_of(1)}));
  ASSERT_TRUE(reply && reply->status);
  Reader reader(reply->body);
  EXPECT_EQ(reader.u32(), 0u);
  const Answer answer = next_answer(one);
  EXPECT_EQ(answer.state, WaitState::kTimeout);
  EXPECT_TRUE(answer.positions.empty());
}

TEST_F(WaitTest, WaitsEndWithTheirConnection) {
  Peer writer(*server);
  ASSERT_TRUE(writer.login());
  {
    Peer waiter(*server);
    ASSERT_TRUE(waiter.login());
    for (uint64_t id = 0; id < 50; ++id) ASSERT_TRUE(waiter.send(wait_frame(id, keys_from(id, 5))));
    ASSERT_TRUE(eventually("waits_open", 50));
    waiter.close();
  }
  EXPECT_TRUE(eventually("waits_open", 0));
  EXPECT_EQ(stat("waited_keys"), 0u);
  EXPECT_EQ(stat("waits_withdrawn"), 50u);
  for (uint64_t i = 0; i < 60; ++i) EXPECT_EQ(writer.put(key_of(i), block_of(i, 100)), Code::kOk);
}

TEST_F(WaitTest, AConnectionWithAWaitIsNotIdle) {
  config.idle_timeout_ms = 300;
  restart();
  Peer waiter(*server), idle(*server);
  ASSERT_TRUE(waiter.login() && idle.login());
  ASSERT_TRUE(waiter.send(wait_frame(1, {key_of(1)})));
  EXPECT_TRUE(idle.closed_by_node());
  EXPECT_EQ(stat("waits_open"), 1u);
  Peer late(*server);
  ASSERT_TRUE(late.login());
  EXPECT_EQ(late.put(key_of(1), block_of(1, 100)), Code::kOk);
  EXPECT_EQ(next_answer(waiter).state, WaitState::kAll);
}

TEST_F(WaitTest, Limits) {
  config.max_waits_per_connection = 3;
  config.max_waited_keys = 10;
  restart();
  Peer peer(*server), other(*server);
  ASSERT_TRUE(peer.login() && other.login());
  for (uint64_t id = 1; id <= 3; ++id) ASSERT_TRUE(peer.send(wait_frame(id, keys_from(10 * id, 2))));
  ASSERT_TRUE(peer.send(wait_frame(4, {key_of(1)})));
  Answer answer = next_answer(peer);
  EXPECT_EQ(answer.id, 4u);
  EXPECT_EQ(answer.code, Code::kLimitExceeded) << "waits of this connection";
  ASSERT_TRUE(other.send(wait_frame(1, keys_from(0, 5))));
  EXPECT_EQ(next_answer(other).code, Code::kLimitExceeded) << "keys of the node";
  ASSERT_TRUE(other.send(wait_frame(1, keys_from(0, 4))));
  ASSERT_TRUE(eventually("waits_open", 4));
  ASSERT_TRUE(other.send(wait_frame(1, {key_of(7)}, 0)));
  EXPECT_EQ(next_answer(other).code, Code::kLimitExceeded);
  ASSERT_TRUE(peer.send(Peer::frame(Opcode::kWait, {}, {}, wire::kFlagWithdraw, 2)));
  EXPECT_EQ(next_answer(peer).state, WaitState::kWithdrawn);
  ASSERT_TRUE(other.send(wait_frame(1, {key_of(7)})));
  answer = next_answer(other);
  EXPECT_EQ(answer.code, Code::kInvalidArgument) << "two waits with one number";
  EXPECT_EQ(stat("waits_refused"), 4u);
  EXPECT_TRUE(peer.call(Opcode::kPing)->status);
}

TEST_F(WaitTest, HostileFramesEndTheConnectionAndNothingElse) {
  const auto refused = [&](const Writer& meta, uint16_t flags = 0, Opcode opcode = Opcode::kWait) {
    Peer peer(*server);
    EXPECT_TRUE(peer.login());
    EXPECT_TRUE(peer.send(wait_frame(1, {key_of(1)})));
    EXPECT_TRUE(peer.send(Peer::frame(opcode, meta.view(), {}, flags, 2)));
    const auto reply = peer.reply();
    EXPECT_TRUE(reply && reply->header.request_id == 2 && reply->status.code == Code::kProtocolError);
    EXPECT_TRUE(peer.closed_by_node());
    EXPECT_TRUE(eventually("waits_open", 0));
  };
  Writer none;
  refused(none);
  refused(none, 0, Opcode::kGiveUp);
  Writer no_keys;
  no_keys.u32(1);
  no_keys.u32(1);
  no_keys.u32(0);
  refused(no_keys);
  Writer lies;  // more keys than there are bytes
  lies.u32(1);
  lies.u32(1);
  lies.u32(4096);
  lies.key(key_of(1));
  refused(lies);
  Writer huge;
  huge.u32(1);
  huge.u32(1);
  huge.u32(0xffffffff);
  refused(huge);
  Writer many;
  wire::WaitRequest{1, 1, keys_from(0, wire::kMaxItems + 1)}.encode(many);
  refused(many);
  Writer trailing;
  wire::WaitRequest{1, 1, keys_from(0, 1)}.encode(trailing);
  trailing.u8(0);
  refused(trailing);
  refused(trailing, wire::kFlagWithdraw);
  refused(trailing, wire::kFlagHeartbeats);
  EXPECT_EQ(stat("waited_keys"), 0u);
}

TEST_F(WaitTest, ManyWaitsForTheSameKeysOnSeveralLoops) {
  config.io_threads = 3;
  restart();
  constexpr uint64_t kPeers = 8, kWaits = 25, kKeys = 64;
  std::vector<std::unique_ptr<Peer>> peers;
  for (uint64_t p = 0; p < kPeers; ++p) {
    peers.push_back(std::make_unique<Peer>(*server));
    ASSERT_TRUE(peers.back()->login());
    for (uint64_t id = 0; id < kWaits; ++id) ASSERT_TRUE(peers[p]->send(wait_frame(id, keys_from(0, kKeys))));
  }
  ASSERT_TRUE(eventually("waits_open", kPeers * kWaits));
  EXPECT_EQ(stat("waited_keys"), kPeers * kWaits * kKeys);
  std::thread writers[2];
  for (uint64_t w = 0; w < 2; ++w) {
    writers[w] = std::thread([&, w] {
      Peer writer(*server);
      ASSERT_TRUE(writer.login());
      for (uint64_t i = w; i < kKeys; i += 2) EXPECT_EQ(writer.put(key_of(i), block_of(i, 100)), Code::kOk);
    });
  }
  for (auto& peer : peers) {
    std::vector<bool> seen(kWaits);
    for (uint64_t i = 0; i < kWaits; ++i) {
      const Answer answer = next_answer(*peer);
      ASSERT_EQ(answer.state, WaitState::kAll);
      ASSERT_EQ(answer.positions.size(), kKeys);
      ASSERT_FALSE(seen[answer.id]);
      seen[answer.id] = true;
    }
  }
  for (std::thread& writer : writers) writer.join();
}

// Commits, give-ups, withdrawals and the ends of connections at the same time: each WAIT that is still there
// has one last frame.
TEST_F(WaitTest, EveryWaitEndsOnce) {
  config.io_threads = 2;
  restart();
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    Peer peer(*server);
    ASSERT_TRUE(peer.login());
    for (uint64_t i = 0; !stop; ++i) {
      (void)peer.put(key_of(i % 40), block_of(i, 100));
      if (i % 3 == 0) (void)peer.call(Opcode::kGiveUp, Peer::keys_meta(keys_from(i % 50, 3)));
      if (i % 2 == 0) (void)peer.call(Opcode::kRemove, Peer::keys_meta(keys_from(i * 7 % 40, 8)));
    }
  });
  for (uint64_t round = 0; round < 12; ++round) {
    Peer waiter(*server);
    ASSERT_TRUE(waiter.login());
    constexpr uint64_t kWaits = 60;
    for (uint64_t id = 0; id < kWaits; ++id) {
      ASSERT_TRUE(waiter.send(wait_frame(id, keys_from(id % 45, 6), static_cast<uint32_t>(id % 7 * 10),
                                         static_cast<uint32_t>(id % 3))));
      if (id % 5 == 0) {
        ASSERT_TRUE(waiter.send(Peer::frame(Opcode::kWait, {}, {}, wire::kFlagWithdraw, id)));
      }
    }
    if (round % 3 == 2) continue;  // with open waits
    std::vector<uint32_t> ends(kWaits);
    for (uint64_t left = kWaits; left > 0;) {
      const Answer answer = next_answer(waiter);
      ASSERT_EQ(answer.code, Code::kOk);
      ASSERT_EQ(ends[answer.id], 0u) << "a frame after the last one";
      if (answer.state == WaitState::kMore) continue;
      ++ends[answer.id];
      --left;
    }
  }
  stop = true;
  writer.join();
}

}  // namespace
}  // namespace mooncache::testing

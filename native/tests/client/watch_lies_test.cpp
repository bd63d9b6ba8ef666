// BlockWatch against a node that lies, or says nothing.
#include <random>

#include "client/lying_node.h"
#include "client/watches.h"

namespace mooncache::testing {
namespace {

using wire::Opcode;

WatchNews first_end(LyingNode& node) {
  const auto client = client_for({node.info}, client_config(false));
  const auto watch = client->watch();
  EXPECT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(60'000), 0, 0));
  return ends_of(*watch, 1).at("a");
}

TEST(LyingNodes, EndTheirOwnWatches) {
  const std::vector<LyingNode::Answer> lies{
      [](const auto& asked) { return LyingNode::news(asked.request_id, 1, {3}); },  // no such key
      [](const auto& asked) { return LyingNode::news(asked.request_id, 9, {}); },   // no such state
      [](const auto& asked) {
        return LyingNode::news(asked.request_id, 1, {0, 1, 2, 0});
      },  // too many
      [](const auto& asked) {
        return LyingNode::news(asked.request_id, 1, {}, Opcode::kGet);
      },  // other opcode
      [](const auto& asked) {
        auto bytes = LyingNode::news(asked.request_id, 1, {0, 1, 2});
        bytes.back() ^= std::byte{1};
        return bytes;
      },
      [](const auto& asked) {  // a payload
        wire::FrameHeader header;
        header.opcode = Opcode::kWait;
        header.request_id = asked.request_id;
        header.payload_bytes = 1;
        Writer meta;
        wire::encode_status(meta, Status::ok());
        return LyingNode::frame(header, meta.view());
      },
      [](const auto&) { return std::vector<std::byte>(100, std::byte{0x55}); },
  };
  for (size_t i = 0; i < lies.size(); ++i) {
    LyingNode node(lies[i]);
    const WatchNews end = first_end(node);
    EXPECT_EQ(end.state, WatchState::kUnreachable) << "lie " << i;
    EXPECT_EQ(end.code, Code::kProtocolError) << "lie " << i;
    EXPECT_TRUE(end.positions.empty()) << "lie " << i;
  }
}

TEST(LyingNodes, AnyAnswerIsTakenOrRefused) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    LyingNode node([seed](const auto& asked) {
      std::mt19937_64 random(seed);
      Writer meta;
      wire::encode_status(meta, {random() % 4 == 0 ? static_cast<Code>(random()) : Code::kOk, "words"});
      if (random() % 2 == 0) {  // a state and a count that may be right, then anything
        meta.u32(static_cast<uint32_t>(random() % 6));
        meta.u32(static_cast<uint32_t>(random() % 5));
      }
      for (uint64_t left = random() % 20; left > 0; --left) meta.u8(static_cast<uint8_t>(random() % 5));
      wire::FrameHeader header;
      header.opcode = Opcode::kWait;
      header.request_id = asked.request_id;
      auto bytes = LyingNode::frame(header, meta.view());
      if (random() % 3 == 0) bytes[random() % bytes.size()] ^= std::byte{1} << (random() % 8);
      return bytes;
    });
    const auto client = client_for({node.info}, client_config(false));
    const auto watch = client->watch();
    ASSERT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(50), 0, 1));
    const WatchNews end = ends_of(*watch, 1).at("a");
    EXPECT_EQ(end.state == WatchState::kAll, end.positions.size() == 3) << "seed " << seed;
    for (const uint32_t position : end.positions) EXPECT_LT(position, 3u) << "seed " << seed;
  }
}

TEST(LyingNodes, AnswersToOtherRequestsAreNoAnswer) {
  LyingNode node([](const auto& asked) {
    auto bytes = LyingNode::news(asked.request_id + 1000, 1, {0, 1, 2});
    const auto right = LyingNode::news(asked.request_id, 2, {1});
    bytes.insert(bytes.end(), right.begin(), right.end());
    return bytes;
  });
  const WatchNews end = first_end(node);
  EXPECT_EQ(end.state, WatchState::kGivenUp);
  EXPECT_EQ(end.positions, Positions{1});
}

TEST(LyingNodes, ANodeThatSaysAllWithoutThePositionsIsNotBelieved) {
  LyingNode node([](const auto& asked) { return LyingNode::news(asked.request_id, 1, {0}); });
  const WatchNews end = first_end(node);
  EXPECT_EQ(end.state, WatchState::kUnreachable);
  EXPECT_EQ(end.positions, Positions{0});
}

TEST(LyingNodes, AnOlderNodeIsNotAskedToWait) {
  LyingNode node([](const auto&) { return std::vector<std::byte>{}; }, 0);
  const WatchNews end = first_end(node);
  EXPECT_EQ(end.state, WatchState::kUnreachable);
  EXPECT_EQ(end.code, Code::kUnsupported);
  EXPECT_EQ(node.frames, 0);
  const auto client = client_for({node.info}, client_config(false));
  const auto ended = client->give_up(keys_from(0, 2), within_ms(20'000));
  ASSERT_TRUE(ended) << ended.status().message;
  EXPECT_EQ(*ended, 0u);
  EXPECT_EQ(node.frames, 0);
}

TEST(LyingNodes, ANodeThatFallsSilentIsFoundOut) {
  LyingNode node([](const auto&) { return std::vector<std::byte>{}; });
  ClientConfig config = client_config(false);
  config.ping_interval_ms = 50;
  config.connect_timeout_ms = 200;
  const auto client = client_for({node.info}, config);
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(60'000), 0, 0));
  const WatchNews end = ends_of(*watch, 1).at("a");
  EXPECT_EQ(end.state, WatchState::kUnreachable);
  EXPECT_EQ(end.code, Code::kNodeUnavailable);
  EXPECT_EQ(node.frames, 2) << "the WAIT and one PING";
}

TEST(LyingNodes, APatientWatchIsLateByALittleOnly) {
  LyingNode node([](const auto&) { return std::vector<std::byte>{}; });
  const auto client = client_for({node.info}, client_config(false));
  const auto watch = client->watch();
  ASSERT_TRUE(watch->add("a", keys_from(0, 3), Deadline::after_ms(100), 0, 0));
  EXPECT_EQ(ends_of(*watch, 1).at("a").state, WatchState::kTimeout) << "although the node says nothing";
}

TEST(LyingNodes, NoNodeNoWatch) {
  const auto client = client_for({}, client_config(false));
  const auto watch = client->watch();
  EXPECT_EQ(watch->add("a", keys_from(0, 3), Deadline::after_ms(100), std::nullopt, 0).code, Code::kNoNodes);
  EXPECT_EQ(client->give_up(keys_from(0, 1), within_ms(100)).code(), Code::kNoNodes);
}

}  // namespace
}  // namespace mooncache::testing

// Late reads that are asked of a second node: when (pure), what becomes of them, and what of the node that is
// late.
#include "client/hedge.h"

#include "client/breaker.h"
#include "client/lying_node.h"
#include "compare.h"

namespace mooncache::testing {
namespace {

TEST(Hedging, TailsAreFollowedUpAndDown) {
  TailEstimate tail;
  for (uint32_t i = 0; i + 1 < TailEstimate::kReadsMin; ++i) tail.add(100);
  EXPECT_FALSE(tail.p99_us());
  std::mt19937_64 random(1);
  const auto feed = [&](int reads, uint64_t usual_us, uint64_t slow_us) {
    for (int i = 0; i < reads; ++i) tail.add(random() % 50 == 0 ? slow_us : usual_us);
  };
  feed(5000, 100, 1000);  // one of fifty
  EXPECT_GT(*tail.p99_us(), 500u);
  EXPECT_LT(*tail.p99_us(), 2000u);
  feed(5000, 10, 10);
  EXPECT_LT(*tail.p99_us(), 20u);
  feed(100, 8000, 8000);
  EXPECT_GT(*tail.p99_us(), 5000u) << "what became slower for all is soon no news";
}

TEST(Hedging, AMinorityOfSlowPeersDoesNotMoveTheTime) {
  const HedgeLimits limits{2000, 250'000};
  EXPECT_EQ(hedge_after_us({}, limits), 250'000u) << "nothing is known";
  EXPECT_EQ(hedge_after_us({3000}, limits), 6000u);
  EXPECT_EQ(hedge_after_us({90'000, 3000, 100'000, 4000}, limits), 8000u);
  EXPECT_EQ(hedge_after_us({500, 3'000'000, 600}, limits), 2000u);
  EXPECT_EQ(hedge_after_us({500'000}, limits), 250'000u);
}

TEST(Hedging, LargeReadsHaveNone) {
  EXPECT_EQ(hedge_class(1), 0u);
  EXPECT_EQ(hedge_class(kHedgeBytesMax), kHedgeClassBytes.size() - 1);
  EXPECT_FALSE(hedge_class(kHedgeBytesMax + 1));
}

TEST(Hedging, ABudgetGivesAllOrNothing) {
  RetryBudget budget(5, 2);
  EXPECT_FALSE(budget.spend_all(3));
  EXPECT_TRUE(budget.spend_all(2));
  budget.operations(19);
  EXPECT_FALSE(budget.spend_all(1));
  budget.operations(1);
  EXPECT_TRUE(budget.spend_all(1));
}

// Two nodes: one that says what a test wants, and a real one that has the blocks.
class HedgedGets : public ::testing::Test {
 protected:
  void start(LyingNode::Answer answer) {
    liar_ = std::make_unique<LyingNode>(std::move(answer));
    liar_->info.index = 0;
    real_ = std::make_unique<TestNode>(1, 64 << 20, "host-a", false);
    config_ = client_config(false);
    config_.hedge_percent = 5;
    config_.hedge_min_ms = 1;
    config_.hedge_max_ms = 20;
    config_.stall_timeout_ms = config_.connect_timeout_ms = 60'000;  // nothing else helps in time
    client_ = client_for(infos(), config_);
  }
  std::vector<NodeInfo> infos() const { return {liar_->info, real_->info}; }
  // Keys of blocks of the real node that are asked for at the other one first.
  std::vector<Key> blocks(size_t count, size_t size) {
    std::vector<Key> keys;
    auto writer = client_for(infos(), client_config(false));
    CallOptions there;
    there.node = real_->info.index;
    for (uint64_t number = 0; keys.size() < count; ++number) {
      if (place(key_of(number), infos(), "", 1)[0] != 0) continue;
      keys.push_back(key_of(number));
      EXPECT_EQ(put_one(*writer, keys.back(), bytes_of(number, size), 1, there).code, Code::kOk);
      sources_.push_back(bytes_of(number, size));
    }
    return keys;
  }

  std::unique_ptr<LyingNode> liar_;
  std::unique_ptr<TestNode> real_;
  ClientConfig config_;
  std::unique_ptr<Client> client_;
  std::vector<std::vector<std::byte>> sources_;
};

LyingNode::Answer silence() {
  return [](const wire::FrameHeader&) { return std::vector<std::byte>{}; };
}

TEST_F(HedgedGets, ASilentNodeIsOvertakenThenLeftAlone) {
  start(silence());
  const auto keys = blocks(8, 5000);
  for (size_t i = 0; i < keys.size(); ++i) {
    std::vector<std::byte> copy(5000);
    const GetOutcome got = get_one(*client_, keys[i], copy);
    ASSERT_EQ(got.code, Code::kOk);
    EXPECT_EQ(got.node_index, 1u);
    EXPECT_TRUE(same_bytes(copy, sources_[i]));
  }
  const uint64_t won = stat_of(*client_, "hedges_won");
  EXPECT_GE(won, 3u);
  EXPECT_EQ(won, stat_of(*client_, "hedges"));
  EXPECT_LT(won, keys.size()) << "after three of them its blocks are read elsewhere at once";
  EXPECT_GE(stat_of(*client_, "slow_nodes"), 1u);
  EXPECT_EQ(stat_of(*client_, "get_hits"), keys.size());
  EXPECT_EQ(stat_of(*client_, "stalls"), 0u);
}

TEST_F(HedgedGets, NothingOfTheLateAnswerLandsAfterTheCall) {
  constexpr size_t kSize = 40'000;
  start([](const wire::FrameHeader& asked) {
    Writer meta;
    wire::encode_status(meta, Status::ok());
    meta.u32(1);
    wire::GetResult result;
    result.code = Code::kOk;
    result.length = result.block_size = kSize;
    result.encode(meta);
    wire::FrameHeader header;
    header.opcode = asked.opcode;
    header.request_id = asked.request_id;
    header.payload_bytes = kSize;
    auto bytes = LyingNode::frame(header, meta.view());
    bytes.resize(bytes.size() + kSize / 2, std::byte{0xee});  // the rest never comes
    return bytes;
  });
  const auto keys = blocks(1, kSize);
  std::vector<std::byte> copy(kSize);
  ASSERT_EQ(get_one(*client_, keys[0], copy).code, Code::kOk);
  EXPECT_TRUE(same_bytes(copy, sources_[0]));
  EXPECT_EQ(stat_of(*client_, "hedges_won"), 1u);
  sleep_ms(20);
  EXPECT_TRUE(same_bytes(copy, sources_[0]));
  EXPECT_EQ(stat_of(*client_, "lanes_closed"), 1u) << "its connection ends with the read";
}

TEST_F(HedgedGets, ABatchIsTakenOverAsAWholeAlsoIntoAllocatedMemory) {
  start(silence());
  const auto keys = blocks(6, 3000);
  std::vector<GetBlock> wanted;
  for (const Key& key : keys) wanted.push_back({key, {}, 0});
  std::vector<std::vector<std::byte>> copies(keys.size());
  GetOptions how;
  how.allocate = [&](size_t item, uint64_t size_bytes) {
    copies[item].resize(size_bytes);
    return copies[item].data();
  };
  std::vector<GetOutcome> outcomes(keys.size());
  ASSERT_TRUE(client_->get(wanted, how, {}, outcomes));
  for (size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(outcomes[i].code, Code::kOk);
    EXPECT_TRUE(same_bytes(copies[i], sources_[i]));
  }
  EXPECT_EQ(stat_of(*client_, "hedges"), 1u);
  const std::vector<std::byte> before = sources_[0];
  std::vector<std::byte> part(100);
  GetOptions range;
  range.whole = false;
  auto fresh = client_for(infos(), config_);
  ASSERT_EQ(get_one(*fresh, keys[0], part, {}, range, 700).code, Code::kOk);
  EXPECT_TRUE(same_bytes(part, std::span(before).subspan(700, 100)));
}

TEST_F(HedgedGets, TheBudgetIsAShareOfTheReads) {
  start(silence());
  config_.hedge_burst = 1;
  config_.breaker_failures = 1000;  // the node is never slow
  client_ = client_for(infos(), config_);
  const auto keys = blocks(2, 1000);
  std::vector<std::byte> copy(1000);
  EXPECT_EQ(get_one(*client_, keys[0], copy).code, Code::kOk);
  CallOptions soon;
  soon.deadline = Deadline::after_ms(100);
  EXPECT_EQ(get_one(*client_, keys[1], copy, soon).code, Code::kDeadlineExceeded);
  EXPECT_EQ(stat_of(*client_, "hedges"), 1u);
  EXPECT_EQ(stat_of(*client_, "hedges_refused"), 1u);
}

TEST_F(HedgedGets, SwitchedOffNothingIsAskedTwice) {
  start(silence());
  config_.hedge_percent = 0;
  client_ = client_for(infos(), config_);
  const auto keys = blocks(1, 1000);
  std::vector<std::byte> copy(1000);
  CallOptions soon;
  soon.deadline = Deadline::after_ms(100);
  EXPECT_EQ(get_one(*client_, keys[0], copy, soon).code, Code::kDeadlineExceeded);
  EXPECT_EQ(stat_of(*client_, "hedges") + stat_of(*client_, "hedges_refused"), 0u);
}

TEST_F(HedgedGets, AHedgeThatFindsNothingTakesNothingAway) {
  std::atomic<int> asked{0};
  start([&](const wire::FrameHeader& header) {
    if (++asked > 1) return std::vector<std::byte>{};
    sleep_ms(60);
    Writer meta;
    wire::encode_status(meta, Status::ok());
    meta.u32(1);
    wire::GetResult result;
    result.code = Code::kNotFound;
    result.encode(meta);
    wire::FrameHeader answer;
    answer.opcode = header.opcode;
    answer.request_id = header.request_id;
    return LyingNode::frame(answer, meta.view());
  });
  uint64_t number = 0;
  while (place(key_of(number), infos(), "", 1)[0] != 0) ++number;
  std::vector<std::byte> copy(100);
  EXPECT_EQ(get_one(*client_, key_of(number), copy).code, Code::kNotFound);
  EXPECT_EQ(stat_of(*client_, "hedges"), 1u);
  EXPECT_EQ(stat_of(*client_, "hedges_won"), 0u);
}

TEST(CallRetriesTest, OneCallGoesOnABoundedNumberOfTimes) {
  std::vector<NodeInfo> nodes;
  for (uint32_t i = 0; i < 6; ++i) {
    NodeInfo node;
    node.index = i;
    node.node_id = "gone-" + std::to_string(i);
    node.tcp_host = "127.0.0.1";
    node.tcp_port = 1;  // refused at once
    nodes.push_back(node);
  }
  ClientConfig config = client_config(false);
  config.retries_per_call = 2;
  auto client = client_for(nodes, config);
  EXPECT_EQ(put_one(*client, key_of(1), bytes_of(1, 100)).code, Code::kNodeUnavailable);
  EXPECT_EQ(stat_of(*client, "retries"), 2u);
  EXPECT_EQ(stat_of(*client, "retries_refused"), 1u);
}

}  // namespace
}  // namespace mooncache::testing

// WaitTable: when a connection hears that its node lives. The clock is the test's own.
#include "server/wait_table.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace mooncache::testing {
namespace {

using server::WaitTable;
using wire::WaitState;

constexpr uint32_t kBeatMs = 2500;

struct TableOwner final : WaitTable::Owner {
  void send_news(const WaitTable::News& news) override { heard.push_back(news); }
  std::vector<WaitTable::News> heard;
};

std::vector<Key> table_keys(uint8_t first, uint8_t count) {
  std::vector<Key> keys(count);
  for (uint8_t i = 0; i < count; ++i) keys[i].bytes[0] = std::byte(first + i);
  return keys;
}

class WaitTableTest : public ::testing::Test {
 protected:
  void add(TableOwner& owner, uint64_t id, uint32_t heartbeat_ms, uint32_t news_ms = 0) {
    const wire::WaitRequest request{600'000, news_ms, table_keys(static_cast<uint8_t>(10 * id), 2),
                                    heartbeat_ms};
    ASSERT_TRUE(table.add(group, owner, id, 1, request, now_ms));
    table.report_present(owner, id, {}, now_ms);
  }
  // As a loop does it.
  void run_for(uint64_t span_ms) {
    const uint64_t until_ms = now_ms + span_ms;
    for (;;) {
      table.send_due(group, now_ms);
      ASSERT_GT(group.next_due_ms(), now_ms) << "what was due is done";
      if (group.next_due_ms() > until_ms) break;
      now_ms = group.next_due_ms();
    }
    now_ms = until_ms;
  }
  static size_t beats(const TableOwner& owner) {
    return static_cast<size_t>(std::count_if(owner.heard.begin(), owner.heard.end(), [](const auto& news) {
      return news.heartbeat && news.state == WaitState::kMore && news.positions.empty();
    }));
  }

  WaitTable table{{1000, 1 << 20}};
  WaitTable::Group group{[] {}};
  uint64_t now_ms = 1'000'000;
};

TEST_F(WaitTableTest, NoneAreSentThatWereNotAskedFor) {
  TableOwner owner;
  add(owner, 1, 0);
  EXPECT_EQ(group.next_due_ms(), now_ms + 600'000);
  run_for(599'000);
  EXPECT_TRUE(owner.heard.empty());
  table.forget(owner);
}

TEST_F(WaitTableTest, TheFirstComesAtOnceThenAtIntervals) {
  TableOwner owner;
  add(owner, 1, kBeatMs);
  run_for(0);
  EXPECT_EQ(beats(owner), 1u);
  run_for(kBeatMs - 1);
  EXPECT_EQ(beats(owner), 1u);
  run_for(1);
  EXPECT_EQ(beats(owner), 2u);
  run_for(10 * kBeatMs);
  EXPECT_EQ(beats(owner), 12u);
  table.forget(owner);
  run_for(10 * kBeatMs);
  EXPECT_EQ(beats(owner), 12u) << "no wait, no sign of life";
}

TEST_F(WaitTableTest, ManyWaitsOfAConnectionShareThem) {
  TableOwner owner, other;
  for (uint64_t id = 1; id <= 20; ++id) {
    add(owner, id, kBeatMs);
    run_for(7);
  }
  add(other, 1, kBeatMs);
  run_for(10 * kBeatMs);
  EXPECT_EQ(beats(owner), 11u);
  EXPECT_EQ(beats(other), 11u);
  table.forget(owner);
  table.forget(other);
}

TEST_F(WaitTableTest, NewsAreSignsOfLife) {
  TableOwner owner;
  add(owner, 1, kBeatMs, 1);
  add(owner, 2, kBeatMs);
  run_for(0);
  run_for(kBeatMs - 100);
  table.committed(1, table_keys(10, 1)[0]);
  run_for(200);
  ASSERT_EQ(owner.heard.size(), 2u);
  EXPECT_EQ(owner.heard[1].positions, std::vector<uint32_t>{0});
  run_for(kBeatMs - 300);
  EXPECT_EQ(beats(owner), 1u) << "the news was one";
  run_for(100);
  EXPECT_EQ(beats(owner), 2u);
  table.forget(owner);
}

TEST_F(WaitTableTest, BlocksThatAreNotToBeToldYetAreNotInThem) {
  TableOwner owner;
  add(owner, 1, kBeatMs);
  table.committed(1, table_keys(10, 1)[0]);
  run_for(2 * kBeatMs);
  EXPECT_EQ(beats(owner), 3u);
  EXPECT_EQ(owner.heard.size(), 3u);
  table.committed(1, table_keys(11, 1)[0]);
  run_for(1);
  EXPECT_EQ(owner.heard.back().state, WaitState::kAll);
  EXPECT_EQ(owner.heard.back().positions, (std::vector<uint32_t>{0, 1}));
}

TEST_F(WaitTableTest, AHostileIntervalIsCut) {
  TableOwner owner;
  for (uint64_t id = 1; id <= 20; ++id) add(owner, id, 1);
  run_for(100 * WaitTable::kHeartbeatMinMs);
  EXPECT_EQ(beats(owner), 101u);
  table.forget(owner);
}

}  // namespace
}  // namespace mooncache::testing

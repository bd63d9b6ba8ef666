// Turns at the lanes of a node: who gets one, and when. No thread and no connection.
#include "client/lane_queue.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <vector>

namespace mooncache::testing {
namespace {

using Ticket = std::unique_ptr<LaneTicket>;

bool readable(const Ticket& ticket) {
  pollfd one{ticket->fd(), POLLIN, 0};
  return poll(&one, 1, 0) == 1;
}

bool take_at_once(LaneQueue& queue, LaneUse use) {
  Ticket ticket;
  return queue.acquire(use, ticket);
}

TEST(LaneQueue, ServesInTheOrderInWhichTheyCame) {
  LaneQueue queue(1);
  ASSERT_TRUE(take_at_once(queue, LaneUse::kSmall));
  ASSERT_TRUE(take_at_once(queue, LaneUse::kSmall));
  std::vector<Ticket> waiting(3);
  for (Ticket& ticket : waiting) ASSERT_FALSE(queue.acquire(LaneUse::kSmall, ticket));
  for (size_t next = 0; next < waiting.size(); ++next) {
    queue.release(LaneUse::kSmall);
    for (size_t i = next; i < waiting.size(); ++i) EXPECT_EQ(readable(waiting[i]), i == next) << next << i;
    EXPECT_FALSE(take_at_once(queue, LaneUse::kSmall)) << "who comes later waits";
    EXPECT_TRUE(queue.acquire(LaneUse::kSmall, waiting[next]));
    EXPECT_EQ(waiting[next], nullptr);
  }
  EXPECT_EQ(queue.turns(), 2u);
}

TEST(LaneQueue, BulkLeavesOneTurnToSmallCalls) {
  LaneQueue queue(2);
  Ticket bulk;
  ASSERT_TRUE(take_at_once(queue, LaneUse::kBulk));
  ASSERT_TRUE(take_at_once(queue, LaneUse::kBulk));
  ASSERT_FALSE(queue.acquire(LaneUse::kBulk, bulk));
  EXPECT_TRUE(take_at_once(queue, LaneUse::kSmall)) << "before bulk that waits";
  queue.release(LaneUse::kSmall);
  EXPECT_FALSE(readable(bulk)) << "the turn of small calls is not for bulk";
  queue.release(LaneUse::kBulk);
  EXPECT_TRUE(readable(bulk));
  EXPECT_TRUE(queue.acquire(LaneUse::kBulk, bulk));
}

TEST(LaneQueue, SmallCallsDoNotOvertakeBulkThatMayHaveTheTurn) {
  LaneQueue queue(1);
  ASSERT_TRUE(take_at_once(queue, LaneUse::kSmall));
  ASSERT_TRUE(take_at_once(queue, LaneUse::kSmall));
  Ticket bulk, small;
  ASSERT_FALSE(queue.acquire(LaneUse::kBulk, bulk));
  ASSERT_FALSE(queue.acquire(LaneUse::kSmall, small));
  queue.release(LaneUse::kSmall);
  EXPECT_TRUE(readable(bulk));
  EXPECT_FALSE(readable(small));
}

TEST(LaneQueue, WhoLeavesGivesItsTurnToTheNext) {
  LaneQueue queue(1);
  ASSERT_TRUE(take_at_once(queue, LaneUse::kSmall));
  ASSERT_TRUE(take_at_once(queue, LaneUse::kSmall));
  std::vector<Ticket> waiting(3);
  for (Ticket& ticket : waiting) ASSERT_FALSE(queue.acquire(LaneUse::kSmall, ticket));
  waiting[0].reset();  // before its turn
  queue.release(LaneUse::kSmall);
  ASSERT_TRUE(readable(waiting[1]));
  waiting[1].reset();  // with a turn that it did not take
  EXPECT_TRUE(readable(waiting[2]));
  waiting[2].reset();
  EXPECT_EQ(queue.turns(), 1u);
  EXPECT_TRUE(take_at_once(queue, LaneUse::kSmall));
}

}  // namespace
}  // namespace mooncache::testing

// When a way that failed is tried again: decisions over times that are passed in.
#include <gtest/gtest.h>

#include "client/breaker.h"

namespace mooncache::testing {
namespace {

TEST(Detour, LastsTwiceAsLongEachTimeUpToAMinute) {
  Detour detour;
  uint64_t now_ms = 1'000'000;
  EXPECT_FALSE(detour.taken(now_ms));
  for (const uint64_t pause_ms : {5'000u, 10'000u, 20'000u, 40'000u, 60'000u, 60'000u}) {
    EXPECT_TRUE(detour.failed(now_ms));
    EXPECT_FALSE(detour.failed(now_ms + 1)) << "what failed beside it is the same failure";
    EXPECT_TRUE(detour.taken(now_ms + pause_ms - 1));
    EXPECT_FALSE(detour.taken(now_ms + pause_ms));
    now_ms += pause_ms;
  }
}

TEST(Detour, EndsWithASuccessThatComesAfterThePause) {
  Detour detour;
  EXPECT_TRUE(detour.failed(1'000));
  detour.worked(2'000);  // began before the failure
  EXPECT_TRUE(detour.taken(5'999));
  EXPECT_TRUE(detour.failed_lately());
  EXPECT_TRUE(detour.failed(6'000));
  EXPECT_TRUE(detour.taken(15'999));
  detour.worked(16'000);
  EXPECT_FALSE(detour.failed_lately());
  EXPECT_TRUE(detour.failed(17'000));
  EXPECT_FALSE(detour.taken(22'000)) << "the first pause again";
}

TEST(RailRenewal, IsRarerWhileRailsDoNotStay) {
  RailRenewal renewal;
  uint64_t now_ms = 5'000'000;
  EXPECT_TRUE(renewal.due(now_ms));
  for (const uint64_t pause_ms : {5'000u, 10'000u, 20'000u, 40'000u, 60'000u, 60'000u}) {
    renewal.made(now_ms);
    EXPECT_FALSE(renewal.due(now_ms + pause_ms - 1));
    EXPECT_TRUE(renewal.due(now_ms + pause_ms));
    now_ms += pause_ms;
  }
  now_ms += 3'600'000;  // lasted an hour
  EXPECT_TRUE(renewal.due(now_ms));
  renewal.made(now_ms);
  EXPECT_TRUE(renewal.due(now_ms + 5'000));
}

}  // namespace
}  // namespace mooncache::testing

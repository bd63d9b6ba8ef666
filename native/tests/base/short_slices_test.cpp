#include "base/short_slices.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <thread>

namespace mooncache {
namespace {

ThreadSchedule own() {
  ThreadSchedule now;
  EXPECT_TRUE(read_schedule(now));
  return now;
}

// In a thread of its own: the test's own slices stay as they are.
TEST(ShortSlices, AThreadAsksForItselfAndKeepsItsPriority) {
  const ThreadSchedule before = own();
  if (before.policy != SCHED_OTHER || before.slice_ns == 0)
    GTEST_SKIP() << "no slices of threads before Linux 6.12, and none for another policy";
  std::thread([&] {
    const int nice = before.nice + (before.nice < 19 ? 1 : 0);
    ASSERT_EQ(::setpriority(PRIO_PROCESS, 0, nice), 0);
    ask_for_short_slices();
    const ThreadSchedule after = own();
    EXPECT_LT(after.slice_ns, before.slice_ns);
    EXPECT_GE(after.slice_ns, 100'000u) << "less is refused";
    EXPECT_EQ(after.nice, nice);
    EXPECT_EQ(after.policy, before.policy);
  }).join();
  EXPECT_EQ(own().slice_ns, before.slice_ns) << "other threads keep theirs";
}

TEST(ShortSlices, AThreadForRealTimeStaysOne) {
  bool permitted = false;
  std::thread([&] {
    sched_param first{};
    first.sched_priority = 1;
    permitted = ::sched_setscheduler(0, SCHED_RR, &first) == 0;
    if (!permitted) return;
    ask_for_short_slices();
    EXPECT_EQ(own().policy, static_cast<uint32_t>(SCHED_RR));
    EXPECT_EQ(own().priority, 1u);
  }).join();
  if (!permitted) GTEST_SKIP() << "no real time for this user";
}

}  // namespace
}  // namespace mooncache

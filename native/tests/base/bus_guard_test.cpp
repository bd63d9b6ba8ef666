#include "base/bus_guard.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

namespace mooncache {
namespace {

constexpr uint64_t kPage = 4096;

// Only the thread that forks goes on in the child. What the others had locked stays locked.
TEST(BusGuard, AForkedChildGivesItsGuardUpWhileOtherThreadsTakeSome) {
  std::vector<std::byte> memory(2 * kPage);
  BusGuard guard(memory.data(), kPage, kPage);
  ASSERT_TRUE(guard.active());
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop.load()) BusGuard(memory.data() + kPage, kPage, kPage);
  });
  int ended = 0;
  for (int i = 0; i < 200; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      (void)alarm(10);
      guard = BusGuard();
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status)) break;  // by the alarm
    ++ended;
  }
  stop.store(true);
  other.join();
  EXPECT_EQ(ended, 200);
}

TEST(BusGuard, AsManyAsThereArePlacesAndAgainWhenTheyAreGivenUp) {
  std::vector<std::byte> memory(kPage);
  for (int round = 0; round < 2; ++round) {
    std::vector<BusGuard> guards;
    for (int i = 0; i < 64; ++i) {
      guards.emplace_back(memory.data(), kPage, kPage);
      EXPECT_TRUE(guards.back().active()) << i;
    }
    EXPECT_FALSE(BusGuard(memory.data(), kPage, kPage).active());
  }
}

}  // namespace
}  // namespace mooncache

// How the threads of a node's server share the processors with others.
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>

#include "base/short_slices.h"
#include "server/peer.h"

namespace mooncache::testing {
namespace {

class LoopTest : public ServerTest {};

// Threads of this process that have shorter slices than the one that asks.
size_t threads_with_shorter_slices(const ThreadSchedule& own) {
  size_t found = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    ThreadSchedule other;
    const long thread = std::stol(entry.path().filename().string());
    if (::syscall(SYS_sched_getattr, thread, &other, sizeof other, 0u) == 0 && other.slice_ns < own.slice_ns)
      ++found;
  }
  return found;
}

TEST_F(LoopTest, EveryLoopAsksForShortSlicesAndNoOtherThread) {
  ThreadSchedule own;
  ASSERT_TRUE(read_schedule(own));
  if (own.slice_ns == 0) GTEST_SKIP() << "no slices of threads before Linux 6.12";
  ASSERT_EQ(threads_with_shorter_slices(own), 0u);
  config.io_threads = 2;
  start();
  Peer peer(*server, true);
  ASSERT_TRUE(peer.login());
  const Deadline deadline = Deadline::after(kPatience);
  while (threads_with_shorter_slices(own) != 2 && !deadline.expired())
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_EQ(threads_with_shorter_slices(own), 2u);
}

}  // namespace
}  // namespace mooncache::testing

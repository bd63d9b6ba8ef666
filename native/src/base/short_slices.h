// How a thread that answers short requests gets a processor soon, beside threads that are busy for longer.
#pragma once

#include <cstdint>

namespace mooncache {

// The kernel's sched_attr in its first version: the header that has it cannot be used beside <sched.h>.
struct ThreadSchedule {
  uint32_t size = sizeof(ThreadSchedule);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;  // for real time
  uint64_t slice_ns = 0;  // 0: this kernel has no slices of threads
  uint64_t deadline = 0, period = 0;
};
static_assert(sizeof(ThreadSchedule) == 48);

// Of the calling thread. False: the kernel does not say.
bool read_schedule(ThreadSchedule& schedule);

// The calling thread asks the scheduler for short slices: when it wakes, it runs before a thread with longer
// ones that has the processor. Its share of the processor stays the same. Without effect before Linux 6.12,
// where it is refused, and for a thread with a policy for real time.
void ask_for_short_slices();

}  // namespace mooncache

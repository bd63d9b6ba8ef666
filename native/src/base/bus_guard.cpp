#include "base/bus_guard.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <utility>

namespace mooncache {
namespace {

// Plain atomics, no lock: the handler reads them, and a forked child, which gives up guards, would wait for a
// lock that another thread of its parent had. A slot is live while `begin` is not 0; its owner writes
// `begin` last and clears it first.
struct Range {
  std::atomic<bool> taken{false};
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<uintptr_t> page{0};
  std::atomic<uint64_t> lost{0};
};
constexpr int kRanges = 64;
Range ranges[kRanges];
struct sigaction before;  // set once, before the handler can run

static_assert(std::atomic<uintptr_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

bool replace_page(uintptr_t at) {
  for (Range& range : ranges) {
    const uintptr_t begin = range.begin.load(std::memory_order_acquire);
    if (begin == 0 || at < begin || at >= range.end.load(std::memory_order_relaxed)) continue;
    const uintptr_t page = range.page.load(std::memory_order_relaxed);
    void* const place = reinterpret_cast<void*>(begin + (at - begin) / page * page);
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (::mmap(place, page, PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED) return false;
    range.lost.fetch_add(page, std::memory_order_relaxed);
    return true;
  }
  return false;
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  const bool from_memory = info->si_code > 0;  // not sent by a process
  if (from_memory && replace_page(reinterpret_cast<uintptr_t>(info->si_addr))) {
    errno = saved;
    return;
  }
  errno = saved;
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr)
    return before.sa_sigaction(number, info, context);
  const bool ignored = before.sa_handler == SIG_IGN;
  if (ignored && !from_memory) return;
  if (!ignored && before.sa_handler != SIG_DFL) return before.sa_handler(number);
  // The access is repeated, or the signal sent again, and ends the process as it would have: a fault cannot
  // be ignored.
  struct sigaction ends {};
  ends.sa_handler = SIG_DFL;
  (void)::sigaction(SIGBUS, &ends, nullptr);
  if (!from_memory) (void)::raise(SIGBUS);
}

void install() {
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  (void)::sigemptyset(&action.sa_mask);
  (void)::sigaction(SIGBUS, nullptr, &before);
  (void)::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace

BusGuard::BusGuard(std::byte* begin, uint64_t size_bytes, uint64_t page_bytes) {
  static const bool installed = (install(), true);
  (void)installed;
  for (int slot = 0; slot < kRanges; ++slot) {
    Range& range = ranges[slot];
    if (range.taken.exchange(true, std::memory_order_acquire)) continue;
    const auto at = reinterpret_cast<uintptr_t>(begin);
    range.end.store(at + size_bytes, std::memory_order_relaxed);
    range.page.store(page_bytes, std::memory_order_relaxed);
    range.lost.store(0, std::memory_order_relaxed);
    range.begin.store(at, std::memory_order_release);
    slot_ = slot;
    return;
  }
}

BusGuard& BusGuard::operator=(BusGuard&& other) noexcept {
  if (this == &other) return *this;
  leave();
  slot_ = std::exchange(other.slot_, -1);
  return *this;
}

uint64_t BusGuard::lost_bytes() const {
  return slot_ < 0 ? 0 : ranges[slot_].lost.load(std::memory_order_relaxed);
}

void BusGuard::leave() {
  if (slot_ < 0) return;
  Range& range = ranges[std::exchange(slot_, -1)];
  range.begin.store(0, std::memory_order_release);
  range.taken.store(false, std::memory_order_release);
}

}  // namespace mooncache

// What can end a wait but is seen only by looking, as Python sees signals.
#pragma once

#include <algorithm>
#include <chrono>

#include "mooncache/status.h"

namespace mooncache {

// For one call on one thread. Asks at most every 50 ms: the answer costs a lock of the caller's world.
class InterruptLook {
 public:
  using Check = bool (*)();
  // Null: never interrupted.
  explicit InterruptLook(Check check) : check_(check) {}

  bool interrupted() {
    if (check_ == nullptr) return false;
    const auto now = Clock::now();
    if (now < next_) return false;
    next_ = now + kInterval;
    return check_();
  }
  // A sleep ended early: there may be something to see.
  void soon() { next_ = {}; }
  // How long to sleep at most; negative is forever.
  int limit(int patience_ms) const {
    const int interval_ms = static_cast<int>(kInterval.count());
    if (check_ == nullptr) return patience_ms;
    return patience_ms < 0 ? interval_ms : std::min(patience_ms, interval_ms);
  }
  static Status status() { return {Code::kCancelled, "interrupted by a signal"}; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kInterval{50};

  Check check_;
  Clock::time_point next_ = Clock::now() + kInterval;
};

}  // namespace mooncache

// Decisions about trying again, pure: time is passed in.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mooncache {

// After `failures` failures in a row a peer is left alone for a pause that doubles with each failed probe.
// When the pause is over, one caller at a time may probe it; a success closes the breaker.
//
// A peer that refuses at once (no process listens there) costs a caller next to nothing, and often starts
// again a moment later. Its pauses are an eighth of the time for which it has been left alone: who waits for
// it waits an eighth longer than it is away, where pauses that double would make that twice as long.
//
// With a slow start a peer that was left alone gets its share of the traffic back bit by bit: all callers may
// use it, but of those that could as well go elsewhere only a growing part prefers it. A failure meanwhile
// opens the breaker at once, for a longer pause than before.
class Breaker {
 public:
  static constexpr uint32_t kFirstPercent = 10;  // of the traffic, at the beginning of a slow start
  static constexpr uint32_t kRefusedShare = 8;
  static constexpr uint64_t kAtOnceMs = 50;  // what takes no longer is no stall

  Breaker(uint32_t failures, uint32_t min_ms, uint32_t max_ms, uint32_t slow_start_ms = 0)
      : limit_(failures), min_ms_(min_ms), max_ms_(max_ms), slow_start_ms_(slow_start_ms) {}

  // Whether to try now. True in the half-open state books the probe.
  bool allow(uint64_t now_ms) {
    if (failures_ < limit_) return true;
    if (now_ms < open_until_ms_) return false;
    open_until_ms_ = now_ms + std::max(pause_ms_, min_ms_);  // others wait for this probe's verdict
    return true;
  }
  bool failing() const { return failures_ > 0; }
  bool is_open(uint64_t now_ms) const { return failures_ >= limit_ && now_ms < open_until_ms_; }
  // Nothing is to be decided, and a success changes nothing.
  bool at_rest() const { return failures_ == 0 && pause_ms_ == 0; }
  // Percent of the traffic that could go elsewhere.
  uint32_t percent(uint64_t now_ms) const {
    if (failures_ >= limit_) return 0;
    if (!starting(now_ms)) return 100;
    return kFirstPercent + static_cast<uint32_t>((100 - kFirstPercent) *
                                                 (now_ms - std::min(now_ms, started_ms_)) / slow_start_ms_);
  }
  // Whether one that could go elsewhere goes here. `roll`: a random number. Once the pause is over, one of
  // them does, as a probe, and is booked.
  bool prefers(uint64_t now_ms, uint64_t roll) {
    return failures_ >= limit_ ? allow(now_ms) : roll % 100 < percent(now_ms);
  }
  void success(uint64_t now_ms) {
    const bool was_open = failures_ >= limit_;
    failures_ = 0;
    if (was_open && slow_start_ms_ > 0) started_ms_ = now_ms;
    if (!starting(now_ms)) pause_ms_ = 0;
  }
  // True when this failure opened it, or kept it open. `refused`: at once.
  bool failure(uint64_t now_ms, bool refused = false) {
    failures_ = starting(now_ms) ? limit_ : std::min(failures_ + 1, limit_);
    if (failures_ < limit_) return false;
    if (pause_ms_ == 0) opened_ms_ = now_ms;
    const uint64_t away_ms = now_ms - std::min(now_ms, opened_ms_);
    const uint64_t wanted = refused ? std::max<uint64_t>(away_ms, min_ms_) / kRefusedShare + 1
                                    : std::max<uint64_t>(uint64_t{pause_ms_} * 2, min_ms_);
    pause_ms_ = static_cast<uint32_t>(std::min<uint64_t>(wanted, max_ms_));
    open_until_ms_ = now_ms + pause_ms_;
    return true;
  }

 private:
  // Only one that was open starts slowly: it has a pause then.
  bool starting(uint64_t now_ms) const {
    return pause_ms_ > 0 && failures_ < limit_ && now_ms < started_ms_ + slow_start_ms_;
  }

  uint32_t limit_;
  uint32_t min_ms_;
  uint32_t max_ms_;
  uint32_t slow_start_ms_;
  uint32_t failures_ = 0;
  uint32_t pause_ms_ = 0;
  uint64_t opened_ms_ = 0;
  uint64_t open_until_ms_ = 0;
  uint64_t started_ms_ = 0;
};

// Of two ways to a peer, when the better one, that failed, is tried again: after a pause that doubles with
// each failure until it has worked again. Unlike a breaker it books no probe: the other way works meanwhile,
// so the first call after the pause tries.
class Detour {
 public:
  static constexpr uint32_t kPauseMinMs = 5'000;
  static constexpr uint32_t kPauseMaxMs = 60'000;
  bool taken(uint64_t now_ms) const { return breaker_.is_open(now_ms); }
  // False: the pause lasts already, so this failure began before it.
  bool failed(uint64_t now_ms) { return !taken(now_ms) && breaker_.failure(now_ms); }
  // What still arrives during the pause says nothing about what comes after it.
  void worked(uint64_t now_ms) {
    if (!taken(now_ms)) breaker_.success(now_ms);
  }
  bool failed_lately() const { return breaker_.failing(); }

 private:
  Breaker breaker_{1, kPauseMinMs, kPauseMaxMs};
};

// When an idle connection that has lost rails is made anew to get them back: at once when it has lasted, and
// after a pause that doubles while they do not stay.
class RailRenewal {
 public:
  static constexpr uint32_t kPauseMinMs = 5'000;
  static constexpr uint32_t kPauseMaxMs = 60'000;
  bool due(uint64_t now_ms) const { return !breaker_.is_open(now_ms); }
  void made(uint64_t now_ms) {
    if (now_ms - made_ms_ >= 2 * uint64_t{kPauseMaxMs}) breaker_.success(now_ms);
    (void)breaker_.failure(now_ms);
    made_ms_ = now_ms;
  }

 private:
  Breaker breaker_{1, kPauseMinMs, kPauseMaxMs};
  uint64_t made_ms_ = 0;
};

// Retries are a share of the operations, so that a failing cluster is not asked twice as much as a sound one.
class RetryBudget {
 public:
  RetryBudget(uint32_t percent, uint32_t burst)
      : percent_(percent), cap_(uint64_t{burst} * 100), level_(cap_) {}
  void operations(uint64_t count) { level_ = std::min(cap_, level_ + count * percent_); }
  // How many of `wanted` retries may be made; they are booked.
  uint64_t spend(uint64_t wanted) {
    const uint64_t granted = std::min(wanted, level_ / 100);
    level_ -= granted * 100;
    return granted;
  }

  // All of them, or none.
  bool spend_all(uint64_t wanted) {
    if (level_ / 100 < wanted) return false;
    level_ -= wanted * 100;
    return true;
  }

 private:
  uint32_t percent_;
  uint64_t cap_;
  uint64_t level_;
};

}  // namespace mooncache

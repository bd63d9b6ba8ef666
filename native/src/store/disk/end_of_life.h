// The end of a block with a TTL, as a record on a disk keeps it. Memory counts ages by a clock that ends with
// the host, so what a later start or another node reads is a time of the wall: whole minutes since 2025,
// rounded down, so that no block lives longer below the memory than in it. 24 bits last until 2056.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

namespace mooncache::store::disk {

inline constexpr uint64_t kLifeEpochMs = 1'735'689'600'000;  // 2025-01-01 00:00:00 UTC
inline constexpr uint64_t kMinuteMs = 60'000;
inline constexpr uint32_t kEndBits = 24;
inline constexpr uint32_t kMaxEnd = (1u << kEndBits) - 1;

// Milliseconds since 1970; empty: the system's. Tests put theirs in place.
using WallClock = std::function<uint64_t()>;

inline uint64_t wall_ms(const WallClock& clock) {
  if (clock) return clock();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                   std::chrono::system_clock::now().time_since_epoch())
                                   .count());
}

inline uint32_t minute_of(uint64_t wall_ms) {
  if (wall_ms < kLifeEpochMs) return 0;
  return static_cast<uint32_t>(std::min<uint64_t>((wall_ms - kLifeEpochMs) / kMinuteMs, kMaxEnd));
}

// `end`: 0 = none.
inline bool is_over(uint32_t end, uint64_t wall_ms) {
  return end != 0 && minute_of(wall_ms) >= end;
}

// Milliseconds that a block has lived; below 0: by a clock that was set since. It may be older than the
// host's clock is, so differences wrap around.
inline int64_t age_ms(uint64_t committed_ms, uint64_t now_ms) {
  return static_cast<int64_t>(now_ms - committed_ms);
}

// The end of a block of this age, for its record. Nothing: less than a minute is left, or the clock on the
// wall cannot say it; then the block does not go to a disk.
inline std::optional<uint32_t> end_of(int64_t age_ms, uint64_t ttl_ms, uint64_t wall_ms) {
  const uint64_t lived_ms = age_ms > 0 ? static_cast<uint64_t>(age_ms) : 0;
  if (lived_ms >= ttl_ms || wall_ms < kLifeEpochMs) return std::nullopt;
  const uint64_t left_ms = ttl_ms - lived_ms;
  if (left_ms / kMinuteMs >= kMaxEnd) return std::nullopt;
  const uint64_t end = (wall_ms - kLifeEpochMs + left_ms) / kMinuteMs;
  if (end > kMaxEnd || is_over(static_cast<uint32_t>(end), wall_ms)) return std::nullopt;
  return static_cast<uint32_t>(end);
}

// When a block that comes up was committed, by the clock of the memory: so that it ends there when its record
// says, and never later than a block that is put now.
inline uint64_t committed_ms_of(uint32_t end, uint64_t ttl_ms, uint64_t wall_ms, uint64_t now_ms) {
  if (end == 0 || ttl_ms == 0) return now_ms;
  const uint64_t end_ms = kLifeEpochMs + end * kMinuteMs;
  const uint64_t left_ms = end_ms > wall_ms ? std::min(end_ms - wall_ms, ttl_ms) : 0;
  return now_ms - (ttl_ms - left_ms);
}

}  // namespace mooncache::store::disk

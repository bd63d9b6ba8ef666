// When a read that is late is worth asking of a second holder as well. Pure: what reads took is passed in.
//
// The idea: late is what takes longer than nearly all reads of that size. What that is comes from the reads
// themselves, peer by peer, and the middle one of the peers decides: slow peers do not move it as long as
// they are fewer than half.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace mooncache {

// Reads of very different size say nothing about each other. Larger ones than the last class have no hedge:
// they would cost as much again as they might save.
inline constexpr std::array<uint64_t, 4> kHedgeClassBytes = {64 << 10, 512 << 10, 2 << 20, 8 << 20};
inline constexpr uint64_t kHedgeBytesMax = kHedgeClassBytes.back();

inline std::optional<size_t> hedge_class(uint64_t bytes) {
  for (size_t i = 0; i < kHedgeClassBytes.size(); ++i) {
    if (bytes <= kHedgeClassBytes[i]) return i;
  }
  return std::nullopt;
}

// About the 99th percentile of what reads from one peer took: a step up where one took longer, a 99th part of
// that down where it did not, in octaves. Of reads that end at the same moment one may be lost.
class TailEstimate {
 public:
  static constexpr uint32_t kReadsMin = 20;  // from so many on it says something

  void add(uint64_t took_us) {
    const float took = std::log2(static_cast<float>(std::max<uint64_t>(took_us, 1)));
    const uint32_t reads = reads_.load(std::memory_order_relaxed);
    float tail = octaves_.load(std::memory_order_relaxed);
    if (reads == 0)
      tail = took + 1;
    else
      tail += took > tail ? kStep * 0.99f : -kStep * 0.01f;
    octaves_.store(tail, std::memory_order_relaxed);
    if (reads < kReadsMin) reads_.store(reads + 1, std::memory_order_relaxed);
  }
  std::optional<uint64_t> p99_us() const {
    if (reads_.load(std::memory_order_relaxed) < kReadsMin) return std::nullopt;
    const float octaves = std::clamp(octaves_.load(std::memory_order_relaxed), 0.0f, 40.0f);
    return static_cast<uint64_t>(std::exp2(octaves));
  }

 private:
  static constexpr float kStep = 0.25f;
  std::atomic<float> octaves_{0};
  std::atomic<uint32_t> reads_{0};
};

struct HedgeLimits {
  uint32_t min_us = 0;
  uint32_t max_us = 0;
};

// After how long a read is late: twice the 99th percentile of the middle peer, of an even number the faster
// one. The longest time while no peer's is known.
inline uint32_t hedge_after_us(std::vector<uint64_t> p99s_us, HedgeLimits limits) {
  if (p99s_us.empty()) return limits.max_us;
  const auto middle = p99s_us.begin() + static_cast<ptrdiff_t>((p99s_us.size() - 1) / 2);
  std::nth_element(p99s_us.begin(), middle, p99s_us.end());
  return static_cast<uint32_t>(
      std::clamp<uint64_t>(2 * *middle, limits.min_us, std::max(limits.min_us, limits.max_us)));
}

// What the reads of one client have taught it: for each class the time after which a read is late.
class HedgeTimes {
 public:
  explicit HedgeTimes(HedgeLimits limits) : limits_(limits) {
    for (auto& after_us : after_us_) after_us = limits.max_us;
  }
  uint32_t after_us(size_t size_class) const { return after_us_[size_class].load(std::memory_order_relaxed); }
  // True for one of the callers, every now and then: it teaches.
  bool due(uint64_t now_ms) {
    uint64_t next_ms = next_ms_.load(std::memory_order_relaxed);
    return now_ms >= next_ms && next_ms_.compare_exchange_strong(next_ms, now_ms + kEveryMs);
  }
  void learn(size_t size_class, std::vector<uint64_t> p99s_us) {
    after_us_[size_class].store(hedge_after_us(std::move(p99s_us), limits_), std::memory_order_relaxed);
  }

 private:
  static constexpr uint64_t kEveryMs = 100;
  const HedgeLimits limits_;
  std::array<std::atomic<uint32_t>, kHedgeClassBytes.size()> after_us_;
  std::atomic<uint64_t> next_ms_{0};
};

}  // namespace mooncache

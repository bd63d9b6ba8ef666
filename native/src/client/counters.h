// Counters and latency histograms of a client: relaxed atomics, read by stats() at any time.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <chrono>

#include "mooncache/client.h"

namespace mooncache {

enum class Counter : uint8_t {
  kPutItems,
  kPutBytes,
  kPutFailed,
  kPutExisting,
  kGetItems,
  kGetBytes,
  kGetHits,
  kMissNotFound,
  kMissChecksum,
  kMissGeneration,
  kMissUnreachable,
  kMissTooSmall,
  kMissOther,
  kTcpBytes,
  kUnixBytes,
  kShmBytes,
  kRdmaBytes,
  kRdmaDirectBytes,
  kRetries,
  kRetriesRefused,
  kStaleLanes,
  kBreakerOpens,
  kBreakerSkips,
  kShmFallbacks,
  kRdmaFallbacks,
  kConnects,
  kConnectFailures,
  kLanesClosed,
  kCancelled,
  kDeadlineExceeded,
  kStalls,
  kLocationHits,
  kLocationMisses,
  kLocationCorrections,
  kSurveys,
  kMatchKeys,
  kRegistrations,
  kRegistrationEvictions,
  kRegistrationFailures,
  kReceivePoolBlocks,
  kReceivePoolMisses,
  kWatches,
  kWatchesUnreachable,
  kHedges,
  kHedgesWon,
  kHedgesRefused,
  kSlowNodes,
  kNodeFailures,
  kCount,
};
inline constexpr std::array<const char*, static_cast<size_t>(Counter::kCount)> kCounterNames = {
    "put_items",
    "put_bytes",
    "put_failed",
    "put_existing",
    "get_items",
    "get_bytes",
    "get_hits",
    "miss_not_found",
    "miss_checksum",
    "miss_generation",
    "miss_unreachable",
    "miss_too_small",
    "miss_other",
    "tcp_bytes",
    "unix_bytes",
    "shm_bytes",
    "rdma_bytes",
    "rdma_direct_bytes",
    "retries",
    "retries_refused",
    "stale_lanes",
    "breaker_opens",
    "breaker_skips",
    "shm_fallbacks",
    "rdma_fallbacks",
    "connects",
    "connect_failures",
    "lanes_closed",
    "cancelled",
    "deadline_exceeded",
    "stalls",
    "location_hits",
    "location_misses",
    "location_corrections",
    "surveys",
    "match_keys",
    "registrations",
    "registration_evictions",
    "registration_failures",
    "receive_pool_blocks",
    "receive_pool_misses",
    "watches",
    "watches_unreachable",
    "hedges",
    "hedges_won",
    "hedges_refused",
    "slow_nodes",
    "node_failures",
};

enum class Timed : uint8_t { kPut, kGet, kMatch, kControl, kCount };
inline constexpr std::array<const char*, static_cast<size_t>(Timed::kCount)> kTimedNames = {
    "put", "get", "match", "control"};

class Counters {
 public:
  void add(Counter counter, uint64_t amount = 1) {
    if (amount != 0) values_[static_cast<size_t>(counter)].fetch_add(amount, std::memory_order_relaxed);
  }
  uint64_t get(Counter counter) const {
    return values_[static_cast<size_t>(counter)].load(std::memory_order_relaxed);
  }

  void time(Timed what, std::chrono::steady_clock::duration span) {
    const auto us =
        static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(span).count());
    Histogram& histogram = histograms_[static_cast<size_t>(what)];
    const size_t bucket =
        std::min<size_t>(static_cast<size_t>(std::bit_width(us)), LatencyHistogram::kBuckets - 1);
    histogram.counts[bucket].fetch_add(1, std::memory_order_relaxed);
    histogram.total_us.fetch_add(us, std::memory_order_relaxed);
  }
  LatencyHistogram latency(Timed what) const {
    LatencyHistogram copy;
    const Histogram& histogram = histograms_[static_cast<size_t>(what)];
    copy.name = kTimedNames[static_cast<size_t>(what)];
    for (size_t i = 0; i < LatencyHistogram::kBuckets; ++i) {
      copy.counts[i] = histogram.counts[i].load(std::memory_order_relaxed);
      copy.count += copy.counts[i];
    }
    copy.total_us = histogram.total_us.load(std::memory_order_relaxed);
    return copy;
  }

 private:
  struct Histogram {
    std::array<std::atomic<uint64_t>, LatencyHistogram::kBuckets> counts{};
    std::atomic<uint64_t> total_us{0};
  };
  std::array<std::atomic<uint64_t>, static_cast<size_t>(Counter::kCount)> values_{};
  std::array<Histogram, static_cast<size_t>(Timed::kCount)> histograms_{};
};

// Times a call until it returns.
class CallTimer {
 public:
  CallTimer(Counters& counters, Timed what) : counters_(counters), what_(what) {}
  ~CallTimer() { counters_.time(what_, std::chrono::steady_clock::now() - start_); }
  CallTimer(const CallTimer&) = delete;
  CallTimer& operator=(const CallTimer&) = delete;

 private:
  Counters& counters_;
  const Timed what_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace mooncache

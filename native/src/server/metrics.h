// Counters of one loop. Each is written by its loop only and read by anyone, so adding is a plain
// load and store (no locked instruction); readers add the loops up and may see values a moment apart.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "wire/frame.h"

namespace mooncache::server {

class LoopCounter {
 public:
  void add(uint64_t amount = 1) {
    value_.store(value_.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  void sub(uint64_t amount = 1) {
    value_.store(value_.load(std::memory_order_relaxed) - amount, std::memory_order_relaxed);
  }
  void raise(uint64_t value) {
    if (value > value_.load(std::memory_order_relaxed)) value_.store(value, std::memory_order_relaxed);
  }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// Latency in buckets four to the octave (each bound about 1.19 times the one before), from 1 us to
// about 67 s; what is slower lands in the last bucket.
class LoopHistogram {
 public:
  static constexpr size_t kBuckets = 4 * 26 + 1;

  void record(uint64_t elapsed_ns) {
    buckets_[bucket_of(elapsed_ns / 1000)].add();
    sum_us_.add(elapsed_ns / 1000);
  }
  uint64_t bucket(size_t index) const { return buckets_[index].get(); }
  uint64_t sum_us() const { return sum_us_.get(); }

  // Values below bound_us(i) are in buckets 0..i.
  static uint64_t bound_us(size_t index) {
    const size_t octave = index / 4;
    const uint64_t base = uint64_t{1} << octave;
    return base + base * (index % 4 + 1) / 4;
  }
  static size_t bucket_of(uint64_t value_us) {
    if (value_us < 1) return 0;
    const auto octave = static_cast<size_t>(std::bit_width(value_us)) - 1;
    if (octave >= 26) return kBuckets - 1;
    const uint64_t base = uint64_t{1} << octave;
    return octave * 4 + static_cast<size_t>((value_us - base) * 4 / base);
  }

 private:
  std::array<LoopCounter, kBuckets> buckets_;
  LoopCounter sum_us_;
};

inline constexpr size_t kOpcodeSlots = wire::kMaxOpcode + 1;

// Why a connection was refused or ended by the node.
enum class CloseReason : uint8_t {
  kPeer,      // the peer closed, or the connection broke
  kProtocol,  // a frame broke the rules
  kVersion,   // another wire version
  kAuth,      // the proof did not match, or a request came before it
  kHandshakeTimeout,
  kIdle,
  kSlow,      // a frame did not complete, or the peer stopped reading
  kCapacity,  // max_connections
  kTls,
  kMemory,   // max_buffered_bytes
  kRevoked,  // a transfer engine took back what was being sent
  kStopped,
  kCount,
};

struct LoopMetrics {
  LoopCounter bytes_in, bytes_out;
  std::array<LoopCounter, kOpcodeSlots> requests;
  std::array<LoopHistogram, kOpcodeSlots> latency;
  LoopCounter read_bytes;  // of blocks given to readers, over whichever way
  LoopCounter hits, miss_not_found, miss_checksum, miss_limit, miss_other;
  LoopCounter put_blocks, put_exists, put_no_space, put_other;
  LoopCounter crc_failures_in, crc_failures_stored, blocks_unreadable;
  LoopCounter protocol_errors, auth_failures, version_skews;
  LoopCounter connections_accepted, connections_open, connections_lingering, unauthenticated_open;
  std::array<LoopCounter, static_cast<size_t>(CloseReason::kCount)> closed;
  LoopCounter parked_total, parked_now, parked_expired;
  LoopCounter parked_woken;  // tried again because space was freed, not because time passed
  LoopCounter waits_answered, waits_given_up, waits_timed_out, waits_withdrawn, waits_refused;
  LoopCounter wait_heartbeats;
  LoopCounter pins_held, reservations_held, reserved_bytes;
  LoopCounter read_calls, write_calls;
  LoopCounter rdma_exposed;
  LoopCounter turn_bytes_max;  // moved or checked between two looks at who is ready
};

}  // namespace mooncache::server

// The nouns that every part shares: block keys, tenants, tiers, deadlines.
#pragma once

#include <array>
#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

namespace mooncache {

inline constexpr size_t kKeyBytes = 32;

// Identity of a block: a keyed BLAKE3 digest. Already uniformly distributed, hence its own hash.
struct Key {
  std::array<std::byte, kKeyBytes> bytes{};

  // Word by word: the compiler's own comparison of a byte array goes byte by byte, on the hottest path there
  // is.
  bool operator==(const Key& other) const {
    return word(0) == other.word(0) && word(1) == other.word(1) && word(2) == other.word(2) &&
           word(3) == other.word(3);
  }
  std::strong_ordering operator<=>(const Key& other) const {
    return std::memcmp(bytes.data(), other.bytes.data(), kKeyBytes) <=> 0;
  }

  // 64 of the key's bits, starting at byte 8 * at (at < 4).
  uint64_t word(size_t at) const {
    uint64_t value;
    std::memcpy(&value, bytes.data() + 8 * at, sizeof value);
    return value;
  }
};
static_assert(sizeof(Key) == kKeyBytes);

// First 8 bytes, little endian, of BLAKE3(tenant name).
using TenantId = uint64_t;

enum class Tier : uint8_t { kHbm = 0, kDram = 1, kSsd = 2, kShared = 3 };

// A point on the steady clock after which a caller no longer waits. Never the wall clock: it may jump.
struct Deadline {
  using Clock = std::chrono::steady_clock;
  Clock::time_point at = Clock::time_point::max();

  static Deadline never() { return {}; }
  static Deadline after(std::chrono::nanoseconds span) { return {Clock::now() + span}; }
  static Deadline after_ms(int64_t span_ms) { return after(std::chrono::milliseconds(span_ms)); }

  bool is_never() const { return at == Clock::time_point::max(); }
  bool expired() const { return !is_never() && Clock::now() >= at; }
  // Milliseconds left, rounded up, at least 0, at most `cap_ms` (for poll(2) and friends).
  int remaining_ms(int cap_ms = 3'600'000) const {
    if (is_never()) return cap_ms;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(at - Clock::now()).count();
    if (left <= 0) return 0;
    return left > cap_ms ? cap_ms : static_cast<int>(left);
  }
};

// A process that writes blocks, as it says who it is: a claim of whoever has a token, not a proof.
struct BlockWriter {
  uint64_t id = 0;  // random, of one process; 0 = unknown
  std::string instance, build;
  uint64_t started_unix_s = 0;
};
inline constexpr uint32_t kMaxWriters = 480;  // that a node knows at once by what they say
inline constexpr size_t kMaxWriterTextBytes = 64;
using WriterNumber = uint16_t;  // of this process of the node; 0 = unknown
// Where a block comes from. Copies and moves keep it.
struct Origin {
  uint64_t writer = 0;
  uint32_t written_s = 0;  // seconds since 2025 by the clock on the node's wall (origin_unix_s); 0 = unknown
  bool operator==(const Origin&) const = default;
};
inline constexpr uint64_t kOriginEpochUnixS = 1'735'689'600;  // 2025-01-01 00:00:00 UTC
}  // namespace mooncache

template <>
struct std::hash<mooncache::Key> {
  size_t operator()(const mooncache::Key& key) const noexcept { return key.word(0); }
};

// Which blocks are worth a write, as plain functions: time and randomness are arguments.
//
// Most blocks are never read again (76 % in a public trace), and a disk lasts for a number of bytes. Where
// the eviction policy says how likely a block is used again, the least likely ones are not written, and the
// less is left of the budget, the more likely a block has to be. Where it does not, a block that was asked
// for since it came is written; of the others a share that grows with what is left of the budget. What the
// thresholds cost and gain on the public trace is in docs/storage.md.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mooncache::store::disk {

// Bytes that may be written: `rate` for each second, and what was not used for `burst_s` seconds.
class WriteBudget {
 public:
  WriteBudget(uint64_t bytes_per_s, uint64_t now_ms)
      : bytes_per_s_(bytes_per_s), left_(limit()), at_ms_(now_ms) {}

  // What may be written now; without a rate as much as one likes.
  bool allows(uint64_t bytes, uint64_t now_ms) {
    if (bytes_per_s_ == 0) return true;
    refill(now_ms);
    // A block larger than the whole bucket goes when the bucket is full, and leaves a debt.
    return left_ >= static_cast<double>(bytes) || left_ >= limit();
  }
  void spend(uint64_t bytes) {
    if (bytes_per_s_ != 0) left_ -= static_cast<double>(bytes);
  }
  // 0 to 1.
  double slack(uint64_t now_ms) {
    if (bytes_per_s_ == 0) return 1;
    refill(now_ms);
    return std::clamp(left_ / limit(), 0.0, 1.0);
  }

 private:
  static constexpr double kBurstS = 60;
  double limit() const { return static_cast<double>(bytes_per_s_) * kBurstS; }
  void refill(uint64_t now_ms) {
    if (now_ms <= at_ms_) return;
    left_ = std::min(limit(),
                     left_ + static_cast<double>(bytes_per_s_) * static_cast<double>(now_ms - at_ms_) / 1000);
    at_ms_ = now_ms;
  }
  const uint64_t bytes_per_s_;
  double left_;
  uint64_t at_ms_;
};

struct Candidate {
  uint32_t hits = 0;        // since it came into memory
  bool known_good = false;  // of the protected queue: read before, or evicted and asked for again
  double chance = -1;       // of a use in the next two hours; below 0: unknown
};

// `slack`: what is left of the budget, `draw`: both 0 to 1.
inline bool worth_writing(const Candidate& block, double slack, double draw) {
  constexpr double kLeastChance = 0.02, kMostChance = 0.8;
  if (block.chance >= 0) return block.chance >= kLeastChance + (kMostChance - kLeastChance) * (1 - slack);
  if (block.hits > 0 || block.known_good) return true;
  return draw < slack;
}

// Of a segment that is given up: what was read since it was written moves on, a tenth of the segment at most.
inline bool worth_keeping(uint32_t hits, uint64_t kept_bytes, uint64_t record_bytes, uint64_t segment_bytes) {
  return hits > 0 && kept_bytes + record_bytes <= segment_bytes / 10;
}

// Writes that may be under way: a read that waits behind many of them is late.
inline uint32_t writes_allowed(uint32_t reads_under_way) {
  constexpr uint32_t kAlone = 8, kBesideReads = 1;
  return reads_under_way == 0 ? kAlone : kBesideReads;
}

}  // namespace mooncache::store::disk

// A disk without a disk: which blocks of one size a device would have, decided by the functions that a device
// calls (admission.h, format.h), in the time of its caller. The simulator's SSD tier.
//
// A block is offered when memory evicts it, where a device takes it a little before. Writes take no time
// here: the limit is the budget.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <random>
#include <unordered_map>
#include <vector>

#include "store/disk/admission.h"
#include "store/disk/format.h"

namespace mooncache::store::disk {

struct ModelOptions {
  uint64_t capacity_bytes = 0;
  uint64_t block_bytes = 0;
  uint64_t write_bytes_per_s = 0;  // 0: without a limit
  uint64_t seed = 1;
};

class DeviceModel {
 public:
  struct Counts {
    uint64_t written_bytes = 0, admitted = 0, refused = 0, dropped = 0, kept = 0, reclaimed = 0;
  };

  explicit DeviceModel(const ModelOptions& options)
      : record_bytes_(record_bytes(options.block_bytes)),
        budget_(options.write_bytes_per_s, 0),
        random_(options.seed) {
    // Simulated blocks can be large, because each stands for several of an engine: then segments are, too.
    const uint64_t several = std::min(10 * record_bytes_, options.capacity_bytes / 32);
    segment_bytes_ =
        std::max({segment_bytes_for(options.capacity_bytes), several, record_bytes_ + 3 * kPageBytes});
    segments_max_ = options.capacity_bytes / segment_bytes_;
  }

  bool contains(uint64_t id) const { return blocks_.contains(id); }
  uint64_t blocks() const { return blocks_.size(); }
  // It was asked for.
  void touch(uint64_t id) {
    const auto found = blocks_.find(id);
    if (found != blocks_.end() && found->second.hits < 255) ++found->second.hits;
  }
  void discard(uint64_t id) { blocks_.erase(id); }
  // Memory evicts the block. Appends to `lost` what the disk gives up for it; whether it has the block
  // afterwards says contains(). `hits`: reads since the block came into memory; `chance`: of another use,
  // below 0: unknown.
  void offer(uint64_t id, uint32_t hits, double chance, double now_s, std::vector<uint64_t>& lost) {
    if (contains(id)) return;
    const auto now_ms = static_cast<uint64_t>(now_s * 1000);
    const double draw = static_cast<double>(random_() >> 11) * 0x1p-53;
    if (!worth_writing({hits, false, chance}, budget_.slack(now_ms), draw)) {
      ++counts_.refused;
      return;
    }
    if (!budget_.allows(record_bytes_, now_ms) || per_segment() == 0 || segments_max_ <= kFreeSegments) {
      ++counts_.dropped;
      return;
    }
    budget_.spend(record_bytes_);
    append(id, 0);
    ++counts_.admitted;
    reclaim(lost);
  }
  const Counts& counts() const { return counts_; }

 private:
  static constexpr size_t kFreeSegments = 2;  // as a device keeps them
  struct Place {
    uint64_t sequence = 0;
    uint8_t hits = 0;
  };
  struct Segment {
    uint64_t sequence = 0;
    std::vector<uint64_t> ids;
  };

  uint64_t per_segment() const {
    return (segment_bytes_ - 2 * kPageBytes) / (record_bytes_ + kFooterEntryBytes);
  }
  void append(uint64_t id, uint8_t hits) {
    if (segments_.empty() || segments_.back().ids.size() >= per_segment())
      segments_.push_back({++sequence_, {}});
    segments_.back().ids.push_back(id);
    blocks_[id] = {segments_.back().sequence, hits};
    counts_.written_bytes += record_bytes_;
  }
  // The oldest segment: what was read moves on, the rest is lost.
  void reclaim(std::vector<uint64_t>& lost) {
    while (segments_.size() + kFreeSegments > segments_max_) {
      const Segment oldest = std::move(segments_.front());
      segments_.pop_front();
      uint64_t kept_bytes = 0;
      for (const uint64_t id : oldest.ids) {
        const auto found = blocks_.find(id);
        if (found == blocks_.end() || found->second.sequence != oldest.sequence) continue;
        if (worth_keeping(found->second.hits, kept_bytes, record_bytes_, segment_bytes_)) {
          kept_bytes += record_bytes_;
          append(id, 0);
          ++counts_.kept;
          continue;
        }
        blocks_.erase(found);
        ++counts_.reclaimed;
        lost.push_back(id);
      }
    }
  }

  const uint64_t record_bytes_;
  uint64_t segment_bytes_ = 0, segments_max_ = 0, sequence_ = 0;
  WriteBudget budget_;
  std::mt19937_64 random_;
  std::deque<Segment> segments_;  // oldest first
  std::unordered_map<uint64_t, Place> blocks_;
  Counts counts_;
};

}  // namespace mooncache::store::disk

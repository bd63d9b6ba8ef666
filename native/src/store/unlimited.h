// What a memory without limit would have found, beside what was found: an estimate from a sample of blocks,
// in bounded memory.
//
// A block that was ever here is one that an unlimited memory would still have. Which blocks are in the sample
// depends on their hash alone, so a block is in it at its commit and at each question for it, or never. When
// the sample is full, half of the hashes leave it, and those that stay count twice as much: the fixed-size
// variant of SHARDS (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST'15), which found the
// error of 8,192 samples to be below one hundredth.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <unordered_set>

#include "mooncache/store.h"

namespace mooncache::store {

class Unlimited {
 public:
  static constexpr size_t kSampleMax = 8192;
  // `found`: the block is here, and so is all that was here of its chain before it.
  struct Asked {
    uint64_t hash = 0;
    bool found = false;
  };

  explicit Unlimited(size_t sample_max = kSampleMax) : sample_max_(sample_max) {
    sample_.reserve(sample_max + 1);
  }
  // Without a lock: a hash that leaves the sample meanwhile is looked at again under it.
  bool samples(uint64_t hash) const { return within(hash, rate_.load(std::memory_order_relaxed)); }
  void stored(uint64_t hash) {
    if (!samples(hash)) return;
    const std::lock_guard lock(mutex_);
    add(hash);
  }
  // On demand: an unlimited memory would not have it either.
  void removed(uint64_t hash) {
    if (!samples(hash)) return;
    const std::lock_guard lock(mutex_);
    sample_.erase(hash);
  }
  void asked(std::span<const Asked> blocks) {
    if (blocks.empty()) return;
    const std::lock_guard lock(mutex_);
    for (const Asked& block : blocks) {
      const uint64_t rate = rate_.load(std::memory_order_relaxed);
      if (!within(block.hash, rate)) continue;
      const uint64_t weight = kAll / rate;
      if (block.found) add(block.hash);  // a start found it on a disk
      count_.asked += weight;
      count_.found += block.found ? weight : 0;
      count_.unlimited += block.found || sample_.contains(block.hash) ? weight : 0;
    }
  }
  StoreStats::Sampled counts() const {
    const std::lock_guard lock(mutex_);
    return count_;
  }
  size_t size() const {
    const std::lock_guard lock(mutex_);
    return sample_.size();
  }
  // Of the set's nodes and buckets, about.
  uint64_t memory_bytes() const {
    const std::lock_guard lock(mutex_);
    return sizeof *this + sample_.size() * 4 * sizeof(uint64_t) + sample_.bucket_count() * sizeof(void*);
  }

 private:
  static constexpr uint64_t kAll = 1ull << 24;
  // The bits that neither the shards nor the ghosts use.
  static bool within(uint64_t hash, uint64_t rate) { return (hash >> 40) < rate; }
  void add(uint64_t hash) {
    uint64_t rate = rate_.load(std::memory_order_relaxed);
    if (!within(hash, rate)) return;
    sample_.insert(hash);
    while (sample_.size() > sample_max_ && rate > 1) {
      rate /= 2;
      rate_.store(rate, std::memory_order_relaxed);
      std::erase_if(sample_, [rate](uint64_t kept) { return !within(kept, rate); });
    }
  }

  const size_t sample_max_;
  std::atomic<uint64_t> rate_{kAll};  // hashes of kAll that are in the sample
  mutable std::mutex mutex_;          // leaf
  std::unordered_set<uint64_t> sample_;
  StoreStats::Sampled count_;
};

}  // namespace mooncache::store

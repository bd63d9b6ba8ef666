// What each tenant uses and may use. A leaf lock. Tenants that hold nothing and have no limits are forgotten
// beyond kRemembered, the figures of such go into those of `rest`; so the table is as large as the set of
// tenants that matter.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "mooncache/store.h"
#include "store/shares.h"

namespace mooncache::store {

class Tenants {
 public:
  static constexpr size_t kRemembered = 4096;
  enum class Charge { kOk, kOverQuota, kNeverFits };

  Charge charge(TenantId tenant, uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    Use& use = uses_[tenant];
    const uint64_t quota = use.seen.limits.memory.quota_bytes;
    const bool over = quota != 0 && use.seen.bytes + bytes > quota;
    if (!over) {
      use.seen.bytes += bytes;
      return Charge::kOk;
    }
    return bytes > quota ? Charge::kNeverFits : Charge::kOverQuota;
  }
  // What is there already, whatever the quota says.
  void adopt(TenantId tenant, uint64_t bytes, uint64_t blocks) {
    const std::lock_guard lock(mutex_);
    TenantUsage& seen = uses_[tenant].seen;
    seen.bytes += bytes;
    seen.blocks += blocks;
  }
  void give_back(TenantId tenant, uint64_t bytes);
  void count_block(TenantId tenant, bool added) {
    const std::lock_guard lock(mutex_);
    uses_[tenant].seen.blocks += added ? uint64_t{1} : ~uint64_t{0};
  }
  // Adds to one of the figures that only grow, and to another one the bytes.
  void count(TenantId tenant, uint64_t TenantUsage::*events, uint64_t TenantUsage::*bytes, uint64_t size) {
    const std::lock_guard lock(mutex_);
    TenantUsage& seen = uses_[tenant].seen;
    ++(seen.*events);
    if (bytes != nullptr) seen.*bytes += size;
  }
  // Whether the tenant may move bytes now, and that it does. Without any limit they cost no lock.
  bool admits(TenantId tenant, uint64_t now_ms);
  void moves(TenantId tenant, uint64_t bytes);

  void set_limits(TenantId tenant, const TenantLimits& limits);
  TenantLimits limits(TenantId tenant) const;
  bool any_share() const { return shares_.load(std::memory_order_relaxed) > 0; }
  bool any_ttl() const { return ttls_.load(std::memory_order_relaxed) > 0; }
  bool any_disk_limit() const { return disk_limits_.load(std::memory_order_relaxed) > 0; }
  // Who is furthest over its share of the memory; false: none is. `except`: they have no block that can go.
  bool furthest_over(const std::vector<TenantId>& except, TenantId* tenant) const;
  bool is_over(TenantId tenant) const;

  // Adds the time since the last call to what each tenant has held.
  void pass_time(uint64_t now_ms, const std::vector<DiskUse>& disk);
  std::vector<TenantUsage> usage() const;
  TenantUsage rest() const {
    const std::lock_guard lock(mutex_);
    return rest_;
  }

 private:
  struct Use {
    TenantUsage seen;
    RateMeter meter;
  };
  using Place = std::unordered_map<TenantId, Use>::iterator;
  void drop_if_unused(Place at);
  void recount();

  mutable std::mutex mutex_;
  std::unordered_map<TenantId, Use> uses_;
  TenantUsage rest_;
  uint64_t passed_ms_ = 0;  // until when pass_time() has counted; 0 = it was not called
  std::atomic<uint32_t> shares_{0}, ttls_{0}, disk_limits_{0}, rates_{0};
};

}  // namespace mooncache::store

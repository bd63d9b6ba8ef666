// What each tenant uses and may use. A leaf lock. A tenant without use and quota is forgotten, so the
// table is as large as the set of tenants that matter.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "mooncache/store.h"

namespace mooncache::store {

class Tenants {
 public:
  enum class Charge { kOk, kOverQuota, kNeverFits };

  Charge charge(TenantId tenant, uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    Use& use = uses_[tenant];
    const bool over = use.quota_bytes != 0 && use.bytes + bytes > use.quota_bytes;
    if (!over) {
      use.bytes += bytes;
      return Charge::kOk;
    }
    return bytes > use.quota_bytes ? Charge::kNeverFits : Charge::kOverQuota;
  }
  void give_back(TenantId tenant, uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto at = uses_.find(tenant);
    if (at == uses_.end()) return;
    at->second.bytes -= bytes;
    drop_if_empty(at);
  }
  void count_block(TenantId tenant, bool added) {
    const std::lock_guard lock(mutex_);
    uses_[tenant].blocks += added ? uint64_t{1} : ~uint64_t{0};
  }
  void set_quota(TenantId tenant, uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    uses_[tenant].quota_bytes = bytes;
    drop_if_empty(uses_.find(tenant));
  }
  std::vector<TenantUsage> usage() const {
    const std::lock_guard lock(mutex_);
    std::vector<TenantUsage> all;
    all.reserve(uses_.size());
    for (const auto& [tenant, use] : uses_) all.push_back({tenant, use.bytes, use.blocks, use.quota_bytes});
    return all;
  }

 private:
  struct Use {
    uint64_t bytes = 0;
    uint64_t blocks = 0;
    uint64_t quota_bytes = 0;
  };
  void drop_if_empty(std::unordered_map<TenantId, Use>::iterator at) {
    const Use& use = at->second;
    if (use.bytes == 0 && use.blocks == 0 && use.quota_bytes == 0) uses_.erase(at);
  }
  mutable std::mutex mutex_;
  std::unordered_map<TenantId, Use> uses_;
};

}  // namespace mooncache::store

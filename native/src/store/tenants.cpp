#include "store/tenants.h"

#include <algorithm>

namespace mooncache::store {

namespace {

// The figures that only grow, of which `rest` keeps the sums.
constexpr uint64_t TenantUsage::*kGrowing[] = {
    &TenantUsage::hits,          &TenantUsage::hit_bytes,      &TenantUsage::misses,
    &TenantUsage::stored_blocks, &TenantUsage::stored_bytes,   &TenantUsage::evicted_blocks,
    &TenantUsage::evicted_bytes, &TenantUsage::down_blocks,    &TenantUsage::down_bytes,
    &TenantUsage::up_blocks,     &TenantUsage::up_bytes,       &TenantUsage::refused,
    &TenantUsage::throttled,     &TenantUsage::expired_blocks, &TenantUsage::byte_ms,
    &TenantUsage::disk_byte_ms,
};

bool is_limited(const TenantLimits& limits) {
  return limits != TenantLimits{};
}

}  // namespace

void Tenants::drop_if_unused(Place at) {
  const TenantUsage& seen = at->second.seen;
  if (uses_.size() <= kRemembered || seen.bytes != 0 || seen.blocks != 0 || seen.disk_blocks != 0 ||
      is_limited(seen.limits))
    return;
  for (const auto figure : kGrowing) rest_.*figure += seen.*figure;
  uses_.erase(at);
}

void Tenants::give_back(TenantId tenant, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto at = uses_.find(tenant);
  if (at == uses_.end()) return;
  at->second.seen.bytes -= bytes;
  drop_if_unused(at);
}

bool Tenants::admits(TenantId tenant, uint64_t now_ms) {
  if (rates_.load(std::memory_order_relaxed) == 0) return true;
  const std::lock_guard lock(mutex_);
  const auto at = uses_.find(tenant);
  if (at == uses_.end()) return true;
  Use& use = at->second;
  if (use.meter.admits(use.seen.limits.bytes_per_s, now_ms)) return true;
  ++use.seen.throttled;
  return false;
}

void Tenants::moves(TenantId tenant, uint64_t bytes) {
  if (rates_.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard lock(mutex_);
  const auto at = uses_.find(tenant);
  if (at != uses_.end() && at->second.seen.limits.bytes_per_s != 0) at->second.meter.take(bytes);
}

void Tenants::set_limits(TenantId tenant, const TenantLimits& limits) {
  const std::lock_guard lock(mutex_);
  Use& use = uses_[tenant];
  if (use.seen.limits.bytes_per_s != limits.bytes_per_s) use.meter = {};
  use.seen.limits = limits;
  recount();
  drop_if_unused(uses_.find(tenant));
}

void Tenants::recount() {
  uint32_t shares = 0, ttls = 0, disk_limits = 0, rates = 0;
  for (const auto& [tenant, use] : uses_) {
    const TenantLimits& limits = use.seen.limits;
    shares += limits.memory.share_bytes != 0 ? 1 : 0;
    ttls += limits.ttl_ms != 0 ? 1 : 0;
    disk_limits += limits.disk != TierLimits{} ? 1 : 0;
    rates += limits.bytes_per_s != 0 ? 1 : 0;
  }
  shares_.store(shares, std::memory_order_relaxed);
  ttls_.store(ttls, std::memory_order_relaxed);
  disk_limits_.store(disk_limits, std::memory_order_relaxed);
  rates_.store(rates, std::memory_order_relaxed);
}

TenantLimits Tenants::limits(TenantId tenant) const {
  const std::lock_guard lock(mutex_);
  const auto at = uses_.find(tenant);
  return at == uses_.end() ? TenantLimits{} : at->second.seen.limits;
}

bool Tenants::furthest_over(const std::vector<TenantId>& except, TenantId* tenant) const {
  const std::lock_guard lock(mutex_);
  uint64_t most = 0;
  for (const auto& [id, use] : uses_) {
    const uint64_t over = over_share(use.seen.bytes, use.seen.limits.memory.share_bytes);
    if (over == 0 || over < most || (over == most && id > *tenant)) continue;
    if (std::find(except.begin(), except.end(), id) != except.end()) continue;
    most = over;
    *tenant = id;
  }
  return most > 0;
}

bool Tenants::is_over(TenantId tenant) const {
  const std::lock_guard lock(mutex_);
  const auto at = uses_.find(tenant);
  return at != uses_.end() &&
         over_share(at->second.seen.bytes, at->second.seen.limits.memory.share_bytes) > 0;
}

void Tenants::pass_time(uint64_t now_ms, const std::vector<DiskUse>& disk) {
  const std::lock_guard lock(mutex_);
  const uint64_t passed_ms = passed_ms_ != 0 && now_ms > passed_ms_ ? now_ms - passed_ms_ : 0;
  for (auto& [tenant, use] : uses_) {
    use.seen.byte_ms += use.seen.bytes * passed_ms;
    use.seen.disk_byte_ms += use.seen.disk_bytes * passed_ms;
    use.seen.disk_bytes = use.seen.disk_blocks = 0;
  }
  for (const DiskUse& one : disk) {
    if (one.blocks == 0) continue;
    TenantUsage& seen = uses_[one.tenant].seen;
    seen.disk_bytes += one.bytes;
    seen.disk_blocks += one.blocks;
  }
  passed_ms_ = std::max(passed_ms_, now_ms);
}

std::vector<TenantUsage> Tenants::usage() const {
  const std::lock_guard lock(mutex_);
  std::vector<TenantUsage> all;
  all.reserve(uses_.size());
  for (const auto& [tenant, use] : uses_) {
    all.push_back(use.seen);
    all.back().tenant = tenant;
  }
  return all;
}

}  // namespace mooncache::store

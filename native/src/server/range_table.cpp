#include "server/range_table.h"

#include <algorithm>
#include <utility>

namespace mooncache::server {

namespace {

constexpr uint64_t kAddressStep = 1ull << 40;  // regions get addresses of their own at multiples of it
const std::string kEveryPeer = "*";

bool is_for(const RangeGrant& grant, const std::string& peer) {
  return grant.peer == kEveryPeer || grant.peer == peer;
}

// Whether the grants to `peer` allow [offset, offset + length), one of them as a whole.
bool allows(const MemoryRegion& region, const std::string& peer, uint64_t offset, uint64_t length,
            bool write) {
  return std::ranges::any_of(region.grants, [&](const RangeGrant& grant) {
    return is_for(grant, peer) && (write ? grant.write : grant.read) && offset >= grant.offset &&
           length <= grant.length && offset - grant.offset <= grant.length - length;
  });
}

uint8_t described(const MemoryRegion& region, const std::string& peer) {
  using Described = wire::DescribedRegion;
  uint8_t flags = region.mappable() ? Described::kMappable : 0;
  for (const RangeGrant& grant : region.grants) {
    if (!peer.empty() && !is_for(grant, peer)) continue;
    if (grant.read) flags |= Described::kReadable;
    if (grant.write) flags |= Described::kWritable;
  }
  return flags;
}

// Length 0: up to the end.
Status check_grant(RangeGrant& grant, uint64_t size) {
  if (grant.peer != kEveryPeer && !wire::tenant_name_valid(grant.peer))
    return {Code::kInvalidArgument, "'" + grant.peer + "' is not a name of a peer; '*' means every peer"};
  if (grant.length == 0 && grant.offset < size) grant.length = size - grant.offset;
  if (grant.length == 0 || grant.length > size || grant.offset > size - grant.length)
    return {Code::kInvalidArgument,
            "the grant is not inside the region of " + std::to_string(size) + " bytes"};
  return Status::ok();
}

}  // namespace

RangeUse::~RangeUse() {
  const std::lock_guard lock(table_.mutex_);
  table_.uses_.erase(at_);
  table_.changed_.notify_all();
}

Result<uint64_t> RangeTable::add(std::unique_ptr<MemoryRegion> region) {
  const uint64_t size = region->memory.size;
  if (size == 0) return {Code::kInvalidArgument, "a region has at least one byte"};
  if (region->label.size() > wire::kMaxLabelBytes)
    return {Code::kInvalidArgument, "a label has " + std::to_string(wire::kMaxLabelBytes) + " bytes at most"};
  for (RangeGrant& grant : region->grants)
    if (Status good = check_grant(grant, size); !good) return good;
  const std::lock_guard lock(mutex_);
  if (regions_.size() >= wire::kMaxRegions)
    return {Code::kLimitExceeded, "an engine has " + std::to_string(wire::kMaxRegions) + " regions at most"};
  if (region->base == 0) {
    region->base = next_base_;
    next_base_ += (size / kAddressStep + 1) * kAddressStep;
  }
  const uint64_t base = region->base;
  if (base > UINT64_MAX - size) return {Code::kInvalidArgument, "the region ends beyond all addresses"};
  const auto after = regions_.upper_bound(base);
  const bool overlaps = (after != regions_.end() && after->first < base + size) || find(base) != nullptr;
  if (overlaps) return {Code::kAlreadyExists, "the memory overlaps with a registered region"};
  regions_.emplace(base, std::move(region));
  return base;
}

std::shared_ptr<MemoryRegion> RangeTable::find(uint64_t address) const {
  auto after = regions_.upper_bound(address);
  if (after == regions_.begin()) return nullptr;
  const auto& region = std::prev(after)->second;
  return address - region->base < region->memory.size ? region : nullptr;
}

Status RangeTable::wait_unused(std::unique_lock<std::mutex>& lock, const MemoryRegion& region,
                               const std::string& peer, Deadline deadline) {
  const auto unused = [&] {
    bool none = true;
    for (RangeUse* use : uses_) {
      const bool of_peer = peer == kEveryPeer || use->peer_ == peer;
      const bool of_region =
          std::ranges::any_of(use->regions_, [&](const auto& used) { return used.get() == &region; });
      if (!of_peer || !of_region) continue;
      use->revoked_.store(true, std::memory_order_release);
      none = false;
    }
    return none;
  };
  while (!unused()) {
    if (deadline.expired())
      return {Code::kDeadlineExceeded,
              "a peer still uses the memory: do not give it to others before this call succeeds, or before "
              "the engine is closed"};
    changed_.wait_until(lock, std::min(deadline.at, Deadline::after_ms(1000).at));
  }
  return Status::ok();
}

Status RangeTable::remove(uint64_t base, Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto at = regions_.find(base);
  if (at == regions_.end()) return {Code::kNotFound, "no region is registered at this address"};
  const auto region = at->second;
  region->grants.clear();
  if (Status unused = wait_unused(lock, *region, kEveryPeer, deadline); !unused) return unused;
  regions_.erase(base);
  return Status::ok();
}

Status RangeTable::grant(uint64_t base, RangeGrant grant) {
  const std::lock_guard lock(mutex_);
  const auto at = regions_.find(base);
  if (at == regions_.end()) return {Code::kNotFound, "no region is registered at this address"};
  if (Status good = check_grant(grant, at->second->memory.size); !good) return good;
  if (at->second->grants.size() >= wire::kMaxItems)
    return {Code::kLimitExceeded, "the region has as many grants as it may; revoke some"};
  at->second->grants.push_back(std::move(grant));
  return Status::ok();
}

Status RangeTable::revoke(uint64_t base, const std::string& peer, Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto at = regions_.find(base);
  if (at == regions_.end()) return {Code::kNotFound, "no region is registered at this address"};
  const auto region = at->second;
  const bool all = peer == kEveryPeer;
  const bool others =
      std::ranges::any_of(region->grants, [&](const RangeGrant& grant) { return grant.peer == kEveryPeer; });
  if (!all && others)
    return {Code::kInvalidArgument, "every peer has a grant on this region: revoke '*' and grant by name"};
  std::erase_if(region->grants, [&](const RangeGrant& grant) { return all || grant.peer == peer; });
  return wait_unused(lock, *region, peer, deadline);
}

size_t RangeTable::uses() const {
  const std::lock_guard lock(mutex_);
  return uses_.size();
}

std::unique_ptr<RangeUse> RangeTable::new_use(const std::string& peer) {
  auto use = std::make_unique<RangeUse>(*this, peer);
  use->at_ = uses_.insert(uses_.end(), use.get());
  return use;
}

Result<std::unique_ptr<RangeUse>> RangeTable::begin(const std::string& peer,
                                                    std::span<const wire::EngineRange> ranges, bool write,
                                                    std::vector<std::byte*>& places) {
  places.clear();
  places.reserve(ranges.size());
  std::vector<std::shared_ptr<MemoryRegion>> regions;
  const std::lock_guard lock(mutex_);
  for (const wire::EngineRange& range : ranges) {
    std::shared_ptr<MemoryRegion> region = regions.empty() ? nullptr : regions.back();
    if (!region || range.address < region->base || range.address - region->base >= region->memory.size)
      region = find(range.address);
    if (!region) return {Code::kNotFound, "a range is in no registered region: it may be revoked by now"};
    const uint64_t offset = range.address - region->base;
    if (range.length > region->memory.size - offset)
      return {Code::kInvalidArgument, "a range goes beyond the end of its region"};
    if (!allows(*region, peer, offset, range.length, write)) {
      return {Code::kPermissionDenied, "peer '" + peer + "' may not " + (write ? "write" : "read") +
                                           " a range of region '" + region->label + "'"};
    }
    places.push_back(region->memory.data + offset);
    if (std::ranges::find(regions, region) == regions.end()) regions.push_back(std::move(region));
  }
  auto use = new_use(peer);
  use->regions_ = std::move(regions);
  return use;
}

Result<std::unique_ptr<RangeUse>> RangeTable::map(const std::string& peer, uint64_t address, bool& writable) {
  const std::lock_guard lock(mutex_);
  const auto region = find(address);
  if (!region) return {Code::kNotFound, "no region is registered at this address"};
  if (!region->mappable())
    return {Code::kUnsupported,
            "the region's memory cannot be mapped: its owner did not allocate it as such"};
  if (!allows(*region, peer, 0, region->memory.size, false))
    return {Code::kPermissionDenied, "only who may read the whole region may map it"};
  writable = allows(*region, peer, 0, region->memory.size, true);
  auto use = new_use(peer);
  use->regions_.push_back(region);
  return use;
}

Status RangeTable::notify(PeerNotice notice) {
  const std::lock_guard lock(mutex_);
  if (notices_.size() >= kMaxNotices || notice.bytes.size() > kMaxNoticeBytes - notice_bytes_)
    return {Code::kBackPressure, "the engine has not taken its notifications; try again later"};
  notice_bytes_ += notice.bytes.size();
  notices_.push_back(std::move(notice));
  changed_.notify_all();
  return Status::ok();
}

std::vector<PeerNotice> RangeTable::take_notices(size_t most, Deadline deadline) {
  std::unique_lock lock(mutex_);
  while (notices_.empty() && !closed_ && !deadline.expired())
    changed_.wait_until(lock, std::min(deadline.at, Deadline::after_ms(1000).at));
  std::vector<PeerNotice> taken;
  while (taken.size() < most && !notices_.empty()) {
    notice_bytes_ -= notices_.front().bytes.size();
    taken.push_back(std::move(notices_.front()));
    notices_.pop_front();
  }
  return taken;
}

void RangeTable::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void RangeTable::set_endpoint(wire::EngineDescriptor endpoint) {
  const std::lock_guard lock(mutex_);
  endpoint_ = std::move(endpoint);
}

std::vector<std::byte> RangeTable::describe(const std::string& peer) const {
  const std::lock_guard lock(mutex_);
  wire::EngineDescriptor descriptor = endpoint_;
  constexpr uint8_t kUsable = wire::DescribedRegion::kReadable | wire::DescribedRegion::kWritable;
  for (const auto& [base, region] : regions_) {
    const uint8_t flags = described(*region, peer);
    if (peer.empty() || (flags & kUsable) != 0)
      descriptor.regions.push_back({base, region->memory.size, flags, region->label});
  }
  Writer out;
  descriptor.encode(out);
  return out.take();
}

}  // namespace mooncache::server

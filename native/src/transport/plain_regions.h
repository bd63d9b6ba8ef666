// The regions of a transport whose links need none: the answers of one whose device has to know the memory,
// so that no caller has to ask which of them it talks to. Each registration has a handle of its own, also one
// of memory that is registered already; memory that the transport cannot reach is refused.
#pragma once

#include <mutex>
#include <set>

#include "mooncache/transport.h"

namespace mooncache {

class PlainRegions {
 public:
  Result<RegionHandle> add(const Region& region) {
    if (region.memory.data == nullptr || region.memory.size == 0) {
      return {Code::kInvalidArgument, "a region has at least one byte"};
    }
    if (region.kind != MemoryKind::kHost) {
      return {Code::kTransportUnavailable, "device memory unavailable, because this transport copies bytes"};
    }
    const std::lock_guard lock(mutex_);
    handles_.insert(next_);
    return next_++;
  }
  Status remove(RegionHandle handle) {
    const std::lock_guard lock(mutex_);
    if (handles_.erase(handle) == 0) return {Code::kInvalidArgument, "no such region"};
    return Status::ok();
  }

 private:
  std::mutex mutex_;
  std::set<RegionHandle> handles_;
  RegionHandle next_ = 1;
};

}  // namespace mooncache

// The memory of a store as devices of RDMA reach it. Only code that opens blocks to devices needs it: the
// store itself moves bytes by copies. It lives as long as its store.
#pragma once

#include <algorithm>
#include <string>

#include "mooncache/bytes.h"
#include "mooncache/store.h"
#include "store/arena_memory.h"

namespace mooncache {

class ArenaView {
 public:
  ArenaView(store::ArenaMemory& first, uint64_t capacity_bytes)
      : first_(first), capacity_bytes_(capacity_bytes) {}

  // Exports a GPU's memory at the first call.
  DeviceArena device_arena() { return first_.device_arena(); }
  // Devices have written into a reservation: call it before its commit. What a hanging GPU answers.
  Status flush_device_writes() { return first_.flush_device_writes(); }
  // The first bytes of the first arena (none when it is not addressable), to try what else may be done with
  // such memory; they may be in use.
  Slice sample() const {
    constexpr uint64_t kSampleBytes = 2 << 20;
    if (first_.data() == nullptr) return {};
    return {first_.data(), static_cast<size_t>(std::min(kSampleBytes, capacity_bytes_))};
  }

 private:
  store::ArenaMemory& first_;
  const uint64_t capacity_bytes_;
};

}  // namespace mooncache

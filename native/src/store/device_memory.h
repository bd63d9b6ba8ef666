// An arena in the memory of a GPU that the processor cannot address. Every byte goes through pinned buffers:
// while one half of a buffer is on its way over the bus, the other one is filled or emptied.
//
// What it promises: a copy that says OK is through when it returns, also for other threads; after a device
// has failed, every copy fails at once, so that no caller waits for it twice, until the device has ended all
// commands and moved a byte again.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "mooncache/gpu.h"
#include "store/arena_memory.h"

namespace mooncache::store {

class DeviceMemory final : public ArenaMemory {
 public:
  // TRANSPORT_UNAVAILABLE with "CUDA unavailable, because …", NO_SPACE when the device has no room.
  static Result<std::unique_ptr<DeviceMemory>> open(int ordinal, uint64_t size_bytes,
                                                    const std::string& driver = "");
  ~DeviceMemory() override;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const override { return nullptr; }
  uint64_t size_bytes() const override { return info_.size_bytes; }
  Status copy_in(uint64_t offset, ConstSlice from) override;
  Status copy_out(uint64_t offset, Slice to) override;
  ArenaInfo info() const override { return info_; }
  Tier tier() const override { return Tier::kHbm; }
  uint64_t lost_bytes() override;
  DeviceArena device_arena() override;
  Status flush_device_writes() override;

 private:
  // A pinned pair of buffers; one copy at a time.
  struct Lane {
    std::mutex mutex;
    std::unique_ptr<GpuStager> stager;
  };
  static constexpr size_t kLanes = 4;

  DeviceMemory() = default;
  std::unique_lock<std::mutex> lock_lane(Lane*& lane);
  template <typename Start, typename Finish>
  Status pipeline(GpuStager& stager, uint64_t size, const Start& start, const Finish& finish);
  template <typename Start, typename Finish>
  Status moved(uint64_t offset, uint64_t size, const Start& start, const Finish& finish);
  Status judged(GpuStager& stager, Status status);
  void try_again();
  Status gone() const;

  ArenaInfo info_;
  std::shared_ptr<GpuDevice> device_;
  uint64_t address_ = 0;
  std::array<Lane, kLanes> lanes_;
  std::atomic<uint32_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex again_mutex_;
  Deadline again_ = Deadline::after_ms(0);
  std::mutex export_mutex_;
  DeviceArena exported_;
};

// For StoreConfig::open_arena. `driver`: "" = the system's.
inline auto device_arena(int ordinal, std::string driver = "") {
  return [ordinal, driver = std::move(driver)](uint64_t size_bytes) -> Result<std::unique_ptr<ArenaMemory>> {
    auto memory = DeviceMemory::open(ordinal, size_bytes, driver);
    if (!memory) return memory.status();
    return std::unique_ptr<ArenaMemory>(std::move(*memory));
  };
}

}  // namespace mooncache::store

// Checksums of device memory, computed where it lies, so that blocks may go out of and into it in place.
//
// The invariant: nothing here waits. What a device was asked for is looked at until it is there, and who
// stops looking leaves the stager to the device's quarantine: its kernel reads the caller's memory and writes
// none.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "mooncache/gpu.h"

namespace mooncache {

// A GPU as one client uses it: stagers that have nothing to do, and what was said about the ways to it.
// Thread-safe.
class DeviceSums {
 public:
  explicit DeviceSums(std::shared_ptr<GpuDevice> gpu) : gpu_(std::move(gpu)) {}
  GpuDevice& gpu() const { return *gpu_; }

  Result<std::unique_ptr<GpuStager>> acquire();
  void release(std::unique_ptr<GpuStager> stager);

  // How devices of RDMA reach its memory, or "staged, because …". `only_first`: only where nothing is known
  // yet.
  void set_route(std::string how, bool only_first = false);
  std::string route() const;

 private:
  const std::shared_ptr<GpuDevice> gpu_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<GpuStager>> idle_;
  std::string route_;
};

// The checksums of some blocks, under way or not.
class SumsUnderWay {
 public:
  // `blocks`: how many of the slices each block has, no block without a byte.
  void start(DeviceSums& device, std::span<const DeviceSlice> slices, std::span<const uint32_t> blocks);
  // The CRC-32C of each block once they are there, or the device's error; nothing before.
  std::optional<Result<std::vector<uint32_t>>> look();
  // How long to sleep before the next look: not at all for as long as a kernel may take.
  int patience_ms() const;

 private:
  DeviceSums* device_ = nullptr;
  std::unique_ptr<GpuStager> stager_;
  Status failed_;
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace mooncache

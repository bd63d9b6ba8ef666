#include "client/device_sums.h"

namespace mooncache {

namespace {

constexpr size_t kIdleMax = 8;  // stagers of calls that ran at the same time
constexpr auto kNoSleep = std::chrono::milliseconds(2);

}  // namespace

Result<std::unique_ptr<GpuStager>> DeviceSums::acquire() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      auto stager = std::move(idle_.back());
      idle_.pop_back();
      return stager;
    }
  }
  return gpu_->make_stager(kNoPinnedBytes, 1);
}

void DeviceSums::release(std::unique_ptr<GpuStager> stager) {
  const std::lock_guard lock(mutex_);
  if (idle_.size() < kIdleMax) idle_.push_back(std::move(stager));
}

void DeviceSums::set_route(std::string how, bool only_first) {
  const std::lock_guard lock(mutex_);
  if (!only_first || route_.empty()) route_ = std::move(how);
}

std::string DeviceSums::route() const {
  const std::lock_guard lock(mutex_);
  return route_;
}

void SumsUnderWay::start(DeviceSums& device, std::span<const DeviceSlice> slices,
                         std::span<const uint32_t> blocks) {
  device_ = &device;
  begun_ = std::chrono::steady_clock::now();
  auto stager = device.acquire();
  failed_ = stager.status();
  if (!stager) return;
  stager_ = std::move(*stager);
  failed_ = stager_->start_crc(0, slices, blocks);
  if (!failed_) stager_.reset();
}

std::optional<Result<std::vector<uint32_t>>> SumsUnderWay::look() {
  if (!failed_) return Result<std::vector<uint32_t>>(failed_);
  auto crcs = stager_->wait(0, Deadline::after_ms(0));
  if (!crcs && crcs.code() == Code::kDeadlineExceeded) return std::nullopt;
  if (crcs)
    device_->release(std::move(stager_));
  else
    stager_.reset();
  return crcs;
}

int SumsUnderWay::patience_ms() const {
  return std::chrono::steady_clock::now() - begun_ < kNoSleep ? 0 : 1;
}

}  // namespace mooncache

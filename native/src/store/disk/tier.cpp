#include "store/disk/tier.h"

#include <utility>

namespace mooncache::store::disk {

Result<std::unique_ptr<SsdTier>> SsdTier::open(std::vector<DeviceOptions> options, Memory& memory) {
  auto tier = std::make_unique<SsdTier>();
  for (DeviceOptions& one : options) {
    one.number = static_cast<uint32_t>(tier->devices_.size());
    auto device = Device::open(std::move(one), memory);
    if (!device && device.code() == Code::kConfigInvalid) return device.status();
    if (!device) memory.log(40, "ssd_unavailable", device.status().message + "; the node goes on without it");
    tier->devices_.push_back(device ? std::move(*device) : nullptr);
  }
  return tier;
}

uint64_t SsdTier::walk(uint64_t cursor, uint32_t limit, const Device::Visit& visit) const {
  uint64_t number = cursor >> 32;
  if (number >= devices_.size()) return 0;
  const Device* device = devices_[number].get();
  const uint64_t next = device == nullptr ? 0 : device->walk(cursor & 0xffffffffu, limit, visit);
  if (next != 0) return number << 32 | next;
  return ++number < devices_.size() ? number << 32 : 0;
}

void SsdTier::close() {
  for (const auto& device : devices_) {
    if (device != nullptr) device->close();
  }
}

DeviceStats SsdTier::stats() const {
  DeviceStats sum;
  for (const auto& device : devices_) {
    if (device == nullptr) continue;
    const DeviceStats one = device->stats();
    for (const auto& [name, field] : kDeviceCounters) sum.*field += one.*field;
  }
  return sum;
}

}  // namespace mooncache::store::disk

// The disks of a node: each block belongs to one of them, by its key, so that a disk that is lost costs its
// share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "store/disk/device.h"

namespace mooncache::store::disk {

class SsdTier {
 public:
  // A disk that broke is left out, and the log says so; what is wrong with the configuration refuses the
  // start.
  static Result<std::unique_ptr<SsdTier>> open(std::vector<DeviceOptions> options, Memory& memory);

  static uint32_t device_of(TenantId tenant, const Key& key, uint32_t devices) {
    return static_cast<uint32_t>((key.word(1) ^ key.word(2) ^ tenant) % devices);
  }
  std::optional<Device::Found> find(TenantId tenant, const Key& key) const {
    const Device* device = of(tenant, key);
    return device == nullptr ? std::nullopt : device->find(tenant, key);
  }
  void touch(TenantId tenant, const Key& key) {
    if (Device* device = of(tenant, key); device != nullptr) device->touch(tenant, key);
  }
  bool fetch(TenantId tenant, const Key& key, Device::Done done) {
    Device* device = of(tenant, key);
    return device != nullptr && device->fetch(tenant, key, std::move(done));
  }
  std::optional<uint64_t> prefetch(TenantId tenant, const Key& key, uint64_t max_bytes, uint64_t until_ms) {
    Device* device = of(tenant, key);
    return device == nullptr ? 0 : device->prefetch(tenant, key, max_bytes, until_ms);
  }
  bool remove(TenantId tenant, const Key& key, Device::Done done) {
    Device* device = of(tenant, key);
    return device != nullptr && device->remove(tenant, key, std::move(done));
  }
  Code pin(TenantId tenant, const Key& key, uint64_t until_ms, uint64_t now_ms) {
    Device* device = of(tenant, key);
    return device == nullptr ? Code::kNotFound : device->pin(tenant, key, until_ms, now_ms);
  }
  Code unpin(TenantId tenant, const Key& key) {
    Device* device = of(tenant, key);
    return device == nullptr ? Code::kNotFound : device->unpin(tenant, key);
  }
  // What tenants have on all disks; one may be named by several.
  std::vector<DiskUse> uses() const {
    std::vector<DiskUse> all;
    for (const auto& device : devices_) {
      if (device == nullptr) continue;
      const std::vector<DiskUse> uses = device->uses();
      all.insert(all.end(), uses.begin(), uses.end());
    }
    return all;
  }
  uint64_t bytes_of(TenantId tenant) const {
    uint64_t bytes = 0;
    for (const auto& device : devices_) bytes += device == nullptr ? 0 : device->bytes_of(tenant);
    return bytes;
  }
  Result<uint64_t> purge(TenantId tenant, const Key& key) {
    Device* device = of(tenant, key);
    return device == nullptr ? Result<uint64_t>(uint64_t{0}) : device->purge(tenant, key);
  }
  bool sync_purged() {
    bool lasts = true;
    for (const auto& device : devices_) lasts = (device == nullptr || device->sync_purged()) && lasts;
    return lasts;
  }
  // One page of the walk over all disks; the next cursor, 0 at the end.
  uint64_t walk(uint64_t cursor, uint32_t limit, const Device::Visit& visit) const;
  void close();
  DeviceStats stats() const;  // of all together
  uint32_t devices() const { return static_cast<uint32_t>(devices_.size()); }

 private:
  Device* of(TenantId tenant, const Key& key) const {
    return devices_[device_of(tenant, key, devices())].get();
  }
  std::vector<std::unique_ptr<Device>> devices_;  // null: it broke
};

}  // namespace mooncache::store::disk

// What lies below the memory of a node: its disks, and below them the directory that it shares with other
// nodes.
//
// Each block belongs to one disk, by its key, so that a disk that is lost costs its share. In the shared
// directory a node writes one log, its own, which is a device like a disk; what other nodes wrote is only
// read (shared_reader.h), and is not this node's: it is neither listed nor reported.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "store/disk/device.h"
#include "store/disk/shared_reader.h"
#include "store/disk/spool_queue.h"

namespace mooncache::store::disk {

// The shared directory. The log's path is the directory.
struct SharedDirectory {
  DeviceOptions log;
  SharedOptions reader;
  Memory* memory = nullptr;  // of both
  // With `requests`: it is an object store, and the log's path the folder of its spool.
  SpoolOptions spool;
};

class SsdTier {
 public:
  // A disk that broke, or a directory that does not answer, is left out, and the log says so; what is wrong
  // with the configuration refuses the start.
  static Result<std::unique_ptr<SsdTier>> open(std::vector<DeviceOptions> options, Memory& memory,
                                               std::optional<SharedDirectory> shared = {});

  static uint32_t device_of(TenantId tenant, const Key& key, uint32_t devices) {
    return static_cast<uint32_t>((key.word(1) ^ key.word(2) ^ tenant) % devices);
  }
  // On a disk of the node, or in its log of the shared directory.
  std::optional<Device::Found> find(TenantId tenant, const Key& key) const;
  void touch(TenantId tenant, const Key& key) {
    for_both(tenant, key, [&](Device& device) { device.touch(tenant, key); });
  }
  // On its way to one of these: it cannot be read there yet.
  bool is_being_written(TenantId tenant, const Key& key) const {
    const Device* const device = of(tenant, key);
    return (device != nullptr && device->is_being_written(tenant, key)) ||
           (shared_ != nullptr && shared_->is_being_written(tenant, key));
  }
  // Size of a block that another node wrote.
  std::optional<uint64_t> find_of_others(TenantId tenant, const Key& key) const {
    return others_ == nullptr ? std::nullopt : others_->find(tenant, key);
  }
  void forget_of_others(TenantId tenant, const Key& key) {
    if (others_ != nullptr) (void)others_->forget(tenant, key);
  }
  void forget_of_others(TenantId tenant) {
    if (others_ != nullptr) others_->forget(tenant);
  }
  void forget_of_others_by(uint64_t writer) {
    if (others_ != nullptr) others_->forget_by(writer);
  }
  // Where a block of this node's disks comes from.
  Origin origin(TenantId tenant, const Key& key) const;
  bool fetch(TenantId tenant, const Key& key, Device::Done done);
  std::optional<uint64_t> prefetch(TenantId tenant, const Key& key, uint64_t max_bytes, uint64_t until_ms);
  // `done` when the removal lasts wherever the block was.
  bool remove(TenantId tenant, const Key& key, Device::Done done);
  Code pin(TenantId tenant, const Key& key, uint64_t until_ms, uint64_t now_ms);
  Code unpin(TenantId tenant, const Key& key);
  // What tenants have on all disks; one may be named by several.
  std::vector<DiskUse> uses() const;
  uint64_t bytes_of(TenantId tenant) const;
  Result<uint64_t> purge(TenantId tenant, const Key& key);
  bool sync_purged();
  // From a disk into the shared directory.
  void hand_down(const ColdBlock& block, std::vector<std::byte> body);
  void take_back(TenantId tenant, const Key& key);
  // One page of the walk over all disks; the next cursor, 0 at the end.
  uint64_t walk(uint64_t cursor, uint32_t limit, const Device::Visit& visit, bool hidden = false) const;
  // The same for the blocks of one writer.
  uint64_t walk_writer(uint64_t cursor, uint32_t limit, const RecallRequest& request,
                       const Device::VisitWritten& visit) const;
  void close();
  DeviceStats stats() const;  // of all disks together
  bool has_disks() const { return !devices_.empty(); }
  bool has_shared() const { return is_shared_; }
  DeviceStats shared_stats() const { return shared_ == nullptr ? DeviceStats{} : shared_->stats(); }
  SharedStats others_stats() const { return others_ == nullptr ? SharedStats{} : others_->stats(); }
  uint32_t devices() const { return static_cast<uint32_t>(devices_.size()); }

 private:
  Status open_shared(SharedDirectory shared);
  Device* of(TenantId tenant, const Key& key) const {
    return devices_.empty() ? nullptr : devices_[device_of(tenant, key, devices())].get();
  }
  template <typename Act>
  void for_both(TenantId tenant, const Key& key, const Act& act) {
    if (Device* device = of(tenant, key); device != nullptr) act(*device);
    if (shared_ != nullptr) act(*shared_);
  }
  template <typename Act>
  void for_all(const Act& act) const {
    for (const auto& device : devices_) {
      if (device != nullptr) act(*device);
    }
    if (shared_ != nullptr) act(*shared_);
  }
  bool is_shared_ = false;                // configured
  std::unique_ptr<Device> shared_;        // null: there is none, or it did not answer
  std::unique_ptr<SharedReader> others_;  // the same
  // Last: they hand blocks down.
  std::vector<std::unique_ptr<Device>> devices_;  // null: it broke
};

}  // namespace mooncache::store::disk

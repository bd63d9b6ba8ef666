#include "store/disk/tier.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <thread>
#include <utility>

#include "store/disk/object_log.h"

namespace mooncache::store::disk {

namespace {

constexpr auto kFirstAnswer = std::chrono::seconds(5);
constexpr uint64_t kMostObjectBytes = 16 << 20;
constexpr uint32_t kListTimes = 10;  // a listing may take so many times as long as a read
constexpr uint32_t kObjectReaders = 16;

// What stat() says of the directory: 0 or an errno; ETIMEDOUT when it does not answer, and then a thread is
// left behind that waits for it.
int stat_in_time(const std::string& path) {
  auto answer = std::make_shared<std::promise<int>>();
  auto said = answer->get_future();
  std::thread([path, answer] {
    struct stat info {};
    const int error = ::stat(path.c_str(), &info) != 0 ? errno : 0;
    answer->set_value(error != 0 ? error : S_ISDIR(info.st_mode) ? 0 : ENOTDIR);
  }).detach();
  return said.wait_for(kFirstAnswer) == std::future_status::ready ? said.get() : ETIMEDOUT;
}

// Of an object store: the log goes through a spool, those of others are read as objects.
Status use_objects(SharedDirectory& shared) {
  shared.spool.log = shared.reader.own_name;
  shared.spool.node_id = shared.log.node_id;
  if (Status ready = prepare_spool(shared.log.path, shared.spool); !ready) return ready;
  shared.log.sparse = true;
  if (shared.log.segment_bytes == 0)
    shared.log.segment_bytes = std::min(segment_bytes_for(shared.log.capacity_bytes), kMostObjectBytes);
  shared.log.stall_ms = shared.spool.timeout_ms;
  shared.log.open_queue = [spool = shared.spool, allow_uring = shared.log.allow_uring](
                              int fd, std::span<const iovec> buffers) {
    return open_spool_queue(fd, buffers, allow_uring, spool);
  };
  shared.reader.folder = open_object_folder(shared.spool.requests, shared.spool.timeout_ms);
  shared.reader.stall_ms = shared.spool.timeout_ms;
  shared.reader.scan_stall_ms = kListTimes * shared.spool.timeout_ms;
  shared.reader.call_bytes = kMostObjectBytes;
  shared.reader.threads = kObjectReaders;
  return Status::ok();
}

}  // namespace

Result<std::unique_ptr<SsdTier>> SsdTier::open(std::vector<DeviceOptions> options, Memory& memory,
                                               std::optional<SharedDirectory> shared) {
  auto tier = std::make_unique<SsdTier>();
  if (shared) {
    if (Status opened = tier->open_shared(std::move(*shared)); !opened) return opened;
  }
  for (DeviceOptions& one : options) {
    one.number = static_cast<uint32_t>(tier->devices_.size());
    one.hands_down = tier->shared_ != nullptr;
    auto device = Device::open(std::move(one), memory);
    if (!device && device.code() == Code::kConfigInvalid) return device.status();
    if (!device) memory.log(40, "ssd_unavailable", device.status().message + "; the node goes on without it");
    tier->devices_.push_back(device ? std::move(*device) : nullptr);
  }
  return tier;
}

Status SsdTier::open_shared(SharedDirectory shared) {
  is_shared_ = true;
  const std::string folder = shared.log.path;
  const std::string_view unfit = unfit_for_a_name(shared.log.node_id);
  if (!unfit.empty()) {
    return {Code::kConfigInvalid, "the shared directory cannot have a log of the node " + shared.log.node_id +
                                      ": " + std::string(unfit)};
  }
  const int error = stat_in_time(folder);
  if (error == ENOENT || error == ENOTDIR || error == EACCES) {
    return {Code::kConfigInvalid, "the shared directory " + folder + ": " + std::strerror(error)};
  }
  Memory& memory = *shared.memory;
  if (error != 0) {
    memory.log(40, "shared_unavailable",
               folder + ": " + std::strerror(error) + "; the node goes on without it until its next start");
    return Status::ok();
  }
  shared.reader.own_name = shared.log.node_id + std::string(kSharedSuffix);
  shared.log.path = folder + "/" + shared.reader.own_name;
  if (shared.spool.requests != nullptr) {
    if (Status ready = use_objects(shared); !ready) {
      if (ready.code == Code::kConfigInvalid) return ready;
      memory.log(40, "shared_unavailable",
                 ready.message + "; the node goes on without it until its next start");
      return Status::ok();
    }
  }
  auto log = Device::open(std::move(shared.log), memory);
  if (!log && log.code() == Code::kConfigInvalid) return log.status();
  if (!log) memory.log(40, "shared_unavailable", log.status().message + "; the node only reads there");
  if (log) shared_ = std::move(*log);
  if (!shared.reader.folder) shared.reader.folder = open_shared_folder(folder);
  others_ = std::make_unique<SharedReader>(std::move(shared.reader), memory);
  return Status::ok();
}

std::optional<Device::Found> SsdTier::find(TenantId tenant, const Key& key) const {
  if (const Device* device = of(tenant, key); device != nullptr) {
    if (auto found = device->find(tenant, key)) return found;
  }
  auto found = shared_ == nullptr ? std::nullopt : shared_->find(tenant, key);
  if (found) found->tier = Tier::kShared;
  return found;
}

bool SsdTier::fetch(TenantId tenant, const Key& key, Device::Done done) {
  if (Device* device = of(tenant, key); device != nullptr && device->fetch(tenant, key, done)) return true;
  if (shared_ != nullptr && shared_->fetch(tenant, key, done)) return true;
  return others_ != nullptr && others_->fetch(tenant, key, std::move(done));
}

std::optional<uint64_t> SsdTier::prefetch(TenantId tenant, const Key& key, uint64_t max_bytes,
                                          uint64_t until_ms) {
  Device* const device = of(tenant, key);
  if (device != nullptr && device->find(tenant, key))
    return device->prefetch(tenant, key, max_bytes, until_ms);
  if (shared_ != nullptr && shared_->find(tenant, key))
    return shared_->prefetch(tenant, key, max_bytes, until_ms);
  const auto size = find_of_others(tenant, key);
  if (!size) return 0;
  if (*size > max_bytes) return std::nullopt;
  if (!others_->fetch(tenant, key, {}, true)) return 0;
  return *size;
}

bool SsdTier::remove(TenantId tenant, const Key& key, Device::Done done) {
  // From above to below, like a block that is handed down. One more is counted until both were asked.
  struct Lasts {
    explicit Lasts(Device::Done done_in) : done(std::move(done_in)) {}
    Device::Done done;
    std::atomic<uint32_t> left{1};
  };
  const auto lasts = std::make_shared<Lasts>(std::move(done));
  const auto one_less = [lasts] {
    if (lasts->left.fetch_sub(1) == 1 && lasts->done) lasts->done();
  };
  bool was_here = false;
  for_both(tenant, key, [&](Device& device) {
    lasts->left.fetch_add(1);
    const bool removed = device.remove(tenant, key, lasts->done ? one_less : Device::Done{});
    if (!removed) lasts->left.fetch_sub(1);
    was_here = was_here || removed;
  });
  forget_of_others(tenant, key);
  if (was_here) one_less();
  return was_here;
}

Code SsdTier::pin(TenantId tenant, const Key& key, uint64_t until_ms, uint64_t now_ms) {
  Device* const device = of(tenant, key);
  const Code code = device == nullptr ? Code::kNotFound : device->pin(tenant, key, until_ms, now_ms);
  if (code != Code::kNotFound || shared_ == nullptr) return code;
  return shared_->pin(tenant, key, until_ms, now_ms);
}

Code SsdTier::unpin(TenantId tenant, const Key& key) {
  Code code = Code::kNotFound;
  for_both(tenant, key, [&](Device& device) {
    if (device.unpin(tenant, key) == Code::kOk) code = Code::kOk;
  });
  return code;
}

std::vector<DiskUse> SsdTier::uses() const {
  std::vector<DiskUse> all;
  for_all([&](const Device& device) {
    const std::vector<DiskUse> uses = device.uses();
    all.insert(all.end(), uses.begin(), uses.end());
  });
  return all;
}

uint64_t SsdTier::bytes_of(TenantId tenant) const {
  uint64_t bytes = 0;
  for_all([&](const Device& device) { bytes += device.bytes_of(tenant); });
  return bytes;
}

Result<uint64_t> SsdTier::purge(TenantId tenant, const Key& key) {
  uint64_t bytes = 0;
  Status worst;
  for_both(tenant, key, [&](Device& device) {
    const auto purged = device.purge(tenant, key);
    if (purged) {
      bytes += *purged;
    } else {
      worst = purged.status();
    }
  });
  forget_of_others(tenant, key);
  if (!worst) return worst;
  return bytes;
}

bool SsdTier::sync_purged() {
  bool lasts = true;
  for_all([&](Device& device) { lasts = device.sync_purged() && lasts; });
  return lasts;
}

void SsdTier::hand_down(const ColdBlock& block, std::vector<std::byte> body) {
  if (shared_ == nullptr || find_of_others(block.tenant, block.key)) return;
  shared_->take_handed(block, std::move(body));
}

void SsdTier::take_back(TenantId tenant, const Key& key) {
  if (shared_ != nullptr) (void)shared_->remove(tenant, key, {});
}

uint64_t SsdTier::walk(uint64_t cursor, uint32_t limit, const Device::Visit& visit, bool hidden) const {
  uint64_t number = cursor >> 32;
  const uint64_t count = devices_.size() + (shared_ == nullptr ? 0 : 1);
  if (number >= count) return 0;
  const bool is_disk = number < devices_.size();
  const Device* device = is_disk ? devices_[number].get() : shared_.get();
  // What lies on both is named once.
  const auto visit_once = [&](TenantId tenant, const Key& key, uint64_t size, uint32_t hits) {
    const Device* disk = is_disk ? nullptr : of(tenant, key);
    if (disk == nullptr || !disk->find(tenant, key)) visit(tenant, key, size, hits);
  };
  const uint64_t next = device == nullptr ? 0 : device->walk(cursor & 0xffffffffu, limit, visit_once, hidden);
  if (next != 0) return number << 32 | next;
  return ++number < count ? number << 32 : 0;
}

uint64_t SsdTier::walk_writer(uint64_t cursor, uint32_t limit, const RecallRequest& request,
                              const Device::VisitWritten& visit) const {
  uint64_t number = cursor >> 32;
  const uint64_t count = devices_.size() + (shared_ == nullptr ? 0 : 1);
  if (number >= count) return 0;
  const Device* device = number < devices_.size() ? devices_[number].get() : shared_.get();
  const uint64_t next =
      device == nullptr ? 0 : device->walk_writer(cursor & 0xffffffffu, limit, request, visit);
  if (next != 0) return number << 32 | next;
  return ++number < count ? number << 32 : 0;
}

Origin SsdTier::origin(TenantId tenant, const Key& key) const {
  if (const Device* device = of(tenant, key); device != nullptr) {
    if (const auto found = device->origin(tenant, key)) return *found;
  }
  const auto found = shared_ == nullptr ? std::nullopt : shared_->origin(tenant, key);
  return found.value_or(Origin{});
}

// Disks first, which hand blocks down until they are closed.
void SsdTier::close() {
  for_all([](Device& device) { device.close(); });
  if (others_ != nullptr) others_->close();
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

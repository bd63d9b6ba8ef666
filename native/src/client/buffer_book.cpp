#include "client/buffer_book.h"

#include <unistd.h>

#include <algorithm>

#include "client/node.h"

namespace mooncache {

namespace {

constexpr uint64_t kRefusedPauseMs = 5000;

uintptr_t address_of(const Slice& slice) {
  return reinterpret_cast<uintptr_t>(slice.data);
}

}  // namespace

BufferBook::BufferBook(std::shared_ptr<RdmaAccess> rdma, Limits limits, Counters& counters)
    : rdma_(std::move(rdma)), limits_(limits), counters_(counters) {}

BufferBook::~BufferBook() {
  for (auto found = buffers_.begin(); found != buffers_.end(); ++found) {
    if (found->second.state == State::kReady) drop(found);
  }
}

Status BufferBook::add(Slice memory, std::shared_ptr<DeviceSums> device) {
  const uintptr_t begin = address_of(memory);
  if (memory.data == nullptr || memory.size == 0 || memory.size > UINTPTR_MAX - begin)
    return {Code::kInvalidArgument, "a buffer to register has at least one byte"};
  const std::lock_guard lock(mutex_);
  const auto same = buffers_.find(begin);
  if (same != buffers_.end() && same->second.size == memory.size && same->second.device == device) {
    ++same->second.owners;
    return Status::ok();
  }
  const auto above = buffers_.lower_bound(begin);
  const bool into_above = above != buffers_.end() && above->first - begin < memory.size;
  const bool into_below =
      above != buffers_.begin() && begin - std::prev(above)->first < std::prev(above)->second.size;
  if (into_above || into_below) {
    return {Code::kInvalidArgument,
            "the buffer overlaps one that is registered; register the whole once and use parts of it"};
  }
  Buffer buffer;
  buffer.size = memory.size;
  buffer.owners = 1;
  buffer.device = std::move(device);
  buffers_.emplace(begin, buffer);
  return Status::ok();
}

Status BufferBook::remove(Slice memory) {
  // Outlives the lock: its last owner may wait for the driver, or for Python.
  std::shared_ptr<DeviceSums> device;
  std::unique_lock lock(mutex_);
  auto found = buffers_.find(address_of(memory));
  if (found == buffers_.end() || found->second.size != memory.size || found->second.owners == 0)
    return {Code::kNotFound, "no such buffer is registered"};
  if (--found->second.owners > 0) return Status::ok();
  // another thread is handing it to the devices: the owner may not free it before that is undone
  made_.wait(lock, [&] {
    found = buffers_.find(address_of(memory));
    return found == buffers_.end() || found->second.state != State::kMaking;
  });
  if (found == buffers_.end()) return Status::ok();  // added and removed once more meanwhile
  if (found->second.state == State::kReady) drop(found);
  if (found->second.owners == 0) {
    device = std::move(found->second.device);
    buffers_.erase(found);
  }
  return Status::ok();
}

// The buffer that holds all of it; end() when there is none.
BufferBook::Buffers::iterator BufferBook::find(const Slice& slice) {
  auto holder = buffers_.upper_bound(address_of(slice));
  if (holder == buffers_.begin()) return buffers_.end();
  --holder;
  const uintptr_t at = address_of(slice) - holder->first;
  const Buffer& buffer = holder->second;
  const bool holds = buffer.owners > 0 && at <= buffer.size && slice.size <= buffer.size - at;
  return holds ? holder : buffers_.end();
}

std::shared_ptr<DeviceSums> BufferBook::device_of(std::span<const Slice> slices) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<DeviceSums> device;
  for (const Slice& slice : slices) {
    if (slice.size == 0) continue;
    const auto found = find(slice);
    if (found == buffers_.end() || (device && found->second.device != device)) return nullptr;
    device = found->second.device;
    if (!device) return nullptr;
  }
  return device;
}

std::shared_ptr<DeviceSums> BufferBook::device(const std::shared_ptr<GpuDevice>& gpu) {
  const std::lock_guard lock(mutex_);
  std::erase_if(devices_, [](const auto& known) { return known.expired(); });
  for (const auto& known : devices_) {
    if (auto device = known.lock(); device && &device->gpu() == gpu.get()) return device;
  }
  auto made = std::make_shared<DeviceSums>(gpu);
  devices_.push_back(made);
  return made;
}

// Device memory is exported for as long as that takes. How it went is said of its device.
Result<RegionHandle> BufferBook::register_memory(RdmaTransport& transport, Slice memory, DeviceSums* device) {
  Region region;
  region.memory = memory;
  if (device == nullptr) return transport.register_region(region);
  region.kind = MemoryKind::kDevice;
  region.pci_address = device->gpu().pci_address();
  const auto exported = device->gpu().export_dma_buf({reinterpret_cast<uint64_t>(memory.data), memory.size});
  if (exported) {
    region.dma_buf_fd = exported->fd;
    region.dma_buf_offset = exported->offset;
  } else {
    region.no_dma_buf = exported.status().message;
  }
  auto made = transport.register_region(region);
  if (exported) (void)::close(exported->fd);
  device->set_route(made ? transport.describe(*made) : "staged, because " + made.status().message);
  return made;
}

bool BufferBook::registrations_of(std::span<const Slice> slices, const DeviceSums* device,
                                  std::vector<RegionHandle>& handles) {
  handles.clear();
  std::unique_lock lock(mutex_);
  for (const Slice& slice : slices) {
    if (slice.size == 0) {
      handles.push_back(0);
      continue;
    }
    const auto found = find(slice);
    if (found == buffers_.end() || found->second.device.get() != device) return false;
    const RegionHandle handle = registration(lock, found);
    if (handle == 0) return false;
    handles.push_back(handle);
  }
  return !handles.empty();
}

// 0: it cannot be used now.
RegionHandle BufferBook::registration(std::unique_lock<std::mutex>& lock, Buffers::iterator found) {
  Buffer& buffer = found->second;
  if (buffer.state == State::kReady) {
    if (!buffer.attached) recent_.splice(recent_.begin(), recent_, buffer.at);
    return buffer.handle;
  }
  const uint64_t now_ms = steady_ms();
  if (buffer.state == State::kMaking || now_ms < buffer.refused_until_ms) return 0;
  RdmaTransport* transport = rdma_->get();
  if (transport == nullptr) return 0;
  if (!make_room(buffer.size)) {
    buffer.refused_until_ms = now_ms + kRefusedPauseMs;
    counters_.add(Counter::kRegistrationFailures);
    if (buffer.device) {
      buffer.device->set_route("staged, because a buffer of " + std::to_string(buffer.size) +
                               " bytes is beyond what may be registered (client.registered_bytes_max, "
                               "client.registered_buffers_max)");
    }
    return 0;
  }
  (void)make(lock, found, *transport);
  // who waits in remove() drops it in a moment: it must not be used now
  return buffer.owners > 0 && buffer.state == State::kReady ? buffer.handle : 0;
}

// The lock is open while the devices are at it.
Status BufferBook::make(std::unique_lock<std::mutex>& lock, Buffers::iterator found,
                        RdmaTransport& transport) {
  Buffer& buffer = found->second;
  buffer.state = State::kMaking;
  count(found, true);
  const Slice memory{reinterpret_cast<std::byte*>(found->first), buffer.size};
  lock.unlock();
  const auto made = register_memory(transport, memory, buffer.device.get());  // gigabytes take a while
  lock.lock();
  if (made) {
    buffer.state = State::kReady;
    buffer.handle = *made;
    counters_.add(Counter::kRegistrations);
  } else {
    buffer.state = State::kIdle;
    buffer.refused_until_ms = steady_ms() + kRefusedPauseMs;
    count(found, false);
    counters_.add(Counter::kRegistrationFailures);
  }
  made_.notify_all();
  return made ? Status::ok() : made.status();
}

// What a registration takes of the limits, or gives back to them.
void BufferBook::count(Buffers::iterator found, bool more) {
  Buffer& buffer = found->second;
  uint64_t& bytes = buffer.attached ? attached_bytes_ : registered_bytes_;
  bytes += more ? buffer.size : -buffer.size;
  if (buffer.attached) {
    attached_count_ += more ? 1 : -uint64_t{1};
  } else if (more) {
    recent_.push_front(found->first);
    buffer.at = recent_.begin();
  } else {
    recent_.erase(buffer.at);
  }
}

Status BufferBook::attach(Slice memory) {
  RdmaTransport* transport = rdma_->get();
  if (transport == nullptr) {
    const RdmaTransport* opened = rdma_->opened();
    return opened != nullptr ? opened->availability()
                             : Status{Code::kTransportUnavailable, "the configuration switches RDMA off"};
  }
  std::unique_lock lock(mutex_);
  Buffers::iterator found;
  made_.wait(lock, [&] {  // another thread may be handing it to the devices
    found = buffers_.find(address_of(memory));
    return found == buffers_.end() || found->second.state != State::kMaking;
  });
  if (found == buffers_.end() || found->second.size != memory.size || found->second.owners == 0)
    return {Code::kNotFound, "no such buffer is registered"};
  Buffer& buffer = found->second;
  if (buffer.attached && buffer.state == State::kReady) return Status::ok();
  if (buffer.state == State::kReady) {
    count(found, false);
    buffer.attached = true;
    count(found, true);
    return Status::ok();
  }
  buffer.attached = true;
  Status made = make(lock, found, *transport);
  if (!made) buffer.attached = false;
  return made;
}

// Lets go of the registrations used longest ago until one more of so many bytes fits.
bool BufferBook::make_room(uint64_t bytes) {
  if (bytes > limits_.bytes_max || limits_.count_max == 0) return false;
  auto last = recent_.end();
  while (registered_bytes_ + bytes > limits_.bytes_max || recent_.size() >= limits_.count_max) {
    do {
      if (last == recent_.begin()) return false;  // all others are being made at this moment
      --last;
    } while (buffers_.at(*last).state != State::kReady);
    drop(buffers_.find(*last++));
    counters_.add(Counter::kRegistrationEvictions);
  }
  return true;
}

void BufferBook::drop(Buffers::iterator found) {
  Buffer& buffer = found->second;
  if (RdmaTransport* transport = rdma_->opened()) (void)transport->unregister_region(buffer.handle);
  count(found, false);
  buffer.state = State::kIdle;
  buffer.handle = 0;
  buffer.attached = false;
}

uint64_t BufferBook::buffers() const {
  const std::lock_guard lock(mutex_);
  return buffers_.size();
}

uint64_t BufferBook::registered_bytes() const {
  const std::lock_guard lock(mutex_);
  return registered_bytes_ + attached_bytes_;
}

uint64_t BufferBook::registered_count() const {
  const std::lock_guard lock(mutex_);
  return recent_.size() + attached_count_;
}

}  // namespace mooncache

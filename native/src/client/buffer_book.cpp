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
  for (auto& [address, buffer] : buffers_) {
    if (buffer.state == State::kReady) drop(buffer);
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
  if (found->second.state == State::kReady) drop(found->second);
  if (found->second.owners == 0) {
    device = std::move(found->second.device);
    buffers_.erase(found);
  }
  return Status::ok();
}

// The buffer that holds all slices; end() when there is none.
BufferBook::Buffers::iterator BufferBook::find(std::span<const Slice> slices) {
  auto holder = buffers_.end();
  for (const Slice& slice : slices) {
    if (slice.size == 0) continue;
    if (holder == buffers_.end()) {
      holder = buffers_.upper_bound(address_of(slice));
      if (holder == buffers_.begin()) return buffers_.end();
      --holder;
    }
    const uintptr_t at = address_of(slice);
    const Buffer& buffer = holder->second;
    if (at < holder->first || at - holder->first > buffer.size ||
        slice.size > buffer.size - (at - holder->first) || buffer.owners == 0)
      return buffers_.end();
  }
  return holder;
}

std::shared_ptr<DeviceSums> BufferBook::device_of(std::span<const Slice> slices) {
  const std::lock_guard lock(mutex_);
  const auto found = find(slices);
  return found == buffers_.end() ? nullptr : found->second.device;
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
  device->say(made ? transport.describe(*made) : "staged, because " + made.status().message);
  return made;
}

RegionHandle BufferBook::registration_of(std::span<const Slice> slices, const DeviceSums* device) {
  std::unique_lock lock(mutex_);
  const auto found = find(slices);
  if (found == buffers_.end() || found->second.device.get() != device) return 0;
  Buffer& buffer = found->second;
  if (buffer.state == State::kReady) {
    recent_.splice(recent_.begin(), recent_, buffer.at);
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
      buffer.device->say("staged, because a buffer of " + std::to_string(buffer.size) +
                         " bytes is beyond what may be registered (client.registered_bytes_max, "
                         "client.registered_buffers_max)");
    }
    return 0;
  }
  buffer.state = State::kMaking;
  recent_.push_front(found->first);
  buffer.at = recent_.begin();
  registered_bytes_ += buffer.size;
  const Slice memory{reinterpret_cast<std::byte*>(found->first), buffer.size};
  lock.unlock();
  const auto made = register_memory(*transport, memory, buffer.device.get());  // gigabytes take a while
  lock.lock();
  if (made) {
    buffer.state = State::kReady;
    buffer.handle = *made;
    counters_.add(Counter::kRegistrations);
  } else {
    buffer.state = State::kIdle;
    buffer.refused_until_ms = now_ms + kRefusedPauseMs;
    recent_.erase(buffer.at);
    registered_bytes_ -= buffer.size;
    counters_.add(Counter::kRegistrationFailures);
  }
  // who waits in remove() drops it in a moment: it must not be used now
  const RegionHandle handle = buffer.owners > 0 && buffer.state == State::kReady ? buffer.handle : 0;
  made_.notify_all();
  return handle;
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
    Buffer& oldest = buffers_.at(*last++);
    drop(oldest);
    counters_.add(Counter::kRegistrationEvictions);
  }
  return true;
}

void BufferBook::drop(Buffer& buffer) {
  if (RdmaTransport* transport = rdma_->opened()) (void)transport->unregister_region(buffer.handle);
  recent_.erase(buffer.at);
  registered_bytes_ -= buffer.size;
  buffer.state = State::kIdle;
  buffer.handle = 0;
}

uint64_t BufferBook::buffers() const {
  const std::lock_guard lock(mutex_);
  return buffers_.size();
}

uint64_t BufferBook::registered_bytes() const {
  const std::lock_guard lock(mutex_);
  return registered_bytes_;
}

uint64_t BufferBook::registered_count() const {
  const std::lock_guard lock(mutex_);
  return recent_.size();
}

}  // namespace mooncache

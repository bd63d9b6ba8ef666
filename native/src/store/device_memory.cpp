#include "store/device_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace mooncache::store {
namespace {

constexpr uint64_t kSlotBytes = 256 << 10;
constexpr size_t kSlots = 2;
constexpr const char* kNoKernel = "none";  // one extent is one copy: nothing is gathered
// A copy of 256 KiB takes 20 us; a device that has not ended it by then is asked no more.
constexpr int64_t kPatienceMs = 2000;
constexpr int64_t kLastAskMs = 200;
// How often a device that failed is tried, and how long that may hold up a caller.
constexpr int64_t kTryAgainMs = 1000;
constexpr int64_t kTrialMs = 10;
constexpr uint32_t kOnePiece[] = {1};

}  // namespace

Result<std::unique_ptr<DeviceMemory>> DeviceMemory::open(int ordinal, uint64_t size_bytes,
                                                         const std::string& driver) {
  std::unique_ptr<DeviceMemory> memory(new DeviceMemory);
  auto device = GpuDevice::open(ordinal, {driver, kNoKernel});
  if (!device) return device.status();
  memory->device_ = std::move(*device);
  const std::string where = "cuda:" + std::to_string(ordinal);
  for (Lane& lane : memory->lanes_) {
    auto stager = memory->device_->make_stager(kSlotBytes, kSlots);
    if (!stager) return stager.status();
    lane.stager = std::move(*stager);
  }
  // whole pages, so that no page that is exported belongs to other memory
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  auto address = memory->device_->allocate((size_bytes + page - 1) / page * page);
  if (!address) {
    return {address.code(), "the arena on " + where + ": " + std::to_string(size_bytes) +
                                " bytes cannot be had: " + address.status().message};
  }
  memory->address_ = *address;
  memory->info_.kind = "gpu";
  memory->info_.description = where + " (" + memory->device_->name() + ")";
  memory->info_.why_not_shared = "the node's arena lies on " + where;
  memory->info_.size_bytes = size_bytes;
  memory->info_.addressable = false;
  return memory;
}

DeviceMemory::~DeviceMemory() {
  for (Lane& lane : lanes_) lane.stager.reset();
  if (exported_.dma_buf_fd >= 0) (void)::close(exported_.dma_buf_fd);
  // The driver frees memory only when the device is through with all work: one that hangs keeps it.
  const bool answers = !failed_.load() || device_->synchronize(Deadline::after_ms(kLastAskMs));
  if (address_ != 0 && answers) (void)device_->release(address_);
}

DeviceArena DeviceMemory::device_arena() {
  const std::lock_guard lock(export_mutex_);
  if (exported_.address != 0) return exported_;
  exported_.address = address_;
  const auto buffer = device_->export_dma_buf({address_, info_.size_bytes});
  if (buffer) {
    exported_.dma_buf_fd = buffer->fd;
    exported_.dma_buf_offset = buffer->offset;
  } else {
    exported_.no_dma_buf = buffer.status().message;
  }
  return exported_;
}

Status DeviceMemory::flush_device_writes() {
  if (failed_.load()) return gone();
  return device_->flush_writes();
}

uint64_t DeviceMemory::lost_bytes() {
  if (failed_.load()) try_again();
  return failed_.load() ? info_.size_bytes : 0;
}

// Blocks are still where they were, or their checksums say so; only nothing may be on its way from before.
void DeviceMemory::try_again() {
  const std::unique_lock only(again_mutex_, std::try_to_lock);
  if (!only.owns_lock() || !again_.expired()) return;
  again_ = Deadline::after_ms(kTryAgainMs);
  const Deadline deadline = Deadline::after_ms(kTrialMs);
  std::array<std::unique_lock<std::mutex>, kLanes> locks;
  for (size_t i = 0; i < kLanes; ++i) {
    locks[i] = std::unique_lock(lanes_[i].mutex, std::try_to_lock);
    if (!locks[i].owns_lock()) return;
    for (size_t slot = 0; slot < kSlots; ++slot) {
      (void)lanes_[i].stager->wait(slot, deadline);  // what it says is of a copy that was given up
      if (!lanes_[i].stager->settled(slot)) return;
    }
  }
  const DeviceSlice piece[] = {{address_, 1}};
  GpuStager& stager = *lanes_[0].stager;
  const bool started = stager.start_out(0, piece, kOnePiece, false).is_ok();
  if (stager.wait(0, deadline).status().is_ok() && started) failed_.store(false);
}

Status DeviceMemory::gone() const {
  return {Code::kNodeUnavailable, info_.description + " has failed"};
}

std::unique_lock<std::mutex> DeviceMemory::lock_lane(Lane*& lane) {
  const uint32_t first = next_.fetch_add(1, std::memory_order_relaxed);
  for (uint32_t i = 0; i < kLanes; ++i) {
    lane = &lanes_[(first + i) % kLanes];
    std::unique_lock lock(lane->mutex, std::try_to_lock);
    if (lock.owns_lock()) return lock;
  }
  lane = &lanes_[first % kLanes];
  return std::unique_lock(lane->mutex);
}

// Calls start(slot, offset, length) and, when the slot's copy is through, finish(slot, offset, length), with
// both slots under way. Returns when no slot is, also after an error.
template <typename Start, typename Finish>
Status DeviceMemory::pipeline(GpuStager& stager, uint64_t size, const Start& start, const Finish& finish) {
  struct Flight {
    uint64_t offset = 0, length = 0;
  };
  std::array<Flight, kSlots> flights;
  Status first_error;
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  const auto land = [&](size_t slot) {
    const Flight flight = std::exchange(flights[slot], {});
    if (flight.length == 0) return;
    Status status = stager.wait(slot, deadline).status();
    if (status && first_error) finish(slot, flight.offset, flight.length);
    if (!status && first_error) first_error = status;
  };
  size_t slot = 0;
  for (uint64_t at = 0; at < size && first_error; slot = (slot + 1) % kSlots) {
    land(slot);
    if (!first_error) break;
    const uint64_t length = std::min(size - at, kSlotBytes);
    flights[slot] = {at, length};
    if (Status status = start(slot, at, length); !status) first_error = status;
    at += length;
  }
  for (size_t i = 0; i < kSlots; ++i) land((slot + i) % kSlots);
  return first_error;
}

// A device that no longer answers is asked once; then it counts as gone, with the buffers that it may
// still write to. One that answers has ended all commands.
Status DeviceMemory::judged(GpuStager& stager, Status status) {
  if (status) return status;
  bool answers =
      status.code != Code::kDeadlineExceeded && device_->synchronize(Deadline::after_ms(kPatienceMs));
  for (size_t slot = 0; answers && slot < kSlots; ++slot)
    answers = stager.wait(slot, Deadline::after_ms(kPatienceMs)).is_ok();
  if (!answers) failed_.store(true);
  return {status.code, info_.description + ": " + status.message};
}

// One copy through a lane: start(stager, slot, piece, at, length) and finish(stager, slot, at, length) as
// above.
template <typename Start, typename Finish>
Status DeviceMemory::moved(uint64_t offset, uint64_t size, const Start& start, const Finish& finish) {
  if (failed_.load()) return gone();
  Lane* lane = nullptr;
  const auto lock = lock_lane(lane);
  if (failed_.load()) return gone();  // while we waited: the device may still use the lane's buffers
  GpuStager& stager = *lane->stager;
  const auto begin = [&](size_t slot, uint64_t at, uint64_t length) {
    const DeviceSlice piece[] = {{address_ + offset + at, length}};
    return start(stager, slot, piece, at, length);
  };
  return judged(stager, pipeline(stager, size, begin, [&](size_t slot, uint64_t at, uint64_t length) {
                  finish(stager, slot, at, length);
                }));
}

Status DeviceMemory::copy_in(uint64_t offset, ConstSlice from) {
  return moved(
      offset, from.size,
      [&](GpuStager& stager, size_t slot, const auto& piece, uint64_t at, uint64_t length) {
        std::memcpy(stager.slot(slot).data, from.data + at, length);
        return stager.start_in(slot, piece, kOnePiece, false);
      },
      [](GpuStager&, size_t, uint64_t, uint64_t) {});
}

Status DeviceMemory::copy_out(uint64_t offset, Slice to) {
  return moved(
      offset, to.size,
      [](GpuStager& stager, size_t slot, const auto& piece, uint64_t, uint64_t) {
        return stager.start_out(slot, piece, kOnePiece, false);
      },
      [&](GpuStager& stager, size_t slot, uint64_t at, uint64_t length) {
        std::memcpy(to.data + at, stager.slot(slot).data, length);
      });
}

}  // namespace mooncache::store

// Memory that stays where it is, listed by who owns it, and its registrations with the devices of RDMA.
//
// Registering is dear, so a registration is made at the first transfer that can use it and kept in an LRU
// that is bounded in bytes and in number. The invariant: a registration is found only for memory whose owner
// promises right now that it stays mapped as it is (add() until remove()); an address alone proves nothing,
// because memory that was freed and mapped anew has the same one. What is not listed here, or is not covered
// by one buffer as a whole, goes through staging memory.
//
// Memory of a GPU is listed with its device and exported as a dma-buf for as long as a registration takes. It
// is found only by who asks for that device's memory: every other caller would let the processor touch it.
//
// A transfer under way keeps its registration alive, whatever becomes of it here. Thread-safe.
#pragma once

#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>

#include "client/counters.h"
#include "client/device_sums.h"
#include "mooncache/transport.h"

namespace mooncache {

class RdmaAccess;
class RdmaTransport;

class BufferBook {
 public:
  struct Limits {
    uint64_t bytes_max = 0;  // registered at a time
    uint32_t count_max = 0;
  };

  BufferBook(std::shared_ptr<RdmaAccess> rdma, Limits limits, Counters& counters);
  ~BufferBook();
  BufferBook(const BufferBook&) = delete;
  BufferBook& operator=(const BufferBook&) = delete;

  // Until as many remove() with the same range, the owner leaves the memory mapped as it is. INVALID_ARGUMENT
  // when it is empty or overlaps another range that is listed. `device`: whose memory it is.
  Status add(Slice memory, std::shared_ptr<DeviceSums> device = nullptr);
  // After this the memory is no longer registered, save for transfers under way (whose callers own it
  // too). NOT_FOUND when it is not listed.
  Status remove(Slice memory);
  // For each slice the registration of the buffer in which it lies (of an empty one: any). False when one
  // lies in none, or its buffer cannot be registered now. May register. Of host memory, or of the device's.
  bool registrations_of(std::span<const Slice> slices, const DeviceSums* device,
                        std::vector<RegionHandle>& found);
  // Registers a listed buffer now, beside the limits, and until it is removed. Client::attach_buffer().
  Status attach(Slice memory);
  // Whose memory all bytes are: null when one lies in no listed buffer, or in host memory.
  std::shared_ptr<DeviceSums> device_of(std::span<const Slice> slices);
  // The one for this GPU, as long as it is in use.
  std::shared_ptr<DeviceSums> device(const std::shared_ptr<GpuDevice>& gpu);

  uint64_t buffers() const;
  uint64_t registered_bytes() const;
  uint64_t registered_count() const;

 private:
  enum class State : uint8_t { kIdle, kMaking, kReady };
  struct Buffer {
    size_t size = 0;
    uint32_t owners = 0;
    State state = State::kIdle;
    RegionHandle handle = 0;
    std::shared_ptr<DeviceSums> device;  // null: host memory
    bool attached = false;               // stays registered, and takes no part in the limits
    uint64_t refused_until_ms = 0;
    std::list<uintptr_t>::iterator at;  // in recent_, while it has bytes of the limit
  };
  using Buffers = std::map<uintptr_t, Buffer>;

  Buffers::iterator find(const Slice& slice);
  RegionHandle registration(std::unique_lock<std::mutex>& lock, Buffers::iterator found);
  Status make(std::unique_lock<std::mutex>& lock, Buffers::iterator found, RdmaTransport& transport);
  Result<RegionHandle> register_memory(RdmaTransport& transport, Slice memory, DeviceSums* device);
  bool make_room(uint64_t bytes);
  void count(Buffers::iterator found, bool more);
  void drop(Buffers::iterator found);

  const std::shared_ptr<RdmaAccess> rdma_;
  const Limits limits_;
  Counters& counters_;
  mutable std::mutex mutex_;
  std::condition_variable made_;
  Buffers buffers_;                // by address; ranges never overlap
  std::list<uintptr_t> recent_;    // the one used last in front
  uint64_t registered_bytes_ = 0;  // of those in recent_
  uint64_t attached_bytes_ = 0;
  uint64_t attached_count_ = 0;
  std::vector<std::weak_ptr<DeviceSums>> devices_;
};

}  // namespace mooncache

// Memory of the client's own to receive blocks in, lent to the caller until it is released.
//
// Slabs hold buffers of one size class each and are listed in the book of buffers, so that a device writes a
// block to where the caller will read it. Bounded in bytes: when all of it is lent, acquire() gives nothing
// and the caller makes memory of its own. A buffer keeps its pool alive, also beyond the client. Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "client/buffer_book.h"
#include "mooncache/client.h"

namespace mooncache {

class ReceivePool;

// Lent memory; it goes back when the object does.
class ReceiveBuffer final : public LentBuffer {
 public:
  ReceiveBuffer(std::shared_ptr<ReceivePool> pool, std::byte* data, size_t size)
      : pool_(std::move(pool)), data_(data), size_(size) {}
  ~ReceiveBuffer() override;
  ReceiveBuffer(const ReceiveBuffer&) = delete;
  ReceiveBuffer& operator=(const ReceiveBuffer&) = delete;
  std::byte* data() const override { return data_; }
  size_t size() const override { return size_; }

 private:
  std::shared_ptr<ReceivePool> pool_;
  std::byte* const data_;
  const size_t size_;
};

class ReceivePool : public std::enable_shared_from_this<ReceivePool> {
 public:
  static constexpr uint64_t kSlabBytes = 8 << 20;

  ReceivePool(std::shared_ptr<BufferBook> book, uint64_t bytes_max);
  ~ReceivePool();

  // Null: more than the pool has left, or zero bytes.
  std::unique_ptr<ReceiveBuffer> acquire(uint64_t size);
  // Mapped, and of that lent to callers.
  uint64_t mapped_bytes() const;
  uint64_t lent_bytes() const;
  // Bytes that a buffer of this size takes: at most a quarter more, in whole pages.
  static uint64_t class_of(uint64_t size);

 private:
  friend class ReceiveBuffer;
  struct Slab {
    std::byte* data = nullptr;
    uint64_t size = 0;
    uint64_t each = 0;
    std::vector<std::byte*> free;
    uint64_t lent = 0;
  };

  Slab* slab_with_room(uint64_t each);
  bool make_slab(uint64_t each);
  void unmap(size_t position);
  void release(std::byte* data);

  const std::shared_ptr<BufferBook> book_;
  const uint64_t bytes_max_;
  const uint64_t fork_generation_;
  mutable std::mutex mutex_;
  std::vector<Slab> slabs_;
  uint64_t mapped_ = 0;
};

}  // namespace mooncache

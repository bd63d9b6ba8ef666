#include "client/receive_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>

#include "client/impl.h"

namespace mooncache {

namespace {

constexpr uint64_t kPageBytes = 4096;

}  // namespace

// In a forked child locks of other threads may be held forever, and devices are the parent's.
ReceiveBuffer::~ReceiveBuffer() {
  if (pool_->fork_generation_ == fork_generation_now())
    pool_->release(data_);
  else
    leak_in_child(std::move(pool_));
}

ReceivePool::ReceivePool(std::shared_ptr<BufferBook> book, uint64_t bytes_max)
    : book_(std::move(book)), bytes_max_(bytes_max), fork_generation_(fork_generation_now()) {}

ReceivePool::~ReceivePool() {
  while (!slabs_.empty()) unmap(slabs_.size() - 1);
}

uint64_t ReceivePool::class_of(uint64_t size) {
  const uint64_t step = std::max<uint64_t>(std::bit_floor(size) / 4, kPageBytes);
  return (size + step - 1) / step * step;
}

ReceivePool::Slab* ReceivePool::slab_with_room(uint64_t each) {
  for (Slab& slab : slabs_) {
    if (slab.each == each && !slab.free.empty()) return &slab;
  }
  return nullptr;
}

std::unique_ptr<ReceiveBuffer> ReceivePool::acquire(uint64_t size) {
  if (size == 0 || size > bytes_max_) return nullptr;
  const uint64_t each = class_of(size);
  const std::lock_guard lock(mutex_);
  Slab* slab = slab_with_room(each);
  if (slab == nullptr) {
    if (!make_slab(each)) return nullptr;
    slab = &slabs_.back();
  }
  std::byte* data = slab->free.back();
  auto lent = std::make_unique<ReceiveBuffer>(shared_from_this(), data, size);
  slab->free.pop_back();
  ++slab->lent;
  return lent;
}

// One more slab at the end; slabs of other classes of which nothing is lent make room.
bool ReceivePool::make_slab(uint64_t each) {
  uint64_t size = std::max(each, std::min(kSlabBytes / each * each, bytes_max_ / each * each));
  if (size > bytes_max_) return false;
  for (size_t i = slabs_.size(); i-- > 0 && mapped_ + size > bytes_max_;) {
    if (slabs_[i].lent == 0) unmap(i);
  }
  if (mapped_ + size > bytes_max_) size = (bytes_max_ - mapped_) / each * each;
  if (size == 0) return false;
  // shared, so that a fork copies no page of it away from under a device
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  Slab slab;
  slab.data = static_cast<std::byte*>(memory);
  slab.size = size;
  slab.each = each;
  for (uint64_t at = size; at >= each; at -= each) slab.free.push_back(slab.data + (at - each));
  if (!book_->add({slab.data, static_cast<size_t>(size)})) {
    munmap(memory, size);
    return false;
  }
  slabs_.push_back(std::move(slab));
  mapped_ += size;
  return true;
}

void ReceivePool::unmap(size_t position) {
  const Slab& slab = slabs_[position];
  (void)book_->remove({slab.data, static_cast<size_t>(slab.size)});
  munmap(slab.data, slab.size);
  mapped_ -= slab.size;
  slabs_.erase(slabs_.begin() + static_cast<ptrdiff_t>(position));
}

void ReceivePool::release(std::byte* data) {
  const std::lock_guard lock(mutex_);
  for (Slab& slab : slabs_) {
    if (data < slab.data || data >= slab.data + slab.size) continue;
    slab.free.push_back(data);
    --slab.lent;
    return;
  }
}

uint64_t ReceivePool::mapped_bytes() const {
  const std::lock_guard lock(mutex_);
  return mapped_;
}

uint64_t ReceivePool::lent_bytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const Slab& slab : slabs_) bytes += slab.lent * slab.each;
  return bytes;
}

}  // namespace mooncache

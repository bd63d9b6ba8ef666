// Records addressed by a 32-bit index, in chunks that never move. Freed indexes are reused last-in
// first-out. Not thread-safe: the owner's lock guards it. T has a `uint32_t next` that is free for
// chaining while the record is not in use.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace mooncache::store {

inline constexpr uint32_t kNone = 0xffffffffu;

template <typename T, uint32_t kChunk>
class Slab {
 public:
  explicit Slab(uint32_t limit = kNone) : limit_(limit) {}

  T& operator[](uint32_t index) { return chunks_[index / kChunk][index % kChunk]; }
  const T& operator[](uint32_t index) const { return chunks_[index / kChunk][index % kChunk]; }

  // kNone when the limit is reached.
  uint32_t allocate() {
    uint32_t index = free_;
    if (index != kNone) {
      free_ = (*this)[index].next;
    } else {
      if (size_ >= limit_) return kNone;
      if (size_ % kChunk == 0) chunks_.push_back(std::make_unique<T[]>(kChunk));
      index = size_++;
    }
    ++used_;
    return index;
  }
  void release(uint32_t index) {
    (*this)[index].next = free_;
    free_ = index;
    --used_;
  }

  // Makes a fresh slab have `size` records, of which those are in use that `is_used(index)` names. The lowest
  // free ones are allocated first.
  template <typename IsUsed>
  void restore(uint32_t size, const IsUsed& is_used) {
    while (chunks_.size() * kChunk < size) chunks_.push_back(std::make_unique<T[]>(kChunk));
    size_ = used_ = size;
    for (uint32_t index = size; index-- > 0;)
      if (!is_used(index)) release(index);
  }

  uint32_t size() const { return size_; }  // indexes below were used at least once
  uint32_t used() const { return used_; }
  uint32_t first_free() const { return free_; }
  uint64_t memory_bytes() const {
    return chunks_.size() * kChunk * sizeof(T) + chunks_.capacity() * sizeof(void*);
  }

 private:
  std::vector<std::unique_ptr<T[]>> chunks_;
  uint32_t limit_;
  uint32_t size_ = 0;
  uint32_t used_ = 0;
  uint32_t free_ = kNone;
};

}  // namespace mooncache::store

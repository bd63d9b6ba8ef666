// A fixed number of zeroed records that costs next to nothing to make, however many they are: the kernel
// provides a page when it is first touched. A vector of that size writes every page at once, which stops
// the thread that holds the lock meanwhile.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <utility>

namespace mooncache::store {

// All bits zero must be a valid T. Throws std::bad_alloc as a vector does.
template <typename T>
class ZeroedArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  ZeroedArray() = default;
  explicit ZeroedArray(size_t size) : size_(size) {
    if (size == 0) return;
    if (bytes() < kMappedBytes) {
      data_ = static_cast<T*>(std::calloc(size, sizeof(T)));
    } else {
      void* at = ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                        -1, 0);
      if (at != MAP_FAILED) data_ = static_cast<T*>(at);
    }
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ZeroedArray(ZeroedArray&& other) noexcept { swap(other); }
  ZeroedArray& operator=(ZeroedArray&& other) noexcept {
    ZeroedArray(std::move(other)).swap(*this);
    return *this;
  }
  ~ZeroedArray() {
    if (data_ == nullptr) return;
    if (bytes() < kMappedBytes) {
      std::free(data_);
    } else {
      (void)::munmap(data_, bytes());
    }
  }
  void swap(ZeroedArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  T& operator[](size_t index) { return data_[index]; }
  const T& operator[](size_t index) const { return data_[index]; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  size_t bytes() const { return size_ * sizeof(T); }

  // Records [begin, end) are zero again, and their whole pages go back to the kernel: the end of a large
  // array is not one long call then.
  void release(size_t begin, size_t end) {
    if (bytes() < kMappedBytes) return;
    (void)::madvise(data_ + begin, (end - begin) * sizeof(T), MADV_DONTNEED);
  }

 private:
  static constexpr size_t kMappedBytes = 128 << 10;
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace mooncache::store

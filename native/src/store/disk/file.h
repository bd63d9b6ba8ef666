// The file or block device that blocks lie in, held by one process at a time, and memory for O_DIRECT.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "mooncache/bytes.h"
#include "mooncache/status.h"

namespace mooncache::store::disk {

// Takes the lock of an open file, as flock(2) has it. It waits up to 2 s: the kernel ends what a killed
// process had on its way to the disk a moment after the process, and the lock with it. False: errno says why.
bool lock_file(int fd);

class AlignedMemory {
 public:
  AlignedMemory() = default;
  explicit AlignedMemory(size_t size);
  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }
  // Never freed: a device may still write there.
  void abandon();

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

class File {
 public:
  File() = default;
  ~File();
  File(File&& other) noexcept { swap(other); }
  File& operator=(File&& other) noexcept {
    swap(other);
    return *this;
  }

  // In a folder the file is <folder>/mooncache.ssd, made with mode 0600. CONFIG_INVALID: it cannot be opened,
  // or another process holds it.
  static Result<File> open(const std::string& path);
  // Takes up to `bytes` from the file system, all of them now, so that no other file can take them later.
  // What it got; NO_SPACE when that is less than `at_least`.
  // `sparse`: none of them now.
  Result<uint64_t> reserve(uint64_t bytes, uint64_t at_least, bool sparse = false);

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_; }
  bool is_device() const { return is_device_; }
  bool is_direct() const { return is_direct_; }

 private:
  void swap(File& other) {
    std::swap(fd_, other.fd_);
    std::swap(path_, other.path_);
    std::swap(size_, other.size_);
    std::swap(is_device_, other.is_device_);
    std::swap(is_direct_, other.is_direct_);
  }
  int fd_ = -1;
  std::string path_;
  uint64_t size_ = 0;
  bool is_device_ = false, is_direct_ = false;
};

}  // namespace mooncache::store::disk

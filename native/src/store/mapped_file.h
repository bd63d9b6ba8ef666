// An arena in a file or a DAX device: CXL or persistent memory as /dev/dax*, a file on a DAX file system, on
// hugetlbfs or tmpfs. Everything that could go wrong later is checked before the first byte is used.
//
// What it promises: the memory is all there when open() returns (reserved, not only promised by the file
// system), no second node uses the same file, and a file that is truncated afterwards costs blocks, not the
// process (base/bus_guard.h). Contents are volatile: whatever a former run left is never read.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/bus_guard.h"
#include "store/arena_memory.h"

namespace mooncache::store {

struct MappedFileOptions {
  // A regular file of this user alone, a DAX character device, or a folder: then an unnamed file is made
  // there.
  std::string path;
  uint64_t size_bytes = 0;  // 0 = all of the file or device
  bool huge_pages = false;
  std::string sysfs = "/sys";  // where devices are described
};

class MappedFile final : public ArenaMemory {
 public:
  // CONFIG_INVALID with what to do about it; NO_SPACE when file system or kernel have no room.
  static Result<std::unique_ptr<MappedFile>> open(const MappedFileOptions& options);
  ~MappedFile() override;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::byte* data() const override { return data_; }
  uint64_t size_bytes() const override { return info_.size_bytes; }
  int fd_ro() const override { return fd_ro_; }
  int fd_rw() const override { return fd_rw_; }
  ArenaInfo info() const override { return info_; }
  uint64_t lost_bytes() override;

 private:
  MappedFile() = default;
  Status open_path(const MappedFileOptions& options);
  Status open_named(const std::string& path);
  Status open_unnamed(const std::string& folder);
  Status lock(const std::string& path);
  Status measure_device(const MappedFileOptions& options);
  Status measure_file(const MappedFileOptions& options);
  Status reserve(const std::string& path);
  Status map(bool huge_pages);
  Status share();

  ArenaInfo info_;
  bool is_device_ = false;
  int fd_ = -1;  // holds the lock; never handed out, or the lock would outlive this process
  int fd_ro_ = -1, fd_rw_ = -1;
  std::byte* data_ = nullptr;
  BusGuard guard_;
  std::mutex mutex_;         // of lost_bytes
  uint64_t tail_begin_ = 0;  // from here on the file is gone, and anonymous memory in its place
};

}  // namespace mooncache::store

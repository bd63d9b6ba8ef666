// Memory for blocks, wherever it is: anonymous memory of the host, a mapping of a file or of a DAX device, or
// memory of a GPU. The store hands out offsets; who moves bytes asks here how.
//
// Either the processor can address it (data() is its first byte, and the copies are plain ones), or it cannot
// (data() is null, and bytes go through copy_in and copy_out). Nothing else about the kind matters to the
// store: metadata, eviction and checksums are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "mooncache/store.h"
#include "store/memfd.h"

namespace mooncache {

// A GPU's memory behind the arena, for RDMA devices. The descriptor is the store's.
struct DeviceArena {
  uint64_t address = 0;  // of the arena's first byte; 0 = the arena is not on a GPU
  int dma_buf_fd = -1;
  uint64_t dma_buf_offset = 0;  // of the arena's first byte in it
  std::string no_dma_buf;       // why there is none
};

}  // namespace mooncache

namespace mooncache::store {

class ArenaMemory {
 public:
  virtual ~ArenaMemory() = default;
  virtual std::byte* data() const = 0;
  virtual uint64_t size_bytes() const = 0;
  // From any thread. The range lies inside; an error leaves the bytes of `to` (or of the range) unspecified.
  virtual Status copy_in(uint64_t offset, ConstSlice from) {
    std::memcpy(data() + offset, from.data, from.size);
    return Status::ok();
  }
  virtual Status copy_out(uint64_t offset, Slice to) {
    std::memcpy(to.data, data() + offset, to.size);
    return Status::ok();
  }
  // For processes of this host; -1: see ArenaInfo::why_not_shared.
  virtual int fd_ro() const { return -1; }
  virtual int fd_rw() const { return -1; }
  // Whether processes that got a writable descriptor under these numbers still have it (Memfd::keep).
  virtual bool is_locked(uint64_t, uint64_t) const { return false; }
  virtual ArenaInfo info() const = 0;
  virtual Tier tier() const { return Tier::kDram; }
  // Of a GPU's memory only: how RDMA devices find it, and what makes their writes visible to copies.
  virtual DeviceArena device_arena() { return {}; }
  virtual Status flush_device_writes() { return Status::ok(); }
  // Puts memory behind a range where pages come at first touch, without changing a byte. NO_SPACE.
  virtual Status populate(uint64_t, uint64_t) { return Status::ok(); }
  virtual uint64_t resident_bytes() const { return size_bytes(); }
  // Looks whether the memory is still all there. Bytes that were lost since the start: they read as zeros, so
  // their blocks no longer match their checksums. Less than before: what had failed answers again.
  virtual uint64_t lost_bytes() { return 0; }
};

class AnonymousMemory final : public ArenaMemory {
 public:
  explicit AnonymousMemory(Memfd file) : file_(std::move(file)) {}
  std::byte* data() const override { return file_.data(); }
  uint64_t size_bytes() const override { return file_.size_bytes(); }
  int fd_ro() const override { return file_.fd_ro(); }
  int fd_rw() const override { return file_.fd_rw(); }
  bool is_locked(uint64_t from, uint64_t below) const override { return file_.is_locked(from, below); }
  Status populate(uint64_t offset, uint64_t length) override { return file_.populate(offset, length); }
  uint64_t resident_bytes() const override { return file_.resident_bytes(); }
  ArenaInfo info() const override {
    ArenaInfo info;
    info.kind = "memory";
    info.description = "anonymous memory of the host";
    if (file_.pages() == Pages::kHuge) info.description += ", in huge pages of its pool";
    if (file_.pages() == Pages::kTransparent) info.description += ", in transparent huge pages";
    info.page_bytes = file_.page_bytes();
    info.why_not_huge = file_.why_not_huge();
    info.size_bytes = size_bytes();
    return info;
  }

 private:
  Memfd file_;
};

}  // namespace mooncache::store

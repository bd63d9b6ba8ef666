// A sealed memory file mapped into this process. Others get descriptors: a read-only one that maps
// PROT_READ only, and a writable one. The size is sealed, so a peer can never make our mapping fault.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "mooncache/status.h"

namespace mooncache::store {

enum class Pages : uint8_t {
  kSystem,       // those of the processor
  kTransparent,  // the kernel makes huge ones of them where it can
  kHuge,         // huge ones of the host's pool
};

struct MemfdOptions {
  bool huge_pages = false;  // where there are any: of the pool, else transparent ones
  int numa_node = -1;       // all pages come from there; -1 = from where they are touched first
};

class Memfd {
 public:
  // `size_bytes` > 0 is rounded up to whole pages. Pages are allocated when they are first touched, or by
  // populate(). NO_SPACE, CONFIG_INVALID.
  static Result<Memfd> create(const char* name, uint64_t size_bytes, const MemfdOptions& options);
  // One that another process made, of exactly this size; `fd` stays the caller's. CONFIG_INVALID when it is
  // no memory file of this user, can be shrunk, or has another size.
  static Result<Memfd> adopt(int fd, uint64_t size_bytes, const MemfdOptions& options);
  Memfd() = default;
  Memfd(Memfd&& other) noexcept { *this = static_cast<Memfd&&>(other); }
  Memfd& operator=(Memfd&& other) noexcept;
  ~Memfd() { close(); }

  std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }
  int fd_ro() const { return fd_ro_; }
  int fd_rw() const { return fd_rw_; }
  // Sets a descriptor apart that may outlive this process, kept_fd(). What fd_rw() leads to from now on, and
  // what is sent to others as fd_rw(), holds the lock of byte `number` until the last of its descriptors and
  // mappings is gone, whoever has them. ALREADY_EXISTS: another one has that lock.
  Status keep(uint64_t number);
  int kept_fd() const { return kept_fd_; }
  // Whether descriptors or mappings exist that hold the lock of a byte in [from, below).
  bool is_locked(uint64_t from, uint64_t below) const;
  Pages pages() const { return pages_; }
  uint64_t page_bytes() const { return page_bytes_; }
  // Why there are no huge pages although they were asked for; "" = there are, or they were not asked for.
  const std::string& why_not_huge() const { return why_not_huge_; }
  // Puts memory behind a range, without changing a byte of it. NO_SPACE.
  Status populate(uint64_t offset, uint64_t length);
  // Bytes of the file that have memory behind them.
  uint64_t resident_bytes() const;

 private:
  Status make(const char* name, uint64_t size_bytes, bool huge);
  Status take(int fd, uint64_t size_bytes);
  Status open_and_map();
  Status finish(const MemfdOptions& options);
  Status bind(int numa_node);
  void choose_transparent();
  void close();
  std::byte* data_ = nullptr;
  uint64_t size_bytes_ = 0;
  uint64_t page_bytes_ = 0;
  Pages pages_ = Pages::kSystem;
  std::string why_not_huge_;
  int fd_ro_ = -1;
  int fd_rw_ = -1;
  int kept_fd_ = -1;
};

}  // namespace mooncache::store

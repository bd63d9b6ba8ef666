// A sealed memory file mapped into this process. Others get descriptors: a read-only one that maps
// PROT_READ only, and a writable one. The size is sealed, so a peer can never make our mapping fault.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mooncache/status.h"

namespace mooncache::store {

class Memfd {
 public:
  // `size_bytes` > 0 is rounded up to whole pages. Pages are allocated when they are first touched.
  static Result<Memfd> create(const char* name, uint64_t size_bytes, bool huge_pages);
  Memfd() = default;
  Memfd(Memfd&& other) noexcept { *this = static_cast<Memfd&&>(other); }
  Memfd& operator=(Memfd&& other) noexcept;
  ~Memfd() { close(); }

  std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }
  int fd_ro() const { return fd_ro_; }
  int fd_rw() const { return fd_rw_; }
  // Bytes of the file that have memory behind them.
  uint64_t resident_bytes() const;

 private:
  void close();
  std::byte* data_ = nullptr;
  uint64_t size_bytes_ = 0;
  int fd_ro_ = -1;
  int fd_rw_ = -1;
};

}  // namespace mooncache::store

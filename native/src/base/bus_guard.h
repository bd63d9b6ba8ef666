// Keeps a mapping from killing the process. Memory behind a file can go away under it: the file is truncated,
// its file system has no room for a hole, a page of persistent or CXL memory fails. The kernel then answers
// the next access with SIGBUS.
//
// The guard puts an empty page of anonymous memory in the place of the lost one and lets the access go on.
// What was lost reads as zeros, so that its blocks fail their checksums, which is what the store and its
// clients do with damaged blocks anyway. A SIGBUS from anywhere else goes where it would have gone without
// the guard.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mooncache {

class BusGuard {
 public:
  BusGuard() = default;
  // `page_bytes`: what one fault loses, the page size of the mapping. At most 64 guards live at a time; more
  // are not guarded.
  BusGuard(std::byte* begin, uint64_t size_bytes, uint64_t page_bytes);
  BusGuard(const BusGuard&) = delete;
  BusGuard& operator=(const BusGuard&) = delete;
  BusGuard(BusGuard&& other) noexcept { *this = static_cast<BusGuard&&>(other); }
  BusGuard& operator=(BusGuard&& other) noexcept;
  ~BusGuard() { leave(); }

  bool active() const { return slot_ >= 0; }
  uint64_t lost_bytes() const;  // replaced by faults so far

 private:
  void leave();
  int slot_ = -1;
};

}  // namespace mooncache

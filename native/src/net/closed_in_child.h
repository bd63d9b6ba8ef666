// Descriptors that a forked child does not keep.
//
// A child holds every socket of its parent open. If the parent is killed then, its peers do not hear of its
// end before the child ends, and keep what they granted to it; memory that was passed by descriptor stays
// allocated as long. CLOEXEC helps at exec only, and workers of engines are forked without it.
#pragma once

#include <atomic>
#include <utility>

namespace mooncache::net {

// Names a descriptor while it is open. In a child, before fork() returns there, the number stands for an
// empty eventfd: it is not free for another file, so closing it later, as its owner's destructor may, is
// harmless.
class ClosedInChild {
 public:
  ClosedInChild() = default;
  explicit ClosedInChild(int fd);
  ~ClosedInChild() { release(); }
  ClosedInChild(ClosedInChild&& other) noexcept
      : fd_(other.fd_), slot_(std::exchange(other.slot_, nullptr)) {}
  ClosedInChild& operator=(ClosedInChild&& other) noexcept {
    release();
    fd_ = other.fd_;
    slot_ = std::exchange(other.slot_, nullptr);
    return *this;
  }
  // Before the descriptor is closed.
  void release();

 private:
  int fd_ = -1;
  std::atomic<int>* slot_ = nullptr;
};

}  // namespace mooncache::net

// What links that copy memory themselves have in common: a bounded queue, moved front to back in bounded
// steps on the polling thread. Between two steps cancel() and close() find no byte under way.
#pragma once

#include <deque>

#include "mooncache/transport.h"

namespace mooncache {

// Sum of the slices; false when it overflows.
bool total_bytes(std::span<const Slice> slices, uint64_t& total);
// Whether [offset, offset + length) lies inside a remote extent of `size` bytes.
inline bool inside(uint64_t offset, uint64_t length, uint64_t size) {
  return offset <= size && length <= size - offset;
}

class QueuedLink : public Link {
 public:
  size_t submit(std::span<const Transfer> transfers) override;
  size_t poll(std::span<Completion> completions, Deadline deadline) override;
  Status cancel(TransferId id) override;
  void close() override;
  bool healthy() const override { return !closed_ && !dead_; }

 protected:
  struct Pending {
    Transfer transfer;
    uint64_t length = 0;
    uint64_t moved = 0;
    uint32_t crc = 0;
    size_t slice = 0;  // the slice that goes next, and where in it
    size_t slice_offset = 0;
    bool started = false;
    Code code = Code::kOk;  // refused before the start
  };

  explicit QueuedLink(const Capabilities& capabilities) : capabilities_(capabilities) {}
  // Called once before the first byte, and once after the last: may refuse.
  virtual Code begin(const Pending& pending) = 0;
  virtual Code end(const Pending& pending) = 0;
  // Moves the next bytes of `piece` (a part of one slice) to or from the extent at pending.moved.
  virtual Code move(Pending& pending, Slice piece) = 0;
  virtual size_t step_bytes() const { return 1 << 20; }
  // The peer is gone: everything queued completes with CONNECTION_LOST.
  void mark_dead() { dead_ = true; }

 private:
  bool step(Pending& pending, Code& code);

  const Capabilities& capabilities_;
  std::deque<Pending> queue_;
  std::deque<Completion> done_;
  bool closed_ = false;
  bool dead_ = false;
};

}  // namespace mooncache

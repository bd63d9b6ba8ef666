// What a connection has to send: heads of responses, and block memory under a pin, sent with one gathering
// call. A pin ends when the last byte of its block is with the kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "mooncache/bytes.h"
#include "net/stream.h"
#include "server/holdings.h"
#include "server/loop.h"
#include "server/progress.h"
#include "wire/frame.h"

namespace mooncache::server {

// Of a block that the processor cannot address: so much of it is in host memory on its way in, and out.
inline constexpr size_t kStagingBytes = 256 << 10;

struct OutPiece {
  const std::byte* data = nullptr;  // null: at head_offset in the head buffer, or staged
  size_t head_offset = 0;
  uint64_t block_offset = 0;  // staged: where it begins in the block under `hold`
  size_t size = 0;
  Hold hold;
  uint64_t start_ns = 0;
  uint8_t opcode = 0;  // not 0: the last piece of a response to this opcode
  bool with_fds = false;
  bool staged = false;  // the processor cannot address the block: it is sent window by window
};

class OutputQueue {
 public:
  OutputQueue(Loop& loop, Holdings& held, Progress& progress)
      : loop_(loop), held_(held), progress_(progress) {}

  bool empty() const { return next_ == pieces_.size(); }
  // Nothing more may be asked for before the peer has taken something.
  bool full() const;

  // The head of the response to `request`. `last`: no payload follows.
  void push_head(const wire::FrameHeader& request, std::span<const std::byte> meta, uint64_t payload_bytes,
                 uint64_t start_ns, bool last);
  void push(const OutPiece& piece);
  // These descriptors go with the last head, and stay open under `hold`.
  void attach(std::vector<int> fds, Hold hold = {});
  bool attaching() const { return !fds_.empty(); }

  // Sends what the socket takes at once, `budget` bytes at most. False: the connection cannot go on.
  bool flush(net::Stream& stream, uint64_t budget);
  // Everything queued is given up, and the pins with it.
  void discard();
  // While nothing is in hand.
  void free_window();
  uint64_t held_bytes() const;

 private:
  // The part of a staged piece that is in host memory.
  struct Window {
    static constexpr size_t kNoPiece = SIZE_MAX;
    std::unique_ptr<std::byte[]> memory;
    size_t piece = kNoPiece;  // number in the queue
    size_t begin = 0, size = 0;
  };

  bool flush_head_with_fds(net::Stream& stream, bool& moved);
  size_t gather(std::span<ConstSlice> slices, uint64_t budget, uint64_t& bytes);
  ConstSlice sendable(size_t number, size_t skip, bool may_fill);
  void sent(size_t bytes);

  Loop& loop_;
  Holdings& held_;
  Progress& progress_;
  std::vector<std::byte> heads_;
  std::vector<OutPiece> pieces_;
  size_t next_ = 0;       // first piece not sent completely
  size_t next_sent_ = 0;  // bytes of it
  uint64_t bytes_ = 0;    // not sent yet
  Window window_;
  std::vector<int> fds_;
};

}  // namespace mooncache::server

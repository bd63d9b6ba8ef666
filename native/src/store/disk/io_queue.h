// Asynchronous reads and writes of one file or block device: the floor of the SSD tier.
//
// One thread owns a queue: it submits, and waits for what ends. Everything above sees this interface alone,
// so a test puts its own queue in place and tears, delays, drops or refuses what it likes.
//
// Two implementations: io_uring by its system calls (no library), and a few threads with pread and pwrite
// where the kernel or a container's filter refuses io_uring.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/status.h"

namespace mooncache::store::disk {

// What O_DIRECT asks of addresses, offsets and lengths on every device that is sold.
inline constexpr uint64_t kPageBytes = 4096;

struct Superblock;

struct Io {
  enum class Kind : uint8_t { kRead, kWrite, kSync };
  Kind kind = Kind::kRead;
  uint64_t offset = 0;
  Slice memory;          // kWrite reads it, kSync has none; valid until the end is reported
  int buffer = -1;       // which of the registered buffers it lies in; -1 = none
  uint64_t cookie = 0;   // comes back with the end
  bool lasting = false;  // kSync: one waits until what was written outlives this host, too
};

struct IoEnd {
  uint64_t cookie = 0;
  int64_t result = 0;  // bytes moved, or -errno
};

class IoQueue {
 public:
  virtual ~IoQueue() = default;
  // The owner's thread. False: as many are under way as the queue takes.
  virtual bool submit(const Io& io) = 0;
  // The owner's thread: starts what was submitted, without a wait. For an owner that has other work to do
  // before its next wait().
  virtual void begin() {}
  // The owner's thread: starts what was submitted, and returns what has ended. Waits for the first end, for
  // wake(), or `timeout_ms`.
  virtual void wait(std::vector<IoEnd>& ends, int timeout_ms) = 0;
  // Any thread.
  virtual void wake() = 0;
  // For the log: "io_uring", or the threads and why.
  virtual std::string description() const = 0;

  // Of a queue that keeps parts of the file elsewhere (spool_queue.h).
  // Before everything but the superblock.
  virtual Status laid_out(const Superblock& /*layout*/) { return Status::ok(); }
  // False: no more blocks for now, because what is written already has not gone where it belongs.
  virtual bool takes_blocks() const { return true; }
  // The owner's thread. The segment that begins here will not be read before it is written again.
  virtual void released(uint64_t /*offset*/) {}
  // Any thread. The range will be overwritten elsewhere, with `head` and then zeros, which has happened when
  // sync_overwritten() is true. Whether nothing of it is in the file.
  virtual bool overwrite_elsewhere(uint64_t /*offset*/, uint64_t /*size*/,
                                   std::span<const std::byte> /*head*/) {
    return false;
  }
  virtual bool sync_overwritten() { return true; }
  // The owner's thread, at an orderly end: what was written goes where it belongs, within a few seconds.
  virtual void finish() {}
};

struct IoQueueOptions {
  uint32_t depth = 128;
  uint32_t threads = 8;  // of the fallback
  bool allow_uring = true;
};

// `buffers` are registered where the kernel allows it. The descriptor stays the caller's.
std::unique_ptr<IoQueue> open_io_queue(int fd, std::span<const iovec> buffers, const IoQueueOptions& options);
Result<std::unique_ptr<IoQueue>> open_uring_queue(int fd, std::span<const iovec> buffers, uint32_t depth);
std::unique_ptr<IoQueue> open_thread_queue(int fd, uint32_t depth, uint32_t threads, std::string why);

}  // namespace mooncache::store::disk

// Whose turn it is to have a lane of a node: first come, first served.
//
// Calls that move many bytes keep a lane for long. They may have all lanes but one, which is there in
// addition: a question or a small block waits for other small ones at most, never for the bulk of its own
// process.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "net/socket.h"

namespace mooncache {

enum class LaneUse : uint8_t { kSmall, kBulk };

// What a call moves at most to count as small: about as much as one system call takes.
inline constexpr uint64_t kSmallCallBytes = 64 << 10;

class LaneQueue;

// A place in the queue. Its end gives it back, and the turn with it when that was not taken.
class LaneTicket {
 public:
  LaneTicket(LaneQueue& queue, LaneUse use);
  ~LaneTicket();
  LaneTicket(const LaneTicket&) = delete;
  LaneTicket& operator=(const LaneTicket&) = delete;
  // Readable once it is this one's turn. -1: no descriptor was left, ask again after a while.
  int fd() const { return event_.get(); }

 private:
  friend class LaneQueue;
  LaneQueue& queue_;
  const LaneUse use_;
  bool granted_ = false;  // guarded by the queue's mutex
  net::UniqueFd event_;
};

class LaneQueue {
 public:
  // `bulk_max` turns at a time for bulk, and one more for small calls.
  explicit LaneQueue(uint32_t bulk_max) : bulk_max_(bulk_max) {}
  uint32_t turns_max() const { return bulk_max_ + 1; }

  // True: it is the caller's turn, until release(). False: `ticket` waits in the queue; ask again with it.
  bool acquire(LaneUse use, std::unique_ptr<LaneTicket>& ticket);
  // The end of a turn; the ticket that waits longest and may have it is next.
  void release(LaneUse use);
  // Turns under way, those that were granted and not taken so far included.
  uint32_t turns() const;
  // All tickets in the queue ask again, for the last time: their descriptors stay readable.
  void wake_all();

 private:
  friend class LaneTicket;
  bool free_for(LaneUse use) const;
  void count(LaneUse use);
  void grant_locked(LaneUse use);
  void leave(LaneTicket& ticket);

  const uint32_t bulk_max_;
  mutable std::mutex mutex_;
  uint32_t turns_ = 0;
  uint32_t bulk_turns_ = 0;
  std::deque<LaneTicket*> waiting_;
};

}  // namespace mooncache

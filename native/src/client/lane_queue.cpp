#include "client/lane_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace mooncache {

namespace {

void wake(int fd) {
  const uint64_t one = 1;
  // a full counter is readable as well
  if (fd >= 0 && write(fd, &one, sizeof one) < 0) return;
}

}  // namespace

LaneTicket::LaneTicket(LaneQueue& queue, LaneUse use)
    : queue_(queue), use_(use), event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

LaneTicket::~LaneTicket() {
  queue_.leave(*this);
}

bool LaneQueue::free_for(LaneUse use) const {
  return turns_ < turns_max() && (use == LaneUse::kSmall || bulk_turns_ < bulk_max_);
}

void LaneQueue::count(LaneUse use) {
  ++turns_;
  bulk_turns_ += use == LaneUse::kBulk ? 1 : 0;
}

bool LaneQueue::acquire(LaneUse use, std::unique_ptr<LaneTicket>& ticket) {
  std::unique_ptr<LaneTicket> spare;  // ends after the lock, which its end takes
  if (!ticket) {
    {
      const std::lock_guard lock(mutex_);
      // No ticket that could have this turn is in the queue: release() leaves none behind.
      if (free_for(use)) {
        count(use);
        return true;
      }
    }
    spare = std::make_unique<LaneTicket>(*this, use);  // a system call
  }
  const std::lock_guard lock(mutex_);
  if (ticket) {
    if (!ticket->granted_) return false;
    ticket->granted_ = false;  // from now on the turn is the caller's
    spare = std::move(ticket);
    return true;
  }
  if (free_for(use)) {
    count(use);
    return true;
  }
  waiting_.push_back(spare.get());
  ticket = std::move(spare);
  return false;
}

void LaneQueue::release(LaneUse use) {
  const std::lock_guard lock(mutex_);
  grant_locked(use);
}

void LaneQueue::grant_locked(LaneUse use) {
  --turns_;
  bulk_turns_ -= use == LaneUse::kBulk ? 1 : 0;
  for (auto at = waiting_.begin(); at != waiting_.end() && turns_ < turns_max();) {
    LaneTicket& next = **at;
    if (!free_for(next.use_)) {
      ++at;
      continue;
    }
    at = waiting_.erase(at);
    count(next.use_);
    next.granted_ = true;
    wake(next.fd());
  }
}

void LaneQueue::leave(LaneTicket& ticket) {
  const std::lock_guard lock(mutex_);
  std::erase(waiting_, &ticket);
  if (std::exchange(ticket.granted_, false)) grant_locked(ticket.use_);
}

uint32_t LaneQueue::turns() const {
  const std::lock_guard lock(mutex_);
  return turns_;
}

void LaneQueue::wake_all() {
  const std::lock_guard lock(mutex_);
  for (const LaneTicket* ticket : waiting_) wake(ticket->fd());
}

}  // namespace mooncache

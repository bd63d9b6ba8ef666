#include "transfer/peer.h"

namespace mooncache::transfer {

Job::Job(Kind kind_in, Deadline deadline_in)
    : kind(kind_in), deadline(deadline_in), cancel_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Status Job::wait(Deadline until) {
  std::unique_lock lock(mutex_);
  while (state_ != State::kDone) {
    if (until.expired()) return {Code::kDeadlineExceeded, "the transfer is still under way"};
    changed_.wait_until(lock, std::min(until.at, Deadline::after_ms(1000).at));
  }
  return status_;
}

bool Job::done() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::kDone;
}

bool Job::claim() {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kQueued) return false;
  state_ = State::kRunning;
  return true;
}

// Its thread looks at cancel_fd() wherever it waits, and between pieces where it copies.
void Job::cancel() {
  std::unique_lock lock(mutex_);
  if (state_ == State::kQueued) {
    state_ = State::kDone;
    status_ = {Code::kCancelled, "cancelled by the caller"};
    changed_.notify_all();
    return;
  }
  cancelled_.store(true);
  const uint64_t one = 1;
  (void)!::write(cancel_fd_.get(), &one, sizeof one);
  changed_.wait(lock, [this] { return state_ == State::kDone; });
}

void Job::finish(Status status) {
  const std::lock_guard lock(mutex_);
  if (state_ == State::kDone) return;
  state_ = State::kDone;
  status_ = std::move(status);
  changed_.notify_all();
}

std::string Job::route() const {
  const std::lock_guard lock(mutex_);
  return route_;
}

void Job::set_route(std::string route) {
  const std::lock_guard lock(mutex_);
  route_ = std::move(route);
}

}  // namespace mooncache::transfer

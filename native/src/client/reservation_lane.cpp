#include "client/reservation_lane.h"

#include <algorithm>

#include "transport/grant_messages.h"
#include "transport/one_request.h"

namespace mooncache {

namespace {

// A node that is slow keeps its reservations: only the end of the connection ends them.
constexpr int kPingPatienceMs = 10'000;
// How often a thread that waits for the lane looks at its cancel token.
constexpr auto kCancelInterval = std::chrono::milliseconds(5);

}  // namespace

ReservationLane::ReservationLane(std::unique_ptr<Session> session) : session_(std::move(session)) {
  session_->on_late_answer([this](wire::Opcode opcode, const Status& status, Reader& in) {
    take_late_answer(opcode, status, in);
  });
}

// The answer to a RESERVE that was cut short: its space is no longer wanted.
void ReservationLane::take_late_answer(wire::Opcode opcode, const Status& status, Reader& in) {
  if (opcode != wire::Opcode::kReserve || !status) return;
  const auto granted = wire::decode_items<wire::ReserveResult>(in);
  if (!granted) return;
  const std::lock_guard lock(mutex_);
  for (const auto& item : *granted) {
    if (item.code == Code::kOk) unwanted_.push_back(item.extent.grant);
  }
}

Status ReservationLane::acquire(const CallOptions& options) {
  InterruptLook look(options.interrupted);
  std::unique_lock lock(mutex_);
  while (in_use_) {
    if (options.interrupted != nullptr) {
      lock.unlock();
      const bool interrupted = look.interrupted();
      lock.lock();
      if (interrupted) return InterruptLook::status();
      if (!in_use_) break;
    }
    if (options.cancel != nullptr && options.cancel->cancelled())
      return {Code::kCancelled, "cancelled by the caller"};
    if (options.deadline.expired()) {
      return {Code::kDeadlineExceeded, "the deadline passed while other threads used the connection"};
    }
    (void)released_.wait_until(lock, std::min(options.deadline.at, Deadline::after(kCancelInterval).at));
  }
  in_use_ = true;
  return Status::ok();
}

void ReservationLane::release() {
  if (session_ && session_->broken()) close();
  send_aborts();
  bool owing = false;
  {
    const std::lock_guard lock(mutex_);
    owing = !unwanted_.empty();
  }
  if (owing && count == 0) close();
  {
    const std::lock_guard lock(mutex_);
    in_use_ = false;
  }
  released_.notify_one();
}

Status ReservationLane::run(Program& program, const CallOptions& options) {
  if (!session_) return {Code::kConnectionLost, "the reservation's connection is gone"};
  InterruptLook look(options.interrupted);
  return session_->run(program, options.deadline, options.cancel ? options.cancel->fd() : -1,
                       Session::WhenCut::kAbandon, &look);
}

void ReservationLane::close() {
  broken_ = true;  // the end of the connection gives the space back
  session_.reset();
}

bool ReservationLane::may_have_link(Node& node) const {
  if (!session_ || link_refused_) return false;
  return session_->route() == Route::kUnix ? node.one_sided_writes()
                                           : node.rdma_for(*session_, steady_ms()) != nullptr;
}

void ReservationLane::last_left() {
  {
    const std::lock_guard lock(mutex_);
    if (in_use_ || unwanted_.empty()) return;
    in_use_ = true;
  }
  release();
}

void ReservationLane::ping(int cancel_fd) {
  {
    const std::lock_guard lock(mutex_);
    if (in_use_ || broken_ || count == 0) return;
    in_use_ = true;
  }
  // a node of this host sees the end of a process at once: it needs no sign of life
  if (session_ && session_->route() == Route::kTcp) {
    OneRequest program({wire::Opcode::kPing, 0, {}, {}});
    const Status status = session_->run(program, Deadline::after_ms(kPingPatienceMs), cancel_fd);
    if (!status || !program.status()) close();
  }
  release();
}

void ReservationLane::forget(uint64_t grant) {
  {
    const std::lock_guard lock(mutex_);
    if (broken_) return;  // the node forgot it already
    unwanted_.push_back(grant);
    if (in_use_) return;  // who has the lane tells the node
    in_use_ = true;
  }
  release();
}

void ReservationLane::send_aborts() {
  std::vector<uint64_t> grants;
  {
    const std::lock_guard lock(mutex_);
    grants.swap(unwanted_);
  }
  if (!session_ || session_->broken() || grants.empty()) return;
  Request request;
  encode_abort(request, grants);
  OneRequest program(std::move(request));
  if (!session_->pump(&program) || !session_->abandon()) return close();
  if (program.sent()) return;
  const std::lock_guard lock(mutex_);  // too much is under way: with the next use
  unwanted_.insert(unwanted_.end(), grants.begin(), grants.end());
}

void ping_lane(ReservationLane& lane, int cancel_fd) {
  lane.ping(cancel_fd);
}

}  // namespace mooncache

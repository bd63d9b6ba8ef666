#include "client/reservation_lane.h"

#include <utility>

#include "client/impl.h"
#include "transport/grant_messages.h"
#include "transport/one_request.h"

namespace mooncache {

namespace {

// A node that is slow keeps its reservations: only the end of the connection ends them.
constexpr int kPingPatienceMs = 10'000;

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

bool ReservationLane::seize() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(in_use_, true);
}

std::unique_ptr<Session> ReservationLane::take() {
  if (broken_ || !seize()) return nullptr;
  if (session_) return std::move(session_);
  release();
  return nullptr;
}

void ReservationLane::give_back(std::unique_ptr<Session> session, bool cut) {
  session_ = std::move(session);
  if (cut && !session_->abandon()) close();
  release();
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
  const std::lock_guard lock(mutex_);
  in_use_ = false;
}

void ReservationLane::close() {
  broken_ = true;  // the end of the connection gives the space back
  session_.reset();
}

bool ReservationLane::may_have_link(Node& node, const Session& session) const {
  if (link_refused_) return false;
  return session.route() == Route::kUnix ? node.one_sided_writes()
                                         : node.rdma_for(session, steady_ms()) != nullptr;
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

void ReservationLane::forget(std::span<const uint64_t> grants) {
  {
    const std::lock_guard lock(mutex_);
    if (broken_ || grants.empty()) return;  // the node forgot them already
    unwanted_.insert(unwanted_.end(), grants.begin(), grants.end());
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

// Lanes as a call's sources -------------------------------------------------------------------------------

Result<Lane> HeldLane::acquire(Route, LaneUse use, std::unique_ptr<LaneTicket>&) {
  Lane lane;
  lane.use = use;
  lane.session = lane_.take();
  if (!lane.session && lane_.broken()) return {Code::kClosed, "the reservations' connection is gone"};
  return lane;
}

void HeldLane::give_back(Lane lane, bool cut) {
  node_.count_bytes(lane);
  lane_.give_back(std::move(lane.session), cut);
}

RoomyLane::~RoomyLane() {
  leave();
}

void RoomyLane::leave() {
  if (lane_) leave_lane(impl_, *lane_, reservations_);
  lane_.reset();
}

bool RoomyLane::alone() const {
  const std::lock_guard lock(impl_.mutex);
  return lane_ && lane_->count == reservations_;
}

std::shared_ptr<ReservationLane> RoomyLane::keep(uint32_t kept) {
  if (lane_) leave_lane(impl_, *lane_, reservations_ - kept);
  return std::move(lane_);
}

// False: all have as many reservations as they may, and another one has to be made.
bool RoomyLane::choose() {
  const std::lock_guard lock(impl_.mutex);
  std::erase_if(impl_.reservation_lanes, [](const auto& entry) { return entry.first.expired(); });
  auto& lanes = impl_.reservation_lanes[node_];
  std::erase_if(lanes, [](const auto& lane) { return lane->broken(); });
  for (const auto& lane : lanes) {
    if (lane->count >= impl_.config.reservations_per_lane) continue;
    lane->count += reservations_;
    lane_ = lane;
    return true;
  }
  return false;
}

Status RoomyLane::make(Route route) {
  {
    const std::lock_guard lock(impl_.mutex);
    full_ = impl_.reservation_lanes[node_].size() >= impl_.config.reservation_lanes_max;
    if (full_) return {Code::kClosed, "no more lanes than so many"};
  }
  impl_.counters.add(Counter::kConnects);
  auto session = node_->start_session(route);
  if (!session) {
    impl_.counters.add(Counter::kConnectFailures);
    return session.status();
  }
  lane_ = std::make_shared<ReservationLane>(std::move(*session));
  lane_->count = reservations_;
  impl_.keeper->keep(lane_);
  const std::lock_guard lock(impl_.mutex);
  impl_.reservation_lanes[node_].push_back(lane_);
  return Status::ok();
}

Result<Lane> RoomyLane::acquire(Route route, LaneUse use, std::unique_ptr<LaneTicket>&) {
  if (lane_ && lane_->broken()) leave();
  const bool known = lane_ || choose();
  if (!known) {
    if (Status status = make(route); !status) return status;
  }
  Lane lane;
  lane.use = use;
  lane.session = lane_->take();
  lane.reused = known && lane.session && lane.session->ready();
  if (lane.reused) lane.session->begin_use();
  return lane;
}

void RoomyLane::give_back(Lane lane, bool cut) {
  node_->count_bytes(lane);
  lane_->give_back(std::move(lane.session), cut);
}

void leave_lane(Client::Impl& impl, ReservationLane& lane, uint32_t reservations) {
  uint32_t others = 0;
  {
    const std::lock_guard lock(impl.mutex);
    lane.empty_since_ms = steady_ms();
    others = lane.count -= reservations;
  }
  if (others == 0 && reservations > 0 && impl.usable()) lane.last_left();
}

void ping_lane(ReservationLane& lane, int cancel_fd) {
  lane.ping(cancel_fd);
}

}  // namespace mooncache

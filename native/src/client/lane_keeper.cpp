#include "client/lane_keeper.h"

#include <algorithm>

#include "client/impl.h"
#include "client/reservation_lane.h"

namespace mooncache {

struct LaneKeeper::State {
  explicit State(uint32_t interval_ms) : interval(std::max(interval_ms, 1u)) {}

  const std::chrono::milliseconds interval;
  CancelToken cancel;
  std::mutex mutex;  // guards all below
  std::condition_variable stopped;
  bool stop = false;
  std::vector<std::weak_ptr<ReservationLane>> lanes;
  std::thread thread;
};

LaneKeeper::LaneKeeper(uint32_t interval_ms)
    : fork_generation_(fork_generation_now()), state_(std::make_unique<State>(interval_ms)) {}

LaneKeeper::~LaneKeeper() {
  if (fork_generation_ != fork_generation_now()) {
    (void)state_.release();  // the thread is the parent's, and its locks may be held forever
    return;
  }
  stop();
}

void LaneKeeper::keep(std::weak_ptr<ReservationLane> lane) {
  const std::lock_guard lock(state_->mutex);
  if (state_->stop) return;
  std::erase_if(state_->lanes, [](const auto& known) { return known.expired(); });
  state_->lanes.push_back(std::move(lane));
  if (!state_->thread.joinable()) state_->thread = std::thread([state = state_.get()] { run(*state); });
}

void LaneKeeper::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    thread.swap(state_->thread);
  }
  state_->cancel.cancel();
  state_->stopped.notify_all();
  if (thread.joinable()) thread.join();
}

void LaneKeeper::run(State& state) {
  std::unique_lock lock(state.mutex);
  while (!state.stopped.wait_for(lock, state.interval, [&] { return state.stop; })) {
    const auto lanes = state.lanes;
    lock.unlock();
    for (const auto& weak : lanes) {
      if (const auto lane = weak.lock(); lane && !state.cancel.cancelled()) {
        ping_lane(*lane, state.cancel.fd());
      }
    }
    lock.lock();
  }
}

}  // namespace mooncache

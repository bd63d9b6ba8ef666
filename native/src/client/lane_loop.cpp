#include "client/lane_loop.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <thread>

namespace mooncache {

namespace {

// How long to sleep before asking again for a lane, where no descriptor was left that would tell.
constexpr int kLaneWaitMs = 1;
// Silence after which a node that may hold a request back is asked for a sign of life: this part of the time
// in which a stall is noticed.
constexpr uint64_t kSilenceShare = 4;
// A deadline that passes after less silence than this is not held against the node.
constexpr uint64_t kSlowMs = 100;

class LaneLoop {
 public:
  LaneLoop(std::span<LaneTask> tasks, const CallOptions& options, const std::atomic<bool>& closed,
           const LoopLimits& limits, Counters& counters, Hedges* hedges)
      : options_(options),
        closed_(closed),
        limits_(limits),
        counters_(counters),
        now_ms_(steady_ms()),
        look_(options.interrupted),
        has_bulk_(std::any_of(tasks.begin(), tasks.end(),
                              [](const LaneTask& task) { return task.use == LaneUse::kBulk; })),
        hedges_(hedges) {
    tasks_.reserve(tasks.size());
    for (LaneTask& task : tasks) {
      tasks_.push_back(&task);
      if (hedges_ != nullptr && task.hedge_after_us > 0) hedge_due_ = std::min(hedge_due_, hedge_time(task));
    }
  }

  void run() {
    for (LaneTask* task : tasks_) task->last_progress_ms = task->started_ms = now_ms_;
    auto last_move = begun_;
    for (;;) {
      bool moved = false;
      for (LaneTask* task : tasks_) {
        if (!task->done) moved = advance(*task) || moved;
      }
      if (!begun_hedges_.empty()) race();
      if (std::all_of(tasks_.begin(), tasks_.end(), [](const LaneTask* task) { return task->done; })) return;
      if (Status stop = interrupted(); !stop) return end_all(stop);
      const auto now = Deadline::Clock::now();
      now_ms_ = static_cast<uint64_t>(
          std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count());
      if (now >= hedge_due_ && begin_hedges(now)) continue;
      if (moved) {
        last_move = now;
        if (has_bulk_) std::this_thread::yield();
        continue;
      }
      if (now - last_move < std::chrono::microseconds(limits_.spin_us)) continue;
      for (LaneTask* task : tasks_) {
        if (!task->done) seek_life(*task);
      }
      give_up_stalled();
      sleep();
    }
  }

 private:
  using Time = Deadline::Clock::time_point;
  Time hedge_time(const LaneTask& task) const {
    return begun_ + std::chrono::microseconds(task.hedge_after_us);
  }

  // Asks for hedges of what is late. True: there are some.
  bool begin_hedges(Time now) {
    hedge_due_ = Time::max();
    const size_t before = tasks_.size();
    for (size_t i = 0; i < before; ++i) {
      LaneTask& task = *tasks_[i];
      if (task.done || task.hedge_after_us == 0) continue;
      if (now < hedge_time(task)) {
        hedge_due_ = std::min(hedge_due_, hedge_time(task));
        continue;
      }
      task.hedge_after_us = 0;
      for (LaneTask& hedge : hedges_->begin(task)) {
        begun_hedges_.push_back(std::move(hedge));
        begun_hedges_.back().late = &task;
        begun_hedges_.back().last_progress_ms = begun_hedges_.back().started_ms = now_ms_;
        tasks_.push_back(&begun_hedges_.back());
      }
    }
    return tasks_.size() > before;
  }

  // The first of a task and its hedges to have everything ends the others.
  void race() {
    for (LaneTask& hedge : begun_hedges_) {
      LaneTask& late = *hedge.late;
      if (!late.done && hedge.done && hedge.status && hedges_->have_all(late)) {
        late.overtaken = true;
        withdraw(late);
      }
      if (!hedge.done && late.done && (late.overtaken || late.status)) withdraw(hedge);
    }
  }

  // Says nothing about the node: it was answering, or about to.
  void withdraw(LaneTask& task) {
    close(task);
    task.status = {Code::kNodeUnavailable, "another node was faster than " + task.node->info().node_id};
  }

  // What is under way on its lane is cut short with it.
  void close(LaneTask& task) {
    task.program.reset();
    task.sign_of_life.reset();
    task.ticket.reset();
    if (task.lane.session) task.source().drop(std::move(task.lane));
    task.lane = {};
    task.done = true;
    note_time(task);
  }

  void note_time(LaneTask& task) {
    task.took_us = static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::microseconds>(Deadline::Clock::now() - begun_).count());
  }

  Status interrupted() {
    if (look_.interrupted()) return InterruptLook::status();
    if (options_.cancel != nullptr && options_.cancel->cancelled())
      return {Code::kCancelled, "cancelled by the caller"};
    if (closed_.load(std::memory_order_relaxed)) return {Code::kClosed, "the client was closed"};
    if (options_.deadline.expired()) return {Code::kDeadlineExceeded, "the deadline passed"};
    return Status::ok();
  }

  // True when bytes moved.
  bool advance(LaneTask& task) {
    if (!task.lane.session && !open_lane(task)) return false;
    Session& session = *task.lane.session;
    // What the node offers is known when it has answered AUTH: only then can the way be chosen.
    if (!task.program && session.ready()) task.program = task.make_program(session);
    const Status status = session.pump(task.program.get());
    if (!status) {
      fail(task, status);
      return false;
    }
    bool moved = session.progressed();
    if (task.program && task.program->work()) moved = true;
    if (moved || (task.program && task.program->held_up())) {
      task.last_progress_ms = now_ms_;
      task.sign_of_life.reset();
      task.sign_requested = false;
    }
    if (task.program && session.idle_but_for_late_answers() && task.program->finished()) {
      task.done = true;
      task.program.reset();  // may hold a link to the session
      task.sign_of_life.reset();
      task.node->success(now_ms_);
      note_time(task);
      task.source().release(std::move(task.lane));
    }
    return moved;
  }

  // False when the task has to wait, or failed.
  bool open_lane(LaneTask& task) {
    const Route route = task.node->preferred_route(now_ms_);
    auto lane = task.source().acquire(route, task.use, task.ticket);
    if (!lane) {
      if (route == Route::kUnix && lane.code() != Code::kClosed) {
        task.node->unix_failed(now_ms_);
        return open_lane(task);
      }
      finish(task, lane.status());
      return false;
    }
    if (!lane->session) {  // other threads of this process use the lanes: says nothing about the node
      task.last_progress_ms = now_ms_;
      if (task.has_alternative && task.node->breaker_open(now_ms_)) give_up_waiting(task);
      return false;
    }
    task.last_progress_ms = task.started_ms = now_ms_;
    task.lane = std::move(*lane);
    return true;
  }

  // Moves the handshake by which a silent node shows that it lives. Silence counts, not its failure.
  void seek_life(LaneTask& task) {
    const uint64_t idle_ms = now_ms_ - std::min(now_ms_, task.last_progress_ms);
    if (task.may_hold_ms == 0 || !task.program || idle_ms < limits_.stall_timeout_ms / kSilenceShare) return;
    if (!task.sign_requested) {
      task.sign_requested = true;
      auto session = task.node->start_session(task.lane.session->route());
      if (session) task.sign_of_life = std::move(*session);
    }
    if (task.sign_of_life && !task.sign_of_life->ready() && !task.sign_of_life->pump(nullptr)) {
      task.sign_of_life.reset();
    }
  }

  static bool lives(const LaneTask& task) { return task.sign_of_life && task.sign_of_life->ready(); }

  // Those who have the lanes found the node sick meanwhile: as if the breaker had been open before. It says
  // nothing new about the node.
  void give_up_waiting(LaneTask& task) {
    counters_.add(Counter::kBreakerSkips);
    task.ticket.reset();
    task.done = true;
    task.status = {Code::kNodeUnavailable, "node " + task.node->info().node_id +
                                               " was given up while this call waited for a connection"};
  }

  void fail(LaneTask& task, const Status& status) {
    const bool handshaking = !task.lane.session->ready();
    const bool was_stale = task.lane.reused && !task.lane.session->response_seen();
    const Route route = task.lane.session->route();
    task.program.reset();
    task.source().drop(std::move(task.lane));
    task.lane = {};
    if (was_stale && status.code == Code::kConnectionLost) {
      counters_.add(Counter::kStaleLanes);  // it died in the pool: says nothing about the node now
      return;
    }
    if (handshaking && route == Route::kUnix && status.code == Code::kNodeUnavailable) {
      task.node->unix_failed(now_ms_);
      return;
    }
    if (handshaking) counters_.add(Counter::kConnectFailures);
    finish(task, status);
  }

  void finish(LaneTask& task, Status status) {
    close(task);
    // a caller's short patience is not a sign of a sick node
    const bool impatient =
        status.code == Code::kDeadlineExceeded && now_ms_ - task.last_progress_ms < kSlowMs;
    if (status.code != Code::kCancelled && status.code != Code::kClosed && !impatient) {
      task.node->failure(now_ms_, status, now_ms_ - std::min(now_ms_, task.started_ms));
    }
    task.status = std::move(status);
  }

  void end_all(const Status& status) {
    if (status.code == Code::kCancelled) counters_.add(Counter::kCancelled);
    if (status.code == Code::kDeadlineExceeded) counters_.add(Counter::kDeadlineExceeded);
    for (LaneTask* one : tasks_) {
      LaneTask& task = *one;
      if (task.done) continue;
      if (status.code == Code::kDeadlineExceeded && task.lane.session && !task.lane.session->ready()) {
        finish(task, {Code::kDeadlineExceeded,
                      "the deadline passed while connecting to node " + task.node->info().node_id});
      } else {
        finish(task, status);
      }
    }
  }

  void give_up_stalled() {
    for (LaneTask* one : tasks_) {
      LaneTask& task = *one;
      if (task.done) continue;
      const uint64_t idle_ms = now_ms_ - std::min(now_ms_, task.last_progress_ms);
      const bool connecting = task.lane.session && !task.lane.session->ready();
      const std::string& name = task.node->info().node_id;
      if (connecting && now_ms_ - task.started_ms > limits_.connect_timeout_ms) {
        const bool resolving = task.lane.session->resolving();
        finish(task, {Code::kNodeUnavailable, resolving ? "the host name " + task.node->info().tcp_host +
                                                              " of node " + name + " was not resolved in time"
                                                        : "node " + name + " did not answer HELLO in time"});
      } else if (task.has_alternative &&
                 idle_ms > limits_.stall_timeout_ms + (lives(task) ? task.may_hold_ms : 0)) {
        counters_.add(Counter::kStalls);
        finish(task, {Code::kNodeUnavailable, "node " + name + " moved no byte in time"});
      }
    }
  }

  void sleep() {
    polled_.clear();
    int timeout_ms = std::min(options_.deadline.remaining_ms(), 100);
    if (hedge_due_ != Time::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(hedge_due_ - Deadline::Clock::now());
      timeout_ms = static_cast<int>(std::clamp<int64_t>(left.count(), 0, timeout_ms));
    }
    for (const LaneTask* one : tasks_) {
      const LaneTask& task = *one;
      if (task.done) continue;
      if (!task.lane.session) {
        if (task.ticket && task.ticket->fd() >= 0)
          polled_.push_back({task.ticket->fd(), POLLIN, 0});
        else
          timeout_ms = std::min(timeout_ms, kLaneWaitMs);
      } else {
        polled_.push_back({task.lane.session->fd(), task.lane.session->poll_events(), 0});
        fds_.clear();
        const int patience_ms =
            task.program && task.lane.session->ready() ? task.program->wait_for(fds_) : -1;
        if (patience_ms >= 0) timeout_ms = std::min(timeout_ms, patience_ms);
        for (const int fd : fds_) polled_.push_back({fd, POLLIN, 0});
        if (task.sign_of_life && !task.sign_of_life->ready()) {
          polled_.push_back({task.sign_of_life->fd(), task.sign_of_life->poll_events(), 0});
        }
      }
    }
    if (options_.cancel != nullptr) polled_.push_back({options_.cancel->fd(), POLLIN, 0});
    const bool signalled =
        poll(polled_.data(), polled_.size(), look_.limit(timeout_ms)) < 0 && errno == EINTR;
    if (signalled) look_.soon();
    now_ms_ = steady_ms();
  }

  const Time begun_ = Deadline::Clock::now();
  Time hedge_due_ = Time::max();  // of the first task that may be late
  std::vector<LaneTask*> tasks_;  // hedges behind those of the caller
  std::deque<LaneTask> begun_hedges_;
  const CallOptions& options_;
  const std::atomic<bool>& closed_;
  const LoopLimits& limits_;
  Counters& counters_;
  uint64_t now_ms_;
  InterruptLook look_;
  // More such threads than processors would keep a small call of the process waiting for whole slices of the
  // scheduler: after each piece they stand back for other threads that can run.
  const bool has_bulk_;
  Hedges* const hedges_;
  std::vector<pollfd> polled_;
  std::vector<int> fds_;
};

}  // namespace

void run_tasks(std::span<LaneTask> tasks, const CallOptions& options, const std::atomic<bool>& closed,
               const LoopLimits& limits, Counters& counters, Hedges* hedges) {
  LaneLoop(tasks, options, closed, limits, counters, hedges).run();
}

}  // namespace mooncache

// A connection of the client that holds reservations, because the node forgets a reservation with its
// connection. A few dozen reservations share one lane, apart from the lanes of get and put, so that a
// layer-wise writer can hold hundreds of blocks open without hundreds of sockets.
//
// One thread uses it at a time (acquire, release). A call that was cut in the middle costs its own
// reservation only: its answer is swallowed when it comes. No thread waits for space while it has the lane:
// that may take as long as other reservations of the same lane need it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "client/node.h"
#include "mooncache/client.h"

namespace mooncache {

class ReservationLane {
 public:
  explicit ReservationLane(std::unique_ptr<Session> session);

  // Waits for the lane, no longer than the caller's patience lasts.
  Status acquire(const CallOptions& options);
  // Hands the lane on, after it has sent the node the grants that are no longer wanted.
  void release();

  // By the thread that has the lane.
  // One exchange. Only what the connection itself does wrong ends the lane, with its release: the program may
  // still refer to the session.
  Status run(Program& program, const CallOptions& options);
  // Its reservations are void.
  void close();
  Session* session() { return session_.get(); }  // null: closed
  // Whether bytes may move by a link of this connection now: shared memory, or RDMA.
  bool may_have_link(Node& node) const;
  // The node refused one, and would again.
  void link_refused() { link_refused_ = true; }

  // By any thread.
  bool broken() const { return broken_; }
  // A PING, unless the lane is in use, which says the same to the node.
  void ping(int cancel_fd);
  // Never waits: the node hears at once when the lane is free, else from its present user.
  void forget(uint64_t grant);
  // The last reservation has left: what the node could not hear by then ends with the connection.
  void last_left();

  // Written under Impl::mutex.
  std::atomic<uint32_t> count{0};           // reservations
  std::atomic<uint64_t> empty_since_ms{0};  // while there is none

 private:
  void take_late_answer(wire::Opcode opcode, const Status& status, Reader& in);
  void send_aborts();

  std::mutex mutex_;
  std::condition_variable released_;
  bool in_use_ = false;  // guarded by mutex_; session_ and link_refused_ belong to the thread that set it
  std::unique_ptr<Session> session_;
  bool link_refused_ = false;
  std::atomic<bool> broken_{false};
  std::vector<uint64_t> unwanted_;  // grants; guarded by mutex_
};

// The lane for the time of one exchange.
class LaneTurn {
 public:
  LaneTurn(ReservationLane& lane, const CallOptions& options) : lane_(lane), status_(lane.acquire(options)) {}
  ~LaneTurn() {
    if (status_) lane_.release();
  }
  LaneTurn(const LaneTurn&) = delete;
  LaneTurn& operator=(const LaneTurn&) = delete;
  const Status& status() const { return status_; }

 private:
  ReservationLane& lane_;
  Status status_;
};

}  // namespace mooncache

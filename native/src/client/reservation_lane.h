// A connection of the client that holds reservations, because the node forgets a reservation with its
// connection. Many reservations share one lane, apart from the lanes of get and put, so that a layer-wise
// writer can hold hundreds of blocks open without hundreds of sockets.
//
// One call uses it at a time (take, give_back). A call that was cut in the middle costs its own reservations
// only: its answer is swallowed when it comes. No thread waits for space while it has the lane: that may take
// as long as other reservations of the same lane need it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "client/node.h"
#include "mooncache/client.h"

namespace mooncache {

class ReservationLane {
 public:
  // `session` may still be connecting.
  explicit ReservationLane(std::unique_ptr<Session> session);

  // The connection for one exchange; null: another call has it, or it is gone (broken()).
  std::unique_ptr<Session> take();
  // Hands it on, after the node was sent the grants that are no longer wanted. `cut`: the exchange was cut
  // short. What the connection itself did wrong ends the lane.
  void give_back(std::unique_ptr<Session> session, bool cut);

  // By the call that has the connection.
  // Whether bytes may move by a link of this connection now: shared memory, or RDMA.
  bool may_have_link(Node& node, const Session& session) const;
  // The node refused one, and would again.
  void link_refused() { link_refused_ = true; }

  // By any thread.
  bool broken() const { return broken_; }
  // A PING, unless the lane is in use, which says the same to the node.
  void ping(int cancel_fd);
  // Never waits: the node hears at once when the lane is free, else from its present user.
  void forget(std::span<const uint64_t> grants);
  // The last reservation has left: what the node could not hear by then ends with the connection.
  void last_left();

  // Written under Impl::mutex.
  std::atomic<uint32_t> count{0};           // reservations
  std::atomic<uint64_t> empty_since_ms{0};  // while there is none

 private:
  bool seize();
  void release();
  void close();
  void take_late_answer(wire::Opcode opcode, const Status& status, Reader& in);
  void send_aborts();

  std::mutex mutex_;
  bool in_use_ = false;  // guarded by mutex_; session_ and link_refused_ belong to the thread that set it
  std::unique_ptr<Session> session_;
  bool link_refused_ = false;
  std::atomic<bool> broken_{false};
  std::vector<uint64_t> unwanted_;  // grants; guarded by mutex_
};

// The lane of some reservations, for calls on them.
class HeldLane final : public LaneSource {
 public:
  HeldLane(ReservationLane& lane, Node& node) : lane_(lane), node_(node) {}
  Result<Lane> acquire(Route route, LaneUse use, std::unique_ptr<LaneTicket>& ticket) override;
  void release(Lane lane) override { give_back(std::move(lane), false); }
  void drop(Lane lane) override { give_back(std::move(lane), true); }

 private:
  void give_back(Lane lane, bool cut);

  ReservationLane& lane_;
  Node& node_;
};

// A lane of the node with room for new reservations, or a new one, for the call that asks for them. They are
// counted as the lane's from the first use on.
class RoomyLane final : public LaneSource {
 public:
  RoomyLane(Client::Impl& impl, std::shared_ptr<Node> node, uint32_t reservations)
      : impl_(impl), node_(std::move(node)), reservations_(reservations) {}
  ~RoomyLane() override;
  RoomyLane(const RoomyLane&) = delete;
  RoomyLane& operator=(const RoomyLane&) = delete;

  Result<Lane> acquire(Route route, LaneUse use, std::unique_ptr<LaneTicket>& ticket) override;
  void release(Lane lane) override { give_back(std::move(lane), false); }
  void drop(Lane lane) override { give_back(std::move(lane), true); }

  // Null before the first use.
  ReservationLane* lane() const { return lane_.get(); }
  // There are as many lanes as there may be, and each has as many reservations as it may.
  bool full() const { return full_; }
  // No reservation but those that are asked for is the lane's.
  bool alone() const;
  // The lane with `kept` reservations, which are the caller's to count from now on.
  std::shared_ptr<ReservationLane> keep(uint32_t kept);

 private:
  bool choose();
  Status make(Route route);
  void give_back(Lane lane, bool cut);
  void leave();

  Client::Impl& impl_;
  const std::shared_ptr<Node> node_;
  const uint32_t reservations_;
  std::shared_ptr<ReservationLane> lane_;
  bool full_ = false;
};

// So many reservations are no longer there.
void leave_lane(Client::Impl& impl, ReservationLane& lane, uint32_t reservations);

}  // namespace mooncache

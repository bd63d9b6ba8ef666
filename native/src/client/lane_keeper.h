// Signs of life on the connections that hold reservations. A node gives back what a silent peer on the
// network holds, because that peer may have lost its host; a writer that is only slow says PING instead.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "mooncache/client.h"

namespace mooncache {

class ReservationLane;
// On the calling thread; `cancel_fd` cuts it.
void ping_lane(ReservationLane& lane, int cancel_fd);

// Its thread starts with the first lane and lives as long as the client.
class LaneKeeper {
 public:
  explicit LaneKeeper(uint32_t interval_ms);
  ~LaneKeeper();
  LaneKeeper(const LaneKeeper&) = delete;
  LaneKeeper& operator=(const LaneKeeper&) = delete;

  void keep(std::weak_ptr<ReservationLane> lane);
  // Cuts a PING that is under way. No lane is pinged afterwards.
  void stop();

 private:
  struct State;
  static void run(State& state);

  const uint64_t fork_generation_;
  std::unique_ptr<State> state_;
};

}  // namespace mooncache

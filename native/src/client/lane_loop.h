// Runs programs on the lanes of several nodes at once, on the caller's thread: one poll(2) over all of them
// with the deadline and the cancel token. A slow node delays its own program only.
#pragma once

#include <functional>
#include <vector>

#include "client/node.h"

namespace mooncache {

struct LaneTask {
  std::shared_ptr<Node> node;
  LaneSource* lanes = nullptr;  // null: the node's own
  // Makes the program once the session is ready; its route and its node's answer tell what is possible on it.
  std::function<std::unique_ptr<Program>(Session&)> make_program;
  bool has_alternative = false;  // give up early when the node stalls
  // How long the node may keep silent because it waits for space. Only a node that shows a sign of life on
  // another connection meanwhile is granted it: one that is stopped says as little as one that is full.
  uint32_t may_hold_ms = 0;
  LaneUse use = LaneUse::kSmall;
  // After so long its Hedges may have what it lacks read elsewhere as well; 0: never.
  uint32_t hedge_after_us = 0;

  LaneSource& source() const { return lanes != nullptr ? *lanes : *node; }

  // set by the loop
  Status status;
  bool done = false;
  std::unique_ptr<LaneTicket> ticket;  // while it waits for a lane
  Lane lane;
  std::unique_ptr<Program> program;
  uint64_t last_progress_ms = 0;
  uint64_t started_ms = 0;
  std::unique_ptr<Session> sign_of_life;  // a handshake under way, or over
  bool sign_requested = false;            // once for each silence
  uint64_t took_us = 0;                   // until it ended, from the beginning of the run
  LaneTask* late = nullptr;               // of a hedge: the task that it was made for
  bool overtaken = false;                 // its hedges were faster; the status is not OK then
};

// Second ways for tasks that are late.
class Hedges {
 public:
  virtual ~Hedges() = default;
  // Tasks that do elsewhere what `late` has not done; none: it goes on alone. Asked once for each task.
  virtual std::vector<LaneTask> begin(LaneTask& late) = 0;
  // Whether the hedges of `late` have done all that it lacks. If so it ends: what was under way on its lane
  // is cut short, so it writes nothing from then on.
  virtual bool have_all(const LaneTask& late) = 0;
};

struct LoopLimits {
  uint32_t connect_timeout_ms = 2000;
  uint32_t stall_timeout_ms = 1000;
  uint32_t spin_us = 0;
};

// Every task ends done, with OK or the reason; lanes are given back or closed. After the return no byte
// moves.
void run_tasks(std::span<LaneTask> tasks, const CallOptions& options, const std::atomic<bool>& closed,
               const LoopLimits& limits, Counters& counters, Hedges* hedges = nullptr);

}  // namespace mooncache

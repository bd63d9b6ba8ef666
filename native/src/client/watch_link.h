// The connection of a BlockWatch to one node. Many WAITs are open on it at a time, and their answers come in
// any order, each by its request id. It never waits: pump() moves what can be moved at once.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "client/node.h"

namespace mooncache {

class WatchLink {
 public:
  struct Limits {
    uint32_t connect_timeout_ms = 2000;
    // A node that was silent for so long, while a WAIT is open there, is asked for a sign of life. It is
    // asked with the WAIT for one at half of this, so that it need not be asked again, unless it is an older
    // one.
    uint32_t ping_interval_ms = 5000;
  };
  // Signs of life that a node may send at once, and those of a while in which this process did not run.
  static constexpr uint64_t kBeatsAtOnce = 16, kBeatsMax = 1024;
  // An answer to a WAIT: its request id, its status, what follows it. An error ends the connection.
  using Handler = std::function<Status(uint64_t, const Status&, Reader&)>;

  // Connects at the first pump().
  WatchLink(std::shared_ptr<Node> node, Limits limits, uint64_t now_ms)
      : node_(std::move(node)),
        key_generation_(node_->key_generation()),
        limits_(limits),
        started_ms_(now_ms),
        heard_ms_(now_ms),
        beats_counted_ms_(now_ms) {}

  Node& node() { return *node_; }
  bool ready() const { return ready_; }
  // The client has another key by now than the one that this connection proved.
  bool outdated() const { return key_generation_ != node_->key_generation(); }

  void wait(uint64_t request_id, wire::WaitRequest request);
  void withdraw(uint64_t request_id);
  // `waits`: a WAIT is open here. An error: the link has ended, and with it all that was sent.
  Status pump(uint64_t now_ms, bool waits, const Handler& handler);

  // -1: nothing to poll so far.
  int fd() const { return session_ ? session_->fd() : -1; }
  short events() const;
  // The next pump() must not be later, whatever the socket says.
  uint64_t due_ms(bool waits) const;

 private:
  void queue(wire::Opcode opcode, uint16_t flags, uint64_t request_id, std::span<const std::byte> meta);
  void queue_waits(uint64_t now_ms);
  Status connect(uint64_t now_ms);
  Status send();
  Status receive(uint64_t now_ms, const Handler& handler);
  Status parse(uint64_t now_ms, const Handler& handler);
  Status count_beat(uint64_t now_ms);
  Status look_alive(uint64_t now_ms, bool waits);

  const std::shared_ptr<Node> node_;
  const uint64_t key_generation_;
  const Limits limits_;
  std::unique_ptr<Session> session_;
  bool ready_ = false;
  bool wants_write_ = false;
  bool more_ = false;  // was not read to the end
  uint64_t started_ms_, heard_ms_;
  uint64_t asked_ms_ = 0;  // for a sign of life; 0: it came
  uint64_t beats_left_ = kBeatsAtOnce, beats_counted_ms_;
  std::vector<std::pair<uint64_t, wire::WaitRequest>> held_;  // until it is known how to ask this node
  std::vector<std::byte> out_, in_;
  size_t sent_ = 0;  // of out_
  size_t have_ = 0;  // of in_
};

}  // namespace mooncache

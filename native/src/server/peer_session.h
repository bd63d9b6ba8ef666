// One peer as the operations see it: who it is, what it holds, the request in hand and what is to be sent. It
// knows nothing of sockets and deadlines: those are the connection's.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "mooncache/bytes.h"
#include "server/holdings.h"
#include "server/loop.h"
#include "server/operations.h"
#include "server/output_queue.h"
#include "server/progress.h"
#include "server/secret_ring.h"
#include "wire/frame.h"
#include "wire/messages.h"

namespace mooncache::server {

// The tenant of a connection is the one whose key it proved; every operation uses that tenant alone, whatever
// a request says.
struct Identity {
  enum class State : uint8_t { kNone, kChallenged, kProven };
  State state = State::kNone;
  bool admin = false;
  wire::Bytes16 client_nonce{}, server_nonce{};
  std::string tenant_name;
  TenantId tenant = 0;
  uint64_t expires_unix_s = 0;  // of the token; 0 = it does not end
  ProvenSecret proven_by;       // the cluster's secret that its key comes from
  BlockWriter writer_said;      // until the proof
  uint64_t expires_ms = 0;      // the same in the clock of the loop
};

// How long the request in hand has waited for space, and may wait.
struct SpaceWait {
  uint64_t ticket = 0;  // its place among all that wait; 0: it has not waited yet
  uint64_t begin_ms = 0, deadline_ms = 0;
  uint32_t waited_ms = 0;
};

class PeerSession {
 public:
  PeerSession(Loop& loop, WaitTable::Owner& waiter_in, bool is_unix_in, bool is_tls_in, bool may_write_memory)
      : is_unix(is_unix_in),
        is_tls(is_tls_in),
        waiter(waiter_in),
        held(loop, may_write_memory),
        out(loop, held, progress),
        loop_(loop) {}

  const bool is_unix, is_tls;
  uint64_t serial = 0;       // among the connections of its loop
  WaitTable::Owner& waiter;  // its connection
  bool surplus = false;      // beyond max_connections
  Identity who;
  Holdings held;
  Progress progress;
  OutputQueue out;
  // The request in hand.
  wire::FrameHeader request;
  uint64_t start_ns = 0;
  SpaceWait wait;
  PendingOperation pending;

  bool proven() const { return who.state == Identity::State::kProven; }
  bool idle() const { return std::holds_alternative<std::monostate>(pending); }
  Inbound* inbound() { return std::get_if<Inbound>(&pending); }
  // The next event of its connection moves bytes of a payload, in or out.
  bool in_transfer() { return inbound() != nullptr || !out.empty(); }
  CloseReason close_reason() const { return close_reason_; }

  // Begins a request that does not end at once. The step may replace or end the state: do not use it
  // afterwards.
  template <typename State>
  Next begin(State state, uint64_t budget) {
    return pending.emplace<State>(std::move(state)).step(*this, budget);
  }
  // The head of the next request: how many bytes of meta follow. Nothing: it was refused, kClose has to
  // follow.
  std::optional<size_t> accept(std::span<const std::byte, wire::kHeaderBytes> header);
  // The accepted request is here.
  Next start(std::span<const std::byte, wire::kHeaderBytes> header, wire::Meta meta);
  // Goes on with the request in hand.
  Next resume();
  // Ends the request in hand, all waits, and all pins but those that the output queue needs.
  void abandon();

  // A writer that holds the status already.
  Writer& begin_response(Status status = Status::ok());
  Next respond(Writer& meta);
  // Only the head: payload follows, which begin_response's caller pushes.
  void respond_head(Writer& meta, uint64_t payload_bytes, bool last);
  Next respond_status(Status status);
  Next respond_codes(std::span<const Code> codes);
  // A frame of an open WAIT, whatever request is in hand.
  void respond_news(const WaitTable::News& news);
  // An error response, then the end.
  Next refuse(Code code, const std::string& message, CloseReason reason);
  Next malformed();
  // The same without a word in the log.
  Next close(Status status, CloseReason reason);

  // Whether the request may wait for space once more, `allowed_ms` in all. kSpace has to follow.
  bool may_wait(uint32_t allowed_ms);
  void end_wait();
  // Whether what costs so much may be done in this turn; if not, kTurn has to follow. Nothing that costs is
  // done without a budget: only a turn has one, not the visit in which a request arrives, of which there may
  // be many in a turn. The first step of a turn may cost more than is left, else it would never be taken.
  bool afford(uint64_t& budget, uint64_t cost);
  // The buffer for bytes whose place the processor cannot address: kStagingBytes.
  std::byte* staging();
  void free_staging() { staging_.reset(); }
  uint64_t held_bytes() const;

  // A window of progress_timeout_ms in which too little moved, while something had to move. `parked`: the
  // request waits for space.
  bool too_slow(bool parked);
  // How long the peer may send no request; 0 = no limit.
  uint64_t silence_limit_ms() const;

  Loop& loop() { return loop_; }
  Store& store() { return *loop_.shared().store; }
  const ServerConfig& config() const { return loop_.shared().config; }
  LoopMetrics& metrics() { return loop_.metrics; }
  uint64_t now_ms() const { return loop_.now_ms(); }

 private:
  Loop& loop_;
  CloseReason close_reason_ = CloseReason::kPeer;
  std::unique_ptr<std::byte[]> staging_;
};

}  // namespace mooncache::server

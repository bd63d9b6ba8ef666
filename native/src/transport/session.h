// One authenticated connection ("lane") to a node, driven by the thread that uses it.
//
// A Session never waits and owns no thread: pump() moves what the socket takes and gives right now,
// reading and writing in turn, so that neither end can block the other. What is sent and where answers
// go is decided by a Program; several of its requests may be in flight, answers come in request order.
// Because bytes move only inside pump(), dropping a Session is all that cancel needs.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "mooncache/transport.h"
#include "net/closed_in_child.h"
#include "net/resolver.h"
#include "net/socket.h"
#include "net/stream.h"
#include "wire/frame.h"
#include "wire/messages.h"

namespace mooncache {

struct Request {
  wire::Opcode opcode = wire::Opcode::kPing;
  uint16_t flags = 0;
  Writer meta;
  std::vector<ConstSlice> payload;

  void clear() {
    flags = 0;
    meta.bytes().clear();
    payload.clear();
  }
};

// Where a response's payload goes. A slice without data swallows its bytes.
struct PayloadSink {
  std::vector<Slice> slices;
  std::vector<uint32_t> item_ends;  // item k owns the slices before item_ends[k] that k - 1 does not own

  void clear() {
    slices.clear();
    item_ends.clear();
  }
  void add_item(std::span<const Slice> parts, uint64_t offset, uint64_t length);
};

class Program {
 public:
  virtual ~Program() = default;
  // Fills the next request and returns true, or returns false when there is none to send at this moment.
  virtual bool next(Request& request) = 0;
  // Every answer came and nothing is left to send.
  virtual bool finished() const = 0;
  // An answer. Items with bytes go to `sink`, which must add up to header.payload_bytes. An error here
  // means the peer breaks the protocol, and ends the session.
  virtual Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                             PayloadSink& sink) = 0;
  // All payload of the answer arrived; the CRC-32C of each item of the sink.
  virtual void on_payload(std::span<const uint32_t> crcs) { (void)crcs; }
  // Moves bytes that need no socket (one-sided copies), a bounded amount. True when it moved any.
  virtual bool work() { return false; }
  // Whether it waits for something on this side, so that silence is not the node's fault.
  virtual bool held_up() const { return false; }
  // Before its thread sleeps: what work() waits for besides the socket. As Link::wait_for.
  virtual int wait_for(std::vector<int>& fds) {
    (void)fds;
    return -1;
  }
};

struct SessionLimits {
  uint32_t window_frames = 6;
  size_t read_chunk_bytes = 64 << 10;  // bytes per system call: still in cache when the CRC reads them
  size_t pump_bytes = 4 << 20;         // per pump(), so that cancel and other lanes get their turn
};

enum class Route : uint8_t { kTcp, kUnix };

class Session {
 public:
  // Begins to connect, or to look up the node's name first: pump() goes on. Errors that show at once (no such
  // socket, bad address) come back here.
  static Result<std::unique_ptr<Session>> start(const PeerDescription& peer, Route route,
                                                std::shared_ptr<net::TlsContext> tls, SessionLimits limits);
  // start() and wait until ready.
  static Result<std::unique_ptr<Session>> connect(const PeerDescription& peer, Route route, Deadline deadline,
                                                  InterruptLook* look = nullptr, SessionLimits limits = {});
  ~Session();

  // Moves bytes of the handshake, then of `program` (null: only what an abandoned one left). An error means:
  // drop the session.
  Status pump(Program* program);
  // Whether the last pump() moved anything.
  bool progressed() const { return progressed_; }
  bool ready() const { return ready_; }
  // No request is unanswered and no byte is half sent: another program may use the session.
  bool idle() const { return ready_ && in_flight_ == 0 && out_at_ == out_.size() && payload_left_ == 0; }
  // The same, but for answers to abandoned requests.
  bool idle_but_for_late_answers() const {
    return ready_ && in_flight_ == late_.count && out_at_ == out_.size() && payload_left_ == 0;
  }
  bool broken() const { return broken_; }
  // Since begin_use(): whether the node answered anything. If not, a lost connection was dead before.
  bool response_seen() const { return response_seen_; }
  void begin_use() { response_seen_ = false; }

  int fd() const { return stream_ ? stream_->fd() : lookup_->fd(); }
  // The node's name is still being looked up.
  bool resolving() const { return lookup_ && !lookup_->done(); }
  short poll_events() const;
  // True when the connection was closed by the peer or holds bytes that were not asked for. One system call.
  bool stale() const;

  Route route() const { return route_; }
  const wire::AuthResponse& node() const { return node_; }
  bool offers_rdma() const { return (node_.capabilities & wire::AuthResponse::kCanRdma) != 0; }
  bool offers_waits() const { return (node_.capabilities & wire::AuthResponse::kCanWait) != 0; }
  bool offers_heartbeats() const { return (node_.capabilities & wire::AuthResponse::kHeartbeats) != 0; }
  bool is_engine() const { return (node_.capabilities & wire::AuthResponse::kEngine) != 0; }
  bool offers_prefetch() const { return (node_.capabilities & wire::AuthResponse::kPrefetches) != 0; }
  // Of a ready session that no program uses: for answers that do not come in the order of their requests.
  net::Stream& stream() { return *stream_; }
  // Bytes sent and received since the last call.
  uint64_t take_bytes_moved() { return std::exchange(bytes_moved_, 0); }

  // From now on descriptors that the peer passes are collected.
  void collect_fds() { collect_fds_ = true; }
  std::vector<net::UniqueFd> take_fds();

  // An RDMA link that lives as long as the connection on which its endpoints were exchanged; null until made.
  std::unique_ptr<Link>& rdma_link() { return rdma_link_; }

  enum class WhenCut : uint8_t { kBreak, kAbandon };
  // Runs `program` to its end on this thread. On any error the session is broken, unless `cut` says that one
  // which the deadline, the cancel descriptor or an interruption cut short is abandoned.
  Status run(Program& program, Deadline deadline, int cancel_fd = -1, WhenCut cut = WhenCut::kBreak,
             InterruptLook* look = nullptr);
  // Ends the use by a program that was cut short: the frame that is half sent is copied, and the answers
  // still to come go to `late`, so that others can go on using the session. No memory of the caller is
  // touched from now on. False: the session was not ready, or is broken.
  bool abandon();
  using LateAnswer = std::function<void(wire::Opcode, const Status&, Reader&)>;
  void on_late_answer(LateAnswer late) { late_.handler = std::move(late); }

 private:
  class Handshake;
  friend class Handshake;
  // Takes the answers to abandoned requests.
  struct Late final : Program {
    bool next(Request&) override { return false; }
    bool finished() const override { return true; }
    Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                       PayloadSink& sink) override;
    LateAnswer handler;
    size_t count = 0;  // the oldest of those in flight
  };
  struct InFlight {
    uint64_t request_id = 0;
    wire::Opcode opcode = wire::Opcode::kPing;
  };
  static constexpr size_t kMaxWindow = 64;

  Session(const PeerDescription& peer, Route route, std::shared_ptr<net::TlsContext> tls,
          SessionLimits limits);
  Status begin_connect();
  Status finish_connect();
  Status send_some(Program& program, size_t& budget);
  void frame_request();
  Status receive_some(Program& program, size_t& budget);
  Status read_head_bytes(size_t& budget, bool& moved);
  Status read_payload_bytes(size_t& budget, bool& moved);
  Program& receiver(Program& program) { return late_.count > 0 ? late_ : program; }
  Status parse_buffered(Program& program);
  Status take_head(Program& program, bool& complete);
  void take_payload_from_buffer();
  void place_payload(size_t count);
  void finish_payload(Program& program);
  Status lost(const net::IoResult& result);
  Status fail(Status status);

  std::shared_ptr<net::Lookup> lookup_;  // until there is a stream
  std::unique_ptr<net::Stream> stream_;
  net::ClosedInChild not_the_childs_;
  pid_t owner_;  // the process that made it
  Route route_;
  SessionLimits limits_;
  PeerDescription peer_;
  std::shared_ptr<net::TlsContext> tls_;
  std::unique_ptr<Program> handshake_;
  wire::AuthResponse node_;
  bool connected_ = false;
  bool ready_ = false;
  bool broken_ = false;
  bool progressed_ = false;
  bool want_write_ = false;
  bool response_seen_ = false;
  bool collect_fds_ = false;
  uint64_t next_request_id_ = 1;
  uint64_t bytes_moved_ = 0;

  // sending: one frame at a time, its pieces straight from the caller's memory
  Request request_;
  std::vector<std::byte> out_head_;
  std::vector<ConstSlice> out_;
  size_t out_at_ = 0;
  std::array<InFlight, kMaxWindow> window_{};
  size_t window_begin_ = 0;
  size_t in_flight_ = 0;
  Late late_;

  // receiving: heads are read into buffer_, payload straight into the sink
  std::vector<std::byte> buffer_;
  size_t buffer_begin_ = 0;
  size_t buffer_end_ = 0;
  PayloadSink sink_;
  size_t sink_slice_ = 0;
  size_t sink_item_ = 0;
  uint64_t sink_offset_ = 0;  // inside the current slice
  uint64_t payload_left_ = 0;
  bool in_payload_ = false;
  std::vector<uint32_t> crcs_;
  std::vector<Slice> read_pieces_;
  std::vector<net::UniqueFd> fds_;
  std::unique_ptr<Link> rdma_link_;  // last: goes first, before the node hears that the connection ended
};

}  // namespace mooncache

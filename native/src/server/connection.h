// One peer: a state machine that never blocks. Input is read into the loop's scratch memory (whole small
// frames are handled there without a copy) or, for payloads, straight into reserved extents. Output is a
// queue of pieces: response heads and pinned block memory, sent with one gathering call.
//
// Requests are answered in order: the next frame is not looked at before the present one has queued its
// response. An operation that must wait (for space) or that would hold the loop too long (checking much
// memory) is suspended, and with it the reading of this connection; the kernel's window then slows the peer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/store.h"
#include "net/stream.h"
#include "server/grant_map.h"
#include "server/loop.h"
#include "server/range_check.h"
#include "server/rdma_peer.h"
#include "wire/frame.h"
#include "wire/messages.h"

namespace mooncache::server {

// Of a block that the processor cannot address: so much of it is in host memory on its way in, and out.
inline constexpr size_t kStagingBytes = 256 << 10;

// `list = {}` keeps the memory.
template <typename T>
void free_memory(std::vector<T>& list) {
  std::vector<T>().swap(list);
}

// Part of a payload on its way in. Not kept: the bytes are read and dropped. Kept without an address: they go
// to the store by way of the connection's staging buffer.
struct Piece {
  bool kept = false;
  std::byte* at = nullptr;
  uint64_t size = 0;
  uint64_t offset = 0;  // WRITE: inside the reservation
  uint32_t want_crc = 0;
  uint32_t crc = 0;
  ReservationId reservation{};
  Code code = Code::kOk;
};

// A PUT or WRITE whose payload is arriving.
struct Inbound {
  std::vector<wire::PutItem> items;  // PUT only
  std::vector<Piece> pieces;
  size_t current = 0;         // the piece that is arriving
  size_t prepared = 0;        // pieces before this one know where they go
  uint64_t received = 0;      // of the current piece
  uint64_t window_bytes = 0;  // PUT: reserved, not committed yet
  uint32_t waited_ms = 0;
};

struct ReserveOp {
  wire::ReserveRequest request;
  std::vector<wire::ReserveResult> results;
  uint32_t waited_ms = 0;
  bool holds = false;  // a result is a reservation
};

// What devices have to be told, and their answers take long: a turn has a budget for it, and the operation
// goes on in the next one. A LOOKUP or RESERVE whose grants are being opened to the peer's devices.
struct ExposeOp {
  bool writable = false;
  std::vector<std::byte> answer;  // up to the exposures
  std::vector<uint64_t> grants;   // 0: nothing to open
  std::vector<wire::Exposure> exposures;
  size_t next = 0;
};
struct EndpointOp {
  std::vector<wire::RdmaAddress> peers, answers;
};
// RELEASE, COMMIT and ABORT, which close grants first.
struct ReleaseOp {
  std::vector<uint64_t> grants;
  size_t next = 0;
};
struct CommitOp {
  std::vector<wire::CommitItem> items;
  std::vector<Code> codes;
};
struct AbortOp {
  std::vector<uint64_t> grants;
  std::vector<Code> codes;
};

struct OutPiece {
  enum class Hold : uint8_t { kNone, kPin, kGrant };
  const std::byte* data = nullptr;  // null: at head_at in the head buffer, or staged
  size_t head_at = 0;
  uint64_t block_offset = 0;  // staged: where it begins in the block under hold_id
  size_t size = 0;
  uint64_t hold_id = 0;
  uint64_t start_ns = 0;
  Hold hold = Hold::kNone;
  uint8_t opcode = 0;  // not 0: the last piece of a response to this opcode
  bool with_fds = false;
  bool staged = false;  // the processor cannot address the block: it is sent window by window
};

// The part of a staged piece that is in host memory.
struct Window {
  static constexpr size_t kNoPiece = SIZE_MAX;
  std::unique_ptr<std::byte[]> memory;
  size_t piece = kNoPiece;  // number in the output queue
  size_t begin = 0, size = 0;
};

// A GET, or a READ under a grant, whose results are being put together.
struct GetOp {
  std::vector<wire::GetItem> items;
  std::vector<wire::GetResult> results;
  std::vector<OutPiece> parts;
  uint64_t total_bytes = 0;
  uint64_t read_grant = 0;  // READ: the grant; 0 = GET
  // The block in hand.
  Pinned pinned;
  bool holding = false;
  bool verify = false;  // a part is wanted: first see that the whole is sound
  RangeCheck check;
  // GET: the last block of several chunks that was found sound in this request.
  uint64_t sound_generation = 0;
  uint32_t sound_slot = 0;
  std::vector<uint32_t> sound_chunks;
};

// A pin that the peer holds.
struct PinGrant {
  std::vector<uint32_t> chunks;  // CRCs, when the whole block matched its own under this pin
  bool released = false;         // the peer is done with it, the output queue is not
  uint32_t sending = 0;          // pieces in the output queue
};

class Connection : public Watched {
 public:
  Connection(Loop& loop, std::unique_ptr<net::Stream> stream, bool is_unix);
  ~Connection();

  size_t index = 0;      // in the loop's table
  bool surplus = false;  // beyond max_connections
  // The loop's notes: in its queue, for these events, for a turn without any.
  bool queued = false, again = false;
  uint32_t ready_events = 0;

  int fd() const { return stream_->fd(); }
  bool is_dead() const { return state_ == State::kDead; }
  bool busy() const;  // a request is in progress
  // Its next event moves bytes of a payload, in or out.
  bool in_transfer() const { return state_ == State::kPayload || out_at_ < out_.size(); }
  bool parked() const { return parked_; }
  uint64_t park_deadline_ms() const { return park_deadline_ms_; }
  uint64_t park_ticket() const { return park_ticket_; }  // of the request that waits
  TenantId tenant() const { return tenant_; }

  // After each of its turns: tells the node what memory it holds for what is in hand.
  void account();
  uint64_t buffered_bytes() const { return accounted_bytes_; }

  void on_event(uint32_t events);
  void on_turn();       // after Loop::run_again
  void retry_parked();  // may park again
  void on_tick();       // deadlines
  void destroy(CloseReason reason);

 private:
  enum class State : uint8_t { kTls, kFrame, kPayload, kClosing, kLingering, kDead };
  enum class Auth : uint8_t { kNone, kChallenged, kProven };
  using Meta = wire::Meta;
  using Bytes = std::span<const std::byte>;

  // connection_io.cpp
  void advance_tls();
  void read_turn();
  bool read_once(uint64_t& budget);  // false: nothing more to read now
  void consume(Bytes bytes);
  Bytes consume_frame(Bytes bytes);
  Bytes consume_payload(Bytes bytes);
  Bytes fill_partial(Bytes bytes);
  void grow_partial();
  void partial_advanced(size_t bytes);
  bool output_full() const;
  bool can_read() const;
  void settle();  // send what is queued, read on if possible, tell epoll what to watch
  bool flush();   // false: the connection broke
  bool flush_heads_with_fds(bool& moved);
  ConstSlice sendable(size_t number, size_t skip, bool may_fill);
  void sent(size_t bytes);
  void release_hold(const OutPiece& piece);
  void update_interest();
  void begin_close(CloseReason reason);
  void begin_linger();
  void read_to_end();
  void broke();
  void bury(CloseReason reason);
  bool too_slow();
  bool silent_too_long() const;

  // connection.cpp: frames and responses
  void suspend();  // the operation goes on in a later turn
  void continue_operation();
  bool frame_started(std::span<const std::byte, wire::kHeaderBytes> bytes);  // false: refused
  void handle_frame(std::span<const std::byte, wire::kHeaderBytes> bytes, Meta meta);
  void dispatch(Meta meta);
  void refuse(Code code, const std::string& message, CloseReason reason);  // an error response, then the end
  Writer& begin_response(Status status = Status::ok());  // a Writer that holds the status already
  void queue_head(Writer& meta, uint64_t payload_bytes, bool last);
  void queue_piece(const OutPiece& piece);
  void respond(Writer& meta) { queue_head(meta, 0, true); }
  void respond_status(Status status) { respond(begin_response(std::move(status))); }
  void respond_codes(std::span<const Code> codes);
  bool malformed();  // refuses; always false

  // connection_auth.cpp
  void do_hello(Meta meta);
  void do_auth(Meta meta);

  // ops_write.cpp
  void do_put(Meta meta);
  void do_write(Meta meta);
  void do_reserve(Meta meta);
  void do_commit(Meta meta);
  Code commit(const wire::CommitItem& item);
  void continue_commit(uint64_t budget);
  void do_abort(Meta meta);
  void continue_abort(uint64_t budget);
  std::byte* stage();
  size_t gather(std::span<Slice> slices, uint64_t chunk_bytes, bool& read_ahead);
  void received(uint64_t bytes, const std::byte* from);
  uint64_t keep(Piece& piece, uint64_t at, uint64_t bytes, const std::byte* from);
  bool advance_inbound();  // prepares, finishes; false: parked
  bool prepare_pieces();
  Code reserve_piece(Piece& piece, const wire::PutItem& item);
  void finish_piece(Piece& piece);
  void finish_inbound();
  bool continue_reserve();
  bool park_for(uint32_t wait_ms, uint32_t waited_ms);
  void unpark(uint32_t& waited_ms);
  void abort_inbound();
  Result<Reservation> reserve(const Key& key, uint64_t size);

  // ops_read.cpp
  void do_get(Meta meta);
  bool continue_get();  // false: suspended
  bool start_item(GetOp& op, const wire::GetItem& item);
  bool range_of(GetOp& op, const wire::GetItem& item, wire::GetResult& result);
  bool verify_some(GetOp& op, uint64_t& budget);  // false: budget used up
  ConstSlice bytes_at(PinId pin, uint64_t offset, uint64_t length);
  void finish_item(GetOp& op, const wire::GetItem& item);
  void send_part(GetOp& op, uint64_t offset, uint64_t length);
  void remember_sound(GetOp& op);
  void let_go(GetOp& op);
  void finish_get();
  void finish_read();
  void do_read(Meta meta);
  void do_lookup(Meta meta);
  void do_release(Meta meta);
  void continue_release(uint64_t budget);
  void do_match(Meta meta);
  void count_result(Code code);
  void corrupt_block(const GetOp& op);
  void unreadable_block(PinId pin, const Status& why);

  // ops_admin.cpp
  void do_remove(Meta meta);
  void do_pin(Meta meta);
  void do_unpin(Meta meta);
  void do_stat(Meta meta);
  void do_attach(Meta meta);
  void do_list(Meta meta);
  void do_node_stat(Meta meta);

  // ops_rdma.cpp
  bool can_rdma() const;
  void do_endpoint(Meta meta);
  void continue_endpoint();
  template <typename Result>
  void respond_exposed(Writer& writer, std::span<const Result> results, bool writable);
  void continue_expose(uint64_t budget);
  wire::Exposure expose(uint64_t grant, bool writable, uint64_t& budget);
  // Whether what costs so much may be done now; false: suspended.
  bool afford(uint64_t& budget, uint64_t cost);
  uint64_t cost_to_withdraw(uint64_t grant, bool writable) const;
  Slice host_extent(uint64_t grant, bool writable);
  std::optional<rdma::DeviceMemory> device_extent(uint64_t grant, bool writable);
  void withdraw(uint64_t grant, bool writable);

  // what the peer holds (connection.cpp)
  uint64_t footprint() const;
  void release_pin(PinId pin);
  void discard_output();
  void drop_operation();
  void abort_reservations();
  void forget_reservation(uint64_t id, bool abort);
  void count_reservation(uint64_t bytes);
  void uncount_reservation(uint64_t bytes);
  bool must_linger() const;
  Store& store() { return *loop_.shared().store; }
  const ServerConfig& config() const { return loop_.shared().config; }
  LoopMetrics& metrics() { return loop_.metrics; }

  Loop& loop_;
  std::unique_ptr<net::Stream> stream_;
  const bool is_unix_;
  State state_ = State::kFrame;
  CloseReason close_reason_ = CloseReason::kPeer;
  uint32_t watched_ = 0;
  uint32_t tls_events_ = 0;
  bool turn_scheduled_ = false;

  Auth auth_ = Auth::kNone;
  bool admin_ = false;
  wire::Bytes16 client_nonce_{}, server_nonce_{};
  std::string tenant_name_;
  TenantId tenant_ = 0;

  // the frame in hand
  wire::FrameHeader header_;
  uint64_t start_ns_ = 0;
  std::vector<std::byte> partial_;  // a header, or header and meta, that arrived in pieces
  size_t partial_have_ = 0, partial_need_ = 0;
  std::vector<std::byte> carry_;  // read but not looked at: the connection was suspended
  std::variant<std::monostate, Inbound, ReserveOp, GetOp, ExposeOp, EndpointOp, ReleaseOp, CommitOp, AbortOp>
      op_;
  bool parked_ = false, runnable_ = false;
  bool park_counted_ = false;  // the request in hand has been counted as one that waited
  uint64_t park_start_ms_ = 0, park_deadline_ms_ = 0, park_ticket_ = 0;

  // output
  std::vector<std::byte> heads_;
  std::vector<OutPiece> out_;
  size_t out_at_ = 0;          // first piece not sent completely
  size_t out_piece_sent_ = 0;  // of that piece
  uint64_t out_bytes_ = 0;
  Window window_;
  // Bytes of the current piece that the store does not have yet; null: the blocks are addressable.
  std::unique_ptr<std::byte[]> stage_;
  size_t staged_ = 0;
  std::vector<int> attach_fds_;

  // what the peer holds
  GrantMap<PinGrant> pin_grants_;
  GrantMap<uint64_t> reservation_grants_;  // value: bytes
  uint32_t pins_ = 0;                      // grants, and blocks of a GET until they are sent
  uint32_t reservations_ = 0;              // grants, and those of a PUT in progress
  uint64_t reserved_bytes_ = 0;
  // A process of the node's own user on this host: it may have the arenas mapped, through this connection
  // or another one.
  const bool may_write_memory_;

  uint64_t accounted_bytes_ = 0;

  std::unique_ptr<RdmaPeer> rdma_;  // null until ENDPOINT

  // deadlines
  uint64_t opened_ms_, active_ms_, frame_ms_ = 0, progress_ms_ = 0, closing_ms_ = 0;
  uint64_t moved_bytes_ = 0, moved_at_progress_ = 0;
};

}  // namespace mooncache::server

#include "server/connection.h"

#include <sys/epoll.h>
#include <unistd.h>

namespace mooncache::server {

using wire::Opcode;

namespace {

// Before a peer has proved itself it may send HELLO and AUTH, nothing that needs more.
constexpr uint32_t kMaxMetaBeforeAuth = 4096;

bool carries_payload(Opcode opcode) {
  return opcode == Opcode::kPut || opcode == Opcode::kWrite;
}

bool same_user(int fd) {
  const auto peer = net::peer_credentials(fd);
  return peer && peer->uid == ::geteuid();
}

}  // namespace

Connection::Connection(Loop& loop, std::unique_ptr<net::Stream> stream, bool is_unix)
    : Watched(Kind::kConnection),
      loop_(loop),
      stream_(std::move(stream)),
      is_unix_(is_unix),
      state_(stream_->is_tls() ? State::kTls : State::kFrame),
      watched_(EPOLLIN),
      may_write_memory_(is_unix && loop.shared().shares_memory && same_user(stream_->fd())),
      opened_ms_(loop.now_ms()),
      active_ms_(loop.now_ms()) {
  if (loop.shared().memory_may_go) stream_->touch_lost_memory();
}

Connection::~Connection() = default;

bool Connection::busy() const {
  return state_ == State::kPayload || op_.index() != 0 || out_at_ < out_.size() || partial_have_ > 0 ||
         !carry_.empty();
}

// Frames ----------------------------------------------------------------------------------------------

bool Connection::frame_started(std::span<const std::byte, wire::kHeaderBytes> bytes) {
  const auto decoded = wire::decode_header(bytes);
  if (!decoded) {
    // Answer with the peer's own request id when it has one; its opcode may be anything.
    Reader reader(bytes.subspan(8));
    header_ = {};
    header_.opcode = Opcode::kHello;
    header_.request_id = reader.u64();
    const bool skew = decoded.code() == Code::kVersionSkew;
    if (skew) metrics().version_skews.add();
    refuse(decoded.code(), decoded.status().message, skew ? CloseReason::kVersion : CloseReason::kProtocol);
    return false;
  }
  header_ = *decoded;
  if (auth_ != Auth::kProven && (header_.meta_bytes > kMaxMetaBeforeAuth || header_.payload_bytes != 0)) {
    refuse(Code::kUnauthenticated, "the connection is not authenticated", CloseReason::kAuth);
    return false;
  }
  if (header_.response) {
    refuse(Code::kProtocolError, "a client sends requests, not responses", CloseReason::kProtocol);
    return false;
  }
  if (header_.payload_bytes != 0 && !carries_payload(header_.opcode)) {
    refuse(Code::kProtocolError, "this request carries no payload", CloseReason::kProtocol);
    return false;
  }
  return true;
}

void Connection::handle_frame(std::span<const std::byte, wire::kHeaderBytes> bytes, Meta meta) {
  start_ns_ = Loop::now_ns();
  active_ms_ = loop_.now_ms();
  frame_ms_ = 0;
  park_counted_ = false;
  if (const Status check = wire::verify_check(bytes, meta); !check) {
    refuse(check.code, check.message, CloseReason::kProtocol);
    return;
  }
  metrics().requests[static_cast<size_t>(header_.opcode)].add();
  if (auth_ != Auth::kProven && header_.opcode != Opcode::kHello && header_.opcode != Opcode::kAuth) {
    metrics().auth_failures.add();
    refuse(Code::kUnauthenticated, "the connection is not authenticated", CloseReason::kAuth);
    return;
  }
  dispatch(meta);
}

void Connection::dispatch(Meta meta) {
  switch (header_.opcode) {
    case Opcode::kHello:
      return do_hello(meta);
    case Opcode::kAuth:
      return do_auth(meta);
    case Opcode::kPut:
      return do_put(meta);
    case Opcode::kGet:
      return do_get(meta);
    case Opcode::kLookup:
      return do_lookup(meta);
    case Opcode::kRelease:
      return do_release(meta);
    case Opcode::kReserve:
      return do_reserve(meta);
    case Opcode::kWrite:
      return do_write(meta);
    case Opcode::kCommit:
      return do_commit(meta);
    case Opcode::kAbort:
      return do_abort(meta);
    case Opcode::kMatch:
      return do_match(meta);
    case Opcode::kRemove:
      return do_remove(meta);
    case Opcode::kPin:
      return do_pin(meta);
    case Opcode::kUnpin:
      return do_unpin(meta);
    case Opcode::kStat:
      return do_stat(meta);
    case Opcode::kRead:
      return do_read(meta);
    case Opcode::kAttach:
      return do_attach(meta);
    case Opcode::kList:
      return do_list(meta);
    case Opcode::kNodeStat:
      return do_node_stat(meta);
    case Opcode::kPing:
      if (!meta.empty()) return void(malformed());
      return respond_status(Status::ok());
    case Opcode::kEndpoint:
      return do_endpoint(meta);
  }
}

void Connection::suspend() {
  runnable_ = true;
  loop_.run_again(*this);
}

void Connection::continue_operation() {
  if (std::holds_alternative<GetOp>(op_)) return void(continue_get());
  if (std::holds_alternative<ExposeOp>(op_)) return continue_expose(loop_.visit().check_bytes);
  if (std::holds_alternative<EndpointOp>(op_)) return continue_endpoint();
  if (std::holds_alternative<ReleaseOp>(op_)) return continue_release(loop_.visit().check_bytes);
  if (std::holds_alternative<CommitOp>(op_)) return continue_commit(loop_.visit().check_bytes);
  if (std::holds_alternative<AbortOp>(op_)) return continue_abort(loop_.visit().check_bytes);
}

// Responses -------------------------------------------------------------------------------------------

Writer& Connection::begin_response(Status status) {
  Writer& writer = loop_.writer();
  wire::encode_status(writer, status);
  return writer;
}

void Connection::queue_head(Writer& meta, uint64_t payload_bytes, bool last) {
  wire::FrameHeader header = header_;
  header.response = true;
  header.flags = 0;
  header.payload_bytes = payload_bytes;
  const auto bytes = wire::encode_header(header, meta.view());
  OutPiece piece;
  piece.head_at = heads_.size();
  piece.size = bytes.size() + meta.size();
  heads_.insert(heads_.end(), bytes.begin(), bytes.end());
  heads_.insert(heads_.end(), meta.view().begin(), meta.view().end());
  if (last) piece.opcode = static_cast<uint8_t>(header_.opcode);
  piece.start_ns = start_ns_;
  queue_piece(piece);
}

void Connection::queue_piece(const OutPiece& piece) {
  if (out_at_ == out_.size()) {  // from now on the peer must take bytes
    progress_ms_ = loop_.now_ms();
    moved_at_progress_ = moved_bytes_;
  }
  out_bytes_ += piece.size;
  out_.push_back(piece);
}

void Connection::respond_codes(std::span<const Code> codes) {
  Writer& writer = begin_response();
  wire::encode_codes(writer, codes);
  respond(writer);
}

bool Connection::malformed() {
  refuse(Code::kProtocolError, "malformed " + std::string(wire::opcode_name(header_.opcode)) + " request",
         CloseReason::kProtocol);
  return false;
}

void Connection::refuse(Code code, const std::string& message, CloseReason reason) {
  if (reason == CloseReason::kProtocol) metrics().protocol_errors.add();
  loop_.shared().log.push(30, "connection_closed", std::string(code_name(code)) + ": " + message);
  respond_status({code, message});
  begin_close(reason);
}

// What the peer holds -----------------------------------------------------------------------------------

void Connection::release_pin(PinId pin) {
  withdraw(static_cast<uint64_t>(pin), false);
  store().release(pin);
  --pins_;
  metrics().pins_held.sub();
}

void Connection::release_hold(const OutPiece& piece) {
  if (piece.hold == OutPiece::Hold::kPin) {
    release_pin(PinId{piece.hold_id});
  } else if (piece.hold == OutPiece::Hold::kGrant) {
    PinGrant* grant = pin_grants_.find(piece.hold_id);
    if (grant == nullptr || --grant->sending > 0 || !grant->released) return;
    pin_grants_.erase(piece.hold_id);
    release_pin(PinId{piece.hold_id});
  }
}

uint64_t Connection::footprint() const {
  const auto held = [](const auto& list) { return list.capacity() * sizeof(list[0]); };
  uint64_t bytes = held(partial_) + held(carry_) + held(heads_) + held(out_);
  bytes += (stage_ ? kStagingBytes : 0) + (window_.memory ? kStagingBytes : 0);
  if (const auto* inbound = std::get_if<Inbound>(&op_)) bytes += held(inbound->items) + held(inbound->pieces);
  if (const auto* get = std::get_if<GetOp>(&op_))
    bytes += held(get->items) + held(get->results) + held(get->parts);
  if (const auto* reserving = std::get_if<ReserveOp>(&op_))
    bytes += held(reserving->request.items) + held(reserving->results);
  return bytes;
}

void Connection::account() {
  const uint64_t now = footprint();
  if (now == accounted_bytes_) return;
  loop_.shared().buffered_bytes.fetch_add(now - accounted_bytes_,
                                          std::memory_order_relaxed);  // may wrap: a difference
  accounted_bytes_ = now;
}

void Connection::discard_output() {
  for (size_t i = out_at_; i < out_.size(); ++i) release_hold(out_[i]);
  free_memory(out_);
  free_memory(heads_);
  window_.piece = Window::kNoPiece;
  out_at_ = out_piece_sent_ = 0;
  out_bytes_ = 0;
}

// Ends the operation in hand and the pins that nothing in the output queue needs.
void Connection::drop_operation() {
  abort_inbound();
  if (auto* get = std::get_if<GetOp>(&op_)) {
    for (const OutPiece& part : get->parts) release_hold(part);
    let_go(*get);
  }
  op_ = std::monostate{};
  parked_ = runnable_ = false;
  std::vector<uint64_t> idle_pins;
  pin_grants_.for_each([&](uint64_t id, PinGrant& grant) {
    grant.released = true;
    if (grant.sending == 0) idle_pins.push_back(id);
  });
  for (const uint64_t id : idle_pins) {
    pin_grants_.erase(id);
    release_pin(PinId{id});
  }
}

void Connection::abort_reservations() {
  std::vector<uint64_t> reservations;
  reservation_grants_.for_each([&](uint64_t id, const uint64_t&) { reservations.push_back(id); });
  for (const uint64_t id : reservations) forget_reservation(id, true);
}

void Connection::forget_reservation(uint64_t id, bool abort) {
  const uint64_t* bytes = reservation_grants_.find(id);
  if (bytes == nullptr) return;
  uncount_reservation(*bytes);
  reservation_grants_.erase(id);
  withdraw(id, true);
  if (abort) store().abort(ReservationId{id});
}

void Connection::count_reservation(uint64_t bytes) {
  ++reservations_;
  reserved_bytes_ += bytes;
  metrics().reservations_held.add();
  metrics().reserved_bytes.add(bytes);
}

void Connection::uncount_reservation(uint64_t bytes) {
  --reservations_;
  reserved_bytes_ -= bytes;
  metrics().reservations_held.sub();
  metrics().reserved_bytes.sub(bytes);
}

// A peer that may still write to the shared memory: its reserved extents must not be used again before it is
// gone.
bool Connection::must_linger() const {
  return may_write_memory_ && reservations_ > 0;
}

}  // namespace mooncache::server

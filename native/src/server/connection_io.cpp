// How bytes get in and out of a connection, and how it ends.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "mooncache/crc32c.h"
#include "server/connection.h"

namespace mooncache::server {

namespace {

// Bytes per read: they are still in the cache when their CRC is computed, and on loopback the sender runs on
// while they are copied (64 KiB moved 1.3 to 1.6 times as much as 1 MiB per call).
constexpr uint64_t kChunkBytes = 64 << 10;
constexpr size_t kReadSlices = 64;
constexpr size_t kWriteSlices = 64;
// Read behind the end of a payload, so that the next request costs no call of its own.
constexpr size_t kReadAheadBytes = 16 << 10;
constexpr size_t kPartialStepBytes = 64 << 10;
constexpr size_t kMaxHeadBytes = 1 << 20;
constexpr size_t kMaxOutPieces = 8192;
constexpr size_t kKeptOutPieces = 64;
constexpr size_t kWindowBytes = kStagingBytes;
constexpr size_t kKeptHeadBytes = 8 << 10;
// After the last word: how long the peer has to take it, and to close its side.
constexpr uint64_t kClosingMs = 5000;
constexpr uint64_t kLingerMs = 6000;
constexpr uint64_t kPressureHandshakeMs = 1000;

}  // namespace

void Connection::on_event(uint32_t events) {
  switch (state_) {
    case State::kDead:
      return;
    case State::kTls:
      return advance_tls();
    case State::kLingering:
      return read_to_end();
    case State::kClosing:
      return settle();
    case State::kFrame:
    case State::kPayload:
      break;
  }
  const bool broken = (events & (EPOLLERR | EPOLLHUP)) != 0;
  if ((parked_ && (broken || (events & EPOLLRDHUP) != 0)) || (broken && (events & EPOLLIN) == 0)) {
    return bury(CloseReason::kPeer);
  }
  if ((events & EPOLLIN) != 0) read_turn();
  settle();
}

void Connection::on_turn() {
  turn_scheduled_ = false;
  if (is_dead()) return;
  if (runnable_) {
    runnable_ = false;
    continue_operation();
  } else {
    read_turn();
  }
  settle();
}

void Connection::advance_tls() {
  const net::IoResult result = stream_->handshake();
  switch (result.state) {
    case net::IoState::kMoved:
      state_ = State::kFrame;
      read_turn();
      return settle();
    case net::IoState::kWantRead:
      tls_events_ = EPOLLIN;
      break;
    case net::IoState::kWantWrite:
      tls_events_ = EPOLLOUT;
      break;
    case net::IoState::kEnd:
    case net::IoState::kFailed:
      loop_.shared().log.push(30, "tls_handshake_failed", stream_->error().message);
      return bury(CloseReason::kTls);
  }
  update_interest();
}

// Input -------------------------------------------------------------------------------------------------

bool Connection::output_full() const {
  return out_bytes_ > config().max_queued_bytes_per_connection || heads_.size() > kMaxHeadBytes ||
         out_.size() > kMaxOutPieces;
}

bool Connection::can_read() const {
  if (parked_ || runnable_ || output_full()) return false;
  return state_ == State::kPayload || (state_ == State::kFrame && op_.index() == 0);
}

void Connection::read_turn() {
  uint64_t budget = loop_.visit().read_bytes;
  while (can_read() && carry_.empty() && read_once(budget)) {
  }
}

bool Connection::read_once(uint64_t& budget) {
  std::array<Slice, kReadSlices> slices;
  size_t count = 0;
  bool scratch_too = true;
  if (state_ == State::kPayload) {
    count = gather(std::span(slices).first(kReadSlices - 1), kChunkBytes, scratch_too);
  } else if (partial_need_ > 0) {
    grow_partial();
    slices[count++] = {partial_.data() + partial_have_, partial_.size() - partial_have_};
    scratch_too = partial_.size() == partial_need_;
  }
  size_t direct_bytes = 0;
  for (size_t i = 0; i < count; ++i) direct_bytes += slices[i].size;
  const auto scratch =
      loop_.scratch().first(state_ == State::kPayload ? kReadAheadBytes : Loop::kScratchBytes);
  if (scratch_too) slices[count++] = {scratch.data(), scratch.size()};

  const net::IoResult result = stream_->read_some(std::span(slices).first(count));
  metrics().read_calls.add();
  if (result.state == net::IoState::kEnd || result.state == net::IoState::kFailed) {
    bury(CloseReason::kPeer);
    return false;
  }
  if (result.state != net::IoState::kMoved) return false;
  metrics().bytes_in.add(result.bytes);
  moved_bytes_ += result.bytes;
  loop_.spend(result.bytes);
  budget -= std::min<uint64_t>(budget, result.bytes);

  const size_t direct = std::min(result.bytes, direct_bytes);
  if (direct > 0) {
    if (state_ == State::kPayload) {
      received(direct, nullptr);
    } else {
      partial_advanced(direct);
    }
  }
  if (result.bytes > direct) consume(scratch.first(result.bytes - direct));
  const size_t wanted = direct_bytes + (scratch_too ? scratch.size() : 0);
  return result.bytes == wanted && budget > 0;
}

void Connection::consume(Bytes bytes) {
  while (!bytes.empty()) {
    if (state_ != State::kFrame && state_ != State::kPayload) return;
    if (!can_read()) {
      carry_.assign(bytes.begin(), bytes.end());
      return;
    }
    bytes = state_ == State::kPayload ? consume_payload(bytes) : consume_frame(bytes);
  }
}

Connection::Bytes Connection::consume_frame(Bytes bytes) {
  if (partial_need_ > 0) return fill_partial(bytes);
  if (bytes.size() < wire::kHeaderBytes) {
    partial_need_ = wire::kHeaderBytes;
    return fill_partial(bytes);
  }
  const auto header = bytes.first<wire::kHeaderBytes>();
  if (!frame_started(header)) return {};
  const size_t need = wire::kHeaderBytes + header_.meta_bytes;
  if (bytes.size() < need) {
    partial_need_ = need;
    return fill_partial(bytes);
  }
  handle_frame(header, bytes.subspan(wire::kHeaderBytes, header_.meta_bytes));
  return bytes.subspan(need);
}

// Memory for a partial frame grows with what has really arrived, not with what its header announces.
void Connection::grow_partial() {
  if (frame_ms_ == 0) frame_ms_ = loop_.now_ms();
  if (partial_have_ < partial_.size()) return;
  partial_.resize(std::min(partial_need_, std::max(partial_have_ * 2, kPartialStepBytes)));
}

Connection::Bytes Connection::fill_partial(Bytes bytes) {
  while (!bytes.empty() && partial_need_ > 0) {
    grow_partial();
    const size_t count = std::min(bytes.size(), partial_.size() - partial_have_);
    std::memcpy(partial_.data() + partial_have_, bytes.data(), count);
    bytes = bytes.subspan(count);
    partial_advanced(count);
  }
  return bytes;
}

void Connection::partial_advanced(size_t bytes) {
  partial_have_ += bytes;
  if (partial_have_ < partial_need_) return;
  const auto header = [this] { return std::span<const std::byte>(partial_).first<wire::kHeaderBytes>(); };
  if (partial_need_ == wire::kHeaderBytes) {
    if (!frame_started(header())) return;
    if (header_.meta_bytes > 0) {
      partial_need_ += header_.meta_bytes;
      return;
    }
  }
  const std::vector<std::byte> frame = std::move(partial_);
  free_memory(partial_);
  partial_have_ = partial_need_ = 0;
  const std::span<const std::byte> view(frame);
  handle_frame(view.first<wire::kHeaderBytes>(), view.subspan(wire::kHeaderBytes));
}

Connection::Bytes Connection::consume_payload(Bytes bytes) {
  const auto& inbound = std::get<Inbound>(op_);
  const Piece& piece = inbound.pieces[inbound.current];
  const uint64_t count = std::min<uint64_t>(bytes.size(), piece.size - inbound.received);
  received(count, bytes.data());
  return bytes.subspan(static_cast<size_t>(count));
}

// Output ------------------------------------------------------------------------------------------------

void Connection::settle() {
  if (is_dead()) return;
  for (;;) {
    if (!flush()) return;
    if (carry_.empty() || !can_read()) break;
    const std::vector<std::byte> carried = std::move(carry_);
    free_memory(carry_);
    consume(carried);
    if (is_dead()) return;
  }
  if (state_ == State::kClosing && out_at_ == out_.size()) return begin_linger();
  if (can_read() && stream_->has_buffered() && !turn_scheduled_) {
    turn_scheduled_ = true;
    loop_.run_again(*this);
  }
  update_interest();
}

// Bytes of a queued piece from `skip` on that lie in host memory; empty: not now.
ConstSlice Connection::sendable(size_t number, size_t skip, bool may_fill) {
  const OutPiece& piece = out_[number];
  if (!piece.staged) {
    const std::byte* data = piece.data != nullptr ? piece.data : heads_.data() + piece.head_at;
    return {data + skip, piece.size - skip};
  }
  if (window_.piece == number && skip >= window_.begin && skip < window_.begin + window_.size)
    return {window_.memory.get() + (skip - window_.begin), window_.size - (skip - window_.begin)};
  if (!may_fill) return {};
  if (!window_.memory) window_.memory = std::make_unique_for_overwrite<std::byte[]>(kWindowBytes);
  window_.piece = Window::kNoPiece;
  const Slice part{window_.memory.get(), std::min(kWindowBytes, piece.size - skip)};
  const PinId pin{piece.hold_id};
  if (Status got = store().read(pin, piece.block_offset + skip, part); !got) {
    unreadable_block(pin, got);
    return {};
  }
  window_.piece = number;
  window_.begin = skip;
  window_.size = part.size;
  return {part.data, part.size};
}

bool Connection::flush() {
  uint64_t budget = loop_.visit().write_bytes;
  while (out_at_ < out_.size() && budget > 0) {
    std::array<ConstSlice, kWriteSlices> slices;
    size_t count = 0, wanted = 0;
    if (out_[out_at_].with_fds) {
      OutPiece& piece = out_[out_at_];
      const auto bytes = std::span<const std::byte>(heads_).subspan(piece.head_at, piece.size);
      const auto result = net::send_with_fds(fd(), bytes, attach_fds_);
      metrics().write_calls.add();
      if (!result) return broke(), false;
      if (*result == 0) return true;
      piece.with_fds = false;  // the descriptors went with the first byte
      attach_fds_.clear();
      sent(*result);
      continue;
    }
    bool window_used = false;
    for (size_t i = out_at_; i < out_.size() && count < kWriteSlices && !out_[i].with_fds; ++i) {
      const size_t skip = i == out_at_ ? out_piece_sent_ : 0;
      ConstSlice bytes = sendable(i, skip, !window_used);
      if (bytes.size == 0) break;
      bytes.size = static_cast<size_t>(std::min<uint64_t>(bytes.size, budget - wanted));
      window_used = window_used || out_[i].staged;
      slices[count++] = bytes;
      wanted += bytes.size;
      if (wanted >= budget || bytes.size < out_[i].size - skip) break;
    }
    // what was announced cannot be sent: only the end of the connection says that
    if (count == 0) return broke(), false;
    const net::IoResult result = stream_->write_some(std::span(slices).first(count));
    metrics().write_calls.add();
    if (result.state == net::IoState::kEnd || result.state == net::IoState::kFailed) {
      return broke(), false;
    }
    if (result.state != net::IoState::kMoved) return true;
    sent(result.bytes);
    if (result.bytes < wanted) return true;  // the socket is full
    budget -= std::min<uint64_t>(budget, result.bytes);
  }
  return true;
}

void Connection::sent(size_t bytes) {
  metrics().bytes_out.add(bytes);
  loop_.spend(bytes);
  moved_bytes_ += bytes;
  out_bytes_ -= bytes;
  uint64_t now = 0;
  while (out_at_ < out_.size()) {
    const OutPiece& piece = out_[out_at_];
    const size_t left = piece.size - out_piece_sent_;
    if (bytes < left) {
      out_piece_sent_ += bytes;
      return;
    }
    bytes -= left;
    release_hold(piece);
    if (piece.opcode != 0) {
      if (now == 0) now = Loop::now_ns();
      metrics().latency[piece.opcode].record(now - piece.start_ns);
    }
    ++out_at_;
    out_piece_sent_ = 0;
  }
  out_at_ = 0;
  out_.clear();
  heads_.clear();
  window_.piece = Window::kNoPiece;
  if (out_.capacity() > kKeptOutPieces) free_memory(out_);
  if (heads_.capacity() > kKeptHeadBytes) free_memory(heads_);
}

void Connection::update_interest() {
  uint32_t events = 0;
  if (state_ == State::kTls) events = tls_events_;
  if (can_read() || state_ == State::kLingering) events |= EPOLLIN;
  if (parked_) events |= EPOLLRDHUP;
  if (out_at_ < out_.size()) events |= EPOLLOUT;
  if (events == watched_) return;
  watched_ = events;
  loop_.watch(*this, events);
}

// The end -----------------------------------------------------------------------------------------------

// No more requests; what is queued (an error, mostly) is still sent. Closing at once could reset the
// connection before the peer has read it.
void Connection::begin_close(CloseReason reason) {
  if (state_ == State::kClosing || state_ == State::kLingering || is_dead()) return;
  drop_operation();
  if (!may_write_memory_) abort_reservations();
  free_memory(carry_);
  free_memory(partial_);
  partial_have_ = partial_need_ = 0;
  close_reason_ = reason;
  closing_ms_ = loop_.now_ms();
  state_ = State::kClosing;
}

void Connection::begin_linger() {
  if (auth_ != Auth::kProven && loop_.shared().crowded(is_unix_)) return bury(close_reason_);
  state_ = State::kLingering;
  (void)::shutdown(fd(), SHUT_WR);
  metrics().connections_lingering.add();
  read_to_end();
}

void Connection::read_to_end() {
  for (int i = 0; i < 16; ++i) {
    const ssize_t count = ::recv(fd(), loop_.discard().data(), loop_.discard().size(), MSG_DONTWAIT);
    if (count > 0) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) break;
    return bury(close_reason_);
  }
  update_interest();
}

// A write failed. That alone does not prove that the peer is gone: it may have closed one direction.
void Connection::broke() {
  if (!must_linger()) return bury(CloseReason::kPeer);
  begin_close(CloseReason::kPeer);
  discard_output();
  begin_linger();
}

void Connection::destroy(CloseReason reason) {
  if (is_dead() || state_ == State::kLingering) {
    if (reason == CloseReason::kStopped) bury(reason);
    return;
  }
  if (reason != CloseReason::kStopped && must_linger()) {
    begin_close(reason);
    discard_output();
    return begin_linger();
  }
  bury(reason);
}

void Connection::bury(CloseReason reason) {
  if (is_dead()) return;
  rdma_.reset();  // first: no device of the peer reaches what is given back now
  drop_operation();
  discard_output();
  abort_reservations();
  if (state_ == State::kLingering) metrics().connections_lingering.sub();
  if (auth_ != Auth::kProven) {
    loop_.shared().strangers(is_unix_).fetch_sub(1);
    metrics().unauthenticated_open.sub();
  }
  free_memory(carry_);
  free_memory(partial_);
  stage_.reset();
  window_.memory.reset();
  state_ = State::kDead;
  account();
  metrics().closed[static_cast<size_t>(reason)].add();
  (void)::shutdown(fd(), SHUT_RDWR);
  loop_.dead(*this);
}

// A window of progress_timeout_ms in which too little moved, while something had to move.
bool Connection::too_slow() {
  const bool receiving = state_ == State::kPayload && !parked_ && !output_full();
  const bool sending = out_at_ < out_.size();
  const uint64_t now = loop_.now_ms();
  if (!receiving && !sending) {
    progress_ms_ = now;
    moved_at_progress_ = moved_bytes_;
    return false;
  }
  if (now - progress_ms_ < config().progress_timeout_ms) return false;
  const uint64_t moved = moved_bytes_ - moved_at_progress_;
  progress_ms_ = now;
  moved_at_progress_ = moved_bytes_;
  return moved < config().min_progress_bytes;
}

void Connection::on_tick() {
  if (rdma_ && store().arena_gone()) rdma_->withdraw_all();
  const uint64_t now = loop_.now_ms();
  if (is_dead()) return;
  // Many strangers at once: those that were refused go, and the others get less time, so that the proven
  // ones get in.
  const bool pressure = auth_ != Auth::kProven && loop_.shared().crowded(is_unix_);
  if (pressure && (state_ == State::kLingering || state_ == State::kClosing)) return bury(close_reason_);
  if (state_ == State::kLingering) {
    if (!must_linger() && now - closing_ms_ > kLingerMs) bury(close_reason_);
    return;
  }
  if (state_ == State::kClosing) {
    if (now - closing_ms_ <= kClosingMs) return;
    discard_output();
    return begin_linger();
  }
  if (auth_ != Auth::kProven) {
    const uint64_t limit = config().handshake_timeout_ms;
    if (now - opened_ms_ > (pressure || surplus ? std::min(limit, kPressureHandshakeMs) : limit)) {
      destroy(surplus ? CloseReason::kCapacity : CloseReason::kHandshakeTimeout);
    }
    return;
  }
  if (frame_ms_ != 0 && now - frame_ms_ > config().frame_timeout_ms) return destroy(CloseReason::kSlow);
  if (too_slow()) return destroy(CloseReason::kSlow);
  if (!busy()) {
    stage_.reset();
    window_.memory.reset();
    window_.piece = Window::kNoPiece;
  }
  if (silent_too_long()) destroy(CloseReason::kIdle);
}

// The end of a process on this host always shows; that of a host on the network may not.
bool Connection::silent_too_long() const {
  if (busy()) return false;
  const bool holds = !is_unix_ && (pins_ > 0 || reservations_ > 0);
  uint64_t limit = config().idle_timeout_ms;
  if (holds && config().grant_timeout_ms != 0)
    limit = limit == 0 ? config().grant_timeout_ms : std::min<uint64_t>(limit, config().grant_timeout_ms);
  return limit != 0 && loop_.now_ms() - active_ms_ > limit;
}

}  // namespace mooncache::server

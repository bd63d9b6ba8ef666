#include "server/connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/free_memory.h"

namespace mooncache::server {

namespace {

// Bytes per read: they are still in the cache when their CRC is computed, and on loopback the sender runs on
// while they are copied (64 KiB moved 1.3 to 1.6 times as much as 1 MiB per call).
constexpr uint64_t kChunkBytes = 64 << 10;
constexpr size_t kReadSlices = 64;
// Read behind the end of a payload, so that the next request costs no call of its own.
constexpr size_t kReadAheadBytes = 16 << 10;
// After the last word: how long the peer has to take it, and to close its side.
constexpr uint64_t kClosingMs = 5000;
constexpr uint64_t kLingerMs = 6000;
constexpr uint64_t kPressureHandshakeMs = 1000;

bool same_user(int fd) {
  const auto peer = net::peer_credentials(fd);
  return peer && peer->uid == ::geteuid();
}

}  // namespace

Connection::Connection(Loop& loop, std::unique_ptr<net::Stream> stream, bool is_unix)
    : Watched(Kind::kConnection),
      loop_(loop),
      stream_(std::move(stream)),
      session_(loop, *this, is_unix, stream_->is_tls(),
               is_unix && loop.shared().shares_memory && same_user(stream_->fd())),
      state_(stream_->is_tls() ? State::kTls : State::kOpen),
      watched_events_(EPOLLIN),
      opened_ms_(loop.now_ms()),
      active_ms_(loop.now_ms()) {
  if (loop.shared().memory_may_go) stream_->touch_lost_memory();
}

Connection::~Connection() = default;

bool Connection::busy() const {
  return !session_.idle() || !session_.out.empty() || frames_.partial() || !carry_.empty();
}

void Connection::account() {
  const uint64_t now = session_.held_bytes() + frames_.held_bytes() + held_bytes(carry_);
  if (now == accounted_bytes_) return;
  loop_.shared().buffered_bytes.fetch_add(now - accounted_bytes_,
                                          std::memory_order_relaxed);  // may wrap: a difference
  accounted_bytes_ = now;
}

void Connection::on_event(uint32_t events) {
  switch (state_) {
    case State::kDead:
      return;
    case State::kTls:
      return advance_tls();
    case State::kLingering:
      return read_to_end();
    case State::kClosing:
      return advance();
    case State::kOpen:
      break;
  }
  const bool broken = (events & (EPOLLERR | EPOLLHUP)) != 0;
  if (((parked() || awaits_disk()) && (broken || (events & EPOLLRDHUP) != 0)) ||
      (broken && (events & EPOLLIN) == 0)) {
    return end(CloseReason::kPeer);
  }
  if ((events & EPOLLIN) != 0) read_turn();
  advance();
}

void Connection::on_turn() {
  turn_scheduled_ = false;
  if (is_dead()) return;
  if (blocked_ == Blocked::kTurn) {
    blocked_ = Blocked::kNo;
    proceed(session_.resume());
  } else {
    read_turn();
  }
  advance();
}

void Connection::retry_parked() {
  // Try as if it had never waited; a new refusal parks again with what is left of the time.
  session_.end_wait();
  blocked_ = Blocked::kNo;
  proceed(session_.resume());
  session_.progress.restart(loop_.now_ms());
  advance();
}

void Connection::retry_disk() {
  blocked_ = Blocked::kNo;
  proceed(session_.resume());
  session_.progress.restart(loop_.now_ms());
  advance();
}

void Connection::send_news(const WaitTable::News& news) {
  if (state_ != State::kOpen) return;
  session_.respond_news(news);
  advance();
  account();
}

void Connection::advance_tls() {
  const net::IoResult result = stream_->handshake();
  switch (result.state) {
    case net::IoState::kMoved:
      state_ = State::kOpen;
      read_turn();
      return advance();
    case net::IoState::kWantRead:
      tls_events_ = EPOLLIN;
      break;
    case net::IoState::kWantWrite:
      tls_events_ = EPOLLOUT;
      break;
    case net::IoState::kEnd:
    case net::IoState::kFailed:
      loop_.shared().log.push(30, "tls_handshake_failed", stream_->error().message);
      return end(CloseReason::kTls);
  }
  update_interest();
}

// Input -------------------------------------------------------------------------------------------------

bool Connection::can_read() {
  return state_ == State::kOpen && blocked_ == Blocked::kNo && !session_.out.full() &&
         (session_.idle() || session_.inbound() != nullptr);
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
  Inbound* const inbound = session_.inbound();
  if (inbound != nullptr) {
    count = inbound->gather(session_, std::span(slices).first(kReadSlices - 1), kChunkBytes, scratch_too);
  } else if (frames_.partial()) {
    slices[count++] = frames_.room();
    scratch_too = frames_.room_is_all();
  }
  size_t direct_bytes = 0;
  for (size_t i = 0; i < count; ++i) direct_bytes += slices[i].size;
  const auto scratch = loop_.scratch().first(inbound != nullptr ? kReadAheadBytes : Loop::kScratchBytes);
  if (scratch_too) slices[count++] = {scratch.data(), scratch.size()};

  const net::IoResult result = stream_->read_some(std::span(slices).first(count));
  loop_.metrics.read_calls.add();
  if (result.state == net::IoState::kEnd || result.state == net::IoState::kFailed) {
    end(CloseReason::kPeer);
    return false;
  }
  if (result.state != net::IoState::kMoved) return false;
  loop_.metrics.bytes_in.add(result.bytes);
  session_.progress.moved(result.bytes);
  loop_.spend(result.bytes, budget);

  const size_t direct = std::min(result.bytes, direct_bytes);
  if (direct > 0) {
    if (inbound != nullptr) {
      proceed(inbound->received(session_, direct, nullptr));
    } else {
      after_read(
          frames_.filled(direct, [this](FrameReader::Header header) { return session_.accept(header); }));
    }
  }
  if (result.bytes > direct) consume(scratch.first(result.bytes - direct));
  const size_t wanted = direct_bytes + (scratch_too ? scratch.size() : 0);
  return result.bytes == wanted && budget > 0;
}

void Connection::consume(Bytes bytes) {
  while (!bytes.empty()) {
    if (state_ != State::kOpen) return;
    if (!can_read()) {
      carry_.assign(bytes.begin(), bytes.end());
      return;
    }
    if (Inbound* inbound = session_.inbound(); inbound != nullptr) {
      const auto count = static_cast<size_t>(std::min<uint64_t>(bytes.size(), inbound->missing_bytes()));
      proceed(inbound->received(session_, count, bytes.data()));
      bytes = bytes.subspan(count);
    } else {
      after_read(frames_.take(bytes, [this](FrameReader::Header header) { return session_.accept(header); }));
    }
  }
}

void Connection::after_read(FrameReader::Step step) {
  if (step == FrameReader::Step::kRefused) return proceed(Next::kClose);
  if (step == FrameReader::Step::kMore) {
    if (frames_.partial() && frame_ms_ == 0) frame_ms_ = loop_.now_ms();
    return;
  }
  active_ms_ = loop_.now_ms();
  frame_ms_ = 0;
  proceed(session_.start(frames_.header(), frames_.meta()));
  frames_.release();
}

void Connection::proceed(Next next) {
  switch (next) {
    case Next::kDone:
      session_.pending = std::monostate{};
      active_ms_ = loop_.now_ms();
      return;
    case Next::kPayload:
      return;
    case Next::kTurn:
      blocked_ = Blocked::kTurn;
      return loop_.run_again(*this);
    case Next::kSpace:
      blocked_ = Blocked::kSpace;
      return loop_.park(*this);
    case Next::kDisk:
      blocked_ = Blocked::kDisk;
      return loop_.await_disk(*this);
    case Next::kClose:
      return begin_close(session_.close_reason());
  }
}

// Output ------------------------------------------------------------------------------------------------

void Connection::advance() {
  if (is_dead()) return;
  for (;;) {
    if (!session_.out.flush(*stream_, loop_.visit().write_bytes)) return write_failed();
    if (carry_.empty() || !can_read()) break;
    const std::vector<std::byte> carried = std::exchange(carry_, {});
    consume(carried);
    if (is_dead()) return;
  }
  if (state_ == State::kClosing && session_.out.empty()) return begin_linger();
  if (can_read() && stream_->has_buffered() && !turn_scheduled_) {
    turn_scheduled_ = true;
    loop_.run_again(*this);
  }
  update_interest();
}

void Connection::update_interest() {
  uint32_t events = 0;
  if (state_ == State::kTls) events = tls_events_;
  if (can_read() || state_ == State::kLingering) events |= EPOLLIN;
  if (parked() || awaits_disk()) events |= EPOLLRDHUP;
  if (!session_.out.empty()) events |= EPOLLOUT;
  if (events == watched_events_) return;
  watched_events_ = events;
  loop_.watch(*this, events);
}

// The end -----------------------------------------------------------------------------------------------

// No more requests; what is queued (an error, mostly) is still sent. Closing at once could reset the
// connection before the peer has read it.
void Connection::begin_close(CloseReason reason) {
  if (state_ == State::kClosing || state_ == State::kLingering || is_dead()) return;
  session_.abandon();
  blocked_ = Blocked::kNo;
  if (!session_.held.may_write_memory()) session_.held.abort_all_granted();
  free_memory(carry_);
  close_reason_ = reason;
  closing_ms_ = loop_.now_ms();
  state_ = State::kClosing;
}

void Connection::begin_linger() {
  if (!session_.proven() && loop_.shared().too_many_unauthenticated(session_.is_unix))
    return end(close_reason_);
  state_ = State::kLingering;
  frames_.clear();
  (void)::shutdown(fd(), SHUT_WR);
  loop_.metrics.connections_lingering.add();
  read_to_end();
}

void Connection::read_to_end() {
  for (int i = 0; i < 16; ++i) {
    const ssize_t count = ::recv(fd(), loop_.discard().data(), loop_.discard().size(), MSG_DONTWAIT);
    if (count > 0) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) break;
    return end(close_reason_);
  }
  update_interest();
}

// That alone does not prove that the peer is gone: it may have closed one direction.
void Connection::write_failed() {
  if (!session_.held.must_linger()) return end(CloseReason::kPeer);
  begin_close(CloseReason::kPeer);
  session_.out.discard();
  begin_linger();
}

void Connection::destroy(CloseReason reason) {
  if (is_dead() || state_ == State::kLingering) {
    if (reason == CloseReason::kStopped) end(reason);
    return;
  }
  if (reason != CloseReason::kStopped && session_.held.must_linger()) {
    begin_close(reason);
    session_.out.discard();
    return begin_linger();
  }
  end(reason);
}

void Connection::end(CloseReason reason) {
  if (is_dead()) return;
  session_.held.disconnect();  // first: no device of the peer reaches what is given back now
  session_.abandon();
  session_.out.discard();
  session_.held.abort_all_granted();
  session_.held.end_all_ranges();
  blocked_ = Blocked::kNo;
  if (state_ == State::kLingering) loop_.metrics.connections_lingering.sub();
  if (!session_.proven()) {
    loop_.shared().strangers(session_.is_unix).fetch_sub(1);
    loop_.metrics.unauthenticated_open.sub();
  }
  free_memory(carry_);
  frames_.clear();
  session_.free_staging();
  session_.out.free_window();
  state_ = State::kDead;
  account();
  loop_.metrics.closed[static_cast<size_t>(reason)].add();
  (void)::shutdown(fd(), SHUT_RDWR);
  loop_.dead(*this);
}

void Connection::on_tick() {
  if (loop_.shared().store->arena_gone()) session_.held.withdraw_all();
  const uint64_t now = loop_.now_ms();
  if (is_dead()) return;
  // Many strangers at once: those that were refused go, and the others get less time, so that the proven
  // ones get in.
  const bool pressure = !session_.proven() && loop_.shared().too_many_unauthenticated(session_.is_unix);
  if (pressure && (state_ == State::kLingering || state_ == State::kClosing)) return end(close_reason_);
  if (state_ == State::kLingering) {
    if (!session_.held.must_linger() && now - closing_ms_ > kLingerMs) end(close_reason_);
    return;
  }
  if (state_ == State::kClosing) {
    if (now - closing_ms_ <= kClosingMs) return;
    session_.out.discard();
    return begin_linger();
  }
  if (!session_.proven()) {
    const uint64_t limit = session_.config().handshake_timeout_ms;
    if (now - opened_ms_ > (pressure || session_.surplus ? std::min(limit, kPressureHandshakeMs) : limit)) {
      destroy(session_.surplus ? CloseReason::kCapacity : CloseReason::kHandshakeTimeout);
    }
    return;
  }
  if (Inbound* inbound = session_.inbound(); inbound != nullptr) inbound->drop_revoked(session_);
  if (session_.held.sends_revoked()) return destroy(CloseReason::kRevoked);
  if (frame_ms_ != 0 && now - frame_ms_ > session_.config().frame_timeout_ms)
    return destroy(CloseReason::kSlow);
  if (session_.too_slow(parked())) return destroy(CloseReason::kSlow);
  if (!busy()) {
    session_.free_staging();
    session_.out.free_window();
  }
  const uint64_t silence_limit_ms = session_.silence_limit_ms();
  if (open_waits() > 0) active_ms_ = now;  // it is silent because the node is
  if (!busy() && silence_limit_ms != 0 && now - active_ms_ > silence_limit_ms) destroy(CloseReason::kIdle);
}

}  // namespace mooncache::server

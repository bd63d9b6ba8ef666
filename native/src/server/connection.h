// One peer's socket: a state machine that never blocks. Input is read into the loop's scratch memory (whole
// small frames are handled there without a copy) or, for payloads, straight into reserved extents.
//
// Requests are answered in order: the next frame is not looked at before the present one has queued its
// response. An operation that must wait (for space) or that would hold the loop too long (checking much
// memory) is suspended, and with it the reading of this connection; the kernel's window then slows the peer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "net/stream.h"
#include "server/frame_reader.h"
#include "server/loop.h"
#include "server/peer_session.h"

namespace mooncache::server {

class Connection final : public Watched, public WaitTable::Owner {
 public:
  Connection(Loop& loop, std::unique_ptr<net::Stream> stream, bool is_unix);
  ~Connection();

  size_t index = 0;  // in the loop's table
  // The loop's notes: in its queue, for these events, for a turn without any.
  bool queued = false, again = false;
  uint32_t ready_events = 0;

  int fd() const { return stream_->fd(); }
  bool is_dead() const { return state_ == State::kDead; }
  bool busy() const;  // a request is in progress
  bool parked() const { return blocked_ == Blocked::kSpace; }
  PeerSession& session() { return session_; }

  // After each of its turns: tells the node what memory it holds for what is in hand.
  void account();
  uint64_t buffered_bytes() const { return accounted_bytes_; }

  void on_event(uint32_t events);
  void on_turn();       // after Loop::run_again
  void retry_parked();  // may park again
  bool awaits_disk() const { return blocked_ == Blocked::kDisk; }
  void retry_disk();  // may wait for it again
  void send_news(const WaitTable::News& news) override;
  void on_tick();  // deadlines
  void destroy(CloseReason reason);

 private:
  enum class State : uint8_t { kTls, kOpen, kClosing, kLingering, kDead };
  // What the request in hand waits for. Nothing is read meanwhile.
  enum class Blocked : uint8_t { kNo, kTurn, kSpace, kDisk };
  using Bytes = std::span<const std::byte>;

  void advance_tls();
  // Input.
  bool can_read();
  void read_turn();
  bool read_once(uint64_t& budget);  // false: nothing more to read now
  void consume(Bytes bytes);
  void after_read(FrameReader::Step step);
  void proceed(Next next);
  // Sends what is queued, reads on if possible, says what epoll has to watch.
  void advance();
  void update_interest();
  // The end.
  void begin_close(CloseReason reason);
  void begin_linger();
  void read_to_end();
  void write_failed();
  void end(CloseReason reason);

  Loop& loop_;
  std::unique_ptr<net::Stream> stream_;
  PeerSession session_;
  FrameReader frames_;
  std::vector<std::byte> carry_;  // read but not looked at: the connection was suspended
  State state_;
  Blocked blocked_ = Blocked::kNo;
  CloseReason close_reason_ = CloseReason::kPeer;
  uint32_t watched_events_;
  uint32_t tls_events_ = 0;
  bool turn_scheduled_ = false;
  uint64_t accounted_bytes_ = 0;
  // deadlines
  uint64_t opened_ms_, active_ms_, frame_ms_ = 0, closing_ms_ = 0;
};

}  // namespace mooncache::server

#include "client/watch_link.h"

#include <poll.h>

#include <algorithm>

namespace mooncache {

namespace {

constexpr size_t kReadBytes = 16 << 10;
// Reads of one pump(): a node that never stops talking does not keep the thread.
constexpr int kReadsPerPump = 16;
// Of PINGs; WAITs have numbers of their own from 1 on.
constexpr uint64_t kPingId = UINT64_MAX;
// Signs of life are asked for this often in a ping interval, and taken twice as often.
constexpr uint32_t kBeatsAsked = 2;
constexpr uint32_t kBeatsTaken = 2 * kBeatsAsked;

// A frame of a WAIT that says no more than that the node lives.
bool is_beat(const Status& status, Reader in) {
  if (!status) return false;
  const auto news = wire::WaitNews::decode(in, 0);
  return news && news->state == wire::WaitState::kMore;
}

}  // namespace

void WatchLink::queue(wire::Opcode opcode, uint16_t flags, uint64_t request_id,
                      std::span<const std::byte> meta) {
  if (sent_ == out_.size()) {
    out_.clear();
    sent_ = 0;
  }
  wire::FrameHeader header;
  header.opcode = opcode;
  header.flags = flags;
  header.request_id = request_id;
  const wire::HeaderBytes head = wire::encode_header(header, meta);
  out_.insert(out_.end(), head.begin(), head.end());
  out_.insert(out_.end(), meta.begin(), meta.end());
}

void WatchLink::wait(uint64_t request_id, wire::WaitRequest request) {
  held_.emplace_back(request_id, std::move(request));
}

void WatchLink::withdraw(uint64_t request_id) {
  if (std::erase_if(held_, [&](const auto& held) { return held.first == request_id; }) != 0) return;
  queue(wire::Opcode::kWait, wire::kFlagWithdraw, request_id, {});
}

// A node that was silent for long answers a WAIT with heartbeats at once, so that is a question too.
void WatchLink::queue_waits(uint64_t now_ms) {
  const bool heartbeats = session_->offers_heartbeats();
  for (auto& [request_id, request] : held_) {
    if (heartbeats) request.heartbeat_ms = std::max(limits_.ping_interval_ms / kBeatsAsked, 1u);
    Writer meta(16 + request.keys.size() * kKeyBytes);
    request.encode(meta);
    queue(wire::Opcode::kWait, heartbeats ? wire::kFlagHeartbeats : 0, request_id, meta.view());
  }
  if (heartbeats && !held_.empty() && asked_ms_ == 0 && now_ms - heard_ms_ >= limits_.ping_interval_ms)
    asked_ms_ = now_ms;
  held_.clear();
}

short WatchLink::events() const {
  if (!ready_) return session_->poll_events();
  return static_cast<short>(wants_write_ ? POLLIN | POLLOUT : POLLIN);
}

uint64_t WatchLink::due_ms(bool waits) const {
  if (more_) return 0;
  if (!ready_) return started_ms_ + limits_.connect_timeout_ms;
  if (asked_ms_ != 0) return asked_ms_ + limits_.connect_timeout_ms;
  return waits ? heard_ms_ + limits_.ping_interval_ms : UINT64_MAX;
}

Status WatchLink::pump(uint64_t now_ms, bool waits, const Handler& handler) {
  if (!ready_) {
    if (Status status = connect(now_ms); !status || !ready_) return status;
  }
  queue_waits(now_ms);
  if (Status status = send(); !status) return status;
  if (Status status = receive(now_ms, handler); !status) return status;
  if (Status status = look_alive(now_ms, waits); !status) return status;
  return send();
}

// By shared memory's socket first, as all connections to this host; without it by TCP.
Status WatchLink::connect(uint64_t now_ms) {
  for (;;) {
    const Route route = node_->preferred_route(now_ms);
    Status status;
    if (!session_) {
      auto session = node_->start_session(route);
      if (session)
        session_ = std::move(*session);
      else
        status = session.status();
    }
    const Route tried = session_ ? session_->route() : route;
    if (status) status = session_->pump(nullptr);
    if (status && session_->ready()) {
      if (!session_->offers_waits())
        return {Code::kUnsupported, "node " + node_->info().node_id + " is too old to be waited at"};
      ready_ = true;
      heard_ms_ = now_ms;
      node_->success(now_ms);
      return Status::ok();
    }
    if (status && now_ms - started_ms_ > limits_.connect_timeout_ms)
      status = {Code::kNodeUnavailable, "node " + node_->info().node_id + " did not answer HELLO in time"};
    if (status) return status;
    session_.reset();
    if (tried == Route::kUnix && status.code == Code::kNodeUnavailable) {
      node_->unix_failed(now_ms);
      continue;
    }
    node_->failure(now_ms, status, now_ms - std::min(now_ms, started_ms_));
    return status;
  }
}

Status WatchLink::send() {
  wants_write_ = false;
  while (sent_ < out_.size()) {
    const ConstSlice rest{out_.data() + sent_, out_.size() - sent_};
    const net::IoResult result = session_->stream().write_some(std::span(&rest, 1));
    if (result.state == net::IoState::kWantRead) return Status::ok();
    if (result.state == net::IoState::kWantWrite) {
      wants_write_ = true;
      return Status::ok();
    }
    if (result.state != net::IoState::kMoved)
      return {Code::kConnectionLost, "node " + node_->info().node_id + " closed the connection"};
    sent_ += result.bytes;
  }
  return Status::ok();
}

Status WatchLink::receive(uint64_t now_ms, const Handler& handler) {
  more_ = false;
  for (int reads = 0;; ++reads) {
    if (reads == kReadsPerPump) {
      more_ = true;
      return Status::ok();
    }
    if (in_.size() - have_ < kReadBytes) in_.resize(have_ + kReadBytes);
    const Slice room{in_.data() + have_, in_.size() - have_};
    const net::IoResult result = session_->stream().read_some(std::span(&room, 1));
    if (result.state == net::IoState::kWantRead || result.state == net::IoState::kWantWrite)
      return Status::ok();
    if (result.state != net::IoState::kMoved)
      return {Code::kConnectionLost, "node " + node_->info().node_id + " closed the connection"};
    have_ += result.bytes;
    heard_ms_ = now_ms;
    asked_ms_ = 0;
    if (Status status = parse(now_ms, handler); !status) return status;
  }
}

Status WatchLink::parse(uint64_t now_ms, const Handler& handler) {
  size_t begin = 0;
  while (have_ - begin >= wire::kHeaderBytes) {
    const std::span<const std::byte, wire::kHeaderBytes> head(in_.data() + begin, wire::kHeaderBytes);
    const auto header = wire::decode_header(head);
    if (!header) return header.status();
    const size_t total = wire::kHeaderBytes + header->meta_bytes;
    if (have_ - begin < total) break;
    const std::span<const std::byte> meta(in_.data() + begin + wire::kHeaderBytes, header->meta_bytes);
    if (Status checked = wire::verify_check(head, meta); !checked) return checked;
    Reader in(meta);
    const auto status = wire::decode_status(in);
    const bool ping = header->opcode == wire::Opcode::kPing && header->request_id == kPingId;
    if (!header->response || header->payload_bytes != 0 || !status ||
        (header->opcode != wire::Opcode::kWait && !ping))
      return {Code::kProtocolError, "node " + node_->info().node_id + " answered what was not asked"};
    if (ping || is_beat(*status, in)) {
      if (Status counted = count_beat(now_ms); !counted) return counted;
    } else if (Status handled = handler(header->request_id, *status, in); !handled) {
      return handled;
    }
    begin += total;
  }
  std::copy(in_.begin() + static_cast<ptrdiff_t>(begin), in_.begin() + static_cast<ptrdiff_t>(have_),
            in_.begin());
  have_ -= begin;
  return Status::ok();
}

// Each costs its reader time, so a node may not send them without end. Those of a while in which this process
// did not run come together.
Status WatchLink::count_beat(uint64_t now_ms) {
  const uint64_t apart_ms = std::max(limits_.ping_interval_ms / kBeatsTaken, 1u);
  const uint64_t more = (now_ms - beats_counted_ms_) / apart_ms;
  beats_counted_ms_ += more * apart_ms;
  beats_left_ = std::min(beats_left_ + more, kBeatsMax);
  if (beats_left_ == 0)
    return {Code::kProtocolError, "node " + node_->info().node_id + " gives signs of life without end"};
  --beats_left_;
  return Status::ok();
}

// A node that is stopped, or whose host is gone, says as little as one that has nothing to say.
Status WatchLink::look_alive(uint64_t now_ms, bool waits) {
  if (asked_ms_ != 0 && now_ms - asked_ms_ >= limits_.connect_timeout_ms)
    return {Code::kNodeUnavailable, "node " + node_->info().node_id + " gives no sign of life"};
  if (asked_ms_ == 0 && waits && now_ms - heard_ms_ >= limits_.ping_interval_ms) {
    queue(wire::Opcode::kPing, 0, kPingId, {});
    asked_ms_ = now_ms;
  }
  return Status::ok();
}

}  // namespace mooncache

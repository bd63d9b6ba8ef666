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

void WatchLink::wait(uint64_t request_id, const wire::WaitRequest& request) {
  Writer meta(16 + request.keys.size() * kKeyBytes);
  request.encode(meta);
  queue(wire::Opcode::kWait, 0, request_id, meta.view());
}

void WatchLink::withdraw(uint64_t request_id) {
  queue(wire::Opcode::kWait, wire::kFlagWithdraw, request_id, {});
}

short WatchLink::events() const {
  if (!ready_) return session_->poll_events();
  return static_cast<short>(wants_write_ ? POLLIN | POLLOUT : POLLIN);
}

uint64_t WatchLink::due_ms(bool waits) const {
  if (more_) return 0;
  if (!ready_) return started_ms_ + limits_.connect_timeout_ms;
  if (pinged_ms_ != 0) return pinged_ms_ + limits_.connect_timeout_ms;
  return waits ? heard_ms_ + limits_.ping_interval_ms : UINT64_MAX;
}

Status WatchLink::pump(uint64_t now_ms, bool waits, const Handler& handler) {
  if (!ready_) {
    if (Status status = connect(now_ms); !status || !ready_) return status;
  }
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
      node_->success();
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
    node_->failure(now_ms, status);
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
    if (Status status = parse(handler); !status) return status;
  }
}

Status WatchLink::parse(const Handler& handler) {
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
    if (ping) {
      pinged_ms_ = 0;
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

// A node that is stopped, or whose host is gone, says as little as one that has nothing to say.
Status WatchLink::look_alive(uint64_t now_ms, bool waits) {
  if (pinged_ms_ != 0 && now_ms - pinged_ms_ >= limits_.connect_timeout_ms)
    return {Code::kNodeUnavailable, "node " + node_->info().node_id + " gives no sign of life"};
  if (pinged_ms_ == 0 && waits && now_ms - heard_ms_ >= limits_.ping_interval_ms) {
    queue(wire::Opcode::kPing, 0, kPingId, {});
    pinged_ms_ = now_ms;
  }
  return Status::ok();
}

}  // namespace mooncache

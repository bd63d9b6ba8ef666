#include "transport/session.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "mooncache/crc32c.h"

namespace mooncache {

namespace {

// While payload streams in, this much room is offered behind it for the next answer's head.
constexpr size_t kTailBytes = 8 << 10;
constexpr size_t kScratchBytes = 64 << 10;
constexpr size_t kReadPieces = 128;

// Swallows unwanted bytes; never read, shared by all threads on purpose per thread.
std::byte* scratch() {
  static thread_local std::vector<std::byte> bytes(kScratchBytes);
  return bytes.data();
}

}  // namespace

void PayloadSink::add_item(std::span<const Slice> parts, uint64_t offset, uint64_t length) {
  for (const Slice& part : parts) {
    if (length == 0) break;
    if (offset >= part.size) {
      offset -= part.size;
      continue;
    }
    const uint64_t take = std::min<uint64_t>(part.size - offset, length);
    slices.push_back({part.data == nullptr ? nullptr : part.data + offset, static_cast<size_t>(take)});
    length -= take;
    offset = 0;
  }
  item_ends.push_back(static_cast<uint32_t>(slices.size()));
}

short Session::poll_events() const {
  short events = POLLIN;
  if (!stream_) return events;
  if (!connected_ || want_write_) events |= POLLOUT;
  return events;
}

bool Session::stale() const {
  std::byte probe;
  const ssize_t got = recv(stream_->fd(), &probe, 1, MSG_PEEK | MSG_DONTWAIT);
  if (got > 0) return in_flight_ == 0;
  return got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
}

std::vector<net::UniqueFd> Session::take_fds() {
  collect_fds_ = false;
  return std::exchange(fds_, {});
}

Status Session::fail(Status status) {
  broken_ = true;
  return status;
}

Status Session::lost(const net::IoResult& result) {
  if (result.state == net::IoState::kEnd) {
    return fail({ready_ ? Code::kConnectionLost : Code::kNodeUnavailable, "the node closed the connection"});
  }
  return fail(stream_->error());
}

Status Session::pump(Program* program) {
  progressed_ = false;
  if (broken_) return {Code::kConnectionLost, "the connection is broken"};
  if (!stream_) {
    if (Status status = begin_connect(); !status) return fail(std::move(status));
    if (!stream_) return Status::ok();
  }
  if (!connected_) {
    if (Status status = finish_connect(); !status) return fail(std::move(status));
    if (!connected_) return Status::ok();
  }
  size_t budget = limits_.pump_bytes;
  while (budget > 0) {
    Program* active = ready_ ? program : handshake_.get();
    if (active == nullptr && ready_ && (late_.count > 0 || out_at_ < out_.size())) active = &late_;
    if (active == nullptr) break;
    const size_t before = budget;
    if (Status status = send_some(*active, budget); !status) return status;
    if (Status status = receive_some(*active, budget); !status) return status;
    if (budget == before) break;
    progressed_ = true;
    if (ready_ && handshake_) {
      handshake_.reset();
      response_seen_ = false;
      continue;
    }
    if (active->finished() && in_flight_ == 0 && out_at_ == out_.size()) break;
  }
  return Status::ok();
}

void Session::frame_request() {
  wire::FrameHeader header;
  header.opcode = request_.opcode;
  header.flags = request_.flags;
  header.request_id = next_request_id_++;
  for (const ConstSlice& slice : request_.payload) header.payload_bytes += slice.size;
  const auto meta = request_.meta.view();
  const wire::HeaderBytes bytes = wire::encode_header(header, meta);
  out_head_.resize(bytes.size() + meta.size());
  std::copy(bytes.begin(), bytes.end(), out_head_.begin());
  std::copy(meta.begin(), meta.end(), out_head_.begin() + bytes.size());
  out_.clear();
  out_at_ = 0;
  out_.emplace_back(out_head_.data(), out_head_.size());
  for (const ConstSlice& slice : request_.payload) {
    if (slice.size > 0) out_.push_back(slice);
  }
  if ((request_.flags & wire::kFlagNoReply) == 0) {
    window_[(window_begin_ + in_flight_) % kMaxWindow] = {header.request_id, header.opcode};
    ++in_flight_;
  }
}

Status Session::send_some(Program& program, size_t& budget) {
  want_write_ = false;
  const size_t window = std::min<size_t>(limits_.window_frames, kMaxWindow);
  while (budget > 0) {
    if (out_at_ == out_.size()) {
      if (in_flight_ >= window) return Status::ok();
      request_.clear();
      if (!program.next(request_)) return Status::ok();
      frame_request();
    }
    const net::IoResult result = stream_->write_some(std::span(out_).subspan(out_at_));
    if (result.state == net::IoState::kWantWrite || result.state == net::IoState::kWantRead) {
      want_write_ = result.state == net::IoState::kWantWrite;
      return Status::ok();
    }
    if (result.state != net::IoState::kMoved) return lost(result);
    bytes_moved_ += result.bytes;
    budget -= std::min(budget, result.bytes);
    size_t left = result.bytes;
    while (out_at_ < out_.size() && left >= out_[out_at_].size) left -= out_[out_at_++].size;
    if (left > 0) out_[out_at_] = {out_[out_at_].data + left, out_[out_at_].size - left};
    // a full socket buffer: turn to the receiving side before trying again
    if (out_at_ < out_.size()) want_write_ = true;
  }
  return Status::ok();
}

Status Session::receive_some(Program& program, size_t& budget) {
  while (budget > 0 && in_flight_ > 0) {
    bool moved = false;
    const Status status = in_payload_ ? read_payload_bytes(budget, moved) : read_head_bytes(budget, moved);
    if (!status) return status;
    if (!moved) return Status::ok();
    if (Status parsed = parse_buffered(program); !parsed) return fail(std::move(parsed));
  }
  return Status::ok();
}

Status Session::read_head_bytes(size_t& budget, bool& moved) {
  if (buffer_begin_ == buffer_end_) buffer_begin_ = buffer_end_ = 0;
  if (buffer_.size() - buffer_end_ < kTailBytes && buffer_begin_ > 0) {
    std::copy(buffer_.begin() + static_cast<ptrdiff_t>(buffer_begin_),
              buffer_.begin() + static_cast<ptrdiff_t>(buffer_end_), buffer_.begin());
    buffer_end_ -= buffer_begin_;
    buffer_begin_ = 0;
  }
  const Slice room{buffer_.data() + buffer_end_, buffer_.size() - buffer_end_};
  net::IoResult result;
  if (collect_fds_) {
    auto received = net::receive_with_fds(stream_->fd(), std::span(room.data, room.size), fds_);
    if (!received) return fail(received.status());
    if (fds_.size() > net::kMaxPassedFds) {
      return fail({Code::kProtocolError, "the node passed more descriptors than an ATTACH answer has"});
    }
    result = {*received > 0 ? net::IoState::kMoved : net::IoState::kWantRead, *received};
  } else {
    result = stream_->read_some(std::span(&room, 1));
  }
  if (result.state == net::IoState::kWantRead || result.state == net::IoState::kWantWrite)
    return Status::ok();
  if (result.state != net::IoState::kMoved) return lost(result);
  moved = true;
  bytes_moved_ += result.bytes;
  budget -= std::min(budget, result.bytes);
  buffer_end_ += result.bytes;
  return Status::ok();
}

Status Session::read_payload_bytes(size_t& budget, bool& moved) {
  // parse_buffered() left the buffer empty when payload is still missing
  buffer_begin_ = buffer_end_ = 0;
  read_pieces_.clear();
  uint64_t wanted = 0;
  uint64_t offset = sink_offset_;
  for (size_t i = sink_slice_; i < sink_.slices.size() && read_pieces_.size() + 1 < kReadPieces; ++i) {
    const Slice& slice = sink_.slices[i];
    uint64_t take = std::min<uint64_t>(slice.size - offset, limits_.read_chunk_bytes - wanted);
    if (slice.data == nullptr) take = std::min<uint64_t>(take, kScratchBytes);
    read_pieces_.push_back(
        {slice.data == nullptr ? scratch() : slice.data + offset, static_cast<size_t>(take)});
    wanted += take;
    if (take < slice.size - offset || wanted >= limits_.read_chunk_bytes) break;
    offset = 0;
  }
  if (wanted == payload_left_) read_pieces_.push_back({buffer_.data(), kTailBytes});
  const net::IoResult result = stream_->read_some(read_pieces_);
  if (result.state == net::IoState::kWantRead || result.state == net::IoState::kWantWrite)
    return Status::ok();
  if (result.state != net::IoState::kMoved) return lost(result);
  moved = true;
  bytes_moved_ += result.bytes;
  budget -= std::min(budget, result.bytes);
  const size_t payload = static_cast<size_t>(std::min<uint64_t>(result.bytes, wanted));
  place_payload(payload);
  buffer_end_ = result.bytes - payload;
  return Status::ok();
}

// Accounts for `count` payload bytes that are in place, and continues their items' CRCs.
void Session::place_payload(size_t count) {
  payload_left_ -= count;
  while (count > 0) {
    const Slice& slice = sink_.slices[sink_slice_];
    while (sink_slice_ >= sink_.item_ends[sink_item_]) ++sink_item_;
    const size_t take = static_cast<size_t>(std::min<uint64_t>(count, slice.size - sink_offset_));
    if (slice.data != nullptr) {
      crcs_[sink_item_] = crc32c({slice.data + sink_offset_, take}, crcs_[sink_item_]);
    }
    sink_offset_ += take;
    count -= take;
    if (sink_offset_ == slice.size) {
      ++sink_slice_;
      sink_offset_ = 0;
    }
  }
}

// The beginning of a payload comes with its head in one system call: copied, small by construction.
void Session::take_payload_from_buffer() {
  while (payload_left_ > 0 && buffer_begin_ < buffer_end_) {
    const Slice& slice = sink_.slices[sink_slice_];
    while (sink_slice_ >= sink_.item_ends[sink_item_]) ++sink_item_;
    const size_t take = static_cast<size_t>(
        std::min<uint64_t>({buffer_end_ - buffer_begin_, slice.size - sink_offset_, payload_left_}));
    if (slice.data != nullptr) {
      crcs_[sink_item_] =
          copy_crc32c(slice.data + sink_offset_, buffer_.data() + buffer_begin_, take, crcs_[sink_item_]);
    }
    buffer_begin_ += take;
    payload_left_ -= take;
    sink_offset_ += take;
    if (sink_offset_ == slice.size) {
      ++sink_slice_;
      sink_offset_ = 0;
    }
  }
}

void Session::finish_payload(Program& program) {
  in_payload_ = false;
  window_begin_ = (window_begin_ + 1) % kMaxWindow;
  --in_flight_;
  if (late_.count > 0)
    --late_.count;
  else
    program.on_payload(crcs_);
}

Status Session::parse_buffered(Program& program) {
  for (;;) {
    if (in_payload_) {
      take_payload_from_buffer();
      if (payload_left_ > 0) return Status::ok();
      finish_payload(program);
    }
    bool complete = false;
    if (Status status = take_head(program, complete); !status) return status;
    if (!complete) return Status::ok();
    in_payload_ = true;
  }
}

Status Session::take_head(Program& program, bool& complete) {
  const size_t available = buffer_end_ - buffer_begin_;
  if (available < wire::kHeaderBytes) return Status::ok();
  if (in_flight_ == 0) return {Code::kProtocolError, "the node sent an answer to no request"};
  const std::span<const std::byte, wire::kHeaderBytes> head(buffer_.data() + buffer_begin_,
                                                            wire::kHeaderBytes);
  auto decoded = wire::decode_header(head);
  if (!decoded) return decoded.status();
  const wire::FrameHeader& header = *decoded;
  const size_t total = wire::kHeaderBytes + header.meta_bytes;
  if (available < total) {
    if (buffer_.size() - buffer_begin_ < total) buffer_.resize(buffer_begin_ + total + kTailBytes);
    return Status::ok();
  }
  const std::span<const std::byte> meta(buffer_.data() + buffer_begin_ + wire::kHeaderBytes,
                                        header.meta_bytes);
  if (Status checked = wire::verify_check(head, meta); !checked) return checked;
  const InFlight& expected = window_[window_begin_];
  if (!header.response || header.opcode != expected.opcode || header.request_id != expected.request_id) {
    return {Code::kProtocolError, "the node answered another request than the oldest one"};
  }
  response_seen_ = true;
  if (late_.count > 0) fds_.clear();  // of an ATTACH that was abandoned
  Reader in(meta);
  const auto status = wire::decode_status(in);
  if (!status) return {Code::kProtocolError, "the node's answer has no status"};
  sink_.clear();
  if (Status handled = receiver(program).on_response(header, *status, in, sink_); !handled) return handled;
  uint64_t sink_bytes = 0;
  for (const Slice& slice : sink_.slices) sink_bytes += slice.size;
  if (sink_bytes != header.payload_bytes) {
    return {Code::kProtocolError, "the node announced a payload that its answer does not explain"};
  }
  buffer_begin_ += total;
  sink_slice_ = sink_item_ = 0;
  sink_offset_ = 0;
  payload_left_ = sink_bytes;
  crcs_.assign(sink_.item_ends.size(), 0);
  complete = true;
  return Status::ok();
}

Status Session::Late::on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                                  PayloadSink& sink) {
  const Slice nowhere{nullptr, static_cast<size_t>(header.payload_bytes)};
  if (header.payload_bytes > 0) sink.add_item(std::span(&nowhere, 1), 0, header.payload_bytes);
  if (handler) handler(header.opcode, status, in);
  return Status::ok();
}

bool Session::abandon() {
  if (broken_ || !ready_) return false;
  if (out_at_ < out_.size()) {
    std::vector<std::byte> rest;
    for (; out_at_ < out_.size(); ++out_at_) {
      rest.insert(rest.end(), out_[out_at_].data, out_[out_at_].data + out_[out_at_].size);
    }
    out_head_ = std::move(rest);
    out_.assign(1, ConstSlice{out_head_.data(), out_head_.size()});
    out_at_ = 0;
  }
  for (Slice& slice : sink_.slices) slice.data = nullptr;
  late_.count = in_flight_;
  return true;
}

Status Session::run(Program& program, Deadline deadline, int cancel_fd, WhenCut cut, InterruptLook* look) {
  const auto end_with = [&](Status status) {
    return cut == WhenCut::kAbandon && abandon() ? std::move(status) : fail(std::move(status));
  };
  std::vector<int> also;  // what the program waits for besides the socket
  for (;;) {
    if (Status status = pump(&program); !status) return status;
    const bool worked = program.work();
    // Answers to abandoned requests may still be to come.
    if (program.finished() && idle_but_for_late_answers()) return Status::ok();
    if (progressed_ || worked) {
      if (deadline.expired())
        return end_with({Code::kDeadlineExceeded, "the deadline passed during a transfer"});
      if (cancel_fd >= 0 && net::readable_now(cancel_fd))
        return end_with({Code::kCancelled, "cancelled by the caller"});
      if (look != nullptr && look->interrupted()) return end_with(InterruptLook::status());
      continue;
    }
    also.clear();
    const int patience_ms = ready_ ? program.wait_for(also) : -1;
    if (Status status = net::wait_ready(fd(), poll_events(), cancel_fd, deadline, look, also, patience_ms);
        !status) {
      return end_with(std::move(status));
    }
  }
}

}  // namespace mooncache

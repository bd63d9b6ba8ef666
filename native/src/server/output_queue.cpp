#include "server/output_queue.h"

#include <algorithm>
#include <array>

#include "base/free_memory.h"
#include "net/socket.h"

namespace mooncache::server {

namespace {

constexpr size_t kSlicesPerCall = 64;
constexpr size_t kMaxHeadBytes = 1 << 20;
constexpr size_t kMaxPieces = 8192;
constexpr size_t kKeptPieces = 64;
constexpr size_t kKeptHeadBytes = 8 << 10;

}  // namespace

bool OutputQueue::full() const {
  return bytes_ > loop_.shared().config.max_queued_bytes_per_connection || heads_.size() > kMaxHeadBytes ||
         pieces_.size() > kMaxPieces;
}

void OutputQueue::push_head(const wire::FrameHeader& request, std::span<const std::byte> meta,
                            uint64_t payload_bytes, uint64_t start_ns, bool last) {
  wire::FrameHeader header = request;
  header.response = true;
  header.flags = 0;
  header.payload_bytes = payload_bytes;
  const auto bytes = wire::encode_header(header, meta);
  OutPiece piece;
  piece.head_offset = heads_.size();
  piece.size = bytes.size() + meta.size();
  heads_.insert(heads_.end(), bytes.begin(), bytes.end());
  heads_.insert(heads_.end(), meta.begin(), meta.end());
  if (last) piece.opcode = static_cast<uint8_t>(request.opcode);
  piece.start_ns = start_ns;
  push(piece);
}

void OutputQueue::push(const OutPiece& piece) {
  if (empty()) progress_.restart(loop_.now_ms());  // from now on the peer must take bytes
  bytes_ += piece.size;
  pieces_.push_back(piece);
}

void OutputQueue::attach(std::vector<int> fds, Hold hold) {
  fds_ = std::move(fds);
  pieces_.back().with_fds = true;
  pieces_.back().hold = hold;
}

// Bytes of a queued piece from `skip` on that lie in host memory; empty: not now.
ConstSlice OutputQueue::sendable(size_t number, size_t skip, bool may_fill) {
  const OutPiece& piece = pieces_[number];
  if (!piece.staged) {
    const std::byte* data = piece.data != nullptr ? piece.data : heads_.data() + piece.head_offset;
    return {data + skip, piece.size - skip};
  }
  if (window_.piece == number && skip >= window_.begin && skip < window_.begin + window_.size)
    return {window_.memory.get() + (skip - window_.begin), window_.size - (skip - window_.begin)};
  if (!may_fill) return {};
  if (!window_.memory) window_.memory = std::make_unique_for_overwrite<std::byte[]>(kStagingBytes);
  window_.piece = Window::kNoPiece;
  const Slice part{window_.memory.get(), std::min(kStagingBytes, piece.size - skip)};
  Status got = loop_.shared().store->read(piece.hold.pin, piece.block_offset + skip, part);
  if (!got) {
    held_.report_unreadable(piece.hold.pin, got);
    return {};
  }
  window_.piece = number;
  window_.begin = skip;
  window_.size = part.size;
  return {part.data, part.size};
}

// What goes with the next call: up to a head with descriptors, and one window of staged bytes.
size_t OutputQueue::gather(std::span<ConstSlice> slices, uint64_t budget, uint64_t& bytes) {
  size_t count = 0;
  bool window_used = false;
  for (size_t i = next_; i < pieces_.size() && count < slices.size() && !pieces_[i].with_fds; ++i) {
    const size_t skip = i == next_ ? next_sent_ : 0;
    ConstSlice part = sendable(i, skip, !window_used);
    if (part.size == 0) break;
    part.size = static_cast<size_t>(std::min<uint64_t>(part.size, budget - bytes));
    window_used = window_used || pieces_[i].staged;
    slices[count++] = part;
    bytes += part.size;
    if (bytes >= budget || part.size < pieces_[i].size - skip) break;
  }
  return count;
}

// False: the connection cannot go on.
bool OutputQueue::flush_head_with_fds(net::Stream& stream, bool& moved) {
  OutPiece& piece = pieces_[next_];
  const auto head = std::span<const std::byte>(heads_).subspan(piece.head_offset, piece.size);
  const auto result = net::send_with_fds(stream.fd(), head, fds_);
  loop_.metrics.write_calls.add();
  moved = result && *result > 0;
  if (!moved) return result.code() == Code::kOk;
  piece.with_fds = false;  // the descriptors went with the first byte
  fds_.clear();
  sent(*result);
  return true;
}

bool OutputQueue::flush(net::Stream& stream, uint64_t budget) {
  while (!empty() && budget > 0) {
    if (pieces_[next_].with_fds) {
      bool moved = false;
      if (!flush_head_with_fds(stream, moved)) return false;
      if (!moved) return true;
      continue;
    }
    std::array<ConstSlice, kSlicesPerCall> slices;
    uint64_t wanted = 0;
    const size_t count = gather(slices, budget, wanted);
    // what was announced cannot be sent: only the end of the connection says that
    if (count == 0) return false;
    const net::IoResult result = stream.write_some(std::span(slices).first(count));
    loop_.metrics.write_calls.add();
    if (result.state == net::IoState::kEnd || result.state == net::IoState::kFailed) return false;
    if (result.state != net::IoState::kMoved) return true;
    sent(result.bytes);
    if (result.bytes < wanted) return true;  // the socket is full
    budget -= std::min<uint64_t>(budget, result.bytes);
  }
  return true;
}

void OutputQueue::sent(size_t bytes) {
  loop_.metrics.bytes_out.add(bytes);
  loop_.spend(bytes);
  progress_.moved(bytes);
  bytes_ -= bytes;
  uint64_t now_ns = 0;
  while (!empty()) {
    const OutPiece& piece = pieces_[next_];
    const size_t left = piece.size - next_sent_;
    if (bytes < left) {
      next_sent_ += bytes;
      return;
    }
    bytes -= left;
    held_.release(piece.hold);
    if (piece.opcode != 0) {
      if (now_ns == 0) now_ns = Loop::now_ns();
      loop_.metrics.latency[piece.opcode].record(now_ns - piece.start_ns);
    }
    ++next_;
    next_sent_ = 0;
  }
  next_ = 0;
  pieces_.clear();
  heads_.clear();
  window_.piece = Window::kNoPiece;
  if (pieces_.capacity() > kKeptPieces) free_memory(pieces_);
  if (heads_.capacity() > kKeptHeadBytes) free_memory(heads_);
}

void OutputQueue::discard() {
  for (size_t i = next_; i < pieces_.size(); ++i) held_.release(pieces_[i].hold);
  free_memory(pieces_);
  free_memory(heads_);
  window_.piece = Window::kNoPiece;
  next_ = next_sent_ = 0;
  bytes_ = 0;
}

void OutputQueue::free_window() {
  window_.memory.reset();
  window_.piece = Window::kNoPiece;
}

uint64_t OutputQueue::held_bytes() const {
  return mooncache::held_bytes(heads_) + mooncache::held_bytes(pieces_) +
         (window_.memory ? kStagingBytes : 0);
}

}  // namespace mooncache::server

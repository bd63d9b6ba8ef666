// READ and WRITE frames over a session: what a node without shared memory offers. The name says TCP, a unix
// socket works as well. Transfers are sent in order, several frames in flight.
#include <algorithm>
#include <deque>

#include "mooncache/crc32c.h"
#include "transport/plain_regions.h"
#include "transport/shm.h"

namespace mooncache {

namespace {

constexpr uint64_t kFrameBytes = 1 << 20;

const Capabilities& tcp_capabilities() {
  static const Capabilities capabilities = [] {
    Capabilities facts;
    facts.name = "tcp";
    facts.fused_blocks = true;
    facts.max_slices = 65'536;
    facts.max_in_flight = 1024;
    return facts;
  }();
  return capabilities;
}

// The link's transfers as a program of its session. Each transfer is cut into frames of about 1 MiB, so that
// a frame's CRC is computed while its bytes are in cache.
class TransferProgram final : public Program {
 public:
  struct Item {
    Transfer transfer;
    uint64_t length = 0;
    uint64_t sent = 0;
    uint64_t moved = 0;
    uint32_t crc = 0;
    uint32_t frames_open = 0;
    bool all_sent = false;
    Code code = Code::kOk;
  };

  std::deque<Item> items;

  bool next(Request& request) override {
    for (Item& item : items) {
      if (item.all_sent) continue;
      const uint64_t length = std::min(kFrameBytes, item.length - item.sent);
      const uint64_t at = item.transfer.offset + item.sent;
      if (item.transfer.direction == Direction::kRead) {
        request.opcode = wire::Opcode::kRead;
        wire::ReadRequest{item.transfer.remote.grant, at, length}.encode(request.meta);
      } else {
        PayloadSink part;
        part.add_item(item.transfer.local, item.sent, length);
        uint32_t crc = 0;
        for (const Slice& slice : part.slices) {
          crc = crc32c({slice.data, slice.size}, crc);
          request.payload.emplace_back(slice);
        }
        request.opcode = wire::Opcode::kWrite;
        wire::WriteRequest{item.transfer.remote.grant, {{at, length, crc}}}.encode(request.meta);
        item.crc = crc32c_combine(item.crc, crc, length);
      }
      frames_.push_back({item.transfer.id, item.sent, length, 0});
      item.sent += length;
      item.all_sent = item.sent == item.length;
      ++item.frames_open;
      return true;
    }
    return false;
  }

  bool finished() const override { return frames_.empty(); }

  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override {
    if (frames_.empty()) return {Code::kProtocolError, "an answer to no frame"};
    Frame& frame = frames_.front();
    frame.code = status.code;
    Item* item = find(frame.id);
    if (header.opcode == wire::Opcode::kRead) {
      frame.crc = in.u32();
      if (status.is_ok() && (!in.ok() || header.payload_bytes != frame.length)) {
        return {Code::kProtocolError, "READ answered another length than asked for"};
      }
      if (status.is_ok() && item != nullptr) sink.add_item(item->transfer.local, frame.offset, frame.length);
    } else if (status.is_ok()) {
      const auto codes = wire::decode_codes(in);
      if (!codes || codes->size() != 1) return {Code::kProtocolError, "malformed WRITE answer"};
      frame.code = codes->front();
    }
    return Status::ok();
  }

  void on_payload(std::span<const uint32_t> crcs) override {
    const Frame frame = frames_.front();
    frames_.pop_front();
    Item* item = find(frame.id);
    if (item == nullptr) return;
    --item->frames_open;
    Code code = frame.code;
    if (code == Code::kOk && item->transfer.direction == Direction::kRead && frame.length > 0) {
      if (crcs.empty() || crcs[0] != frame.crc)
        code = Code::kChecksumMismatch;
      else
        item->crc = crc32c_combine(item->crc, crcs[0], frame.length);
    }
    if (code == Code::kOk) {
      item->moved += frame.length;
    } else {
      if (item->code == Code::kOk) item->code = code;
      item->all_sent = true;  // the rest is pointless
    }
  }

  Item* find(TransferId id) {
    for (Item& item : items) {
      if (item.transfer.id == id) return &item;
    }
    return nullptr;
  }

 private:
  struct Frame {
    TransferId id = 0;
    uint64_t offset = 0;
    uint64_t length = 0;
    uint32_t crc = 0;
    Code code = Code::kOk;
  };
  std::deque<Frame> frames_;
};

class TcpLink final : public Link {
 public:
  explicit TcpLink(std::unique_ptr<Session> session) : session_(std::move(session)) {}

  size_t submit(std::span<const Transfer> transfers) override {
    size_t taken = 0;
    for (const Transfer& transfer : transfers) {
      if (program_.items.size() + done_.size() >= tcp_capabilities().max_in_flight) break;
      TransferProgram::Item item;
      item.transfer = transfer;
      if (!total_bytes(transfer.local, item.length) ||
          transfer.local.size() > tcp_capabilities().max_slices ||
          !inside(transfer.offset, item.length, transfer.remote.size)) {
        item.code = Code::kInvalidArgument;
      }
      // nothing to ask the node for
      item.all_sent = item.code != Code::kOk || item.length == 0;
      program_.items.push_back(item);
      ++taken;
    }
    return taken;
  }

  size_t poll(std::span<Completion> completions, Deadline deadline) override {
    size_t count = 0;
    while (count < completions.size()) {
      count += take_done(completions.subspan(count));
      if (count > 0 || program_.items.empty()) break;
      if (!session_ || !drive(deadline)) {
        if (deadline.expired() && session_ && !session_->broken()) break;
        fail_all(closed_ ? Code::kClosed : Code::kConnectionLost);
      }
    }
    return count;
  }

  Status cancel(TransferId id) override {
    TransferProgram::Item* item = program_.find(id);
    if (item == nullptr || (item->all_sent && item->frames_open == 0)) {
      return {Code::kNotFound, "no such transfer is under way"};
    }
    const bool untouched = item->sent == 0;
    done_.push_back({id, Code::kCancelled, item->moved, 0});
    std::erase_if(program_.items, [id](const auto& other) { return other.transfer.id == id; });
    // its bytes may be half in the socket: only a closed connection is quiet
    if (!untouched) session_.reset();
    return Status::ok();
  }

  void close() override {
    closed_ = true;
    session_.reset();
  }
  bool healthy() const override { return session_ && !session_->broken(); }
  Session* session() override { return session_.get(); }

 private:
  // False when there is nothing more to expect before the deadline, or ever.
  bool drive(Deadline deadline) {
    if (!session_->pump(&program_)) {
      session_.reset();
      return false;
    }
    if (session_->progressed()) return !deadline.expired();
    if (net::wait_ready(session_->fd(), session_->poll_events(), -1, deadline)) return true;
    return false;
  }

  size_t take_done(std::span<Completion> completions) {
    size_t count = 0;
    while (count < completions.size() && !done_.empty()) {
      completions[count++] = done_.front();
      done_.pop_front();
    }
    while (count < completions.size() && !program_.items.empty()) {
      const TransferProgram::Item& item = program_.items.front();
      if (closed_ && !(item.all_sent && item.frames_open == 0)) break;
      if (!item.all_sent || item.frames_open > 0) break;
      completions[count++] = {item.transfer.id, item.code, item.moved, item.crc};
      program_.items.pop_front();
    }
    return count;
  }

  void fail_all(Code code) {
    for (TransferProgram::Item& item : program_.items) {
      if (item.code == Code::kOk && !(item.all_sent && item.frames_open == 0)) item.code = code;
      item.all_sent = true;
      item.frames_open = 0;
    }
  }

  std::unique_ptr<Session> session_;
  TransferProgram program_;
  std::deque<Completion> done_;
  bool closed_ = false;
};

class TcpTransport final : public Transport {
 public:
  const Capabilities& capabilities() const override { return tcp_capabilities(); }
  Status availability() const override { return Status::ok(); }
  Result<RegionHandle> register_region(const Region& region) override { return regions_.add(region); }
  Status unregister_region(RegionHandle handle) override { return regions_.remove(handle); }
  Result<std::unique_ptr<Link>> connect(const PeerDescription& peer, Deadline deadline) override {
    auto session = Session::connect(peer, Route::kTcp, deadline);
    if (!session) return session.status();
    return std::unique_ptr<Link>(new TcpLink(std::move(*session)));
  }

 private:
  PlainRegions regions_;
};

}  // namespace

std::unique_ptr<Transport> make_tcp_transport() {
  return std::make_unique<TcpTransport>();
}

}  // namespace mooncache

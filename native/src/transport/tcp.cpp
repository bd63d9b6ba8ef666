// READ and WRITE frames over a session: what a node without shared memory offers. The name says TCP, a unix
// socket works as well. Transfers are sent in order, several frames in flight.
#include <algorithm>
#include <deque>

#include "transport/plain_regions.h"
#include "transport/queued_link.h"
#include "transport/shm.h"
#include "transport/transfer_program.h"

namespace mooncache {

namespace {

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
    if (item == nullptr || item->over()) {
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
      if (closed_ && !item.over()) break;
      if (!item.over()) break;
      completions[count++] = {item.transfer.id, item.code, item.moved, item.crc};
      program_.items.pop_front();
    }
    return count;
  }

  void fail_all(Code code) {
    for (TransferProgram::Item& item : program_.items) {
      if (item.code == Code::kOk && !item.over()) item.code = code;
      item.all_sent = true;
      item.parts_open = 0;
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

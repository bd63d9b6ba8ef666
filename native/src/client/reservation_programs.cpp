#include "client/reservation_programs.h"

namespace mooncache {

bool ReserveProgram::next(Request& request) {
  if (opener_ != nullptr && opener_->link() == nullptr && !opener_->unavailable()) {
    if (opener_->next(request)) return true;
    if (!opener_->unavailable()) return false;  // the answer is to come
  }
  if (sent_) return false;
  sent_ = true;
  exposed_ = opener_ != nullptr && opener_->rdma() && !opener_->unavailable();
  encode_reserve(request, wanted_, exposed_);
  return true;
}

Status ReserveProgram::on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                                   PayloadSink& sink) {
  if (LinkOpener::answers(header.opcode)) return opener_->on_response(header, status, in, sink);
  auto granted = decode_granted<wire::ReserveResult>(status, in, wanted_.items.size(), exposed_);
  if (!granted) return granted.status();
  answered_ = true;
  answer_(std::move(*granted));
  return Status::ok();
}

RangesWrite::RangesWrite(std::span<ReservedWrite> writes, uint64_t offset, bool by_link, Node& node,
                         Session& session, BufferBook& buffers, const ClientConfig& config,
                         Counters& counters, std::atomic<uint64_t>* staged_bytes)
    : writes_(writes),
      offset_(offset),
      node_(node),
      counters_(counters),
      staged_bytes_(staged_bytes),
      moves_(node, session, buffers, nullptr, config.rdma_direct_slice_bytes),
      frames_((session.node().capabilities & wire::AuthResponse::kWritesSeveral) != 0),
      open_(writes.size()) {
  for (size_t i = 0; i < writes.size(); ++i) {
    const ReservedWrite& write = writes[i];
    if (!by_link || (session.route() != Route::kUnix && !write.extent.exposed)) {
      add_frames(i);
      continue;
    }
    Move move;
    move.item = static_cast<uint32_t>(i);
    move.extent = write.extent;
    move.offset = offset;
    move.size = write.length;
    moves_.add(move, write.slices);
  }
  moves_.start(Direction::kWrite);
}

void RangesWrite::add_frames(size_t number) {
  const ReservedWrite& write = writes_[number];
  TransferProgram::Item item;
  item.transfer.id = number;
  item.transfer.direction = Direction::kWrite;
  item.transfer.remote = write.extent;
  item.transfer.offset = offset_;
  item.transfer.local = write.slices;
  item.length = write.length;
  frames_.items.push_back(item);
}

void RangesWrite::without_link() {
  for (const Move& move : moves_.all()) add_frames(move.item);
  moves_.clear();
  moves_.start(Direction::kWrite);
}

bool RangesWrite::next(Request& request) {
  LinkOpener& opener = moves_.opener();
  if (!moves_.ended() && opener.link() == nullptr) {
    if (opener.next(request)) return true;
    if (opener.unavailable()) without_link();
  }
  return frames_.next(request);
}

Status RangesWrite::on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                                PayloadSink& sink) {
  of_link_ = LinkOpener::answers(header.opcode);
  if (!of_link_) return frames_.on_response(header, status, in, sink);
  Status handled = moves_.opener().on_response(header, status, in, sink);
  if (handled && moves_.opener().unavailable()) without_link();
  return handled;
}

void RangesWrite::on_payload(std::span<const uint32_t> crcs) {
  if (of_link_) return;
  frames_.on_payload(crcs);
  for (; !frames_.items.empty() && frames_.items.front().over(); frames_.items.pop_front()) {
    const TransferProgram::Item& item = frames_.items.front();
    ReservedWrite& write = writes_[item.transfer.id];
    write.over = true;
    write.code = item.code;
    write.crc = item.crc;
    --open_;
  }
}

bool RangesWrite::work() {
  if (!moving()) return false;
  return moves_.advance([this](Move& move, const Completion& completion) { completed(move, completion); },
                        [](const Move&) {});
}

void RangesWrite::completed(Move& move, const Completion& completion) {
  move.code = moves_.outcome(completion.code);
  if (move.code == Code::kTransportUnavailable) {
    if (!moves_.rdma()) node_.one_sided_writes_failed();
    return add_frames(move.item);
  }
  if (move.code == Code::kOk) moves_.count_bytes(counters_, staged_bytes_, move);
  ReservedWrite& write = writes_[move.item];
  write.over = true;
  write.one_sided = true;
  write.code = move.code;
  write.crc = completion.crc32c;
  --open_;
}

int RangesWrite::wait_for(std::vector<int>& fds) {
  return moving() ? moves_.wait_for(fds) : -1;
}

}  // namespace mooncache

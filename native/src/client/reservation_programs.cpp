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
  encode_reserve(request, {wait_ms_, {item_}}, exposed_);
  return true;
}

Status ReserveProgram::on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                                   PayloadSink& sink) {
  if (LinkOpener::answers(header.opcode)) return opener_->on_response(header, status, in, sink);
  answered_ = true;
  const auto granted = decode_granted<wire::ReserveResult>(status, in, 1, exposed_);
  if (!granted) return granted.status();
  granted_ = granted->front();
  return Status::ok();
}

RangeWrite::RangeWrite(const Range& range, bool by_link, Node& node, Session& session, BufferBook& buffers,
                       const ClientConfig& config, Counters& counters)
    : node_(node),
      counters_(counters),
      moves_(node, session, buffers, nullptr, config.rdma_direct_slice_bytes),
      in_frames_(!by_link) {
  Move move;
  move.extent = range.extent;
  move.offset = range.offset;
  move.size = range.length;
  moves_.add(move, range.slices);
  moves_.start(Direction::kWrite);
  TransferProgram::Item item;
  item.transfer.direction = Direction::kWrite;
  item.transfer.remote = range.extent;
  item.transfer.offset = range.offset;
  item.transfer.local = range.slices;
  item.length = range.length;
  frames_.items.push_back(item);
}

bool RangeWrite::next(Request& request) {
  LinkOpener& opener = moves_.opener();
  if (!in_frames_ && opener.link() == nullptr) {
    if (opener.next(request)) return true;
    in_frames_ = opener.unavailable();
  }
  return in_frames_ && frames_.next(request);
}

bool RangeWrite::finished() const {
  return in_frames_ ? frames_.items.front().over() : moves_.ended();
}

Status RangeWrite::on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                               PayloadSink& sink) {
  if (!LinkOpener::answers(header.opcode)) return frames_.on_response(header, status, in, sink);
  return moves_.opener().on_response(header, status, in, sink);
}

void RangeWrite::on_payload(std::span<const uint32_t> crcs) {
  if (in_frames_) frames_.on_payload(crcs);
}

bool RangeWrite::work() {
  if (in_frames_ || moves_.opener().link() == nullptr || moves_.ended()) return false;
  return moves_.advance([this](Move& move, const Completion& completion) { completed(move, completion); },
                        [](const Move&) {});
}

void RangeWrite::completed(Move& move, const Completion& completion) {
  move.code = moves_.outcome(completion.code);
  move.crc = completion.crc32c;
  if (move.code == Code::kOk) moves_.count_bytes(counters_, move);
  in_frames_ = move.code == Code::kTransportUnavailable;
  if (in_frames_ && !moves_.rdma()) node_.one_sided_writes_failed();
}

int RangeWrite::wait_for(std::vector<int>& fds) {
  if (in_frames_ || moves_.opener().link() == nullptr || moves_.ended()) return -1;
  return moves_.wait_for(fds);
}

}  // namespace mooncache

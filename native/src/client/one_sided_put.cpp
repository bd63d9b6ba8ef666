// Blocks into a node through a Link: room by RESERVE, written here, seen by others after COMMIT.
#include "client/one_sided.h"

namespace mooncache {

namespace {

class OneSidedPut final : public OneSided {
 public:
  OneSidedPut(PutBatch& batch, Work& work, std::span<Code> codes, Node& node, Session& session)
      : OneSided(work, node, session, *batch.buffers, *batch.config, batch.device),
        batch_(batch),
        codes_(codes) {}

 protected:
  Direction direction() const override { return Direction::kWrite; }

  void ask(Request& request) override {
    wire::ReserveRequest reserve;
    reserve.wait_ms = batch_.wait_ms();
    uint64_t bytes = 0;
    while (end_ < work_.items.size() && end_ - begin_ < kOneSidedItems) {
      const uint32_t item = work_.items[end_];
      if (end_ > begin_ && bytes + batch_.sizes[item] > kOneSidedBytes) break;
      bytes += batch_.sizes[item];
      reserve.items.push_back({batch_.blocks[item].key, batch_.sizes[item]});
      ++end_;
    }
    request.opcode = wire::Opcode::kReserve;
    reserve.encode(request.meta);
  }

  Status answer(const wire::FrameHeader& header, const Status& status, Reader& in) override {
    if (header.opcode == wire::Opcode::kReserve) return reserved(status, in);
    if (header.opcode == wire::Opcode::kCommit) return committed(status, in);
    return Status::ok();  // ABORT: nothing to learn
  }

  void completed(const Completion& completion) override {
    --open_;
    Move& move = moves_[completion.id];
    move.code = outcome(completion.code);
    if (device_ == nullptr) move.crc = completion.crc32c;
    if (move.code == Code::kOk) count_bytes(*batch_.counters, move);
    if (!rdma_ && move.code == Code::kTransportUnavailable) node_.one_sided_writes_failed();
  }

  void refused(const Move&) override {}  // tell() gives its room back

  // Of device memory the checksums come first: what is sent afterwards is what the node will be told.
  void summed() override {
    for (const size_t i : summed_) {
      Move& move = moves_[i];
      if (move.code != Code::kOk) continue;
      move.crc = batch_.crcs[move.item] = move.sum;
      batch_.crc_known[move.item] = 1;
    }
    start_moves();
  }

  bool tell(Request& request) override {
    std::vector<wire::CommitItem> commits;
    std::vector<uint64_t> aborts;
    committing_.clear();
    for (const Move& move : moves_) {
      if (move.code == Code::kOk) {
        commits.push_back({move.extent.grant, move.crc, wire::CommitItem::kFlagOneSided});
        committing_.push_back(move.item);
        batch_.crcs[move.item] = move.crc;
        batch_.crc_known[move.item] = 1;
      } else {
        codes_[move.item] = move.code;
        if (move.extent.grant != 0) aborts.push_back(move.extent.grant);
      }
    }
    if (!aborts.empty()) {  // first these, then once more here for the commits
      for (Move& move : moves_) {
        if (move.code != Code::kOk) move.extent.grant = 0;
      }
      request.opcode = wire::Opcode::kAbort;
      wire::encode_grants(request.meta, aborts);
      return true;
    }
    if (commits.empty()) {
      work_.answered = end_;
      phase_ = Phase::kAsk;
      return OneSided::next(request);
    }
    request.opcode = wire::Opcode::kCommit;
    wire::encode_items<wire::CommitItem>(request.meta, commits);
    phase_ = Phase::kTold;
    return true;
  }

  void give_up() override { refuse_rest(work_, codes_); }

 private:
  Status reserved(const Status& status, Reader& in) {
    moves_.clear();
    slices_.clear();
    const auto places = results<wire::ReserveResult>(status, in, "RESERVE");
    if (!places) return places.status();
    for (size_t i = 0; i < places->size(); ++i) {
      const wire::ReserveResult& result = (*places)[i];
      const uint32_t item = work_.items[begin_ + i];
      const PutBlock& block = batch_.blocks[item];
      Move move{item,
                remote_extent(result.extent, exposures_[i]),
                0,
                batch_.sizes[item],
                0,
                result.code,
                slices_.size(),
                block.slices.size()};
      if (result.code != Code::kOk) move.extent.grant = 0;
      // a link only reads what it writes to the peer
      for (const ConstSlice& slice : block.slices)
        slices_.push_back({const_cast<std::byte*>(slice.data), slice.size});
      moves_.push_back(move);
    }
    if (status.is_ok() && !in.done()) return {Code::kProtocolError, "malformed RESERVE answer"};
    cut_at_refusal();
    if (device_ == nullptr) {
      start_moves();
      return Status::ok();
    }
    for (Move& move : moves_) move.crc = batch_.crcs[move.item];  // of an earlier copy
    start_sums([this](const Move& move) { return batch_.crc_known[move.item] == 0; });
    return Status::ok();
  }

  // Refused for want of space although this chunk holds some: what came before it is written and committed
  // (and may be evicted then), the rest is asked for again. The first item of a chunk is never asked twice.
  void cut_at_refusal() {
    for (size_t i = 1; i < moves_.size(); ++i) {
      const Code code = moves_[i].code;
      if ((code != Code::kNoSpace && code != Code::kLimitExceeded) || moves_[0].code != Code::kOk) continue;
      for (size_t k = i; k < moves_.size(); ++k) {
        if (moves_[k].code == Code::kOk) moves_[k].code = Code::kCancelled;  // given back by tell()
      }
      end_ = begin_ + i;
      return;
    }
  }

  Status committed(const Status& status, Reader& in) {
    if (status.is_ok() && (in.u32() != committing_.size() || in.remaining() != committing_.size() * 2)) {
      return {Code::kProtocolError, "malformed COMMIT answer"};
    }
    for (const uint32_t item : committing_)
      codes_[item] = status.is_ok() ? static_cast<Code>(in.u16()) : status.code;
    work_.answered = end_;
    phase_ = Phase::kAsk;
    return Status::ok();
  }

  PutBatch& batch_;
  std::span<Code> codes_;
  std::vector<uint32_t> committing_;
};

}  // namespace

std::unique_ptr<Program> make_one_sided_put(PutBatch& batch, Work& work, std::span<Code> codes, Node& node,
                                            Session& session) {
  return std::make_unique<OneSidedPut>(batch, work, codes, node, session);
}

}  // namespace mooncache

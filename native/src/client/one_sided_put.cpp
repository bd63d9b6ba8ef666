// Blocks into a node through a Link: room by RESERVE, written here, seen by others after COMMIT.
#include "client/one_sided.h"

namespace mooncache {

namespace {

class OneSidedPut {
 public:
  OneSidedPut(PutBatch& batch, std::span<Code> codes) : batch_(batch), codes_(codes) {}

  void ask(Chunk& chunk, Request& request) {
    const Work& work = chunk.work;
    wire::ReserveRequest reserve;
    reserve.wait_ms = batch_.wait_ms();
    uint64_t bytes = 0;
    while (chunk.end < work.items.size() && chunk.end - chunk.begin < kOneSidedItems) {
      const uint32_t item = work.items[chunk.end];
      if (chunk.end > chunk.begin && bytes + batch_.sizes[item] > kOneSidedBytes) break;
      bytes += batch_.sizes[item];
      reserve.items.push_back({batch_.blocks[item].key, batch_.sizes[item]});
      ++chunk.end;
    }
    request.opcode = wire::Opcode::kReserve;
    reserve.encode(request.meta);
  }

  Status answer(Chunk& chunk, const wire::FrameHeader& header, const Status& status, Reader& in,
                Phase& next) {
    if (header.opcode == wire::Opcode::kReserve) return reserved(chunk, status, in, next);
    if (header.opcode == wire::Opcode::kCommit) return committed(chunk, status, in, next);
    return Status::ok();  // ABORT: nothing to learn
  }

  void completed(Chunk& chunk, Move& move, const Completion& completion) {
    move.code = chunk.moves.outcome(completion.code);
    if (chunk.moves.device() == nullptr) move.crc = completion.crc32c;
    if (move.code == Code::kOk) chunk.moves.count_bytes(*batch_.counters, move);
    if (!chunk.moves.rdma() && move.code == Code::kTransportUnavailable) chunk.node.one_sided_writes_failed();
  }

  void refused(Chunk&, const Move&) {}  // tell() gives its room back

  Phase moved(Chunk&) { return Phase::kTell; }

  // Of device memory the checksums come first: what is sent afterwards is what the node will hear.
  Phase summed(Chunk& chunk) {
    for (const size_t i : chunk.moves.summed()) {
      Move& move = chunk.moves.all()[i];
      if (move.code == Code::kOk) remember(move.item, move.crc = move.sum);
    }
    return start(chunk);
  }

  Phase tell(Chunk& chunk, Request& request, bool& sends) {
    std::vector<wire::CommitItem> commits;
    std::vector<uint64_t> aborts;
    committing_.clear();
    for (Move& move : chunk.moves.all()) {
      if (move.code == Code::kOk) {
        commits.push_back({move.extent.grant, move.crc, wire::CommitItem::kFlagOneSided});
        committing_.push_back(move.item);
        remember(move.item, move.crc);
      } else {
        codes_[move.item] = move.code;
        if (const uint64_t grant = std::exchange(move.extent.grant, 0); grant != 0) aborts.push_back(grant);
      }
    }
    sends = true;
    if (!aborts.empty()) {  // first these, then once more here for the commits
      request.opcode = wire::Opcode::kAbort;
      wire::encode_grants(request.meta, aborts);
      return Phase::kTell;
    }
    if (!commits.empty()) {
      request.opcode = wire::Opcode::kCommit;
      wire::encode_items<wire::CommitItem>(request.meta, commits);
      return Phase::kTold;
    }
    sends = false;
    chunk.work.answered = chunk.end;
    return Phase::kAsk;
  }

  void give_up(Chunk& chunk) { refuse_rest(chunk.work, codes_); }

 private:
  void remember(uint32_t item, uint32_t crc) {
    batch_.crcs[item] = crc;
    batch_.crc_known[item] = 1;
  }

  Phase start(Chunk& chunk) {
    chunk.moves.start(Direction::kWrite);
    return Phase::kMove;
  }

  Status reserved(Chunk& chunk, const Status& status, Reader& in, Phase& next) {
    chunk.moves.clear();
    const auto places = chunk.results<wire::ReserveResult>(status, in, "RESERVE");
    if (!places) return places.status();
    std::vector<Slice> slices;
    for (size_t i = 0; i < places->size(); ++i) {
      const wire::ReserveResult& result = (*places)[i];
      Move move;
      move.item = chunk.work.items[chunk.begin + i];
      move.extent = remote_extent(result.extent, chunk.exposures[i]);
      move.size = batch_.sizes[move.item];
      move.code = result.code;
      if (result.code != Code::kOk) move.extent.grant = 0;
      slices.clear();
      for (const ConstSlice& slice : batch_.blocks[move.item].slices)
        slices.push_back({const_cast<std::byte*>(slice.data), slice.size});
      chunk.moves.add(move, slices);
    }
    cut_at_refusal(chunk);
    if (chunk.moves.device() == nullptr) {
      next = start(chunk);
      return Status::ok();
    }
    for (Move& move : chunk.moves.all()) move.crc = batch_.crcs[move.item];  // of an earlier copy
    const bool some =
        chunk.moves.start_sums([this](const Move& move) { return batch_.crc_known[move.item] == 0; });
    next = some ? Phase::kSum : start(chunk);
    return Status::ok();
  }

  // Refused for want of space although this chunk holds some: what came before it is written and committed
  // (and may be evicted then), the rest is asked for again. The first item of a chunk is never asked twice.
  static void cut_at_refusal(Chunk& chunk) {
    std::vector<Move>& moves = chunk.moves.all();
    for (size_t i = 1; i < moves.size(); ++i) {
      const Code code = moves[i].code;
      if ((code != Code::kNoSpace && code != Code::kLimitExceeded) || moves[0].code != Code::kOk) continue;
      for (size_t k = i; k < moves.size(); ++k) {
        if (moves[k].code == Code::kOk) moves[k].code = Code::kCancelled;  // given back by tell()
      }
      chunk.end = chunk.begin + i;
      return;
    }
  }

  Status committed(Chunk& chunk, const Status& status, Reader& in, Phase& next) {
    if (status.is_ok() && (in.u32() != committing_.size() || in.remaining() != committing_.size() * 2)) {
      return {Code::kProtocolError, "malformed COMMIT answer"};
    }
    for (const uint32_t item : committing_)
      codes_[item] = status.is_ok() ? static_cast<Code>(in.u16()) : status.code;
    chunk.work.answered = chunk.end;
    next = Phase::kAsk;
    return Status::ok();
  }

  PutBatch& batch_;
  std::span<Code> codes_;
  std::vector<uint32_t> committing_;
};

}  // namespace

std::unique_ptr<Program> make_one_sided_put(PutBatch& batch, Work& work, std::span<Code> codes, Node& node,
                                            Session& session) {
  return std::make_unique<OneSided<OneSidedPut>>(OneSidedPut(batch, codes), batch, work, node, session);
}

}  // namespace mooncache

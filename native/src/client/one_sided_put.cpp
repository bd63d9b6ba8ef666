// Blocks into a node through a Link: room by RESERVE, written here, seen by others after COMMIT.
#include "client/one_sided.h"

namespace mooncache {

namespace {

class PutSteps {
 public:
  PutSteps(PutBatch& batch, std::span<Code> codes) : batch_(batch), codes_(codes) {}

  void request(ItemChunk& chunk, Request& request) {
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
    encode_reserve(request, reserve, chunk.moves.rdma());
  }

  Status answer(ItemChunk& chunk, const wire::FrameHeader& header, const Status& status, Reader& in,
                Phase& next) {
    if (header.opcode == wire::Opcode::kReserve) return reserved(chunk, status, in, next);
    if (header.opcode == wire::Opcode::kCommit) return committed(chunk, status, in, next);
    return Status::ok();  // ABORT: nothing to learn
  }

  void completed(ItemChunk& chunk, Move& move, const Completion& completion) {
    move.code = chunk.moves.outcome(completion.code);
    if (chunk.moves.device() == nullptr) move.crc = completion.crc32c;
    if (move.code == Code::kOk) chunk.moves.count_bytes(*batch_.counters, batch_.staged_bytes, move);
    if (!chunk.moves.rdma() && move.code == Code::kTransportUnavailable) chunk.node.one_sided_writes_failed();
  }

  void refused(ItemChunk&, const Move&) {}  // finish() gives its room back

  Phase moved(ItemChunk&) { return Phase::kFinish; }

  // Of device memory the checksums come first: what is sent afterwards is what the node will hear.
  Phase checksummed(ItemChunk& chunk) {
    for (const size_t i : chunk.moves.summed()) {
      Move& move = chunk.moves.all()[i];
      if (move.code == Code::kOk) remember(move.item, move.crc = move.sum);
    }
    return start(chunk);
  }

  Phase finish(ItemChunk& chunk, Request& request, bool& sends) {
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
      encode_abort(request, aborts);
      return Phase::kFinish;
    }
    if (!commits.empty()) {
      encode_commit(request, commits);
      return Phase::kFinishing;
    }
    sends = false;
    chunk.work.answered = chunk.end;
    return Phase::kRequest;
  }

  void refuse_rest(ItemChunk& chunk) { mooncache::refuse_rest(chunk.work, codes_); }

 private:
  void remember(uint32_t item, uint32_t crc) {
    batch_.crcs[item] = crc;
    batch_.crc_known[item] = 1;
  }

  Phase start(ItemChunk& chunk) {
    chunk.moves.start(Direction::kWrite);
    return Phase::kMove;
  }

  Status reserved(ItemChunk& chunk, const Status& status, Reader& in, Phase& next) {
    chunk.moves.clear();
    const auto places =
        decode_granted<wire::ReserveResult>(status, in, chunk.end - chunk.begin, chunk.moves.rdma());
    if (!places) return places.status();
    std::vector<Slice> slices;
    for (size_t i = 0; i < places->size(); ++i) {
      const auto& place = (*places)[i];
      Move move;
      move.item = chunk.work.items[chunk.begin + i];
      move.extent = place.extent;
      move.size = batch_.sizes[move.item];
      move.code = place.result.code;
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
    next = some ? Phase::kChecksum : start(chunk);
    return Status::ok();
  }

  // Refused for want of space although this chunk holds some: what came before it is written and committed
  // (and may be evicted then), the rest is asked for again. The first item of a chunk is never asked twice.
  static void cut_at_refusal(ItemChunk& chunk) {
    std::vector<Move>& moves = chunk.moves.all();
    for (size_t i = 1; i < moves.size(); ++i) {
      const Code code = moves[i].code;
      if ((code != Code::kNoSpace && code != Code::kLimitExceeded) || moves[0].code != Code::kOk) continue;
      for (size_t k = i; k < moves.size(); ++k) {
        if (moves[k].code == Code::kOk) moves[k].code = Code::kCancelled;  // given back by finish()
      }
      chunk.end = chunk.begin + i;
      return;
    }
  }

  Status committed(ItemChunk& chunk, const Status& status, Reader& in, Phase& next) {
    const auto codes = decode_outcomes(status, in, committing_.size());
    if (!codes) return codes.status();
    for (size_t i = 0; i < committing_.size(); ++i) codes_[committing_[i]] = (*codes)[i];
    chunk.work.answered = chunk.end;
    next = Phase::kRequest;
    return Status::ok();
  }

  PutBatch& batch_;
  std::span<Code> codes_;
  std::vector<uint32_t> committing_;
};

}  // namespace

std::unique_ptr<Program> make_one_sided_put(PutBatch& batch, Work& work, std::span<Code> codes, Node& node,
                                            Session& session) {
  return std::make_unique<OneSided<PutSteps>>(PutSteps(batch, codes), batch, work, node, session);
}

}  // namespace mooncache

// Blocks out of a node through a Link: pinned by LOOKUP, read and checked here, given back by RELEASE.
#include "client/one_sided.h"

namespace mooncache {

namespace {

class GetSteps {
 public:
  explicit GetSteps(const GetBatch& batch) : batch_(batch) {}

  void request(ItemChunk& chunk, Request& request) {
    const Work& work = chunk.work;
    uint64_t bytes = 0;
    while (chunk.end < work.items.size() && chunk.end - chunk.begin < kOneSidedItems) {
      // as many as one launch takes the checksums of
      if (chunk.moves.device() != nullptr) bytes += batch_.capacity(work.items[chunk.end]);
      if (chunk.end > chunk.begin && bytes > kOneSidedBytes) break;
      ++chunk.end;
    }
    std::vector<Key> keys;
    for (size_t i = chunk.begin; i < chunk.end; ++i) keys.push_back(batch_.blocks[work.items[i]].key);
    encode_lookup(request, keys, chunk.moves.rdma());
  }

  Status answer(ItemChunk& chunk, const wire::FrameHeader&, const Status& status, Reader& in, Phase& next) {
    chunk.moves.clear();
    grants_.clear();
    const auto found =
        decode_granted<wire::LookupResult>(status, in, chunk.end - chunk.begin, chunk.moves.rdma());
    if (!found) return found.status();
    for (size_t i = 0; i < found->size(); ++i)
      plan(chunk, chunk.work.items[chunk.begin + i], (*found)[i].result, (*found)[i].extent);
    chunk.moves.start(Direction::kRead);
    next = Phase::kMove;
    return Status::ok();
  }

  void completed(ItemChunk& chunk, Move& move, const Completion& completion) {
    Code code = chunk.moves.outcome(completion.code);
    if (chunk.moves.device() != nullptr) {
      if (code != Code::kOk) batch_.set_outcome(move.item, code, move.size, chunk.node);
      move.code = code;  // the others are checked when all have landed
      return;
    }
    if (code == Code::kOk && whole(move) && completion.crc32c != move.crc) code = Code::kChecksumMismatch;
    if (code == Code::kOk && !whole(move)) code = verify_block(chunk, move);
    report(chunk, move, code);
  }

  void refused(ItemChunk& chunk, const Move& move) {
    batch_.set_outcome(move.item, move.code, 0, chunk.node);
  }

  Phase moved(ItemChunk& chunk) {
    if (chunk.moves.device() == nullptr) return Phase::kFinish;
    // Without this a device may still have landed bytes on their way to where its kernels look.
    const bool seen = chunk.moves.device()->gpu().flush_writes().is_ok();
    for (Move& move : chunk.moves.all()) {
      if (seen || move.code != Code::kOk) continue;
      move.code = Code::kTransportUnavailable;
      refused(chunk, move);
    }
    return chunk.moves.start_sums([](const Move&) { return true; }) ? Phase::kChecksum : Phase::kFinish;
  }

  Phase checksummed(ItemChunk& chunk) {
    for (const size_t i : chunk.moves.summed()) {
      const Move& move = chunk.moves.all()[i];
      const bool differs = move.code == Code::kOk && move.sum != move.crc;
      report(chunk, move, differs ? Code::kChecksumMismatch : move.code);
    }
    return Phase::kFinish;
  }

  Phase finish(ItemChunk& chunk, Request& request, bool& sends) {
    chunk.work.answered = chunk.end;
    sends = !grants_.empty();
    if (sends) {
      request.opcode = wire::Opcode::kRelease;
      request.flags = wire::kFlagNoReply;
      wire::encode_grants(request.meta, grants_);
    }
    return Phase::kRequest;
  }

  void refuse_rest(ItemChunk& chunk) { mooncache::refuse_rest(batch_, chunk.work, chunk.node); }

 private:
  static bool whole(const Move& move) { return move.offset == 0 && move.size == move.extent.size; }

  void report(ItemChunk& chunk, const Move& move, Code code) {
    batch_.set_outcome(move.item, code, move.size, chunk.node);
    if (code == Code::kOk) chunk.moves.count_bytes(*batch_.counters, batch_.staged_bytes, move);
  }

  // A range has no CRC of its own here: the whole block is checked where it lies, like the node would.
  static Code verify_block(ItemChunk& chunk, const Move& move) {
    const auto segments = chunk.node.segments(chunk.session.node().incarnation);
    return segments ? segments->verify(move.extent, move.crc) : Code::kInvalidArgument;
  }

  // How much of a block is wanted; `size` is that of the block where the buffer is too small.
  Code range_of(const GetBlock& block, uint64_t block_size, uint64_t capacity, uint64_t& size) const {
    if (block.offset > block_size) return Code::kInvalidArgument;
    size = std::min(capacity, block_size - block.offset);
    if (!batch_.how->whole || size == block_size - block.offset) return Code::kOk;
    size = block_size;
    return Code::kBufferTooSmall;
  }

  void plan(ItemChunk& chunk, uint32_t item, const wire::LookupResult& found, const RemoteExtent& extent) {
    if (found.code == Code::kOk) grants_.push_back(found.extent.grant);
    const GetBlock& block = batch_.blocks[item];
    Code code = found.code;
    uint64_t size = 0;
    if (code == Code::kOk) code = range_of(block, found.extent.size, batch_.capacity(item), size);
    if (chunk.moves.rdma() && code == Code::kOk && (!extent.exposed || size != found.extent.size)) {
      code = Code::kTransportUnavailable;  // only a whole block can be verified here
      size = 0;
    }
    PayloadSink parts;
    if (code == Code::kOk && batch_.how->allocate) {
      const Slice slice{batch_.how->allocate(item, size), static_cast<size_t>(size)};
      if (slice.data == nullptr)
        code = Code::kLimitExceeded;
      else
        parts.add_item(std::span(&slice, 1), 0, size);
    } else if (code == Code::kOk) {
      parts.add_item(block.slices, 0, size);
    }
    if (code != Code::kOk)
      batch_.set_outcome(item, code, code == Code::kBufferTooSmall ? size : 0, chunk.node);
    Move move;
    move.item = item;
    move.extent = extent;
    move.offset = block.offset;
    move.size = size;
    move.crc = found.crc32c;
    move.code = code;
    chunk.moves.add(move, parts.slices);
  }

  const GetBatch& batch_;
  std::vector<uint64_t> grants_;
};

}  // namespace

std::unique_ptr<Program> make_one_sided_get(const GetBatch& batch, Work& work, Node& node, Session& session) {
  return std::make_unique<OneSided<GetSteps>>(GetSteps(batch), batch, work, node, session);
}

}  // namespace mooncache

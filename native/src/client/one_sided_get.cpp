// Blocks out of a node through a Link: pinned by LOOKUP, read and checked here, given back by RELEASE.
#include "client/one_sided.h"

namespace mooncache {

namespace {

class OneSidedGet final : public OneSided {
 public:
  OneSidedGet(const GetBatch& batch, Work& work, Node& node, Session& session)
      : OneSided(work, node, session, *batch.buffers, *batch.config, batch.device), batch_(batch) {}

 protected:
  Direction direction() const override { return Direction::kRead; }

  void ask(Request& request) override {
    uint64_t bytes = 0;
    while (end_ < work_.items.size() && end_ - begin_ < kOneSidedItems) {
      // as many as one launch takes the checksums of
      if (device_ != nullptr) bytes += batch_.capacity(work_.items[end_]);
      if (end_ > begin_ && bytes > kOneSidedBytes) break;
      ++end_;
    }
    request.opcode = wire::Opcode::kLookup;
    request.meta.u32(static_cast<uint32_t>(end_ - begin_));
    for (size_t i = begin_; i < end_; ++i) request.meta.key(batch_.blocks[work_.items[i]].key);
  }

  Status answer(const wire::FrameHeader&, const Status& status, Reader& in) override {
    moves_.clear();
    slices_.clear();
    grants_.clear();
    const auto found = results<wire::LookupResult>(status, in, "LOOKUP");
    if (!found) return found.status();
    for (size_t i = 0; i < found->size(); ++i) plan(work_.items[begin_ + i], (*found)[i], exposures_[i]);
    if (status.is_ok() && !in.done()) return {Code::kProtocolError, "malformed LOOKUP answer"};
    start_moves();
    return Status::ok();
  }

  void completed(const Completion& completion) override {
    --open_;
    Move& move = moves_[completion.id];
    Code code = outcome(completion.code);
    if (device_ != nullptr) {
      if (code != Code::kOk) batch_.settle(move.item, code, move.size, node_);
      move.code = code;  // the others are checked when all have landed
      return;
    }
    if (code == Code::kOk && whole(move) && completion.crc32c != move.crc) code = Code::kChecksumMismatch;
    if (code == Code::kOk && !whole(move)) code = verify_block(move);
    batch_.settle(move.item, code, move.size, node_);
    if (code == Code::kOk) count_bytes(*batch_.counters, move);
  }

  void refused(const Move& move) override { batch_.settle(move.item, move.code, 0, node_); }

  void moved_all() override {
    if (device_ == nullptr) return OneSided::moved_all();
    // Without this a device may still have landed bytes on their way to where its kernels look.
    const bool seen = device_->gpu().flush_writes().is_ok();
    for (Move& move : moves_) {
      if (seen || move.code != Code::kOk) continue;
      move.code = Code::kTransportUnavailable;
      refused(move);
    }
    start_sums([](const Move&) { return true; });
  }

  void summed() override {
    for (const size_t i : summed_) {
      Move& move = moves_[i];
      if (move.code == Code::kOk && move.sum != move.crc) move.code = Code::kChecksumMismatch;
      batch_.settle(move.item, move.code, move.size, node_);
      if (move.code == Code::kOk) count_bytes(*batch_.counters, move);
    }
    OneSided::moved_all();
  }

  bool tell(Request& request) override {
    work_.answered = end_;
    phase_ = Phase::kAsk;
    if (grants_.empty()) return OneSided::next(request);
    request.opcode = wire::Opcode::kRelease;
    request.flags = wire::kFlagNoReply;
    wire::encode_grants(request.meta, grants_);
    return true;
  }

  void give_up() override { refuse_rest(batch_, work_, node_); }

 private:
  bool whole(const Move& move) const { return move.offset == 0 && move.size == move.extent.size; }

  // A range has no CRC of its own here: the whole block is checked where it lies, like the node would.
  Code verify_block(const Move& move) const {
    const auto segments = node_.segments(session_.node().incarnation);
    return segments ? segments->verify(move.extent, move.crc) : Code::kInvalidArgument;
  }

  void plan(uint32_t item, const wire::LookupResult& found, const wire::Exposure& exposure) {
    if (found.code == Code::kOk) grants_.push_back(found.extent.grant);
    const GetBlock& block = batch_.blocks[item];
    Code code = found.code;
    uint64_t size = 0;
    const uint64_t capacity = batch_.capacity(item);
    if (code == Code::kOk) {
      const uint64_t block_size = found.extent.size;
      if (block.offset > block_size)
        code = Code::kInvalidArgument;
      else
        size = std::min(capacity, block_size - block.offset);
      if (code == Code::kOk && batch_.how->whole && size < block_size - block.offset) {
        code = Code::kBufferTooSmall;
        size = block_size;
      }
    }
    if (rdma_ && code == Code::kOk && (exposure.code != Code::kOk || size != found.extent.size)) {
      code = Code::kTransportUnavailable;  // only a whole block can be verified here
      size = 0;
    }
    Move move{
        item, remote_extent(found.extent, exposure), block.offset, size, found.crc32c, code, slices_.size(),
        0};
    if (code == Code::kOk) {
      PayloadSink parts;
      if (batch_.how->allocate) {
        const Slice slice{batch_.how->allocate(item, size), static_cast<size_t>(size)};
        if (slice.data == nullptr)
          code = Code::kLimitExceeded;
        else
          parts.add_item(std::span(&slice, 1), 0, size);
      } else {
        parts.add_item(block.slices, 0, size);
      }
      slices_.insert(slices_.end(), parts.slices.begin(), parts.slices.end());
      move.slice_count = parts.slices.size();
      move.code = code;
    }
    if (code != Code::kOk) batch_.settle(item, code, code == Code::kBufferTooSmall ? size : 0, node_);
    moves_.push_back(move);
  }

  const GetBatch& batch_;
  std::vector<uint64_t> grants_;
};

}  // namespace

std::unique_ptr<Program> make_one_sided_get(const GetBatch& batch, Work& work, Node& node, Session& session) {
  return std::make_unique<OneSidedGet>(batch, work, node, session);
}

}  // namespace mooncache

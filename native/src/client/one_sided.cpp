// Blocks through a Link: ask the node where (LOOKUP or RESERVE), move the bytes by the link, tell the node
// (RELEASE or COMMIT). The link is shared memory on a unix socket and RDMA on TCP; any one-sided link would
// do.
#include <algorithm>
#include <deque>

#include "client/batch.h"
#include "mooncache/crc32c.h"

namespace mooncache {

namespace {

constexpr size_t kChunkItems = 256;
constexpr uint64_t kChunkBytes = 256 << 20;
constexpr auto kWorkSpan = std::chrono::milliseconds(2);  // copying between two looks at the cancel token

RemoteExtent remote(const wire::WireExtent& from, const wire::Exposure& exposure) {
  RemoteExtent extent;
  extent.grant = from.grant;
  extent.segment = from.segment;
  extent.slot = from.slot;
  extent.generation = from.generation;
  extent.offset = from.offset;
  extent.size = from.size;
  extent.exposed = exposure.code == Code::kOk;
  extent.address = exposure.address;
  extent.keys = exposure.keys;
  return extent;
}

// The parts that both directions share: attaching, one chunk of items at a time, the link.
class OneSided : public Program {
 public:
  OneSided(Work& work, Node& node, Session& session)
      : work_(work),
        node_(node),
        session_(session),
        rdma_(session.route() == Route::kTcp),
        begin_(work.answered),
        end_(work.answered) {
    if (rdma_) {
      Link* kept = session.rdma_link().get();
      if (kept != nullptr && kept->healthy()) link_ = kept;
    } else if (auto segments = node.segments(session.node().incarnation)) {
      use_memory(std::move(segments));
    }
  }

  // A program that ends early leaves no transfer behind: the link, which lives on with its session, would
  // complete it into slices that are gone.
  ~OneSided() override {
    if (rdma_ && link_ != nullptr && open_ > 0) link_->close();
  }

  bool next(Request& request) override {
    if (link_ == nullptr && !unavailable_) return rdma_ ? open_rdma(request) : open_memory(request);
    if (unavailable_) return false;
    switch (phase_) {
      case Phase::kAsk:
        if (work_.answered == work_.items.size()) return false;
        phase_ = Phase::kAsked;
        begin_ = end_ = work_.answered;
        ask(request);
        if (rdma_) request.flags |= wire::kFlagExpose;
        return true;
      case Phase::kTell:
        return tell(request);
      default:
        return false;
    }
  }

  bool finished() const override {
    return unavailable_ || (work_.answered == work_.items.size() && phase_ == Phase::kAsk);
  }

  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override {
    if (header.opcode == wire::Opcode::kAttach) {
      if (Status handled = attach_->on_response(header, status, in, sink); !handled) return handled;
      if (attach_->segments()) {
        node_.set_segments(*attach_->segments(), session_.node().incarnation);
        use_memory(*attach_->segments());
      } else {
        no_link();
      }
      return Status::ok();
    }
    if (header.opcode == wire::Opcode::kEndpoint) {
      if (Status handled = endpoint_->on_response(header, status, in, sink); !handled) return handled;
      if (endpoint_->status())
        link_ = session_.rdma_link().get();
      else
        no_link();
      return Status::ok();
    }
    return answer(header, status, in);
  }

  bool work() override {
    if (phase_ != Phase::kMove) return false;
    // A device moves bytes on its own: look what has landed, and do not wait for more here.
    const Deadline until = rdma_ ? Deadline::after_ms(0) : Deadline::after(kWorkSpan);
    const uint64_t landed_before = link_->bytes_moved();
    std::array<Completion, 64> completions;
    for (;;) {
      submit();
      const size_t count = link_->poll(completions, until);
      for (size_t i = 0; i < count; ++i) completed(completions[i]);
      if (open_ == 0 && next_move_ == moves_.size()) {
        phase_ = Phase::kTell;
        return true;
      }
      if (rdma_ && count == 0) return link_->bytes_moved() != landed_before;
      if (until.expired()) return true;
    }
  }

  int wait_for(std::vector<int>& fds) override {
    if (phase_ != Phase::kMove || !rdma_) return -1;
    if (session_.idle() && session_.stale()) link_->close();  // the node is gone: nothing will be answered
    return link_->wait_for(fds);
  }

 protected:
  enum class Phase : uint8_t { kAsk, kAsked, kMove, kTell, kTold };
  struct Move {
    uint32_t item = 0;
    RemoteExtent extent;
    uint64_t offset = 0;
    uint64_t size = 0;
    uint32_t crc = 0;  // expected (get), computed (put)
    Code code = Code::kOk;
    size_t first_slice = 0;
    size_t slice_count = 0;
  };

  virtual void ask(Request& request) = 0;
  virtual bool tell(Request& request) = 0;
  virtual Status answer(const wire::FrameHeader& header, const Status& status, Reader& in) = 0;
  virtual void completed(const Completion& completion) = 0;
  virtual Direction direction() const = 0;
  // This connection cannot move bytes by itself: the items from `first` on need another way.
  virtual void give_up(size_t first) = 0;

  void no_link() {
    unavailable_ = true;
    if (rdma_) {
      session_.rdma_link().reset();
      node_.rdma_failed(steady_ms());
    }
    give_up(work_.answered);
  }

  void use_memory(std::shared_ptr<ShmSegments> segments) {
    memory_ = std::make_unique<ShmLink>(std::move(segments), &session_);
    link_ = memory_.get();
  }

  bool open_memory(Request& request) {
    if (!attach_) attach_ = std::make_unique<AttachProgram>(session_);
    return attach_->next(request);
  }

  bool open_rdma(Request& request) {
    if (!endpoint_) {
      RdmaTransport* transport = node_.rdma_for(session_, steady_ms());
      auto made = transport != nullptr ? transport->make_link(session_)
                                       : Result<std::unique_ptr<RdmaLink>>(Code::kTransportUnavailable,
                                                                           "RDMA was switched off");
      if (!made) return no_link(), false;
      endpoint_ = std::make_unique<EndpointProgram>(**made);
      session_.rdma_link() = std::move(*made);
    }
    if (endpoint_->next(request)) return true;
    if (endpoint_->finished()) no_link();  // no queue pair could be made here
    return false;
  }

  // Behind the results of LOOKUP and RESERVE; as many as results.
  bool take_exposures(Reader& in, size_t count) {
    exposures_.clear();
    if (!rdma_) {
      exposures_.resize(count);
      return true;
    }
    auto exposures = wire::decode_items<wire::Exposure>(in);
    if (!exposures || exposures->size() != count) return false;
    exposures_ = std::move(*exposures);
    return true;
  }

  // What a transfer's end means to the call.
  Code outcome(Code code) {
    if (rdma_ && code == Code::kTransportUnavailable) node_.rdma_failed(steady_ms());
    return rdma_ && code == Code::kClosed ? Code::kConnectionLost : code;
  }
  Counter moved_bytes() const { return rdma_ ? Counter::kRdmaBytes : Counter::kShmBytes; }

  void submit() {
    while (next_move_ < moves_.size()) {
      Move& move = moves_[next_move_];
      if (move.code != Code::kOk) {
        ++next_move_;
        continue;
      }
      Transfer transfer;
      transfer.id = next_move_;
      transfer.direction = direction();
      transfer.remote = move.extent;
      transfer.offset = move.offset;
      transfer.local = std::span(slices_).subspan(move.first_slice, move.slice_count);
      if (link_->submit(std::span(&transfer, 1)) == 0) return;
      ++next_move_;
      ++open_;
    }
  }

  void start_moves() {
    next_move_ = 0;
    open_ = 0;
    phase_ = Phase::kMove;
  }

  Work& work_;
  Node& node_;
  Session& session_;
  const bool rdma_;
  Link* link_ = nullptr;
  std::unique_ptr<ShmLink> memory_;
  std::unique_ptr<AttachProgram> attach_;
  std::unique_ptr<EndpointProgram> endpoint_;
  std::vector<wire::Exposure> exposures_;  // of the chunk
  Phase phase_ = Phase::kAsk;
  bool unavailable_ = false;
  size_t begin_;  // the chunk: items [begin_, end_) of the work
  size_t end_;
  std::vector<Move> moves_;
  std::vector<Slice> slices_;
  size_t next_move_ = 0;
  size_t open_ = 0;
};

class OneSidedGet final : public OneSided {
 public:
  OneSidedGet(const GetBatch& batch, Work& work, Node& node, Session& session)
      : OneSided(work, node, session), batch_(batch) {}

 protected:
  Direction direction() const override { return Direction::kRead; }

  void ask(Request& request) override {
    end_ = std::min(work_.items.size(), begin_ + kChunkItems);
    request.opcode = wire::Opcode::kLookup;
    request.meta.u32(static_cast<uint32_t>(end_ - begin_));
    for (size_t i = begin_; i < end_; ++i) request.meta.key(batch_.blocks[work_.items[i]].key);
  }

  Status answer(const wire::FrameHeader&, const Status& status, Reader& in) override {
    moves_.clear();
    slices_.clear();
    grants_.clear();
    const size_t count = end_ - begin_;
    if (status.is_ok() && in.u32() != count)
      return {Code::kProtocolError, "LOOKUP answered another number of items"};
    std::vector<wire::LookupResult> found(count);
    for (wire::LookupResult& one : found) {
      if (status.is_ok())
        one = wire::LookupResult::decode(in);
      else
        one.code = status.code;
    }
    if (status.is_ok() && !take_exposures(in, count))
      return {Code::kProtocolError, "malformed LOOKUP answer"};
    if (!status.is_ok()) exposures_.assign(count, {});
    for (size_t i = 0; i < count; ++i) plan(work_.items[begin_ + i], found[i], exposures_[i]);
    if (status.is_ok() && !in.done()) return {Code::kProtocolError, "malformed LOOKUP answer"};
    start_moves();
    return Status::ok();
  }

  void completed(const Completion& completion) override {
    --open_;
    Move& move = moves_[completion.id];
    Code code = outcome(completion.code);
    if (code == Code::kOk && whole(move) && completion.crc32c != move.crc) code = Code::kChecksumMismatch;
    if (code == Code::kOk && !whole(move)) code = verify_block(move);
    batch_.settle(move.item, code, move.size, node_);
    if (code == Code::kOk) batch_.counters->add(moved_bytes(), move.size);
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

  void give_up(size_t first) override {
    for (size_t i = first; i < work_.items.size(); ++i) {
      batch_.outcomes[work_.items[i]] = {Code::kTransportUnavailable, 0, node_.info().index};
    }
    work_.answered = work_.items.size();
  }

 private:
  bool whole(const Move& move) const { return move.offset == 0 && move.size == move.extent.size; }

  // A range has no CRC of its own here: the whole block is checked where it lies, like the node would.
  Code verify_block(const Move& move) const {
    const auto segments = node_.segments(session_.node().incarnation);
    const std::byte* memory =
        segments ? segments->readable(move.extent.segment, move.extent.offset, move.extent.size) : nullptr;
    if (memory == nullptr) return Code::kInvalidArgument;
    const uint32_t crc = crc32c({memory, static_cast<size_t>(move.extent.size)});
    if (segments->generation(move.extent.slot) != move.extent.generation) return Code::kGenerationChanged;
    return crc == move.crc ? Code::kOk : Code::kChecksumMismatch;
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
    Move move{item, remote(found.extent, exposure), block.offset, size, found.crc32c, code, slices_.size(),
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

class OneSidedPut final : public OneSided {
 public:
  OneSidedPut(PutBatch& batch, Work& work, std::span<Code> codes, Node& node, Session& session)
      : OneSided(work, node, session), batch_(batch), codes_(codes) {}

 protected:
  Direction direction() const override { return Direction::kWrite; }

  void ask(Request& request) override {
    wire::ReserveRequest reserve;
    reserve.wait_ms = batch_.wait_ms();
    uint64_t bytes = 0;
    while (end_ < work_.items.size() && end_ - begin_ < kChunkItems) {
      const uint32_t item = work_.items[end_];
      if (end_ > begin_ && bytes + batch_.sizes[item] > kChunkBytes) break;
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
    move.crc = completion.crc32c;
    if (move.code == Code::kOk) batch_.counters->add(moved_bytes(), move.size);
    if (!rdma_ && move.code == Code::kTransportUnavailable) node_.one_sided_writes_failed();
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

  void give_up(size_t first) override {
    for (size_t i = first; i < work_.items.size(); ++i) codes_[work_.items[i]] = Code::kTransportUnavailable;
    work_.answered = work_.items.size();
  }

 private:
  Status reserved(const Status& status, Reader& in) {
    moves_.clear();
    slices_.clear();
    const size_t count = end_ - begin_;
    if (status.is_ok() && in.u32() != count)
      return {Code::kProtocolError, "RESERVE answered another number of items"};
    std::vector<wire::ReserveResult> results(count);
    for (wire::ReserveResult& result : results) {
      if (status.is_ok())
        result = wire::ReserveResult::decode(in);
      else
        result.code = status.code;
    }
    if (status.is_ok() && !take_exposures(in, count))
      return {Code::kProtocolError, "malformed RESERVE answer"};
    if (!status.is_ok()) exposures_.assign(count, {});
    for (size_t i = 0; i < count; ++i) {
      const wire::ReserveResult& result = results[i];
      const uint32_t item = work_.items[begin_ + i];
      const PutBlock& block = batch_.blocks[item];
      Move move{item,
                remote(result.extent, exposures_[i]),
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
    start_moves();
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

std::unique_ptr<Program> make_one_sided_get(const GetBatch& batch, Work& work, Node& node, Session& session) {
  return std::make_unique<OneSidedGet>(batch, work, node, session);
}

std::unique_ptr<Program> make_one_sided_put(PutBatch& batch, Work& work, std::span<Code> codes, Node& node,
                                            Session& session) {
  return std::make_unique<OneSidedPut>(batch, work, codes, node, session);
}

}  // namespace mooncache

// What reading and writing blocks through a Link share: ask the node where (LOOKUP or RESERVE), move the
// bytes by the link, tell the node (RELEASE or COMMIT). The link is shared memory on a unix socket and RDMA
// on TCP; any one-sided link would do.
//
// Blocks in device memory go over RDMA in place or not at all (TRANSPORT_UNAVAILABLE: whoever called stages
// them). Nothing here reads or writes them: the link does not copy them, and their checksums are the device's
// own work, before the bytes leave (put) and after they landed (get).
#pragma once

#include <algorithm>
#include <array>

#include "client/batch.h"
#include "mooncache/crc32c.h"
#include "transport/remote_extent.h"

namespace mooncache {

inline constexpr size_t kOneSidedItems = 256;
inline constexpr uint64_t kOneSidedBytes = 256 << 20;
// Copying between two looks at the cancel token, after which other threads may have the processor.
inline constexpr auto kOneSidedSpan = std::chrono::microseconds(500);

// The parts that both directions share: attaching, one chunk of items at a time, the link.
class OneSided : public Program {
 public:
  OneSided(Work& work, Node& node, Session& session, BufferBook& buffers, const ClientConfig& config,
           const DeviceCall* device)
      : work_(work),
        node_(node),
        session_(session),
        buffers_(buffers),
        device_(device != nullptr ? device->sums.get() : nullptr),
        direct_slice_bytes_(config.rdma_direct_slice_bytes),
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

  bool held_up() const override { return phase_ == Phase::kSum; }

  bool work() override {
    if (phase_ == Phase::kSum) return take_sums();
    if (phase_ != Phase::kMove) return false;
    // A device moves bytes on its own: look what has landed, and do not wait for more here.
    const Deadline until = rdma_ ? Deadline::after_ms(0) : Deadline::after(kOneSidedSpan);
    const uint64_t landed_before = link_->bytes_moved();
    std::array<Completion, 64> completions;
    for (;;) {
      submit();
      const size_t count = link_->poll(completions, until);
      for (size_t i = 0; i < count; ++i) completed(completions[i]);
      if (open_ == 0 && next_move_ == moves_.size()) {
        moved_all();
        return true;
      }
      if (rdma_ && count == 0) return link_->bytes_moved() != landed_before;
      if (until.expired()) return true;
    }
  }

  int wait_for(std::vector<int>& fds) override {
    if (phase_ == Phase::kSum) return sums_.patience_ms();
    if (phase_ != Phase::kMove || !rdma_) return -1;
    if (session_.idle() && session_.stale()) link_->close();  // the node is gone: nothing will be answered
    return link_->wait_for(fds);
  }

 protected:
  enum class Phase : uint8_t { kAsk, kAsked, kSum, kMove, kTell, kTold };
  struct Move {
    uint32_t item = 0;
    RemoteExtent extent;
    uint64_t offset = 0;
    uint64_t size = 0;
    uint32_t crc = 0;  // expected (get), computed (put)
    Code code = Code::kOk;
    size_t first_slice = 0;
    size_t slice_count = 0;
    bool direct = false;  // between the node and the caller's own memory, without a copy
    uint32_t sum = 0;     // by the device, where the bytes are in its memory
  };

  virtual void ask(Request& request) = 0;
  virtual bool tell(Request& request) = 0;
  virtual Status answer(const wire::FrameHeader& header, const Status& status, Reader& in) = 0;
  virtual void completed(const Completion& completion) = 0;
  // A move that was never begun.
  virtual void refused(const Move& move) = 0;
  virtual void moved_all() { phase_ = Phase::kTell; }
  // What start_sums() asked for is there: in `move.sum`, or the move has a code.
  virtual void summed() {}
  virtual Direction direction() const = 0;
  // This connection cannot move bytes by itself: what is not answered needs another way.
  virtual void give_up() = 0;

  void no_link() {
    unavailable_ = true;
    if (rdma_) {
      session_.rdma_link().reset();
      node_.rdma_failed(steady_ms());
    }
    give_up();
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

  // One result for each item that was asked for, and `exposures_`; a request that was refused gives each its
  // code.
  template <typename Item>
  Result<std::vector<Item>> results(const Status& status, Reader& in, const std::string& name) {
    std::vector<Item> items(end_ - begin_);
    if (!status.is_ok()) {
      for (Item& item : items) item.code = status.code;
      exposures_.assign(items.size(), {});
      return items;
    }
    if (in.u32() != items.size()) return {Code::kProtocolError, name + " answered another number of items"};
    for (Item& item : items) item = Item::decode(in);
    if (!take_exposures(in, items.size())) return {Code::kProtocolError, "malformed " + name + " answer"};
    return items;
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
    // A rail may not reach this device's memory: that says nothing about other bytes to this node.
    const bool of_device = device_ != nullptr && link_->healthy();
    if (of_device && code == Code::kInvalidArgument)
      return Code::kTransportUnavailable;  // unregistered meanwhile
    if (rdma_ && code == Code::kTransportUnavailable && !of_device) node_.rdma_failed(steady_ms());
    return rdma_ && code == Code::kClosed ? Code::kConnectionLost : code;
  }
  void count_bytes(Counters& counters, const Move& move) {
    counters.add(rdma_ ? Counter::kRdmaBytes : Counter::kShmBytes, move.size);
    if (rdma_) node_.rdma_moved(move.size);
    if (move.direct) counters.add(Counter::kRdmaDirectBytes, move.size);
  }

  // Of the buffer that the caller, or the receive pool, keeps in place. Many small slices are cheaper to copy
  // than to post one by one.
  RegionHandle region_of(const Move& move, std::span<const Slice> local) {
    if (!rdma_ || move.size == 0 || move.size / local.size() < direct_slice_bytes_) return 0;
    return buffers_.cover(local, device_);
  }

  // Asks the device for the checksums of all moves that are well and have `wanted`. Kernels of a device run
  // in the order of their launch, and the caller's own come after those whose end was seen here.
  template <typename Wanted>
  void start_sums(Wanted wanted) {
    std::vector<DeviceSlice> slices;
    std::vector<uint32_t> blocks;
    summed_.clear();
    for (size_t i = 0; i < moves_.size(); ++i) {
      const Move& move = moves_[i];
      if (move.code != Code::kOk || move.size == 0 || !wanted(move)) continue;
      for (const Slice& slice : std::span(slices_).subspan(move.first_slice, move.slice_count))
        slices.push_back({reinterpret_cast<uint64_t>(slice.data), slice.size});
      blocks.push_back(static_cast<uint32_t>(move.slice_count));
      summed_.push_back(i);
    }
    phase_ = Phase::kSum;
    if (summed_.empty()) return summed();
    sums_.start(*device_, slices, blocks);
  }

  // False: they are not there yet.
  bool take_sums() {
    const auto sums = sums_.look();
    if (!sums) return false;
    for (size_t k = 0; k < summed_.size(); ++k) {
      Move& move = moves_[summed_[k]];
      if (*sums)
        move.sum = (**sums)[k];
      else
        move.code = Code::kTransportUnavailable;
    }
    summed();
    return true;
  }

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
      transfer.region = region_of(move, transfer.local);
      move.direct = transfer.region != 0;
      if (device_ != nullptr && !move.direct) {  // never a copy by the processor
        move.code = Code::kTransportUnavailable;
        refused(move);
        ++next_move_;
        continue;
      }
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
  BufferBook& buffers_;
  DeviceSums* const device_;  // null: host memory
  const uint64_t direct_slice_bytes_;
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
  std::vector<size_t> summed_;  // positions in moves_ whose checksums are under way
  SumsUnderWay sums_;
  size_t next_move_ = 0;
  size_t open_ = 0;
};

}  // namespace mooncache

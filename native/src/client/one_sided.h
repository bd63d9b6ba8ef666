// Reading and writing blocks through a Link: ask the node where (LOOKUP or RESERVE), move the bytes by the
// link, tell the node (RELEASE or COMMIT); a chunk of items at a time. What differs between the two
// directions is their `Way`; any one-sided link would do.
//
// Blocks in device memory go over RDMA in place or not at all (TRANSPORT_UNAVAILABLE: the caller stages
// them). Nothing here reads or writes them: the link does not copy them, and their checksums are the device's
// own work, before the bytes leave (put) and after they landed (get).
#pragma once

#include <string>
#include <utility>

#include "client/batch.h"
#include "client/moves.h"

namespace mooncache {

inline constexpr size_t kOneSidedItems = 256;
inline constexpr uint64_t kOneSidedBytes = 256 << 20;

enum class Phase : uint8_t { kAsk, kAsked, kSum, kMove, kTell, kTold };

// The items that are asked for together.
struct Chunk {
  Work& work;
  Node& node;
  Session& session;
  Moves moves;
  size_t begin, end;  // of work.items
  std::vector<wire::Exposure> exposures{};

  // One result for each item that was asked for, and `exposures`; a request that was refused gives each its
  // code.
  template <typename Item>
  Result<std::vector<Item>> results(const Status& status, Reader& in, const std::string& name) {
    std::vector<Item> items(end - begin);
    exposures.assign(items.size(), {});
    if (!status.is_ok()) {
      for (Item& item : items) item.code = status.code;
      return items;
    }
    if (in.u32() != items.size()) return {Code::kProtocolError, name + " answered another number of items"};
    for (Item& item : items) item = Item::decode(in);
    if (moves.rdma()) {
      auto exposed = wire::decode_items<wire::Exposure>(in);
      if (!exposed || exposed->size() != items.size())
        return {Code::kProtocolError, "malformed " + name + " answer"};
      exposures = std::move(*exposed);
    }
    if (!in.done()) return {Code::kProtocolError, "malformed " + name + " answer"};
    return items;
  }
};

// A Way has
//   void ask(Chunk&, Request&)          which items are next (Chunk::end), and the question for them
//   Status answer(Chunk&, header, status, in, Phase& next)
//   void completed(Chunk&, Move&, const Completion&)
//   void refused(Chunk&, const Move&)   a move that was never begun
//   Phase moved(Chunk&)                 all moves have ended
//   Phase summed(Chunk&)                the checksums that it asked for are there
//   Phase tell(Chunk&, Request&, bool& sends)
//   void give_up(Chunk&)                what is not answered needs another way
template <typename Way>
class OneSided final : public Program {
 public:
  template <typename Batch>
  OneSided(Way way, const Batch& batch, Work& work, Node& node, Session& session)
      : way_(std::move(way)),
        chunk_{work,
               node,
               session,
               {node, session, *batch.buffers, batch.device != nullptr ? batch.device->sums.get() : nullptr,
                batch.config->rdma_direct_slice_bytes},
               work.answered,
               work.answered} {}

  bool next(Request& request) override {
    LinkOpener& opener = chunk_.moves.opener();
    if (opener.link() == nullptr) {
      if (opener.unavailable()) return false;
      const bool sends = opener.next(request);
      if (opener.unavailable()) way_.give_up(chunk_);
      return sends;
    }
    bool sends = false;
    if (phase_ == Phase::kTell) phase_ = way_.tell(chunk_, request, sends);
    if (sends || phase_ != Phase::kAsk || all_answered()) return sends;
    phase_ = Phase::kAsked;
    chunk_.begin = chunk_.end = chunk_.work.answered;
    way_.ask(chunk_, request);
    if (chunk_.moves.rdma()) request.flags |= wire::kFlagExpose;
    return true;
  }

  bool finished() const override {
    return chunk_.moves.opener().unavailable() || (phase_ == Phase::kAsk && all_answered());
  }

  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override {
    if (!LinkOpener::answers(header.opcode)) return way_.answer(chunk_, header, status, in, phase_);
    Status handled = chunk_.moves.opener().on_response(header, status, in, sink);
    if (handled && chunk_.moves.opener().unavailable()) way_.give_up(chunk_);
    return handled;
  }

  bool held_up() const override { return phase_ == Phase::kSum; }

  bool work() override {
    if (phase_ == Phase::kSum) {
      if (!chunk_.moves.sums_ready()) return false;
      phase_ = way_.summed(chunk_);
      return true;
    }
    if (phase_ != Phase::kMove) return false;
    const bool moved = chunk_.moves.advance(
        [this](Move& move, const Completion& completion) { way_.completed(chunk_, move, completion); },
        [this](const Move& move) { way_.refused(chunk_, move); });
    if (chunk_.moves.ended()) phase_ = way_.moved(chunk_);
    return moved;
  }

  int wait_for(std::vector<int>& fds) override {
    if (phase_ == Phase::kSum) return chunk_.moves.sums_patience_ms();
    return phase_ == Phase::kMove ? chunk_.moves.wait_for(fds) : -1;
  }

 private:
  bool all_answered() const { return chunk_.work.answered == chunk_.work.items.size(); }

  Way way_;
  Chunk chunk_;
  Phase phase_ = Phase::kAsk;
};

}  // namespace mooncache

// Reading and writing blocks through a Link: request extents from the node (LOOKUP or RESERVE), move the
// bytes by the link, finish at the node (RELEASE or COMMIT); a chunk of items at a time. What differs between
// get and put are their `Steps`; any one-sided link would do.
//
// Blocks in device memory go over RDMA in place or not at all (TRANSPORT_UNAVAILABLE: the caller stages
// them). Nothing here reads or writes them: the link does not copy them, and their checksums are the device's
// own work, before the bytes leave (put) and after they landed (get).
#pragma once

#include <utility>

#include "client/batch.h"
#include "client/moves.h"
#include "transport/grant_messages.h"

namespace mooncache {

inline constexpr size_t kOneSidedItems = 256;
inline constexpr uint64_t kOneSidedBytes = 256 << 20;

// Of the chunk in hand. kRequested and kFinishing wait for an answer of the node; kChecksum waits for the
// device in whose memory the blocks lie, before kMove (put) or after it (get).
enum class Phase : uint8_t { kRequest, kRequested, kChecksum, kMove, kFinish, kFinishing };

// The items that are requested together.
struct ItemChunk {
  Work& work;
  Node& node;
  Session& session;
  Moves moves;
  size_t begin, end;  // of work.items
};

// Steps have
//   void request(ItemChunk&, Request&)  which items are next (ItemChunk::end), and the request for them
//   Status answer(ItemChunk&, header, status, in, Phase& next)
//   void completed(ItemChunk&, Move&, const Completion&)
//   void refused(ItemChunk&, const Move&)   a move that was never begun
//   Phase moved(ItemChunk&)                 all moves have ended
//   Phase checksummed(ItemChunk&)           the checksums that were started are there
//   Phase finish(ItemChunk&, Request&, bool& sends)
//   void refuse_rest(ItemChunk&)            what is not answered has to go without a link
template <typename Steps>
class OneSided final : public Program {
 public:
  template <typename Batch>
  OneSided(Steps steps, const Batch& batch, Work& work, Node& node, Session& session)
      : steps_(std::move(steps)),
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
      if (opener.unavailable()) steps_.refuse_rest(chunk_);
      return sends;
    }
    bool sends = false;
    if (phase_ == Phase::kFinish) phase_ = steps_.finish(chunk_, request, sends);
    if (sends || phase_ != Phase::kRequest || all_answered()) return sends;
    phase_ = Phase::kRequested;
    chunk_.begin = chunk_.end = chunk_.work.answered;
    steps_.request(chunk_, request);
    return true;
  }

  bool finished() const override {
    return chunk_.moves.opener().unavailable() || (phase_ == Phase::kRequest && all_answered());
  }

  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override {
    if (!LinkOpener::answers(header.opcode)) return steps_.answer(chunk_, header, status, in, phase_);
    Status handled = chunk_.moves.opener().on_response(header, status, in, sink);
    if (handled && chunk_.moves.opener().unavailable()) steps_.refuse_rest(chunk_);
    return handled;
  }

  bool held_up() const override { return phase_ == Phase::kChecksum; }

  bool work() override {
    if (phase_ == Phase::kChecksum) {
      if (!chunk_.moves.sums_ready()) return false;
      phase_ = steps_.checksummed(chunk_);
      return true;
    }
    if (phase_ != Phase::kMove) return false;
    const bool moved = chunk_.moves.advance(
        [this](Move& move, const Completion& completion) { steps_.completed(chunk_, move, completion); },
        [this](const Move& move) { steps_.refused(chunk_, move); });
    if (chunk_.moves.ended()) phase_ = steps_.moved(chunk_);
    return moved;
  }

  int wait_for(std::vector<int>& fds) override {
    if (phase_ == Phase::kChecksum) return chunk_.moves.sums_patience_ms();
    return phase_ == Phase::kMove ? chunk_.moves.wait_for(fds) : -1;
  }

 private:
  bool all_answered() const { return chunk_.work.answered == chunk_.work.items.size(); }

  Steps steps_;
  ItemChunk chunk_;
  Phase phase_ = Phase::kRequest;
};

}  // namespace mooncache

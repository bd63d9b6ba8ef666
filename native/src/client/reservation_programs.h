// What a reservation asks of its connection: space for its block, and one range of the bytes.
#pragma once

#include <span>
#include <vector>

#include "client/batch.h"
#include "client/moves.h"
#include "transport/grant_messages.h"
#include "transport/transfer_program.h"

namespace mooncache {

// RESERVE of one block. Before it, where the block may move by a link and the connection has none, that link
// is opened: over RDMA the node opens the extent to it in its answer.
class ReserveProgram final : public Program {
 public:
  // `opener`: null = the block goes in frames.
  ReserveProgram(const wire::ReserveItem& item, uint32_t wait_ms, LinkOpener* opener)
      : item_(item), wait_ms_(wait_ms), opener_(opener) {}

  bool next(Request& request) override;
  bool finished() const override { return answered_; }
  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override;
  // The node's answer: its code and its extent.
  const Granted<wire::ReserveResult>& granted() const { return granted_; }

 private:
  const wire::ReserveItem item_;
  const uint32_t wait_ms_;
  LinkOpener* const opener_;
  Granted<wire::ReserveResult> granted_;
  bool exposed_ = false;
  bool sent_ = false;
  bool answered_ = false;
};

// One range of a reserved block: by the link of its connection, else in WRITE frames. What the link turns out
// not to move goes in frames as well: the same bytes twice to the same place do no harm.
class RangeWrite final : public Program {
 public:
  struct Range {
    RemoteExtent extent;
    uint64_t offset = 0;
    uint64_t length = 0;
    std::span<const Slice> slices;
  };
  // `by_link`: the connection may have a link, and over RDMA the node opened the extent to it.
  RangeWrite(const Range& range, bool by_link, Node& node, Session& session, BufferBook& buffers,
             const ClientConfig& config, Counters& counters);

  bool next(Request& request) override;
  bool finished() const override;
  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override;
  void on_payload(std::span<const uint32_t> crcs) override;
  bool work() override;
  int wait_for(std::vector<int>& fds) override;

  Code code() { return in_frames_ ? frames_.items.front().code : moves_.all().front().code; }
  uint32_t crc() { return in_frames_ ? frames_.items.front().crc : moves_.all().front().crc; }
  // The node did not see the bytes: the commit has to vouch for them.
  bool one_sided() const { return !in_frames_; }

 private:
  void completed(Move& move, const Completion& completion);

  Node& node_;
  Counters& counters_;
  Moves moves_;  // of one move
  TransferProgram frames_;
  bool in_frames_;
};

}  // namespace mooncache

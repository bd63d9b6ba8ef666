// What a batch of reservations asks of one connection: space for its blocks, and a range of the bytes of
// many.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "client/batch.h"
#include "client/moves.h"
#include "transport/grant_messages.h"
#include "transport/transfer_program.h"

namespace mooncache {

// RESERVE of some blocks. Before it, where blocks may move by a link and the connection has none, that link
// is opened: over RDMA the node opens the extents to it in its answer.
class ReserveProgram final : public Program {
 public:
  using Answer = std::function<void(std::vector<Granted<wire::ReserveResult>>)>;
  // `opener`: null = the blocks go in frames.
  ReserveProgram(wire::ReserveRequest wanted, std::unique_ptr<LinkOpener> opener, Answer answer)
      : wanted_(std::move(wanted)), opener_(std::move(opener)), answer_(std::move(answer)) {}

  bool next(Request& request) override;
  bool finished() const override { return answered_; }
  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override;

 private:
  const wire::ReserveRequest wanted_;
  const std::unique_ptr<LinkOpener> opener_;
  const Answer answer_;
  bool exposed_ = false;
  bool sent_ = false;
  bool answered_ = false;
};

// Where bytes go in a reserved block, and what became of them.
struct ReservedWrite {
  RemoteExtent extent;
  uint64_t length = 0;
  std::span<const Slice> slices;

  bool over = false;
  Code code = Code::kOk;
  uint32_t crc = 0;
  bool one_sided = false;  // the node did not see the bytes: the commit has to vouch for them
};

// The bytes from one offset on of some reserved blocks: by the link of their connection where the node opened
// them to it, else in WRITE frames. What the link turns out not to move goes in frames as well: the same
// bytes twice to the same place do no harm.
class RangesWrite final : public Program {
 public:
  // `by_link`: the connection may have a link.
  RangesWrite(std::span<ReservedWrite> writes, uint64_t offset, bool by_link, Node& node, Session& session,
              BufferBook& buffers, const ClientConfig& config, Counters& counters,
              std::atomic<uint64_t>* staged_bytes);

  bool next(Request& request) override;
  bool finished() const override { return open_ == 0; }
  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override;
  void on_payload(std::span<const uint32_t> crcs) override;
  bool work() override;
  int wait_for(std::vector<int>& fds) override;

 private:
  bool moving() const { return moves_.opener().link() != nullptr && !moves_.ended(); }
  void add_frames(size_t number);
  void without_link();
  void completed(Move& move, const Completion& completion);

  const std::span<ReservedWrite> writes_;
  const uint64_t offset_;
  Node& node_;
  Counters& counters_;
  std::atomic<uint64_t>* const staged_bytes_;
  Moves moves_;
  TransferProgram frames_;  // its transfers have the numbers of their writes
  size_t open_;
  bool of_link_ = false;  // the answer in hand
};

}  // namespace mooncache

// Space on nodes for blocks of one size, filled range by range and committed, many blocks in one call. A
// single reservation is a batch of one. Bytes move as those of put do: by the connection's link (shared
// memory, RDMA), else in frames.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "client/impl.h"
#include "client/reservation_lane.h"
#include "client/reservation_programs.h"
#include "hash/write_ranges.h"

namespace mooncache {

class Reservations {
 public:
  using Source = std::span<const ConstSlice>;

  Reservations(std::shared_ptr<Client::Impl> impl, size_t blocks, uint64_t block_bytes)
      : impl_(std::move(impl)), block_bytes_(block_bytes), blocks_(blocks) {}
  // Waits for nothing: this runs wherever the last owner lets go, with Python's lock for example.
  ~Reservations();
  Reservations(const Reservations&) = delete;
  Reservations& operator=(const Reservations&) = delete;

  // While it is made, by one thread.
  void refuse(size_t block, Status why) { blocks_[block].refused = std::move(why); }
  // Extents of `lane`, whose count has them, for these blocks.
  struct Granted {
    uint32_t block = 0;
    RemoteExtent extent;
  };
  void take(const std::shared_ptr<Node>& node, std::shared_ptr<ReservationLane> lane,
            std::span<const Granted> granted);

  size_t size() const { return blocks_.size(); }
  uint64_t block_bytes() const { return block_bytes_; }
  // OK: it can be written.
  Status state(size_t block) const;
  uint32_t node_index(size_t block) const;

  // As in ReservationBatch; `ends`, which are OK before, have what became of each block.
  Status write(uint64_t offset, std::span<const Source> sources, const CallOptions& options,
               std::span<Status> ends);
  Status commit(const CallOptions& options, std::span<Status> ends);
  Status abort(const CallOptions& options);

 private:
  struct Block {
    Status refused{Code::kNodeUnavailable, "no node takes new blocks now"};
    uint32_t part = kNoPart;
    RemoteExtent extent;
    WriteRanges written;
    bool one_sided = false;  // the node did not see all of its bytes
    bool open = false;
  };
  // The blocks on one lane.
  struct Part {
    std::shared_ptr<Node> node;
    std::shared_ptr<ReservationLane> lane;
    uint32_t count = 0;
  };
  static constexpr uint32_t kNoPart = UINT32_MAX;

  // A call about some blocks of one part, on their lane.
  struct PartCall {
    PartCall(Part& part_in) : part(part_in), lane(*part.lane, *part.node) {}
    Part& part;
    HeldLane lane;
    std::vector<uint32_t> blocks;
    bool begun = false;  // the connection was this call's
    Status status;       // of the exchange
    // write
    std::vector<ReservedWrite> writes;
    // commit, abort
    std::vector<CallProgram::Call> request;
    std::vector<Code> codes;  // empty: no answer came
  };
  using Make = std::function<std::unique_ptr<Program>(PartCall&, Session&)>;

  // Of open blocks, those that `wanted` names.
  template <typename Wanted>
  std::vector<std::unique_ptr<PartCall>> calls(const Wanted& wanted);
  void run(std::span<const std::unique_ptr<PartCall>> calls, const CallOptions& options, uint64_t bytes,
           const Make& make);
  Status state_locked(size_t number) const;
  // As an OK of it, without making one: a write of a layer asks this of each block several times.
  bool is_open(const Block& block) const;
  Status check(const CallOptions& options, size_t ends) const;
  Status check_sources(uint64_t offset, std::span<const Source> sources) const;
  std::unique_ptr<Program> make_write(PartCall& call, Session& session, uint64_t offset,
                                      const CallOptions& options);
  void end_write(PartCall& call, uint64_t offset, std::span<Status> ends);
  std::unique_ptr<Program> make_exchange(PartCall& call);
  void exchange_codes(std::span<const std::unique_ptr<PartCall>> calls, const CallOptions& options);
  Status abort_locked(std::span<const std::unique_ptr<PartCall>> calls, const CallOptions& caller);
  void give_up(const Part& part, std::span<const uint32_t> blocks);

  std::shared_ptr<Client::Impl> impl_;
  const uint64_t block_bytes_;
  mutable std::mutex mutex_;
  std::vector<Block> blocks_;
  std::vector<Part> parts_;
};

}  // namespace mooncache

// Second reads of what one get waits for longer than usual: from another holder, into memory of their own.
// The first answer that fits its checksum counts; the other read is cut short, so that nothing of it lands
// after the call.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "client/impl.h"

namespace mooncache {

class HedgedReads final : public Hedges {
 public:
  // Where else an item may be read that is asked of the node at a position; kNoNode: nowhere.
  using Elsewhere = std::function<uint32_t(uint32_t item, uint32_t position)>;

  HedgedReads(Client::Impl& impl, const GetBatch& batch, const NodeMap& map, Elsewhere elsewhere)
      : impl_(impl), batch_(batch), map_(map), elsewhere_(std::move(elsewhere)) {}

  // Before the run: `task` reads `work`, of about so many bytes, from the node at `position`.
  void watch(LaneTask& task, uint32_t position, const Work& work, uint64_t bytes);
  std::vector<LaneTask> begin(LaneTask& late) override;
  bool have_all(const LaneTask& late) override;

  // After the run: what it says about the nodes, and what the hedges have read goes to the caller's memory.
  // `answered(item, position, outcome)`: of each item that a hedge has an answer for.
  void end(const std::function<void(uint32_t, uint32_t, const GetOutcome&)>& answered);

 private:
  struct Watched {
    LaneTask* task = nullptr;
    uint32_t position = 0;
    const Work* work = nullptr;
    size_t size_class = 0;
    uint32_t after_us = 0;
  };
  struct Read {
    const Watched* late = nullptr;
    uint32_t position = 0;
    std::vector<uint32_t> items;  // of the caller's batch
    std::vector<GetBlock> blocks;
    std::vector<GetOutcome> outcomes;
    std::vector<uint64_t> known_bytes;
    std::vector<std::unique_ptr<std::byte[]>> memory;
    uint64_t memory_bytes = 0;
    GetOptions how;
    Counters counters;  // what is read twice counts once
    GetBatch batch;
    Work work;
  };

  const Watched* watched(const LaneTask& task) const;
  Read& new_read(const Watched& late, uint32_t position);
  LaneTask task_of(Read& read);
  void take(const Read& read, size_t at);

  Client::Impl& impl_;
  const GetBatch& batch_;
  const NodeMap& map_;
  const Elsewhere elsewhere_;
  std::vector<Watched> watched_;
  std::vector<std::unique_ptr<Read>> reads_;
};

}  // namespace mooncache

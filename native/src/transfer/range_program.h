// The frames of one batch between two engines: READ_RANGES or WRITE_RANGES, several in flight.
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "mooncache/transfer_engine.h"
#include "transport/session.h"
#include "wire/ranges.h"

namespace mooncache::transfer {

// Cut so that a frame's bytes are still in a processor's cache when they are read again for their checksum.
inline constexpr uint64_t kFrameBytes = 1 << 20;
inline constexpr size_t kFrameRanges = 1024;

class RangeProgram final : public Program {
 public:
  RangeProgram(Direction direction, std::span<const RangeCopy> copies)
      : direction_(direction), copies_(copies) {}

  bool next(Request& request) override;
  bool finished() const override { return all_sent() && frames_.empty(); }
  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override;
  void on_payload(std::span<const uint32_t> crcs) override;
  // The first failure.
  const Status& outcome() const { return outcome_; }

 private:
  using Frame = std::vector<RangeCopy>;
  bool all_sent() const { return next_ == copies_.size() || !outcome_.is_ok(); }
  void fail(Status status);

  const Direction direction_;
  const std::span<const RangeCopy> copies_;
  size_t next_ = 0;           // the first copy that is not sent as a whole
  uint64_t offset_ = 0;       // bytes of it that are
  std::deque<Frame> frames_;  // not answered yet
  std::vector<uint32_t> expected_;
  Status outcome_;
};

}  // namespace mooncache::transfer

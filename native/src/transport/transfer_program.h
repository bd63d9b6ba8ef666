// Transfers as READ and WRITE frames of their session, in order and several in flight.
#pragma once

#include <deque>

#include "transport/session.h"

namespace mooncache {

// Each transfer is cut into frames of about 1 MiB, so that a frame's CRC is computed while its bytes are in
// cache.
class TransferProgram final : public Program {
 public:
  struct Item {
    Transfer transfer;
    uint64_t length = 0;
    uint64_t sent = 0;
    uint64_t moved = 0;
    uint32_t crc = 0;
    uint32_t frames_open = 0;
    bool all_sent = false;
    Code code = Code::kOk;
    bool over() const { return all_sent && frames_open == 0; }
  };

  std::deque<Item> items;

  bool next(Request& request) override;
  bool finished() const override { return frames_.empty(); }
  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override;
  void on_payload(std::span<const uint32_t> crcs) override;
  Item* find(TransferId id);

 private:
  struct Frame {
    TransferId id = 0;
    uint64_t offset = 0;
    uint64_t length = 0;
    uint32_t crc = 0;
    Code code = Code::kOk;
  };
  std::deque<Frame> frames_;
};

}  // namespace mooncache

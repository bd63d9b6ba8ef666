// Transfers as READ and WRITE frames of their session, in order and several in flight. Small writes share a
// frame where the node takes ranges of several reservations in one.
#pragma once

#include <deque>

#include "transport/session.h"

namespace mooncache {

// A frame has about 1 MiB, so that its CRC is computed while its bytes are in cache. Longer transfers are
// cut.
class TransferProgram final : public Program {
 public:
  // `several`: the node takes ranges of several reservations in one WRITE.
  explicit TransferProgram(bool several = false) : several_(several) {}

  struct Item {
    Transfer transfer;
    uint64_t length = 0;
    uint64_t sent = 0;
    uint64_t moved = 0;
    uint32_t crc = 0;
    uint32_t parts_open = 0;  // in frames that were not answered
    bool all_sent = false;
    Code code = Code::kOk;
    bool over() const { return all_sent && parts_open == 0; }
  };

  std::deque<Item> items;

  bool next(Request& request) override;
  bool finished() const override { return frames_.empty(); }
  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override;
  void on_payload(std::span<const uint32_t> crcs) override;
  Item* find(TransferId id);

 private:
  // What a frame carries of one transfer. A READ has one.
  struct Part {
    TransferId id = 0;
    uint64_t offset = 0;
    uint64_t length = 0;
    uint32_t crc = 0;
    Code code = Code::kOk;
  };
  Part cut(Item& item, uint64_t bytes_max);
  void read(Request& request, Item& item);
  void write(Request& request, size_t first);
  void landed(const Part& part, std::span<const uint32_t> crcs);

  const bool several_;
  std::deque<Part> parts_;     // of all frames in flight
  std::deque<size_t> frames_;  // how many of them each has
  size_t near_ = 0;            // where find() found the last one: answers come in the order of the items
};

}  // namespace mooncache

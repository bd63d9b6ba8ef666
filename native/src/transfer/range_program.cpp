#include "transfer/range_program.h"

#include <algorithm>

#include "mooncache/crc32c.h"

namespace mooncache::transfer {

bool RangeProgram::next(Request& request) {
  if (all_sent()) return false;
  Frame frame;
  uint64_t total = 0;
  while (next_ < copies_.size() && total < kFrameBytes && frame.size() < kFrameRanges) {
    const RangeCopy& copy = copies_[next_];
    const uint64_t bytes = std::min(copy.bytes - offset_, kFrameBytes - total);
    frame.push_back({copy.local + offset_, copy.remote + offset_, bytes});
    total += bytes;
    offset_ += bytes;
    if (offset_ < copy.bytes) break;
    ++next_;
    offset_ = 0;
  }
  request.meta.u32(static_cast<uint32_t>(frame.size()));
  if (direction_ == Direction::kRead) {
    request.opcode = wire::Opcode::kReadRanges;
    for (const RangeCopy& copy : frame) wire::EngineRange{copy.remote, copy.bytes}.encode(request.meta);
  } else {
    request.opcode = wire::Opcode::kWriteRanges;
    for (const RangeCopy& copy : frame) {
      const uint32_t crc = crc32c({copy.local, static_cast<size_t>(copy.bytes)});
      wire::EngineWrite{{copy.remote, copy.bytes}, crc}.encode(request.meta);
      request.payload.emplace_back(copy.local, static_cast<size_t>(copy.bytes));
    }
  }
  frames_.push_back(std::move(frame));
  return true;
}

void RangeProgram::fail(Status status) {
  if (outcome_) outcome_ = std::move(status);
}

Status RangeProgram::on_response(const wire::FrameHeader&, const Status& status, Reader& in,
                                 PayloadSink& sink) {
  const Frame frame = std::move(frames_.front());
  frames_.pop_front();
  expected_.clear();
  if (!status) {
    fail(status);
    return Status::ok();
  }
  if (direction_ == Direction::kWrite) {
    const auto codes = wire::decode_codes(in);
    if (!codes || codes->size() != frame.size())
      return {Code::kProtocolError, "malformed WRITE_RANGES answer"};
    for (const Code code : *codes) {
      if (code == Code::kOk) continue;
      fail({code, code == Code::kNotFound           ? "a range is in no registered region of the peer"
                  : code == Code::kPermissionDenied ? "the peer does not let this engine write a range"
                  : code == Code::kChecksumMismatch ? "bytes were damaged on their way, or changed meanwhile"
                                                    : "the peer did not take a range"});
    }
    return Status::ok();
  }
  if (in.u32() != frame.size()) return {Code::kProtocolError, "malformed READ_RANGES answer"};
  for (const RangeCopy& copy : frame) {
    expected_.push_back(in.u32());
    const Slice place{copy.local, static_cast<size_t>(copy.bytes)};
    sink.add_item(std::span(&place, 1), 0, copy.bytes);
  }
  if (!in.done()) return {Code::kProtocolError, "malformed READ_RANGES answer"};
  return Status::ok();
}

void RangeProgram::on_payload(std::span<const uint32_t> crcs) {
  if (std::ranges::equal(crcs, expected_)) return;
  fail({Code::kChecksumMismatch,
        "a range does not match its checksum: it was damaged on its way, or its owner changed it meanwhile"});
}

}  // namespace mooncache::transfer

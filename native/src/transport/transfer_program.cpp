#include "transport/transfer_program.h"

#include <algorithm>

#include "mooncache/crc32c.h"
#include "transport/grant_messages.h"

namespace mooncache {

namespace {

constexpr uint64_t kFrameBytes = 1 << 20;

}  // namespace

bool TransferProgram::next(Request& request) {
  for (Item& item : items) {
    if (item.all_sent) continue;
    const uint64_t length = std::min(kFrameBytes, item.length - item.sent);
    const uint64_t at = item.transfer.offset + item.sent;
    if (item.transfer.direction == Direction::kRead) {
      request.opcode = wire::Opcode::kRead;
      wire::ReadRequest{item.transfer.remote.grant, at, length}.encode(request.meta);
    } else {
      PayloadSink part;
      part.add_item(item.transfer.local, item.sent, length);
      uint32_t crc = 0;
      for (const Slice& slice : part.slices) {
        crc = crc32c({slice.data, slice.size}, crc);
        request.payload.emplace_back(slice);
      }
      request.opcode = wire::Opcode::kWrite;
      wire::WriteRequest{item.transfer.remote.grant, {{at, length, crc}}}.encode(request.meta);
      item.crc = crc32c_combine(item.crc, crc, length);
    }
    frames_.push_back({item.transfer.id, item.sent, length, 0});
    item.sent += length;
    item.all_sent = item.sent == item.length;
    ++item.frames_open;
    return true;
  }
  return false;
}

Status TransferProgram::on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                                    PayloadSink& sink) {
  if (frames_.empty()) return {Code::kProtocolError, "an answer to no frame"};
  Frame& frame = frames_.front();
  Item* item = find(frame.id);
  if (header.opcode == wire::Opcode::kRead) {
    frame.code = status.code;
    frame.code = status.code;
    frame.crc = in.u32();
    if (status.is_ok() && (!in.ok() || header.payload_bytes != frame.length)) {
      return {Code::kProtocolError, "READ answered another length than asked for"};
    }
    if (status.is_ok() && item != nullptr) sink.add_item(item->transfer.local, frame.offset, frame.length);
  } else {
    const auto codes = decode_outcomes(status, in, 1);
    if (!codes) return codes.status();
    frame.code = codes->front();
  }
  return Status::ok();
}

void TransferProgram::on_payload(std::span<const uint32_t> crcs) {
  const Frame frame = frames_.front();
  frames_.pop_front();
  Item* item = find(frame.id);
  if (item == nullptr) return;
  --item->frames_open;
  Code code = frame.code;
  if (code == Code::kOk && item->transfer.direction == Direction::kRead && frame.length > 0) {
    if (crcs.empty() || crcs[0] != frame.crc)
      code = Code::kChecksumMismatch;
    else
      item->crc = crc32c_combine(item->crc, crcs[0], frame.length);
  }
  if (code == Code::kOk) {
    item->moved += frame.length;
  } else {
    if (item->code == Code::kOk) item->code = code;
    item->all_sent = true;  // the rest is pointless
  }
}

TransferProgram::Item* TransferProgram::find(TransferId id) {
  for (Item& item : items) {
    if (item.transfer.id == id) return &item;
  }
  return nullptr;
}

}  // namespace mooncache

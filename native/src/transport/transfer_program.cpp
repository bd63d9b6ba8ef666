#include "transport/transfer_program.h"

#include <algorithm>

#include "mooncache/crc32c.h"
#include "transport/grant_messages.h"

namespace mooncache {

namespace {

constexpr uint64_t kFrameBytes = 1 << 20;
constexpr size_t kFrameRanges = 256;

}  // namespace

bool TransferProgram::next(Request& request) {
  const auto unsent =
      std::find_if(items.begin(), items.end(), [](const Item& item) { return !item.all_sent; });
  if (unsent == items.end()) return false;
  if (unsent->transfer.direction == Direction::kRead)
    read(request, *unsent);
  else
    write(request, static_cast<size_t>(unsent - items.begin()));
  return true;
}

TransferProgram::Part TransferProgram::cut(Item& item, uint64_t bytes_max) {
  const Part part{item.transfer.id, item.sent, std::min(bytes_max, item.length - item.sent)};
  item.sent += part.length;
  item.all_sent = item.sent == item.length;
  ++item.parts_open;
  return part;
}

void TransferProgram::read(Request& request, Item& item) {
  const Part part = cut(item, kFrameBytes);
  request.opcode = wire::Opcode::kRead;
  wire::ReadRequest{item.transfer.remote.grant, item.transfer.offset + part.offset, part.length}.encode(
      request.meta);
  parts_.push_back(part);
  frames_.push_back(1);
}

void TransferProgram::write(Request& request, size_t first) {
  std::vector<wire::ReservedRange> ranges;
  PayloadSink payload;
  uint64_t room = kFrameBytes;
  const size_t ranges_max = several_ ? kFrameRanges : 1;
  for (size_t i = first; i < items.size() && room > 0 && ranges.size() < ranges_max; ++i) {
    Item& item = items[i];
    if (item.all_sent) continue;
    if (item.transfer.direction != Direction::kWrite) break;
    const Part part = cut(item, room);
    payload.clear();
    payload.add_item(item.transfer.local, part.offset, part.length);
    uint32_t crc = 0;
    for (const Slice& slice : payload.slices) {
      crc = crc32c({slice.data, slice.size}, crc);
      request.payload.emplace_back(slice);
    }
    item.crc = crc32c_combine(item.crc, crc, part.length);
    ranges.push_back({item.transfer.remote.grant, {item.transfer.offset + part.offset, part.length, crc}});
    parts_.push_back(part);
    room -= part.length;
  }
  frames_.push_back(ranges.size());
  request.opcode = wire::Opcode::kWrite;
  if (ranges.size() == 1) {  // any node understands that
    wire::WriteRequest{ranges[0].reservation, {ranges[0].range}}.encode(request.meta);
    return;
  }
  request.flags = wire::kFlagSeveral;
  wire::encode_items<wire::ReservedRange>(request.meta, ranges);
}

Status TransferProgram::on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                                    PayloadSink& sink) {
  if (frames_.empty()) return {Code::kProtocolError, "an answer to no frame"};
  if (header.opcode == wire::Opcode::kRead) {
    Part& part = parts_.front();
    const Item* item = find(part.id);
    part.code = status.code;
    part.crc = in.u32();
    if (status.is_ok() && (!in.ok() || header.payload_bytes != part.length)) {
      return {Code::kProtocolError, "READ answered another length than asked for"};
    }
    if (status.is_ok() && item != nullptr) sink.add_item(item->transfer.local, part.offset, part.length);
    return Status::ok();
  }
  const auto codes = decode_outcomes(status, in, frames_.front());
  if (!codes) return codes.status();
  for (size_t i = 0; i < codes->size(); ++i) parts_[i].code = (*codes)[i];
  return Status::ok();
}

void TransferProgram::on_payload(std::span<const uint32_t> crcs) {
  for (size_t left = frames_.front(); left > 0; --left) {
    landed(parts_.front(), crcs);
    parts_.pop_front();
  }
  frames_.pop_front();
}

void TransferProgram::landed(const Part& part, std::span<const uint32_t> crcs) {
  Item* item = find(part.id);
  if (item == nullptr) return;
  --item->parts_open;
  Code code = part.code;
  if (code == Code::kOk && item->transfer.direction == Direction::kRead && part.length > 0) {
    if (crcs.empty() || crcs[0] != part.crc)
      code = Code::kChecksumMismatch;
    else
      item->crc = crc32c_combine(item->crc, crcs[0], part.length);
  }
  if (code == Code::kOk) {
    item->moved += part.length;
  } else {
    if (item->code == Code::kOk) item->code = code;
    item->all_sent = true;  // the rest is pointless
  }
}

TransferProgram::Item* TransferProgram::find(TransferId id) {
  for (size_t looked = 0; looked < items.size(); ++looked) {
    if (near_ >= items.size()) near_ = 0;
    if (items[near_].transfer.id == id) return &items[near_];
    ++near_;
  }
  return nullptr;
}

}  // namespace mooncache

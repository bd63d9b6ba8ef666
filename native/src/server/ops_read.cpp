// GET, READ, LOOKUP, RELEASE, MATCH: how blocks go out. Payloads are sent from the arena itself, under a pin
// that ends when the last byte is with the kernel.
#include <algorithm>

#include "server/connection.h"

namespace mooncache::server {

void Connection::count_result(Code code) {
  switch (code) {
    case Code::kOk:
      return metrics().hits.add();
    case Code::kNotFound:
      return metrics().miss_not_found.add();
    case Code::kChecksumMismatch:
      return metrics().miss_checksum.add();
    case Code::kLimitExceeded:
      return metrics().miss_limit.add();
    default:
      return metrics().miss_other.add();
  }
}

void Connection::corrupt_block(const GetOp& op) {
  metrics().crc_failures_stored.add();
  store().quarantine(op.pinned.id);
  loop_.shared().log.push(40, "block_corrupt",
                          "a stored block of " + std::to_string(op.pinned.info.extent.size) +
                              " bytes does not match its CRC any more; it is a miss now");
}

// A damaged device: what it does not give back is as good as damaged.
void Connection::unreadable_block(PinId pin, const Status& why) {
  if (why.code == Code::kPinUnknown) return;  // the pin ended: nothing is wrong with the block
  metrics().blocks_unreadable.add();
  store().quarantine(pin);
  loop_.shared().log.push(40, "block_unreadable", why.message + "; the block is a miss now");
}

// Part of a pinned block in host memory, valid until the next call; empty when the device does not give it.
ConstSlice Connection::bytes_at(PinId pin, uint64_t offset, uint64_t length) {
  if (const ConstSlice whole = store().readable(pin); whole.data != nullptr)
    return {whole.data + offset, static_cast<size_t>(length)};
  const Slice part{loop_.look_at().data(), static_cast<size_t>(length)};
  if (Status got = store().read(pin, offset, part); !got) return unreadable_block(pin, got), ConstSlice{};
  return part;
}

// GET and READ ------------------------------------------------------------------------------------------

void Connection::do_get(Meta meta) {
  auto items = wire::decode_all_items<wire::GetItem>(meta);
  if (!items) return void(malformed());
  GetOp op;
  op.results.reserve(items->size());
  op.parts.reserve(items->size());
  op.items = std::move(*items);
  op_ = std::move(op);
  continue_get();
}

bool Connection::continue_get() {
  auto& op = std::get<GetOp>(op_);
  uint64_t budget = loop_.visit().check_bytes;
  while (op.results.size() < op.items.size()) {
    const wire::GetItem& item = op.items[op.results.size()];
    if (!op.holding && !start_item(op, item)) continue;
    if (!verify_some(op, budget)) {
      suspend();
      return false;
    }
    finish_item(op, item);
  }
  active_ms_ = loop_.now_ms();
  if (op.read_grant != 0) {
    finish_read();
  } else {
    finish_get();
  }
  return true;
}

// Finds and pins the block of a GET. False: the result is there already, without bytes.
bool Connection::start_item(GetOp& op, const wire::GetItem& item) {
  wire::GetResult result;
  if (store().arena_gone()) {
    // Before anything is announced: the block may be sound when its memory answers again.
    result.code = Code::kNodeUnavailable;
  } else if (pins_ >= config().max_pins_per_connection) {
    result.code = Code::kLimitExceeded;
  } else if (auto pinned = store().acquire(tenant_, item.key, loop_.now_ms()); pinned) {
    ++pins_;
    metrics().pins_held.add();
    op.pinned = *pinned;
    op.holding = true;
    if (range_of(op, item, result)) return true;
    let_go(op);
  } else {
    result.code = pinned.code();
  }
  count_result(result.code);
  op.results.push_back(result);
  return false;
}

// What to send of the block in hand; false when that is nothing.
bool Connection::range_of(GetOp& op, const wire::GetItem& item, wire::GetResult& result) {
  const BlockInfo& info = op.pinned.info;
  const uint64_t size = info.extent.size;
  result.tier = info.tier;
  result.block_size = size;
  if (item.offset > size) {
    result.code = Code::kInvalidArgument;
    return false;
  }
  const uint64_t length = std::min(item.max_length, size - item.offset);
  if (length < size - item.offset && (header_.flags & wire::kFlagWhole) != 0) {
    result.code = Code::kBufferTooSmall;
    return false;
  }
  if (length > wire::kMaxPayloadBytes - op.total_bytes) {
    result.code = Code::kLimitExceeded;  // the rest of the batch must come in another request
    return false;
  }
  const bool asked = (header_.flags & wire::kFlagVerify) != 0;
  if (length == 0 && !asked) return false;
  op.verify = length < size || asked;
  if (!op.verify) return true;
  const bool seen = op.sound_generation == info.extent.generation && op.sound_slot == info.extent.slot;
  const bool by_chunk = seen && !asked;
  op.check = RangeCheck(size, info.crc32c, item.offset, length,
                        by_chunk ? std::span<const uint32_t>(op.sound_chunks) : std::span<const uint32_t>{});
  return true;
}

// Gives the block in hand back.
void Connection::let_go(GetOp& op) {
  if (!op.holding) return;
  op.holding = false;
  OutPiece hold;
  hold.hold = op.read_grant != 0 ? OutPiece::Hold::kGrant : OutPiece::Hold::kPin;
  hold.hold_id = static_cast<uint64_t>(op.pinned.id);
  release_hold(hold);
}

bool Connection::verify_some(GetOp& op, uint64_t& budget) {
  const auto part = [&](uint64_t offset, uint64_t length) { return bytes_at(op.pinned.id, offset, length); };
  if (!op.verify) return true;
  const uint64_t before = budget;
  const bool done = op.check.advance(part, budget);
  loop_.spend(before - budget);
  return done;
}

void Connection::finish_item(GetOp& op, const wire::GetItem& item) {
  const BlockInfo& info = op.pinned.info;
  const uint64_t size = info.extent.size;
  wire::GetResult result;
  result.tier = info.tier;
  result.block_size = size;
  if (op.verify && !op.check.sound()) {
    result.code = Code::kChecksumMismatch;
    if (!op.check.unreadable()) corrupt_block(op);
    let_go(op);
  } else {
    if (op.verify) remember_sound(op);
    result.length = std::min(item.max_length, size - item.offset);
    if (result.length == 0) {
      let_go(op);  // only the check was asked for
    } else {
      // A whole block that was not traversed goes out under the CRC it came with.
      result.crc32c = result.length == size ? info.crc32c : op.check.range_crc();
      send_part(op, item.offset, result.length);
    }
  }
  count_result(result.code);
  op.results.push_back(result);
}

// So that the next range of this block costs no traversal of the whole.
void Connection::remember_sound(GetOp& op) {
  std::vector<uint32_t> chunks = op.check.take_chunks();
  if (chunks.empty()) return;
  if (op.read_grant == 0) {
    op.sound_generation = op.pinned.info.extent.generation;
    op.sound_slot = op.pinned.info.extent.slot;
    op.sound_chunks = std::move(chunks);
  } else if (PinGrant* grant = pin_grants_.find(op.read_grant); grant != nullptr) {
    chunks.shrink_to_fit();
    grant->chunks = std::move(chunks);
  }
}

// Queues a range of the block in hand for sending, which takes the pin along.
void Connection::send_part(GetOp& op, uint64_t offset, uint64_t length) {
  OutPiece part;
  const ConstSlice bytes = store().readable(op.pinned.id);
  part.staged = bytes.data == nullptr;
  if (!part.staged) part.data = bytes.data + offset;
  part.block_offset = offset;
  part.size = static_cast<size_t>(length);
  part.hold = op.read_grant != 0 ? OutPiece::Hold::kGrant : OutPiece::Hold::kPin;
  part.hold_id = static_cast<uint64_t>(op.pinned.id);
  op.total_bytes += length;
  op.parts.push_back(part);
  op.holding = false;
}

void Connection::finish_get() {
  GetOp op = std::move(std::get<GetOp>(op_));
  op_ = std::monostate{};
  Writer& writer = begin_response();
  wire::encode_items<wire::GetResult>(writer, op.results);
  queue_head(writer, op.total_bytes, op.parts.empty());
  if (op.parts.empty()) return;
  op.parts.back().opcode = static_cast<uint8_t>(header_.opcode);
  op.parts.back().start_ns = start_ns_;
  for (const OutPiece& part : op.parts) queue_piece(part);
}

void Connection::do_read(Meta meta) {
  const auto request = wire::ReadRequest::decode(meta);
  if (!request) return void(malformed());
  PinGrant* grant = pin_grants_.find(request->grant);
  if (grant == nullptr || grant->released) {
    return respond_status({Code::kPinUnknown, "no such grant on this connection"});
  }
  const auto info = store().pin_info(PinId{request->grant}, loop_.now_ms());
  if (!info) return respond_status(info.status());
  const uint64_t size = info->extent.size;
  if (request->offset > size || request->length > size - request->offset) {
    return respond_status(
        {Code::kInvalidArgument, "the range is not inside the block of " + std::to_string(size) + " bytes"});
  }
  if (request->length == 0 || request->length > wire::kMaxPayloadBytes) {
    if (request->length != 0) return respond_status({Code::kTooLarge, "more than one payload can carry"});
    Writer& writer = begin_response();
    writer.u32(0);
    return respond(writer);
  }
  GetOp op;
  op.read_grant = request->grant;
  op.items.push_back({{}, request->offset, request->length});
  op.pinned = {PinId{request->grant}, *info};
  op.holding = true;
  op.verify = request->length < size;
  op.check = RangeCheck(size, info->crc32c, request->offset, request->length, grant->chunks);
  ++grant->sending;
  op_ = std::move(op);
  continue_get();
}

void Connection::finish_read() {
  const GetOp op = std::move(std::get<GetOp>(op_));
  op_ = std::monostate{};
  const wire::GetResult& result = op.results.front();
  if (result.code != Code::kOk) return respond_status({result.code, "the stored block is damaged"});
  Writer& writer = begin_response();
  writer.u32(result.crc32c);
  queue_head(writer, result.length, false);
  OutPiece part = op.parts.front();
  part.opcode = static_cast<uint8_t>(header_.opcode);
  part.start_ns = start_ns_;
  queue_piece(part);
}

// LOOKUP, RELEASE, MATCH ---------------------------------------------------------------------------------

void Connection::do_lookup(Meta meta) {
  const auto keys = wire::decode_all_keys(meta);
  if (!keys) return void(malformed());
  std::vector<wire::LookupResult> results;
  results.reserve(keys->size());
  for (const Key& key : *keys) {
    wire::LookupResult result;
    if (pins_ >= config().max_pins_per_connection) {
      result.code = Code::kLimitExceeded;
    } else if (const auto pinned = store().acquire(tenant_, key, loop_.now_ms()); pinned) {
      ++pins_;
      metrics().pins_held.add();
      const auto id = static_cast<uint64_t>(pinned->id);
      const Extent& extent = pinned->info.extent;
      pin_grants_.put(id, PinGrant{});
      result.tier = pinned->info.tier;
      result.crc32c = pinned->info.crc32c;
      result.size = extent.size;
      result.extent = {id, extent.segment, extent.slot, extent.generation, extent.offset, extent.size};
    } else {
      result.code = pinned.code();
    }
    count_result(result.code);
    results.push_back(result);
  }
  Writer& writer = begin_response();
  wire::encode_items<wire::LookupResult>(writer, results);
  respond_exposed<wire::LookupResult>(writer, results, false);
}

void Connection::do_release(Meta meta) {
  auto ids = wire::decode_all_grants(meta);
  if (!ids) return void(malformed());
  op_ = ReleaseOp{std::move(*ids)};
  continue_release(0);
}

void Connection::continue_release(uint64_t budget) {
  auto& op = std::get<ReleaseOp>(op_);
  for (; op.next < op.grants.size(); ++op.next) {
    const uint64_t id = op.grants[op.next];
    PinGrant* grant = pin_grants_.find(id);
    if (grant == nullptr || grant->released) continue;  // giving back twice does no harm
    if (grant->sending > 0) {
      grant->released = true;
      continue;
    }
    if (!afford(budget, cost_to_withdraw(id, false))) return;
    pin_grants_.erase(id);
    release_pin(PinId{id});
  }
  op_ = std::monostate{};
  active_ms_ = loop_.now_ms();
  if ((header_.flags & wire::kFlagNoReply) == 0) respond_status(Status::ok());
}

void Connection::do_match(Meta meta) {
  const auto keys = wire::decode_all_keys(meta);
  if (!keys) return void(malformed());
  const bool touch = (header_.flags & wire::kFlagTouch) != 0;
  const MatchResult match = store().match(tenant_, *keys, touch, loop_.now_ms());
  Writer& writer = begin_response();
  writer.u32(match.leading_run);
  writer.u32(match.present);
  writer.raw(std::as_bytes(std::span(match.bitmap)).first((keys->size() + 7) / 8));
  respond(writer);
}

}  // namespace mooncache::server

// GET, READ, LOOKUP, RELEASE, MATCH: how blocks go out.
#include <algorithm>
#include <utility>

#include "base/free_memory.h"
#include "server/peer_session.h"

namespace mooncache::server {

namespace {

void count_result(PeerSession& session, Code code) {
  LoopMetrics& metrics = session.metrics();
  switch (code) {
    case Code::kOk:
      return metrics.hits.add();
    case Code::kNotFound:
      return metrics.miss_not_found.add();
    case Code::kChecksumMismatch:
      return metrics.miss_checksum.add();
    case Code::kLimitExceeded:
      return metrics.miss_limit.add();
    default:
      return metrics.miss_other.add();
  }
}

// Part of a pinned block in host memory, valid until the next call; empty when the device does not give it.
ConstSlice part_of_block(PeerSession& session, PinId pin, uint64_t offset, uint64_t length) {
  if (const ConstSlice whole = session.store().readable(pin); whole.data != nullptr)
    return {whole.data + offset, static_cast<size_t>(length)};
  const Slice part{session.loop().look_at().data(), static_cast<size_t>(length)};
  if (Status got = session.store().read(pin, offset, part); !got)
    return session.held.report_unreadable(pin, got), ConstSlice{};
  return part;
}

}  // namespace

// GET and READ ------------------------------------------------------------------------------------------

Next ops::get(PeerSession& session, wire::Meta meta) {
  auto items = wire::decode_all_items<wire::GetItem>(meta);
  if (!items) return session.malformed();
  return session.begin(GetOp(std::move(*items)), session.loop().visit().check_bytes);
}

GetOp::GetOp(std::vector<wire::GetItem> items) : items_(std::move(items)) {
  results_.reserve(items_.size());
  parts_.reserve(items_.size());
}

// The caller has counted one more piece of the grant as being sent.
GetOp::GetOp(const wire::ReadRequest& request, const BlockInfo& info, const PinGrant& grant)
    : items_{{{}, request.offset, request.length}},
      read_grant_(request.grant),
      pinned_{PinId{request.grant}, info},
      holding_(true),
      verify_(request.length < info.extent.size),
      check_(info.extent.size, info.crc32c, request.offset, request.length, grant.chunks) {}

uint64_t GetOp::held_bytes() const {
  return mooncache::held_bytes(items_) + mooncache::held_bytes(results_) + mooncache::held_bytes(parts_);
}

Next GetOp::step(PeerSession& session, uint64_t budget) {
  while (results_.size() < items_.size()) {
    const wire::GetItem& item = items_[results_.size()];
    const Next begun = holding_ ? Next::kPayload : begin_item(session, item);
    if (begun == Next::kDisk) return begun;
    if (begun == Next::kDone) continue;
    if (!verify(session, budget)) return Next::kTurn;
    finish_item(session, item);
  }
  return read_grant_ != 0 ? respond_read(session) : respond_get(session);
}

// Finds and pins the block of a GET.
Next GetOp::begin_item(PeerSession& session, const wire::GetItem& item) {
  wire::GetResult result;
  if (session.store().arena_gone()) {
    // Before anything is announced: the block may be sound when its memory answers again.
    result.code = Code::kNodeUnavailable;
  } else if (auto pinned = session.held.acquire(session.who.tenant, item.key); pinned) {
    pinned_ = *pinned;
    holding_ = true;
    if (choose_range(session, item, result)) return Next::kPayload;
    release_block(session);
  } else if (pinned.code() == Code::kNotFound &&
             disk_.waits(session, results_.size(), items_.size(),
                         [this](size_t at) -> const Key& { return items_[at].key; })) {
    return Next::kDisk;
  } else {
    result.code = pinned.code();
  }
  count_result(session, result.code);
  results_.push_back(result);
  return Next::kDone;
}

// What to send of the block in hand; false when that is nothing.
bool GetOp::choose_range(PeerSession& session, const wire::GetItem& item, wire::GetResult& result) {
  const BlockInfo& info = pinned_.info;
  const uint64_t size = info.extent.size;
  result.tier = info.tier;
  result.block_size = size;
  if (item.offset > size) {
    result.code = Code::kInvalidArgument;
    return false;
  }
  const uint16_t flags = session.request.flags;
  const uint64_t length = std::min(item.max_length, size - item.offset);
  if (length < size - item.offset && (flags & wire::kFlagWhole) != 0) {
    result.code = Code::kBufferTooSmall;
    return false;
  }
  if (length > wire::kMaxPayloadBytes - total_bytes_) {
    result.code = Code::kLimitExceeded;  // the rest of the batch must come in another request
    return false;
  }
  const bool asked = (flags & wire::kFlagVerify) != 0;
  if (length == 0 && !asked) return false;
  verify_ = length < size || asked;
  if (!verify_) return true;
  const bool seen = sound_generation_ == info.extent.generation && sound_slot_ == info.extent.slot;
  const bool by_chunk = seen && !asked;
  check_ = RangeCheck(size, info.crc32c, item.offset, length,
                      by_chunk ? std::span<const uint32_t>(sound_chunks_) : std::span<const uint32_t>{});
  return true;
}

Hold GetOp::hold() const {
  return {read_grant_ != 0 ? Hold::Kind::kGrant : Hold::Kind::kPin, pinned_.id};
}

// Gives the block in hand back.
void GetOp::release_block(PeerSession& session) {
  if (std::exchange(holding_, false)) session.held.release(hold());
}

void GetOp::abandon(PeerSession& session) {
  for (const OutPiece& part : parts_) session.held.release(part.hold);
  release_block(session);
}

// False: the budget is used up.
bool GetOp::verify(PeerSession& session, uint64_t& budget) {
  if (!verify_) return true;
  const auto part = [&](uint64_t offset, uint64_t length) {
    return part_of_block(session, pinned_.id, offset, length);
  };
  const uint64_t before = budget;
  const bool done = check_.advance(part, budget);
  session.loop().spend(before - budget);
  return done;
}

void GetOp::finish_item(PeerSession& session, const wire::GetItem& item) {
  const BlockInfo& info = pinned_.info;
  const uint64_t size = info.extent.size;
  wire::GetResult result;
  result.tier = info.tier;
  result.block_size = size;
  if (verify_ && !check_.sound()) {
    result.code = Code::kChecksumMismatch;
    if (!check_.unreadable()) {
      session.metrics().crc_failures_stored.add();
      session.store().quarantine(pinned_.id);
      session.loop().shared().log.push(
          40, "block_corrupt",
          "a stored block of " + std::to_string(size) + " bytes no longer matches its CRC; it is a miss now");
    }
    release_block(session);
  } else {
    if (verify_) remember_sound(session);
    result.length = std::min(item.max_length, size - item.offset);
    if (result.length == 0) {
      release_block(session);  // only the check was asked for
    } else {
      // A whole block that was not traversed goes out under the CRC it came with.
      result.crc32c = result.length == size ? info.crc32c : check_.range_crc();
      queue_range(session, item.offset, result.length);
      if (read_grant_ == 0) session.metrics().read_bytes.add(result.length);
    }
  }
  count_result(session, result.code);
  results_.push_back(result);
}

// So that the next range of this block costs no traversal of the whole.
void GetOp::remember_sound(PeerSession& session) {
  std::vector<uint32_t> chunks = check_.take_chunks();
  if (chunks.empty()) return;
  if (read_grant_ == 0) {
    sound_generation_ = pinned_.info.extent.generation;
    sound_slot_ = pinned_.info.extent.slot;
    sound_chunks_ = std::move(chunks);
  } else if (PinGrant* grant = session.held.find_pin(read_grant_); grant != nullptr) {
    chunks.shrink_to_fit();
    grant->chunks = std::move(chunks);
  }
}

// Queues a range of the block in hand for sending, which takes the pin along.
void GetOp::queue_range(PeerSession& session, uint64_t offset, uint64_t length) {
  OutPiece part;
  const ConstSlice bytes = session.store().readable(pinned_.id);
  part.staged = bytes.data == nullptr;
  if (!part.staged) part.data = bytes.data + offset;
  part.block_offset = offset;
  part.size = static_cast<size_t>(length);
  part.hold = hold();
  total_bytes_ += length;
  parts_.push_back(part);
  holding_ = false;
}

Next GetOp::respond_get(PeerSession& session) {
  Writer& writer = session.begin_response();
  wire::encode_items<wire::GetResult>(writer, results_);
  session.respond_head(writer, total_bytes_, parts_.empty());
  if (parts_.empty()) return Next::kDone;
  parts_.back().opcode = static_cast<uint8_t>(session.request.opcode);
  parts_.back().start_ns = session.start_ns;
  for (const OutPiece& part : parts_) session.out.push(part);
  return Next::kDone;
}

Next GetOp::respond_read(PeerSession& session) {
  const wire::GetResult& result = results_.front();
  if (result.code != Code::kOk) return session.respond_status({result.code, "the stored block is damaged"});
  Writer& writer = session.begin_response();
  writer.u32(result.crc32c);
  session.respond_head(writer, result.length, false);
  OutPiece part = parts_.front();
  part.opcode = static_cast<uint8_t>(session.request.opcode);
  part.start_ns = session.start_ns;
  session.out.push(part);
  return Next::kDone;
}

Next ops::read(PeerSession& session, wire::Meta meta) {
  const auto request = wire::ReadRequest::decode(meta);
  if (!request) return session.malformed();
  PinGrant* grant = session.held.find_pin(request->grant);
  if (grant == nullptr)
    return session.respond_status({Code::kPinUnknown, "no such grant on this connection"});
  const auto info = session.store().pin_info(PinId{request->grant}, session.now_ms());
  if (!info) return session.respond_status(info.status());
  const uint64_t size = info->extent.size;
  if (request->offset > size || request->length > size - request->offset) {
    return session.respond_status(
        {Code::kInvalidArgument, "the range is not inside the block of " + std::to_string(size) + " bytes"});
  }
  if (request->length == 0) {
    Writer& writer = session.begin_response();
    writer.u32(0);
    return session.respond(writer);
  }
  if (request->length > wire::kMaxPayloadBytes)
    return session.respond_status({Code::kTooLarge, "more than one payload can carry"});
  ++grant->sending;
  return session.begin(GetOp(*request, *info, *grant), session.loop().visit().check_bytes);
}

// LOOKUP, RELEASE, MATCH, PREFETCH
// ---------------------------------------------------------------------------------

Next ops::lookup(PeerSession& session, wire::Meta meta) {
  auto keys = wire::decode_all_keys(meta);
  if (!keys) return session.malformed();
  return session.begin(LookupOp(std::move(*keys)), 0);
}

LookupOp::LookupOp(std::vector<Key> keys) : keys_(std::move(keys)) {
  results_.reserve(keys_.size());
  grants_.reserve(keys_.size());
}

uint64_t LookupOp::held_bytes() const {
  return mooncache::held_bytes(keys_) + mooncache::held_bytes(results_) + mooncache::held_bytes(grants_);
}

Next LookupOp::step(PeerSession& session, uint64_t) {
  while (results_.size() < keys_.size()) {
    const size_t at = results_.size();
    const auto pinned = session.held.acquire(session.who.tenant, keys_[at]);
    if (pinned.code() == Code::kNotFound &&
        disk_.waits(session, at, keys_.size(), [this](size_t i) -> const Key& { return keys_[i]; }))
      return Next::kDisk;
    wire::LookupResult result;
    result.code = pinned.code();
    if (pinned) {
      session.held.grant_pin(pinned->id);
      const Extent& extent = pinned->info.extent;
      const auto grant = static_cast<uint64_t>(pinned->id);
      result.tier = pinned->info.tier;
      result.crc32c = pinned->info.crc32c;
      result.size = extent.size;
      session.metrics().read_bytes.add(extent.size);
      result.extent = {grant, extent.segment, extent.slot, extent.generation, extent.offset, extent.size};
    }
    grants_.push_back(result.extent.grant);
    count_result(session, result.code);
    results_.push_back(result);
  }
  Writer& writer = session.begin_response();
  wire::encode_items<wire::LookupResult>(writer, results_);
  return ops::respond_exposed(session, writer, std::move(grants_), false);
}

Next ops::release(PeerSession& session, wire::Meta meta) {
  auto ids = wire::decode_all_grants(meta);
  if (!ids) return session.malformed();
  return session.begin(ReleaseOp{std::move(*ids)}, 0);
}

Next ReleaseOp::step(PeerSession& session, uint64_t budget) {
  for (; next < grants.size(); ++next) {
    const uint64_t grant = grants[next];
    const PinGrant* held = session.held.find_pin(grant);
    if (held == nullptr) continue;
    const uint64_t cost = held->sending > 0 ? 0 : session.held.cost_to_withdraw(grant, false);
    if (!session.afford(budget, cost)) return Next::kTurn;
    session.held.release_grant(grant);
  }
  if ((session.request.flags & wire::kFlagNoReply) != 0) return Next::kDone;
  return session.respond_status(Status::ok());
}

Next ops::match(PeerSession& session, wire::Meta meta) {
  const auto keys = wire::decode_all_keys(meta);
  if (!keys) return session.malformed();
  const bool touch = (session.request.flags & wire::kFlagTouch) != 0;
  const MatchResult match = session.store().match(session.who.tenant, *keys, touch, session.now_ms());
  const bool tiers = (session.request.flags & wire::kFlagTiers) != 0;
  Writer& writer = session.begin_response();
  writer.u32(match.leading_run);
  writer.u32(match.present);
  writer.raw(std::as_bytes(std::span(match.bitmap)).first((keys->size() + 7) / 8));
  if (tiers) writer.raw(std::as_bytes(std::span(match.on_disk)));
  if (tiers && (session.request.flags & wire::kFlagShared) != 0)
    writer.raw(std::as_bytes(std::span(match.shared)));
  return session.respond(writer);
}

// Answered at once: what comes up is not waited for.
Next ops::prefetch(PeerSession& session, wire::Meta meta) {
  const auto request = wire::PrefetchRequest::decode(meta);
  if (!request) return session.malformed();
  const Prefetched begun = session.store().prefetch(session.who.tenant, request->keys, request->max_bytes,
                                                    session.now_ms() + request->timeout_ms);
  Writer& writer = session.begin_response();
  wire::PrefetchResponse{begun.blocks, begun.bytes}.encode(writer);
  return session.respond(writer);
}

}  // namespace mooncache::server

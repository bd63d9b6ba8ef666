// READ_RANGES, WRITE_RANGES, OPEN_RANGES, CLOSE_RANGES, MAP_REGION, NOTIFY, DESCRIBE: a transfer engine's own
// operations. The bytes of WRITE_RANGES come in by inbound.cpp, as those of a WRITE.
#include <algorithm>

#include "base/free_memory.h"
#include "mooncache/crc32c.h"
#include "server/peer_session.h"
#include "server/range_table.h"
#include "wire/ranges.h"

namespace mooncache::server {

namespace {

constexpr uint64_t kCheckStepBytes = 256 << 10;  // between two looks at the budget of the turn

RangeTable* table_of(PeerSession& session) {
  return session.config().ranges.get();
}

Next no_engine(PeerSession& session) {
  return session.respond_status({Code::kUnsupported, "this is a store node; it has no ranges of an engine"});
}

}  // namespace

Next ops::read_ranges(PeerSession& session, wire::Meta meta) {
  RangeTable* const table = table_of(session);
  if (table == nullptr) return no_engine(session);
  auto ranges = wire::decode_all_items<wire::EngineRange>(meta);
  if (!ranges) return session.malformed();
  const auto total = wire::payload_bytes(std::span<const wire::EngineRange>(*ranges));
  if (!total) return session.respond_status({Code::kTooLarge, "more than one payload can carry"});
  ReadRangesOp reading;
  auto use = table->begin(session.who.tenant_name, *ranges, false, reading.places);
  if (!use) return session.respond_status(use.status());
  reading.ranges = std::move(*ranges);
  reading.use = session.held.hold_ranges(std::move(*use), Holdings::RangesFor::kSending);
  if (reading.use == 0)
    return session.respond_status({Code::kLimitExceeded, "the connection uses as many ranges as it may"});
  return session.begin(std::move(reading), session.loop().visit().check_bytes);
}

Next ReadRangesOp::step(PeerSession& session, uint64_t budget) {
  while (crcs.size() < ranges.size()) {
    const size_t at = crcs.size();
    while (checked < ranges[at].length) {
      const uint64_t bytes = std::min(kCheckStepBytes, ranges[at].length - checked);
      if (session.held.is_revoked(use)) {
        session.held.end_ranges(use);
        return session.respond_status({Code::kPermissionDenied, "the region was taken back meanwhile"});
      }
      if (!session.afford(budget, bytes)) return Next::kTurn;
      crc = crc32c({places[at] + checked, static_cast<size_t>(bytes)}, crc);
      checked += bytes;
    }
    crcs.push_back(crc);
    crc = 0;
    checked = 0;
  }
  uint64_t total = 0;
  size_t last = ranges.size();
  for (size_t i = 0; i < ranges.size(); ++i) {
    total += ranges[i].length;
    if (ranges[i].length > 0) last = i;
  }
  Writer& writer = session.begin_response();
  writer.u32(static_cast<uint32_t>(crcs.size()));
  for (const uint32_t sum : crcs) writer.u32(sum);
  session.respond_head(writer, total, total == 0);
  if (total == 0) session.held.end_ranges(use);
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].length == 0) continue;
    OutPiece piece;
    piece.data = places[i];
    piece.size = static_cast<size_t>(ranges[i].length);
    if (i == last) {
      piece.hold = {Hold::Kind::kRanges, PinId{use}};
      piece.opcode = static_cast<uint8_t>(session.request.opcode);
      piece.start_ns = session.start_ns;
    }
    session.out.push(piece);
  }
  session.metrics().read_bytes.add(total);
  return Next::kDone;
}

uint64_t ReadRangesOp::held_bytes() const {
  return mooncache::held_bytes(ranges) + mooncache::held_bytes(places) + mooncache::held_bytes(crcs);
}

Next ops::write_ranges(PeerSession& session, wire::Meta meta) {
  RangeTable* const table = table_of(session);
  if (table == nullptr)
    return session.refuse(Code::kUnsupported, "this is a store node; it has no ranges of an engine",
                          CloseReason::kProtocol);
  const auto writes = wire::decode_all_items<wire::EngineWrite>(meta);
  if (!writes) return session.malformed();
  const auto total = wire::payload_bytes(std::span<const wire::EngineWrite>(*writes));
  if (!total || *total != session.request.payload_bytes) {
    return session.refuse(Code::kProtocolError,
                          "the payload is not as long as the ranges of WRITE_RANGES say",
                          CloseReason::kProtocol);
  }
  std::vector<wire::EngineRange> ranges;
  ranges.reserve(writes->size());
  for (const wire::EngineWrite& write : *writes) ranges.push_back(write.range);
  std::vector<std::byte*> places;
  auto use = table->begin(session.who.tenant_name, ranges, true, places);
  Code code = use.code();
  uint64_t held = 0;
  if (use) {
    held = session.held.hold_ranges(std::move(*use), Holdings::RangesFor::kReceiving);
    if (held == 0) code = Code::kLimitExceeded;
  }
  session.progress.restart(session.now_ms());
  return session.begin(Inbound::ranges(*writes, places, held, code), 0);
}

// The copy is the peer's own: what remains here is that it is counted until it ends.
Next ops::open_ranges(PeerSession& session, wire::Meta meta) {
  RangeTable* const table = table_of(session);
  if (table == nullptr) return no_engine(session);
  const auto request = wire::OpenRangesRequest::decode(meta);
  if (!request) return session.malformed();
  std::vector<std::byte*> places;
  auto use = table->begin(session.who.tenant_name, request->ranges, request->write, places);
  if (!use) return session.respond_status(use.status());
  const auto kind = request->write ? Holdings::RangesFor::kPeerWriting : Holdings::RangesFor::kPeerReading;
  const uint64_t held = session.held.hold_ranges(std::move(*use), kind);
  if (held == 0)
    return session.respond_status({Code::kLimitExceeded, "the connection uses as many ranges as it may"});
  Writer& writer = session.begin_response();
  writer.u64(held);
  return session.respond(writer);
}

Next ops::close_ranges(PeerSession& session, wire::Meta meta) {
  if (table_of(session) == nullptr) return no_engine(session);
  Reader in(meta);
  const uint64_t held = in.u64();
  if (!in.done()) return session.malformed();
  const bool revoked = session.held.is_revoked(held);
  if (!session.held.end_opened(held))
    return session.respond_status({Code::kPinUnknown, "no such ranges are open on this connection"});
  if (revoked)
    return session.respond_status({Code::kPermissionDenied, "the region was taken back meanwhile"});
  return session.respond_status(Status::ok());
}

Next ops::map_region(PeerSession& session, wire::Meta meta) {
  RangeTable* const table = table_of(session);
  if (table == nullptr) return no_engine(session);
  Reader in(meta);
  const uint64_t address = in.u64();
  if (!in.done()) return session.malformed();
  if (!session.is_unix || !session.held.may_write_memory()) {
    return session.respond_status(
        {Code::kUnsupported, "memory is shared with processes of the engine's own user on its host only"});
  }
  if (session.out.attaching())
    return session.respond_status({Code::kLimitExceeded, "descriptors are on their way already"});
  wire::MappedRegion answer;
  auto use = table->map(session.who.tenant_name, address, answer.writable);
  if (!use) return session.respond_status(use.status());
  const MemoryRegion& region = (*use)->first_region();
  answer.base = region.base;
  answer.size = region.memory.size;
  std::vector<int> fds{region.memfd->fd_ro()};
  if (answer.writable) fds.push_back(region.memfd->fd_rw());
  // The descriptors stay open until they are sent.
  const uint64_t held = session.held.hold_ranges(std::move(*use), Holdings::RangesFor::kSending);
  if (held == 0)
    return session.respond_status({Code::kLimitExceeded, "the connection uses as many ranges as it may"});
  Writer& writer = session.begin_response();
  answer.encode(writer);
  const Next next = session.respond(writer);
  session.out.attach(std::move(fds), {Hold::Kind::kRanges, PinId{held}});
  return next;
}

Next ops::notify(PeerSession& session, wire::Meta meta) {
  RangeTable* const table = table_of(session);
  if (table == nullptr) return no_engine(session);
  if (meta.size() > wire::kMaxNoticeBytes)
    return session.respond_status(
        {Code::kTooLarge, "a notification has " + std::to_string(wire::kMaxNoticeBytes) + " bytes at most"});
  return session.respond_status(table->notify({session.who.tenant_name, {meta.begin(), meta.end()}}));
}

Next ops::describe(PeerSession& session, wire::Meta meta) {
  RangeTable* const table = table_of(session);
  if (table == nullptr) return no_engine(session);
  if (!meta.empty()) return session.malformed();
  Writer& writer = session.begin_response();
  writer.raw(table->describe(session.who.tenant_name));
  return session.respond(writer);
}

}  // namespace mooncache::server

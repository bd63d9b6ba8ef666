// PUT and WRITE: from the request to the last byte in its extent.
#include <algorithm>
#include <utility>

#include "base/free_memory.h"
#include "mooncache/crc32c.h"
#include "server/peer_session.h"

namespace mooncache::server {

namespace {

// PUT reserves space this far ahead of the bytes: enough for one read, little enough that a batch does not
// hold space that it will only need later.
constexpr uint64_t kWindowBytes = 1 << 20;
constexpr size_t kWindowPieces = 64;

std::optional<std::vector<wire::ReservedRange>> ranges_of_one_reservation(wire::Meta meta) {
  const auto request = wire::WriteRequest::decode(meta);
  if (!request) return std::nullopt;
  std::vector<wire::ReservedRange> ranges;
  ranges.reserve(request->ranges.size());
  for (const wire::WriteRange& range : request->ranges) ranges.push_back({request->reservation, range});
  return ranges;
}

}  // namespace

Next ops::put(PeerSession& session, wire::Meta meta) {
  auto items = wire::decode_all_items<wire::PutItem>(meta);
  if (!items) return session.malformed();
  const auto total = wire::payload_bytes(std::span<const wire::PutItem>(*items));
  if (!total || *total != session.request.payload_bytes) {
    return session.refuse(Code::kProtocolError, "the payload is not as long as the items of PUT say",
                          CloseReason::kProtocol);
  }
  session.progress.restart(session.now_ms());
  return session.begin(Inbound::put(std::move(*items)), 0);
}

Next ops::write(PeerSession& session, wire::Meta meta) {
  const bool several = (session.request.flags & wire::kFlagSeveral) != 0;
  const auto ranges =
      several ? wire::decode_all_items<wire::ReservedRange>(meta) : ranges_of_one_reservation(meta);
  if (!ranges) return session.malformed();
  const auto total = wire::payload_bytes(std::span<const wire::ReservedRange>(*ranges));
  if (!total || *total != session.request.payload_bytes) {
    return session.refuse(Code::kProtocolError, "the payload is not as long as the ranges of WRITE say",
                          CloseReason::kProtocol);
  }
  session.progress.restart(session.now_ms());
  return session.begin(Inbound::write(session, *ranges), 0);
}

Inbound Inbound::put(std::vector<wire::PutItem> items) {
  Inbound inbound;
  inbound.pieces_.resize(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    inbound.pieces_[i].size = items[i].size;
    inbound.pieces_[i].want_crc = items[i].crc32c;
  }
  inbound.items_ = std::move(items);
  return inbound;
}

Inbound Inbound::write(PeerSession& session, std::span<const wire::ReservedRange> ranges) {
  Inbound inbound;
  inbound.pieces_.resize(ranges.size());
  uint64_t reservation = 0;  // the one that was looked up last: ranges of one follow each other
  Result<Extent> extent{Code::kReservationUnknown, {}};
  std::byte* place = nullptr;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const wire::WriteRange& range = ranges[i].range;
    const ReservationId id{ranges[i].reservation};
    if (i == 0 || ranges[i].reservation != reservation) {
      reservation = ranges[i].reservation;
      const bool known = session.held.has_reservation(reservation);
      extent = known ? session.store().reservation_extent(id) : Result<Extent>(Code::kReservationUnknown, {});
      place = known ? session.store().writable(id).data : nullptr;
    }
    Piece& piece = inbound.pieces_[i];
    piece.size = range.length;
    piece.offset = range.offset;
    piece.want_crc = range.crc32c;
    piece.reservation.id = id;
    if (!extent) {
      piece.code = Code::kReservationUnknown;
    } else if (range.length == 0 || range.length > extent->size ||
               range.offset > extent->size - range.length) {
      piece.code = Code::kInvalidArgument;
    } else {
      piece.kept = true;
      if (place != nullptr) piece.place = place + range.offset;
    }
  }
  inbound.prepared_ = inbound.pieces_.size();
  return inbound;
}

Inbound Inbound::ranges(std::span<const wire::EngineWrite> writes, std::span<std::byte* const> places,
                        uint64_t use, Code code) {
  Inbound inbound;
  inbound.of_engine_ = true;
  inbound.use_ = use;
  inbound.pieces_.resize(writes.size());
  for (size_t i = 0; i < writes.size(); ++i) {
    Piece& piece = inbound.pieces_[i];
    piece.size = writes[i].range.length;
    piece.want_crc = writes[i].crc32c;
    piece.code = code;
    if (code != Code::kOk) continue;
    piece.kept = true;
    piece.place = places[i];
  }
  inbound.prepared_ = inbound.pieces_.size();
  return inbound;
}

void Inbound::drop_revoked(PeerSession& session) {
  if (use_ == 0 || !session.held.is_revoked(use_)) return;
  for (size_t i = current_; i < pieces_.size(); ++i) {
    pieces_[i].kept = false;
    pieces_[i].place = nullptr;
    pieces_[i].code = Code::kPermissionDenied;
  }
  session.held.end_ranges(std::exchange(use_, 0));
}

uint64_t Inbound::held_bytes() const {
  return mooncache::held_bytes(items_) + mooncache::held_bytes(pieces_);
}

Code Inbound::reserve(PeerSession& session, size_t number) {
  Piece& piece = pieces_[number];
  const wire::PutItem& item = items_[number];
  const auto reservation = session.held.reserve(session.who.tenant, item.key, item.size);
  if (!reservation) return reservation.code();
  piece.reservation = *reservation;
  piece.place = session.store().writable(reservation->id).data;
  piece.kept = true;
  return Code::kOk;
}

// Finds a place for the pieces to come. False when the piece whose turn it is has to wait for space.
bool Inbound::prepare(PeerSession& session) {
  for (; prepared_ < pieces_.size(); ++prepared_) {
    const size_t ahead = prepared_ - current_;
    if (ahead > 0 && (window_bytes_ >= kWindowBytes || ahead >= kWindowPieces)) return true;
    Piece& piece = pieces_[prepared_];
    piece.code = reserve(session, prepared_);
    if (piece.code == Code::kNoSpace || piece.code == Code::kLimitExceeded) {
      // The pieces before it may make room when they are committed: look again when it is its turn.
      if (ahead > 0) return true;
      if (piece.code == Code::kNoSpace && session.may_wait(items_[prepared_].wait_ms)) return false;
    }
    if (piece.code == Code::kOk) {
      window_bytes_ += piece.size;
    } else if (piece.code == Code::kNoSpace) {
      session.metrics().put_no_space.add();
    } else if (piece.code == Code::kAlreadyExists) {
      session.metrics().put_exists.add();
    } else {
      session.metrics().put_other.add();
    }
  }
  return true;
}

Next Inbound::step(PeerSession& session, uint64_t) {
  while (current_ < pieces_.size()) {
    if (is_put() && !prepare(session)) return Next::kSpace;
    Piece& piece = pieces_[current_];
    if (received_ < piece.size) return Next::kPayload;
    finish(session, piece);
    received_ = 0;
    ++current_;
  }
  return respond(session);
}

size_t Inbound::gather(PeerSession& session, std::span<Slice> slices, uint64_t chunk_bytes,
                       bool& read_ahead) {
  drop_revoked(session);
  const std::span<std::byte> discard = session.loop().discard();
  size_t count = 0;
  uint64_t skip = received_;
  size_t i = current_;
  for (; i < prepared_ && count < slices.size() && chunk_bytes > 0; ++i) {
    const Piece& piece = pieces_[i];
    const uint64_t left = piece.size - skip;
    uint64_t wanted = std::min(left, chunk_bytes);
    const bool staged = piece.kept && piece.place == nullptr;
    if (staged && i > current_) break;  // one piece at a time goes through the staging buffer
    if (staged) wanted = std::min<uint64_t>(wanted, kStagingBytes - staged_);
    // Dropped bytes share one small buffer: several slices may name it.
    if (!piece.kept) wanted = std::min<uint64_t>(wanted, discard.size());
    if (wanted > 0) {
      std::byte* to = staged ? session.staging() + staged_ : piece.kept ? piece.place + skip : discard.data();
      slices[count++] = {to, static_cast<size_t>(wanted)};
      chunk_bytes -= wanted;
    }
    skip = 0;
    if (wanted < left) break;
  }
  read_ahead = i == pieces_.size();
  return count;
}

Next Inbound::received(PeerSession& session, uint64_t bytes, const std::byte* from) {
  while (bytes > 0) {
    Piece& piece = pieces_[current_];
    uint64_t count = std::min(bytes, piece.size - received_);
    if (piece.kept) count = store(session, piece, received_, count, from);
    received_ += count;
    bytes -= count;
    if (from != nullptr) from += count;
    if (received_ < piece.size) continue;
    // Bytes behind the piece that came with the same read already lie in the places prepared before.
    finish(session, piece);
    received_ = 0;
    ++current_;
  }
  return step(session, 0);
}

// Bytes of the piece from `begin` on: in their place already (from == nullptr) or to be copied. Returns how
// many of them it has dealt with.
uint64_t Inbound::store(PeerSession& session, Piece& piece, uint64_t begin, uint64_t bytes,
                        const std::byte* from) {
  const bool staged = piece.place == nullptr;
  if (staged) bytes = std::min<uint64_t>(bytes, kStagingBytes - staged_);
  std::byte* const to = staged ? session.staging() + staged_ : piece.place + begin;
  piece.crc = from != nullptr ? copy_crc32c(to, from, static_cast<size_t>(bytes), piece.crc)
                              : crc32c({to, static_cast<size_t>(bytes)}, piece.crc);
  if (!staged) return bytes;
  staged_ += static_cast<size_t>(bytes);
  if (staged_ < kStagingBytes && begin + bytes < piece.size) return bytes;
  const uint64_t offset = piece.offset + begin + bytes - staged_;
  if (piece.code == Code::kOk) {  // of a block that is lost already the rest is only read from the socket
    const Status put = session.store().write(piece.reservation.id, offset, {session.staging(), staged_});
    const bool gone = put.code == Code::kReservationUnknown;  // the caller's doing, not the device's
    if (!put && !gone) session.loop().shared().log.push(40, "block_unwritable", put.message);
    if (!put) piece.code = gone ? put.code : Code::kNodeUnavailable;
  }
  staged_ = 0;
  return bytes;
}

void Inbound::finish(PeerSession& session, Piece& piece) {
  if (!piece.kept) return;
  const bool matches = piece.crc == piece.want_crc;
  if (!matches) session.metrics().crc_failures_in.add();
  const bool intact = matches && piece.code == Code::kOk;
  if (!matches) piece.code = Code::kChecksumMismatch;
  piece.kept = false;
  piece.place = nullptr;
  if (of_engine_) return;
  if (is_put()) return finish_put(session, piece, intact);
  if (intact) {
    piece.code = session.store().note_written(piece.reservation.id, piece.offset, piece.size, piece.crc).code;
  } else {
    (void)session.store().note_damaged(piece.reservation.id, piece.offset, piece.size);
  }
}

void Inbound::finish_put(PeerSession& session, Piece& piece, bool intact) {
  window_bytes_ -= piece.size;
  if (intact) {
    piece.code = session.held.commit(piece.reservation, piece.crc);
  } else {
    session.held.abort(piece.reservation);
  }
  if (piece.code == Code::kOk) {
    session.metrics().put_blocks.add();
  } else if (piece.code == Code::kAlreadyExists && intact) {
    session.metrics().put_exists.add();
  } else {
    session.metrics().put_other.add();
  }
}

Next Inbound::respond(PeerSession& session) {
  if (use_ != 0) session.held.end_ranges(std::exchange(use_, 0));
  Writer& writer = session.begin_response();
  writer.u32(static_cast<uint32_t>(pieces_.size()));
  for (const Piece& piece : pieces_) writer.u16(static_cast<uint16_t>(piece.code));
  return session.respond(writer);
}

void Inbound::abandon(PeerSession& session) {
  if (use_ != 0) session.held.end_ranges(std::exchange(use_, 0));
  if (!is_put()) return;
  for (size_t i = current_; i < prepared_; ++i) {
    if (std::exchange(pieces_[i].kept, false)) session.held.abort(pieces_[i].reservation);
  }
}

}  // namespace mooncache::server

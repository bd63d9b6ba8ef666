// PUT, RESERVE, WRITE, COMMIT, ABORT: how blocks come in. Payload bytes go from the socket into their extent;
// the CRC of each chunk is computed while the chunk is still in the cache.
#include <algorithm>
#include <utility>

#include "mooncache/crc32c.h"
#include "server/connection.h"

namespace mooncache::server {

namespace {

// PUT reserves space this far ahead of the bytes: enough for one read, little enough that a batch does not
// hold space that it will only need later.
constexpr uint64_t kWindowBytes = 1 << 20;
constexpr size_t kWindowPieces = 64;
// Blocks that the processor cannot address are handed to the store in pieces of this size.
constexpr size_t kStageBytes = kStagingBytes;

wire::WireExtent wire_extent(uint64_t grant, const Extent& extent) {
  return {grant, extent.segment, extent.slot, extent.generation, extent.offset, extent.size};
}

}  // namespace

// Space, with this connection's limits.
Result<Reservation> Connection::reserve(const Key& key, uint64_t size) {
  const uint64_t limit = config().max_reserved_bytes_per_connection;
  if (size > limit) return {Code::kTooLarge, "larger than a connection may reserve"};
  if (reserved_bytes_ > limit - size || reservations_ >= config().max_reservations_per_connection) {
    return {Code::kLimitExceeded, "the connection holds as many reservations as it may"};
  }
  loop_.about_to_reserve();
  auto reservation = store().reserve(tenant_, key, size, loop_.now_ms());
  if (reservation) count_reservation(size);
  return reservation;
}

// Waiting for space --------------------------------------------------------------------------------------

// False when the request has waited as long as it may.
bool Connection::park_for(uint32_t wait_ms, uint32_t waited_ms) {
  const uint32_t allowed = std::min(wait_ms, config().max_wait_ms);
  if (waited_ms >= allowed) {
    if (allowed > 0) metrics().parked_expired.add();
    return false;
  }
  if (!std::exchange(park_counted_, true)) {
    metrics().parked_total.add();
    park_ticket_ = loop_.shared().park_tickets.fetch_add(1) + 1;
  }
  parked_ = true;
  park_start_ms_ = loop_.now_ms();
  park_deadline_ms_ = park_start_ms_ + (allowed - waited_ms);
  loop_.park(*this);
  return true;
}

void Connection::unpark(uint32_t& waited_ms) {
  const uint64_t waited = loop_.now_ms() - park_start_ms_;
  waited_ms += static_cast<uint32_t>(std::min<uint64_t>(waited, UINT32_MAX - waited_ms));
  parked_ = false;
}

void Connection::retry_parked() {
  // Try as if it had never waited; a new refusal parks again with what is left of the time.
  if (auto* inbound = std::get_if<Inbound>(&op_)) {
    unpark(inbound->waited_ms);
    advance_inbound();
  } else if (auto* reserve_op = std::get_if<ReserveOp>(&op_)) {
    unpark(reserve_op->waited_ms);
    continue_reserve();
  }
  progress_ms_ = loop_.now_ms();
  moved_at_progress_ = moved_bytes_;
  settle();
}

// PUT ----------------------------------------------------------------------------------------------------

void Connection::do_put(Meta meta) {
  auto items = wire::decode_all_items<wire::PutItem>(meta);
  if (!items) return void(malformed());
  const auto total = wire::payload_bytes(std::span<const wire::PutItem>(*items));
  if (!total || *total != header_.payload_bytes) {
    return refuse(Code::kProtocolError, "the payload is not as long as the items of PUT say",
                  CloseReason::kProtocol);
  }
  Inbound inbound;
  inbound.pieces.resize(items->size());
  for (size_t i = 0; i < items->size(); ++i) {
    inbound.pieces[i].size = (*items)[i].size;
    inbound.pieces[i].want_crc = (*items)[i].crc32c;
  }
  inbound.items = std::move(*items);
  op_ = std::move(inbound);
  state_ = State::kPayload;
  progress_ms_ = loop_.now_ms();
  moved_at_progress_ = moved_bytes_;
  advance_inbound();
}

Code Connection::reserve_piece(Piece& piece, const wire::PutItem& item) {
  const auto reservation = reserve(item.key, item.size);
  if (!reservation) return reservation.code();
  piece.reservation = reservation->id;
  piece.at = store().writable(reservation->id).data;
  piece.kept = true;
  return Code::kOk;
}

// Finds a place for the pieces to come. False when the piece whose turn it is has to wait for space.
bool Connection::prepare_pieces() {
  auto& inbound = std::get<Inbound>(op_);
  while (inbound.prepared < inbound.pieces.size()) {
    const size_t ahead = inbound.prepared - inbound.current;
    if (ahead > 0 && (inbound.window_bytes >= kWindowBytes || ahead >= kWindowPieces)) return true;
    Piece& piece = inbound.pieces[inbound.prepared];
    const wire::PutItem& item = inbound.items[inbound.prepared];
    piece.code = reserve_piece(piece, item);
    if (piece.code == Code::kNoSpace || piece.code == Code::kLimitExceeded) {
      // The pieces before it may make room when they are committed: look again when it is its turn.
      if (ahead > 0) return true;
      if (piece.code == Code::kNoSpace && park_for(item.wait_ms, inbound.waited_ms)) return false;
    }
    if (piece.code == Code::kOk) {
      inbound.window_bytes += piece.size;
    } else if (piece.code == Code::kNoSpace) {
      metrics().put_no_space.add();
    } else if (piece.code == Code::kAlreadyExists) {
      metrics().put_exists.add();
    } else {
      metrics().put_other.add();
    }
    ++inbound.prepared;
  }
  return true;
}

// Pieces that need no more bytes are finished, the next ones prepared; the request ends after the last.
bool Connection::advance_inbound() {
  for (;;) {
    auto& inbound = std::get<Inbound>(op_);
    if (inbound.current == inbound.pieces.size()) {
      finish_inbound();
      return true;
    }
    if (header_.opcode == wire::Opcode::kPut && !prepare_pieces()) return false;
    Piece& piece = inbound.pieces[inbound.current];
    if (inbound.received < piece.size) return true;
    finish_piece(piece);
    inbound.received = 0;
    ++inbound.current;
  }
}

// The buffer for bytes whose place the processor cannot address.
std::byte* Connection::stage() {
  if (stage_ == nullptr) stage_ = std::make_unique_for_overwrite<std::byte[]>(kStageBytes);
  return stage_.get();
}

// Where the next bytes go: places of pieces, at most `chunk_bytes` in all. `read_ahead`: the end of the
// payload is among them, so bytes behind it belong to the next frame.
size_t Connection::gather(std::span<Slice> slices, uint64_t chunk_bytes, bool& read_ahead) {
  const auto& inbound = std::get<Inbound>(op_);
  size_t count = 0;
  uint64_t skip = inbound.received;
  size_t i = inbound.current;
  for (; i < inbound.prepared && count < slices.size() && chunk_bytes > 0; ++i) {
    const Piece& piece = inbound.pieces[i];
    const uint64_t left = piece.size - skip;
    uint64_t take = std::min(left, chunk_bytes);
    const bool staged = piece.kept && piece.at == nullptr;
    if (staged && i > inbound.current) break;  // one piece at a time goes through the staging buffer
    if (staged) take = std::min<uint64_t>(take, kStageBytes - staged_);
    // Dropped bytes share one small buffer: several slices may name it.
    if (!piece.kept) take = std::min<uint64_t>(take, loop_.discard().size());
    if (take > 0) {
      std::byte* at = staged ? stage() + staged_ : piece.kept ? piece.at + skip : loop_.discard().data();
      slices[count++] = {at, static_cast<size_t>(take)};
      chunk_bytes -= take;
    }
    skip = 0;
    if (take < left) break;
  }
  read_ahead = i == inbound.pieces.size();
  return count;
}

// `bytes` of the payload have arrived: in place (from == nullptr), or at `from`, then they are copied and
// belong to the current piece.
void Connection::received(uint64_t bytes, const std::byte* from) {
  while (bytes > 0) {
    auto& inbound = std::get<Inbound>(op_);
    Piece& piece = inbound.pieces[inbound.current];
    uint64_t take = std::min(bytes, piece.size - inbound.received);
    if (piece.kept) take = keep(piece, inbound.received, take, from);
    inbound.received += take;
    bytes -= take;
    if (from != nullptr) from += take;
    if (inbound.received < piece.size) continue;
    // Bytes behind the piece that came with the same read already lie in the places prepared before.
    finish_piece(piece);
    inbound.received = 0;
    ++inbound.current;
  }
  advance_inbound();
}

// Bytes of the piece from `at` on: in their place already (from == nullptr) or to be copied. Returns how many
// of them were taken.
uint64_t Connection::keep(Piece& piece, uint64_t at, uint64_t bytes, const std::byte* from) {
  const bool staged = piece.at == nullptr;
  if (staged) bytes = std::min<uint64_t>(bytes, kStageBytes - staged_);
  std::byte* const to = staged ? stage() + staged_ : piece.at + at;
  piece.crc = from != nullptr ? copy_crc32c(to, from, static_cast<size_t>(bytes), piece.crc)
                              : crc32c({to, static_cast<size_t>(bytes)}, piece.crc);
  if (!staged) return bytes;
  staged_ += static_cast<size_t>(bytes);
  if (staged_ < kStageBytes && at + bytes < piece.size) return bytes;
  const uint64_t offset = piece.offset + at + bytes - staged_;
  if (piece.code == Code::kOk) {  // of a block that is lost already the rest is only read from the socket
    const Status put = store().write(piece.reservation, offset, {stage(), staged_});
    const bool gone = put.code == Code::kReservationUnknown;  // the caller's doing, not the device's
    if (!put && !gone) loop_.shared().log.push(40, "block_unwritable", put.message);
    if (!put) piece.code = gone ? put.code : Code::kNodeUnavailable;
  }
  staged_ = 0;
  return bytes;
}

void Connection::finish_piece(Piece& piece) {
  if (!piece.kept) return;
  auto& inbound = std::get<Inbound>(op_);
  const bool matches = piece.crc == piece.want_crc;
  if (!matches) metrics().crc_failures_in.add();
  const bool intact = matches && piece.code == Code::kOk;
  if (!matches) piece.code = Code::kChecksumMismatch;
  piece.kept = false;
  piece.at = nullptr;
  if (header_.opcode == wire::Opcode::kWrite) {
    if (intact) {
      piece.code = store().note_written(piece.reservation, piece.offset, piece.size, piece.crc).code;
    } else {
      (void)store().note_damaged(piece.reservation, piece.offset, piece.size);
    }
    return;
  }
  inbound.window_bytes -= piece.size;
  uncount_reservation(piece.size);
  if (!intact) {
    store().abort(piece.reservation);
    metrics().put_other.add();
    return;
  }
  piece.code = store().commit(piece.reservation, piece.crc, loop_.now_ms()).code;
  if (piece.code == Code::kOk) {
    metrics().put_blocks.add();
  } else if (piece.code == Code::kAlreadyExists) {
    metrics().put_exists.add();
  } else {
    metrics().put_other.add();
  }
}

void Connection::finish_inbound() {
  const auto& inbound = std::get<Inbound>(op_);
  staged_ = 0;
  Writer& writer = begin_response();
  writer.u32(static_cast<uint32_t>(inbound.pieces.size()));
  for (const Piece& piece : inbound.pieces) writer.u16(static_cast<uint16_t>(piece.code));
  op_ = std::monostate{};
  state_ = State::kFrame;
  active_ms_ = loop_.now_ms();
  respond(writer);
}

// The request will not be completed. What a PUT has reserved goes back; a WRITE's reservation stays with
// the connection.
void Connection::abort_inbound() {
  staged_ = 0;
  auto* inbound = std::get_if<Inbound>(&op_);
  if (inbound == nullptr || inbound->items.empty()) return;
  for (size_t i = inbound->current; i < inbound->prepared; ++i) {
    Piece& piece = inbound->pieces[i];
    if (!piece.kept) continue;
    piece.kept = false;
    piece.at = nullptr;
    uncount_reservation(piece.size);
    store().abort(piece.reservation);
  }
}

// RESERVE, WRITE, COMMIT, ABORT --------------------------------------------------------------------------

void Connection::do_reserve(Meta meta) {
  auto request = wire::ReserveRequest::decode(meta);
  if (!request) return void(malformed());
  ReserveOp op;
  op.results.reserve(request->items.size());
  op.request = std::move(*request);
  op_ = std::move(op);
  continue_reserve();
}

bool Connection::continue_reserve() {
  auto& op = std::get<ReserveOp>(op_);
  while (op.results.size() < op.request.items.size()) {
    const wire::ReserveItem& item = op.request.items[op.results.size()];
    const auto reservation = reserve(item.key, item.size);
    if (reservation.code() == Code::kNoSpace && op.request.wait_ms > 0 && op.holds) {
      // What it waits for may be what it holds: the peer gets that first, and asks again for the rest.
      wire::ReserveResult none;
      none.code = Code::kNoSpace;
      op.results.resize(op.request.items.size(), none);
      break;
    }
    if (reservation.code() == Code::kNoSpace && park_for(op.request.wait_ms, op.waited_ms)) return false;
    wire::ReserveResult result;
    result.code = reservation.code();
    if (reservation) {
      const auto id = static_cast<uint64_t>(reservation->id);
      reservation_grants_.put(id, item.size);
      result.extent = wire_extent(id, reservation->extent);
      op.holds = true;
    }
    op.results.push_back(result);
  }
  const std::vector<wire::ReserveResult> results = std::move(op.results);
  op_ = std::monostate{};
  active_ms_ = loop_.now_ms();
  Writer& writer = begin_response();
  wire::encode_items<wire::ReserveResult>(writer, results);
  respond_exposed<wire::ReserveResult>(writer, results, true);
  return true;
}

void Connection::do_write(Meta meta) {
  auto request = wire::WriteRequest::decode(meta);
  if (!request) return void(malformed());
  const auto total = wire::payload_bytes(std::span<const wire::WriteRange>(request->ranges));
  if (!total || *total != header_.payload_bytes) {
    return refuse(Code::kProtocolError, "the payload is not as long as the ranges of WRITE say",
                  CloseReason::kProtocol);
  }
  const bool known = reservation_grants_.find(request->reservation) != nullptr;
  const ReservationId id{request->reservation};
  const auto extent = known ? store().reservation_extent(id) : Result<Extent>(Code::kReservationUnknown, {});
  std::byte* const place = known ? store().writable(id).data : nullptr;
  Inbound inbound;
  inbound.pieces.resize(request->ranges.size());
  for (size_t i = 0; i < request->ranges.size(); ++i) {
    const wire::WriteRange& range = request->ranges[i];
    Piece& piece = inbound.pieces[i];
    piece.size = range.length;
    piece.offset = range.offset;
    piece.want_crc = range.crc32c;
    piece.reservation = id;
    if (!extent) {
      piece.code = Code::kReservationUnknown;
    } else if (range.length == 0 || range.length > extent->size ||
               range.offset > extent->size - range.length) {
      piece.code = Code::kInvalidArgument;
    } else {
      piece.kept = true;
      if (place != nullptr) piece.at = place + range.offset;
    }
  }
  inbound.prepared = inbound.pieces.size();
  op_ = std::move(inbound);
  state_ = State::kPayload;
  progress_ms_ = loop_.now_ms();
  moved_at_progress_ = moved_bytes_;
  advance_inbound();
}

void Connection::do_commit(Meta meta) {
  auto items = wire::decode_all_items<wire::CommitItem>(meta);
  if (!items) return void(malformed());
  CommitOp op;
  op.codes.reserve(items->size());
  op.items = std::move(*items);
  op_ = std::move(op);
  continue_commit(0);
}

void Connection::continue_commit(uint64_t budget) {
  auto& op = std::get<CommitOp>(op_);
  while (op.codes.size() < op.items.size()) {
    const wire::CommitItem& item = op.items[op.codes.size()];
    if (!afford(budget, cost_to_withdraw(item.reservation, true))) return;
    op.codes.push_back(commit(item));
  }
  const std::vector<Code> codes = std::move(op.codes);
  op_ = std::monostate{};
  active_ms_ = loop_.now_ms();
  respond_codes(codes);
}

Code Connection::commit(const wire::CommitItem& item) {
  if (reservation_grants_.find(item.reservation) == nullptr) return Code::kReservationUnknown;
  const ReservationId id{item.reservation};
  const bool one_sided = (item.flags & wire::CommitItem::kFlagOneSided) != 0;
  const bool exposed = rdma_ && rdma_->is_exposed(item.reservation, true);
  if (one_sided && !may_write_memory_ && !exposed) {
    // It cannot have written: nothing was open to it, or, where no client maps the memory, nothing is any
    // more.
    const bool withdrawn = !store().addressable();
    if (withdrawn) forget_reservation(item.reservation, true);
    return withdrawn ? Code::kNodeUnavailable : Code::kPermissionDenied;
  }
  withdraw(item.reservation, true);  // a visible block does not change
  Status status = one_sided && exposed ? store().settle_writes() : Status::ok();
  const bool lost = !status;
  if (!lost) {
    status = one_sided ? store().commit(id, item.crc32c, loop_.now_ms())
                       : store().commit_written(id, item.crc32c, loop_.now_ms());
  }
  if (status.code == Code::kChecksumMismatch) metrics().crc_failures_in.add();
  forget_reservation(item.reservation, lost);
  return status.code;
}

void Connection::do_abort(Meta meta) {
  auto grants = wire::decode_all_grants(meta);
  if (!grants) return void(malformed());
  op_ = AbortOp{std::move(*grants), {}};
  continue_abort(0);
}

void Connection::continue_abort(uint64_t budget) {
  auto& op = std::get<AbortOp>(op_);
  while (op.codes.size() < op.grants.size()) {
    const uint64_t id = op.grants[op.codes.size()];
    if (!afford(budget, cost_to_withdraw(id, true))) return;
    const bool known = reservation_grants_.find(id) != nullptr;
    if (known) forget_reservation(id, true);
    op.codes.push_back(known ? Code::kOk : Code::kReservationUnknown);
  }
  const std::vector<Code> codes = std::move(op.codes);
  op_ = std::monostate{};
  active_ms_ = loop_.now_ms();
  respond_codes(codes);
}

}  // namespace mooncache::server

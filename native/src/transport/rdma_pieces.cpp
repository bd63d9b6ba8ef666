// How an RDMA link moves one transfer: cut into pieces, each posted on the rail that will be through soonest,
// each landed and checked. rdma_link.cpp has the rest of the link's life.
//
// A piece is done when it has landed and its CRC is known, in whichever order. The CRC of a read is computed
// after it landed, that of a write in place after it was posted (both while other pieces fly), that of a
// write through staging in the pass that fills the slot.
#include <algorithm>
#include <cstring>

#include "mooncache/crc32c.h"
#include "rdma/choose.h"
#include "transport/queued_link.h"
#include "transport/rdma.h"

namespace mooncache {

namespace {

constexpr size_t kListMax = 16;                // requests of one doorbell
constexpr uint64_t kDoorbellBytes = 64 << 10;  // enough to keep a device busy while the next are prepared

}  // namespace

// Cutting ------------------------------------------------------------------------------------------------

// Decided once for a transfer, by the rails that can be used when it comes.
uint32_t RdmaLink::piece_bytes(const Pending& pending) const {
  const uint32_t most = shared_->max_message_bytes;
  if (!pending.in_place())
    return std::min(RdmaStaging::kSlotBytes, most == 0 ? RdmaStaging::kSlotBytes : most);
  size_t rails = 0;
  for (size_t i = 0; i < ends_.size(); ++i) rails += reaches(i, pending) ? 1 : 0;
  return rdma::piece_bytes(pending.length, rails, most);
}

// The end can be used for this transfer: the node opened the extent to it, and its device knows the memory.
bool RdmaLink::reaches(size_t number, const Pending& pending) const {
  const End& end = ends_[number];
  if (!end.usable() || pending.transfer.remote.keys[number] == 0) return false;
  // Host memory is registered with every rail.
  return !pending.in_place() || !pending.regions.front()->device ||
         std::all_of(pending.regions.begin(), pending.regions.end(),
                     [&](const auto& region) { return region->by_rail[end.number] != nullptr; });
}

// The usable end that would be through soonest with a piece that begins in this slice; SIZE_MAX: all are
// full; ends_.size(): none reaches the extent.
size_t RdmaLink::pick_end(const Pending& pending, size_t slice, uint32_t length) const {
  size_t best = ends_.size();
  uint64_t best_time = UINT64_MAX;
  uint32_t best_slowness = UINT32_MAX;
  for (size_t i = 0; i < ends_.size(); ++i) {
    const End& end = ends_[i];
    if (!reaches(i, pending)) continue;
    if (best == ends_.size()) best = SIZE_MAX;
    if (end.room() == 0) continue;
    const auto& slowness = pending.in_place() ? pending.region(slice).slowness : shared_->staging_slowness;
    const uint64_t time = rdma::time_through(end.rail->load(), length, slowness[end.number]);
    if (time > best_time || (time == best_time && slowness[end.number] >= best_slowness)) continue;
    best_slowness = slowness[end.number];
    best = i;
    best_time = time;
  }
  return best;
}

// Bytes of the next piece in place, at most so many: as many ranges as one request takes.
uint64_t RdmaLink::gathered(const Pending& pending, uint64_t most) const {
  uint64_t bytes = 0;
  uint32_t ranges = 0;
  size_t at = pending.local_offset;
  for (size_t i = pending.local_slice; bytes < most && ranges < shared_->max_gather; ++i, at = 0) {
    const uint64_t left = pending.transfer.local[i].size - at;
    bytes += std::min(left, most - bytes);
    ranges += left > 0 ? 1 : 0;
  }
  return bytes;
}

// `use(data, bytes, slice)` for each range of the piece in the caller's slices, in order.
template <typename Use>
void RdmaLink::each_range(const Pending& pending, const Piece& piece, const Use& use) {
  size_t at = piece.local_offset;
  uint64_t left = piece.length;
  for (size_t i = piece.local_slice; left > 0; ++i, at = 0) {
    const Slice& slice = pending.transfer.local[i];
    const size_t take = static_cast<size_t>(std::min<uint64_t>(left, slice.size - at));
    if (take > 0) use(slice.data + at, take, i);
    left -= take;
  }
}

// The next piece of a transfer, with its place in registered memory. False: no staging slot is free.
bool RdmaLink::cut_slice(Pending& pending, Piece& piece) {
  const auto local = pending.transfer.local;
  while (pending.local_offset == local[pending.local_slice].size) {
    ++pending.local_slice;
    pending.local_offset = 0;
  }
  uint64_t take = std::min<uint64_t>(pending.length - pending.cut, pending.piece_bytes);
  piece.local_slice = pending.local_slice;
  piece.local_offset = pending.local_offset;
  if (pending.in_place()) {
    take = gathered(pending, take);
    piece.direct = true;
  } else {
    const auto slot = shared_->staging->acquire();
    if (!slot) return false;
    piece.slot = *slot;
  }
  piece.serial = pending.serial;
  piece.offset = pending.cut;
  piece.length = static_cast<uint32_t>(take);
  piece.index = static_cast<uint32_t>(pending.crcs.size());
  const bool fills_slot = pending.transfer.direction == Direction::kWrite && !piece.direct;
  pending.crcs.emplace_back(take, fills_slot ? checksum(pending, piece) : 0);
  pending.cut += take;
  ++pending.open;
  skip(pending, take);
  return true;
}

// Moves the cursor over the caller's slices.
void RdmaLink::skip(Pending& pending, uint64_t bytes) {
  while (bytes > 0) {
    const size_t left = pending.transfer.local[pending.local_slice].size - pending.local_offset;
    if (bytes < left) {
      pending.local_offset += static_cast<size_t>(bytes);
      return;
    }
    bytes -= left;
    if (bytes == 0 && pending.local_slice + 1 == pending.transfer.local.size()) {
      pending.local_offset += left;
      return;
    }
    ++pending.local_slice;
    pending.local_offset = 0;
  }
}

// The CRC of a piece's bytes, 0 when it is not wanted; those that go through a slot are copied between it and
// the caller's slices on the way.
uint32_t RdmaLink::checksum(const Pending& pending, const Piece& piece) {
  const bool wanted = pending.counted;
  uint32_t crc = 0;
  if (piece.direct) {
    if (wanted)
      each_range(pending, piece, [&](std::byte* own, size_t take, size_t) {
        crc = crc32c({own, take}, crc);
      });
    return crc;
  }
  const bool into_slices = pending.transfer.direction == Direction::kRead;
  std::byte* slot = shared_->staging->slot_data(piece.slot);
  each_range(pending, piece, [&](std::byte* own, size_t take, size_t) {
    std::byte* to = into_slices ? own : slot;
    const std::byte* from = into_slices ? slot : own;
    if (wanted)
      crc = copy_crc32c(to, from, take, crc);
    else
      std::memcpy(to, from, take);
    slot += take;
  });
  return crc;
}

// Posting ------------------------------------------------------------------------------------------------

bool RdmaLink::post_some() {
  const bool moved = fill_ends();
  for (size_t i = 0; i < ends_.size(); ++i) ring(i);
  return moved;
}

// False: a piece has to wait for a place, and so do all behind it.
bool RdmaLink::post_again() {
  while (!again_.empty()) {
    const uint32_t number = again_.front();
    Pending* pending = find(pieces_[number].serial);
    if (pending != nullptr && pending->code == Code::kOk) {
      const size_t end = pick_end(*pending, pieces_[number].local_slice, pieces_[number].length);
      if (end == SIZE_MAX) return false;
      if (end < ends_.size()) {
        again_.pop_front();
        post(number, end);
        continue;
      }
      if (!any_usable()) return false;  // a repair may follow
      pending->code = Code::kTransportUnavailable;
    }
    again_.pop_front();
    if (pending != nullptr) --pending->open;
    give_back(number);
  }
  return true;
}

bool RdmaLink::fill_ends() {
  starved_ = false;
  const size_t waited = again_.size();
  const bool clear = post_again();
  bool moved = again_.size() != waited;
  if (!clear) return moved;
  for (Pending& pending : queue_) {
    while (pending.code == Code::kOk && pending.cut < pending.length) {
      const size_t end = pick_end(pending, pending.local_slice, pending.piece_bytes);
      if (end == SIZE_MAX) return moved;
      if (end == ends_.size()) {
        if (!any_usable()) return moved;
        pending.code = Code::kTransportUnavailable;
        break;
      }
      Piece piece;
      if (!cut_slice(pending, piece)) {
        starved_ = true;
        return moved;
      }
      uint32_t number;
      if (free_.empty()) {
        number = static_cast<uint32_t>(pieces_.size());
        pieces_.push_back(piece);
      } else {
        number = free_.back();
        free_.pop_back();
        pieces_[number] = piece;
      }
      post(number, end);
      moved = true;
    }
  }
  return moved;
}

// Puts a piece into the end's outbox, and rings when that holds enough.
void RdmaLink::post(uint32_t number, size_t end_number) {
  Piece& piece = pieces_[number];
  End& end = ends_[end_number];
  const Pending& pending = *find(piece.serial);
  const RemoteExtent& remote = pending.transfer.remote;
  rdma::Post post;
  post.id = number;
  post.write = pending.transfer.direction == Direction::kWrite;
  if (piece.direct) {
    each_range(pending, piece, [&](std::byte* own, size_t take, size_t slice) {
      const auto& memory = pending.region(slice).by_rail[end.number];
      post.add(own, static_cast<uint32_t>(take), memory->local_key());
    });
  } else {
    post.add(shared_->staging->slot_data(piece.slot), piece.length, end.rail->staging->local_key());
  }
  post.remote_address = remote.address + pending.transfer.offset + piece.offset;
  post.remote_key = remote.keys[end_number];
  post.device = piece.direct && pending.regions.front()->device;
  piece.end = end_number;
  end.rail->in_flight_bytes.fetch_add(piece.length, std::memory_order_relaxed);
  end.outbox.push_back(post);
  end.outbox_bytes += piece.length;
  if (end.outbox.size() == kListMax || end.outbox_bytes >= kDoorbellBytes) ring(end_number);
}

// Gives the outbox to the device. What it does not take (the end has failed then) goes elsewhere.
void RdmaLink::ring(size_t end_number) {
  End& end = ends_[end_number];
  if (end.outbox.empty()) return;
  const size_t taken = end.endpoint->post(end.outbox);
  for (size_t i = 0; i < end.outbox.size(); ++i) {
    const auto number = static_cast<uint32_t>(end.outbox[i].id);
    Piece& piece = pieces_[number];
    if (i >= taken) {
      end.rail->in_flight_bytes.fetch_sub(piece.length, std::memory_order_relaxed);
      again_.push_back(number);
      continue;
    }
    piece.flying = true;
    const Pending& pending = *find(piece.serial);
    const bool unknown = end.outbox[i].write && piece.direct && pending.counted;
    if (!unknown || piece.unchecked || pending.crcs[piece.index].second != 0) continue;
    piece.unchecked = true;
    unchecked_.push_back(number);
  }
  end.outbox.clear();
  end.outbox_bytes = 0;
}

// Landing ------------------------------------------------------------------------------------------------

bool RdmaLink::reap() {
  bool moved = false;
  std::array<rdma::Reaped, 16> reaped;
  for (End& end : ends_) {
    if (!end.endpoint || end.endpoint->outstanding() == 0) continue;
    const size_t count = end.endpoint->poll(reaped);
    for (size_t i = 0; i < count; ++i) landed(static_cast<uint32_t>(reaped[i].id), reaped[i].outcome);
    moved = moved || count > 0;
  }
  return moved;
}

void RdmaLink::landed(uint32_t number, rdma::WorkOutcome outcome) {
  Piece& piece = pieces_[number];
  End& end = ends_[piece.end];
  piece.flying = false;
  end.rail->in_flight_bytes.fetch_sub(piece.length, std::memory_order_relaxed);
  Pending* pending = find(piece.serial);
  if (outcome == rdma::WorkOutcome::kDone || outcome == rdma::WorkOutcome::kRefused)
    repairs_ = 0;  // the path works
  if (pending == nullptr) return give_back(number);
  if (pending->code != Code::kOk) {  // it is over for its caller, whose slices may be gone
    --pending->open;
    return give_back(number);
  }
  if (outcome == rdma::WorkOutcome::kDone) {
    end.rail->bytes.fetch_add(piece.length, std::memory_order_relaxed);
    pending->moved += piece.length;
    bytes_moved_ += piece.length;
    piece.landed = true;
    if (pending->transfer.direction == Direction::kRead) {
      piece.unchecked = true;
      unchecked_.push_back(number);
    } else if (!piece.unchecked) {
      finish(number);
    }
    return;
  }
  if (outcome == rdma::WorkOutcome::kRefused) {
    // No other rail would be let in: this transfer is over, the others on this rail go on elsewhere.
    pending->code = Code::kTransportUnavailable;
    --pending->open;
    return give_back(number);
  }
  again_.push_back(number);
}

// The first of those whose CRC is missing. One at a time: completions are looked for in between.
bool RdmaLink::check_one() {
  if (unchecked_.empty()) return false;
  const uint32_t number = unchecked_.front();
  unchecked_.pop_front();
  Piece& piece = pieces_[number];
  piece.unchecked = false;
  Pending& pending = *find(piece.serial);
  if (pending.code == Code::kOk) pending.crcs[piece.index].second = checksum(pending, piece);
  if (piece.landed) finish(number);
  return true;
}

void RdmaLink::finish(uint32_t number) {
  --find(pieces_[number].serial)->open;
  give_back(number);
}

void RdmaLink::give_back(uint32_t number) {
  if (pieces_[number].unchecked) std::erase(unchecked_, number);
  if (pieces_[number].slot != kNoSlot) shared_->staging->release(pieces_[number].slot);
  pieces_[number] = {};
  free_.push_back(number);
}

}  // namespace mooncache

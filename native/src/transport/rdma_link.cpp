// A link over queue pairs: the life of a slice is cut -> posted -> landed -> done, or posted -> flushed ->
// posted again on another rail. A slice is in exactly one of: flying on an end, waiting in again_, free.
#include <poll.h>

#include <algorithm>
#include <cassert>

#include "mooncache/crc32c.h"
#include "transport/queued_link.h"
#include "transport/rdma.h"
#include "wire/rdma_address.h"

namespace mooncache {

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kDirectBytes = 1 << 20;
constexpr auto kDrainPatience = std::chrono::milliseconds(500);
constexpr auto kSpin = std::chrono::microseconds(30);
constexpr int kNapMs = 5;
constexpr uint32_t kRepairsMax = 3;  // in a row without a sign of life
constexpr auto kRepairPause = std::chrono::milliseconds(5);
constexpr auto kRepairPatience = std::chrono::seconds(1);
constexpr int kNoHurryMs = 100;
constexpr int kStarvedMs = 1;

}  // namespace

RdmaLink::RdmaLink(std::shared_ptr<RdmaShared> shared, Session* session, std::unique_ptr<Session> owned)
    : shared_(std::move(shared)), session_(session), owned_(std::move(owned)) {}

RdmaLink::~RdmaLink() {
  close();
}

// Set-up -------------------------------------------------------------------------------------------------

Result<std::vector<wire::RdmaAddress>> RdmaLink::prepare() {
  for (End& end : ends_) drop_end(end);
  ends_.clear();
  std::vector<size_t> order;
  for (size_t i = 0; i < shared_->rails.size(); ++i) {
    if (shared_->rails[i]->rail->up()) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return shared_->rails[a]->rail->info().megabits_per_s > shared_->rails[b]->rail->info().megabits_per_s;
  });
  Status last{Code::kTransportUnavailable, "RDMA unavailable, because no port is active any more"};
  std::vector<wire::RdmaAddress> addresses;
  for (const size_t i : order) {
    if (ends_.size() == shared_->config.rails_max) break;
    auto endpoint = shared_->rails[i]->domain->make_endpoint(kDepth);
    if (!endpoint) {
      last = endpoint.status();
      continue;
    }
    End end;
    end.rail = shared_->rails[i].get();
    end.number = i;
    end.endpoint = std::move(*endpoint);
    addresses.push_back(wire::to_wire(end.endpoint->address()));
    ends_.push_back(std::move(end));
  }
  if (addresses.empty()) return last;
  return addresses;
}

Status RdmaLink::meet(std::span<const wire::RdmaAddress> answers) {
  Status last{Code::kTransportUnavailable, "RDMA unavailable, because the node answered with no queue pair"};
  bool met = false;
  for (size_t i = 0; i < ends_.size() && i < answers.size(); ++i) {
    if (answers[i].code != Code::kOk) continue;
    Status connected = ends_[i].endpoint->connect(wire::from_wire<rdma::EndpointAddress>(answers[i]));
    if (!connected) {
      last = std::move(connected);
      continue;
    }
    ends_[i].met = met = true;
  }
  return met ? Status::ok() : last;
}

bool RdmaLink::healthy() const {
  if (closed_ || (session_ != nullptr && session_->broken())) return false;
  return std::any_of(ends_.begin(), ends_.end(), [](const End& end) { return end.usable(); });
}

// Queueing -----------------------------------------------------------------------------------------------

size_t RdmaLink::submit(std::span<const Transfer> transfers) {
  size_t taken = 0;
  for (const Transfer& transfer : transfers) {
    if (queue_.size() + done_.size() >= rdma_capabilities().max_in_flight) break;
    Pending pending;
    pending.transfer = transfer;
    pending.serial = next_serial_++;
    if (!total_bytes(transfer.local, pending.length) ||
        transfer.local.size() > rdma_capabilities().max_slices ||
        !inside(transfer.offset, pending.length, transfer.remote.size)) {
      pending.code = Code::kInvalidArgument;
    } else if (pending.length > 0 && !transfer.remote.exposed) {
      pending.code = Code::kTransportUnavailable;
    }
    if (transfer.region != 0) {
      pending.region = shared_->region(transfer.region);
      for (const Slice& slice : transfer.local) {
        if (!pending.region || slice.size == 0) continue;
        const auto begin = reinterpret_cast<uintptr_t>(pending.region->memory.data);
        const auto at = reinterpret_cast<uintptr_t>(slice.data);
        if (at < begin || !inside(at - begin, slice.size, pending.region->memory.size))
          pending.region.reset();
      }
    }
    queue_.push_back(std::move(pending));
    ++taken;
  }
  return taken;
}

RdmaLink::Pending* RdmaLink::find(uint64_t serial) {
  const auto found =
      std::lower_bound(queue_.begin(), queue_.end(), serial,
                       [](const Pending& pending, uint64_t wanted) { return pending.serial < wanted; });
  return found != queue_.end() && found->serial == serial ? &*found : nullptr;
}

// The usable end that would be through soonest; SIZE_MAX: all are full; ends_.size(): none reaches the
// extent.
size_t RdmaLink::pick_end(const Pending& pending, uint32_t length) const {
  size_t best = ends_.size();
  uint64_t best_time = UINT64_MAX;
  for (size_t i = 0; i < ends_.size(); ++i) {
    const End& end = ends_[i];
    if (!end.usable() || pending.transfer.remote.keys[i] == 0) continue;
    if (best == ends_.size()) best = SIZE_MAX;
    if (end.endpoint->room() == 0) continue;
    const uint64_t time =
        (end.bytes + length) / std::max<uint64_t>(end.rail->rail->info().megabits_per_s / 1000, 1);
    if (time >= best_time) continue;
    best = i;
    best_time = time;
  }
  return best;
}

// The next piece of a transfer, with its place in registered memory. False: no staging slot is free.
bool RdmaLink::cut_slice(Pending& pending, Piece& piece) {
  const auto local = pending.transfer.local;
  while (pending.local_offset == local[pending.local_slice].size) {
    ++pending.local_slice;
    pending.local_offset = 0;
  }
  uint64_t take = pending.length - pending.cut;
  piece.local_slice = pending.local_slice;
  piece.local_offset = pending.local_offset;
  if (pending.region) {
    const Slice& slice = local[pending.local_slice];
    take = std::min<uint64_t>({take, slice.size - pending.local_offset, kDirectBytes});
    piece.direct = slice.data + pending.local_offset;
  } else {
    const auto slot = shared_->staging->take();
    if (!slot) return false;
    piece.slot = *slot;
    take = std::min<uint64_t>(take, RdmaStaging::kSlotBytes);
  }
  piece.serial = pending.serial;
  piece.offset = pending.cut;
  piece.length = static_cast<uint32_t>(take);
  piece.index = static_cast<uint32_t>(pending.crcs.size());
  uint32_t crc = 0;
  if (pending.transfer.direction == Direction::kWrite) {
    crc = piece.direct != nullptr ? crc32c({piece.direct, piece.length}) : gather(pending, piece);
  }
  pending.crcs.emplace_back(take, crc);
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

// From the caller's slices into the slot; the CRC of what was copied.
uint32_t RdmaLink::gather(const Pending& pending, const Piece& piece) {
  std::byte* to = shared_->staging->at(piece.slot);
  uint32_t crc = 0;
  size_t at = piece.local_offset;
  uint64_t left = piece.length;
  for (size_t i = piece.local_slice; left > 0; ++i, at = 0) {
    const Slice& slice = pending.transfer.local[i];
    const size_t take = static_cast<size_t>(std::min<uint64_t>(left, slice.size - at));
    if (take > 0) crc = copy_crc32c(to, slice.data + at, take, crc);
    to += take;
    left -= take;
  }
  return crc;
}

uint32_t RdmaLink::scatter(const Pending& pending, const Piece& piece) {
  const std::byte* from = shared_->staging->at(piece.slot);
  uint32_t crc = 0;
  size_t at = piece.local_offset;
  uint64_t left = piece.length;
  for (size_t i = piece.local_slice; left > 0; ++i, at = 0) {
    const Slice& slice = pending.transfer.local[i];
    const size_t take = static_cast<size_t>(std::min<uint64_t>(left, slice.size - at));
    if (take > 0) crc = copy_crc32c(slice.data + at, from, take, crc);
    from += take;
    left -= take;
  }
  return crc;
}

// Posting ------------------------------------------------------------------------------------------------

bool RdmaLink::post_some() {
  bool moved = false;
  starved_ = false;
  while (!again_.empty()) {
    const uint32_t number = again_.front();
    Pending* pending = find(pieces_[number].serial);
    if (pending != nullptr && pending->code == Code::kOk) {
      const size_t end = pick_end(*pending, pieces_[number].length);
      if (end == SIZE_MAX) return moved;
      if (end < ends_.size()) {
        again_.pop_front();
        post(number, end);
        moved = true;
        continue;
      }
      if (!any_usable()) return moved;  // a repair may follow
      pending->code = Code::kTransportUnavailable;
    }
    again_.pop_front();
    if (pending != nullptr) --pending->open;
    give_back(number);
    moved = true;
  }
  for (Pending& pending : queue_) {
    while (pending.code == Code::kOk && pending.cut < pending.length) {
      const size_t end = pick_end(pending, kDirectBytes);
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

void RdmaLink::post(uint32_t number, size_t end_number) {
  Piece& piece = pieces_[number];
  End& end = ends_[end_number];
  const Pending& pending = *find(piece.serial);
  const RemoteExtent& remote = pending.transfer.remote;
  rdma::Post post;
  post.id = number;
  post.write = pending.transfer.direction == Direction::kWrite;
  post.local = piece.direct != nullptr ? piece.direct : shared_->staging->at(piece.slot);
  post.length = piece.length;
  post.local_key = piece.direct != nullptr ? pending.region->by_rail[end.number]->local_key()
                                           : end.rail->staging->local_key();
  post.remote_address = remote.address + pending.transfer.offset + piece.offset;
  post.remote_key = remote.keys[end_number];
  if (end.endpoint->post(std::span(&post, 1)) == 0) {
    again_.push_back(number);
    return;
  }
  piece.end = end_number;
  piece.flying = true;
  end.bytes += piece.length;
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

void RdmaLink::landed(uint32_t number, rdma::Outcome outcome) {
  Piece& piece = pieces_[number];
  End& end = ends_[piece.end];
  piece.flying = false;
  end.bytes -= piece.length;
  Pending* pending = find(piece.serial);
  if (outcome == rdma::Outcome::kDone || outcome == rdma::Outcome::kRefused) repairs_ = 0;  // the path works
  if (pending == nullptr) return give_back(number);
  if (pending->code != Code::kOk) {  // it is over for its caller, whose slices may be gone
    --pending->open;
    return give_back(number);
  }
  if (outcome == rdma::Outcome::kDone) {
    end.rail->bytes.fetch_add(piece.length, std::memory_order_relaxed);
    if (pending->transfer.direction == Direction::kRead) {
      pending->crcs[piece.index].second =
          piece.direct != nullptr ? crc32c({piece.direct, piece.length}) : scatter(*pending, piece);
    }
    pending->moved += piece.length;
    bytes_moved_ += piece.length;
    --pending->open;
    return give_back(number);
  }
  if (outcome == rdma::Outcome::kRefused) {
    // No other rail would be let in: this transfer is over, the others on this rail go on elsewhere.
    pending->code = Code::kTransportUnavailable;
    --pending->open;
    return give_back(number);
  }
  again_.push_back(number);
}

void RdmaLink::give_back(uint32_t number) {
  if (pieces_[number].slot != kNoSlot) shared_->staging->give(pieces_[number].slot);
  pieces_[number] = {};
  free_.push_back(number);
}

// Failures -----------------------------------------------------------------------------------------------

bool RdmaLink::any_usable() const {
  return std::any_of(ends_.begin(), ends_.end(), [](const End& end) { return end.usable(); });
}

// After this the device has let go of all memory that was posted on the end.
void RdmaLink::drop_end(End& end) {
  if (!end.endpoint) return;
  end.endpoint->stop();
  const auto patience = Clock::now() + kDrainPatience;
  std::array<rdma::Reaped, 16> reaped;
  while (end.endpoint->outstanding() > 0 && Clock::now() < patience && end.rail->rail->up()) {
    const size_t count = end.endpoint->poll(reaped);
    for (size_t i = 0; i < count; ++i) landed(static_cast<uint32_t>(reaped[i].id), reaped[i].outcome);
  }
  end.endpoint.reset();
  const auto number = static_cast<size_t>(&end - ends_.data());
  for (uint32_t i = 0; i < pieces_.size(); ++i) {
    if (pieces_[i].flying && pieces_[i].end == number) landed(i, rdma::Outcome::kFlushed);
  }
}

// Stops the ends that failed, and lets go of them when they are quiet. False: nothing changed.
bool RdmaLink::retire_ends() {
  bool changed = false;
  for (End& end : ends_) {
    if (!end.endpoint || (end.met && end.usable())) continue;
    if (!end.dead) {
      end.dead = true;
      end.stopped_at = Clock::now();
      end.endpoint->stop();
      end.rail->failures.fetch_add(1, std::memory_order_relaxed);
      changed = true;
    }
    if (end.endpoint->outstanding() == 0 || Clock::now() - end.stopped_at > kDrainPatience ||
        !end.rail->rail->up()) {
      drop_end(end);
      changed = true;
    }
  }
  return changed;
}

// Nothing flies any more. The grants are still held when the connection is: then another transport can go on.
void RdmaLink::end_all(Code code) {
  for (Pending& pending : queue_) {
    if (!pending.over() && pending.code == Code::kOk) pending.code = code;  // before its pieces go
  }
  for (End& end : ends_) drop_end(end);
  again_.clear();
  for (uint32_t number = 0; number < pieces_.size(); ++number) {
    if (pieces_[number].serial == 0) continue;
    if (Pending* pending = find(pieces_[number].serial)) --pending->open;
    give_back(number);
  }
}

bool RdmaLink::peer_lost() const {
  return session_ == nullptr || session_->broken() || (session_->idle() && session_->stale());
}

// New queue pairs for a link that has its connection to itself. What the node exposes stays exposed.
bool RdmaLink::may_repair() const {
  return owned_ && repairs_ < kRepairsMax && !peer_lost();
}

void RdmaLink::repair() {
  if (Clock::now() < repair_at_) return;
  repair_at_ = Clock::now() + kRepairPause * (1 << repairs_++);
  EndpointProgram endpoint(*this);
  (void)session_->run(endpoint, Deadline::after(kRepairPatience));
}

bool RdmaLink::pump() {
  bool moved = reap();
  moved = retire_ends() || moved;
  const bool open =
      std::any_of(queue_.begin(), queue_.end(), [](const Pending& pending) { return !pending.over(); });
  if (!open) return moved;
  const bool quiet =
      std::none_of(ends_.begin(), ends_.end(), [](const End& end) { return end.endpoint != nullptr; });
  if (quiet && !may_repair()) {
    end_all(peer_lost() ? Code::kConnectionLost : Code::kTransportUnavailable);
    return true;
  }
  if (quiet) repair();
  return post_some() || moved;
}

// The caller's side ----------------------------------------------------------------------------------------

size_t RdmaLink::take_done(std::span<Completion> completions) {
  size_t count = 0;
  while (count < completions.size() && !done_.empty()) {
    completions[count++] = done_.front();
    done_.pop_front();
  }
  while (count < completions.size() && !queue_.empty() && queue_.front().over()) {
    const Pending& pending = queue_.front();
    assert(pending.code != Code::kOk || pending.moved == pending.length);
    uint32_t crc = 0;
    for (const auto& [length, part] : pending.crcs) crc = crc32c_combine(crc, part, length);
    completions[count++] = {pending.transfer.id, pending.code, pending.moved, crc};
    queue_.pop_front();
  }
  return count;
}

size_t RdmaLink::poll(std::span<Completion> completions, Deadline deadline) {
  if (completions.empty()) return 0;
  auto idle_since = Clock::now();
  for (;;) {
    const bool moved = !closed_ && pump();
    const size_t count = take_done(completions);
    if (count > 0 || queue_.empty() || deadline.expired()) return count;
    if (moved) {
      idle_since = Clock::now();
    } else if (Clock::now() - idle_since > kSpin) {
      nap(deadline);
    }
  }
}

void RdmaLink::nap(Deadline deadline) {
  std::vector<int> fds;
  const int patience_ms = wait_for(fds);
  if (patience_ms == 0) return;
  if (owned_ && peer_lost()) return end_all(Code::kConnectionLost);
  std::vector<pollfd> watched;
  for (const int fd : fds) watched.push_back({fd, POLLIN, 0});
  (void)::poll(watched.data(), watched.size(), std::min({patience_ms, kNapMs, deadline.remaining_ms()}));
}

int RdmaLink::wait_for(std::vector<int>& fds) {
  for (End& end : ends_) {
    if (!end.endpoint || end.endpoint->outstanding() == 0) continue;
    end.endpoint->arm();
    fds.push_back(end.endpoint->fd());
  }
  if (!closed_ && pump()) return 0;
  if (starved_) return kStarvedMs;
  return std::any_of(ends_.begin(), ends_.end(), [](const End& end) { return end.dead && end.endpoint; })
             ? kNapMs
             : kNoHurryMs;
}

Status RdmaLink::cancel(TransferId id) {
  const auto found = std::find_if(queue_.begin(), queue_.end(), [id](const Pending& pending) {
    return pending.transfer.id == id && !pending.over();
  });
  if (found == queue_.end()) return {Code::kNotFound, "no such transfer is under way"};
  const uint64_t serial = found->serial;
  std::vector<size_t> touching;  // ends whose device works on the caller's own memory
  for (const Piece& piece : pieces_) {
    if (piece.serial == serial && piece.flying && piece.direct != nullptr) touching.push_back(piece.end);
  }
  for (const size_t end : touching) {
    ends_[end].dead = true;
    drop_end(ends_[end]);
  }
  Pending* pending = find(serial);
  done_.push_back({id, Code::kCancelled, pending->moved, 0});
  std::erase_if(again_, [&](uint32_t number) {
    if (pieces_[number].serial != serial) return false;
    give_back(number);
    return true;
  });
  // what still flies lands in staging memory, where nobody looks at it
  std::erase_if(queue_, [serial](const Pending& other) { return other.serial == serial; });
  return Status::ok();
}

void RdmaLink::close() {
  if (closed_) return;
  closed_ = true;
  end_all(Code::kClosed);
  ends_.clear();
  session_ = nullptr;
  owned_.reset();
}

}  // namespace mooncache

// A link over queue pairs: the life of a slice is cut -> posted -> landed -> checked -> done, or posted ->
// flushed
// -> posted again on another rail. A slice is in exactly one of: flying on an end, waiting in again_, landed,
// free.
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

constexpr auto kDrainPatience = std::chrono::milliseconds(100);  // of all rails together
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
  const auto patience = Clock::now() + kDrainPatience;
  std::vector<size_t> order;  // those it had stay in their order: the node's ports answer by position
  for (End& end : ends_) {
    drop_end(end, patience);
    order.push_back(end.number);
  }
  ends_.clear();
  const std::vector<bool> near = shared_->near_rails();
  const bool any_near = std::find(near.begin(), near.end(), true) != near.end();
  std::vector<rdma::RailLoad> loads;
  for (size_t i = 0; i < shared_->rails.size(); ++i) {
    rdma::RailLoad& load = loads.emplace_back(shared_->rails[i]->load());
    load.far = any_near && !near[i];
    load.links += shared_->staging_slowness[i] - 1;  // far from staging memory is as good as used once more
  }
  Status last{Code::kTransportUnavailable, "RDMA unavailable, because no port is active now"};
  std::vector<wire::RdmaAddress> addresses;
  for (const size_t i : rdma::order_rails(loads, shared_->turn)) {
    if (std::find(order.begin(), order.end(), i) == order.end()) order.push_back(i);
  }
  for (const size_t i : order) {
    if (ends_.size() == shared_->config.rails_max) break;
    if (!shared_->rails[i]->rail->up()) continue;
    auto endpoint = shared_->rails[i]->domain->make_endpoint(kDepth);
    if (!endpoint) {
      last = endpoint.status();
      continue;
    }
    End end;
    end.rail = shared_->rails[i].get();
    end.number = i;
    end.endpoint = std::move(*endpoint);
    end.rail->links.fetch_add(1, std::memory_order_relaxed);
    addresses.push_back(wire::to_wire(end.endpoint->address()));
    ends_.push_back(std::move(end));
  }
  if (addresses.empty()) return last;
  return addresses;
}

Status RdmaLink::connect(std::span<const wire::RdmaAddress> answers) {
  Status last{Code::kTransportUnavailable, "RDMA unavailable, because the node answered with no queue pair"};
  bool some = false;
  for (size_t i = 0; i < ends_.size() && i < answers.size(); ++i) {
    if (answers[i].code != Code::kOk) continue;
    Status connected = ends_[i].endpoint->connect(wire::from_wire<rdma::EndpointAddress>(answers[i]));
    if (!connected) {
      last = std::move(connected);
      continue;
    }
    ends_[i].connected = some = true;
  }
  return some ? Status::ok() : last;
}

bool RdmaLink::healthy() const {
  if (closed_ || (session_ != nullptr && session_->broken())) return false;
  return std::any_of(ends_.begin(), ends_.end(), [](const End& end) { return end.usable(); });
}

bool RdmaLink::wants_rails() const {
  if (closed_ || !queue_.empty()) return false;
  const auto usable = std::count_if(ends_.begin(), ends_.end(), [](const End& end) { return end.usable(); });
  const auto up = std::count_if(shared_->rails.begin(), shared_->rails.end(),
                                [](const auto& rail) { return rail->rail->up(); });
  if (usable < std::min<ptrdiff_t>(up, shared_->config.rails_max)) return true;
  const std::vector<bool> near = shared_->near_rails();  // a GPU's memory was registered since
  for (size_t i = 0; i < near.size(); ++i) {
    const auto is_there = [i](const End& end) { return end.number == i; };
    if (near[i] && std::none_of(ends_.begin(), ends_.end(), is_there)) return true;
  }
  return false;
}

// Queueing -----------------------------------------------------------------------------------------------

size_t RdmaLink::submit(std::span<const Transfer> transfers) {
  size_t taken = 0;
  for (const Transfer& transfer : transfers) {
    if (queue_.size() + done_.size() >= rdma_capabilities().max_in_flight) break;
    Pending pending;
    pending.transfer = transfer;
    pending.serial = next_serial_++;
    pending.counted = transfer.wants_crc;
    if (!total_bytes(transfer.local, pending.length) ||
        transfer.local.size() > rdma_capabilities().max_slices ||
        !inside(transfer.offset, pending.length, transfer.remote.size)) {
      pending.code = Code::kInvalidArgument;
    } else if (pending.length > 0 && !transfer.remote.exposed) {
      pending.code = Code::kTransportUnavailable;
    }
    if (transfer.region != 0 || !transfer.regions.empty()) adopt_regions(pending);
    pending.piece_bytes = piece_bytes(pending);
    queue_.push_back(std::move(pending));
    ++taken;
  }
  return taken;
}

// In place when each slice lies in its region; else through staging, which device memory cannot take.
void RdmaLink::adopt_regions(Pending& pending) {
  const Transfer& transfer = pending.transfer;
  const bool each = !transfer.regions.empty();
  RegionHandle last = 0;
  bool device = false, known = !each || transfer.regions.size() == transfer.local.size();
  const std::lock_guard lock(shared_->mutex);
  for (size_t i = 0; known && i < transfer.local.size(); ++i) {
    const Slice& slice = transfer.local[i];
    const RegionHandle handle = each ? transfer.regions[i] : transfer.region;
    if (slice.size > 0 && (handle != last || handle == 0)) {  // 0 is no region's
      const auto found = shared_->regions.find(handle);
      known = found != shared_->regions.end();
      device = device || (handle & RdmaRegion::kDevice) != 0;
      if (known) pending.regions.push_back(found->second);
      last = handle;
    }
    if (each)
      pending.region_of.push_back(static_cast<uint32_t>(std::max<size_t>(pending.regions.size(), 1)) - 1);
    if (!known || slice.size == 0) continue;
    const RdmaRegion& region = *pending.regions.back();
    const auto begin = reinterpret_cast<uintptr_t>(region.memory.data);
    const auto at = reinterpret_cast<uintptr_t>(slice.data);
    known = at >= begin && inside(at - begin, slice.size, region.memory.size) &&
            region.device == pending.regions.front()->device;
  }
  if (!known) pending.regions.clear();
  if (!device && (transfer.region & RdmaRegion::kDevice) == 0) return;
  pending.counted = false;
  if (!pending.in_place() && pending.code == Code::kOk) pending.code = Code::kInvalidArgument;
}

RdmaLink::Pending* RdmaLink::find(uint64_t serial) {
  const auto found =
      std::lower_bound(queue_.begin(), queue_.end(), serial,
                       [](const Pending& pending, uint64_t wanted) { return pending.serial < wanted; });
  return found != queue_.end() && found->serial == serial ? &*found : nullptr;
}

// Failures -----------------------------------------------------------------------------------------------

bool RdmaLink::any_usable() const {
  return std::any_of(ends_.begin(), ends_.end(), [](const End& end) { return end.usable(); });
}

// After this the device has let go of all memory that was posted on the end.
void RdmaLink::drop_end(End& end, Clock::time_point patience) {
  if (!end.endpoint) return;
  end.endpoint->stop();
  std::array<rdma::Reaped, 16> reaped;
  while (end.endpoint->outstanding() > 0 && Clock::now() < patience && end.rail->rail->up()) {
    const size_t count = end.endpoint->poll(reaped);
    for (size_t i = 0; i < count; ++i) landed(static_cast<uint32_t>(reaped[i].id), reaped[i].outcome);
  }
  end.endpoint.reset();
  end.rail->links.fetch_sub(1, std::memory_order_relaxed);
  const auto number = static_cast<size_t>(&end - ends_.data());
  for (uint32_t i = 0; i < pieces_.size(); ++i) {
    if (pieces_[i].flying && pieces_[i].end == number) landed(i, rdma::WorkOutcome::kFlushed);
  }
}

// Stops the ends that failed, and lets go of them when they are quiet. False: nothing changed.
bool RdmaLink::retire_ends() {
  bool changed = false;
  for (End& end : ends_) {
    if (!end.endpoint || (end.connected && end.usable())) continue;
    if (!end.dead) {
      end.dead = true;
      end.stopped_at = Clock::now();
      end.endpoint->stop();
      end.rail->failures.fetch_add(1, std::memory_order_relaxed);
      changed = true;
    }
    if (end.endpoint->outstanding() == 0 || Clock::now() - end.stopped_at > kDrainPatience ||
        !end.rail->rail->up()) {
      drop_end(end, Clock::now());
      changed = true;
    }
  }
  return changed;
}

// Nothing is in flight now. The grants are still held when the connection is: then another transport can
// go on.
void RdmaLink::end_all(Code code) {
  for (Pending& pending : queue_) {
    if (!pending.over() && pending.code == Code::kOk) pending.code = code;  // before its pieces go
  }
  for (End& end : ends_) {
    if (end.endpoint) end.endpoint->stop();
  }
  const auto patience = Clock::now() + kDrainPatience;
  for (End& end : ends_) drop_end(end, patience);
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

// Waits for the node's answer, the one wait here that is not for a device, and only in poll(): links that own
// their connection do this (conformance tests, benchmark), those of a client never. A session whose answer is
// late is lost.
void RdmaLink::repair(Deadline deadline) {
  if (deadline.expired() || Clock::now() < repair_at_) return;
  repair_at_ = Clock::now() + kRepairPause * (1 << repairs_++);
  EndpointProgram endpoint(*this);
  (void)session_->run(endpoint, Deadline::after(kRepairPatience));
}

bool RdmaLink::pump(Deadline deadline) {
  bool moved = reap();
  moved = retire_ends() || moved;
  const bool open =
      std::any_of(queue_.begin(), queue_.end(), [](const Pending& pending) { return !pending.over(); });
  if (!open) return moved;
  const bool quiet =
      std::none_of(ends_.begin(), ends_.end(), [](const End& end) { return end.endpoint != nullptr; });
  if (quiet && unchecked_.empty() && !may_repair()) {
    end_all(peer_lost() ? Code::kConnectionLost : Code::kTransportUnavailable);
    return true;
  }
  if (quiet) {
    if (check_one()) return true;  // what has landed no longer needs a rail
    repair(deadline);
  }
  moved = post_some() || moved;
  return check_one() || moved;
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
    completions[count++] = {pending.transfer.id, pending.code, pending.moved, crc, pending.counted};
    queue_.pop_front();
  }
  return count;
}

size_t RdmaLink::poll(std::span<Completion> completions, Deadline deadline) {
  if (completions.empty()) return 0;
  auto idle_since = Clock::now();
  for (;;) {
    const bool moved = !closed_ && pump(deadline);
    const size_t count = take_done(completions);
    if (count > 0 || queue_.empty() || deadline.expired()) return count;
    if (moved) {
      idle_since = Clock::now();
    } else if (Clock::now() - idle_since > kSpin) {
      back_off(deadline);
    }
  }
}

void RdmaLink::back_off(Deadline deadline) {
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
  if (!closed_ && pump(Deadline::after_ms(0))) return 0;
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
    if (piece.serial == serial && piece.flying && piece.direct) touching.push_back(piece.end);
  }
  const auto patience = Clock::now() + kDrainPatience;
  for (const size_t end : touching) {
    ends_[end].dead = true;
    drop_end(ends_[end], patience);
  }
  Pending* pending = find(serial);
  done_.push_back({id, Code::kCancelled, pending->moved, 0, false});
  std::erase_if(again_, [&](uint32_t number) {
    if (pieces_[number].serial != serial) return false;
    give_back(number);
    return true;
  });
  for (uint32_t number = 0; number < pieces_.size(); ++number) {
    if (pieces_[number].serial == serial && pieces_[number].landed) give_back(number);
  }
  // what still flies lands in staging memory, where it is not looked at
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

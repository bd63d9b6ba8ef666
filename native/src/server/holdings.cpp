#include "server/holdings.h"

#include <algorithm>
#include <utility>

namespace mooncache::server {

// Pins ------------------------------------------------------------------------------------------------

Result<Pinned> Holdings::acquire(TenantId tenant, const Key& key) {
  if (pins_full()) return {Code::kLimitExceeded, "the connection holds as many pins as it may"};
  auto pinned = store().acquire(tenant, key, loop_.now_ms());
  if (!pinned) return pinned;
  ++pins_;
  loop_.metrics.pins_held.add();
  return pinned;
}

void Holdings::release(PinId pin) {
  withdraw(static_cast<uint64_t>(pin), false);
  store().release(pin);
  --pins_;
  loop_.metrics.pins_held.sub();
}

void Holdings::release(const Hold& hold) {
  if (hold.kind == Hold::Kind::kPin) {
    release(hold.pin);
  } else if (hold.kind == Hold::Kind::kGrant) {
    PinGrant* grant = pin_grants_.find(static_cast<uint64_t>(hold.pin));
    if (grant == nullptr || --grant->sending > 0 || !grant->released) return;
    pin_grants_.erase(static_cast<uint64_t>(hold.pin));
    release(hold.pin);
  } else if (hold.kind == Hold::Kind::kRanges) {
    end_ranges(static_cast<uint64_t>(hold.pin));
  }
}

PinGrant* Holdings::find_pin(uint64_t grant) {
  PinGrant* found = pin_grants_.find(grant);
  return found != nullptr && !found->released ? found : nullptr;
}

void Holdings::release_grant(uint64_t grant) {
  PinGrant* found = find_pin(grant);
  if (found == nullptr) return;  // giving back twice does no harm
  found->released = true;
  if (found->sending > 0) return;
  pin_grants_.erase(grant);
  release(PinId{grant});
}

void Holdings::release_grants() {
  std::vector<uint64_t> grants;
  pin_grants_.for_each([&](uint64_t id, const PinGrant&) { grants.push_back(id); });
  for (const uint64_t id : grants) release_grant(id);
}

void Holdings::report_unreadable(PinId pin, const Status& why) {
  if (why.code == Code::kPinUnknown) return;  // the pin ended: nothing is wrong with the block
  loop_.metrics.blocks_unreadable.add();
  store().quarantine(pin);
  loop_.shared().log.push(40, "block_unreadable", why.message + "; the block is a miss now");
}

// Ranges of a transfer engine ---------------------------------------------------------------------------

uint64_t Holdings::hold_ranges(std::unique_ptr<RangeUse> use, RangesFor what) {
  if (ranges_.size() >= kMaxRangeUses) return 0;
  ranges_.emplace(next_use_, HeldRanges{std::move(use), what});
  return next_use_++;
}

bool Holdings::end_opened(uint64_t use) {
  const auto at = ranges_.find(use);
  if (at == ranges_.end() || at->second.what == RangesFor::kSending ||
      at->second.what == RangesFor::kReceiving)
    return false;
  ranges_.erase(at);
  return true;
}

bool Holdings::is_revoked(uint64_t use) const {
  const auto at = ranges_.find(use);
  return at != ranges_.end() && at->second.use->revoked();
}

bool Holdings::sends_revoked() const {
  return std::ranges::any_of(ranges_, [](const auto& item) {
    return item.second.what == RangesFor::kSending && item.second.use->revoked();
  });
}

bool Holdings::peer_writes() const {
  return std::ranges::any_of(ranges_,
                             [](const auto& item) { return item.second.what == RangesFor::kPeerWriting; });
}

// The writer ------------------------------------------------------------------------------------------

Holdings::~Holdings() {
  if (writer_ != 0) store().close_writer(writer_);
}

void Holdings::write_as(const BlockWriter& writer) {
  if (writer_ != 0) store().close_writer(writer_);
  writer_ = store().open_writer(writer);
}

// Reservations ----------------------------------------------------------------------------------------

Result<Reservation> Holdings::reserve(TenantId tenant, const Key& key, uint64_t size) {
  const ServerConfig& config = loop_.shared().config;
  const uint64_t limit = config.max_reserved_bytes_per_connection;
  if (size > limit) return {Code::kTooLarge, "larger than a connection may reserve"};
  if (reserved_bytes_ > limit - size || reservations_ >= config.max_reservations_per_connection) {
    return {Code::kLimitExceeded, "the connection holds as many reservations as it may"};
  }
  loop_.about_to_reserve();
  auto reservation = store().reserve(tenant, key, size, loop_.now_ms(), writer_);
  if (!reservation) return reservation;
  ++reservations_;
  reserved_bytes_ += size;
  loop_.metrics.reservations_held.add();
  loop_.metrics.reserved_bytes.add(size);
  return reservation;
}

void Holdings::uncount(uint64_t bytes) {
  --reservations_;
  reserved_bytes_ -= bytes;
  loop_.metrics.reservations_held.sub();
  loop_.metrics.reserved_bytes.sub(bytes);
}

Code Holdings::commit(const Reservation& reservation, uint32_t crc32c) {
  uncount(reservation.extent.size);
  return store().commit(reservation.id, crc32c, loop_.now_ms()).code;
}

void Holdings::abort(const Reservation& reservation) {
  uncount(reservation.extent.size);
  store().abort(reservation.id);
}

void Holdings::grant_reservation(const Reservation& reservation) {
  reservation_grants_.put(static_cast<uint64_t>(reservation.id), reservation.extent.size);
}

void Holdings::end_reservation(uint64_t grant, bool abort) {
  const uint64_t* bytes = reservation_grants_.find(grant);
  if (bytes == nullptr) return;
  uncount(*bytes);
  reservation_grants_.erase(grant);
  withdraw(grant, true);
  if (abort) store().abort(ReservationId{grant});
}

Code Holdings::commit_granted(const wire::CommitItem& item) {
  if (!has_reservation(item.reservation)) return Code::kReservationUnknown;
  const ReservationId id{item.reservation};
  const bool one_sided = (item.flags & wire::CommitItem::kFlagOneSided) != 0;
  const bool exposed = rdma_ && rdma_->is_exposed(item.reservation, true);
  if (one_sided && !may_write_memory_ && !exposed) {
    // It cannot have written: nothing was open to it, or, where no client maps the memory, nothing is
    // open now.
    const bool withdrawn = !store().addressable();
    if (withdrawn) end_reservation(item.reservation, true);
    return withdrawn ? Code::kNodeUnavailable : Code::kPermissionDenied;
  }
  withdraw(item.reservation, true);  // a visible block does not change
  Status status = one_sided && exposed ? store().arena_view().flush_device_writes() : Status::ok();
  const bool lost = !status;
  if (!lost) {
    status = one_sided ? store().commit(id, item.crc32c, loop_.now_ms())
                       : store().commit_written(id, item.crc32c, loop_.now_ms());
  }
  if (status.code == Code::kChecksumMismatch) loop_.metrics.crc_failures_in.add();
  end_reservation(item.reservation, lost);
  return status.code;
}

Code Holdings::abort_granted(uint64_t grant) {
  if (!has_reservation(grant)) return Code::kReservationUnknown;
  end_reservation(grant, true);
  return Code::kOk;
}

void Holdings::abort_all_granted() {
  std::vector<uint64_t> grants;
  reservation_grants_.for_each([&](uint64_t id, const uint64_t&) { grants.push_back(id); });
  for (const uint64_t id : grants) end_reservation(id, true);
}

// RDMA ------------------------------------------------------------------------------------------------

wire::RdmaAddress Holdings::connect(size_t at, const wire::RdmaAddress& peer) {
  Shared& shared = loop_.shared();
  if (!rdma_) rdma_ = std::make_unique<RdmaPeer>(shared.fabric, shared.rail_counters);
  return rdma_->connect(at, peer);
}

wire::Exposure Holdings::expose(uint64_t grant, bool writable, uint64_t& budget) {
  wire::Exposure exposure;
  exposure.code = Code::kTransportUnavailable;
  const auto pay = [&](uint64_t bytes) { loop_.spend(bytes, budget); };
  if (const auto device = device_extent(grant, writable)) {
    pay(rdma_->cost_to_expose(device->size));
    exposure = rdma_->expose(grant, *device, writable);
  } else if (const Slice memory = host_extent(grant, writable); memory.size > 0) {
    pay(rdma_->cost_to_expose(memory.size));
    exposure = rdma_->expose(grant, memory, writable);
  }
  loop_.metrics.rdma_exposed.add(exposure.code == Code::kOk ? 1 : 0);
  return exposure;
}

uint64_t Holdings::cost_to_withdraw(uint64_t grant, bool writable) const {
  return rdma_ ? rdma_->cost_to_withdraw(grant, writable) : 0;
}

void Holdings::withdraw(uint64_t grant, bool writable) {
  if (rdma_) rdma_->withdraw(grant, writable);
}

void Holdings::withdraw_all() {
  if (rdma_) rdma_->withdraw_all();
}

Slice Holdings::host_extent(uint64_t grant, bool writable) {
  if (writable) return store().writable(ReservationId{grant});
  const ConstSlice bytes = store().readable(PinId{grant});
  return {const_cast<std::byte*>(bytes.data), bytes.size};  // the device may read only
}

// Only while the GPU answers: reads by a grant on one that does not would fail.
std::optional<rdma::DeviceRange> Holdings::device_extent(uint64_t grant, bool writable) {
  const DeviceArena& arena = loop_.shared().device_arena;
  if (arena.address == 0 || store().arena_gone()) return std::nullopt;
  Extent extent;
  if (writable) {
    const auto reserved = store().reservation_extent(ReservationId{grant});
    if (reserved) extent = *reserved;
  } else if (const auto pinned = store().pin_info(PinId{grant}, loop_.now_ms())) {
    extent = pinned->extent;
  }
  if (extent.size == 0) return std::nullopt;
  return rdma::DeviceRange{arena.address + extent.offset, extent.size, arena.dma_buf_fd,
                           arena.dma_buf_offset + extent.offset, arena.no_dma_buf};
}

}  // namespace mooncache::server

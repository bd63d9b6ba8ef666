// What one peer holds of the store: pins on blocks that it reads, reservations that it writes, and what of
// them its devices reach over RDMA. Every count, limit and metric of these is kept here.
//
// The invariant: the store may use an extent again only after the peer's devices have lost it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/store.h"
#include "server/grant_map.h"
#include "server/loop.h"
#include "server/range_table.h"
#include "server/rdma_peer.h"
#include "wire/messages.h"

namespace mooncache::server {

// A pin that the peer holds.
struct PinGrant {
  std::vector<uint32_t> chunks;  // CRCs, when the whole block matched its own under this pin
  bool released = false;         // the peer is done with it, the output queue is not
  uint32_t sending = 0;          // pieces in the output queue
};

// Why a block stays where it is while bytes of it wait to be sent.
struct Hold {
  enum class Kind : uint8_t { kNone, kPin, kGrant, kRanges };
  Kind kind = Kind::kNone;
  PinId pin{};  // kRanges: the number of their use
};

class Holdings {
 public:
  Holdings(Loop& loop, bool may_write_memory) : loop_(loop), may_write_memory_(may_write_memory) {}
  ~Holdings();
  Holdings(const Holdings&) = delete;
  Holdings& operator=(const Holdings&) = delete;
  // Blocks that the peer writes are this writer's.
  void write_as(const BlockWriter& writer);

  // Pins.
  // LIMIT_EXCEEDED with as many as a connection may have, else what Store::acquire() says.
  Result<Pinned> acquire(TenantId tenant, const Key& key);
  bool pins_full() const { return pins_ >= loop_.shared().config.max_pins_per_connection; }
  void release(PinId pin);
  void release(const Hold& hold);
  // The peer holds the pin from now on, by its number.
  void grant_pin(PinId pin) { pin_grants_.put(static_cast<uint64_t>(pin), PinGrant{}); }
  // Null: the peer does not hold it, or no longer.
  PinGrant* find_pin(uint64_t grant);
  // The peer gives the pin back; it ends when nothing in the output queue needs it.
  void release_grant(uint64_t grant);
  // The same of all of them.
  void release_grants();
  // The device does not give the block of this pin back: it is as good as damaged.
  void report_unreadable(PinId pin, const Status& why);

  // Reservations.
  // NO_SPACE, LIMIT_EXCEEDED, TOO_LARGE, or what Store::reserve() says. Each one is ended by exactly one of
  // the calls below.
  Result<Reservation> reserve(TenantId tenant, const Key& key, uint64_t size);
  // Of a reservation that was never granted.
  Code commit(const Reservation& reservation, uint32_t crc32c);
  void abort(const Reservation& reservation);
  // The peer holds the reservation from now on, by its number.
  void grant_reservation(const Reservation& reservation);
  bool has_reservation(uint64_t grant) { return reservation_grants_.find(grant) != nullptr; }
  Code commit_granted(const wire::CommitItem& item);
  Code abort_granted(uint64_t grant);
  void abort_all_granted();

  // Ranges of a transfer engine. `kPeerReading`, `kPeerWriting`: the peer copies by itself.
  enum class RangesFor : uint8_t { kSending, kReceiving, kPeerReading, kPeerWriting };
  // The number of the use; 0: there are too many.
  uint64_t hold_ranges(std::unique_ptr<RangeUse> use, RangesFor what);
  void end_ranges(uint64_t use) { ranges_.erase(use); }
  // Of a peer that copies by itself. False: there is no such use.
  bool end_opened(uint64_t use);
  bool is_revoked(uint64_t use) const;
  // Bytes of revoked ranges wait to be sent.
  bool sends_revoked() const;
  void end_all_ranges() { ranges_.clear(); }

  bool empty() const { return pins_ == 0 && reservations_ == 0; }
  // The peer is a process of the node's own user on this host: it may have the arenas mapped, through this
  // connection or another one.
  bool may_write_memory() const { return may_write_memory_; }
  // It may still write to what it has reserved, which must not be used again before it is gone.
  bool must_linger() const { return may_write_memory_ && (reservations_ > 0 || peer_writes()); }

  // RDMA.
  // Answers endpoint `at` of the peer with one of ours.
  wire::RdmaAddress connect(size_t at, const wire::RdmaAddress& peer);
  bool connected() const { return rdma_ && rdma_->connected(); }
  // Grants to read are pins, grants to write are reservations; their numbers may be equal. What a step costs
  // is taken from `budget`, in bytes that could be checked in that time.
  wire::Exposure expose(uint64_t grant, bool writable, uint64_t& budget);
  uint64_t cost_to_withdraw(uint64_t grant, bool writable) const;
  void withdraw_all();
  // No device of the peer reaches anything from now on.
  void disconnect() { rdma_.reset(); }

 private:
  struct HeldRanges {
    std::unique_ptr<RangeUse> use;
    RangesFor what;
  };
  static constexpr size_t kMaxRangeUses = 256;

  bool peer_writes() const;
  Store& store() { return *loop_.shared().store; }
  void end_reservation(uint64_t grant, bool abort);
  void uncount(uint64_t bytes);
  void withdraw(uint64_t grant, bool writable);
  Slice host_extent(uint64_t grant, bool writable);
  std::optional<rdma::DeviceRange> device_extent(uint64_t grant, bool writable);

  Loop& loop_;
  const bool may_write_memory_;
  WriterNumber writer_ = 0;  // held
  GrantMap<PinGrant> pin_grants_;
  GrantMap<uint64_t> reservation_grants_;  // value: bytes
  uint32_t pins_ = 0;                      // grants, and blocks of a GET until they are sent
  uint32_t reservations_ = 0;              // grants, and those of a PUT in progress
  uint64_t reserved_bytes_ = 0;
  std::map<uint64_t, HeldRanges> ranges_;
  uint64_t next_use_ = 1;
  std::unique_ptr<RdmaPeer> rdma_;  // null until ENDPOINT
};

}  // namespace mooncache::server

// What the disk asks of the memory above it. The store answers; a test may.
#pragma once

#include <cstdint>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "mooncache/store.h"
#include "mooncache/types.h"

namespace mooncache::store::disk {

// A block in memory that is about to be evicted. It stays where it is until end_demotion().
struct ColdBlock {
  uint32_t slot = 0;
  TenantId tenant = 0;
  Key key;
  uint32_t size = 0;
  uint32_t crc32c = 0;
  uint32_t hits = 0;
  bool known_good = false;
  double chance = -1;  // of a use in the next two hours; below 0: the policy does not say
  uint32_t end = 0;    // of its life (end_of_life.h); 0: none
  Origin origin{};
};

// What a device can take now: `bytes` in all of blocks up to `small_bytes`, and one larger block.
struct ColdWish {
  uint64_t bytes = 0;
  uint64_t small_bytes = 0;
  bool takes_large = false;
};

// kReserved: within its share, so its blocks move on. kOver: they go first, read or not.
enum class Claim : uint8_t { kNone, kReserved, kOver };

enum class Demotion : uint8_t { kWritten, kRefused, kLater };

// From the disk's thread, which holds no lock then.
class Memory {
 public:
  virtual ~Memory() = default;
  // Coldest first, and only those of this device.
  virtual void take_cold(uint32_t device, const ColdWish& wish, std::vector<ColdBlock>& out) = 0;
  virtual Status copy_out(const ColdBlock& block, uint64_t offset, Slice to) = 0;
  virtual void end_demotion(const ColdBlock& block, Demotion end) = 0;

  // A block comes back: room for it, its bytes in any order, and its commit, which compares their CRC.
  virtual Result<Reservation> reserve(TenantId tenant, const Key& key, uint64_t size) = 0;
  virtual Status write(ReservationId id, uint64_t offset, ConstSlice from) = 0;
  // CHECKSUM_MISMATCH, INCOMPLETE; NOT_FOUND: it was removed meanwhile, or has ended; RESERVATION_UNKNOWN: it
  // was recalled. On each the room is given back. `end`, `origin`: as its record says them.
  virtual Code commit(ReservationId id, TenantId tenant, const Key& key, uint32_t crc, uint32_t end,
                      const Origin& origin) = 0;
  virtual void abort(ReservationId id) = 0;

  // The disk has the block from now on.
  virtual void written(TenantId tenant, const Key& key, uint64_t size) = 0;
  // It no longer has the block.
  virtual void lost(TenantId tenant, const Key& key, uint64_t size, RemoveReason reason) = 0;
  // What a tenant that has so many bytes on one disk may ask of it when room is made there. Without a lock of
  // the store.
  virtual Claim claim(TenantId, uint64_t) { return Claim::kNone; }
  // Whether the tenant may have so many bytes more on the disks.
  virtual bool may_hold(TenantId, uint64_t) { return true; }
  // A block that the disk gives up, for what lies below it. Its bytes are sound.
  virtual void hand_down(const ColdBlock&, std::vector<std::byte>) {}
  // It was removed while it was handed down.
  virtual void take_back(TenantId, const Key&) {}
  virtual void log(uint8_t level, const char* event, std::string message) = 0;
};

}  // namespace mooncache::store::disk

// Memory that a transfer engine has registered, who may read and write which parts of it, who is doing so
// now, and what peers have notified.
//
// The invariant: when remove() or revoke() has returned OK, no byte of the memory moves, in either
// direction, for the peers that it was about. Until then each transfer counts as a use.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "mooncache/types.h"
#include "store/memfd.h"
#include "wire/ranges.h"

namespace mooncache::server {

// `peer` is the name that a peer has proved, or "*": every peer that has proved one.
struct RangeGrant {
  std::string peer;
  uint64_t offset = 0;
  uint64_t length = 0;
  bool read = false;
  bool write = false;
};

struct MemoryRegion {
  uint64_t base = 0;
  Slice memory;
  std::string label;
  std::vector<RangeGrant> grants;
  std::shared_ptr<store::Memfd> memfd;  // `memory` is its mapping; null: it is memory of the caller
  bool mappable() const { return memfd != nullptr; }
};

struct PeerNotice {
  std::string peer;
  std::vector<std::byte> bytes;
};

class RangeTable;

// What one request of a peer uses. Ends when it is destroyed.
class RangeUse {
 public:
  RangeUse(RangeTable& table, std::string peer) : table_(table), peer_(std::move(peer)) {}
  ~RangeUse();
  RangeUse(const RangeUse&) = delete;
  RangeUse& operator=(const RangeUse&) = delete;
  // The memory is wanted back: stop, and end the use.
  bool revoked() const { return revoked_.load(std::memory_order_acquire); }
  const MemoryRegion& first_region() const { return *regions_.front(); }

 private:
  friend class RangeTable;
  RangeTable& table_;
  std::string peer_;
  std::vector<std::shared_ptr<MemoryRegion>> regions_;
  std::list<RangeUse*>::iterator at_;
  std::atomic<bool> revoked_{false};
};

class RangeTable {
 public:
  static constexpr size_t kMaxNotices = 4096;
  static constexpr size_t kMaxNoticeBytes = 16 << 20;  // waiting, of all together

  // The owner's side.
  // `base` 0: an address that no region had before. INVALID_ARGUMENT, LIMIT_EXCEEDED, ALREADY_EXISTS (it
  // overlaps with another one).
  Result<uint64_t> add(std::unique_ptr<MemoryRegion> region);
  // From now on no peer finds it. DEADLINE_EXCEEDED: peers still use the memory, which must not be given to
  // others; NOT_FOUND.
  Status remove(uint64_t base, Deadline deadline);
  Status grant(uint64_t base, RangeGrant grant);
  // Takes all grants to `peer` back; "*": those to every peer, named ones too.
  Status revoke(uint64_t base, const std::string& peer, Deadline deadline);
  size_t uses() const;
  // Waits until there is one. Empty: none came.
  std::vector<PeerNotice> take_notices(size_t most, Deadline deadline);
  // What `peer` may know; "": everything.
  std::vector<std::byte> describe(const std::string& peer) const;
  void set_endpoint(wire::EngineDescriptor endpoint);
  // Wakes take_notices() for good.
  void close();

  // The peers' side.
  // NOT_FOUND, PERMISSION_DENIED, or the use, with `places` one for each range.
  Result<std::unique_ptr<RangeUse>> begin(const std::string& peer, std::span<const wire::EngineRange> ranges,
                                          bool write, std::vector<std::byte*>& places);
  // Of the region at `address`, as a whole. UNSUPPORTED: it cannot be mapped.
  Result<std::unique_ptr<RangeUse>> map(const std::string& peer, uint64_t address, bool& writable);
  // BACK_PRESSURE: the owner does not take the notices.
  Status notify(PeerNotice notice);

 private:
  friend class RangeUse;
  using Regions = std::map<uint64_t, std::shared_ptr<MemoryRegion>>;
  std::shared_ptr<MemoryRegion> find(uint64_t address) const;
  std::unique_ptr<RangeUse> new_use(const std::string& peer);
  Status wait_unused(std::unique_lock<std::mutex>& lock, const MemoryRegion& region, const std::string& peer,
                     Deadline deadline);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Regions regions_;
  uint64_t next_base_ = 1ull << 40;
  std::list<RangeUse*> uses_;
  std::deque<PeerNotice> notices_;
  size_t notice_bytes_ = 0;
  bool closed_ = false;
  wire::EngineDescriptor endpoint_;
};

}  // namespace mooncache::server

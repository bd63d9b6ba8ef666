// Which holder (a store node, an engine) has which block: the master's directory, the conductor's
// and the simulator's view of the cluster. Fed with the block records that nodes report.
//
// Thread-safe: readers run side by side, writers take turns. A writer takes the lock for a bounded
// number of blocks, so a reader never waits for a whole report or for the removal of a whole node;
// it may therefore see a report half applied, which is harmless: the directory is a hint, nodes own
// the truth.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "mooncache/status.h"
#include "mooncache/types.h"

namespace mooncache {

// A block record, little endian: u8 kind | u8 tier | u8 reason | u8 flags | u32 reserved |
// u64 tenant | u64 size in bytes | 32-byte key. Reason and flags do not matter here.
inline constexpr size_t kIndexRecordBytes = 56;
inline constexpr uint8_t kRecordAdd = 1;
inline constexpr uint8_t kRecordRemove = 2;
inline constexpr uint8_t kRecordMove = 3;  // to another tier; adds a block that was not known

inline constexpr uint32_t kIndexHoldersMax = 65'535;               // holder numbers are below this
inline constexpr uint64_t kIndexBlockBytesMax = (1ull << 40) - 1;  // size of one block
inline constexpr size_t kIndexApplyRecordsMax = 1 << 20;           // records in one call
inline constexpr size_t kIndexTiers = 4;

struct BlockIndexOptions {
  // Keys may be chosen by users; a secret seed keeps them from choosing collisions.
  uint64_t hash_seed = 0;
  uint64_t blocks_max = 1ull << 31;
};

struct BlockReplica {
  uint16_t holder = 0;
  Tier tier = Tier::kHbm;
  uint64_t size_bytes = 0;
  bool operator==(const BlockReplica&) const = default;
};

// How much of a chain of keys one holder has.
struct HolderMatch {
  uint32_t holder = 0;
  // [t]: how many leading blocks it holds in tier t or a faster one; the last number is the whole run.
  std::array<uint32_t, kIndexTiers> run_up_to_tier{};
  uint32_t leading_blocks() const { return run_up_to_tier[kIndexTiers - 1]; }
};

struct IndexMatch {
  std::vector<HolderMatch> holders;  // those that hold the first key, longest run first, then by number
  uint32_t leading_run = 0;          // leading keys that anyone holds
};

struct IndexUsage {
  uint64_t blocks = 0;
  uint64_t bytes = 0;
  bool operator==(const IndexUsage&) const = default;
};

struct IndexStats {
  uint64_t blocks = 0;  // distinct (tenant, key)
  uint64_t replicas = 0;
  uint64_t bytes = 0;         // of all replicas
  uint64_t memory_bytes = 0;  // of the index itself
  uint64_t records_applied = 0;
  uint64_t popular_blocks = 0;  // with more replicas than fit in line
};

// What an audit looks for.
inline constexpr uint16_t kNoDomain = 0xffff;
struct IndexAudit {
  std::vector<std::pair<TenantId, uint32_t>> wanted;  // copies of each block of a tenant, sorted by tenant
  uint32_t wanted_of_others = 1;                      // below 2: the tenant's blocks are not looked at
  std::vector<uint16_t> domains;  // by holder: what fails together; kNoDomain: its copies do not count
  uint32_t domain_count = 1;      // domains that there are: no block can have copies in more
};

// A block with fewer copies than wanted, or (`close`) with enough of them in too few domains.
struct AuditedBlock {
  TenantId tenant = 0;
  Key key;
  uint64_t size_bytes = 0;
  uint16_t copies = 0;     // that count, at least 1
  Tier tier = Tier::kHbm;  // the fastest one that holds a copy
  bool close = false;
};

struct AuditPage {
  uint32_t next = 0;  // where to go on; 0: the whole index was seen
  uint64_t short_blocks = 0;
  uint64_t missing_bytes = 0;  // of all copies that are missing
  uint64_t close_blocks = 0;
  uint64_t close_bytes = 0;
  std::vector<AuditedBlock> found;
};

class BlockIndex {
 public:
  explicit BlockIndex(BlockIndexOptions options = {});
  ~BlockIndex();
  BlockIndex(const BlockIndex&) = delete;
  BlockIndex& operator=(const BlockIndex&) = delete;

  // Applies packed records in order. Adding what is there and removing what is not change nothing.
  // Refused as a whole, with nothing applied: INVALID_ARGUMENT for a holder out of range, a length
  // that is not a multiple of 56, an unknown kind or tier; TOO_LARGE for a block above 2^40 - 1 bytes;
  // LIMIT_EXCEEDED for too many records in one call or too many blocks in the index.
  Status apply(uint32_t holder, std::span<const std::byte> records);

  // Between begin_full and end_full the holder reports everything that it has; end_full drops what it
  // did not mention and returns how many blocks that were. A second begin_full starts over.
  // INVALID_ARGUMENT for a holder out of range, or for end_full without begin_full.
  Status begin_full(uint32_t holder);
  Result<uint64_t> end_full(uint32_t holder);

  // Forgets all blocks of a holder, and a full report that it had begun; returns how many blocks.
  Result<uint64_t> drop_holder(uint32_t holder);

  // For each key its replicas, at most `holders_max` of them. Keys are 32 bytes each.
  // INVALID_ARGUMENT when the length of `keys` is not a multiple of 32.
  Result<std::vector<std::vector<BlockReplica>>> locate(TenantId tenant, std::span<const std::byte> keys,
                                                        uint32_t holders_max = kIndexHoldersMax) const;
  // The same, packed: for each key u16 count, then count times {u16 holder, u8 tier, u8 0, u64 size}.
  Result<std::vector<std::byte>> locate_packed(TenantId tenant, std::span<const std::byte> keys,
                                               uint32_t holders_max = kIndexHoldersMax) const;

  // Leading runs of a chain of keys. Stops at the first key that no holder has.
  Result<IndexMatch> match(TenantId tenant, std::span<const std::byte> keys) const;

  // Bit i % 8 of byte i / 8 is set when anyone holds key i.
  Result<std::vector<std::byte>> present(TenantId tenant, std::span<const std::byte> keys) const;

  // Looks at up to `entries_max` entries from `start` on (0, or `next` of the page before), and stops behind
  // `found_max` blocks; with 0 it only counts. Blocks without any copy that counts are left out.
  AuditPage audit(const IndexAudit& audit, uint32_t start, uint32_t entries_max, size_t found_max) const;

  // Blocks are counted once, bytes once per replica. Sorted by tenant; only tenants that have blocks.
  std::vector<std::pair<TenantId, IndexUsage>> tenant_usage() const;
  // Sorted by holder; only holders that have blocks.
  std::vector<std::pair<uint32_t, IndexUsage>> holder_usage() const;
  IndexStats stats() const;
  uint64_t memory_bytes() const { return stats().memory_bytes; }

  // Verifies every invariant; "" or the first one that does not hold. Linear in the index.
  std::string check() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mooncache

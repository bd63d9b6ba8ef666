// What lies in memory that outlives the process: one record for each slot, in a memory file of its own.
//
// A record becomes valid by one store of its seal, a checksum of everything that the seal stands for. So a
// process that is killed at any moment leaves the former state of a record, or the next one:
//   none -> reserved (a client may write the extent) -> committed (a block) -> none
// and each of them may become purged (no block, its bytes are still to be overwritten) before it is none.
// The owner calls commit() behind the last byte of a block, and clear() before anything else can use its
// memory. What a former process left is input like any other: adopt() and read() believe nothing.
// Not thread-safe for one slot: the lock of its shard guards it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mooncache/status.h"
#include "mooncache/types.h"
#include "store/memfd.h"

namespace mooncache::store {

inline constexpr uint32_t kCatalogueVersion = 1;

// Memory of another shape is not adopted.
struct CatalogueShape {
  std::string node_id;
  uint32_t quantum_bytes = 0;
  uint32_t shards = 0;
  uint64_t slots = 0;
  uint64_t capacity_bytes = 0;
  std::vector<uint64_t> arena_bytes;
};

// Former versions take a purged record for a damaged one: they give its memory free as it is.
enum class Kept : uint8_t { kEmpty = 0, kReserved = 1, kCommitted = 2, kDamaged = 3, kPurged = 4 };

struct KeptRecord {
  Key key;
  TenantId tenant = 0;
  uint64_t size = 0;
  uint64_t committed_ms = 0;
  uint64_t generation = 0;
  uint32_t offset = 0;  // quanta
  uint32_t crc = 0;
  uint32_t arena = 0;
  uint32_t written_s = 0;  // Origin::written_s; no seal covers it, and without a writer it says nothing
};

class Catalogue {
 public:
  using Seeds = std::array<uint64_t, 4>;  // of the hash that spreads keys over slots

  Catalogue() = default;
  static Result<Catalogue> create(const CatalogueShape& shape, const Seeds& seeds);
  // CONFIG_INVALID with the reason: damaged, of another version, of another shape. ALREADY_EXISTS: a process
  // that lives has it.
  static Result<Catalogue> adopt(int fd, const CatalogueShape& shape);

  bool is_open() const { return file_.data() != nullptr; }
  const Memfd& file() const { return file_; }
  const Seeds& seeds() const { return seeds_; }
  // Number of the process that uses the memory, from 1.
  uint64_t session() const { return session_; }

  // The record will be written soon.
  void prefetch(uint32_t slot) const;
  // Unchecked: for what a wrong value cannot harm.
  const KeptRecord& content(uint32_t slot) const;
  void reserve(uint32_t slot, const KeptRecord& record, uint16_t writer = 0);
  // The slot is reserved.
  void commit(uint32_t slot, uint32_t crc, uint64_t generation, uint64_t committed_ms,
              uint32_t written_s = 0);
  void clear(uint32_t slot);
  // What was reserved or committed here, also if it was cleared since. The caller overwrites its bytes, then
  // calls clear().
  void purge(uint32_t slot);
  // How warm a block is, and the number of its writer. A hint, which no seal covers; former versions take the
  // writer for a part of the tick.
  void note_use(uint32_t slot, uint64_t tick, uint8_t queue, uint16_t writer = 0);
  // A committed block's writer is another one from now on.
  void set_origin(uint32_t slot, uint64_t tick, uint8_t queue, uint16_t writer, uint32_t written_s);
  // The id behind a writer's number, 0: none. Behind the header, where former versions have zeros.
  void set_writer(uint16_t number, uint64_t id);
  uint64_t writer(uint16_t number) const;

  struct Found {
    Kept kind = Kept::kEmpty;
    KeptRecord record;
    uint64_t tick = 0;
    uint8_t queue = 0;
    uint16_t writer = 0;
  };
  Found read(uint32_t slot) const;
  // The first slot from `from` on that may have a record; none: `slots`. Touches no memory that was never
  // written.
  struct Range {
    uint64_t begin = 0, end = 0;
  };
  Range next_used(uint64_t from) const;

 private:
  struct Record;
  Record& record_of(uint32_t slot) const;
  Memfd file_;
  Seeds seeds_{};
  uint64_t slots_ = 0;
  uint64_t session_ = 0;
};

// A committed record as the store of `shape` may take it over: "" or what is wrong with it.
const char* wrong_with(const KeptRecord& record, const CatalogueShape& shape, uint64_t max_block_bytes);

}  // namespace mooncache::store

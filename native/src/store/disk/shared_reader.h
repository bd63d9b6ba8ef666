// What other nodes wrote into the shared directory: found by a scan of it, read when it is asked for.
//
// Any thread asks (find, fetch, forget); they take one short lock and never wait for the file system. Threads
// of its own make the calls that may block, a watch looks how long they take. What it promises:
//   - a block that is read has the key that was asked for and its CRC, or it is a miss;
//   - nothing is written;
//   - a directory that does not answer for `stall_ms`, cannot be listed, or fails several times in a row, has
//   no
//     blocks until a whole scan succeeds;
//   - close() does not wait for a call that hangs: its thread is left behind, and touches nothing when it
//   ends.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "store/disk/end_of_life.h"
#include "store/disk/keyring.h"
#include "store/disk/memory.h"
#include "store/disk/shared_folder.h"

namespace mooncache::store::disk {

struct SharedOptions {
  std::shared_ptr<SharedFolder> folder;
  std::string own_name;     // of the log that this node writes, which is not read here
  uint32_t scan_ms = 2000;  // from the end of one scan to the begin of the next
  uint32_t stall_ms = 500;
  uint32_t scan_stall_ms = 0;              // the same for calls of the scan; 0: as above
  uint32_t threads = 8;                    // that read
  uint64_t call_bytes = 1 << 20;           // of one call, whose time the watch measures
  uint32_t most_blocks = 16u << 20;        // in the index: 1 GiB
  std::shared_ptr<const Keyring> keyring;  // null: nothing encrypted is read
  WallClock wall_clock;                    // by which blocks with a TTL end; empty: the system's
};

struct SharedStats {
  uint64_t writers = 0, blocks = 0, block_bytes = 0, index_bytes = 0, left_out = 0;
  uint64_t reads = 0, read_bytes = 0, read_misses = 0, corrupt = 0, stale = 0;
  uint64_t key_misses = 0, decrypt_failures = 0;  // see DeviceStats
  uint64_t io_errors = 0, stalls = 0, scans = 0, refused_files = 0;
  uint64_t answering = 0;  // 1: it serves
};
using SharedCounter = uint64_t SharedStats::*;
// With the names under which they are shown.
inline constexpr std::pair<std::string_view, SharedCounter> kSharedCounters[] = {
    {"writers", &SharedStats::writers},
    {"other_blocks", &SharedStats::blocks},
    {"other_block_bytes", &SharedStats::block_bytes},
    {"other_index_bytes", &SharedStats::index_bytes},
    {"other_left_out", &SharedStats::left_out},
    {"other_reads", &SharedStats::reads},
    {"other_read_bytes", &SharedStats::read_bytes},
    {"other_read_misses", &SharedStats::read_misses},
    {"other_corrupt_blocks", &SharedStats::corrupt},
    {"other_stale_reads", &SharedStats::stale},
    {"other_key_misses", &SharedStats::key_misses},
    {"other_decrypt_failures", &SharedStats::decrypt_failures},
    {"other_io_errors", &SharedStats::io_errors},
    {"other_stalls", &SharedStats::stalls},
    {"scans", &SharedStats::scans},
    {"refused_files", &SharedStats::refused_files},
    {"answering", &SharedStats::answering},
};

class SharedReader {
 public:
  using Done = std::function<void()>;

  SharedReader(SharedOptions options, Memory& memory);
  ~SharedReader();  // close()
  SharedReader(const SharedReader&) = delete;
  SharedReader& operator=(const SharedReader&) = delete;

  // Size of the block.
  std::optional<uint64_t> find(TenantId tenant, const Key& key) const;
  // Brings the block into memory; `done` is called once, from a thread of its own, whether it came or not.
  // False: it is not here, or too many are asked for; of those without a reader yet (`ahead`) fewer.
  bool fetch(TenantId tenant, const Key& key, Done done, bool ahead = false);
  // Not served from what is known now, before the next start. Whether it was here.
  bool forget(TenantId tenant, const Key& key);
  void forget(TenantId tenant);
  void forget_by(uint64_t writer);
  void close();
  SharedStats stats() const;

  struct State;

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace mooncache::store::disk

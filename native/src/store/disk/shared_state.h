// Behind SharedReader: what its threads share. It lives as long as the last of them, which may be later than
// the reader.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "store/disk/segment_reader.h"
#include "store/disk/shared_index.h"
#include "store/disk/shared_reader.h"

namespace mooncache::store::disk {

uint64_t shared_now_ms();

struct SharedReader::State {
  using Lock = std::unique_lock<std::mutex>;
  using Name = std::pair<TenantId, Key>;

  // A log as reads need it.
  struct Log {
    std::shared_ptr<SharedFile> file;  // null: not to be read now
    Superblock layout;
  };
  struct Fetch {
    TenantId tenant = 0;
    Key key;
    uint32_t size = 0, place = 0, unit = 0, number = 0;
    uint64_t sequence = 0;
    bool sealed = false;
    uint32_t end = 0;
    uint32_t log = 0;
    std::shared_ptr<SharedFile> file;
    Uuid uuid{};
    uint64_t segment_bytes = 0;
    std::vector<Done> waiting;
  };
  struct Thread {
    std::thread thread;
    uint64_t call_since_ms = 0;  // of a call that is under way; 0: none
    bool ended = false;
  };

  State(SharedOptions options_in, Memory& memory_in);

  // --- shared_reader.cpp: any thread ---
  // It was not given up meanwhile.
  bool is_wanted(const Fetch& fetch) const {
    const auto known = fetches.find({fetch.tenant, fetch.key});
    return known != fetches.end() && known->second.get() == &fetch;
  }
  void tell(Lock& lock, std::vector<Done> waiting);
  // Those who wait hear of it, without the lock.
  void end(Lock& lock, const std::shared_ptr<Fetch>& fetch);
  void fail_all(Lock& lock);
  void log(Lock& lock, uint8_t level, const char* event, std::string message);
  // Runs `use` without the lock; close() waits for its end. False: it is closed.
  template <typename Use>
  bool outside(Lock& lock, const Use& use) {
    if (closing) return false;
    ++inside;
    Memory& above = *memory;
    lock.unlock();
    use(above);
    lock.lock();
    if (--inside == 0 && closing) changed.notify_all();
    return true;
  }
  // One call that may block, in the name of thread `me`. What it returns counts as soon as it ends.
  template <typename Call>
  auto timed(size_t me, const Call& call) {
    {
      const Lock lock(mutex);
      threads[me].call_since_ms = shared_now_ms();
    }
    auto result = call();
    const Lock lock(mutex);
    threads[me].call_since_ms = 0;
    return result;
  }
  // The lock is held. Nothing: it is not here, its time is over, or the tenant has no key that it could be
  // read with.
  std::optional<SharedIndex::Found> find_readable(TenantId tenant, const Key& key) const {
    const auto found = index.find(tenant, key);
    if (found && found->end != 0 && is_over(found->end, wall_ms(options.wall_clock))) return std::nullopt;
    const bool is_locked =
        found && found->encrypted && (options.keyring == nullptr || !options.keyring->has_key(tenant));
    return is_locked ? std::nullopt : found;
  }
  // Of a call that answered: negative is -errno.
  void count_answer(Lock& lock, int64_t result);

  // --- shared_fetch.cpp: the threads that read ---
  void read_blocks(size_t me);
  int64_t read_pieces(size_t me, const Fetch& fetch, uint64_t begin, std::span<std::byte> to);
  // What a record that was read is worth: to be asked without the lock.
  struct Checked {
    bool same = false;     // the record that was asked for
    bool keyless = false;  // its key is not here
    bool sound = false;    // its payload is what was written, decrypted by now
    bool forged = false;   // not what was encrypted with its key
    uint32_t crc32c = 0;
    Origin origin{};
  };
  Checked check(const Fetch& fetch, RecordCipher& cipher, std::span<std::byte> record) const;
  void conclude(Lock& lock, const std::shared_ptr<Fetch>& fetch, int64_t got, const Checked& checked,
                std::span<const std::byte> payload);
  Code bring_up(Lock& lock, const Fetch& fetch, const Checked& checked, std::span<const std::byte> payload);

  // --- shared_reader.cpp: the thread that watches ---
  void watch();

  // --- shared_scan.cpp: the thread that scans ---
  struct Segment {
    uint64_t sequence = 0;  // 0: not in use
    uint32_t place = kNone;
    uint32_t walked = kFirstUnit;  // records before this unit are known
    bool sealed = false;
  };
  struct Known {
    uint32_t log = kNone;  // in `logs`
    SharedFile::Version version;
    uint64_t version_since_ms = 0;
    bool refused = false;
    Superblock layout;
    std::vector<Segment> segments;
  };
  struct Scan;
  void scan_for_ever(size_t me);

  const SharedOptions options;
  mutable std::mutex mutex;
  std::condition_variable changed, work;
  Memory* const memory;  // not to be used once `closing` is set and `inside` is 0
  bool closing = false;
  uint32_t inside = 0;
  SharedIndex index;
  std::vector<Log> logs;
  std::map<Name, std::shared_ptr<Fetch>> fetches;
  std::deque<std::shared_ptr<Fetch>> queue;
  std::vector<Thread> threads;
  SharedStats count;
  bool answering = false;
  uint32_t errors_in_row = 0;
  uint64_t refused_until_scan = 0;  // scans that have to end before it answers
};

}  // namespace mooncache::store::disk

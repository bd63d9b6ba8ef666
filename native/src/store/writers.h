// Who wrote the blocks of this node: processes, by a number each. Entries of the memory keep the number;
// records of disks keep the id, because numbers end with the process.
//
// A number belongs to its writer as long as something holds it: a connection, or an entry of the memory. What
// nothing holds is remembered until its place is needed. When all numbers are held a new writer gets none:
// its blocks are those of writer 0, "unknown".
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "mooncache/store.h"

namespace mooncache::store {

class Writers {
 public:
  // The number of a writer, held once more. What it says of itself is remembered when nothing was known. 0:
  // it has no id, or there is no number for it.
  WriterNumber open(const BlockWriter& writer);
  // The caller holds the number already, or nothing changes the table meanwhile.
  void hold(WriterNumber number) {
    if (number != 0) slots_[number].holds.fetch_add(1, std::memory_order_relaxed);
  }
  void release(WriterNumber number) {
    if (number != 0) slots_[number].holds.fetch_sub(1, std::memory_order_release);
  }
  // A block became visible, or is no longer.
  void appeared(WriterNumber number, uint64_t bytes, uint32_t written_s);
  void went(WriterNumber number, uint64_t bytes);
  uint64_t id_of(WriterNumber number) const { return slots_[number].id.load(std::memory_order_relaxed); }
  WriterNumber find(uint64_t id) const;  // 0: not in the table
  // In memory only, by number; writer 0 when it has blocks.
  std::vector<WriterUse> uses() const;
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  // What a former process left in its place. Ids that are there already are left out.
  void restore(WriterNumber number, uint64_t id);
  // Called under the lock when a number gets a writer. Set it before the table is used.
  std::function<void(WriterNumber, uint64_t id)> on_assigned;

 private:
  struct Slot {
    std::atomic<uint64_t> id{0}, holds{0}, blocks{0}, bytes{0};
    std::atomic<uint32_t> first_s{0}, last_s{0};
    uint64_t turn = 0;  // when it was opened last
    BlockWriter said;
  };
  WriterNumber number_for(uint64_t id);

  mutable std::mutex mutex_;
  std::array<Slot, kMaxWriters + 1> slots_;  // the first one counts blocks of unknown writers
  uint64_t turns_ = 0;
  std::atomic<uint64_t> refused_{0};
};

// Which writes are recalled: blocks of these writers and times no longer become visible, wherever
// they come from. What is forgotten first is the oldest that has an end.
class Recalls {
 public:
  static constexpr size_t kRemembered = 256;
  static constexpr uint32_t kNoEnd = ~uint32_t{0};

  void add(uint64_t writer, uint32_t since_s, uint32_t until_s);
  void lift(uint64_t writer);  // forgets what has no end
  bool covers(uint64_t writer, uint32_t written_s) const;

 private:
  struct One {
    uint64_t writer = 0;
    uint32_t since_s = 0, until_s = 0;
  };
  mutable std::mutex mutex_;
  std::atomic<size_t> count_{0};
  std::vector<One> all_;
};

}  // namespace mooncache::store

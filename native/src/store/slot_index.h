// Open addressing from a hash to 26-bit entry numbers, with 6 bits of the hash beside each so that most
// probes of other keys cost no entry access. Linear probing, deletion by backward shift (no tombstones).
// 4.6 to 9.2 bytes per block. The owner supplies equality and the hash of an entry; its lock guards this.
//
// It grows in steps: a full table stays beside one twice its size, and each insert moves some of its cells,
// so that no insert waits for all of them. An entry is in exactly one of the two tables; both keep the
// invariant of linear probing (no empty cell between a cell's home and the cell).
#pragma once

#include <cstdint>
#include <utility>

#include "store/slab.h"
#include "store/zeroed_array.h"

namespace mooncache::store {

class SlotIndex {
 public:
  static constexpr uint32_t kEntryBits = 26;
  static constexpr uint32_t kMaxEntries = (1u << kEntryBits) - 1;

  template <typename Equal>
  uint32_t find(uint64_t hash, const Equal& equal) const {
    const uint32_t found = find_in(cells_, hash, equal);
    return found != kNone || old_.empty() ? found : find_in(old_, hash, equal);
  }

  // The key must be absent.
  template <typename HashOf>
  void insert(uint64_t hash, uint32_t entry, const HashOf& hash_of) {
    if (!old_.empty()) {
      move_some(hash_of);
    } else if ((count_ + 1) * 8 > cells_.size() * 7) {
      grow();
    }
    place(hash, entry);
    ++count_;
  }

  // Room for so many entries, so that inserts up to there move nothing. The index must be empty.
  void reserve(uint32_t entries) {
    size_t cells = 16;
    while (uint64_t{entries} * 8 > cells * 7) cells *= 2;
    if (cells > cells_.size()) cells_ = Cells(cells);
  }

  // Where a find or an insert of this hash begins.
  void prefetch(uint64_t hash) const {
    if (!cells_.empty()) __builtin_prefetch(&cells_[home(cells_, hash)], 1);
  }

  template <typename HashOf>
  void erase(uint64_t hash, uint32_t entry, const HashOf& hash_of) {
    const uint32_t cell = cell_of(hash, entry);
    size_t at = cells_.empty() ? kAbsent : place_of(cells_, hash, cell);
    if (at != kAbsent) {
      take_out(cells_, at, hash_of);
    } else {
      at = place_of(old_, hash, cell);
      take_out(old_, at, hash_of);
    }
    --count_;
  }

  uint32_t count() const { return count_; }
  bool growing() const { return !old_.empty(); }
  uint64_t memory_bytes() const { return cells_.bytes() + old_.bytes(); }

 private:
  using Cells = ZeroedArray<uint32_t>;
  static constexpr uint32_t kEmpty = 0;
  static constexpr size_t kAbsent = ~size_t{0};
  // The larger table has room for as many entries again as the smaller one holds: two cells an insert would
  // be enough to be done in time.
  static constexpr size_t kMovedPerInsert = 8;
  static constexpr size_t kReleasedCells = 64 << 10;

  // Inverted, so that no entry looks like an empty cell of zeroed memory: that would be tag 63 of the entry
  // past the last one.
  static uint32_t cell_of(uint64_t hash, uint32_t entry) {
    return ~((static_cast<uint32_t>(hash >> 58) << kEntryBits) | entry);
  }
  static uint32_t entry_of(uint32_t cell) { return ~cell & kMaxEntries; }
  static size_t home(const Cells& cells, uint64_t hash) {
    return static_cast<size_t>(hash >> 8) & (cells.size() - 1);
  }

  template <typename Equal>
  static uint32_t find_in(const Cells& cells, uint64_t hash, const Equal& equal) {
    if (cells.empty()) return kNone;
    const uint32_t tag = cell_of(hash, 0) >> kEntryBits;
    for (size_t at = home(cells, hash);; at = (at + 1) & (cells.size() - 1)) {
      const uint32_t cell = cells[at];
      if (cell == kEmpty) return kNone;
      if (cell >> kEntryBits == tag && equal(entry_of(cell))) return entry_of(cell);
    }
  }
  static size_t place_of(const Cells& cells, uint64_t hash, uint32_t cell) {
    for (size_t at = home(cells, hash);; at = (at + 1) & (cells.size() - 1)) {
      if (cells[at] == cell) return at;
      if (cells[at] == kEmpty) return kAbsent;
    }
  }
  template <typename HashOf>
  static void take_out(Cells& cells, size_t at, const HashOf& hash_of) {
    const size_t mask = cells.size() - 1;
    for (size_t next = (at + 1) & mask; cells[next] != kEmpty; next = (next + 1) & mask) {
      const size_t wants = home(cells, hash_of(entry_of(cells[next])));
      // May move back to `at` unless its home lies cyclically in (at, next].
      if (((next - wants) & mask) < ((next - at) & mask)) continue;
      cells[at] = cells[next];
      at = next;
    }
    cells[at] = kEmpty;
  }
  void place(uint64_t hash, uint32_t entry) {
    size_t at = home(cells_, hash);
    while (cells_[at] != kEmpty) at = (at + 1) & (cells_.size() - 1);
    cells_[at] = cell_of(hash, entry);
  }
  void grow() {
    Cells larger(cells_.empty() ? 16 : cells_.size() * 2);
    old_ = std::exchange(cells_, std::move(larger));
    swept_ = 0;
  }
  // All cells before `swept_` are empty.
  template <typename HashOf>
  void move_some(const HashOf& hash_of) {
    for (size_t step = 0; step < kMovedPerInsert && swept_ < old_.size(); ++step) {
      const uint32_t cell = old_[swept_];
      if (cell == kEmpty) {
        ++swept_;
        if (swept_ % kReleasedCells == 0) old_.release(swept_ - kReleasedCells, swept_);
        continue;
      }
      const uint64_t hash = hash_of(entry_of(cell));
      take_out(old_, swept_, hash_of);
      place(hash, entry_of(cell));
    }
    if (swept_ == old_.size()) old_ = Cells();
  }

  Cells cells_;
  Cells old_;  // while it grows: what has not moved yet
  size_t swept_ = 0;
  uint32_t count_ = 0;
};

}  // namespace mooncache::store

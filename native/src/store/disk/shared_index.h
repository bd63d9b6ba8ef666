// Which blocks lie in the logs of other nodes, as their footers and records say. No I/O; its owner's lock
// guards it.
//
// A writing of a segment is a place (`number` of a `file`, with its sequence); every entry belongs to one. A
// dropped place makes its entries invisible at once; sweep() takes them out later, in steps.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "store/disk/format.h"
#include "store/disk/index.h"

namespace mooncache::store::disk {

class SharedIndex {
 public:
  struct Found {
    uint32_t size = 0;
    uint32_t place = 0;
    uint32_t unit = 0;
    bool sealed = false;
    bool encrypted = false;
    uint32_t end = 0;
  };
  struct Place {
    uint32_t file = 0;
    uint32_t number = 0;
    uint64_t sequence = 0;
    enum class State : uint8_t { kFree, kLive, kDropped } state = State::kFree;
  };

  SharedIndex(uint64_t seed, uint32_t most_blocks) : entries_(seed), most_blocks_(most_blocks) {}

  std::optional<Found> find(TenantId tenant, const Key& key) const {
    const uint32_t number = entries_.find(tenant, key);
    if (number == kNone) return std::nullopt;
    const DiskEntry& entry = entries_[number];
    if (places_[entry.segment].state != Place::State::kLive) return std::nullopt;
    return Found{entry.size, entry.segment, entry.next, entry.written != 0, entry.encrypted != 0, entry.end};
  }
  const Place& place(uint32_t place) const { return places_[place]; }

  // kNone: there are too many.
  uint32_t add_place(uint32_t file, uint32_t number, uint64_t sequence);
  void drop_place(uint32_t place) {
    places_[place].state = Place::State::kDropped;
    has_dropped_ = true;
  }
  bool has_dropped() const { return has_dropped_; }  // places that nothing can use before a sweep

  // A record as its place says it. `known_to`: units before it were read before, record by record, and what
  // was removed since must not come back. `minute`: now (end_of_life.h).
  void take(uint32_t place, const RecordHeader& header, uint32_t unit, bool sealed, uint32_t known_to,
            uint32_t minute = 0);
  // The block, if it lies there; kNone: wherever it lies. Whether it was here.
  bool forget(TenantId tenant, const Key& key, uint32_t place = kNone, uint32_t unit = 0);

  // Takes entries of dropped places out, those of `tenant` or `writer`, and those that have ended by
  // `minute`; looks at the entries from `from` on. Where to go on; 0: that was all, and places that were
  // dropped before the first step can be used again by end_sweep().
  uint32_t sweep(uint32_t from, std::optional<TenantId> tenant = {}, uint32_t minute = 0,
                 uint64_t writer = 0);
  void end_sweep();

  uint32_t blocks() const { return entries_.count(); }
  uint32_t with_end() const { return entries_.with_end(); }
  uint64_t bytes() const { return entries_.bytes(); }
  uint64_t memory_bytes() const { return entries_.memory_bytes() + places_.capacity() * sizeof(Place); }
  uint64_t left_out() const { return left_out_; }  // records that there was no room for

 private:
  static constexpr uint32_t kMostPlaces = 65'535;
  static constexpr uint32_t kSweptPerStep = 16'384;

  DiskIndex entries_;  // its segments are places here
  std::vector<Place> places_;
  std::vector<uint32_t> free_;
  const uint32_t most_blocks_;
  bool has_dropped_ = false;
  uint64_t left_out_ = 0;
};

}  // namespace mooncache::store::disk

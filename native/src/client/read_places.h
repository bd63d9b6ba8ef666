// Where one get reads its blocks: of the places that are known, and of those that are likely, the best one
// that was not tried.
#pragma once

#include <algorithm>
#include <optional>

#include "client/impl.h"

namespace mooncache {

class ReadPlaces {
 public:
  static constexpr uint64_t kUnsizedBytes = 128 << 10;  // taken for the size of blocks that is not known

  // `tried`: per item the positions where it was asked for.
  ReadPlaces(Client::Impl& impl, const GetBatch& batch, const NodeMap& map,
             const std::vector<std::vector<uint32_t>>& tried)
      : usual_bytes(impl.usual_bytes.load(std::memory_order_relaxed)),
        impl_(impl),
        batch_(batch),
        map_(map),
        tried_(tried) {}

  const uint64_t usual_bytes;  // of a block, lately

  void new_round() {
    ranks_.reset();
    preferred_.clear();
  }

  // What a block comes to, as far as that is known; 0 = not at all.
  uint64_t expected_bytes(uint32_t item) const {
    if (!batch_.how->allocate) return batch_.capacity(item);
    return batch_.known_bytes[item] > 0 ? batch_.known_bytes[item] : usual_bytes;
  }

  bool was_tried(uint32_t item, uint32_t position) const {
    return std::find(tried_[item].begin(), tried_[item].end(), position) != tried_[item].end();
  }

  // Where to read an item next: one of its known places, else a guess; kNoNode when there is none left. While
  // that node is slow, or takes up reads again, it is another one, if there may be a copy.
  uint32_t next(uint32_t item, bool count) {
    const uint32_t position = likely_place(item, count);
    if (position == kNoNode || prefers(position)) return position;
    const uint32_t other = elsewhere(item, position);
    return other != kNoNode && prefers(other) ? other : position;
  }

  // Where else to read what is asked of the node at `position`: where a copy is known, else where there may
  // be one. Not where it was tried, nor where a node is out of order or slow.
  uint32_t elsewhere(uint32_t item, uint32_t position) {
    const Key& key = batch_.blocks[item].key;
    const uint64_t now_ms = steady_ms();
    const auto good = [&](uint32_t at) {
      return at != kNoNode && at != position && !was_tried(item, at) &&
             map_.infos[at].state != NodeHealth::kDead && !map_.nodes[at]->breaker_open(now_ms) &&
             !map_.nodes[at]->slow(now_ms);
    };
    const LocationCache::Places places = impl_.locations.find(key);
    Nearest known;
    for (size_t i = 0; i < places.nodes.size() && places.nodes[i] != LocationCache::kNowhere; ++i) {
      const uint32_t at = map_.position(places.nodes[i]);
      if (!good(at)) continue;
      known.positions[known.count] = at;
      known.on_disk[known.count++] = places.on_disk[i];
    }
    if (known.count > 0) return nearest_of(item, known);
    std::vector<uint32_t> without = tried_[item];
    without.push_back(position);
    const uint32_t guessed = impl_.guess_unknown(map_, key, without);
    return good(guessed) ? guessed : kNoNode;
  }

  // Of several holders one of the nearest; those that are equally near share the reading.
  uint32_t nearest_of(uint32_t item, const Nearest& holders) {
    if (holders.count == 1) return holders.first();
    if (!ranks_) ranks_.emplace(impl_, map_);
    std::array<uint32_t, Nearest::kMax> ranks{}, equal{};
    for (size_t i = 0; i < holders.count; ++i) {
      const uint32_t position = holders.positions[i];
      ranks[i] = (*ranks_)(position, holders.on_disk[i]) | (prefers(position) ? 0 : kUnsoundRank);
    }
    const uint32_t least = *std::min_element(ranks.begin(), ranks.begin() + holders.count);
    size_t count = 0;
    for (size_t i = 0; i < holders.count; ++i) {
      if (ranks[i] == least) equal[count++] = holders.positions[i];
    }
    return spread_.choose(
        std::span(equal).first(count), likely_bytes(item),
        [&](uint32_t position) { return map_.nodes[position]->reading_bytes(); },
        [&, seed = is_small() ? impl_.spread_seed : impl_.seed_for(batch_.blocks[item].key)](
            uint32_t position) { return turn_of(seed, map_.infos[position].index); });
  }

  uint64_t likely_bytes(uint32_t item) const {
    const uint64_t expected = expected_bytes(item);
    return expected > 0 ? expected : kUnsizedBytes;
  }

 private:
  // A node is asked once per round: a probe is one batch.
  bool prefers(uint32_t position) {
    if (preferred_.size() != map_.nodes.size()) preferred_.assign(map_.nodes.size(), 0);
    if (preferred_[position] == 0)
      preferred_[position] = map_.nodes[position]->prefers(steady_ms(), impl_.roll()) ? 1 : 2;
    return preferred_[position] == 1;
  }

  uint32_t likely_place(uint32_t item, bool count) {
    const Key& key = batch_.blocks[item].key;
    Nearest usable;
    bool known = false;
    const LocationCache::Places places = impl_.locations.find(key);
    for (size_t i = 0; i < places.nodes.size() && places.nodes[i] != LocationCache::kNowhere; ++i) {
      const uint32_t position = map_.position(places.nodes[i]);
      if (position == kNoNode) continue;
      known = true;
      if (was_tried(item, position)) continue;
      usable.positions[usable.count] = position;
      usable.on_disk[usable.count++] = places.on_disk[i];
    }
    if (count) impl_.counters.add(known ? Counter::kLocationHits : Counter::kLocationMisses);
    if (usable.count == 0) return impl_.guess_unknown(map_, key, tried_[item]);
    return nearest_of(item, usable);
  }

  // Small calls of a client stay with one of equal holders while it is idle: its connection is warm there.
  bool is_small() {
    if (!small_) {
      uint64_t bytes = 0;
      for (uint32_t item = 0; item < batch_.blocks.size(); ++item) bytes += likely_bytes(item);
      small_ = bytes <= ReadSpread::kPieceBytes;
    }
    return *small_;
  }

  Client::Impl& impl_;
  const GetBatch& batch_;
  const NodeMap& map_;
  const std::vector<std::vector<uint32_t>>& tried_;
  std::vector<uint8_t> preferred_;  // by position, of this round; 0: not asked, 1: yes
  ReadSpread spread_;
  std::optional<bool> small_;       // once it was asked
  std::optional<ReadRanks> ranks_;  // of this round, once something is compared
};

}  // namespace mooncache

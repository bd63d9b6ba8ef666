// What a connection holds (pins, reservations), by grant id: open addressing with backward-shift
// deletion, so that taking and giving back a grant allocates nothing once the table has grown.
// Id 0 is never a grant; it marks an empty slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mooncache::server {

template <typename Value>
class GrantMap {
 public:
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  Value* find(uint64_t id) {
    if (size_ == 0 || id == 0) return nullptr;
    for (size_t at = home(id);; at = next(at)) {
      if (slots_[at].first == id) return &slots_[at].second;
      if (slots_[at].first == 0) return nullptr;
    }
  }

  // Adds or replaces. `id` must not be 0.
  Value& put(uint64_t id, Value value) {
    if ((size_ + 1) * 4 > slots_.size() * 3) grow();
    size_t at = home(id);
    while (slots_[at].first != 0 && slots_[at].first != id) at = next(at);
    if (slots_[at].first == 0) ++size_;
    slots_[at] = {id, std::move(value)};
    return slots_[at].second;
  }

  bool erase(uint64_t id) {
    if (size_ == 0 || id == 0) return false;
    size_t at = home(id);
    while (slots_[at].first != id) {
      if (slots_[at].first == 0) return false;
      at = next(at);
    }
    // Close the gap: pull back every later entry of the run that may live in it.
    for (size_t probe = next(at); slots_[probe].first != 0; probe = next(probe)) {
      const size_t wanted = home(slots_[probe].first);
      if (((probe - wanted) & mask()) >= ((probe - at) & mask())) {
        slots_[at] = std::move(slots_[probe]);
        at = probe;
      }
    }
    slots_[at] = {};
    --size_;
    if (size_ == 0 && slots_.size() > 64) slots_ = {};  // an idle connection keeps no big table
    return true;
  }

  template <typename Function>
  void for_each(Function&& function) {
    for (auto& [id, value] : slots_) {
      if (id != 0) function(id, value);
    }
  }

  void clear() {
    slots_ = {};
    size_ = 0;
  }

 private:
  using Slot = std::pair<uint64_t, Value>;

  size_t mask() const { return slots_.size() - 1; }
  size_t next(size_t at) const { return (at + 1) & mask(); }
  size_t home(uint64_t id) const { return static_cast<size_t>((id * 0x9e3779b97f4a7c15ULL) >> 32) & mask(); }

  void grow() {
    std::vector<Slot> old = std::move(slots_);
    slots_ = std::vector<Slot>(old.empty() ? 16 : old.size() * 2);
    size_ = 0;
    for (auto& [id, value] : old) {
      if (id != 0) put(id, std::move(value));
    }
  }

  std::vector<Slot> slots_;
  size_t size_ = 0;
};

}  // namespace mooncache::server

#include "store/writers.h"

#include <algorithm>

namespace mooncache::store {

WriterNumber Writers::find(uint64_t id) const {
  if (id == 0) return 0;
  for (uint32_t number = 1; number <= kMaxWriters; ++number) {
    if (slots_[number].id.load(std::memory_order_relaxed) == id) return static_cast<WriterNumber>(number);
  }
  return 0;
}

// The writer's own place, an empty one, or the one that nothing holds and that was opened the longest ago.
// The lock is held.
WriterNumber Writers::number_for(uint64_t id) {
  if (const WriterNumber known = find(id); known != 0) return known;
  uint32_t best = 0;
  for (uint32_t number = 1; number <= kMaxWriters; ++number) {
    const Slot& slot = slots_[number];
    if (slot.holds.load(std::memory_order_acquire) != 0) continue;
    if (best == 0 || slot.turn < slots_[best].turn) best = number;
  }
  if (best == 0) return 0;
  Slot& slot = slots_[best];
  slot.first_s.store(0, std::memory_order_relaxed);
  slot.last_s.store(0, std::memory_order_relaxed);
  slot.said = {};
  slot.id.store(id, std::memory_order_relaxed);
  if (on_assigned) on_assigned(static_cast<WriterNumber>(best), id);
  return static_cast<WriterNumber>(best);
}

WriterNumber Writers::open(const BlockWriter& writer) {
  if (writer.id == 0) return 0;
  const std::lock_guard lock(mutex_);
  const WriterNumber number = number_for(writer.id);
  if (number == 0) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    return 0;
  }
  Slot& slot = slots_[number];
  slot.turn = ++turns_;
  // The first word counts: a writer that is known is not renamed.
  if (slot.said.instance.empty() && slot.said.build.empty()) slot.said = writer;
  hold(number);
  return number;
}

void Writers::appeared(WriterNumber number, uint64_t bytes, uint32_t written_s) {
  Slot& slot = slots_[number];
  hold(number);
  slot.blocks.fetch_add(1, std::memory_order_relaxed);
  slot.bytes.fetch_add(bytes, std::memory_order_relaxed);
  if (written_s == 0) return;
  uint32_t first = slot.first_s.load(std::memory_order_relaxed);
  while ((first == 0 || written_s < first) && !slot.first_s.compare_exchange_weak(first, written_s)) {
  }
  uint32_t last = slot.last_s.load(std::memory_order_relaxed);
  while (written_s > last && !slot.last_s.compare_exchange_weak(last, written_s)) {
  }
}

void Writers::went(WriterNumber number, uint64_t bytes) {
  slots_[number].blocks.fetch_sub(1, std::memory_order_relaxed);
  slots_[number].bytes.fetch_sub(bytes, std::memory_order_relaxed);
  release(number);
}

std::vector<WriterUse> Writers::uses() const {
  const std::lock_guard lock(mutex_);
  std::vector<WriterUse> all;
  for (const Slot& slot : slots_) {
    WriterUse use;
    use.writer = slot.said;
    use.writer.id = slot.id.load(std::memory_order_relaxed);
    use.blocks = slot.blocks.load(std::memory_order_relaxed);
    if (use.writer.id == 0 && use.blocks == 0) continue;
    use.bytes = slot.bytes.load(std::memory_order_relaxed);
    use.first_s = slot.first_s.load(std::memory_order_relaxed);
    use.last_s = slot.last_s.load(std::memory_order_relaxed);
    all.push_back(std::move(use));
  }
  return all;
}

void Writers::restore(WriterNumber number, uint64_t id) {
  const std::lock_guard lock(mutex_);
  if (number == 0 || number > kMaxWriters || id == 0 || find(id) != 0) return;
  slots_[number].id.store(id, std::memory_order_relaxed);
}

void Recalls::add(uint64_t writer, uint32_t since_s, uint32_t until_s) {
  const std::lock_guard lock(mutex_);
  const auto has_no_end = [&](const One& one) { return one.writer == writer && one.until_s == kNoEnd; };
  if (until_s == kNoEnd && std::any_of(all_.begin(), all_.end(), has_no_end)) return;
  std::erase_if(all_, [&](const One& one) {
    return one.writer == writer && one.since_s >= since_s && one.until_s <= until_s;
  });
  if (all_.size() >= kRemembered) {
    const auto oldest =
        std::find_if(all_.begin(), all_.end(), [](const One& one) { return one.until_s != kNoEnd; });
    all_.erase(oldest == all_.end() ? all_.begin() : oldest);
  }
  all_.push_back({writer, since_s, until_s});
  count_.store(all_.size(), std::memory_order_relaxed);
}

void Recalls::lift(uint64_t writer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(all_, [&](const One& one) { return one.writer == writer && one.until_s == kNoEnd; });
  count_.store(all_.size(), std::memory_order_relaxed);
}

bool Recalls::covers(uint64_t writer, uint32_t written_s) const {
  if (count_.load(std::memory_order_relaxed) == 0 || writer == 0) return false;
  const std::lock_guard lock(mutex_);
  return std::any_of(all_.begin(), all_.end(), [&](const One& one) {
    return one.writer == writer && one.since_s <= written_s && written_s <= one.until_s;
  });
}

}  // namespace mooncache::store

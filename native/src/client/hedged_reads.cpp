#include "client/hedged_reads.h"

#include <algorithm>
#include <cstring>

namespace mooncache {

void HedgedReads::watch(LaneTask& task, uint32_t position, const Work& work, uint64_t bytes) {
  const auto size_class = hedge_class(bytes);
  if (!size_class) return;
  const uint32_t after_us = impl_.hedge_after_us(map_, *size_class);
  task.hedge_after_us = after_us;
  watched_.push_back({&task, position, &work, *size_class, after_us});
}

const HedgedReads::Watched* HedgedReads::watched(const LaneTask& task) const {
  const auto found =
      std::find_if(watched_.begin(), watched_.end(), [&](const Watched& one) { return one.task == &task; });
  return found == watched_.end() ? nullptr : &*found;
}

HedgedReads::Read& HedgedReads::new_read(const Watched& late, uint32_t position) {
  for (const auto& read : reads_) {
    if (read->late == &late && read->position == position) return *read;
  }
  Read& read = *reads_.emplace_back(std::make_unique<Read>());
  read.late = &late;
  read.position = position;
  return read;
}

std::vector<LaneTask> HedgedReads::begin(LaneTask& task) {
  const Watched* late = watched(task);
  if (late == nullptr) return {};
  const Work& work = *late->work;
  std::vector<uint32_t> positions;
  for (size_t k = work.answered; k < work.items.size(); ++k) {
    positions.push_back(elsewhere_(work.items[k], late->position));
    if (positions.back() == kNoNode) return {};  // the late one has to be waited for anyway
  }
  std::vector<uint32_t> nodes = positions;
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  if (nodes.empty() || !impl_.take_hedges(nodes.size())) return {};
  const size_t first = reads_.size();
  for (size_t k = 0; k < positions.size(); ++k) {
    const uint32_t item = work.items[work.answered + k];
    Read& read = new_read(*late, positions[k]);
    read.items.push_back(item);
    read.blocks.push_back({batch_.blocks[item].key, {}, batch_.blocks[item].offset});
    read.known_bytes.push_back(batch_.how->allocate ? batch_.known_bytes[item] : batch_.capacity(item));
  }
  std::vector<LaneTask> tasks;
  for (size_t i = first; i < reads_.size(); ++i) tasks.push_back(task_of(*reads_[i]));
  return tasks;
}

LaneTask HedgedReads::task_of(Read& read) {
  const size_t count = read.items.size();
  read.outcomes.assign(count, {});
  read.memory.resize(count);
  read.how.whole = batch_.how->whole;
  read.how.allocate = [&read](size_t at, uint64_t size_bytes) -> std::byte* {
    if (read.memory[at] || size_bytes > kHedgeBytesMax - read.memory_bytes) return nullptr;
    read.memory_bytes += size_bytes;
    read.memory[at] = std::make_unique_for_overwrite<std::byte[]>(std::max<uint64_t>(size_bytes, 1));
    return read.memory[at].get();
  };
  read.batch = {read.blocks,         &read.how, read.outcomes,    &read.counters, &impl_.config,
                impl_.buffers.get(), nullptr,   read.known_bytes, nullptr};
  for (uint32_t at = 0; at < count; ++at) read.work.items.push_back(at);
  Node& node = *map_.nodes[read.position];
  LaneTask task;
  task.node = map_.nodes[read.position];
  task.has_alternative = true;
  task.use = read.late->task->use;
  task.make_program = [&read, &node](Session&) {
    return make_fused_get(read.batch, read.work, node, kHedgeBytesMax);
  };
  return task;
}

bool HedgedReads::have_all(const LaneTask& task) {
  const Watched* late = watched(task);
  if (late == nullptr) return false;
  const Work& work = *late->work;
  return std::all_of(
      work.items.begin() + static_cast<ptrdiff_t>(work.answered), work.items.end(), [&](uint32_t item) {
        return std::any_of(reads_.begin(), reads_.end(), [&](const auto& read) {
          const auto at = std::find(read->items.begin(), read->items.end(), item);
          return at != read->items.end() &&
                 read->outcomes[static_cast<size_t>(at - read->items.begin())].code == Code::kOk;
        });
      });
}

void HedgedReads::end(const std::function<void(uint32_t, uint32_t, const GetOutcome&)>& answered) {
  const uint64_t now_ms = steady_ms();
  for (const Watched& one : watched_) {
    const LaneTask& task = *one.task;
    if (!task.overtaken && !task.status) continue;  // it failed: that is for its breaker
    const bool late = task.overtaken || task.took_us > one.after_us;
    map_.nodes[one.position]->read_took(one.size_class, task.took_us, late, now_ms);
    if (task.overtaken) impl_.counters.add(Counter::kHedgesWon);
  }
  for (const auto& read : reads_) {
    for (size_t k = 0; k < read->work.answered; ++k) {
      const size_t at = read->work.items[k];
      const uint32_t item = read->items[at];
      if (batch_.outcomes[item].code == Code::kOk) continue;
      const Code code = read->outcomes[at].code;
      if (code != Code::kOk && code != Code::kNotFound && code != Code::kChecksumMismatch) continue;
      if (code == Code::kOk) take(*read, at);
      answered(item, read->position, read->outcomes[at]);
    }
  }
}

void HedgedReads::take(const Read& read, size_t at) {
  const uint32_t item = read.items[at];
  const uint64_t size = read.outcomes[at].size;
  const std::byte* from = read.memory[at].get();
  const Node& node = *map_.nodes[read.position];
  if (batch_.how->allocate) {
    std::byte* into = batch_.how->allocate(item, size);
    if (into == nullptr) return batch_.set_outcome(item, Code::kLimitExceeded, 0, node);
    std::memcpy(into, from, size);
  } else {
    uint64_t copied = 0;
    for (const Slice& slice : batch_.blocks[item].slices) {
      const uint64_t part = std::min<uint64_t>(slice.size, size - copied);
      if (part > 0) std::memcpy(slice.data, from + copied, part);
      copied += part;
    }
  }
  const uint32_t late_index = map_.infos[read.late->position].index;
  batch_.set_outcome(item, Code::kOk, size, node);
  // It is not the end of the other copy that it came late.
  const auto places = impl_.locations.find(batch_.blocks[item].key).nodes;
  if (std::find(places.begin(), places.end(), late_index) != places.end()) {
    const std::array<uint32_t, 2> both = {late_index, node.info().index};
    if (std::find(places.begin(), places.end(), both[1]) == places.end())
      impl_.locations.learn(batch_.blocks[item].key, both);
  }
}

}  // namespace mooncache

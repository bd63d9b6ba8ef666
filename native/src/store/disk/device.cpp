// What any thread may ask, and the loop of the device's own thread.
#include "store/disk/device.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

namespace mooncache::store::disk {

namespace {

constexpr size_t kMaxFetches = 4096;
constexpr int kBusyWaitMs = 5, kIdleWaitMs = 20;
constexpr uint32_t kMaxErrorsInRow = 3;
constexpr uint64_t kQuietMs = 500;  // without a stall, before a device that stalled serves again
constexpr uint64_t kDrainMs = 200;  // for what is under way at the end
constexpr uint32_t kSlotsPerLock = 16'384;
// Copied and checked before the next operations begin: takes longer than the call that begins them.
constexpr uint64_t kBeginAfterBytes = 64 << 10;

uint64_t steady_ms() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

}  // namespace

Device::~Device() {
  close();
}

void Device::close() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (queue_) queue_->wake();
  }
  thread_.join();
}

// Asked by any thread -----------------------------------------------------------------------------------

std::optional<Device::Found> Device::find(TenantId tenant, const Key& key) const {
  if (!answering()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const uint32_t number = find_readable(tenant, key);
  if (number == kNone || !index_[number].written) return std::nullopt;
  const auto pin = pins_.find(number);
  return Found{index_[number].size, index_[number].hits, pin == pins_.end() ? 0 : pin->second};
}

bool Device::is_being_written(TenantId tenant, const Key& key) const {
  const std::lock_guard lock(mutex_);
  const uint32_t number = index_.find(tenant, key);
  return number != kNone && !index_[number].written;
}

void Device::touch(TenantId tenant, const Key& key) {
  const std::lock_guard lock(mutex_);
  const uint32_t number = index_.find(tenant, key);
  if (number != kNone && index_[number].hits < 255) ++index_[number].hits;
}

bool Device::fetch(TenantId tenant, const Key& key, Done done) {
  if (!answering()) return false;
  const std::lock_guard lock(mutex_);
  const uint32_t number = find_readable(tenant, key);
  if (number == kNone || !index_[number].written || stopping_) return false;
  DiskEntry& entry = index_[number];
  if (entry.hits < 255) ++entry.hits;
  const auto shared = fetches_.find(number);
  if (shared != fetches_.end()) {
    Fetch& known = *shared->second;
    known.waiting.push_back(std::move(done));
    if (known.ahead && !std::exchange(known.joined, true)) {
      asked_.push_back(shared->second);
      queue_->wake();
    }
    return true;
  }
  if (fetches_.size() >= kMaxFetches) return false;
  auto fetch = std::make_shared<Fetch>();
  fetch->tenant = tenant;
  fetch->key = key;
  fetch->size = entry.size;
  fetch->at = DiskIndex::location_of(entry);
  fetch->encrypted = entry.encrypted != 0;
  fetch->end = entry.end;
  fetch->origin.writer = index_.writer_of(entry);
  fetch->waiting.push_back(std::move(done));
  ++segments_[fetch->at.segment].reads;
  fetches_.emplace(number, fetch);
  asked_.push_back(std::move(fetch));
  queue_->wake();
  return true;
}

uint64_t Device::walk(uint64_t cursor, uint32_t limit, const Visit& visit, bool hidden) const {
  struct Seen {
    TenantId tenant;
    Key key;
    uint32_t size;
    uint8_t hits;
  };
  std::vector<Seen> seen;
  auto at = static_cast<uint32_t>(cursor);
  {
    const std::lock_guard lock(mutex_);
    const auto end = static_cast<uint32_t>(std::min<uint64_t>(index_.slots(), uint64_t{at} + kSlotsPerLock));
    for (; at < end && seen.size() < limit && answering(); ++at) {
      const DiskEntry& entry = index_[at];
      if (entry.size != 0 && entry.written && (hidden || entry.hidden == 0))
        seen.push_back({index_.tenant_of(entry), entry.key, entry.size, static_cast<uint8_t>(entry.hits)});
    }
    if (at >= index_.slots() || !answering()) at = 0;
  }
  // The visitor may take the locks of the store, which come before this one.
  for (const Seen& one : seen) visit(one.tenant, one.key, one.size, one.hits);
  return at;
}

DeviceStats Device::stats() const {
  DeviceStats stats;
  {
    const std::lock_guard lock(stats_mutex_);
    stats = count_;
  }
  const std::lock_guard lock(mutex_);
  stats.capacity_bytes = file_.size_bytes();
  stats.blocks = index_.count();
  stats.block_bytes = index_.bytes();
  stats.index_bytes = index_.memory_bytes();
  stats.pinned_bytes = pinned_bytes_;
  stats.answering = answering() ? 1 : 0;
  return stats;
}

// The thread ----------------------------------------------------------------------------------------------

void Device::run() {
  now_ms_ = steady_ms();
  const Status ready = start();
  if (ready) {
    answering_ = true;
    memory_.log(20, "ssd_opened",
                file_.path() + ": " + std::to_string(file_.size_bytes()) + " bytes, " +
                    std::to_string(count_.recovered) + " blocks found, by " + queue_->description() +
                    (file_.is_direct() ? "" : "; the file system has no direct access"));
  }
  {
    const std::lock_guard lock(ready_mutex_);
    ready_ = ready;
  }
  ready_changed_.notify_all();
  if (!ready) return end_operations();
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) break;
    }
    turn(timeout_ms());
  }
  // An orderly end keeps what is in memory: a second at most.
  const uint64_t until_ms = steady_ms() + 1000;
  write_removals();
  close_segment();
  while (!off_ && steady_ms() < until_ms && (!chunks_.empty() || !footers_.empty() || writes_under_way_ > 0))
    turn(kBusyWaitMs);
  answering_ = false;
  fail_all();
  if (!off_) queue_->finish();
  for (const PendingRecord& record : pending_) {
    if (record.done) record.done();
  }
  for (auto* dones : {&to_sync_, &syncing_}) {
    for (const Removal& removal : std::exchange(*dones, {})) {
      if (removal.done) removal.done();
    }
  }
  end_operations();
}

// A device that does not answer may still write into memory that it was given.
void Device::end_operations() {
  const uint64_t until_ms = steady_ms() + kDrainMs;
  const auto under_way = [this] {
    return std::any_of(ops_.begin(), ops_.end(), [](const Op& op) { return op.kind != Op::Kind::kFree; });
  };
  while (under_way() && steady_ms() < until_ms) {
    ends_.clear();
    queue_->wait(ends_, kBusyWaitMs);
    for (const IoEnd& end : ends_) ended(end);
  }
  if (!under_way()) return;
  for (AlignedMemory* memory : {&read_memory_, &chunk_memory_, &page_memory_}) memory->abandon();
  for (FooterBuild& footer : footers_) footer.memory.abandon();
  for (Chunk& chunk : chunks_) {
    if (chunk.own != nullptr && chunk.own->data() != nullptr) chunk.own->abandon();
  }
}

void Device::turn(int timeout_ms) {
  ends_.clear();
  queue_->wait(ends_, timeout_ms);
  now_ms_ = steady_ms();
  for (const IoEnd& end : ends_) {
    ended(end);
    begin_next(static_cast<uint64_t>(std::max<int64_t>(end.result, 0)));
  }
  watch_for_stalls();
  take_asked();
  if (off_) return fail_all();
  pump_reads();
  retire_chunks();
  write_removals();
  write_handed();
  demote();
  flush_old();
  drop_ended();
  reclaim();
  pump_writes();
  write_footers();
  open_ahead();
}

// Between two copies of a turn: reads that were asked for meanwhile and writes that are ready begin now, so
// that the device does not run out of work while this thread copies and checks.
void Device::begin_next(uint64_t copied_bytes) {
  copied_bytes_ += copied_bytes;
  if (off_ || copied_bytes_ < kBeginAfterBytes) return;
  copied_bytes_ = 0;
  take_asked();
  pump_reads();
  pump_writes();
  queue_->begin();
}

int Device::timeout_ms() const {
  return chunks_.empty() ? std::min(kIdleWaitMs, static_cast<int>(look_pause_ms_)) : kBusyWaitMs;
}

uint32_t Device::submit(Op op, Io io) {
  uint32_t slot;
  if (free_ops_.empty()) {
    slot = static_cast<uint32_t>(ops_.size());
    ops_.emplace_back();
  } else {
    slot = free_ops_.back();
    free_ops_.pop_back();
  }
  op.generation = ops_[slot].generation + 1;
  op.begun_ms = now_ms_;
  op.bytes = io.memory.size;
  op.offset = io.offset;
  io.cookie = uint64_t{op.generation} << 32 | slot;
  ops_[slot] = std::move(op);
  if (queue_->submit(io)) return slot;
  ops_[slot].kind = Op::Kind::kFree;
  ops_[slot].fetch.reset();
  free_ops_.push_back(slot);
  return kNone;
}

// An end that belongs to no operation under way is counted, and changes nothing.
void Device::ended(const IoEnd& end) {
  const auto slot = static_cast<uint32_t>(end.cookie);
  if (slot >= ops_.size() || ops_[slot].kind == Op::Kind::kFree ||
      ops_[slot].generation != static_cast<uint32_t>(end.cookie >> 32)) {
    const std::lock_guard lock(stats_mutex_);
    ++count_.io_errors;
    return;
  }
  Op op = std::move(ops_[slot]);
  ops_[slot].kind = Op::Kind::kFree;
  ops_[slot].generation = op.generation;
  ops_[slot].result = end.result;
  ops_[slot].fetch.reset();
  free_ops_.push_back(slot);
  if (op.kind == Op::Kind::kPlain) return;
  const bool whole = end.result == static_cast<int64_t>(op.bytes);
  count_error(whole ? 0 : end.result);
  switch (op.kind) {
    case Op::Kind::kRead:
      return read_ended(op, end.result);
    case Op::Kind::kChunk:
      --writes_under_way_;
      return chunk_ended(op, whole);
    case Op::Kind::kHeader:
    case Op::Kind::kFooter:
    case Op::Kind::kWipe:
    case Op::Kind::kSync:
      --writes_under_way_;
      return written(op, whole);
    default:
      return;
  }
}

// `result`: 0 when all is well. A full file system is no failure of the device, and neither is a short answer
// alone: it is a miss.
void Device::count_error(int64_t result) {
  if (result == 0) {
    errors_in_row_ = 0;
    return;
  }
  {
    const std::lock_guard lock(stats_mutex_);
    ++(result == -ENOSPC || result == -EDQUOT ? count_.no_space : count_.io_errors);
  }
  if (result == -ENOSPC || result == -EDQUOT || result >= 0) return;
  if (++errors_in_row_ == kMaxErrorsInRow && !off_) give_up();
}

// Reads and writes that have waited too long: who waits for a block gets a miss now, and what comes later
// finds that it is no longer wanted.
void Device::watch_for_stalls() {
  uint64_t oldest_ms = now_ms_;
  for (const Op& op : ops_) {
    if (op.kind != Op::Kind::kFree) oldest_ms = std::min(oldest_ms, op.begun_ms);
  }
  const bool stalled = now_ms_ - oldest_ms > options_.stall_ms;
  if (stalled) {
    stalled_ms_ = now_ms_;
    if (answering_.exchange(false)) {
      {
        const std::lock_guard lock(stats_mutex_);
        ++count_.stalls;
      }
      memory_.log(40, "ssd_stalled",
                  file_.path() + " has not answered for " + std::to_string(now_ms_ - oldest_ms) +
                      " ms; the node goes on without it until it answers");
    }
    return fail_all();
  }
  if (!off_ && !answering() && now_ms_ - stalled_ms_ > kQuietMs) {
    answering_ = true;
    memory_.log(20, "ssd_back", file_.path() + " answers again");
  }
}

void Device::give_up() {
  off_ = true;
  answering_ = false;
  memory_.log(40, "ssd_off",
              file_.path() + " failed " + std::to_string(kMaxErrorsInRow) +
                  " times in a row; the node goes on without it until its next start");
  fail_all();
  // Its blocks are gone: the master hears of each.
  for (uint32_t at = 0;;) {
    std::vector<std::pair<TenantId, DiskEntry>> gone;
    {
      const std::lock_guard lock(mutex_);
      for (; at < index_.slots() && gone.size() < kSlotsPerLock; ++at) {
        if (index_[at].size == 0) continue;
        gone.emplace_back(index_.tenant_of(index_[at]), index_[at]);
        forget(at);
      }
      if (gone.empty()) return;
    }
    for (const auto& [tenant, entry] : gone) {
      if (entry.written && entry.hidden == 0)
        memory_.lost(tenant, entry.key, entry.size, RemoveReason::kCorrupt);
    }
  }
}

// A miss for everything that waits.
void Device::fail_all() {
  take_asked();
  std::vector<std::shared_ptr<Fetch>> all(wanted_.begin(), wanted_.end());
  wanted_.clear();
  std::copy_if(ahead_.begin(), ahead_.end(), std::back_inserter(all),
               [](const std::shared_ptr<Fetch>& fetch) { return fetch->ahead; });
  ahead_.clear();
  for (const Op& op : ops_) {
    if (op.kind == Op::Kind::kRead && op.fetch && !op.fetch->ended) all.push_back(op.fetch);
  }
  std::deque<Removal> removals;
  {
    const std::lock_guard lock(mutex_);
    if (off_ || stopping_) {
      removals.swap(removals_);
      unlasting_.clear();
    }
  }
  for (const auto& fetch : all) {
    fetch->failed = true;
    fetch->queued = false;
    if (fetch->under_way == 0) {
      finish(fetch);
    } else {
      report(fetch);
    }
  }
  for (const Removal& removal : removals) {
    if (removal.done) removal.done();
  }
}

}  // namespace mooncache::store::disk

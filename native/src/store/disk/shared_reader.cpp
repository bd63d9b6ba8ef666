#include "store/disk/shared_reader.h"

#include <sys/random.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "store/disk/shared_state.h"

namespace mooncache::store::disk {

namespace {

constexpr size_t kMostFetches = 4096, kMostAhead = 64;
constexpr uint32_t kMostErrorsInRow = 3;
constexpr size_t kScanner = 1;        // the second of the threads
constexpr uint64_t kGoodbyeMs = 200;  // for calls that are under way at the end

uint64_t seed_of_index() {
  uint64_t seed = 0;
  (void)!::getrandom(&seed, sizeof seed, 0);
  return seed;
}

}  // namespace

uint64_t shared_now_ms() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

SharedReader::State::State(SharedOptions options_in, Memory& memory_in)
    : options(std::move(options_in)),
      memory(&memory_in),
      index(seed_of_index(), options.most_blocks),
      threads(options.threads + 2) {}

SharedReader::SharedReader(SharedOptions options, Memory& memory)
    : state_(std::make_shared<State>(std::move(options), memory)) {
  const std::shared_ptr<State>& state = state_;
  const State::Lock lock(state->mutex);  // the threads look at the table of threads
  for (size_t me = 0; me < state->threads.size(); ++me) {
    state->threads[me].thread = std::thread([state, me] {
      if (me == 0) {
        state->watch();
      } else if (me == kScanner) {
        state->scan_for_ever(me);
      } else {
        state->read_blocks(me);
      }
      const State::Lock ending(state->mutex);
      state->threads[me].ended = true;
      state->changed.notify_all();
    });
  }
}

SharedReader::~SharedReader() {
  close();
}

void SharedReader::close() {
  State& state = *state_;
  State::Lock lock(state.mutex);
  if (std::exchange(state.closing, true)) return;
  state.answering = false;
  state.work.notify_all();
  state.changed.notify_all();
  state.changed.wait(lock, [&] { return state.inside == 0; });
  std::vector<Done> waiting;
  for (const auto& [name, fetch] : state.fetches)
    std::move(fetch->waiting.begin(), fetch->waiting.end(), std::back_inserter(waiting));
  state.fetches.clear();
  state.queue.clear();
  state.changed.wait_for(lock, std::chrono::milliseconds(kGoodbyeMs), [&] {
    return std::all_of(state.threads.begin(), state.threads.end(),
                       [](const State::Thread& one) { return one.ended; });
  });
  std::vector<std::thread> ended;
  for (State::Thread& one : state.threads) {
    if (one.ended) {
      ended.push_back(std::move(one.thread));
    } else {
      one.thread.detach();
    }
  }
  lock.unlock();
  for (std::thread& thread : ended) thread.join();
  for (const Done& done : waiting) {
    if (done) done();
  }
}

std::optional<uint64_t> SharedReader::find(TenantId tenant, const Key& key) const {
  const State::Lock lock(state_->mutex);
  if (!state_->answering) return std::nullopt;
  const auto found = state_->find_readable(tenant, key);
  return found ? std::optional<uint64_t>(found->size) : std::nullopt;
}

bool SharedReader::fetch(TenantId tenant, const Key& key, Done done, bool ahead) {
  State& state = *state_;
  const State::Lock lock(state.mutex);
  if (!state.answering || state.closing) return false;
  const auto found = state.find_readable(tenant, key);
  if (!found) return false;
  const auto known = state.fetches.find({tenant, key});
  if (known != state.fetches.end()) {
    known->second->waiting.push_back(std::move(done));
    return !ahead;
  }
  const SharedIndex::Place& place = state.index.place(found->place);
  const State::Log& log = state.logs[place.file];
  if (state.fetches.size() >= (ahead ? kMostAhead : kMostFetches) || log.file == nullptr) return false;
  auto fetch = std::make_shared<State::Fetch>();
  fetch->tenant = tenant;
  fetch->key = key;
  fetch->size = found->size;
  fetch->place = found->place;
  fetch->unit = found->unit;
  fetch->sealed = found->sealed;
  fetch->end = found->end;
  fetch->number = place.number;
  fetch->sequence = place.sequence;
  fetch->log = place.file;
  fetch->file = log.file;
  fetch->uuid = log.layout.uuid;
  fetch->segment_bytes = log.layout.segment_bytes;
  fetch->waiting.push_back(std::move(done));
  state.fetches.emplace(State::Name{tenant, key}, fetch);
  state.queue.push_back(std::move(fetch));
  state.work.notify_one();
  return true;
}

bool SharedReader::forget(TenantId tenant, const Key& key) {
  const State::Lock lock(state_->mutex);
  return state_->index.forget(tenant, key);
}

void SharedReader::forget_by(uint64_t writer) {
  for (uint32_t at = 0;;) {
    const State::Lock lock(state_->mutex);
    at = state_->index.sweep(at, {}, 0, writer);
    if (at == 0) return;
  }
}

void SharedReader::forget(TenantId tenant) {
  for (uint32_t at = 0;;) {
    const State::Lock lock(state_->mutex);
    at = state_->index.sweep(at, tenant);
    if (at == 0) return;
  }
}

SharedStats SharedReader::stats() const {
  const State::Lock lock(state_->mutex);
  SharedStats stats = state_->count;
  stats.blocks = state_->index.blocks();
  stats.block_bytes = state_->index.bytes();
  stats.index_bytes = state_->index.memory_bytes();
  stats.left_out = state_->index.left_out();
  stats.answering = state_->answering ? 1 : 0;
  return stats;
}

// At the end close() tells those who still wait.
void SharedReader::State::tell(Lock& lock, std::vector<Done> waiting) {
  (void)outside(lock, [&](Memory&) {
    for (const Done& done : waiting) {
      if (done) done();
    }
  });
}

void SharedReader::State::end(Lock& lock, const std::shared_ptr<Fetch>& fetch) {
  if (closing || !is_wanted(*fetch)) return;
  std::vector<Done> waiting = std::move(fetch->waiting);
  fetches.erase({fetch->tenant, fetch->key});
  tell(lock, std::move(waiting));
}

// A miss for everything that waits.
void SharedReader::State::fail_all(Lock& lock) {
  if (closing) return;
  queue.clear();
  count.read_misses += fetches.size();
  std::vector<Done> waiting;
  for (const auto& [name, fetch] : fetches)
    std::move(fetch->waiting.begin(), fetch->waiting.end(), std::back_inserter(waiting));
  fetches.clear();
  tell(lock, std::move(waiting));
}

void SharedReader::State::log(Lock& lock, uint8_t level, const char* event, std::string message) {
  (void)outside(lock, [&](Memory& above) { above.log(level, event, std::move(message)); });
}

void SharedReader::State::count_answer(Lock& lock, int64_t result) {
  if (result >= 0) {
    errors_in_row = 0;
    return;
  }
  ++count.io_errors;
  if (++errors_in_row < kMostErrorsInRow || !answering) return;
  answering = false;
  fail_all(lock);
  log(lock, 40, "shared_off",
      "the shared directory failed several times in a row; the node goes on without what "
      "others wrote there until it can be scanned again");
}

// How long calls take. It makes none itself.
void SharedReader::State::watch() {
  Lock lock(mutex);
  const auto step = std::chrono::milliseconds(std::max(1u, std::min(50u, options.stall_ms / 4)));
  while (!closing) {
    changed.wait_for(lock, step, [this] { return closing; });
    const uint64_t now_ms = shared_now_ms();
    const bool stalled = std::any_of(threads.begin(), threads.end(), [&](const Thread& one) {
      const bool scans = &one == &threads[kScanner] && options.scan_stall_ms != 0;
      const uint32_t most_ms = scans ? options.scan_stall_ms : options.stall_ms;
      return one.call_since_ms != 0 && now_ms - one.call_since_ms > most_ms;
    });
    if (!stalled || closing) continue;
    refused_until_scan = count.scans + 2;  // one that began after this, and ended
    if (!answering) {
      if (!fetches.empty()) fail_all(lock);
      continue;
    }
    answering = false;
    ++count.stalls;
    fail_all(lock);
    log(lock, 40, "shared_stalled",
        "the shared directory does not answer; the node goes on without what others "
        "wrote there until it answers");
  }
}

}  // namespace mooncache::store::disk

// The scan of the shared directory: which logs there are, which of their segments are new, what they hold.
// The scanning thread's own, but for what it puts into the index.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>

#include "store/disk/shared_state.h"

namespace mooncache::store::disk {

namespace {

constexpr size_t kMostLogs = 4096;
constexpr uint64_t kScanBytes = 512 << 10;  // read at a time
constexpr size_t kRecordsPerLock = 512;
constexpr uint32_t kScanAgainMs = 250;  // while it does not answer
// A log that looks the same for so long is left alone. Its time may be written before what was written, which
// may take as long as the writer waits for it and longer.
constexpr uint64_t kSurelyUnchangedMs = 30'000;

}  // namespace

struct SharedReader::State::Scan {
  Scan(State& state_in, size_t me_in) : state(state_in), me(me_in), buffer(kScanBytes) {}

  State& state;
  const size_t me;
  AlignedMemory buffer;
  std::map<std::string, Known> known;
  std::vector<uint32_t> free_logs;
  std::shared_ptr<SharedFile> file;  // that is scanned now
  bool failed = false;               // a read of it
  uint32_t swept_minute = 0;
  uint32_t minute() const { return minute_of(wall_ms(state.options.wall_clock)); }

  bool once();
  void log_of(const std::string& name, Known& log);
  bool has_handle(const Known& log);
  bool superblock(const std::string& name, Known& log);
  void forget(Known& log);
  void drop(Segment& segment);
  void headers(Known& log);
  void segment(Known& log, uint32_t number);
  void take(uint32_t place, const std::vector<std::pair<RecordHeader, uint32_t>>& records, bool sealed,
            uint32_t known_to);
  void sweep();
  bool stops() {
    const Lock lock(state.mutex);
    return state.closing;
  }
  bool read(uint64_t offset, std::span<std::byte> to) {
    const int64_t got = state.timed(me, [&] { return file->read(offset, {to.data(), to.size()}); });
    if (got == static_cast<int64_t>(to.size())) return true;
    const Lock lock(state.mutex);
    ++state.count.io_errors;
    failed = true;
    return false;
  }
};

void SharedReader::State::scan_for_ever(size_t me) {
  Scan scan(*this, me);
  for (;;) {
    const bool whole = scan.once();
    Lock lock(mutex);
    if (closing) return;
    ++count.scans;
    if (whole) errors_in_row = 0;
    if (whole && !answering && count.scans >= refused_until_scan) {
      answering = true;
      log(lock, 20, "shared_answers",
          "the shared directory answers: " + std::to_string(index.blocks()) + " blocks in the logs of " +
              std::to_string(count.writers) + " other nodes");
    }
    const auto pause =
        std::chrono::milliseconds(answering ? options.scan_ms : std::min(options.scan_ms, kScanAgainMs));
    changed.wait_for(lock, pause, [this] { return closing; });
    if (closing) return;
  }
}

// False: it cannot be listed, or there is no time left.
bool SharedReader::State::Scan::once() {
  std::vector<std::string> names;
  const int error = state.timed(me, [&] { return state.options.folder->list(names, kMostLogs); });
  if (error != 0) {
    Lock lock(state.mutex);
    ++state.count.io_errors;
    if (!std::exchange(state.answering, false)) return false;
    state.fail_all(lock);
    state.log(lock, 40, "shared_off",
              std::string("the shared directory cannot be listed: ") + std::strerror(error) +
                  "; the node goes on without it until it can");
    return false;
  }
  std::erase(names, state.options.own_name);
  const std::set<std::string> present(names.begin(), names.end());
  for (auto log = known.begin(); log != known.end();) {
    if (present.contains(log->first)) {
      ++log;
      continue;
    }
    forget(log->second);
    if (log->second.log != kNone) free_logs.push_back(log->second.log);
    log = known.erase(log);
  }
  for (const std::string& name : present) {
    if (stops()) return false;
    log_of(name, known[name]);
  }
  sweep();
  const Lock lock(state.mutex);
  state.count.writers = state.count.refused_files = 0;
  for (const auto& [name, log] : known) ++(log.refused ? state.count.refused_files : state.count.writers);
  return true;
}

// One log that cannot be read costs its own blocks alone.
void SharedReader::State::Scan::log_of(const std::string& name, Known& log) {
  int error = 0;
  file = state.timed(me, [&] { return state.options.folder->open(name, error); });
  failed = file == nullptr;
  if (failed) {
    forget(log);
    log.refused = true;
    log.version = {};
    const Lock lock(state.mutex);
    // Between two scans it may go, and what is no file is no log.
    if (error != ENOENT && error != EINVAL && error != ELOOP) ++state.count.io_errors;
    return;
  }
  const uint64_t now_ms = shared_now_ms();
  if (file->version() != log.version) log.version_since_ms = now_ms;
  log.version = file->version();
  if (now_ms - log.version_since_ms > kSurelyUnchangedMs && (log.refused || has_handle(log))) return;
  if (superblock(name, log)) headers(log);
  if (failed || log.refused) forget(log);
  if (failed) log.version = {};
}

bool SharedReader::State::Scan::has_handle(const Known& log) {
  const Lock lock(state.mutex);
  return log.log != kNone && state.logs[log.log].file != nullptr;
}

// False: it is no log of ours, or it cannot be read now.
bool SharedReader::State::Scan::superblock(const std::string& name, Known& log) {
  std::optional<Superblock> found;
  std::string why;  // empty: it may be about to be made
  for (uint64_t copy = 0; copy < 2 && !found; ++copy) {
    if (log.version.size_bytes < kDataOffset) break;
    if (!read(copy * kPageBytes, {buffer.data(), kPageBytes})) return false;
    auto decoded = Superblock::decode(ConstPage(buffer.data(), kPageBytes));
    if (decoded) {
      found = std::move(*decoded);
    } else if (decoded.code() != Code::kNotFound) {
      why = decoded.status().message;
    }
  }
  if (found && found->node_id + std::string(kSharedSuffix) != name) {
    why = "it is the log of the node " + found->node_id;
    found.reset();
  }
  if (!found) {
    Lock lock(state.mutex);
    if (!std::exchange(log.refused, true) && !why.empty())
      state.log(lock, 30, "shared_file_refused", name + " in the shared directory is not read: " + why);
    return false;
  }
  log.refused = false;
  if (found->uuid != log.layout.uuid || found->segment_bytes != log.layout.segment_bytes) forget(log);
  log.layout = *found;
  const uint64_t whole = (log.version.size_bytes - kDataOffset) / found->segment_bytes;
  log.segments.resize(std::min<uint64_t>(found->segments, whole));
  const Lock lock(state.mutex);
  if (log.log == kNone && !free_logs.empty()) {
    log.log = free_logs.back();
    free_logs.pop_back();
  } else if (log.log == kNone) {
    log.log = static_cast<uint32_t>(state.logs.size());
    state.logs.emplace_back();
  }
  state.logs[log.log] = {file, log.layout};
  return true;
}

// What it holds is no longer served.
void SharedReader::State::Scan::forget(Known& log) {
  for (Segment& segment : log.segments) drop(segment);
  log.segments.clear();
  log.layout = {};
}

void SharedReader::State::Scan::drop(Segment& segment) {
  if (segment.place != kNone) {
    const Lock lock(state.mutex);
    state.index.drop_place(segment.place);
  }
  segment = {};
}

// Segments in the order in which they were written: a later record of a key is the one that counts.
void SharedReader::State::Scan::headers(Known& log) {
  std::vector<std::pair<uint64_t, uint32_t>> fresh;
  for (uint32_t number = 0; number < log.segments.size(); ++number) {
    const uint64_t offset = kDataOffset + number * log.layout.segment_bytes;
    if (stops()) return;
    const auto listed = file->sequence(number);
    if (!listed && !read(offset, {buffer.data(), kPageBytes})) return;
    const auto header = listed ? Result<SegmentHeader>(SegmentHeader{*listed})
                               : SegmentHeader::decode(log.layout.uuid, ConstPage(buffer.data(), kPageBytes));
    Segment& known_as = log.segments[number];
    const uint64_t sequence = header ? header->sequence : 0;
    if (known_as.sequence != sequence) {
      drop(known_as);
      known_as.sequence = sequence;
    }
    if (sequence != 0 && !known_as.sealed) fresh.emplace_back(sequence, number);
  }
  std::sort(fresh.begin(), fresh.end());
  for (const auto& [sequence, number] : fresh) {
    if (stops() || failed) return;
    segment(log, number);
  }
}

void SharedReader::State::Scan::segment(Known& log, uint32_t number) {
  Segment& one = log.segments[number];
  if (one.place == kNone) {
    const Lock lock(state.mutex);
    one.place = state.index.add_place(log.log, number, one.sequence);
    if (one.place == kNone) return;
  }
  const SegmentPlace place{log.layout.uuid, log.layout.segment_bytes,
                           kDataOffset + number * log.layout.segment_bytes, one.sequence};
  std::vector<std::pair<RecordHeader, uint32_t>> records;
  const ReadAt from = [this](uint64_t offset, std::span<std::byte> to) { return read(offset, to); };
  const VisitRecord visit = [&](const RecordHeader& header, uint32_t unit) {
    if (fits(log.layout.segment_bytes, unit, header.size)) records.emplace_back(header, unit);
  };
  one.sealed = read_footer(place, buffer, from, visit);
  if (failed) return void(one.sealed = false);
  if (one.sealed) return take(one.place, records, true, one.walked);
  const uint32_t behind = walk_records(place, one.walked, buffer, from, visit);
  take(one.place, records, false, kFirstUnit);
  one.walked = behind;
}

void SharedReader::State::Scan::take(uint32_t place,
                                     const std::vector<std::pair<RecordHeader, uint32_t>>& records,
                                     bool sealed, uint32_t known_to) {
  const uint32_t now = minute();
  for (size_t at = 0; at < records.size();) {
    const Lock lock(state.mutex);
    for (size_t end = std::min(records.size(), at + kRecordsPerLock); at < end; ++at)
      state.index.take(place, records[at].first, records[at].second, sealed, known_to, now);
  }
}

void SharedReader::State::Scan::sweep() {
  const uint32_t now = minute();
  {
    const Lock lock(state.mutex);
    const bool may_have_ended = state.index.with_end() > 0 && now != swept_minute;
    if (!state.index.has_dropped() && !may_have_ended) return;
  }
  swept_minute = now;
  uint32_t at = 0;
  do {
    const Lock lock(state.mutex);
    at = state.index.sweep(at, {}, now);
  } while (at != 0);
  const Lock lock(state.mutex);
  state.index.end_sweep();
}

}  // namespace mooncache::store::disk

#include "store/disk/spool_queue.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "store/disk/file.h"
#include "store/disk/spool_state.h"

namespace mooncache::store::disk {

namespace {

constexpr uint64_t kCallBytes = 16 << 20;  // of neighbouring reads, in one call
constexpr uint64_t kPieceBytes = 1 << 20;
constexpr uint64_t kRemoteReadMs = 30'000;  // then a read that the store refuses is a short one: a miss
constexpr uint64_t kAgainMs = 250;
constexpr uint64_t kHeldMs = 1000;  // a wipe, or a sync: then it is tried again
constexpr size_t kMostRemote = 256;

template <typename Move>
bool move_all(std::byte* bytes, uint64_t size, uint64_t offset, const Move& move) {
  while (size > 0) {
    const ssize_t moved = move(bytes, size, static_cast<off_t>(offset));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    bytes += moved;
    size -= static_cast<uint64_t>(moved);
    offset += static_cast<uint64_t>(moved);
  }
  return true;
}

}  // namespace

uint64_t spool_now_ms() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

// The file may want memory that is aligned; offsets and sizes are multiples of a page.
bool read_spool(int fd, uint64_t offset, std::span<std::byte> to) {
  const AlignedMemory piece(round_up(std::min<uint64_t>(to.size(), kPieceBytes), kPageBytes));
  for (uint64_t at = 0; at < to.size();) {
    const uint64_t bytes = std::min<uint64_t>(piece.size(), to.size() - at);
    if (!move_all(piece.data(), bytes, offset + at,
                  [fd](std::byte* into, uint64_t size, off_t from) { return ::pread(fd, into, size, from); }))
      return false;
    std::memcpy(to.data() + at, piece.data(), bytes);
    at += bytes;
  }
  return true;
}

bool write_spool(int fd, uint64_t offset, std::span<const std::byte> from) {
  return move_all(const_cast<std::byte*>(from.data()), from.size(), offset,
                  [fd](std::byte* at, uint64_t size, off_t to) { return ::pwrite(fd, at, size, to); });
}

void punch_spool(int fd, uint64_t offset, uint64_t bytes) {
  (void)!::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                     static_cast<off_t>(bytes));
}

std::unique_ptr<IoQueue> open_spool_queue(int fd, std::span<const iovec> buffers, bool allow_uring,
                                          SpoolOptions options) {
  return std::make_unique<SpoolQueue>(fd, open_io_queue(fd, buffers, {.allow_uring = allow_uring}),
                                      std::move(options));
}

SpoolQueue::SpoolQueue(int fd, std::unique_ptr<IoQueue> file_queue, SpoolOptions options)
    : fd_(fd), options_(std::move(options)), file_queue_(std::move(file_queue)) {
  arrivals_->wakes = file_queue_.get();
}

SpoolQueue::~SpoolQueue() {
  {
    const std::lock_guard lock(arrivals_->mutex);
    arrivals_->wakes = nullptr;
  }
  stop_ = true;
  changed_.notify_all();
  if (uploader_.joinable()) uploader_.join();
}

bool SpoolQueue::takes_blocks() const {
  const std::lock_guard lock(mutex_);
  const auto unsent =
      static_cast<uint64_t>(std::count_if(segments_.begin(), segments_.end(), [](const Segment& segment) {
        return segment.sealed && segment.changed_ms != 0;
      }));
  return unsent * segment_bytes_ < options_.most_unsent_bytes;
}

// The device's thread -------------------------------------------------------------------------------------

bool SpoolQueue::submit(const Io& io) {
  if (io.kind == Io::Kind::kSync) {
    if (!io.lasting) return file_queue_->submit(io);
    const std::lock_guard lock(mutex_);
    Held held{io, spool_now_ms() + kHeldMs, {}};
    for (uint32_t number = 0; number < segments_.size(); ++number) {
      const Segment& segment = segments_[number];
      if (segment.sequence != 0 && segment.changed_ms != 0)
        held.written.push_back({number, segment.sequence, segment.used});
    }
    syncs_.push_back(std::move(held));
    urgent_ = true;
    changed_.notify_all();
    return true;
  }
  if (segment_bytes_ == 0 || io.offset < kDataOffset) return submit_file(io, kNoNumber);
  const auto number = static_cast<uint32_t>((io.offset - kDataOffset) / segment_bytes_);
  if (number >= segments_.size()) return submit_file(io, kNoNumber);
  const uint64_t begin = io.offset - offset_of(number);
  if (io.kind == Io::Kind::kWrite) return begin == 0 ? begin_segment(io, number) : submit_file(io, number);
  {
    const std::lock_guard lock(mutex_);
    const Segment& segment = segments_[number];
    const bool is_remote =
        segment.sent && segment.object && begin >= kPageBytes && begin + io.memory.size <= segment.used;
    if (is_remote) {
      if (remote_.size() >= kMostRemote) return false;
      const uint64_t until_ms = spool_now_ms() + kRemoteReadMs;
      remote_.emplace(next_id_++, RemoteRead{io, *segment.object, begin, until_ms, 0, false});
      return true;
    }
  }
  return submit_file(io, number);
}

bool SpoolQueue::submit_file(const Io& io, uint32_t number) {
  if (!file_queue_->submit(io)) return false;
  if (number == kNoNumber) return true;
  const std::lock_guard lock(mutex_);
  const uint64_t begin = io.offset - offset_of(number);
  file_ios_[io.cookie] = {number, begin, begin + io.memory.size, io.kind == Io::Kind::kWrite};
  ++segments_[number].file_ios;
  return true;
}

// The header of a new writing, or zeros in its place: then the store has to hear first that what was there is
// given up. Records may still be read there, until released().
bool SpoolQueue::begin_segment(const Io& io, uint32_t number) {
  const auto header =
      SegmentHeader::decode(uuid_, ConstPage(static_cast<const std::byte*>(io.memory.data), kPageBytes));
  {
    const std::lock_guard lock(mutex_);
    Segment& segment = segments_[number];
    const bool is_known = segment.busy || has_objects(number);
    if (!header && is_known && (segment.busy || segment.given_up != segment.sequence)) {
      segment.wiping = true;
      wipes_.push_back({io, spool_now_ms() + kHeldMs, {}});
      changed_.notify_all();
      return true;
    }
    if (header && is_known) {
      segment.deleting = true;
      changed_.notify_all();
      return false;
    }
    segment.changed_ms = 0;
    if (header) {
      const uint32_t ios = segment.file_ios;
      segment = {};
      segment.file_ios = ios;
      segment.sequence = header->sequence;
    }
  }
  return submit_file(io, number);
}

void SpoolQueue::released(uint64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto number = static_cast<uint32_t>((offset - kDataOffset) / segment_bytes_);
  segments_[number].deleting = has_objects(number);
  changed_.notify_all();
}

// The lock is held.
bool SpoolQueue::has_objects(uint32_t number) const {
  return segments_[number].object || segments_[number].given_up != 0 ||
         std::any_of(former_.begin(), former_.end(),
                     [number](const Former& former) { return former.object.number == number; });
}

void SpoolQueue::wait(std::vector<IoEnd>& ends, int timeout_ms) {
  ask_store();
  file_ends_.clear();
  file_queue_->wait(file_ends_, timeout_ms);
  for (const IoEnd& end : file_ends_) file_ended(end);
  ends.insert(ends.end(), file_ends_.begin(), file_ends_.end());
  options_.requests->expire();
  take_answers(ends);
  take_held(ends);
  punch();
}

void SpoolQueue::file_ended(const IoEnd& end) {
  const auto found = file_ios_.find(end.cookie);
  if (found == file_ios_.end()) return;
  const FileIo io = found->second;
  file_ios_.erase(found);
  const std::lock_guard lock(mutex_);
  Segment& segment = segments_[io.number];
  --segment.file_ios;
  if (!io.write || segment.sequence == 0 || segment.given_up != 0 ||
      end.result != static_cast<int64_t>(io.end - io.begin))
    return;
  if (io.end == segment_bytes_) {
    // Behind everything that it names. A write that failed left a gap before it, whose records it does not
    // name.
    if (!segment.ahead.empty()) segment.used = segment.ahead.rbegin()->second;
    segment.ahead.clear();
    segment.footer = io.end - io.begin;
    segment.sealed = true;
  } else {
    segment.ahead.emplace(io.begin, io.end);
    while (!segment.ahead.empty() && segment.ahead.begin()->first <= segment.used) {
      segment.used = std::max(segment.used, segment.ahead.begin()->second);
      segment.ahead.erase(segment.ahead.begin());
    }
  }
  if (io.begin > 0 && segment.changed_ms == 0) segment.changed_ms = spool_now_ms();
  if (segment.sealed) changed_.notify_all();
}

// Neighbours go together. While the store fails, one of them asks.
void SpoolQueue::ask_store() {
  if (remote_.empty()) return;
  const uint64_t now_ms = spool_now_ms();
  const bool is_asked =
      std::any_of(remote_.begin(), remote_.end(), [](const auto& one) { return one.second.asked; });
  if (reads_fail_ && is_asked) return;
  std::vector<uint64_t> ids;
  const RemoteRead* last = nullptr;
  uint64_t bytes = 0;
  for (auto& [id, read] : remote_) {
    if (read.asked || now_ms < read.not_before_ms) continue;
    const bool goes_on = last != nullptr && !reads_fail_ && last->object == read.object &&
                         last->begin + last->io.memory.size == read.begin &&
                         bytes + read.io.memory.size <= kCallBytes;
    if (!goes_on && !ids.empty()) {
      ask(ids);
      if (reads_fail_) return;
      ids.clear();
      bytes = 0;
    }
    ids.push_back(id);
    bytes += read.io.memory.size;
    last = &read;
  }
  if (!ids.empty()) ask(ids);
}

void SpoolQueue::ask(const std::vector<uint64_t>& ids) {
  const RemoteRead& first = remote_.at(ids.front());
  const RemoteRead& last = remote_.at(ids.back());
  ObjectRequest request;
  request.kind = ObjectRequest::Kind::kRead;
  request.name = first.object.name(options_.log);
  request.offset = first.begin;
  request.size = last.begin + last.io.memory.size - first.begin;
  const auto arrive = [arrivals = arrivals_, ids](ObjectAnswer answer) {
    const std::lock_guard lock(arrivals->mutex);
    if (arrivals->wakes == nullptr) return;
    arrivals->answers.emplace_back(ids, std::move(answer));
    arrivals->wakes->wake();
  };
  if (!options_.requests->submit(std::move(request), options_.timeout_ms, arrive)) return;
  for (const uint64_t id : ids) remote_.at(id).asked = true;
}

void SpoolQueue::take_answers(std::vector<IoEnd>& ends) {
  std::vector<std::pair<std::vector<uint64_t>, ObjectAnswer>> answers;
  {
    const std::lock_guard lock(arrivals_->mutex);
    answers.swap(arrivals_->answers);
  }
  for (const auto& [ids, answer] : answers) answered(ids, answer, ends);
}

// An object that is gone, or too short, is zeros where its bytes were: no record.
void SpoolQueue::answered(const std::vector<uint64_t>& ids, const ObjectAnswer& answer,
                          std::vector<IoEnd>& ends) {
  const uint64_t now_ms = spool_now_ms();
  const bool fails = answer.result < 0 && answer.result != -ENOENT;
  reads_fail_ = fails;
  uint64_t at = 0;
  for (const uint64_t id : ids) {
    const auto found = remote_.find(id);
    RemoteRead& read = found->second;
    const uint64_t size = read.io.memory.size;
    if (fails && now_ms < read.until_ms) {
      read.asked = false;
      read.not_before_ms = now_ms + kAgainMs;
      continue;
    }
    const uint64_t have =
        std::min<uint64_t>(size, answer.bytes.size() - std::min<uint64_t>(at, answer.bytes.size()));
    if (!fails) {
      if (have > 0) std::memcpy(read.io.memory.data, answer.bytes.data() + at, have);
      std::memset(read.io.memory.data + have, 0, size - have);
    }
    ends.push_back({read.io.cookie, fails ? 0 : static_cast<int64_t>(size)});
    at += size;
    remote_.erase(found);
  }
}

// What waits for the uploader. A wipe that it did not get to is a short write, and a sync one that failed:
// the device tries again.
void SpoolQueue::take_held(std::vector<IoEnd>& ends) {
  const uint64_t now_ms = spool_now_ms();
  std::deque<Held> wipes;
  {
    const std::lock_guard lock(mutex_);
    for (auto held = syncs_.begin(); held != syncs_.end();) {
      const bool sent = std::all_of(held->written.begin(), held->written.end(),
                                    [this](const Written& written) { return is_sent(written); });
      if (!sent && now_ms < held->until_ms) {
        ++held;
        continue;
      }
      ends.push_back({held->io.cookie, sent ? 0 : 1});
      held = syncs_.erase(held);
    }
    for (auto held = wipes_.begin(); held != wipes_.end();) {
      Segment& segment = segments_[static_cast<uint32_t>((held->io.offset - kDataOffset) / segment_bytes_)];
      if (segment.wiping && now_ms < held->until_ms) {
        ++held;
        continue;
      }
      if (segment.wiping) {
        ends.push_back({held->io.cookie, 0});
      } else {
        wipes.push_back(*held);
      }
      held = wipes_.erase(held);
    }
  }
  for (const Held& held : wipes) {
    const auto number = static_cast<uint32_t>((held.io.offset - kDataOffset) / segment_bytes_);
    if (!begin_segment(held.io, number)) ends.push_back({held.io.cookie, 0});
  }
}

// The lock is held.
bool SpoolQueue::is_sent(const Written& written) const {
  const Segment& segment = segments_[written.number];
  if (segment.sequence != written.sequence) return true;  // it was given up meanwhile
  return segment.object && segment.object->sequence == written.sequence &&
         segment.object->used >= written.used;
}

// No read of the file may be under way there.
void SpoolQueue::punch() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(punches_, false)) return;
  for (uint32_t number = 0; number < segments_.size(); ++number) {
    Segment& segment = segments_[number];
    if (!segment.sent || segment.punched) continue;
    if (segment.file_ios > 0) {
      punches_ = true;
      continue;
    }
    segment.punched = true;
    if (segment.used > kPageBytes)
      punch_spool(fd_, offset_of(number) + kPageBytes, segment.used - kPageBytes);
  }
}

}  // namespace mooncache::store::disk

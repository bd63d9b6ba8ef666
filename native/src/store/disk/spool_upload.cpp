// The thread that brings the store up to date with the spool, and the overwriting of what lies there.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "store/disk/spool_state.h"

namespace mooncache::store::disk {

namespace {

constexpr uint32_t kWriteTimes = 30;    // a write may take so many times as long as a read
constexpr uint64_t kFormerMs = 20'000;  // until an object is deleted that another one took the place of
constexpr uint64_t kFirstPauseMs = 100, kLongestPauseMs = 5000;
constexpr uint64_t kFinishMs = 3000;
constexpr auto kLook = std::chrono::milliseconds(100);

}  // namespace

void SpoolQueue::upload_for_ever() {
  uint64_t pause_ms = kFirstPauseMs;
  Lock lock(mutex_);
  while (!stop_) {
    const Work work = next_work(spool_now_ms());
    if (work.kind == Work::Kind::kNone) {
      urgent_ = false;
      changed_.wait_for(lock, kLook);
      continue;
    }
    const bool done = carry_out(lock, work);
    store_fails_ = !done;
    changed_.notify_all();
    file_queue_->wake();
    if (done) {
      pause_ms = kFirstPauseMs;
      continue;
    }
    const uint64_t until_ms = spool_now_ms() + pause_ms;
    while (!stop_ && spool_now_ms() < until_ms) changed_.wait_for(lock, kLook);
    pause_ms = std::min(2 * pause_ms, kLongestPauseMs);
  }
}

SpoolQueue::Work SpoolQueue::next_work(uint64_t now_ms) const {
  using Kind = Work::Kind;
  if (superblock_changed_) return {Kind::kSuperblock, 0};
  Work best;
  uint64_t oldest = ~uint64_t{0};
  for (uint32_t number = 0; number < segments_.size(); ++number) {
    const Segment& segment = segments_[number];
    if (segment.busy) continue;
    if (segment.wiping) return {Kind::kGiveUp, number};
    if (segment.deleting) return {Kind::kDelete, number};
    if (segment.changed_ms == 0 || segment.used <= kPageBytes) continue;
    const bool is_due =
        segment.sealed || urgent_ || finishing_ || now_ms - segment.changed_ms >= options_.upload_ms;
    if (!is_due || segment.sequence >= oldest) continue;
    oldest = segment.sequence;
    best = {Kind::kPut, number};
  }
  if (best.kind != Kind::kNone) return best;
  if (!former_.empty() && now_ms >= former_.front().due_ms) return {Kind::kFormer, 0};
  return best;
}

bool SpoolQueue::carry_out(Lock& lock, const Work& work) {
  switch (work.kind) {
    case Work::Kind::kSuperblock:
      return put_superblock(lock);
    case Work::Kind::kGiveUp:
      return give_up_segment(lock, work.number);
    case Work::Kind::kDelete:
      return delete_segment(lock, work.number);
    case Work::Kind::kPut:
      return put_segment(lock, work.number);
    case Work::Kind::kFormer:
      return delete_former(lock);
    case Work::Kind::kNone:
      break;
  }
  return true;
}

int64_t SpoolQueue::write_object(Lock& lock, std::string name, std::vector<std::byte> bytes) {
  lock.unlock();
  ObjectRequest request;
  request.kind = ObjectRequest::Kind::kWrite;
  request.name = std::move(name);
  request.bytes = std::move(bytes);
  const ObjectAnswer answer =
      options_.requests->call(std::move(request), kWriteTimes * options_.timeout_ms, &stop_);
  lock.lock();
  return answer.result;
}

int64_t SpoolQueue::delete_object(Lock& lock, std::string name) {
  lock.unlock();
  ObjectRequest request;
  request.kind = ObjectRequest::Kind::kDelete;
  request.name = std::move(name);
  const ObjectAnswer answer = options_.requests->call(std::move(request), 4 * options_.timeout_ms, &stop_);
  lock.lock();
  return answer.result == -ENOENT ? 0 : answer.result;
}

bool SpoolQueue::put_superblock(Lock& lock) {
  std::vector<std::byte> page(kPageBytes);
  if (!read_spool(fd_, 0, page)) return false;
  if (write_object(lock, superblock_name(options_.log), std::move(page)) < 0) return false;
  superblock_changed_ = false;
  return true;
}

// What of it is written. More may be written meanwhile; then it is put once more.
bool SpoolQueue::put_segment(Lock& lock, uint32_t number) {
  Segment& segment = segments_[number];
  const SegmentObject object{number, segment.sequence, segment.used, segment.sealed ? segment.footer : 0};
  segment.busy = true;
  lock.unlock();
  std::vector<std::byte> bytes(object.size());
  const std::span<std::byte> all(bytes);
  const bool read =
      read_spool(fd_, offset_of(number), all.first(object.used)) &&
      read_spool(fd_, offset_of(number) + segment_bytes_ - object.footer, all.subspan(object.used));
  lock.lock();
  const int64_t result = read ? write_object(lock, object.name(options_.log), std::move(bytes)) : -EIO;
  segment.busy = false;
  if (result < 0) {
    // It may be there nevertheless.
    former_.push_back({object, spool_now_ms() + kFormerMs});
    return false;
  }
  std::erase_if(former_, [&](const Former& former) { return former.object == object; });
  if (segment.object && *segment.object != object)
    former_.push_back({*segment.object, spool_now_ms() + kFormerMs});
  segment.object = object;
  const bool is_all = segment.used == object.used && segment.sealed == (object.footer > 0);
  segment.changed_ms = is_all ? 0 : spool_now_ms();
  segment.sent = is_all && segment.sealed;
  punches_ = punches_ || segment.sent;
  return true;
}

// What it holds no longer counts, for a later start and for others. This node may still read it.
bool SpoolQueue::give_up_segment(Lock& lock, uint32_t number) {
  Segment& segment = segments_[number];
  if (has_objects(number) && segment.given_up != segment.sequence) {
    segment.busy = true;
    const SegmentObject end{number, segment.sequence, 0, 0};
    const int64_t result = write_object(lock, end.name(options_.log), {});
    segment.busy = false;
    if (result < 0) return false;
    segment.given_up = segment.sequence;
  }
  segment.wiping = false;
  segment.changed_ms = 0;
  return true;
}

bool SpoolQueue::delete_segment(Lock& lock, uint32_t number) {
  Segment& segment = segments_[number];
  std::vector<SegmentObject> objects;
  for (const Former& former : former_) {
    if (former.object.number == number) objects.push_back(former.object);
  }
  if (segment.object) objects.push_back(*segment.object);
  if (segment.given_up != 0) objects.push_back({number, segment.given_up, 0, 0});  // the last to go
  segment.busy = true;
  int64_t result = 0;
  for (const SegmentObject& object : objects) {
    if (result == 0) result = delete_object(lock, object.name(options_.log));
  }
  segment.busy = false;
  if (result < 0) return false;
  std::erase_if(former_, [&](const Former& former) { return former.object.number == number; });
  segment.object.reset();
  segment.given_up = 0;
  segment.sent = segment.deleting = false;
  segment.changed_ms = 0;
  segment.purged.clear();
  return true;
}

bool SpoolQueue::delete_former(Lock& lock) {
  const Former former = former_.front();
  former_.pop_front();
  const Segment* segment =
      former.object.number < segments_.size() ? &segments_[former.object.number] : nullptr;
  if (segment != nullptr && segment->object && *segment->object == former.object) return true;
  if (delete_object(lock, former.object.name(options_.log)) == 0) return true;
  former_.push_front(former);  // what says that others are given up goes behind them
  return false;
}

// Those who purge ------------------------------------------------------------------------------------------

bool SpoolQueue::overwrite_elsewhere(uint64_t offset, uint64_t size, std::span<const std::byte> head) {
  const std::lock_guard lock(mutex_);
  if (segment_bytes_ == 0 || offset < kDataOffset) return false;
  const auto number = static_cast<uint32_t>((offset - kDataOffset) / segment_bytes_);
  Segment& segment = segments_[number];
  const uint64_t begin = offset - offset_of(number);
  if (segment.object || segment.busy)
    segment.purged.push_back({begin, begin + size, {head.begin(), head.end()}});
  return segment.sent;
}

// Objects of before go whole, the latest one is written again without the ranges.
bool SpoolQueue::sync_overwritten() {
  bool done = true;
  Lock lock(mutex_);
  for (uint32_t number = 0; number < segments_.size(); ++number) {
    if (segments_[number].purged.empty()) continue;
    const uint64_t until_ms = spool_now_ms() + uint64_t{kWriteTimes} * options_.timeout_ms;
    while (segments_[number].busy && !stop_ && spool_now_ms() < until_ms) changed_.wait_for(lock, kLook);
    if (segments_[number].busy || !overwrite_object(lock, number)) done = false;
  }
  return done;
}

bool SpoolQueue::overwrite_object(Lock& lock, uint32_t number) {
  Segment& segment = segments_[number];
  const std::vector<Range> ranges = std::exchange(segment.purged, {});
  segment.busy = true;
  bool done = true;
  for (size_t at = 0; at < former_.size() && done;) {
    if (former_[at].object.number != number) {
      ++at;
      continue;
    }
    const SegmentObject former = former_[at].object;
    former_.erase(former_.begin() + static_cast<std::ptrdiff_t>(at));
    done = delete_object(lock, former.name(options_.log)) == 0;
    if (!done) former_.push_back({former, 0});
    at = 0;
  }
  if (done && segment.object) {
    const SegmentObject object = *segment.object;
    lock.unlock();
    ObjectRequest request;
    request.kind = ObjectRequest::Kind::kRead;
    request.name = object.name(options_.log);
    request.size = object.size();
    ObjectAnswer answer =
        options_.requests->call(std::move(request), kWriteTimes * options_.timeout_ms, &stop_);
    lock.lock();
    done = answer.result == -ENOENT;  // nothing of it is left
    if (answer.result >= 0) {
      for (const Range& range : ranges) {
        const uint64_t end = std::min<uint64_t>({range.end, object.used, answer.bytes.size()});
        if (range.begin >= end) continue;
        std::byte* const place = answer.bytes.data() + range.begin;
        std::memset(place, 0, end - range.begin);
        std::memcpy(place, range.head.data(), std::min<uint64_t>(range.head.size(), end - range.begin));
      }
      done = write_object(lock, object.name(options_.log), std::move(answer.bytes)) >= 0;
    }
  }
  segment.busy = false;
  if (!done) segment.purged.insert(segment.purged.end(), ranges.begin(), ranges.end());
  changed_.notify_all();
  return done;
}

// The end -------------------------------------------------------------------------------------------------

void SpoolQueue::finish() {
  const uint64_t until_ms = spool_now_ms() + kFinishMs;
  Lock lock(mutex_);
  finishing_ = true;
  changed_.notify_all();
  const auto is_done = [this] {
    return next_work(spool_now_ms()).kind == Work::Kind::kNone &&
           std::none_of(segments_.begin(), segments_.end(), [](const Segment& one) { return one.busy; });
  };
  while (!is_done() && !store_fails_ && !options_.requests->closed() && spool_now_ms() < until_ms)
    changed_.wait_for(lock, kLook);
}

}  // namespace mooncache::store::disk

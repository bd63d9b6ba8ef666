// How blocks go down: appended to chunks in memory, which are written when they are full or old; removals,
// the footer of a full segment, and the reuse of the oldest one.
#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

#include "store/disk/append.h"
#include "store/disk/device.h"

namespace mooncache::store::disk {

namespace {

constexpr uint64_t kFlushMs = 20;  // a chunk that is not full is written after so long
constexpr uint64_t kLaterMs = 50, kFullMs = 1000;
constexpr size_t kFreeSegments = 2;  // one to write on, one for what moves out of the oldest
constexpr size_t kSpareChunks = 4;
constexpr uint64_t kHeaderPages = 64;
constexpr uint32_t kReclaimedPerLock = 16'384;
constexpr uint64_t kMostLargeBytes = 128 << 20;

}  // namespace

uint64_t Device::largest_block() const {
  const uint64_t in_segment = layout_.segment_bytes - 8 * kPageBytes - kRecordHeaderBytes;
  return std::min(in_segment, kMostLargeBytes);
}

// Larger ones are written one after the other, each from memory of its own.
uint64_t Device::largest_in_chunks() const {
  return (chunk_memory_.size() >> 20) / 2 * chunk_bytes_ - kRecordHeaderBytes;
}

void Device::refuse_large(const ColdBlock& block, DeviceStats& seen) {
  ++seen.refused;
  ++seen.too_large;
  if (std::exchange(said_too_large_, true)) return;
  memory_.log(30, "ssd_block_too_large",
              file_.path() + " takes blocks of " + std::to_string(largest_block()) +
                  " bytes at most; one of " + std::to_string(block.size) +
                  " stays in memory, like others of that size");
}

// Appending -----------------------------------------------------------------------------------------------

bool Device::room_for(uint64_t bytes) {
  const bool is_large = bytes > record_bytes(largest_in_chunks());
  if (free_chunks_.size() < (is_large ? 0 : bytes / chunk_bytes_) + 2) return false;
  if (is_large && !large_under_way_.expired()) return false;
  if (open_ != kNone && segments_[open_].sound_units != kNone) close_segment();
  if (open_ != kNone) {
    if (!fits_open(bytes)) close_segment();
  }
  if (open_ == kNone && !open_segment()) return false;
  if (!is_large) return true;
  try {
    large_ = std::make_shared<AlignedMemory>(round_up(bytes, chunk_bytes_));
  } catch (const std::bad_alloc&) {
    return false;
  }
  large_under_way_ = large_;
  large_used_ = 0;
  return true;
}

// Into the index: a block that is being written, or one that is held where it lies until it has moved. From
// here on whoever removes a block finds it there. False: it was removed before, or the index is full.
bool Device::enter(const PendingRecord& record) {
  const RecordHeader& header = record.header;
  if (header.removal()) return true;
  const std::lock_guard lock(mutex_);
  if (record.kept) {
    ++segments_[record.from.segment].reads;
    return true;
  }
  if (is_cut_) return false;
  return index_.put(header.tenant, header.key, header.size, record.at, false, header.encrypted(),
                    header.end(), header.origin) != kNone;
}

// mutex_ is held.
void Device::begin_append(const ColdBlock& block) {
  appended_.emplace(block.tenant, block.key);
  is_cut_ = false;
}

// Of the record that was appended last: its payload does not reach the disk, nor a header that a start
// without a footer would take for a block's.
RecordHeader Device::blank(const RecordHeader& header) {
  uint64_t left = record_bytes(header.size);
  for (auto chunk = chunks_.rbegin(); left > 0; ++chunk) {
    const uint64_t bytes = std::min(left, chunk->fill);
    std::memset(chunk_data(*chunk) + chunk->fill - bytes, 0, bytes);
    left -= bytes;
  }
  RecordHeader none;
  none.flags = RecordHeader::kPurged;
  none.sequence = header.sequence;
  none.key = header.key;
  none.tenant = header.tenant;
  none.size = header.size;
  return none;
}

// The chunk that is being filled; room_for() has seen to it that there is one.
Device::Chunk& Device::chunk() {
  if (chunks_.empty() || chunks_.back().sealed) {
    Chunk fresh;
    fresh.number = next_chunk_++;
    if (large_ != nullptr && large_used_ < large_->size()) {
      fresh.own = large_;
      fresh.own_at = std::exchange(large_used_, large_used_ + chunk_bytes_);
    } else {
      fresh.buffer = free_chunks_.back();
      free_chunks_.pop_back();
    }
    fresh.segment = open_;
    fresh.offset = open_fill_;
    fresh.since_ms = now_ms_;
    chunks_.push_back(fresh);
  }
  return chunks_.back();
}

void Device::seal_chunk() {
  if (chunks_.empty() || chunks_.back().sealed) return;
  Chunk& last = chunks_.back();
  const uint64_t padded = round_up(last.fill, kPageBytes);
  budget_.spend(padded - last.fill);
  std::memset(chunk_data(last) + last.fill, 0, padded - last.fill);
  open_fill_ += padded - last.fill;
  last.fill = padded;
  last.sealed = true;
}

// Blocks that memory is about to lose. What is refused is not looked at again before it is read.
void Device::demote() {
  if (now_ms_ < next_demotion_ms_ || !answering() || !queue_->takes_blocks()) return;
  if (free_chunks_.size() <= kSpareChunks) return;
  cold_.clear();
  const uint64_t bytes = (free_chunks_.size() - kSpareChunks) * chunk_bytes_;
  memory_.take_cold(options_.number, {bytes, largest_in_chunks(), large_under_way_.expired()}, cold_);
  DeviceStats seen;
  for (const ColdBlock& block : cold_) {
    memory_.end_demotion(block, demote(block, seen));
    begin_next(block.size);
  }
  // Cold blocks come in bursts: after one look that gave nothing the next one is soon, after several later.
  const bool gave_nothing = cold_.empty() || seen.dropped > 0;
  look_pause_ms_ = gave_nothing ? std::min(2 * look_pause_ms_, kLaterMs) : kNextLookMs;
  next_demotion_ms_ = now_ms_ + look_pause_ms_;
  const std::lock_guard lock(stats_mutex_);
  count_.admitted += seen.admitted;
  count_.admitted_bytes += seen.admitted_bytes;
  count_.refused += seen.refused;
  count_.dropped += seen.dropped;
  count_.too_large += seen.too_large;
}

Demotion Device::demote(const ColdBlock& block, DeviceStats& seen) {
  {
    const std::lock_guard lock(mutex_);
    if (find_readable(block.tenant, block.key) != kNone) return Demotion::kWritten;
  }
  if (block.size > largest_block()) {
    refuse_large(block, seen);
    return Demotion::kRefused;
  }
  const uint64_t bytes = record_bytes(block.size);
  const double draw = static_cast<double>(random_() >> 11) * 0x1p-53;
  if (!worth_writing({block.hits, block.known_good, block.chance}, budget_.slack(now_ms_), draw)) {
    ++seen.refused;
    return Demotion::kRefused;
  }
  const Keyring::Writing writing = writing_of(block.tenant);
  if (writing.refused || !memory_.may_hold(block.tenant, block.size)) {
    ++seen.refused;
    return Demotion::kRefused;
  }
  if (!budget_.allows(bytes, now_ms_) || !leaves_room_to_move(bytes) || !room_for(bytes)) {
    ++seen.dropped;
    return Demotion::kLater;
  }
  {
    const std::lock_guard lock(mutex_);
    begin_append(block);
  }
  const bool copied =
      append(header_of(segments_[open_].sequence, block), {}, writing.key,
             [&](uint64_t offset, Slice to) { return memory_.copy_out(block, offset, to).is_ok(); });
  {
    const std::lock_guard lock(mutex_);
    appended_.reset();
    if (!copied || is_cut_) return Demotion::kRefused;
  }
  ++seen.admitted;
  seen.admitted_bytes += block.size;
  return Demotion::kWritten;
}

// Who removes waits for the disk, so what holds a removal is written at once.
void Device::flush_old() {
  if (chunks_.empty() || chunks_.back().sealed) return;
  if (std::exchange(removals_waiting_, false) || now_ms_ - chunks_.back().since_ms >= kFlushMs) seal_chunk();
}

// Writing -------------------------------------------------------------------------------------------------

void Device::pump_writes() {
  for (Chunk& next : chunks_) {
    if (next.submitted) continue;
    if (!next.sealed || segments_[next.segment].state == Segment::State::kOpening) return;
    if (writes_under_way_ >= writes_allowed(reads_under_way_)) return;
    Op op;
    op.kind = Op::Kind::kChunk;
    op.chunk = next.number;
    const int buffers = next.own == nullptr ? 1 : -1;
    const Io io{Io::Kind::kWrite,
                segment_offset(next.segment) + next.offset,
                {chunk_data(next), next.fill},
                buffers,
                0};
    if (submit(std::move(op), io) == kNone) return;
    next.submitted = true;
    ++writes_under_way_;
  }
}

void Device::chunk_ended(const Op& op, bool whole) {
  for (Chunk& chunk : chunks_) {
    if (chunk.number != op.chunk || !chunk.submitted || chunk.done) continue;
    chunk.done = true;
    chunk.failed = !whole;
    if (!whole) next_demotion_ms_ = now_ms_ + kFullMs;
    const std::lock_guard lock(stats_mutex_);
    count_.written_bytes += op.bytes;
  }
}

// In the order of the segment: a record counts when it and all before it are written.
void Device::retire_chunks() {
  while (!chunks_.empty() && chunks_.front().done) {
    const Chunk chunk = chunks_.front();
    chunks_.pop_front();
    if (chunk.own == nullptr) free_chunks_.push_back(chunk.buffer);
    if (chunk.failed) last_failed_chunk_ = chunk.number;
    while (!pending_.empty() && pending_.front().last_chunk <= chunk.number) {
      PendingRecord record = std::move(pending_.front());
      pending_.pop_front();
      uint32_t& sound_units = segments_[record.at.segment].sound_units;
      if (last_failed_chunk_ >= record.first_chunk) sound_units = std::min(sound_units, record.at.unit);
      record_ended(record, record.at.unit < sound_units);
    }
  }
  if (to_sync_.empty() || !syncing_.empty()) return;
  Op op;
  op.kind = Op::Kind::kSync;
  if (submit(std::move(op), {Io::Kind::kSync, 0, {}, -1, 0, true}) == kNone) return;
  syncing_.swap(to_sync_);
  ++writes_under_way_;
}

void Device::record_ended(PendingRecord& record, bool sound) {
  const RecordHeader& header = record.header;
  if (header.removal()) {
    if (sound) {
      to_sync_.push_back({header.tenant, header.key, std::move(record.done)});
      const std::lock_guard lock(stats_mutex_);
      ++count_.removals;
    } else {
      next_removal_ms_ = now_ms_ + kLaterMs;
      const std::lock_guard lock(mutex_);
      removals_.push_front({header.tenant, header.key, std::move(record.done)});
    }
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (record.kept) --segments_[record.from.segment].reads;
    const uint32_t number = index_.find(header.tenant, header.key);
    const Location known = record.kept ? record.from : record.at;
    if (number == kNone || !(DiskIndex::location_of(index_[number]) == known)) return;
    (void)index_.put(header.tenant, header.key, header.size, record.at, true, header.encrypted(),
                     header.end(), header.origin);
    if (!sound) hide(number);  // its bytes may have reached the disk all the same
  }
  if (!sound) {
    memory_.lost(header.tenant, header.key, header.size, RemoveReason::kEvicted);
  } else if (!record.kept) {
    memory_.written(header.tenant, header.key, header.size);
  }
}

// Segments ------------------------------------------------------------------------------------------------

// Its header is on the disk before anything else of it, so that what an earlier writing left there cannot
// come back. It was written ahead (open_ahead), or is written now.
bool Device::open_segment() {
  if (free_segments_.empty()) return false;
  const uint32_t number = free_segments_.front();
  const Segment& segment = segments_[number];
  const bool is_ahead = segment.state != Segment::State::kFree && segment.sound_units == kNone;
  if (!is_ahead && !write_header(number)) return false;
  free_segments_.pop_front();
  open_ = number;
  open_fill_ = kPageBytes;
  footer_.clear();
  kept_bytes_ = 0;
  return true;
}

// The next segment stays free while its header is written, so that writes do not wait for a device to confirm
// one each time that a segment is full.
void Device::open_ahead() {
  if (open_ == kNone || open_fill_ < layout_.segment_bytes / 4 || free_segments_.empty()) return;
  const uint32_t number = free_segments_.front();
  if (segments_[number].state == Segment::State::kFree) (void)write_header(number);
}

bool Device::write_header(uint32_t number) {
  Segment& segment = segments_[number];
  segment.sequence = next_sequence_;
  segment.sound_units = kNone;
  std::byte* const page = page_memory_.data() + next_sequence_ % kHeaderPages * kPageBytes;
  SegmentHeader{segment.sequence}.encode(layout_.uuid, Page(page, kPageBytes));
  Op op;
  op.kind = Op::Kind::kHeader;
  op.segment = number;
  if (submit(std::move(op), {Io::Kind::kWrite, segment_offset(number), {page, kPageBytes}, -1, 0}) == kNone)
    return false;
  budget_.spend(kPageBytes);
  ++writes_under_way_;
  ++next_sequence_;
  segment.state = Segment::State::kOpening;
  return true;
}

void Device::close_segment() {
  if (open_ == kNone) return;
  seal_chunk();
  FooterBuild footer;
  footer.segment = open_;
  footer.entries.swap(footer_);
  budget_.spend(FooterTrailer::entries_bytes(footer.entries.size()) + kPageBytes);
  footers_.push_back(std::move(footer));
  closed_.push_back(open_);
  open_ = kNone;
}

// Of the records that are on the disk.
void Device::encode_footer(FooterBuild& footer) {
  const Segment& segment = segments_[footer.segment];
  std::erase_if(footer.entries, [&](const FooterEntry& entry) { return entry.unit >= segment.sound_units; });
  const uint64_t entries = FooterTrailer::entries_bytes(footer.entries.size());
  footer.memory = AlignedMemory(entries + kPageBytes);
  FooterTrailer trailer;
  for (const FooterEntry& entry : footer.entries) {
    const uint64_t writer = entry.header.origin.writer;
    if (writer != 0 && std::ranges::find(trailer.writers, writer) == trailer.writers.end())
      trailer.writers.push_back(writer);
  }
  // It cannot name them all: a start reads the headers of the records, as without a footer.
  if (trailer.writers.size() > kFooterWriters) return;
  std::byte* at = footer.memory.data();
  for (const FooterEntry& entry : footer.entries) {
    entry.encode(std::span<std::byte, kFooterEntryBytes>(at, kFooterEntryBytes), trailer.writers);
    at += kFooterEntryBytes;
  }
  trailer.sequence = segment.sequence;
  trailer.count = static_cast<uint32_t>(footer.entries.size());
  trailer.cover({footer.memory.data(), footer.entries.size() * kFooterEntryBytes});
  trailer.encode(layout_.uuid, Page(footer.memory.data() + entries, kPageBytes));
}

// Behind the records that it names.
void Device::write_footers() {
  if (footers_.empty() || footers_.front().submitted) return;
  FooterBuild& footer = footers_.front();
  const bool behind = std::any_of(chunks_.begin(), chunks_.end(),
                                  [&](const Chunk& chunk) { return chunk.segment == footer.segment; });
  if (behind || segments_[footer.segment].state == Segment::State::kOpening) return;
  if (footer.memory.size() == 0) encode_footer(footer);
  Op op;
  op.kind = Op::Kind::kFooter;
  op.segment = footer.segment;
  const uint64_t bytes = footer.memory.size();
  const uint64_t end = segment_offset(footer.segment) + layout_.segment_bytes;
  const Io io{Io::Kind::kWrite, end - bytes, {footer.memory.data(), bytes}, -1, 0};
  if (submit(std::move(op), io) == kNone) return;
  footer.submitted = true;
  ++writes_under_way_;
}

// A header, a footer, a wiped header, or the sync behind one. Without a footer, a start reads the headers of
// records; without its header, a segment has no records; what was not wiped is wiped again.
void Device::written(const Op& op, bool whole) {
  if (op.kind == Op::Kind::kSync) return synced(whole);
  if (op.bytes > 0 && whole) {
    Op sync;
    sync.kind = op.kind;
    sync.segment = op.segment;
    const std::lock_guard lock(stats_mutex_);
    count_.written_bytes += op.bytes;
    if (submit(std::move(sync), {Io::Kind::kSync, 0, {}, -1, 0}) != kNone) {
      ++writes_under_way_;
      return;
    }
  }
  Segment& segment = segments_[op.segment];
  if (op.kind == Op::Kind::kHeader) {
    segment.state = Segment::State::kOpen;
    if (!whole) segment.sound_units = 0;
  } else if (op.kind == Op::Kind::kWipe) {
    const bool wiped = whole && op.bytes == 0;  // the sync
    segment.state = wiped ? Segment::State::kWiped : Segment::State::kClosed;
    if (!wiped) next_wipe_ms_ = now_ms_ + kLaterMs;
  } else {
    segment.state = Segment::State::kClosed;
    footers_.pop_front();
  }
}

// So that no start finds what is given up: a key that leaves the index here gets no record when it is removed
// later. The oldest segment goes first, so a removal goes after all that it removes.
void Device::wipe(uint32_t number) {
  std::byte* const page = page_memory_.data() + kHeaderPages * kPageBytes;
  std::memset(page, 0, kPageBytes);
  Op op;
  op.kind = Op::Kind::kWipe;
  op.segment = number;
  if (submit(std::move(op), {Io::Kind::kWrite, segment_offset(number), {page, kPageBytes}, -1, 0}) == kNone)
    return;
  budget_.spend(kPageBytes);
  ++writes_under_way_;
  segments_[number].state = Segment::State::kWiping;
}

// The oldest segment is given up in time: what was read since it was written moves on, the rest is lost.
void Device::reclaim() {
  release_segments();
  if (free_segments_.size() + given_up_.size() >= kFreeSegments || closed_.empty()) return;
  const uint32_t number = closed_.front();
  if (segments_[number].state == Segment::State::kClosed && now_ms_ >= next_wipe_ms_) wipe(number);
  if (segments_[number].state != Segment::State::kWiped) return;
  closed_.pop_front();
  given_up_.push_back(number);
  segments_[number].state = Segment::State::kGivenUp;
  uint64_t reclaimed = 0;
  for (uint32_t at = 0;;) {
    std::vector<std::pair<TenantId, DiskEntry>> gone;
    {
      const std::lock_guard lock(mutex_);
      const auto end =
          static_cast<uint32_t>(std::min<uint64_t>(index_.slots(), uint64_t{at} + kReclaimedPerLock));
      for (; at < end; ++at) {
        const DiskEntry& entry = index_[at];
        if (entry.size == 0 || entry.segment != number) continue;
        if (entry.hidden != 0) {
          forget(at);
          continue;
        }
        const bool pinned = is_pinned(at, now_ms_);
        const bool has_time = entry.written && !has_ended(entry.end);
        if (has_time && (pinned || moves_on(entry))) {
          want_kept(entry, pinned);
          continue;
        }
        if (has_time && options_.hands_down && answering()) {
          want_down(entry);
          continue;
        }
        gone.emplace_back(index_.tenant_of(entry), entry);
        forget(at);
      }
      if (at >= index_.slots() && gone.empty()) break;
    }
    for (const auto& [tenant, entry] : gone) {
      memory_.lost(tenant, entry.key, entry.size, RemoveReason::kEvicted);
      ++reclaimed;
    }
  }
  const std::lock_guard lock(stats_mutex_);
  count_.reclaimed += reclaimed;
}

// Blocks whose time is over leave the index, a part of it in each turn, once for each minute. Nothing is
// written: their records say when they end, to a later start, too.
void Device::drop_ended() {
  const uint32_t minute = minute_of(wall_ms(options_.wall_clock));
  if (ended_at_ == 0 && minute == ended_minute_) return;
  ended_minute_ = ended_at_ == 0 ? minute : ended_minute_;
  std::vector<std::pair<TenantId, DiskEntry>> gone;
  {
    const std::lock_guard lock(mutex_);
    if (index_.with_end() == 0) ended_at_ = index_.slots();
    const auto until =
        static_cast<uint32_t>(std::min<uint64_t>(index_.slots(), uint64_t{ended_at_} + kReclaimedPerLock));
    for (; ended_at_ < until; ++ended_at_) {
      const DiskEntry& entry = index_[ended_at_];
      if (entry.size == 0 || !entry.written || entry.hidden != 0) continue;
      if (entry.end == 0 || ended_minute_ < entry.end) continue;
      gone.emplace_back(index_.tenant_of(entry), entry);
      forget(ended_at_);
    }
    if (ended_at_ >= index_.slots()) ended_at_ = 0;
  }
  for (const auto& [tenant, entry] : gone)
    memory_.lost(tenant, entry.key, entry.size, RemoveReason::kRemoved);
  const std::lock_guard lock(stats_mutex_);
  count_.expired += gone.size();
}

// Its bytes are here and sound. The hold on its old place ends behind this.
bool Device::keep(const Fetch& fetch) {
  {
    const std::lock_guard lock(mutex_);
    const uint32_t number = index_.find(fetch.tenant, fetch.key);
    if (number == kNone || !(DiskIndex::location_of(index_[number]) == fetch.at)) return true;
  }
  const Keyring::Writing writing = writing_of(fetch.tenant);
  if (writing.refused) {
    drop(fetch, RemoveReason::kEvicted);
    return true;
  }
  if (!room_for(record_bytes(fetch.size))) return false;
  PendingRecord record;
  record.kept = true;
  record.from = fetch.at;
  const bool kept = append(header_of(segments_[open_].sequence, fetch), std::move(record), writing.key,
                           [&](uint64_t offset, Slice to) {
                             std::memcpy(to.data, fetch.body.data() + offset, to.size);
                             return true;
                           });
  const std::lock_guard lock(stats_mutex_);
  count_.kept += kept ? 1 : 0;
  return kept;
}

// In the order in which they were written, which is what keeps removals until nothing is left to remove.
void Device::release_segments() {
  while (!given_up_.empty()) {
    const uint32_t number = given_up_.front();
    {
      const std::lock_guard lock(mutex_);
      if (segments_[number].reads > 0) return;
    }
    given_up_.pop_front();
    segments_[number].state = Segment::State::kFree;
    free_segments_.push_back(number);
    queue_->released(segment_offset(number));
  }
}

}  // namespace mooncache::store::disk

// How a block comes up: its record in pieces, each checked and copied when it is there.
#include <algorithm>
#include <cstring>

#include "mooncache/crc32c.h"
#include "store/disk/device.h"

namespace mooncache::store::disk {

namespace {

uint64_t record_begin(uint32_t unit) {
  return uint64_t{unit} * kUnitBytes;
}

}  // namespace

// Room in memory for what is to come. False: there is none, or the block is there already.
bool Device::begin(Fetch& fetch) {
  fetch.begun = true;
  fetch.sequence = segments_[fetch.at.segment].sequence;
  fetch.next_byte =
      (segment_offset(fetch.at.segment) + record_begin(fetch.at.unit)) / kPageBytes * kPageBytes;
  if (fetch.keep || fetch.encrypted) take_body(fetch);
  if (fetch.keep) return true;
  auto reservation = memory_.reserve(fetch.tenant, fetch.key, fetch.size);
  if (!reservation) return false;
  fetch.reservation = *reservation;
  return true;
}

// All reads that have a buffer are under way at once; blocks in the order in which they were asked for. What
// no get has asked for yet comes last, and leaves buffers to what may be asked for meanwhile.
void Device::pump_reads() {
  pump_reads(wanted_, 0);
  drop_late_prefetches();
  if (wanted_.empty()) pump_reads(ahead_, read_memory_.size() / kPieceBytes / 4);
}

void Device::pump_reads(std::deque<std::shared_ptr<Fetch>>& from, size_t buffers_left) {
  while (!from.empty() && free_reads_.size() > buffers_left) {
    const std::shared_ptr<Fetch> fetch = from.front();
    if (&from == &ahead_ && !fetch->ahead) {
      from.pop_front();
      continue;
    }
    if (!fetch->begun && !begin(*fetch)) fetch->failed = true;
    const uint64_t begin = segment_offset(fetch->at.segment) + record_begin(fetch->at.unit);
    const uint64_t end = round_up(begin + kRecordHeaderBytes + fetch->size, kPageBytes);
    if (fetch->failed || fetch->next_byte >= end) {
      from.pop_front();
      fetch->queued = false;
      if (fetch->under_way == 0) finish(fetch);
      continue;
    }
    const uint64_t bytes = std::min(kPieceBytes, end - fetch->next_byte);
    Op op;
    op.kind = Op::Kind::kRead;
    op.buffer = free_reads_.back();
    op.fetch = fetch;
    const Slice to{read_memory_.data() + uint64_t{op.buffer} * kPieceBytes, bytes};
    if (submit(std::move(op), {Io::Kind::kRead, fetch->next_byte, to, 0, 0}) == kNone) return;
    free_reads_.pop_back();
    fetch->next_byte += bytes;
    ++fetch->under_way;
    ++reads_under_way_;
    if (fetch->next_byte < end) continue;
    from.pop_front();
    fetch->queued = false;
  }
}

void Device::read_ended(Op& op, int64_t result) {
  Fetch& fetch = *op.fetch;
  --reads_under_way_;
  --fetch.under_way;
  if (result != static_cast<int64_t>(op.bytes)) fetch.failed = true;
  const std::byte* const data = read_memory_.data() + uint64_t{op.buffer} * kPieceBytes;
  if (!fetch.failed) take_bytes(fetch, op.offset, {data, op.bytes});
  free_reads_.push_back(op.buffer);
  if (fetch.under_way == 0 && !fetch.queued) finish(op.fetch);
}

// The header lies in the first page of the first piece, or reaches into the second.
void Device::take_bytes(Fetch& fetch, uint64_t file_offset, std::span<const std::byte> bytes) {
  const uint64_t header = segment_offset(fetch.at.segment) + record_begin(fetch.at.unit);
  if (file_offset <= header && header + kRecordHeaderBytes <= file_offset + bytes.size())
    take_header(fetch, bytes.subspan(header - file_offset, kRecordHeaderBytes));
  const uint64_t payload = header + kRecordHeaderBytes;
  const uint64_t from = std::max(payload, file_offset);
  const uint64_t until = std::min(payload + fetch.size, file_offset + bytes.size());
  if (from >= until || fetch.failed) return;
  const auto part = bytes.subspan(from - file_offset, until - from);
  if (fetch.keep || fetch.encrypted) {
    std::memcpy(fetch.body.data() + (from - payload), part.data(), part.size());
  } else if (!memory_.write(fetch.reservation.id, from - payload, {part.data(), part.size()})) {
    fetch.failed = true;
  }
}

void Device::take_header(Fetch& fetch, std::span<const std::byte> bytes) {
  const auto header = RecordHeader::decode(layout_.uuid, fetch.sequence, bytes.first<kRecordHeaderBytes>());
  if (!header || header->removal() || header->foreign() || header->key != fetch.key ||
      header->tenant != fetch.tenant || header->size != fetch.size ||
      header->encrypted() != fetch.encrypted || header->end() != fetch.end) {
    return;
  }
  fetch.header_sound = true;
  fetch.header = *header;
  fetch.crc32c = header->crc32c;
  if (header->origin.writer != 0) fetch.origin = header->origin;
}

// Every read of it has ended. Its bytes are what they should be, or nothing of them is used.
Code Device::conclude(Fetch& fetch) {
  Code code = fetch.failed ? Code::kCancelled : fetch.header_sound ? Code::kOk : Code::kChecksumMismatch;
  if (code == Code::kOk && fetch.encrypted) code = decrypt(fetch);
  if (code == Code::kOk && fetch.keep)
    return crc32c(fetch.body) == fetch.crc32c ? Code::kOk : Code::kChecksumMismatch;
  if (code == Code::kOk && fetch.encrypted &&
      !memory_.write(fetch.reservation.id, 0, {fetch.body.data(), fetch.body.size()}))
    code = Code::kCancelled;
  if (code != Code::kOk) {
    if (fetch.begun && !fetch.keep && fetch.reservation.id != ReservationId{})
      memory_.abort(fetch.reservation.id);
    return code;
  }
  return memory_.commit(fetch.reservation.id, fetch.tenant, fetch.key, fetch.crc32c, fetch.end, fetch.origin);
}

void Device::finish(const std::shared_ptr<Fetch>& fetch) {
  const Code code = conclude(*fetch);
  if (code == Code::kChecksumMismatch || code == Code::kIncomplete) {
    {
      const std::lock_guard lock(stats_mutex_);
      ++count_.corrupt;
    }
    memory_.log(40, "ssd_block_corrupt",
                "a block of " + std::to_string(fetch->size) + " bytes on " + file_.path() +
                    " no longer matches its checksum; it is a miss now");
    drop(*fetch, RemoveReason::kCorrupt);
  } else if (fetch->down) {
    finish_down(*fetch, code);
  } else if (fetch->keep && (code != Code::kOk || !keep(*fetch))) {
    if (code == Code::kOk && fetch->pinned && answering() && !off_) return keep_again(fetch);
    drop(*fetch, RemoveReason::kEvicted);
  } else if (fetch->keyless) {
    drop(*fetch, RemoveReason::kEvicted);  // so that it can be put again
  }
  if (fetch->keyless) say_keyless(fetch->tenant);
  {
    const std::lock_guard lock(stats_mutex_);
    if (fetch->ahead) ++(code == Code::kOk ? count_.prefetched : count_.prefetch_given_up);
    if (!fetch->keep && (!fetch->ahead || code == Code::kOk)) {
      ++(code == Code::kOk ? count_.reads : count_.read_misses);
      if (code == Code::kOk) count_.read_bytes += fetch->size;
    }
  }
  if (fetch->encrypted) give_body(*fetch);
  {
    const std::lock_guard lock(mutex_);
    --segments_[fetch->at.segment].reads;
  }
  report(fetch);
}

// Tells those who wait, once.
void Device::report(const std::shared_ptr<Fetch>& fetch) {
  std::vector<Done> waiting;
  {
    const std::lock_guard lock(mutex_);
    fetch->ended = true;
    no_longer_ahead(*fetch);
    const uint32_t number = index_.find(fetch->tenant, fetch->key);
    const auto found = number == kNone ? fetches_.end() : fetches_.find(number);
    if (found != fetches_.end() && found->second == fetch) fetches_.erase(found);
    waiting.swap(fetch->waiting);
  }
  for (const Done& done : waiting) {
    if (done) done();
  }
}

// What the disk did not give back is not asked for again. Its record lies there, and a start may find it: so
// whoever removes the block still finds that there is something to remove.
void Device::drop(const Fetch& fetch, RemoveReason reason) {
  // A sound copy is on its way to a newer segment, and only the read of the old one was wrong.
  const auto is_copy = [&fetch](const PendingRecord& record) {
    return record.kept && record.from == fetch.at && record.header.key == fetch.key &&
           record.header.tenant == fetch.tenant;
  };
  {
    const std::lock_guard lock(mutex_);
    const uint32_t number = index_.find(fetch.tenant, fetch.key);
    if (number == kNone || !(DiskIndex::location_of(index_[number]) == fetch.at)) return;
    if (std::ranges::any_of(pending_, is_copy)) return;
    hide(number);
  }
  memory_.lost(fetch.tenant, fetch.key, fetch.size, reason);
}

}  // namespace mooncache::store::disk

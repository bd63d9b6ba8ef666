// How a block of another node's log comes up: its whole record is read into memory of the thread, checked
// there, and only then is there room made for it. So a file system that hangs holds no room.
#include <algorithm>

#include "mooncache/crc32c.h"
#include "store/disk/record_cipher.h"
#include "store/disk/shared_state.h"

namespace mooncache::store::disk {

namespace {

constexpr uint64_t kFirstBytes = 1 << 20;
constexpr uint64_t kKeptBytes = 4 << 20;  // of a thread's memory from one block to the next

uint64_t begin_of(uint64_t segment_bytes, uint32_t number, uint32_t unit) {
  return kDataOffset + number * segment_bytes + uint64_t{unit} * kUnitBytes;
}

}  // namespace

void SharedReader::State::read_blocks(size_t me) {
  AlignedMemory buffer(kFirstBytes);
  RecordCipher cipher;
  Lock lock(mutex);
  for (;;) {
    work.wait(lock, [this] { return closing || !queue.empty(); });
    if (closing) return;
    const std::shared_ptr<Fetch> fetch = std::move(queue.front());
    queue.pop_front();
    if (!is_wanted(*fetch)) continue;
    lock.unlock();
    const uint64_t record = begin_of(fetch->segment_bytes, fetch->number, fetch->unit);
    const uint64_t begin = record / kPageBytes * kPageBytes;
    const uint64_t bytes = round_up(record + kRecordHeaderBytes + fetch->size, kPageBytes) - begin;
    if (buffer.size() < bytes || buffer.size() > std::max(kKeptBytes, bytes))
      buffer = AlignedMemory(std::max(bytes, kFirstBytes));
    const int64_t got = read_pieces(me, *fetch, begin, {buffer.data(), bytes});
    const std::span<std::byte> bytes_of_record(buffer.data() + (record - begin),
                                               kRecordHeaderBytes + uint64_t{fetch->size});
    const Checked checked = got > 0 ? check(*fetch, cipher, bytes_of_record) : Checked{};
    lock.lock();
    conclude(lock, fetch, got, checked, bytes_of_record.subspan(kRecordHeaderBytes));
  }
}

// All of `to`, or what the call that did not fill its piece returned: -errno, or too few bytes.
int64_t SharedReader::State::read_pieces(size_t me, const Fetch& fetch, uint64_t begin,
                                         std::span<std::byte> to) {
  for (uint64_t at = 0; at < to.size();) {
    const uint64_t piece = std::min<uint64_t>(options.call_bytes, to.size() - at);
    const int64_t got = timed(me, [&] { return fetch.file->read(begin + at, {to.data() + at, piece}); });
    if (got != static_cast<int64_t>(piece)) return std::min<int64_t>(got, 0);
    at += piece;
    const Lock lock(mutex);
    if (!is_wanted(fetch)) return 0;
  }
  return static_cast<int64_t>(to.size());
}

SharedReader::State::Checked SharedReader::State::check(const Fetch& fetch, RecordCipher& cipher,
                                                        std::span<std::byte> record) const {
  Checked checked;
  const auto header = RecordHeader::decode(fetch.uuid, fetch.sequence, record.first<kRecordHeaderBytes>());
  checked.same = header && !header->removal() && !header->foreign() && header->key == fetch.key &&
                 header->tenant == fetch.tenant && header->size == fetch.size && header->end() == fetch.end;
  if (!checked.same) return checked;
  const auto payload = record.subspan(kRecordHeaderBytes);
  checked.crc32c = header->crc32c;
  checked.origin = header->origin;
  if (header->encrypted()) {
    const Keyring::KeyRef key =
        options.keyring == nullptr ? nullptr : options.keyring->find(fetch.tenant, header->key_id);
    checked.keyless = key == nullptr;
    if (checked.keyless) return checked;
    const auto crc = decrypt_record(cipher, *key, fetch.uuid, *header, payload);
    checked.forged = !crc;
    if (!crc) return checked;
    checked.crc32c = *crc;
  }
  checked.sound = crc32c(payload) == checked.crc32c;
  return checked;
}

// `got`: of read_pieces(); 0: a short answer, or it is no longer wanted.
void SharedReader::State::conclude(Lock& lock, const std::shared_ptr<Fetch>& fetch, int64_t got,
                                   const Checked& checked, std::span<const std::byte> payload) {
  if (closing || !is_wanted(*fetch)) return;
  count_answer(lock, got);
  if (closing || !is_wanted(*fetch)) return;
  Code code = Code::kNotFound;
  if (got < 0) {
    // A handle that is stale or broken is opened again by the next scan.
    if (logs[fetch->log].file == fetch->file) logs[fetch->log].file.reset();
  } else if (got > 0) {
    if (checked.sound) {
      code = bring_up(lock, *fetch, checked, payload);
    } else if (!checked.same) {
      // Used again, purged, or damaged: which, only its writer knows.
      ++count.stale;
    } else if (checked.keyless) {
      ++count.key_misses;
    } else if (fetch->sealed) {
      count.decrypt_failures += checked.forged ? 1 : 0;
      code = Code::kChecksumMismatch;
    }
    // Of a segment that is still written, not all bytes may have arrived. What no key here reads is
    // forgotten, so that it can be put again.
    if (code == Code::kNotFound ? !checked.same || checked.keyless : code == Code::kChecksumMismatch)
      (void)index.forget(fetch->tenant, fetch->key, fetch->place, fetch->unit);
  }
  ++(code == Code::kOk ? count.reads : count.read_misses);
  if (code == Code::kOk) count.read_bytes += fetch->size;
  if (code == Code::kChecksumMismatch) {
    ++count.corrupt;
    log(lock, 40, "shared_block_corrupt",
        "a block of " + std::to_string(fetch->size) +
            " bytes in another node's log no longer matches its checksum; it is a miss now");
  }
  end(lock, fetch);
}

// Its bytes are sound; the memory compares them once more, as they lie there.
Code SharedReader::State::bring_up(Lock& lock, const Fetch& fetch, const Checked& checked,
                                   std::span<const std::byte> payload) {
  Code code = Code::kCancelled;
  (void)outside(lock, [&](Memory& above) {
    const auto reservation = above.reserve(fetch.tenant, fetch.key, fetch.size);
    if (!reservation) {
      code = reservation.code();
      return;
    }
    if (!above.write(reservation->id, 0, {payload.data(), payload.size()})) {
      above.abort(reservation->id);
      return;
    }
    code = above.commit(reservation->id, fetch.tenant, fetch.key, checked.crc32c, fetch.end, checked.origin);
  });
  // Memory that changes what is written to it is not this log's fault.
  return code == Code::kChecksumMismatch || code == Code::kNotFound ? Code::kCancelled : code;
}

}  // namespace mooncache::store::disk

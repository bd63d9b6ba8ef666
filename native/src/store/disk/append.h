// How a record is appended to the open segment. For the parts of a device that append.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "store/disk/device.h"
#include "store/disk/record_cipher.h"

namespace mooncache::store::disk {

inline constexpr uint64_t kEncryptedAtOnce = 64 << 10;  // copied, then encrypted while the cache has it

// Of a record with a block's bytes; `block` has them in memory, or read from elsewhere.
template <typename Block>
RecordHeader header_of(uint64_t sequence, const Block& block) {
  RecordHeader header;
  header.sequence = sequence;
  header.key = block.key;
  header.tenant = block.tenant;
  header.size = block.size;
  header.crc32c = block.crc32c;
  header.set_end(block.end);
  header.origin = block.origin;
  return header;
}

// `copy(offset, to)` puts bytes of the payload in their place. False: they could not be had, or not be
// encrypted with `key`.
template <typename Copy>
bool Device::append(RecordHeader header, PendingRecord record, const Keyring::KeyRef& key, const Copy& copy) {
  record.at = {open_, static_cast<uint32_t>(open_fill_ / kUnitBytes)};
  std::array<std::byte, kRecordHeaderBytes> head{};
  if (key == nullptr) header.encode(layout_.uuid, head);
  std::array<Slice, 2> head_places;  // the header of an encrypted record is known last
  size_t heads = 0;
  const uint64_t total = record_bytes(header.size);
  budget_.spend(total);  // also of removals, and of blocks that move: the disk wears from all that is written
  bool sound = key == nullptr || begin_record(cipher_, *key, layout_.uuid, header);
  for (uint64_t at = 0; at < total;) {
    Chunk& to = chunk();
    if (at == 0) record.first_chunk = to.number;
    record.last_chunk = to.number;
    const uint64_t payload_end = kRecordHeaderBytes + header.size;
    const uint64_t stop = at < kRecordHeaderBytes ? kRecordHeaderBytes
                          : at < payload_end      ? payload_end
                                                  : total;
    uint64_t bytes = std::min(stop - at, chunk_bytes_ - to.fill);
    std::byte* const place = chunk_data(to) + to.fill;
    if (at < kRecordHeaderBytes) {
      std::memcpy(place, head.data() + at, bytes);
      head_places[heads++] = {place, bytes};
    } else if (at < payload_end) {
      if (key != nullptr) bytes = std::min(bytes, kEncryptedAtOnce);
      sound = copy(at - kRecordHeaderBytes, Slice{place, bytes}) && sound;
      if (key != nullptr) sound = sound && cipher_.crypt({place, bytes});
      if (key != nullptr && !sound) std::memset(place, 0, bytes);
    } else {
      std::memset(place, 0, bytes);
    }
    at += bytes;
    to.fill += bytes;
    open_fill_ += bytes;
    if (to.fill == chunk_bytes_) to.sealed = true;
  }
  large_.reset();  // its chunks hold it until they are written
  if (key != nullptr) sound = sound && end_encryption(header);
  record.header = header;
  sound = sound && enter(record);
  if (!sound) header = blank(header);
  if (key != nullptr || !sound) header.encode(layout_.uuid, head);
  const std::byte* from = head.data();
  for (size_t place = 0; place < heads; from += head_places[place++].size)
    std::memcpy(head_places[place].data, from, head_places[place].size);
  if (!sound) return false;
  footer_.push_back({header, record.at.unit});
  pending_.push_back(std::move(record));
  return true;
}

}  // namespace mooncache::store::disk

// How a record is encrypted for its place in a log, and decrypted again; both of the tag's sides.
#pragma once

#include <optional>
#include <span>

#include "store/disk/cipher.h"
#include "store/disk/format.h"

namespace mooncache::store::disk {

// Then the payload goes through cipher.crypt(), piece by piece.
inline bool begin_record(RecordCipher& cipher, const TenantKey& key, const Uuid& uuid, RecordHeader& header) {
  header.flags |= RecordHeader::kEncrypted;
  header.key_id = key.id();
  return RecordCipher::random(header.nonce) && cipher.begin_encryption(key, header.nonce) &&
         cipher.authenticate(header.associated(uuid));
}

// The CRC is encrypted like the payload: it would tell whether a guess of the block is right.
inline bool end_record(RecordCipher& cipher, RecordHeader& header) {
  return cipher.crypt(std::as_writable_bytes(std::span(&header.crc32c, 1))) &&
         cipher.end_encryption(header.tag);
}

// The payload in place, and its CRC. Nothing: these are not the bytes that were encrypted with this key for
// this record, and nothing of them may be used.
inline std::optional<uint32_t> decrypt_record(RecordCipher& cipher, const TenantKey& key, const Uuid& uuid,
                                              const RecordHeader& header, std::span<std::byte> payload) {
  uint32_t crc = header.crc32c;
  const bool sound = cipher.begin_decryption(key, header.nonce) &&
                     cipher.authenticate(header.associated(uuid)) && cipher.crypt(payload) &&
                     cipher.crypt(std::as_writable_bytes(std::span(&crc, 1))) &&
                     cipher.end_decryption(header.tag);
  return sound ? std::optional(crc) : std::nullopt;
}

}  // namespace mooncache::store::disk

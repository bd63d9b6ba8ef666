// How the bytes of a record are encrypted: XAES-256-GCM (https://c2sp.org/XAES-256-GCM).
//
// It is AES-256-GCM with a key and a nonce of its own for each record, both derived from the tenant's key and
// 24 random bytes. So the nonces need no counter that would have to outlive a crash, a restored snapshot of a
// disk, or another node with the same key, and none is ever used twice with a key.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "store/disk/libcrypto.h"

namespace mooncache::store::disk {

using RawKey = std::array<std::byte, 32>;
using Nonce = std::array<std::byte, 24>;
using Tag = std::array<std::byte, 16>;

// A tenant's key. Its bytes are wiped when it goes.
class TenantKey {
 public:
  TenantKey(const Libcrypto& crypto, const RawKey& raw) : crypto_(crypto), raw_(raw), id_(id_of(raw)) {}
  ~TenantKey();
  TenantKey(const TenantKey&) = delete;
  TenantKey& operator=(const TenantKey&) = delete;

  // What records name it by: tells nothing of the key.
  static uint32_t id_of(const RawKey& raw);
  uint32_t id() const { return id_; }
  const RawKey& raw() const { return raw_; }
  const Libcrypto& crypto() const { return crypto_; }

 private:
  const Libcrypto& crypto_;
  RawKey raw_;
  const uint32_t id_;
};

// One record after the other; for one thread. Every call says whether it succeeded; after a failure the
// record is given up.
class RecordCipher {
 public:
  RecordCipher() = default;
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

  bool begin_encryption(const TenantKey& key, const Nonce& nonce) { return begin(key, nonce, true); }
  bool begin_decryption(const TenantKey& key, const Nonce& nonce) { return begin(key, nonce, false); }
  // Bytes that are authenticated, not encrypted. Before the first crypt().
  bool authenticate(std::span<const std::byte> bytes);
  // The next bytes, in place.
  bool crypt(std::span<std::byte> bytes);
  bool end_encryption(Tag& tag);
  // False: these are not the bytes that were encrypted, and nothing of them may be used.
  bool end_decryption(const Tag& tag);

  static bool random(Nonce& nonce);

 private:
  bool begin(const TenantKey& key, const Nonce& nonce, bool encrypts);
  bool update(unsigned char* out, std::span<const std::byte> in);

  const Libcrypto* crypto_ = nullptr;  // that made the contexts
  void* block_ = nullptr;              // AES alone, for the derivation
  void* stream_ = nullptr;
  bool encrypts_ = false;
};

}  // namespace mooncache::store::disk

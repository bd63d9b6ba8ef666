// Blocks of tenants with a key: encrypted where they are appended, decrypted where they come up, both on the
// device's thread, which also checks what it moves.
#include "store/disk/device.h"
#include "store/disk/record_cipher.h"

namespace mooncache::store::disk {

namespace {

constexpr uint64_t kSayAgainMs = 60'000;
constexpr uint64_t kMostBodiesBytes = 32 << 20;

}  // namespace

// Counts what may not be written.
Keyring::Writing Device::writing_of(TenantId tenant) {
  if (options_.keyring == nullptr) return {};
  Keyring::Writing writing = options_.keyring->writing(tenant);
  if (!writing.refused) return writing;
  const std::lock_guard lock(stats_mutex_);
  ++count_.key_refused;
  return writing;
}

bool Device::end_encryption(RecordHeader& header) {
  if (!end_record(cipher_, header)) return false;
  const std::lock_guard lock(stats_mutex_);
  ++count_.encrypted;
  count_.encrypted_bytes += header.size;
  return true;
}

// The whole record is here. CHECKSUM_MISMATCH: it is not what was written with this key; CANCELLED: there is
// no such key.
Code Device::decrypt(Fetch& fetch) {
  const Keyring::KeyRef key =
      options_.keyring == nullptr ? nullptr : options_.keyring->find(fetch.tenant, fetch.header.key_id);
  if (key == nullptr) {
    fetch.keyless = true;
    const std::lock_guard lock(stats_mutex_);
    ++count_.key_misses;
    return Code::kCancelled;
  }
  const auto crc = decrypt_record(cipher_, *key, layout_.uuid, fetch.header, fetch.body);
  if (crc) {
    fetch.crc32c = *crc;
    return Code::kOk;
  }
  const std::lock_guard lock(stats_mutex_);
  ++count_.decrypt_failures;
  return Code::kChecksumMismatch;
}

// Memory that is used again costs neither pages nor zeros.
void Device::take_body(Fetch& fetch) {
  if (!bodies_.empty()) {
    bodies_bytes_ -= bodies_.back().capacity();
    fetch.body = std::move(bodies_.back());
    bodies_.pop_back();
  }
  fetch.body.resize(fetch.size);
}

// Reads of it may still be under way when it was given up.
void Device::give_body(Fetch& fetch) {
  const uint64_t bytes = fetch.body.capacity();
  if (bytes == 0 || fetch.under_way > 0 || bodies_bytes_ + bytes > kMostBodiesBytes) return;
  bodies_bytes_ += bytes;
  bodies_.push_back(std::move(fetch.body));
}

void Device::say_keyless(TenantId tenant) {
  if (said_keyless_ms_ != 0 && now_ms_ - said_keyless_ms_ < kSayAgainMs) return;
  said_keyless_ms_ = now_ms_;
  memory_.log(
      30, "disk_key_missing",
      "blocks of the tenant " + std::to_string(tenant) + " on " + file_.path() +
          " were encrypted with a key that is not here; they are misses until the next start with it");
}

}  // namespace mooncache::store::disk

#include "store/disk/cipher.h"

#include <string.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "mooncache/blake3.h"

namespace mooncache::store::disk {

namespace {

constexpr size_t kBlockBytes = 16;
constexpr size_t kCallBytes = 1 << 20;  // libcrypto counts in int
using Block = std::array<unsigned char, kBlockBytes>;

unsigned char* raw(std::byte* bytes) {
  return reinterpret_cast<unsigned char*>(bytes);
}
const unsigned char* raw(const std::byte* bytes) {
  return reinterpret_cast<const unsigned char*>(bytes);
}

// Doubling in GF(2^128), as in CMAC.
Block doubled(const Block& in) {
  Block out{};
  for (size_t at = 0; at < kBlockBytes; ++at) {
    const unsigned next = at + 1 < kBlockBytes ? in[at + 1] >> 7 : 0;
    out[at] = static_cast<unsigned char>(in[at] << 1 | next);
  }
  out[kBlockBytes - 1] = static_cast<unsigned char>(out[kBlockBytes - 1] ^ ((in[0] >> 7) * 0x87));
  return out;
}

// Key and nonce of one record. `block` is AES with the tenant's key.
bool derive(const Libcrypto& crypto, void* block, const Nonce& nonce, std::array<unsigned char, 32>& key) {
  int written = 0;
  Block zero{}, whitener{};
  if (crypto.EVP_EncryptUpdate(block, whitener.data(), &written, zero.data(), kBlockBytes) != 1) return false;
  whitener = doubled(whitener);
  for (unsigned char half = 1; half <= 2; ++half) {
    Block message{0, half, 'X', 0};
    std::copy_n(raw(nonce.data()), 12, message.begin() + 4);
    for (size_t at = 0; at < kBlockBytes; ++at)
      message[at] = static_cast<unsigned char>(message[at] ^ whitener[at]);
    unsigned char* const to = key.data() + (half - 1) * kBlockBytes;
    if (crypto.EVP_EncryptUpdate(block, to, &written, message.data(), kBlockBytes) != 1) return false;
  }
  ::explicit_bzero(whitener.data(), whitener.size());
  return true;
}

}  // namespace

TenantKey::~TenantKey() {
  ::explicit_bzero(raw_.data(), raw_.size());
}

uint32_t TenantKey::id_of(const RawKey& raw) {
  static constexpr char kText[] = "mooncache record key id";
  const Digest hash = blake3_keyed(raw, std::as_bytes(std::span(kText, sizeof kText - 1)));
  uint32_t id = 0;
  std::memcpy(&id, hash.data(), sizeof id);
  return id;
}

RecordCipher::~RecordCipher() {
  if (crypto_ == nullptr) return;
  crypto_->EVP_CIPHER_CTX_free(block_);
  crypto_->EVP_CIPHER_CTX_free(stream_);
}

bool RecordCipher::random(Nonce& nonce) {
  return ::getrandom(nonce.data(), nonce.size(), 0) == static_cast<ssize_t>(nonce.size());
}

bool RecordCipher::begin(const TenantKey& key, const Nonce& nonce, bool encrypts) {
  const Libcrypto& crypto = key.crypto();
  if (crypto_ == nullptr) {
    crypto_ = &crypto;
    block_ = crypto.EVP_CIPHER_CTX_new();
    stream_ = crypto.EVP_CIPHER_CTX_new();
  }
  if (crypto_ != &crypto || block_ == nullptr || stream_ == nullptr) return false;
  encrypts_ = encrypts;
  std::array<unsigned char, 32> derived{};
  bool done = crypto.EVP_EncryptInit_ex(block_, crypto.EVP_aes_256_ecb(), nullptr, raw(key.raw().data()),
                                        nullptr) == 1 &&
              crypto.EVP_CIPHER_CTX_set_padding(block_, 0) == 1 && derive(crypto, block_, nonce, derived);
  const auto init = encrypts ? crypto.EVP_EncryptInit_ex : crypto.EVP_DecryptInit_ex;
  done =
      done && init(stream_, crypto.EVP_aes_256_gcm(), nullptr, derived.data(), raw(nonce.data()) + 12) == 1;
  ::explicit_bzero(derived.data(), derived.size());
  return done;
}

bool RecordCipher::update(unsigned char* out, std::span<const std::byte> in) {
  const auto step = encrypts_ ? crypto_->EVP_EncryptUpdate : crypto_->EVP_DecryptUpdate;
  for (size_t at = 0; at < in.size(); at += kCallBytes) {
    const auto bytes = static_cast<int>(std::min(kCallBytes, in.size() - at));
    int written = 0;
    if (step(stream_, out == nullptr ? nullptr : out + at, &written, raw(in.data()) + at, bytes) != 1 ||
        written != bytes)
      return false;
  }
  return true;
}

bool RecordCipher::authenticate(std::span<const std::byte> bytes) {
  return update(nullptr, bytes);
}

bool RecordCipher::crypt(std::span<std::byte> bytes) {
  return update(raw(bytes.data()), bytes);
}

bool RecordCipher::end_encryption(Tag& tag) {
  std::array<unsigned char, kBlockBytes> rest{};
  int written = 0;
  return crypto_->EVP_EncryptFinal_ex(stream_, rest.data(), &written) == 1 && written == 0 &&
         crypto_->EVP_CIPHER_CTX_ctrl(stream_, Libcrypto::kCtrlGcmGetTag, static_cast<int>(tag.size()),
                                      tag.data()) == 1;
}

bool RecordCipher::end_decryption(const Tag& tag) {
  Tag wanted = tag;
  std::array<unsigned char, kBlockBytes> rest{};
  int written = 0;
  return crypto_->EVP_CIPHER_CTX_ctrl(stream_, Libcrypto::kCtrlGcmSetTag, static_cast<int>(wanted.size()),
                                      wanted.data()) == 1 &&
         crypto_->EVP_DecryptFinal_ex(stream_, rest.data(), &written) == 1;
}

}  // namespace mooncache::store::disk

// Proofs of the HELLO/AUTH exchange. The secret never crosses the wire: each side proves that it holds the
// key by a keyed BLAKE3 over fresh nonces of both sides, so a recorded exchange cannot be replayed.
#include <cctype>

#include "mooncache/blake3.h"
#include "wire/messages.h"

namespace mooncache::wire {

namespace {

void append(std::vector<std::byte>& to, std::span<const std::byte> bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

std::span<const std::byte> text_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

Bytes32 keyed(const Bytes32& key, std::span<const std::byte> message) {
  const auto digest = blake3_keyed(std::span<const std::byte, 32>(key), message);
  Bytes32 out;
  std::memcpy(out.data(), digest.data(), out.size());
  return out;
}

}  // namespace

Bytes32 auth_mac(bool client, const Bytes32& key, const Bytes16& server_nonce, const Bytes16& client_nonce,
                 std::string_view tenant) {
  std::vector<std::byte> message;
  append(message, text_bytes(client ? "mooncache hello c v1" : "mooncache hello s v1"));
  append(message, client ? server_nonce : client_nonce);
  append(message, client ? client_nonce : server_nonce);
  append(message, text_bytes(tenant));
  return keyed(key, message);
}

Bytes32 tenant_key(const Bytes32& cluster_secret, std::string_view tenant) {
  std::vector<std::byte> message;
  append(message, text_bytes(std::string_view("mooncache tenant v1\0", 20)));
  append(message, text_bytes(tenant));
  return keyed(cluster_secret, message);
}

Bytes32 session_key(const Bytes32& tenant_key, uint64_t expires_unix_s) {
  Writer message;
  message.raw(text_bytes(std::string_view("mooncache session v1\0", 21)));
  message.u64(expires_unix_s);
  return keyed(tenant_key, message.view());
}

TenantId tenant_id(std::string_view tenant) {
  const auto digest = blake3(text_bytes(tenant));
  TenantId id;
  std::memcpy(&id, digest.data(), sizeof id);
  return id;
}

bool tenant_name_valid(std::string_view tenant) {
  const auto alphanumeric = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  if (tenant.empty() || tenant.size() > 63 || !alphanumeric(tenant.front())) return false;
  for (const char c : tenant) {
    if (!alphanumeric(c) && c != '_' && c != '.' && c != '-') return false;
  }
  return true;
}

bool equal_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  // volatile: keeps the compiler from turning the loop into an early exit
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<uint8_t>(difference | static_cast<uint8_t>(a[i] ^ b[i]));
  }
  return difference == 0;
}

}  // namespace mooncache::wire

// Tokens as people hold them, turned into the key that HELLO and AUTH prove.
#include <charconv>

#include "mooncache/transport.h"
#include "wire/messages.h"

namespace mooncache {

namespace {

constexpr std::string_view kClusterPrefix = "mcc1.";
constexpr std::string_view kTenantPrefix = "mct1.";
constexpr std::string_view kSessionPrefix = "mcs1.";
constexpr size_t kHexDigits = 64;

bool read_hex(std::string_view digits, std::array<std::byte, 32>& bytes) {
  for (size_t i = 0; i < bytes.size(); ++i) {
    uint8_t value = 0;
    const char* begin = digits.data() + 2 * i;
    const auto [end, error] = std::from_chars(begin, begin + 2, value, 16);
    if (error != std::errc() || end != begin + 2) return false;
    bytes[i] = static_cast<std::byte>(value);
  }
  return true;
}

// Takes "<name>.<end>" apart.
bool split_end(std::string_view& name, uint64_t& expires_unix_s) {
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return false;
  const char* begin = name.data() + dot + 1;
  const char* const last = name.data() + name.size();
  const auto [end, error] = std::from_chars(begin, last, expires_unix_s);
  if (error != std::errc() || end != last || expires_unix_s == 0) return false;
  name = name.substr(0, dot);
  return true;
}

}  // namespace

Result<Credentials> credentials_from_token(std::string_view token) {
  while (!token.empty() && (token.back() == '\n' || token.back() == '\r' || token.back() == ' ')) {
    token.remove_suffix(1);
  }
  Credentials credentials;
  std::array<std::byte, 32> bytes{};
  const bool long_enough = token.size() >= kClusterPrefix.size() + kHexDigits;
  if (!long_enough || !read_hex(token.substr(token.size() - kHexDigits), bytes)) {
    return {Code::kUnauthenticated,
            "a token is one line, mcc1.<64 hex digits>, mct1.<tenant>.<64 hex digits> or "
            "mcs1.<tenant>.<end>.<64 hex digits>"};
  }
  const std::string_view front = token.substr(0, token.size() - kHexDigits);
  if (front == kClusterPrefix) {
    credentials.key = wire::tenant_key(bytes, credentials.tenant);
    return credentials;
  }
  const bool session = front.starts_with(kSessionPrefix);
  const bool known = session || front.starts_with(kTenantPrefix);
  if (!known || front.size() < kTenantPrefix.size() + 2 || front.back() != '.') {
    return {Code::kUnauthenticated,
            "this token begins neither with mcc1. nor with mct1.<tenant>. or mcs1.<tenant>."};
  }
  std::string_view name = front.substr(kTenantPrefix.size(), front.size() - kTenantPrefix.size() - 1);
  if (session && !split_end(name, credentials.expires_unix_s))
    return {Code::kUnauthenticated, "this session token does not say when it ends"};
  credentials.tenant = name;
  if (!wire::tenant_name_valid(credentials.tenant)) {
    return {Code::kUnauthenticated, "the tenant in this token is not a valid name"};
  }
  credentials.key = bytes;
  return credentials;
}

}  // namespace mooncache

// A loop over megabytes costs seconds under a sanitizer, without optimisation; memcmp does not.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>

namespace mooncache::testing {

inline bool same_bytes(std::span<const std::byte> one, std::span<const std::byte> other) {
  return one.size() == other.size() &&
         (one.empty() || std::memcmp(one.data(), other.data(), one.size()) == 0);
}

// Whether every byte has this value.
inline bool all_bytes(std::span<const std::byte> bytes, std::byte value) {
  return bytes.empty() || (bytes[0] == value && same_bytes(bytes.first(bytes.size() - 1), bytes.subspan(1)));
}

}  // namespace mooncache::testing

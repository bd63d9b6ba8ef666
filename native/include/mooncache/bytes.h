// Checked views over bytes. Reader is the only way that bytes from a socket or a file become
// numbers: every take is bounds-checked, and one failed take makes all later ones fail, so a codec
// may read a whole message and check ok() once at its end.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "mooncache/types.h"

namespace mooncache {

static_assert(std::endian::native == std::endian::little, "codecs copy little-endian integers as they are");

// Memory of the caller: one piece of a scatter/gather list.
struct Slice {
  std::byte* data = nullptr;
  size_t size = 0;
};
struct ConstSlice {
  const std::byte* data = nullptr;
  size_t size = 0;
  ConstSlice() = default;
  ConstSlice(const std::byte* data_in, size_t size_in) : data(data_in), size(size_in) {}
  ConstSlice(Slice slice) : data(slice.data), size(slice.size) {}  // NOLINT(google-explicit-constructor)
};

// Bit i % 8 of byte i / 8; false beyond the end of a shorter map.
inline bool bit_at(std::span<const std::byte> bitmap, size_t i) {
  return i / 8 < bitmap.size() && (std::to_integer<unsigned>(bitmap[i / 8]) >> (i % 8) & 1) != 0;
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}

  bool ok() const { return ok_; }
  size_t remaining() const { return rest_.size(); }
  // True when every byte was read and none was missing.
  bool done() const { return ok_ && rest_.empty(); }

  std::span<const std::byte> take(size_t count) {
    if (!ok_ || count > rest_.size()) {
      ok_ = false;
      rest_ = {};
      return {};
    }
    const auto taken = rest_.first(count);
    rest_ = rest_.subspan(count);
    return taken;
  }

  template <typename T>
  T number() {
    static_assert(std::is_integral_v<T>);
    T value{};
    const auto bytes = take(sizeof value);
    if (bytes.size() == sizeof value) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  uint8_t u8() { return number<uint8_t>(); }
  uint16_t u16() { return number<uint16_t>(); }
  uint32_t u32() { return number<uint32_t>(); }
  uint64_t u64() { return number<uint64_t>(); }

  Key key() {
    Key value;
    const auto bytes = take(kKeyBytes);
    if (bytes.size() == kKeyBytes) std::memcpy(value.bytes.data(), bytes.data(), kKeyBytes);
    return value;
  }
  // A string with a 16-bit length before it.
  std::string str16() {
    const auto bytes = take(u16());
    std::string text(bytes.size(), '\0');
    if (!bytes.empty()) std::memcpy(text.data(), bytes.data(), bytes.size());
    return text;
  }

 private:
  std::span<const std::byte> rest_;
  bool ok_ = true;
};

class Writer {
 public:
  Writer() = default;
  explicit Writer(size_t reserve_bytes) { bytes_.reserve(reserve_bytes); }

  template <typename T>
  void number(T value) {
    static_assert(std::is_integral_v<T>);
    const size_t at = bytes_.size();
    bytes_.resize(at + sizeof value);
    std::memcpy(bytes_.data() + at, &value, sizeof value);
  }
  void u8(uint8_t value) { number(value); }
  void u16(uint16_t value) { number(value); }
  void u32(uint32_t value) { number(value); }
  void u64(uint64_t value) { number(value); }
  void raw(std::span<const std::byte> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  void key(const Key& key) { raw(key.bytes); }
  // Cut at 65,535 bytes: the length is 16 bits.
  void str16(std::string_view text) {
    const size_t size = text.size() > 0xffff ? 0xffff : text.size();
    u16(static_cast<uint16_t>(size));
    raw(std::as_bytes(std::span(text.data(), size)));
  }

  size_t size() const { return bytes_.size(); }
  std::span<const std::byte> view() const { return bytes_; }
  std::vector<std::byte>& bytes() { return bytes_; }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace mooncache

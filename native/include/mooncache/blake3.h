// BLAKE3, written from its public specification: the hash behind keys, passports and tokens.
// Tuned for the short inputs that block keys are made of; long inputs work at any length.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace mooncache {

using Digest = std::array<std::byte, 32>;

Digest blake3(std::span<const std::byte> data);

// Keyed mode: a MAC, or a hash in a domain of its own.
Digest blake3_keyed(std::span<const std::byte, 32> key, std::span<const std::byte> data);

// Key derivation: `context` is a constant of the program, `material` what the key is derived from.
Digest blake3_derive_key(std::string_view context, std::span<const std::byte> material);

// The same three modes, fed piece by piece. 2 KiB of state, no allocation.
class Blake3Hasher {
 public:
  Blake3Hasher();
  static Blake3Hasher keyed(std::span<const std::byte, 32> key);
  static Blake3Hasher derive_key(std::string_view context);

  void update(std::span<const std::byte> data);
  // The digest of all bytes so far; more may follow.
  Digest digest() const;
  // Output of any length; its first 32 bytes are digest().
  void finish(std::span<std::byte> out) const;

 private:
  using Words = std::array<uint32_t, 8>;
  struct Node;

  Blake3Hasher(const Words& key, uint32_t flags);
  void add_chunk(Words value);
  Node last_node() const;

  Words key_;
  uint32_t flags_;
  // the chunk being filled: at most 1,024 bytes, of which the last block stays in `block_`
  Words chaining_;
  uint64_t chunk_index_ = 0;
  std::array<std::byte, 64> block_{};
  size_t block_size_ = 0;
  size_t blocks_done_ = 0;
  // chaining values of complete subtrees, largest first; 2^54 chunks are 2^64 bytes
  std::array<Words, 54> stack_;
  size_t stack_size_ = 0;
};

}  // namespace mooncache

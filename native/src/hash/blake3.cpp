// BLAKE3. The input is cut into chunks of 1,024 bytes, each a chain of 64-byte compressions; chunks
// are the leaves of a binary tree whose left subtrees are complete. Invariant of the hasher: the
// stack holds one chaining value for each bit that is set in the number of finished chunks, and the
// last block is compressed only when it is known whether more input follows.
#include "mooncache/blake3.h"

#include <bit>
#include <cstring>

namespace mooncache {
namespace {

using Words = std::array<uint32_t, 8>;
using Block = std::array<uint32_t, 16>;

constexpr size_t kBlockBytes = 64;
constexpr size_t kChunkBytes = 1024;
constexpr size_t kChunkBlocks = kChunkBytes / kBlockBytes;

constexpr uint32_t kChunkStart = 1;
constexpr uint32_t kChunkEnd = 2;
constexpr uint32_t kParent = 4;
constexpr uint32_t kRoot = 8;
constexpr uint32_t kKeyedHash = 16;
constexpr uint32_t kDeriveKeyContext = 32;
constexpr uint32_t kDeriveKeyMaterial = 64;

constexpr Words kInitial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

using Order = std::array<size_t, 16>;
constexpr Order kPermutation = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};

// Which message word each position reads in each of the seven rounds; known at compile time, so the
// message is never moved.
constexpr std::array<Order, 7> make_schedule() {
  std::array<Order, 7> schedule{};
  for (size_t i = 0; i < 16; ++i) schedule[0][i] = i;
  for (size_t round = 1; round < 7; ++round) {
    for (size_t i = 0; i < 16; ++i) schedule[round][i] = schedule[round - 1][kPermutation[i]];
  }
  return schedule;
}
constexpr std::array<Order, 7> kSchedule = make_schedule();

inline __attribute__((always_inline)) void mix(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t x,
                                               uint32_t y) {
  a += b + x;
  d = std::rotr(d ^ a, 16);
  c += d;
  b = std::rotr(b ^ c, 12);
  a += b + y;
  d = std::rotr(d ^ a, 8);
  c += d;
  b = std::rotr(b ^ c, 7);
}

template <size_t kRound>
inline __attribute__((always_inline)) void round_of(Block& v, const Block& m) {
  constexpr const Order& at = kSchedule[kRound];
  mix(v[0], v[4], v[8], v[12], m[at[0]], m[at[1]]);
  mix(v[1], v[5], v[9], v[13], m[at[2]], m[at[3]]);
  mix(v[2], v[6], v[10], v[14], m[at[4]], m[at[5]]);
  mix(v[3], v[7], v[11], v[15], m[at[6]], m[at[7]]);
  mix(v[0], v[5], v[10], v[15], m[at[8]], m[at[9]]);
  mix(v[1], v[6], v[11], v[12], m[at[10]], m[at[11]]);
  mix(v[2], v[7], v[8], v[13], m[at[12]], m[at[13]]);
  mix(v[3], v[4], v[9], v[14], m[at[14]], m[at[15]]);
}

// The sixteen state words after the rounds; callers apply the feed-forward that they need.
inline Block rounds(const Words& chaining, const Block& m, uint64_t counter, uint32_t size, uint32_t flags) {
  Block v = {chaining[0],
             chaining[1],
             chaining[2],
             chaining[3],
             chaining[4],
             chaining[5],
             chaining[6],
             chaining[7],
             kInitial[0],
             kInitial[1],
             kInitial[2],
             kInitial[3],
             static_cast<uint32_t>(counter),
             static_cast<uint32_t>(counter >> 32),
             size,
             flags};
  round_of<0>(v, m);
  round_of<1>(v, m);
  round_of<2>(v, m);
  round_of<3>(v, m);
  round_of<4>(v, m);
  round_of<5>(v, m);
  round_of<6>(v, m);
  return v;
}

void compress(Words& chaining, const Block& m, uint64_t counter, uint32_t size, uint32_t flags) {
  const Block v = rounds(chaining, m, counter, size, flags);
  for (size_t i = 0; i < 8; ++i) chaining[i] = v[i] ^ v[i + 8];
}

Block load_block(const std::byte* bytes) {
  Block block;
  std::memcpy(block.data(), bytes, kBlockBytes);
  return block;
}

Words load_words(std::span<const std::byte, 32> bytes) {
  Words words;
  std::memcpy(words.data(), bytes.data(), bytes.size());
  return words;
}

Digest store_words(const Words& words) {
  Digest digest;
  std::memcpy(digest.data(), words.data(), digest.size());
  return digest;
}

// A whole input of one chunk, which is the common case here: no hasher, no tree.
Words hash_one_chunk(const Words& key, uint32_t flags, std::span<const std::byte> data) {
  Words chaining = key;
  uint32_t start = kChunkStart;
  while (data.size() > kBlockBytes) {
    compress(chaining, load_block(data.data()), 0, kBlockBytes, flags | start);
    start = 0;
    data = data.subspan(kBlockBytes);
  }
  Block last{};
  if (!data.empty()) std::memcpy(last.data(), data.data(), data.size());
  compress(chaining, last, 0, static_cast<uint32_t>(data.size()), flags | start | kChunkEnd | kRoot);
  return chaining;
}

}  // namespace

// A compression that is not done yet: the last block of a chunk, or a parent. It becomes a chaining
// value inside the tree or, with the root flag, output.
struct Blake3Hasher::Node {
  Words chaining;
  Block block;
  uint64_t counter;
  uint32_t size;
  uint32_t flags;

  Words value() const {
    Words out = chaining;
    compress(out, block, counter, size, flags);
    return out;
  }
};

namespace {

Block join(const Words& left, const Words& right) {
  Block block;
  std::memcpy(block.data(), left.data(), sizeof left);
  std::memcpy(block.data() + left.size(), right.data(), sizeof right);
  return block;
}

}  // namespace

Blake3Hasher::Blake3Hasher(const Words& key, uint32_t flags) : key_(key), flags_(flags), chaining_(key) {}
Blake3Hasher::Blake3Hasher() : Blake3Hasher(kInitial, 0) {}

Blake3Hasher Blake3Hasher::keyed(std::span<const std::byte, 32> key) {
  return {load_words(key), kKeyedHash};
}

Blake3Hasher Blake3Hasher::derive_key(std::string_view context) {
  Blake3Hasher of_context(kInitial, kDeriveKeyContext);
  of_context.update(std::as_bytes(std::span(context)));
  return {load_words(of_context.digest()), kDeriveKeyMaterial};
}

// Merges subtrees as a binary counter carries: one merge for each trailing zero of the chunk count.
void Blake3Hasher::add_chunk(Words value) {
  ++chunk_index_;
  for (uint64_t count = chunk_index_; (count & 1) == 0; count >>= 1) {
    const Block block = join(stack_[--stack_size_], value);
    value = key_;
    compress(value, block, 0, kBlockBytes, flags_ | kParent);
  }
  stack_[stack_size_++] = value;
}

void Blake3Hasher::update(std::span<const std::byte> data) {
  while (!data.empty()) {
    if (block_size_ == kBlockBytes) {  // more input follows, so this block is not the last one
      const uint32_t start = blocks_done_ == 0 ? kChunkStart : 0;
      if (blocks_done_ + 1 == kChunkBlocks) {
        compress(chaining_, load_block(block_.data()), chunk_index_, kBlockBytes, flags_ | start | kChunkEnd);
        add_chunk(chaining_);
        chaining_ = key_;
        blocks_done_ = 0;
      } else {
        compress(chaining_, load_block(block_.data()), chunk_index_, kBlockBytes, flags_ | start);
        ++blocks_done_;
      }
      block_size_ = 0;
    }
    const size_t room = kBlockBytes - block_size_;
    const size_t step = data.size() < room ? data.size() : room;
    std::memcpy(block_.data() + block_size_, data.data(), step);
    block_size_ += step;
    data = data.subspan(step);
  }
}

Blake3Hasher::Node Blake3Hasher::last_node() const {
  Block block{};
  std::memcpy(block.data(), block_.data(), block_size_);
  const uint32_t start = blocks_done_ == 0 ? kChunkStart : 0;
  Node node{chaining_, block, chunk_index_, static_cast<uint32_t>(block_size_), flags_ | start | kChunkEnd};
  for (size_t i = stack_size_; i != 0; --i) {
    node = Node{key_, join(stack_[i - 1], node.value()), 0, kBlockBytes, flags_ | kParent};
  }
  return node;
}

Digest Blake3Hasher::digest() const {
  Node node = last_node();
  node.flags |= kRoot;
  return store_words(node.value());
}

void Blake3Hasher::finish(std::span<std::byte> out) const {
  const Node node = last_node();
  for (uint64_t counter = 0; !out.empty(); ++counter) {
    Block v = rounds(node.chaining, node.block, counter, node.size, node.flags | kRoot);
    for (size_t i = 0; i < 8; ++i) {
      v[i] ^= v[i + 8];
      v[i + 8] ^= node.chaining[i];
    }
    const size_t step = out.size() < kBlockBytes ? out.size() : kBlockBytes;
    std::memcpy(out.data(), v.data(), step);
    out = out.subspan(step);
  }
}

Digest blake3(std::span<const std::byte> data) {
  if (data.size() <= kChunkBytes) return store_words(hash_one_chunk(kInitial, 0, data));
  Blake3Hasher hasher;
  hasher.update(data);
  return hasher.digest();
}

Digest blake3_keyed(std::span<const std::byte, 32> key, std::span<const std::byte> data) {
  if (data.size() <= kChunkBytes) return store_words(hash_one_chunk(load_words(key), kKeyedHash, data));
  Blake3Hasher hasher = Blake3Hasher::keyed(key);
  hasher.update(data);
  return hasher.digest();
}

Digest blake3_derive_key(std::string_view context, std::span<const std::byte> material) {
  Blake3Hasher hasher = Blake3Hasher::derive_key(context);
  hasher.update(material);
  return hasher.digest();
}

}  // namespace mooncache

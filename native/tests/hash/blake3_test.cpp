// Literal digests come from an independent implementation; input byte i is i mod 251. Many more
// lengths are compared against that implementation in tests/native/test_hash.py.
#include "mooncache/blake3.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace mooncache {
namespace {

std::vector<std::byte> pattern(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i % 251);
  return bytes;
}

std::string hex(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    text += kDigits[static_cast<size_t>(byte) >> 4];
    text += kDigits[static_cast<size_t>(byte) & 15];
  }
  return text;
}

constexpr std::string_view kKeyText = "whats the Elvish word for friend";
constexpr std::string_view kContext = "BLAKE3 2019-12-27 16:29:52 test vectors context";

std::span<const std::byte, 32> test_key() {
  return std::as_bytes(std::span<const char, 32>(kKeyText.data(), kKeyText.size()));
}

struct Vector {
  size_t size;
  std::string hash;
  std::string keyed;
  std::string derived;
};

const std::vector<Vector>& vectors() {
  static const std::vector<Vector> list = {
      {0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
       "92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26",
       "2cc39783c223154fea8dfb7c1b1660f2ac2dcbd1c1de8277b0b0dd39b7e50d7d"},
      {1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
       "6d7878dfff2f485635d39013278ae14f1454b8c0a3a2d34bc1ab38228a80c95b",
       "b3e2e340a117a499c6cf2398a19ee0d29cca2bb7404c73063382693bf66cb06c"},
      {64, "4eed7141ea4a5cd4b788606bd23f46e212af9cacebacdc7d1f4c6dc7f2511b98",
       "ba8ced36f327700d213f120b1a207a3b8c04330528586f414d09f2f7d9ccb7e6",
       "a5c4a7053fa86b64746d4bb688d06ad1f02a18fce9afd3e818fefaa7126bf73e"},
      {65, "de1e5fa0be70df6d2be8fffd0e99ceaa8eb6e8c93a63f2d8d1c30ecb6b263dee",
       "c0a4edefa2d2accb9277c371ac12fcdbb52988a86edc54f0716e1591b4326e72",
       "51fd05c3c1cfbc8ed67d139ad76f5cf8236cd2acd26627a30c104dfd9d3ff8a8"},
      {1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
       "75c46f6f3d9eb4f55ecaaee480db732e6c2105546f1e675003687c31719c7ba4",
       "7356cd7720d5b66b6d0697eb3177d9f8d73a4a5c5e968896eb6a689684302706"},
      {1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
       "357dc55de0c7e382c900fd6e320acc04146be01db6a8ce7210b7189bd664ea69",
       "effaa245f065fbf82ac186839a249707c3bddf6d3fdda22d1b95a3c970379bcb"},
      {2048, "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
       "879cf1fa2ea0e79126cb1063617a05b6ad9d0b696d0d757cf053439f60a99dd1",
       "7b2945cb4fef70885cc5d78a87bf6f6207dd901ff239201351ffac04e1088a23"},
      {2049, "5f4d72f40d7a5f82b15ca2b2e44b1de3c2ef86c426c95c1af0b6879522563030",
       "9f29700902f7c86e514ddc4df1e3049f258b2472b6dd5267f61bf13983b78dd5",
       "2ea477c5515cc3dd606512ee72bb3e0e758cfae7232826f35fb98ca1bcbdf273"},
      {31744, "62b6960e1a44bcc1eb1a611a8d6235b6b4b78f32e7abc4fb4c6cdcce94895c47",
       "efa53b389ab67c593dba624d898d0f7353ab99e4ac9d42302ee64cbf9939a419",
       "39772aef80e0ebe60596361e45b061e8f417429d529171b6764468c22928e28e"},
  };
  return list;
}

TEST(Blake3, KnownDigestsInAllModes) {
  ASSERT_EQ(kKeyText.size(), 32u);
  for (const Vector& vector : vectors()) {
    const auto data = pattern(vector.size);
    EXPECT_EQ(hex(blake3(data)), vector.hash) << vector.size;
    EXPECT_EQ(hex(blake3_keyed(test_key(), data)), vector.keyed) << vector.size;
    EXPECT_EQ(hex(blake3_derive_key(kContext, data)), vector.derived) << vector.size;
  }
}

TEST(Blake3, HasherTakesAnyCuts) {
  std::mt19937_64 rng(3);
  for (int round = 0; round < 200; ++round) {
    const auto data = pattern(rng() % 9000);
    Blake3Hasher plain;
    Blake3Hasher keyed = Blake3Hasher::keyed(test_key());
    std::span<const std::byte> rest(data);
    while (!rest.empty()) {
      const size_t step = std::min<size_t>(rest.size(), rng() % 1500);
      plain.update(rest.first(step));
      keyed.update(rest.first(step));
      rest = rest.subspan(step);
    }
    ASSERT_EQ(plain.digest(), blake3(data)) << data.size();
    ASSERT_EQ(keyed.digest(), blake3_keyed(test_key(), data)) << data.size();
  }
}

TEST(Blake3, DigestDoesNotDisturbTheHasher) {
  const auto data = pattern(5000);
  Blake3Hasher hasher;
  for (size_t at = 0; at < data.size(); at += 100) {
    EXPECT_EQ(hasher.digest(), blake3(std::span(data).first(at)));
    hasher.update(std::span(data).subspan(at, 100));
  }
}

TEST(Blake3, ExtendedOutputBeginsWithTheDigest) {
  const auto data = pattern(2049);
  Blake3Hasher hasher;
  hasher.update(data);
  std::array<std::byte, 100> out{};
  hasher.finish(out);
  EXPECT_EQ(hex(out),
            "5f4d72f40d7a5f82b15ca2b2e44b1de3c2ef86c426c95c1af0b687952256303096de31d71d74103403822a2e0bc1eb19"
            "3e7aecc9643a76b7bbc0c9f9c52e8783aae98764ca468962b5c2ec92f0c74eb5448d519713e09413719431c802f948dd"
            "5d90425a");
}

TEST(Blake3, LongContextIsHashedWhole) {
  const std::string context(3000, 'c');
  const std::string other = context.substr(0, 2999) + "d";
  const auto data = pattern(10);
  EXPECT_NE(blake3_derive_key(context, data), blake3_derive_key(other, data));
}

}  // namespace
}  // namespace mooncache

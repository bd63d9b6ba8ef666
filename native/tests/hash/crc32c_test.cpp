#include "mooncache/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "hash/crc32c_impl.h"

namespace mooncache {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::vector<std::byte> random_bytes(size_t size, std::mt19937_64& rng) {
  std::vector<std::byte> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(rng());
  return bytes;
}

TEST(Crc32c, VectorsOfRfc3720) {
  std::vector<std::byte> bytes(32, std::byte{0});
  EXPECT_EQ(crc32c(bytes), 0x8a9136aau);
  std::fill(bytes.begin(), bytes.end(), std::byte{0xff});
  EXPECT_EQ(crc32c(bytes), 0x62a8ab43u);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(i);
  EXPECT_EQ(crc32c(bytes), 0x46dd794eu);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(31 - i);
  EXPECT_EQ(crc32c(bytes), 0x113fdb5cu);
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xe3069283u);
  EXPECT_EQ(crc32c({}), 0u);
  EXPECT_EQ(crc32c({}, 0x12345678u), 0x12345678u) << "nothing more leaves a CRC as it is";
}

TEST(Crc32c, EveryImplementationAgrees) {
  const auto all = hash::crc32c_implementations();
  ASSERT_EQ(all.front().name, "portable");
  EXPECT_TRUE(std::any_of(all.begin(), all.end(),
                          [](const auto& one) { return one.name == crc32c_implementation(); }));
  std::mt19937_64 rng(7);
  const auto data = random_bytes(100'000, rng);
  for (int round = 0; round < 3000; ++round) {
    const size_t limit = round % 4 == 0 ? 60'000 : 1'500;
    const size_t offset = rng() % 130;
    const size_t size = rng() % limit;
    const auto seed = static_cast<uint32_t>(rng());
    const uint32_t expected = all.front().raw(seed, data.data() + offset, size);
    for (const auto& implementation : all) {
      ASSERT_EQ(implementation.raw(seed, data.data() + offset, size), expected)
          << implementation.name << " offset " << offset << " size " << size;
    }
  }
}

TEST(Crc32c, TheProcessorsOwnIsUsedUnlessItIsEmulated) {
  const std::vector<hash::Crc32cImplementation> all = {
      {"portable", nullptr, nullptr}, {"sse42", nullptr, nullptr}, {"avx512", nullptr, nullptr}};
  const auto picked = [&](std::vector<double> cost) { return all[hash::pick_crc32c(all, cost)].name; };
  EXPECT_EQ(picked({40, 2, 1}), "avx512");
  EXPECT_EQ(picked({40, 2, 3}), "avx512") << "noise decides nothing";
  EXPECT_EQ(picked({40, 300, 900}), "portable");
  EXPECT_EQ(picked({40, 2, 50}), "sse42");
  EXPECT_EQ(hash::pick_crc32c(std::span(all).first(1), std::vector<double>{7}), 0u);
}

TEST(Crc32c, EveryImplementationCopiesExactly) {
  const auto all = hash::crc32c_implementations();
  std::mt19937_64 rng(11);
  const auto data = random_bytes(100'000, rng);
  std::vector<std::byte> target(data.size());
  for (int round = 0; round < 800; ++round) {
    const size_t size = rng() % (round % 4 == 0 ? 60'000 : 1'500);
    const size_t from = rng() % 130;
    const size_t to = 64 + rng() % 130;
    const bool stream = rng() % 2 == 0;
    const auto seed = static_cast<uint32_t>(rng());
    const uint32_t expected = all.front().raw(seed, data.data() + from, size);
    for (const auto& implementation : all) {
      std::fill(target.begin(), target.end(), std::byte{0x5a});
      ASSERT_EQ(implementation.copy_raw(seed, target.data() + to, data.data() + from, size, stream), expected)
          << implementation.name << " size " << size << " stream " << stream;
      ASSERT_TRUE(std::equal(data.data() + from, data.data() + from + size, target.data() + to));
      const auto untouched = [](std::byte byte) { return byte == std::byte{0x5a}; };
      ASSERT_TRUE(std::all_of(target.begin(), target.begin() + static_cast<ptrdiff_t>(to), untouched));
      ASSERT_TRUE(std::all_of(target.begin() + static_cast<ptrdiff_t>(to + size), target.end(), untouched));
    }
  }
}

// Somebody may write to the source while it is copied: the checksum is that of the bytes that arrived.
TEST(Crc32c, TheSumIsThatOfTheCopyWhileTheSourceChanges) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the race is what is tested";
#endif
  constexpr size_t kSize = 40'000;
  std::vector<std::byte> source(kSize), copy(kSize);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (unsigned value = 0; !done; ++value) {
      for (size_t at = 0; at < kSize; at += 32) {
        std::atomic_ref(source[at]).store(static_cast<std::byte>(value), std::memory_order_relaxed);
      }
    }
  });
  for (const auto& way : hash::crc32c_implementations()) {
    for (const bool stream : {false, true}) {
      size_t torn = 0;
      for (size_t round = 0; round < 2'000; ++round) {
        const size_t offset = round % 64, size = kSize - 64 - round;
        const uint32_t state = way.copy_raw(~0u, copy.data() + offset, source.data(), size, stream);
        torn += state == way.raw(~0u, copy.data() + offset, size) ? 0 : 1;
      }
      EXPECT_EQ(torn, 0u) << way.name << (stream ? ", streamed" : "");
    }
  }
  done = true;
  writer.join();
}

TEST(Crc32c, LargeCopyStreamsAndAgrees) {
  std::mt19937_64 rng(13);
  for (const size_t size : {size_t{256} << 10, (size_t{1} << 20) + 77, (size_t{3} << 20) - 1}) {
    const auto data = random_bytes(size, rng);
    std::vector<std::byte> target(size + 1);
    EXPECT_EQ(copy_crc32c(target.data() + 1, data.data(), size, 99), crc32c(data, 99));
    EXPECT_TRUE(std::equal(data.begin(), data.end(), target.begin() + 1));
  }
}

TEST(Crc32c, PiecesOfMuchStreamAndAgree) {
  std::mt19937_64 rng(19);
  const uint64_t together = 1 << 20;
  for (const size_t size : {size_t{100}, size_t{4} << 10, (size_t{16} << 10) + 7, size_t{40'000}}) {
    const auto data = random_bytes(size, rng);
    for (const size_t offset : {0, 1, 16, 63}) {
      std::vector<std::byte> target(size + offset + 1, std::byte{0x5a});
      EXPECT_EQ(copy_crc32c(target.data() + offset, data.data(), size, 99, together), crc32c(data, 99));
      EXPECT_TRUE(std::equal(data.begin(), data.end(), target.begin() + offset));
      EXPECT_EQ(target.back(), std::byte{0x5a}) << "written behind its end";
    }
  }
}

TEST(Crc32c, ContinuingEqualsCombiningEqualsDirect) {
  std::mt19937_64 rng(17);
  for (int round = 0; round < 500; ++round) {
    const auto data = random_bytes(rng() % 5000, rng);
    const size_t cut = data.empty() ? 0 : rng() % (data.size() + 1);
    const auto a = std::span(data).first(cut);
    const auto b = std::span(data).subspan(cut);
    const uint32_t direct = crc32c(data);
    EXPECT_EQ(crc32c(b, crc32c(a)), direct);
    EXPECT_EQ(crc32c_combine(crc32c(a), crc32c(b), b.size()), direct);
  }
}

TEST(Crc32c, CombineTakesLengthsBeyond32Bits) {
  // CRCs of 2^k zero bytes by doubling; then 2^40 + 2^33 + 5 of them put together in two orders.
  std::vector<uint32_t> zeros = {crc32c(std::vector<std::byte>(1))};
  for (size_t k = 0; k < 40; ++k) zeros.push_back(crc32c_combine(zeros[k], zeros[k], uint64_t{1} << k));
  EXPECT_EQ(zeros[16], crc32c(std::vector<std::byte>(size_t{1} << 16)));
  const uint32_t five = crc32c(std::vector<std::byte>(5));
  const uint64_t high = (uint64_t{1} << 40) + (uint64_t{1} << 33);
  const uint32_t left = crc32c_combine(crc32c_combine(zeros[40], zeros[33], uint64_t{1} << 33), five, 5);
  const uint32_t right = crc32c_combine(five, crc32c_combine(zeros[33], zeros[40], uint64_t{1} << 40), high);
  EXPECT_EQ(left, right);
  EXPECT_EQ(crc32c_combine(left, 0, 0), left);
  EXPECT_EQ(crc32c_combine(0, left, high), left) << "nothing in front changes nothing";
}

}  // namespace
}  // namespace mooncache

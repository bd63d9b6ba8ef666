// The kernel's very source, compiled as C++: each of its threads is a thread here, __syncthreads a barrier.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <random>
#include <thread>

#include "gpu/gather.h"
#include "mooncache/crc32c.h"

namespace mooncache::gpu {
namespace {

namespace cuda {

struct Index {
  unsigned x = 0;
};
struct uint4 {  // NOLINT(readability-identifier-naming)
  unsigned x, y, z, w;
};
thread_local Index threadIdx;
Index blockIdx, blockDim;
std::barrier<>* block_barrier = nullptr;

inline void sync() {
  block_barrier->arrive_and_wait();
}
inline void atomicXor(unsigned* at, unsigned value) {
  std::atomic_ref(*at).fetch_xor(value);
}

#define __device__
#define __global__
#define __shared__ static
#define __syncthreads sync
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wunused-function"
#include "gpu/gather.cu"
#pragma GCC diagnostic pop

}  // namespace cuda

void launch(std::vector<GatherPiece>& pieces, std::vector<uint32_t>& sums) {
  constexpr unsigned kThreads = kWarpsPerBlock * 32;
  cuda::blockDim.x = kThreads;
  const auto count = static_cast<uint32_t>(pieces.size());
  for (unsigned block = 0; block < (count + kWarpsPerBlock - 1) / kWarpsPerBlock; ++block) {
    cuda::blockIdx.x = block;
    std::barrier barrier(kThreads);
    cuda::block_barrier = &barrier;
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        cuda::threadIdx.x = i;
        cuda::gather_crc(reinterpret_cast<const cuda::GatherPiece*>(pieces.data()), count,
                         gather_constants().data(), sums.data());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// Slices of these sizes at these distances from a 16-byte boundary, gathered and scattered back.
void round_trip(const std::vector<std::vector<size_t>>& blocks, size_t skew, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::vector<std::byte>> memory;
  std::vector<DeviceSlice> slices;
  std::vector<uint32_t> counts, expected;
  std::vector<std::byte> all;
  for (const auto& sizes : blocks) {
    const size_t from = all.size();
    for (const size_t size : sizes) {
      auto& bytes = memory.emplace_back(size + skew + 16);
      for (auto& byte : bytes) byte = static_cast<std::byte>(random());
      std::byte* at = bytes.data() + skew;
      slices.push_back({reinterpret_cast<uint64_t>(at), size});
      all.insert(all.end(), at, at + size);
    }
    counts.push_back(static_cast<uint32_t>(sizes.size()));
    expected.push_back(crc32c(std::span(all).subspan(from)));
  }
  std::vector<std::byte> packed(all.size() + 16);
  for (const bool into : {false, true}) {
    auto pieces = cut(slices, counts, reinterpret_cast<uint64_t>(packed.data()), into);
    ASSERT_TRUE(pieces);
    std::vector<uint32_t> sums(blocks.size());
    if (into) {
      for (auto& bytes : memory) std::fill(bytes.begin() + skew, bytes.end() - 16, std::byte{0});
    }
    launch(*pieces, sums);
    for (size_t i = 0, size = 0; i < blocks.size(); ++i, size = 0) {
      for (const size_t part : blocks[i]) size += part;
      EXPECT_EQ(finish_crc(sums[i], size), expected[i]) << "block " << i << " into " << into;
    }
    std::vector<std::byte> now;
    for (const DeviceSlice& slice : slices) {
      const auto* at = reinterpret_cast<const std::byte*>(slice.address);
      now.insert(now.end(), at, at + slice.size);
    }
    EXPECT_TRUE(now == all);
    EXPECT_TRUE(std::equal(all.begin(), all.end(), packed.begin()));
  }
}

TEST(GatherKernel, AlignedSlicesOfAPagedCache) {
  round_trip({{4096, 4096, 65'536, 16}, {4096}, {kPieceBytes + 16, 512, 496, 528}}, 0, 1);
}
TEST(GatherKernel, OddSizesAndAddresses) {
  for (const size_t skew : {1u, 8u, 15u})
    round_trip({{1, 2, 31, 32, 33, 1000}, {kPieceBytes + 7}}, skew, skew);
}
TEST(GatherKernel, EmptySlicesAndBlocks) {
  round_trip({{0, 16, 0}, {}, {0}, {5}}, 0, 3);
}

// What is left out counts for nothing: neither its bytes nor that it lies between others.
TEST(GatherKernel, GapsAreNotInTheChecksum) {
  for (const bool into : {false, true}) {
    SCOPED_TRACE(into);
    std::vector<std::byte> memory(600), packed(1000, std::byte{0});
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * 7 + 1);
    const auto at = reinterpret_cast<uint64_t>(memory.data());
    const DeviceSlice slices[] = {{0, 48}, {at, 160},       {0, 80}, {at + 160, 33},
                                  {0, 16}, {at + 200, 400}, {0, 7}};
    const uint32_t blocks[] = {5, 2};
    auto pieces = cut(slices, blocks, reinterpret_cast<uint64_t>(packed.data()), into);
    ASSERT_TRUE(pieces);
    if (into) {
      std::copy_n(memory.begin(), 160, packed.begin() + 48);
      std::copy_n(memory.begin() + 160, 33, packed.begin() + 288);
      std::copy_n(memory.begin() + 200, 400, packed.begin() + 337);
    }
    std::vector<uint32_t> sums(2);
    launch(*pieces, sums);
    EXPECT_EQ(finish_crc(sums[0], 193), crc32c(std::span(memory).first(193)));
    EXPECT_EQ(finish_crc(sums[1], 400), crc32c(std::span(memory).subspan(200)));
  }
}

TEST(GatherKernel, RandomShapes) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 10; ++round) {
    std::vector<std::vector<size_t>> blocks(1 + random() % 4);
    for (auto& sizes : blocks) {
      sizes.resize(random() % 5);
      for (size_t& size : sizes) size = random() % 3 == 0 ? random() % 5000 : (random() % 200) * 16;
    }
    SCOPED_TRACE(round);
    round_trip(blocks, random() % 2 * (random() % 16), random());
  }
}

TEST(GatherCut, RefusesWhatDoesNotAddUp) {
  const DeviceSlice slices[] = {{4096, 10}, {8192, 10}};
  const uint32_t few[] = {1}, many[] = {2, 1}, right[] = {1, 1};
  EXPECT_FALSE(cut(slices, few, 0, false));
  EXPECT_FALSE(cut(slices, many, 0, false));
  EXPECT_TRUE(cut(slices, right, 0, false));
  const DeviceSlice endless[] = {{0, UINT64_MAX}, {0, 2}};
  const uint32_t both[] = {2};
  EXPECT_FALSE(cut(endless, both, 0, false));
}

TEST(GatherCompile, RealCompilerTakesTheSource) {
  const char* path = std::getenv("MOONCACHE_TEST_NVRTC");
  const auto text = compile_gather(path != nullptr ? path : "", 9, 0);
  if (!text && path == nullptr) GTEST_SKIP() << text.status().message;
  ASSERT_TRUE(text) << text.status().message;
  EXPECT_NE(text->find("gather_crc"), std::string::npos);
}

}  // namespace
}  // namespace mooncache::gpu

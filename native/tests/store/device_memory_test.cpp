// Blocks on a GPU, over a fake driver: its memory cannot be read by the processor, its copies happen
// when somebody waits, and each call can fail.
#include "store/device_memory.h"

#include <dlfcn.h>

#include <thread>

#include "store/arena_view.h"
#include "store/store_fixture.h"

namespace mooncache::test {
namespace {

using store::DeviceMemory;

class DeviceMemoryTest : public ::testing::Test {
 protected:
  DeviceMemoryTest() {
    void* const library = dlopen(MOONCACHE_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    fail = reinterpret_cast<decltype(fail)>(dlsym(library, "fake_cuda_fail"));
    live = reinterpret_cast<decltype(live)>(dlsym(library, "fake_cuda_live"));
    hang = reinterpret_cast<decltype(hang)>(dlsym(library, "fake_cuda_hang"));
  }
  ~DeviceMemoryTest() override {
    fail("", 0, 0);
    hang(0);
  }
  static StoreConfig config() {
    StoreConfig config = small_config(4 * kMiB);
    config.open_arena = store::device_arena(0, MOONCACHE_FAKE_CUDA);
    return config;
  }
  static std::vector<std::byte> bytes_of(uint64_t seed, size_t size) {
    std::vector<std::byte> bytes(size);
    fill({bytes.data(), size}, seed);
    return bytes;
  }

  void (*fail)(const char*, int, int) = nullptr;
  long (*live)() = nullptr;
  void (*hang)(int) = nullptr;
};

TEST_F(DeviceMemoryTest, WithoutADriverTheStartSaysWhy) {
  StoreConfig absent = config();
  absent.open_arena = store::device_arena(0, "libcuda-that-is-not-there.so");
  const auto store = Store::open(absent);
  ASSERT_FALSE(store);
  EXPECT_EQ(store.code(), Code::kTransportUnavailable);
  EXPECT_NE(store.status().message.find("CUDA unavailable, because"), std::string::npos);
  StoreConfig other = config();
  other.open_arena = store::device_arena(7, MOONCACHE_FAKE_CUDA);
  EXPECT_FALSE(Store::open(other));
  other = config();
  other.arena_path = "/dev/shm";
  EXPECT_EQ(Store::open(other).code(), Code::kConfigInvalid);
}

TEST_F(DeviceMemoryTest, EveryFailingCallAtStartIsToldAndNothingLeaks) {
  const long before = live();
  for (const char* name :
       {"cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuMemHostAlloc", "cuMemAlloc"}) {
    SCOPED_TRACE(name);
    fail(name, 2, 0);
    const auto store = Store::open(config());
    fail("", 0, 0);
    ASSERT_FALSE(store);
    EXPECT_EQ(store.code(), Code::kNoSpace) << store.status().message;
    EXPECT_NE(store.status().message.find("CUDA_ERROR_OUT_OF_MEMORY"), std::string::npos);
  }
  EXPECT_EQ(live(), before);
}

TEST_F(DeviceMemoryTest, BytesComeBackThroughBothBuffers) {
  const long before = live();
  {
    const auto memory = DeviceMemory::open(0, 4 * kMiB, MOONCACHE_FAKE_CUDA);
    ASSERT_TRUE(memory) << memory.status().message;
    EXPECT_EQ((*memory)->data(), nullptr);
    for (const size_t size : {size_t{1}, size_t{256} << 10, (size_t{256} << 10) + 1, size_t{1'500'001}}) {
      const auto bytes = bytes_of(size, size);
      ASSERT_TRUE((*memory)->copy_in(12'345, {bytes.data(), size}));
      std::vector<std::byte> back(size);
      ASSERT_TRUE((*memory)->copy_out(12'345, {back.data(), size}));
      EXPECT_EQ(back, bytes);
    }
  }
  EXPECT_EQ(live(), before);
}

TEST_F(DeviceMemoryTest, ThreadsDoNotMixTheirBytes) {
  const auto memory = DeviceMemory::open(0, 8 * kMiB, MOONCACHE_FAKE_CUDA);
  ASSERT_TRUE(memory);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (uint64_t number = 0; number < 6; ++number) {  // more than there are buffers
    threads.emplace_back([&, number] {
      for (uint64_t round = 0; round < 10; ++round) {
        const auto bytes = bytes_of(number * 100 + round, 700'000);
        std::vector<std::byte> back(bytes.size());
        const bool moved = (*memory)->copy_in(number * kMiB, {bytes.data(), bytes.size()}).is_ok() &&
                           (*memory)->copy_out(number * kMiB, {back.data(), back.size()}).is_ok();
        if (!moved || back != bytes) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(DeviceMemoryTest, AStoreKeepsBlocksThere) {
  const auto store = open_store(config());
  ASSERT_NE(store, nullptr);
  EXPECT_FALSE(store->addressable());
  EXPECT_EQ(store->arena().kind, "gpu");
  EXPECT_EQ(store->arena_view().sample().data, nullptr);
  for (uint64_t number = 0; number < 9; ++number) {  // more than fit: evictions as everywhere
    const auto bytes = bytes_of(number, 700'000);
    const auto reservation = store->reserve(kTenant, key_of(number), bytes.size(), number);
    ASSERT_TRUE(reservation);
    EXPECT_EQ(store->writable(reservation->id).size, 0u);
    EXPECT_EQ(store->write(reservation->id, 1, {bytes.data(), bytes.size()}).code, Code::kInvalidArgument);
    ASSERT_TRUE(store->write(reservation->id, 0, {bytes.data(), bytes.size()}));
    ASSERT_TRUE(store->commit(reservation->id, crc32c(bytes), number));
    EXPECT_EQ(store->write(reservation->id, 0, {bytes.data(), 1}).code, Code::kReservationUnknown);
  }
  EXPECT_GT(store->stats().evicted_bytes, 0u);
  const auto pinned = store->acquire(kTenant, key_of(8), 100);
  ASSERT_TRUE(pinned);
  EXPECT_EQ(pinned->info.tier, Tier::kHbm);
  EXPECT_EQ(store->readable(pinned->id).size, 0u);
  std::vector<std::byte> back(700'000);
  ASSERT_TRUE(store->read(pinned->id, 0, {back.data(), back.size()}));
  EXPECT_EQ(back, bytes_of(8, 700'000));
  ASSERT_EQ(store->flip_bit(kTenant, key_of(8), 8 * 5), Code::kOk);
  ASSERT_TRUE(store->read(pinned->id, 0, {back.data(), back.size()}));
  EXPECT_NE(back, bytes_of(8, 700'000));
  EXPECT_EQ(store->read(pinned->id, 699'999, {back.data(), 2}).code, Code::kInvalidArgument);
  store->release(pinned->id);
  EXPECT_EQ(store->read(pinned->id, 0, {back.data(), 1}).code, Code::kPinUnknown);
  std::string why;
  EXPECT_TRUE(store->check(&why)) << why;
}

TEST_F(DeviceMemoryTest, AFailedCopyIsToldAndTheNextOneWorks) {
  const auto memory = DeviceMemory::open(0, kMiB, MOONCACHE_FAKE_CUDA);
  ASSERT_TRUE(memory);
  const auto bytes = bytes_of(1, 600'000);
  std::vector<std::byte> back(bytes.size());
  for (const char* name : {"cuMemcpyHtoDAsync", "cuCtxPushCurrent"}) {
    for (const int after : {0, 1}) {
      SCOPED_TRACE(name);
      fail(name, 700, after);
      const Status status = (*memory)->copy_in(0, {bytes.data(), bytes.size()});
      fail("", 0, 0);
      EXPECT_FALSE(status);
      EXPECT_NE(status.message.find("cuda:0 (Fake GPU)"), std::string::npos) << status.message;
      EXPECT_EQ((*memory)->lost_bytes(), 0u);
      for (int lane = 0; lane < 4; ++lane) {
        ASSERT_TRUE((*memory)->copy_in(0, {bytes.data(), bytes.size()}));
        ASSERT_TRUE((*memory)->copy_out(0, {back.data(), back.size()}));
        EXPECT_EQ(back, bytes);
      }
    }
  }
}

TEST_F(DeviceMemoryTest, ADeviceThatHangsIsAskedOnce) {
  const auto memory = DeviceMemory::open(0, kMiB, MOONCACHE_FAKE_CUDA);
  ASSERT_TRUE(memory);
  std::vector<std::byte> bytes(1000);
  hang(1);
  EXPECT_FALSE((*memory)->copy_in(0, {bytes.data(), bytes.size()}));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ((*memory)->copy_out(0, {bytes.data(), bytes.size()}).code, Code::kNodeUnavailable);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
  EXPECT_EQ((*memory)->lost_bytes(), kMiB);
  hang(0);
}

TEST_F(DeviceMemoryTest, ADeviceThatAnswersAgainHasItsBytesStill) {
  const auto store = open_store(config());
  ASSERT_NE(store, nullptr);
  const auto bytes = bytes_of(1, 700'000);
  const auto put = [&](uint64_t number) {
    const auto reservation = store->reserve(kTenant, key_of(number), bytes.size(), number);
    if (!reservation) return reservation.code();
    const Status written = store->write(reservation->id, 0, {bytes.data(), bytes.size()});
    if (written) return store->commit(reservation->id, crc32c(bytes), number).code;
    store->abort(reservation->id);
    return written.code;
  };
  ASSERT_EQ(put(1), Code::kOk);
  hang(1);
  EXPECT_NE(put(2), Code::kOk);
  EXPECT_EQ(store->lost_bytes(), 4 * kMiB);
  EXPECT_TRUE(store->draining() && store->arena_gone());
  EXPECT_EQ(put(3), Code::kDraining);
  EXPECT_EQ(store->arena_view().flush_device_writes().code, Code::kNodeUnavailable);
  store->set_draining(true);
  hang(0);
  const Deadline deadline = Deadline::after_ms(20'000);
  while (store->lost_bytes() > 0 && !deadline.expired())
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_FALSE(store->arena_gone());
  EXPECT_EQ(put(3), Code::kDraining) << "that is what somebody asked for";
  store->set_draining(false);
  EXPECT_EQ(put(3), Code::kOk);
  std::vector<std::byte> back(bytes.size());
  for (const uint64_t number : {1u, 3u}) {
    const auto pinned = store->acquire(kTenant, key_of(number), 100);
    ASSERT_TRUE(pinned);
    ASSERT_TRUE(store->read(pinned->id, 0, {back.data(), back.size()}));
    EXPECT_EQ(back, bytes);
    store->release(pinned->id);
  }
}

}  // namespace
}  // namespace mooncache::test

// Staging over a fake driver: bytes arrive when wait() returned, every failing call is told, nothing
// leaks, and no wait is longer than its deadline.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "mooncache/crc32c.h"
#include "mooncache/gpu.h"

namespace mooncache {
namespace {

Deadline soon() {
  return Deadline::after_ms(5000);
}

class Gpu : public ::testing::Test {
 protected:
  Gpu() {
    library_ = dlopen(MOONCACHE_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    find("fake_cuda_fail", fail);
    find("fake_cuda_live", live);
    find("fake_cuda_peek", peek);
    find("fake_cuda_poke", poke);
    find("fake_cuda_hang", hang);
    find("fake_cuda_event", event);
    find("fake_cuda_complete", complete);
    find("fake_cuda_wrong_kernel", wrong_kernel);
  }
  ~Gpu() override {
    hang(0);
    wrong_kernel(0);
    fail("", 0, 0);
  }
  static Result<std::shared_ptr<GpuDevice>> open(const char* nvrtc = "none") {
    return GpuDevice::open(0, {MOONCACHE_FAKE_CUDA, nvrtc});
  }
  std::vector<std::byte> pattern(size_t size, int seed) {
    std::vector<std::byte> bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 + seed + (i >> 8));
    return bytes;
  }
  void (*fail)(const char*, int, int) = nullptr;
  long (*live)() = nullptr;
  int (*peek)(unsigned long long, void*, size_t) = nullptr;
  int (*poke)(unsigned long long, const void*, size_t) = nullptr;
  void (*hang)(int) = nullptr;
  void* (*event)() = nullptr;
  void (*complete)(void*) = nullptr;
  void (*wrong_kernel)(int) = nullptr;

 private:
  template <typename F>
  void find(const char* name, F& slot) {
    slot = reinterpret_cast<F>(dlsym(library_, name));
    ASSERT_NE(slot, nullptr) << name;
  }
  void* library_;
};

TEST_F(Gpu, AbsentDriverIsASentence) {
  const auto device = GpuDevice::open(0, {"libcuda-that-is-not-there.so", ""});
  ASSERT_FALSE(device);
  EXPECT_EQ(device.status().code, Code::kTransportUnavailable);
  EXPECT_NE(device.status().message.find("CUDA unavailable, because"), std::string::npos);
  EXPECT_FALSE(GpuDevice::open(7, {MOONCACHE_FAKE_CUDA, "none"}));
}

TEST_F(Gpu, TwoBuffersTakeTurns) {
  const long before = live();
  {
    const auto device = open();
    ASSERT_TRUE(device) << device.status().message;
    EXPECT_EQ((*device)->name(), "Fake GPU");
    auto stager = (*device)->make_stager(1 << 20, 2);
    ASSERT_TRUE(stager) << stager.status().message;
    EXPECT_EQ((*stager)->how().rfind("copies, because", 0), 0u) << (*stager)->how();
    const auto memory = (*device)->allocate(1 << 20);
    ASSERT_TRUE(memory);
    const auto bytes = pattern(300'000, 1);
    ASSERT_EQ(poke(*memory, bytes.data(), bytes.size()), 0);

    const DeviceSlice slices[] = {{*memory + 100'000, 200'000}, {*memory, 0}, {*memory, 100'000}};
    const uint32_t blocks[] = {2, 1};
    std::memset((*stager)->slot(0).data, 0, 300'000);
    ASSERT_TRUE((*stager)->start_out(0, slices, blocks));
    EXPECT_EQ((*stager)->slot(0).data[5], std::byte{0});  // not before wait()
    EXPECT_EQ((*stager)->start_out(0, slices, blocks).code, Code::kInvalidArgument);
    const auto crcs = (*stager)->wait(0, soon());
    ASSERT_TRUE(crcs);
    EXPECT_TRUE(crcs->empty());  // no kernel here
    EXPECT_EQ(std::memcmp((*stager)->slot(0).data, bytes.data() + 100'000, 200'000), 0);
    EXPECT_EQ(std::memcmp((*stager)->slot(0).data + 200'000, bytes.data(), 100'000), 0);

    const auto other = pattern(300'000, 9);
    std::memcpy((*stager)->slot(1).data, other.data(), other.size());
    ASSERT_TRUE((*stager)->start_in(1, slices, blocks));
    ASSERT_TRUE((*stager)->wait(1, soon()));
    std::vector<std::byte> now(300'000);
    ASSERT_EQ(peek(*memory, now.data(), now.size()), 0);
    EXPECT_EQ(std::memcmp(now.data() + 100'000, other.data(), 200'000), 0);
    EXPECT_EQ(std::memcmp(now.data(), other.data() + 200'000, 100'000), 0);

    const DeviceSlice gap[] = {{0, 1000}, {*memory, 10}};
    std::memcpy((*stager)->slot(0).data, other.data(), other.size());
    ASSERT_TRUE((*stager)->start_in(0, gap, std::span(blocks, 1)));
    ASSERT_TRUE((*stager)->wait(0, soon()));
    ASSERT_EQ(peek(*memory, now.data(), 20), 0);
    EXPECT_EQ(std::memcmp(now.data(), other.data() + 1000, 10), 0);
    EXPECT_EQ(std::memcmp(now.data() + 10, other.data() + 200'010, 10), 0);

    const DeviceSlice large[] = {{*memory, (1 << 20) + 1}};
    const uint32_t one[] = {1};
    EXPECT_EQ((*stager)->start_out(0, large, one).code, Code::kInvalidArgument);
    const DeviceSlice huge[] = {{*memory, 1ull << 60}};  // its pieces alone would not fit into memory
    EXPECT_EQ((*stager)->start_out(0, huge, one).code, Code::kInvalidArgument);
    EXPECT_TRUE((*device)->release(*memory));
  }
  EXPECT_EQ(live(), before);
}

TEST_F(Gpu, EveryFailingCallIsToldAndNothingLeaks) {
  const long before = live();
  for (const int code : {1, 2, 700, 999}) {
    for (const char* name :
         {"cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuStreamCreate", "cuMemHostAlloc",
          "cuMemAlloc", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuStreamQuery"}) {
      for (const int after : {0, 1}) {
        SCOPED_TRACE(std::string(name) + " " + std::to_string(code) + " after " + std::to_string(after));
        fail(name, code, after);
        const Status status = [&]() -> Status {
          const auto device = open();
          if (!device) return device.status();
          auto stager = (*device)->make_stager(4096, 2);
          if (!stager) return stager.status();
          const auto memory = (*device)->allocate(4096);
          if (!memory) return memory.status();
          const DeviceSlice slices[] = {{*memory, 10}, {*memory + 50, 10}};
          const uint32_t blocks[] = {2};
          Status first = (*stager)->start_out(0, slices, blocks);
          const Status out = (*stager)->wait(0, soon()).status();
          if (first) first = out;
          const Status second = (*stager)->start_in(1, slices, blocks);
          const Status in = (*stager)->wait(1, soon()).status();
          fail("", 0, 0);
          for (const size_t slot : {0, 1}) {
            while (!(*stager)->settled(slot)) std::this_thread::yield();
          }
          EXPECT_TRUE((*device)->release(*memory));
          return !first ? first : !second ? second : in;
        }();
        fail("", 0, 0);
        const bool once = std::string(name) == "cuDeviceGet" ||
                          std::string(name) == "cuDevicePrimaryCtxRetain" ||
                          std::string(name) == "cuMemAlloc";
        if (once && after == 1) continue;  // it is called only once
        EXPECT_FALSE(status);
        EXPECT_EQ(status.code, code == 2 ? Code::kNoSpace : Code::kTransportUnavailable) << status.message;
        EXPECT_NE(status.message.find(std::to_string(code)), std::string::npos) << status.message;
      }
    }
  }
  EXPECT_EQ(live(), before);
}

TEST_F(Gpu, HandlesForOtherProcessesAndDevices) {
  const long before = live();
  const auto device = open();
  ASSERT_TRUE(device);
  const auto memory = (*device)->allocate(1 << 20);
  ASSERT_TRUE(memory);
  const auto handle = (*device)->share({*memory + 4096, 100});
  ASSERT_TRUE(handle);
  EXPECT_EQ(handle->offset, 4096u);
  const auto attached = (*device)->attach(*handle);
  ASSERT_TRUE(attached);
  EXPECT_EQ(*attached, *memory + 4096);
  EXPECT_TRUE((*device)->detach(*attached));
  EXPECT_EQ((*device)->share({*memory + 4096, 1 << 20}).status().code, Code::kInvalidArgument);
  // an offset that another process made up does not name memory of anybody else, and nothing stays open
  for (const uint64_t offset : {1ull << 20, 1ull << 50, ~0ull}) {
    GpuIpcHandle hostile = *handle;
    hostile.offset = offset;
    EXPECT_EQ((*device)->attach(hostile).status().code, Code::kInvalidArgument) << offset;
  }
  EXPECT_EQ(live(), before + 2);  // the context, the memory

  const auto exported = (*device)->export_dma_buf({*memory + 70'000, 5000});
  ASSERT_TRUE(exported);
  EXPECT_EQ(exported->fd, 1000);
  EXPECT_EQ(exported->offset, (*memory + 70'000) % static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
  EXPECT_EQ(exported->length, 5000u);
  EXPECT_TRUE((*device)->export_dma_buf({*memory, 10}));  // not a page of somebody else
  EXPECT_TRUE((*device)->export_dma_buf({*memory, 1 << 20}));
  for (const uint64_t size : {uint64_t{0}, uint64_t{(1 << 20) + 1}, UINT64_MAX - *memory, UINT64_MAX})
    EXPECT_EQ((*device)->export_dma_buf({*memory, size}).status().code, Code::kInvalidArgument) << size;
  fail("cuMemGetHandleForAddressRange", 801, 0);
  EXPECT_EQ((*device)->export_dma_buf({*memory, 10}).status().code, Code::kTransportUnavailable);
  fail("", 0, 0);
  EXPECT_TRUE((*device)->release(*memory));
  EXPECT_FALSE((*device)->release(*memory));
}

TEST_F(Gpu, TheKernelGathersAndScattersWithChecksums) {
  const long before = live();
  {
    const auto device = open(MOONCACHE_FAKE_CUDA);
    ASSERT_TRUE(device);
    auto stager = (*device)->make_stager(1 << 20, 2);
    ASSERT_TRUE(stager);
    EXPECT_EQ((*stager)->how(), "one launch with CRC-32C");
    const auto memory = (*device)->allocate(1 << 20);
    ASSERT_TRUE(memory);
    const auto bytes = pattern(300'000, 3);
    ASSERT_EQ(poke(*memory, bytes.data(), bytes.size()), 0);
    const DeviceSlice slices[] = {{*memory + 4'096, 70'000}, {*memory + 100'001, 1'111}, {*memory, 4'096}};
    const uint32_t blocks[] = {2, 1};
    ASSERT_TRUE((*stager)->start_out(0, slices, blocks));
    const auto crcs = (*stager)->wait(0, soon());
    ASSERT_TRUE(crcs);
    const std::byte* packed = (*stager)->slot(0).data;
    EXPECT_EQ(std::memcmp(packed, bytes.data() + 4'096, 70'000), 0);
    EXPECT_EQ(std::memcmp(packed + 70'000, bytes.data() + 100'001, 1'111), 0);
    EXPECT_EQ(*crcs,
              (std::vector{crc32c(std::span(packed, 71'111)), crc32c(std::span(packed + 71'111, 4'096))}));

    std::memcpy((*stager)->slot(1).data, packed, 75'207);
    const DeviceSlice back[] = {{*memory + 500'000, 71'111}, {*memory + 600'000, 4'096}};
    const uint32_t ones[] = {1, 1};
    ASSERT_TRUE((*stager)->start_in(1, back, ones));
    const auto arrived = (*stager)->wait(1, soon());
    ASSERT_TRUE(arrived);
    EXPECT_EQ(*arrived, *crcs);
    std::vector<std::byte> now(71'111);
    ASSERT_EQ(peek(*memory + 500'000, now.data(), now.size()), 0);
    EXPECT_EQ(std::memcmp(now.data(), packed, now.size()), 0);

    // long slices are the copy engines' when nobody wants their checksums
    const DeviceSlice whole[] = {{*memory, 1 << 20}};
    ASSERT_TRUE((*stager)->start_out(0, whole, std::span(ones, 1), false));
    EXPECT_TRUE((*stager)->wait(0, soon())->empty());
    EXPECT_TRUE((*device)->release(*memory));
  }
  EXPECT_EQ(live(), before);
}

TEST_F(Gpu, AKernelThatIsWrongIsNotUsed) {
  const long before = live();
  wrong_kernel(1);
  const auto how = [&] {
    const auto device = open(MOONCACHE_FAKE_CUDA);
    return (*(*device)->make_stager(4096, 1))->how();
  };
  EXPECT_EQ(how(), "copies, because the kernel moved wrong bytes in its trial");
  wrong_kernel(0);
  for (const char* name : {"nvrtcCreateProgram", "nvrtcCompileProgram", "cuModuleLoadData",
                           "cuModuleGetFunction", "cuLaunchKernel"}) {
    fail(name, 7, 0);
    EXPECT_EQ(how().rfind("copies, because ", 0), 0u) << name;
  }
  EXPECT_EQ(how(), "one launch with CRC-32C");
  EXPECT_EQ(live(), before);
}

TEST_F(Gpu, NoWaitIsLongerThanItsDeadlineAndNoBufferGoesBackBefore) {
  const long before = live();
  for (const char* nvrtc : {"none", MOONCACHE_FAKE_CUDA}) {
    SCOPED_TRACE(nvrtc);
    const auto device = open(nvrtc);
    ASSERT_TRUE(device);
    const auto memory = (*device)->allocate(1 << 20);
    ASSERT_TRUE(memory);
    auto made = (*device)->make_stager(1 << 20, 2);
    ASSERT_TRUE(made);
    std::unique_ptr<GpuStager> stager = std::move(*made);
    const DeviceSlice slices[] = {{*memory, 1000}, {*memory + 5000, 1000}};
    const uint32_t blocks[] = {2};
    std::byte* packed = stager->slot(0).data;
    packed[0] = std::byte{0x77};

    hang(1);
    ASSERT_TRUE(stager->start_out(0, slices, blocks));
    const auto begun = Deadline::Clock::now();
    EXPECT_EQ(stager->wait(0, Deadline::after_ms(30)).code(), Code::kDeadlineExceeded);
    EXPECT_EQ((*device)->synchronize(Deadline::after_ms(30)).code, Code::kDeadlineExceeded);
    EXPECT_LT(Deadline::Clock::now() - begun, std::chrono::seconds(3));
    EXPECT_FALSE(stager->settled(0));
    EXPECT_TRUE(stager->settled(1));
    EXPECT_EQ(stager->start_out(0, slices, blocks).code, Code::kInvalidArgument);
    const long held = live();
    stager.reset();
    EXPECT_LT(live(), held);  // the buffer that nobody touches
    EXPECT_EQ((*device)->quarantined_bytes(), 1u << 20);
    EXPECT_EQ(packed[0], std::byte{0x77});  // still memory: the sanitizers would tell

    hang(0);
    EXPECT_TRUE((*device)->synchronize(soon()));
    while ((*device)->quarantined_bytes() != 0) std::this_thread::yield();
    EXPECT_TRUE((*device)->release(*memory));
  }
  EXPECT_EQ(live(), before);
}

TEST_F(Gpu, ADeviceThatHangsIsNotGivenMemoryWithoutEnd) {
  const auto device = open();
  ASSERT_TRUE(device);
  const auto memory = (*device)->allocate(4096);
  ASSERT_TRUE(memory);
  hang(1);
  const DeviceSlice slices[] = {{*memory, 4096}};
  const uint32_t blocks[] = {1};
  Status refused;
  int made = 0;
  for (; made < 10 && refused; ++made) {
    auto stager = (*device)->make_stager(512 << 20, 1);
    refused = stager.status();
    if (stager) (void)(*stager)->start_out(0, slices, blocks);
  }
  EXPECT_EQ(refused.code, Code::kBackPressure) << refused.message;
  EXPECT_EQ(made, 4);  // the fourth is refused
  hang(0);
  while ((*device)->quarantined_bytes() != 0) std::this_thread::yield();
  EXPECT_TRUE((*device)->make_stager(4096, 1));
  EXPECT_TRUE((*device)->release(*memory));
}

TEST_F(Gpu, MemoryThatMayBeTouchedOutlivesTheDevice) {
  const long before = live();
  hang(1);
  {
    const auto device = open();
    const auto memory = (*device)->allocate(4096);
    auto stager = (*device)->make_stager(4096, 1);
    const DeviceSlice slices[] = {{*memory, 4096}};
    const uint32_t blocks[] = {1};
    ASSERT_TRUE((*stager)->start_out(0, slices, blocks));
    EXPECT_EQ((*device)->synchronize(Deadline::after_ms(1)).code, Code::kDeadlineExceeded);
    ASSERT_TRUE((*device)->release(*memory));
  }
  EXPECT_EQ(live(),
            before + 3);  // context, stream, pinned buffer: the system takes them when the process ends
}

TEST_F(Gpu, CopiesBeginBehindTheEventThatTheyFollow) {
  const auto device = open();
  ASSERT_TRUE(device);
  const auto memory = (*device)->allocate(4096);
  auto stager = (*device)->make_stager(4096, 1);
  ASSERT_TRUE(stager);
  void* step = event();
  ASSERT_TRUE((*stager)->follow(0, reinterpret_cast<uint64_t>(step)));
  const DeviceSlice slices[] = {{*memory, 100}};
  const uint32_t blocks[] = {1};
  ASSERT_TRUE((*stager)->start_out(0, slices, blocks));
  EXPECT_EQ((*stager)->wait(0, Deadline::after_ms(20)).code(), Code::kDeadlineExceeded);
  const auto late = pattern(100, 5);  // what the step computes
  ASSERT_EQ(poke(*memory, late.data(), late.size()), 0);
  complete(step);
  ASSERT_TRUE((*stager)->wait(0, soon()));
  EXPECT_EQ(std::memcmp((*stager)->slot(0).data, late.data(), late.size()), 0);
  fail("cuStreamWaitEvent", 400, 0);
  EXPECT_EQ((*stager)->follow(0, 1).code, Code::kTransportUnavailable);
  EXPECT_TRUE((*device)->release(*memory));
}

}  // namespace
}  // namespace mooncache

// Blocks in the memory of a (fake) GPU, moved in place by (fake) RDMA devices. Addresses of the GPU
// cannot be read by the processor: a slip is a crash. Whatever fails, a block comes right, is a miss, or is
// left to staging (TRANSPORT_UNAVAILABLE), and no call waits longer than its deadline.
#include <filesystem>
#include <thread>

#include "client/buffer_book.h"
#include "client/node.h"
#include "client/rdma_pool.h"
#include "compare.h"
#include "gpu/fake_gpu.h"
#include "mooncache/crc32c.h"
#include "rdma/sockets.h"

namespace mooncache::testing {
namespace {

constexpr uint64_t kArenaBytes = 24 << 20;
constexpr int kDmaBuf = 1000;  // what the fake driver hands out

struct PageMemory {
  explicit PageMemory(size_t bytes)
      : size(bytes), data(static_cast<std::byte*>(std::aligned_alloc(4096, bytes))) {
    std::fill_n(data, size, std::byte{0x5a});
  }
  ~PageMemory() { std::free(data); }
  PageMemory(const PageMemory&) = delete;
  PageMemory& operator=(const PageMemory&) = delete;
  const size_t size;
  std::byte* const data;
};

class DevicePool : public RdmaPool {
 protected:
  void SetUp() override {
    RdmaPool::SetUp();
    if (rdma_is_real()) GTEST_SKIP() << "the GPU is a fake, and so must the devices be";
  }
  void TearDown() override {
    gpu_.hang(0);
    gpu_.wrong_kernel(0);
    RdmaPool::TearDown();
  }
  void open_device(uint32_t rails, uint32_t nodes = 1, ClientConfig config = client_config(false)) {
    open(rails, nodes, std::move(config));
    address_ = gpu_.adopt(arena_.data, arena_.size);
    fake().set_dma_buf(kDmaBuf, arena_.data, arena_.size);
    const Status listed = client_->register_device_buffer(gpu_.device, {address_, kArenaBytes});
    ASSERT_TRUE(listed) << listed.message;
  }
  Slice device(uint64_t at, uint64_t size) {
    return {reinterpret_cast<std::byte*>(address_ + at), static_cast<size_t>(size)};
  }
  static CallOptions options(int limit_ms = 20'000) {
    CallOptions how;
    how.device_memory = true;
    how.deadline = Deadline::after_ms(limit_ms);
    return how;
  }
  // `count` blocks of about 1 MiB out of the arena, where each has two slices.
  std::vector<PutOutcome> put_device(size_t count, uint32_t replicas = 1, CallOptions how = options()) {
    blocks_.clear();
    std::vector<std::vector<ConstSlice>> slices;
    std::vector<PutBlock> items;
    for (size_t i = 0; i < count; ++i) {
      blocks_.push_back(bytes_of(i + 1, kBlockBytes + i * 37));
      const size_t at = i * (kBlockBytes + 4096);
      std::copy(blocks_[i].begin(), blocks_[i].end(), arena_.data + at);
      const Slice first = device(at, 500'001), rest = device(at + 500'001, blocks_[i].size() - 500'001);
      slices.push_back({{first.data, first.size}, {rest.data, rest.size}});
    }
    for (size_t i = 0; i < count; ++i) items.push_back({key_of(i), slices[i]});
    std::vector<PutOutcome> outcomes(count);
    const Status status = client_->put(items, replicas, how, outcomes);
    if (!status) outcomes.assign(count, PutOutcome{status.code});
    return outcomes;
  }
  // All blocks into the arena; where a code is OK the bytes are right and nothing beside them changed.
  std::vector<Code> get_device(CallOptions how = options()) {
    std::fill_n(arena_.data, arena_.size, std::byte{0x5a});
    std::vector<Slice> slices;
    std::vector<GetBlock> items;
    for (size_t i = 0; i < blocks_.size(); ++i) slices.push_back(device(place(i), blocks_[i].size() + 100));
    for (size_t i = 0; i < blocks_.size(); ++i) items.push_back({key_of(i), std::span(&slices[i], 1)});
    std::vector<GetOutcome> outcomes(items.size());
    const Status status = client_->get(items, {}, how, outcomes);
    std::vector<Code> codes;
    for (size_t i = 0; i < outcomes.size(); ++i) {
      codes.push_back(status ? outcomes[i].code : status.code);
      if (codes[i] != Code::kOk) continue;
      const std::byte* at = arena_.data + place(i);
      EXPECT_EQ(outcomes[i].size, blocks_[i].size());
      EXPECT_TRUE(std::equal(blocks_[i].begin(), blocks_[i].end(), at)) << i;
      for (size_t k = 0; k < 100; ++k) EXPECT_EQ(at[blocks_[i].size() + k], std::byte{0x5a});
    }
    return codes;
  }
  static size_t place(size_t i) { return 8192 + i * (kBlockBytes + 8192); }
  std::string said() { return client_->gpu_direct(gpu_.device); }
  uint64_t block_bytes() const {
    uint64_t sum = 0;
    for (const auto& block : blocks_) sum += block.size();
    return sum;
  }
  static std::vector<Code> codes(const std::vector<PutOutcome>& outcomes) {
    std::vector<Code> list;
    for (const PutOutcome& outcome : outcomes) list.push_back(outcome.code);
    return list;
  }
  static std::vector<Code> all(size_t count, Code code) { return std::vector<Code>(count, code); }

  FakeGpu gpu_{true};
  PageMemory arena_{kArenaBytes};
  uint64_t address_ = 0;
};

TEST_F(DevicePool, BlocksGoAndComeInPlace) {
  open_device(2, 2);
  EXPECT_EQ(said(), "");
  EXPECT_EQ(codes(put_device(12)), all(12, Code::kOk));
  EXPECT_EQ(said(), "fake0:1 by dma-buf; fake1:1 by dma-buf");
  EXPECT_EQ(stat_of(*client_, "rdma_direct_bytes"), block_bytes());
  EXPECT_EQ(get_all(), 12u) << "into host memory";
  const uint64_t before = stat_of(*client_, "rdma_direct_bytes");
  EXPECT_EQ(get_device(), all(12, Code::kOk));
  EXPECT_EQ(stat_of(*client_, "rdma_direct_bytes"), before + block_bytes());
  EXPECT_LT(stat_of(*client_, "tcp_bytes"), kBlockBytes);
  EXPECT_EQ(stat_of(*client_, "put_items"), 12u);
  EXPECT_EQ(stat_of(*client_, "get_items"), 24u);
  EXPECT_EQ(stat_of(*client_, "get_hits"), 24u);
}

// As engines have it: a tensor for each layer.
TEST_F(DevicePool, ABlockInSeveralBuffersOfTheGpuGoesInPlace) {
  open_device(1);
  ASSERT_TRUE(client_->unregister_buffer(device(0, kArenaBytes)));
  const Slice tensors[] = {device(0, 1 << 20), device(1 << 20, kArenaBytes - (1 << 20))};
  for (const Slice& tensor : tensors) {
    // each is exported alone
    const uint64_t begin = reinterpret_cast<uint64_t>(tensor.data) - address_;
    fake().set_dma_buf(kDmaBuf, arena_.data + begin, tensor.size);
    ASSERT_TRUE(
        client_->register_device_buffer(gpu_.device, {reinterpret_cast<uint64_t>(tensor.data), tensor.size}));
    const Status attached = client_->attach_buffer(tensor);
    ASSERT_TRUE(attached) << attached.message;
  }
  const auto bytes = bytes_of(9, 600'000);
  std::copy(bytes.begin(), bytes.begin() + 300'000, arena_.data + 100);
  std::copy(bytes.begin() + 300'000, bytes.end(), arena_.data + (2 << 20));
  const Slice parts[] = {device(100, 300'000), device(2 << 20, 300'000)};
  const ConstSlice sources[] = {{parts[0].data, parts[0].size}, {parts[1].data, parts[1].size}};
  const PutBlock put{key_of(1), sources};
  PutOutcome stored;
  ASSERT_TRUE(client_->put(std::span(&put, 1), 1, options(), std::span(&stored, 1)));
  EXPECT_EQ(stored.code, Code::kOk) << said();
  std::fill_n(arena_.data, arena_.size, std::byte{0x5a});
  const GetBlock get{key_of(1), parts, 0};
  GetOutcome got;
  ASSERT_TRUE(client_->get(std::span(&get, 1), {}, options(), std::span(&got, 1)));
  EXPECT_EQ(got.code, Code::kOk) << said();
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.begin() + 300'000, arena_.data + 100));
  EXPECT_TRUE(std::equal(bytes.begin() + 300'000, bytes.end(), arena_.data + (2 << 20)));
  EXPECT_EQ(stat_of(*client_, "rdma_direct_bytes"), 2 * bytes.size());
  EXPECT_EQ(stat_of(*client_, "registrations"), 2u);
  for (const Slice& tensor : tensors) ASSERT_TRUE(client_->unregister_buffer(tensor));
}

TEST_F(DevicePool, TheRailBesideTheGpuIsKnown) {
  const TwoSockets machine;
  sysfs_folder_ = machine.folder();
  open_device(4);
  EXPECT_EQ(gpu_.device->pci_address(), "0000:3D:00.0");
  EXPECT_EQ(codes(put_device(2)), all(2, Code::kOk));
  EXPECT_EQ(said().find("fake0:1 by dma-buf, PIX; fake1:1 by dma-buf, PHB; "), 0u) << said();
}

TEST_F(DevicePool, CopiesHaveOneChecksumAndExistingBlocksAreTold) {
  open_device(1, 3);
  for (const PutOutcome& outcome : put_device(4, 2)) EXPECT_EQ(outcome.copies, 2u);
  EXPECT_EQ(codes(put_device(4, 2)), all(4, Code::kAlreadyExists));
  for (size_t i = 0; i < 4; ++i) {
    std::vector<BlockStat> stats(1);
    const Key key = key_of(i);
    ASSERT_TRUE(client_->stat(std::span(&key, 1), {}, stats));
    EXPECT_EQ(stats[0].crc32c, crc32c(blocks_[i]));
  }
}

TEST_F(DevicePool, SmallBatchesAndUnlistedMemoryAreLeftToStaging) {
  open_device(1);
  const ConstSlice small{device(0, 4096).data, 4096};
  const PutBlock block{key_of(100), std::span(&small, 1)};
  PutOutcome outcome;
  ASSERT_TRUE(client_->put(std::span(&block, 1), 1, options(), std::span(&outcome, 1)));
  EXPECT_EQ(outcome.code, Code::kTransportUnavailable);
  EXPECT_EQ(stat_of(*client_, "put_items"), 0u) << "it comes again, and counts then";
  EXPECT_EQ(stat_of(*client_, "put_failed"), 0u);
  EXPECT_EQ(stat_of(*client_, "rdma_bytes") + stat_of(*client_, "tcp_bytes"), 0u);

  put_device(3);
  const uint64_t other = gpu_.device->allocate(2 * kBlockBytes).value();
  const Slice slices[] = {device(0, 2 * kBlockBytes), {reinterpret_cast<std::byte*>(other), 2 * kBlockBytes}};
  const GetBlock items[] = {{key_of(0), std::span(slices, 1)}, {key_of(1), std::span(slices + 1, 1)}};
  std::vector<GetOutcome> outcomes(2);
  ASSERT_TRUE(client_->get(items, {}, options(), outcomes));
  EXPECT_EQ(outcomes[0].code, Code::kOk);
  EXPECT_EQ(outcomes[1].code, Code::kTransportUnavailable);
  EXPECT_EQ(stat_of(*client_, "get_items"), 1u);
  ASSERT_TRUE(gpu_.device->release(other));
  GetOptions range;
  range.whole = false;
  ASSERT_TRUE(client_->get(std::span(items, 1), range, options(), std::span(outcomes).first(1)));
  EXPECT_EQ(outcomes[0].code, Code::kTransportUnavailable) << "a range has no checksum of its own";
}

TEST_F(DevicePool, WithoutDmaBufByPeerMemoryWithoutBothStaged) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / ("modules-" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder / "module/nvidia_peermem");
  sysfs_folder_ = folder;
  open_device(1);
  fake().set_dma_buf_supported(0, false);
  EXPECT_EQ(codes(put_device(3)), all(3, Code::kOk));
  EXPECT_EQ(said(), "fake0:1 by nvidia-peermem, because fake0 and its driver cannot register a dma-buf");
  EXPECT_EQ(get_device(), all(3, Code::kOk));
  EXPECT_EQ(stat_of(*client_, "rdma_direct_bytes"), 2 * block_bytes());
  std::filesystem::remove_all(folder);
  ASSERT_TRUE(client_->unregister_buffer(device(0, kArenaBytes)));
  EXPECT_EQ(get_device(), all(3, Code::kTransportUnavailable));
  ASSERT_TRUE(client_->register_device_buffer(gpu_.device, {address_, kArenaBytes}));
  EXPECT_EQ(get_device(), all(3, Code::kTransportUnavailable));
  EXPECT_EQ(said().find("staged, because RDMA unavailable, because no device memory can be registered"), 0u)
      << said();
  const uint64_t failures = stat_of(*client_, "registration_failures");
  EXPECT_EQ(get_device(), all(3, Code::kTransportUnavailable));
  EXPECT_EQ(stat_of(*client_, "registration_failures"), failures) << "not tried again at once";
  EXPECT_EQ(stat_of(*client_, "rdma_fallbacks"), 0u) << "host memory goes on over RDMA";
  EXPECT_EQ(get_all(), 3u);
}

TEST_F(DevicePool, WithoutChecksumsOnTheDeviceItIsStaged) {
  open(1, 1);
  const FakeGpu plain(false);
  address_ = gpu_.adopt(arena_.data, arena_.size);
  ASSERT_TRUE(client_->register_device_buffer(plain.device, {address_, kArenaBytes}));
  EXPECT_EQ(codes(put_device(2)), all(2, Code::kTransportUnavailable));
  EXPECT_EQ(client_->gpu_direct(plain.device).find("staged, because the device computes no checksums: "), 0u);
  client_.reset();
}

TEST_F(DevicePool, AFlippedBitIsAMissAndTheOtherCopyIsRead) {
  open_device(1, 2);
  put_device(1);
  fake().flip_bits(1);
  EXPECT_EQ(get_device(), all(1, Code::kChecksumMismatch));
  EXPECT_EQ(stat_of(*client_, "miss_checksum"), 1u);
  EXPECT_EQ(get_device(), all(1, Code::kOk)) << "the block at rest was right";
  put_device(2, 2);
  fake().flip_bits(1);
  EXPECT_EQ(get_device()[1], Code::kOk);
  EXPECT_EQ(stat_of(*client_, "miss_checksum"), 2u);
}

TEST_F(DevicePool, AFailingKernelLeavesTheBlockToStaging) {
  open_device(1);
  put_device(2);
  gpu_.fail("cuLaunchKernel", 700, 0);
  EXPECT_EQ(get_device(), all(2, Code::kTransportUnavailable));
  gpu_.fail("cuFlushGPUDirectRDMAWrites", 700, 0);
  EXPECT_EQ(get_device(), all(2, Code::kTransportUnavailable)) << "the GPU may not see what landed";
  gpu_.fail("cuStreamQuery", 700, 0);
  EXPECT_EQ(get_device(), all(2, Code::kTransportUnavailable));
  gpu_.fail("cuLaunchKernel", 700, 0);
  EXPECT_EQ(codes(put_device(3)),
            (std::vector<Code>{Code::kAlreadyExists, Code::kAlreadyExists, Code::kTransportUnavailable}));
  EXPECT_EQ(codes(put_device(3)).back(), Code::kOk);
  EXPECT_EQ(get_device(), all(3, Code::kOk));
  EXPECT_EQ(stat_of(*client_, "rdma_fallbacks"), 0u);
  EXPECT_EQ(nodes_[0]->server->store().stats().reservations, 0u);
}

TEST_F(DevicePool, WithoutAPathInMidTransferItIsStaged) {
  open_device(2);
  put_device(8);
  fake().fail_after(0, 9);
  fake().fail_after(1, 9);
  size_t left = 0;
  for (const Code code : get_device()) {
    EXPECT_TRUE(code == Code::kOk || code == Code::kTransportUnavailable) << code_name(code);
    left += code == Code::kTransportUnavailable ? 1 : 0;
  }
  EXPECT_GT(left, 0u);
  EXPECT_EQ(stat_of(*client_, "rdma_fallbacks"), 1u);
  EXPECT_EQ(get_device(), all(8, Code::kTransportUnavailable)) << "for a while it is not tried again";
  EXPECT_EQ(stat_of(*client_, "tcp_bytes") > kBlockBytes, false);
}

TEST_F(DevicePool, ANodeOnThisHostIsReachedThroughSharedMemory) {
  fake().reset(1);
  nodes_.push_back(std::make_unique<TestNode>(0, 64 << 20, "host-a", true, test_rdma(false)));
  ClientConfig config = client_config(true);
  config.rdma = test_rdma(true);
  client_ = client_for({nodes_[0]->info}, config);
  address_ = gpu_.adopt(arena_.data, arena_.size);
  ASSERT_TRUE(client_->register_device_buffer(gpu_.device, {address_, kArenaBytes}));
  EXPECT_EQ(codes(put_device(2)), all(2, Code::kTransportUnavailable));
  EXPECT_EQ(said(), "staged, because node node-0 is on this host and is reached through shared memory");
  EXPECT_EQ(stat_of(*client_, "shm_bytes") + stat_of(*client_, "unix_bytes") < 10'000, true);
}

TEST_F(DevicePool, AGpuThatHangsCostsItsDeadlineAndNoNodeItsName) {
  open_device(1, 2);
  put_device(4, 2);
  gpu_.hang(1);
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_EQ(get_device(options(50)), all(4, Code::kDeadlineExceeded)) << "others' work did not end";
  gpu_.hang(0);
  for (const bool gets : {true, false, true, false, true}) {
    fake().set_latency_us(0, 20'000);
    std::thread hang([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(gets ? 30 : 5));
      gpu_.hang(1);
    });
    if (gets) {
      for (const Code code : get_device(options(400))) EXPECT_NE(code, Code::kChecksumMismatch);
    } else {
      (void)put_device(8, 1, options(400));
    }
    hang.join();
    // nobody touches this memory any more
    std::fill_n(arena_.data, arena_.size, std::byte{0xee});
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    EXPECT_TRUE(all_bytes({arena_.data, arena_.size}, std::byte{0xee}));
    gpu_.hang(0);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(20));
  EXPECT_EQ(stat_of(*client_, "breaker_opens"), 0u);
  EXPECT_EQ(stat_of(*client_, "stalls"), 0u);
  fake().set_latency_us(0, 0);
  put_device(4, 2);
  EXPECT_EQ(get_device(), all(4, Code::kOk));
  while (gpu_.device->quarantined_bytes() > 0) std::this_thread::yield();
}

TEST_F(DevicePool, HostCallsNeverFindDeviceMemory) {
  fake().reset(1);
  Counters counters;
  auto rdma = std::make_shared<RdmaAccess>(test_rdma(true), 1 << 20);
  BufferBook book(rdma, {1 << 30, 8}, counters);
  const auto device = book.device(gpu_.device);
  EXPECT_EQ(book.device(gpu_.device), device);
  address_ = gpu_.adopt(arena_.data, arena_.size);
  fake().set_dma_buf(kDmaBuf, arena_.data, arena_.size);
  const Slice listed = this->device(0, 1 << 20);
  ASSERT_TRUE(book.add(listed, device));
  EXPECT_EQ(book.add(listed).code, Code::kInvalidArgument) << "one memory is of one kind";
  std::vector<RegionHandle> found;
  EXPECT_FALSE(book.registrations_of(std::span(&listed, 1), nullptr, found));
  EXPECT_TRUE(book.registrations_of(std::span(&listed, 1), device.get(), found));
  EXPECT_NE(found.at(0), 0u);
  EXPECT_FALSE(book.registrations_of(std::span(&listed, 1), nullptr, found));
  EXPECT_EQ(book.device_of(std::span(&listed, 1)), device);
  const Slice beyond = this->device(1 << 20, 1);
  EXPECT_EQ(book.device_of(std::span(&beyond, 1)), nullptr);
  ASSERT_TRUE(book.remove(listed));
  EXPECT_EQ(book.registered_count(), 0u);
  const Slice large = this->device(0, kArenaBytes);
  BufferBook small(rdma, {1 << 20, 8}, counters);
  const auto its = small.device(gpu_.device);
  ASSERT_TRUE(small.add(large, its));
  EXPECT_FALSE(small.registrations_of(std::span(&large, 1), its.get(), found));
  EXPECT_EQ(its->route().find("staged, because a buffer of "), 0u);
}

}  // namespace
}  // namespace mooncache::testing

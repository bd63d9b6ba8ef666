// A node whose arena is not anonymous memory of the host.
#include <dlfcn.h>
#include <fcntl.h>

#include <fstream>

#include "server/peer.h"
#include "store/device_memory.h"

namespace mooncache::testing {
namespace {

class ArenaTest : public ServerTest {
 protected:
  // Waits for it: a counter that says the same may be there first.
  bool logged(std::string_view event, std::string_view words) {
    const Deadline deadline = Deadline::after(kPatience);
    while (!was_logged(event, words)) {
      if (deadline.expired()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }

 private:
  bool was_logged(std::string_view event, std::string_view words) {
    for (auto& entry : server->drain_log(1000)) log_.push_back(std::move(entry));
    return std::any_of(log_.begin(), log_.end(), [&](const ServerLogEvent& entry) {
      return entry.event == event && entry.message.find(words) != std::string::npos;
    });
  }
  std::vector<ServerLogEvent> log_;
};

class FileArenaTest : public ArenaTest {
 protected:
  void SetUp() override {
    ArenaTest::SetUp();
    std::filesystem::create_directories(folder);
    std::filesystem::permissions(folder, std::filesystem::perms::owner_all);
    path = folder / "arena";
    std::ofstream(path).put('x');
    std::filesystem::permissions(path, std::filesystem::perms(0600));
    config.store.arena_path = path;
    config.store.capacity_bytes = 8 * kMiB;
  }
  std::filesystem::path path;
};

TEST_F(FileArenaTest, ServesOverSocketsAndSaysWhyItIsNotShared) {
  start();
  Peer peer(*server, true);
  ASSERT_TRUE(peer.login());
  const Bytes block = block_of(1, 3 * kMiB);
  ASSERT_EQ(peer.put(key_of(1), block), Code::kOk);
  EXPECT_EQ(peer.get(key_of(1)).second, block);
  const auto attach = peer.call(Opcode::kAttach);
  ASSERT_TRUE(attach);
  EXPECT_EQ(attach->status.code, Code::kUnsupported);
  EXPECT_NE(attach->status.message.find("could be truncated"), std::string::npos) << attach->status.message;
  // nobody of this host can have written to it: a commit without bytes is refused
  const auto reserved = peer.reserve(key_of(2), 100);
  ASSERT_TRUE(reserved && reserved->code == Code::kOk);
  EXPECT_EQ(peer.commit(reserved->extent.grant, 0, wire::CommitItem::kFlagOneSided), Code::kPermissionDenied);
  EXPECT_TRUE(logged("arena_opened", "the node starts empty"));
  EXPECT_TRUE(logged("arena_not_shared", "TCP or RDMA"));
}

TEST_F(FileArenaTest, ATruncatedFileCostsItsBlocks) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const Bytes block = block_of(1, kMiB);
  for (uint64_t number = 0; number < 8; ++number) ASSERT_EQ(peer.put(key_of(number), block), Code::kOk);
  std::filesystem::resize_file(path, 4 * kMiB);
  ASSERT_TRUE(eventually("arena_lost_bytes", 4 * kMiB));
  EXPECT_TRUE(logged("arena_damaged", "4194304 bytes"));
  size_t found = 0;
  for (uint64_t number = 0; number < 8; ++number) {
    // a range: the node looks before it sends
    const auto answer = peer.call(Opcode::kGet, Peer::get_meta({{key_of(number), 1, kMiB - 1}}));
    const auto results = peer.get_results(answer);
    ASSERT_EQ(results.size(), 1u);
    if (results[0].code == Code::kOk) {
      ++found;
      EXPECT_TRUE(std::equal(answer->payload.begin(), answer->payload.end(), block.begin() + 1));
    } else {
      EXPECT_EQ(results[0].code, Code::kChecksumMismatch);
    }
  }
  EXPECT_EQ(found, 4u);
  // the node goes on with memory in the place of what is gone
  for (uint64_t number = 10; number < 14; ++number) ASSERT_EQ(peer.put(key_of(number), block), Code::kOk);
  for (uint64_t number = 10; number < 14; ++number) EXPECT_EQ(peer.get(key_of(number)).second, block);
}

// At once, before the node has looked: the kernel answers EFAULT where the processor would get a signal.
TEST_F(FileArenaTest, ATruncatedFileCostsNoConnection) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const Bytes block = block_of(1, kMiB);
  for (uint64_t number = 0; number < 7; ++number) ASSERT_EQ(peer.put(key_of(number), block), Code::kOk);
  std::filesystem::resize_file(path, 4 * kMiB);
  size_t whole = 0;
  for (uint64_t number = 0; number < 7; ++number) {
    const auto [code, bytes] = peer.get(key_of(number));
    ASSERT_NE(code, Code::kConnectionLost);
    whole += bytes == block ? 1 : 0;
  }
  EXPECT_EQ(whole, 4u);
  std::filesystem::resize_file(path, 0);
  // The node may put memory in the place of the rest between a put and its get: a miss for who compares sums.
  bool stored = false;
  for (uint64_t number = 10; number < 40 && !stored; ++number) {
    ASSERT_EQ(peer.put(key_of(number), block), Code::kOk);
    stored = peer.get(key_of(number)).second == block;
  }
  EXPECT_TRUE(stored);
}

TEST_F(FileArenaTest, AFileSmallerThanOneQuantumIsRefused) {
  config.store.capacity_bytes = 0;
  config.store.quantum_bytes = 64 << 10;
  std::filesystem::resize_file(path, 4096);
  const auto made = StoreServer::create(config);
  ASSERT_FALSE(made);
  EXPECT_NE(made.status().message.find("smaller than one quantum"), std::string::npos)
      << made.status().message;
}

TEST_F(FileArenaTest, TheCapacityIsThatOfTheFile) {
  config.store.capacity_bytes = 0;
  std::filesystem::resize_file(path, 5 * kMiB);
  start();
  EXPECT_EQ(stat("store_capacity_bytes"), 5 * kMiB);
  ServerConfig second = config;
  second.unix_path = "";
  const auto made = StoreServer::create(second);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.status().code, Code::kConfigInvalid);
  EXPECT_NE(made.status().message.find("in use by another process"), std::string::npos);
}

class GpuArenaTest : public ArenaTest {
 protected:
  void SetUp() override {
    ArenaTest::SetUp();
    config.store.open_arena = store::device_arena(0, MOONCACHE_FAKE_CUDA);
    void* const library = dlopen(MOONCACHE_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    fail = reinterpret_cast<decltype(fail)>(dlsym(library, "fake_cuda_fail"));
  }
  void (*fail)(const char*, int, int) = nullptr;
};

TEST_F(GpuArenaTest, BlocksOfEverySizeComeBack) {
  start();
  Peer peer(*server, true);
  ASSERT_TRUE(peer.login());
  std::vector<std::pair<Key, Bytes>> blocks;
  for (const size_t size : {size_t{1}, size_t{4096}, size_t{300'000}, size_t{256} << 10, 3 * kMiB + 7})
    blocks.emplace_back(key_of(size), block_of(size, size));
  for (const Code code : peer.put(blocks)) EXPECT_EQ(code, Code::kOk);  // several in one frame
  std::vector<wire::GetItem> all;
  Bytes expected;
  for (const auto& [key, block] : blocks) {
    EXPECT_EQ(peer.get(key).second, block);
    all.push_back({key, 0, UINT64_MAX});
    expected.insert(expected.end(), block.begin(), block.end());
  }
  const auto answer = peer.call(Opcode::kGet, Peer::get_meta(all));
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->payload, expected);
  for (const wire::GetResult& result : peer.get_results(answer)) EXPECT_EQ(result.tier, Tier::kHbm);
  const auto attach = peer.call(Opcode::kAttach);
  ASSERT_TRUE(attach);
  EXPECT_EQ(attach->status.code, Code::kUnsupported);
  EXPECT_NE(attach->status.message.find("cuda:0"), std::string::npos);
  EXPECT_TRUE(logged("arena_opened", "gpu cuda:0 (Fake GPU)"));
}

TEST_F(GpuArenaTest, RangesGrantsAndWritesAreCheckedAfterStaging) {
  start();
  Peer peer(*server);
  ASSERT_TRUE(peer.login());
  const Bytes block = block_of(1, 2 * kMiB);
  const auto reserved = peer.reserve(key_of(1), block.size());
  ASSERT_TRUE(reserved && reserved->code == Code::kOk);
  const uint64_t grant = reserved->extent.grant;
  const auto middle = block.begin() + kMiB;
  EXPECT_EQ(peer.write(grant, kMiB, Bytes(middle, block.end())), Code::kOk);
  EXPECT_EQ(peer.write(grant, 0, Bytes(block.begin(), middle), 1), Code::kChecksumMismatch);
  EXPECT_EQ(peer.write(grant, 0, Bytes(block.begin(), middle)), Code::kOk);
  EXPECT_EQ(peer.commit(grant, crc32c(block)), Code::kOk);
  const auto range = peer.call(Opcode::kGet, Peer::get_meta({{key_of(1), 1000, 1'500'000}}));
  ASSERT_TRUE(range);
  EXPECT_TRUE(std::equal(range->payload.begin(), range->payload.end(), block.begin() + 1000));
  const auto found = peer.lookup(key_of(1));
  ASSERT_TRUE(found && found->code == Code::kOk);
  ASSERT_EQ(server->store().flip_bit(kDefault, key_of(1), 8 * 77), Code::kOk);
  Writer meta;
  wire::ReadRequest{found->extent.grant, 70, 100}.encode(meta);
  const auto damaged = peer.call(Opcode::kRead, meta);
  ASSERT_TRUE(damaged);
  EXPECT_EQ(damaged->status.code, Code::kChecksumMismatch);
  EXPECT_EQ(stat("crc_failures_stored"), 1u);
}

// The copy fails under a write, under a checked read, and in the middle of an answer.
TEST_F(GpuArenaTest, DeviceErrorsCostTheBlockNotTheNode) {
  start();
  const Bytes block = block_of(1, 2 * kMiB);
  {
    Peer peer(*server);
    ASSERT_TRUE(peer.login());
    fail("cuMemcpyHtoDAsync", 700, 3);
    EXPECT_EQ(peer.put(key_of(1), block), Code::kNodeUnavailable);
    EXPECT_EQ(peer.get(key_of(1)).first, Code::kNotFound);
    EXPECT_TRUE(logged("block_unwritable", "CUDA"));
    ASSERT_EQ(peer.put(key_of(1), block), Code::kOk);
    fail("cuMemcpyDtoHAsync", 700, 1);
    const auto answer = peer.call(Opcode::kGet, Peer::get_meta({{key_of(1), 1, 10}}));
    const auto results = peer.get_results(answer);
    ASSERT_EQ(results.size(), 1u);
    EXPECT_EQ(results[0].code, Code::kChecksumMismatch);
    EXPECT_EQ(stat("blocks_unreadable"), 1u);
    EXPECT_EQ(stat("crc_failures_stored"), 0u);
    ASSERT_EQ(peer.put(key_of(2), block), Code::kOk);
    fail("cuMemcpyDtoHAsync", 700, 5);
    EXPECT_EQ(peer.get(key_of(2)).first, Code::kConnectionLost);
  }
  Peer again(*server);
  ASSERT_TRUE(again.login());
  EXPECT_EQ(again.get(key_of(2)).first, Code::kNotFound);
  ASSERT_EQ(again.put(key_of(3), block), Code::kOk);
  EXPECT_EQ(again.get(key_of(3)).second, block);
}

}  // namespace
}  // namespace mooncache::testing

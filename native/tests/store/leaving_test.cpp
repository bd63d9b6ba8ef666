// Blocks that memory evicts while a disk is about to copy them: for a moment neither the memory nor the disk
// finds them. What is removed, purged or recalled in that moment does not arrive on the disk.
#include <condition_variable>
#include <filesystem>
#include <future>
#include <mutex>
#include <thread>

#include "store/arena_memory.h"
#include "store/store_fixture.h"

namespace mooncache::test {
namespace {

constexpr uint64_t kLeavingBlock = 64 << 10, kLeavingBlocks = 64;
constexpr TenantId kLeavingTenant = 9;

// The gate in front of all copies that a disk makes.
struct CopyGate {
  void pass() {
    std::unique_lock lock(mutex);
    waits = true;
    changed.notify_all();
    changed.wait(lock, [this] { return is_open; });
  }
  bool wait_for_copy() {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(20), [this] { return waits; });
  }
  void open() {
    const std::lock_guard lock(mutex);
    is_open = true;
    changed.notify_all();
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool is_open = false, waits = false;
};

class GatedMemory final : public store::ArenaMemory {
 public:
  GatedMemory(uint64_t bytes, std::shared_ptr<CopyGate> gate) : bytes_(bytes), gate_(std::move(gate)) {}
  std::byte* data() const override { return bytes_.data(); }
  uint64_t size_bytes() const override { return bytes_.size(); }
  Status copy_out(uint64_t offset, Slice to) override {
    gate_->pass();
    return ArenaMemory::copy_out(offset, to);
  }
  ArenaInfo info() const override { return {}; }

 private:
  mutable std::vector<std::byte> bytes_;
  const std::shared_ptr<CopyGate> gate_;
};

class LeavingBlocks : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = test_folder();
    std::filesystem::create_directories(folder_);
    open();
    // Blocks 0, 1, ... go first. The disk takes the four coldest when memory is nearly full, and waits at the
    // gate.
    writer_ = store_->open_writer({0x77, "engine", "build", 0});
    uint64_t number = 0;
    for (; number + 7 < kLeavingBlocks; ++number) write(number);
    ASSERT_TRUE(gate_->wait_for_copy());
    for (; store_->stats().zombie_blocks < 4 && number < 2 * kLeavingBlocks; ++number) write(number);
    ASSERT_GE(store_->stats().zombie_blocks, 4u);
    for (number = 0; number < 4; ++number) ASSERT_FALSE(is_there(number)) << number << " lies somewhere";
  }
  void TearDown() override {
    gate_->open();
    store_.reset();
    std::filesystem::remove_all(folder_);
  }
  void open() {
    store_.reset();
    StoreConfig config = small_config(kLeavingBlock * kLeavingBlocks);
    config.eviction = "lru";
    config.shards = 1;
    config.disk.paths = {folder_.string()};
    config.disk.bytes = 64 * kMiB;
    config.disk.stall_ms = 60'000;  // a busy machine is no stalled disk
    config.open_arena = [this](uint64_t bytes) -> Result<std::unique_ptr<store::ArenaMemory>> {
      return std::unique_ptr<store::ArenaMemory>(std::make_unique<GatedMemory>(bytes, gate_));
    };
    store_ = open_store(config);
    ASSERT_NE(store_, nullptr);
  }
  static TenantId tenant_of(uint64_t number) { return number == 3 ? kTenant : kLeavingTenant; }
  void write(uint64_t number) { write(number, number); }
  void write(uint64_t number, uint64_t content) {
    const WriterNumber writer = number == 3 ? 0 : writer_;
    const auto id = store_->reserve(tenant_of(number), key_of(number), kLeavingBlock, clock_ms(), writer);
    ASSERT_TRUE(id.is_ok()) << number << ": " << id.status().message;
    ASSERT_EQ(store_->commit(id->id, fill(store_->writable(id->id), content), clock_ms()).code, Code::kOk);
  }
  bool is_there(uint64_t number) { return store_->stat(tenant_of(number), key_of(number), 0).is_ok(); }
  Result<Pinned> fetched(uint64_t number) {
    const auto done = std::make_shared<std::promise<void>>();
    if (store_->fetch(tenant_of(number), key_of(number), [done] { done->set_value(); }))
      done->get_future().wait();
    return store_->acquire(tenant_of(number), key_of(number), clock_ms());
  }
  // The disk goes on. Block 3 stays.
  void check_what_arrives(uint64_t from) {
    gate_->open();
    ASSERT_TRUE(eventually([&] { return is_there(3); })) << "nothing arrives on the disk";
    ASSERT_TRUE(eventually([&] { return store_->stats().zombie_blocks == 0; }));
    for (int process = 0; process < 2; ++process) {
      for (uint64_t number = from; number < 3; ++number)
        EXPECT_FALSE(is_there(number)) << number << " is back";
      EXPECT_TRUE(is_there(3));
      EXPECT_SOUND(*store_);
      open();
    }
  }

  std::filesystem::path folder_;
  std::shared_ptr<CopyGate> gate_ = std::make_shared<CopyGate>();
  WriterNumber writer_ = 0;
  std::unique_ptr<Store> store_;
};

TEST_F(LeavingBlocks, WhatIsRemovedDoesNotArrive) {
  for (uint64_t number = 0; number < 3; ++number)
    EXPECT_EQ(store_->remove(kLeavingTenant, key_of(number), RemoveReason::kRemoved, clock_ms()), Code::kOk)
        << number;
  EXPECT_EQ(store_->remove(kLeavingTenant, key_of(1), RemoveReason::kRemoved, clock_ms()), Code::kNotFound);
  check_what_arrives(0);
}

TEST_F(LeavingBlocks, WhatWasPutAgainAndRemovedDoesNotArriveEither) {
  write(1);
  EXPECT_EQ(store_->remove(kLeavingTenant, key_of(1), RemoveReason::kRemoved, clock_ms()), Code::kOk);
  EXPECT_EQ(store_->remove(kLeavingTenant, key_of(2), RemoveReason::kRemoved, clock_ms()), Code::kOk);
  check_what_arrives(1);
}

// What a key means to its client may change: the former content never comes back.
TEST_F(LeavingBlocks, WhatWasPutAgainWithAnotherContentIsWhatArrives) {
  for (uint64_t number = 0; number < 3; ++number) write(number, 900 + number);
  gate_->open();
  ASSERT_TRUE(eventually([&] { return store_->stats().zombie_blocks == 0; }));
  for (uint64_t number = 1000; number < 1000 + 2 * kLeavingBlocks; ++number) {
    write(number);
    if (number % 4 == 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the disk keeps up
  }
  for (int process = 0; process < 2; ++process) {
    for (uint64_t number = 0; number < 3; ++number) {
      const auto pinned = fetched(number);
      if (!pinned) continue;
      EXPECT_TRUE(holds(store_->readable(pinned->id), 900 + number)) << number << " has its former content";
      store_->release(pinned->id);
    }
    EXPECT_SOUND(*store_);
    open();
  }
}

TEST_F(LeavingBlocks, WhatIsPurgedDoesNotArrive) {
  for (uint64_t cursor = 0, rounds = 0; rounds == 0 || cursor != 0; ++rounds)
    cursor = store_->purge(kLeavingTenant, cursor).next_cursor;
  check_what_arrives(0);
}

TEST_F(LeavingBlocks, WhatIsRecalledDoesNotArrive) {
  const auto recall = [this](bool dry_run) {
    uint64_t blocks = 0;
    for (uint64_t cursor = 0, rounds = 0; rounds == 0 || cursor != 0; ++rounds) {
      const Recalled page = store_->recall({0x77, 0, ~uint32_t{0}, dry_run, 0}, cursor, clock_ms());
      blocks += page.blocks;
      cursor = page.next_cursor;
    }
    return blocks;
  };
  // The removal of block 0, which is in mid-copy, lasts when the disk has gone on.
  uint64_t recalled = 0;
  std::thread recalls([&] { recalled = recall(false); });
  EXPECT_TRUE(eventually([&] { return recall(true) == 0; })) << "not all are recalled";
  gate_->open();
  recalls.join();
  EXPECT_GE(recalled, 4u) << "those that are leaving, too";
  check_what_arrives(0);
}

}  // namespace
}  // namespace mooncache::test

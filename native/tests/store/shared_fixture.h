// A shared directory under test: one node's log, written by a device, and a reader of another node above it
// whose calls a test may delay, cut or refuse.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "store/disk/shared_reader.h"
#include "store/disk_fixture.h"

namespace mooncache::test {

using store::disk::SharedFile;
using store::disk::SharedFolder;
using store::disk::SharedOptions;
using store::disk::SharedReader;
using store::disk::SharedStats;

// What happens to the calls; any thread sets it.
struct SharedFaults {
  std::atomic<int> read_error{0}, list_error{0};  // errno
  std::atomic<bool> short_reads{false};

  void hang() {
    const std::lock_guard lock(mutex);
    hangs = true;
  }
  void go_on() {
    const std::lock_guard lock(mutex);
    hangs = false;
    changed.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex);
    ++waiting;
    changed.notify_all();
    changed.wait(lock, [this] { return !hangs; });
    --waiting;
  }
  void wait_until_one_hangs() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return waiting > 0; });
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool hangs = false;
  int waiting = 0;
};

class FaultySharedFile final : public SharedFile {
 public:
  FaultySharedFile(std::shared_ptr<SharedFile> below, std::shared_ptr<SharedFaults> faults)
      : below_(std::move(below)), faults_(std::move(faults)) {}
  int64_t read(uint64_t offset, Slice to) override {
    faults_->pass();
    if (faults_->read_error != 0) return -faults_->read_error;
    const int64_t got = below_->read(offset, to);
    return faults_->short_reads ? got / 2 : got;
  }
  Version version() const override { return below_->version(); }

 private:
  const std::shared_ptr<SharedFile> below_;
  const std::shared_ptr<SharedFaults> faults_;
};

class FaultySharedFolder final : public SharedFolder {
 public:
  FaultySharedFolder(std::string path, std::shared_ptr<SharedFaults> faults)
      : below_(store::disk::open_shared_folder(std::move(path))), faults_(std::move(faults)) {}
  int list(std::vector<std::string>& names, size_t most) override {
    faults_->pass();
    return faults_->list_error != 0 ? faults_->list_error.load() : below_->list(names, most);
  }
  std::shared_ptr<SharedFile> open(const std::string& name, int& error) override {
    auto file = below_->open(name, error);
    return file == nullptr ? nullptr : std::make_shared<FaultySharedFile>(std::move(file), faults_);
  }

 private:
  const std::shared_ptr<SharedFolder> below_;
  const std::shared_ptr<SharedFaults> faults_;
};

inline constexpr uint64_t kSharedBlock = 64 << 10;  // bytes, of stores that share

// The blocks below `until` that a store answers with, of all tiers or of one.
inline std::set<uint64_t> blocks_in(Store& store, std::optional<Tier> tier = {}, uint64_t until = 1200) {
  std::set<uint64_t> found;
  for (uint64_t i = 0; i < until; ++i) {
    const auto info = store.stat(kTenant, key_of(i), 0);
    if (info && (!tier || info->tier == *tier)) found.insert(i);
  }
  return found;
}
// As a server does: from memory, or by way of what lies below it.
inline bool read_by(Store& store, uint64_t number) {
  auto pinned = store.acquire(kTenant, key_of(number), clock_ms());
  if (!pinned) {
    auto done = std::make_shared<std::promise<void>>();
    if (!store.fetch(kTenant, key_of(number), [done] { done->set_value(); })) return false;
    done->get_future().wait();
    pinned = store.acquire(kTenant, key_of(number), clock_ms());
  }
  if (!pinned) return false;
  EXPECT_TRUE(holds(store.readable(pinned->id), number)) << number;
  store.release(pinned->id);
  return true;
}

class SharedTest : public DiskTest {
 protected:
  static constexpr uint64_t kSize = 40'000;

  void TearDown() override {
    shared_faults_->go_on();
    reader_.reset();
    DiskTest::TearDown();
  }
  std::string log_of(const std::string& node) const { return (folder_ / (node + ".mooncache")).string(); }
  void open_writer(uint64_t capacity = 8 * kMiB) {
    DeviceOptions with = options(capacity);
    with.path = log_of("node-1");
    ASSERT_TRUE(open(with));
  }
  void write(uint64_t from, uint64_t until) {
    const size_t before = memory_->written_count();
    for (uint64_t i = from; i < until; ++i) memory_->offer(i, kSize);
    ASSERT_TRUE(memory_->wait_written(before + (until - from)));
  }
  void open_reader(uint32_t most_blocks = 1 << 20, uint32_t stall_ms = 60'000, uint32_t scan_ms = 10) {
    SharedOptions with;
    with.folder = std::make_shared<FaultySharedFolder>(folder_.string(), shared_faults_);
    with.own_name = "node-2.mooncache";
    with.scan_ms = scan_ms;
    with.stall_ms = stall_ms;  // a busy machine is no slow server
    with.threads = 2;
    with.most_blocks = most_blocks;
    reader_ = std::make_unique<SharedReader>(with, above_);
  }
  // What changed before is known afterwards.
  void wait_for_scan() {
    const uint64_t scans = reader_->stats().scans;
    ASSERT_TRUE(wait([&] { return reader_->stats().scans >= scans + 2; }));
  }
  template <typename Until>
  bool wait(const Until& until) {
    for (int tries = 0; tries < 4000; ++tries) {
      if (until()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
  bool knows(uint64_t number) { return reader_->find(kTenant, key_of(number)).has_value(); }
  // Whether the block came up; ADD_FAILURE when it is not the block.
  bool get(uint64_t number) {
    auto done = std::make_shared<std::promise<void>>();
    if (!reader_->fetch(kTenant, key_of(number), [done] { done->set_value(); })) return false;
    if (done->get_future().wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      ADD_FAILURE() << "a read never ended";
      return false;
    }
    const auto bytes = above_.taken_up(number);
    if (bytes.empty()) return false;
    EXPECT_EQ(bytes, content_of(number, kSize)) << "wrong bytes for " << number;
    return true;
  }
  size_t got(uint64_t from, uint64_t until) {
    size_t count = 0;
    for (uint64_t i = from; i < until; ++i) count += get(i) ? 1 : 0;
    return count;
  }
  // Changes bytes of the writer's log.
  void change(uint64_t offset, const std::vector<std::byte>& bytes) {
    std::fstream file(log_of("node-1"), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(offset));
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }

  std::shared_ptr<SharedFaults> shared_faults_ = std::make_shared<SharedFaults>();
  FakeMemory above_;
  std::unique_ptr<SharedReader> reader_;
};

}  // namespace mooncache::test

// A disk under test: the memory above it as a few maps, and a queue below it that injects faults into a real
// file.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "mooncache/crc32c.h"
#include "store/disk/device.h"
#include "store/store_fixture.h"
#include "store/volatile_cache.h"

namespace mooncache::test {

using store::disk::ColdBlock;
using store::disk::Demotion;
using store::disk::Device;
using store::disk::DeviceOptions;
using store::disk::Io;
using store::disk::IoEnd;
using store::disk::IoQueue;

// What the queue does to the operations; any thread sets it.
struct Faults {
  std::atomic<int> read_error{0}, write_error{0}, sync_error{0};  // errno
  std::atomic<int> late_write_error{0};  // errno of a write whose bytes reach the disk all the same
  std::atomic<bool> short_reads{false}, flipped_reads{false}, stalled{false}, stale_ends{false};
  std::atomic<int64_t> kill_at_write{-1};  // this write is torn, and nothing after it reaches the disk
  std::atomic<bool> killed{false};
  std::atomic<uint64_t> writes{0};
  // Before it is opened: writes last from the next sync on (volatile_cache.h), or, with syncs_nothing, never.
  // The power goes at this write or sync, at the latest when the disk was closed.
  bool is_volatile = false;
  std::atomic<bool> syncs_nothing{false};
  std::atomic<int64_t> power_cut_at{-1};
  std::atomic<int64_t> changes{0};  // writes and syncs
  uint64_t seed = 1;
};

class FaultyQueue final : public IoQueue {
 public:
  FaultyQueue(int fd, std::shared_ptr<Faults> faults)
      : fd_(fd), faults_(std::move(faults)), random_(faults_->seed) {}

  bool submit(const Io& io) override {
    ends_.push_back({io.cookie, carry_out(io)});
    if (faults_->stale_ends) ends_.push_back({io.cookie + (uint64_t{7} << 32), 4096});
    return true;
  }
  void wait(std::vector<IoEnd>& ends, int timeout_ms) override {
    std::unique_lock lock(mutex_);
    if (ends_.empty() || faults_->stalled)
      woken_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return wakes_ > 0; });
    wakes_ = 0;
    if (faults_->stalled) return;
    for (const IoEnd& end : ends_) {
      if (cache_) cache_->report(end.cookie);
    }
    ends.insert(ends.end(), ends_.begin(), ends_.end());
    ends_.clear();
  }
  void wake() override {
    const std::lock_guard lock(mutex_);
    ++wakes_;
    woken_.notify_one();
  }
  std::string description() const override { return "a queue of tests"; }

 private:
  int64_t carry_out(const Io& io) {
    const auto offset = static_cast<off_t>(io.offset);
    if (faults_->is_volatile && io.kind != Io::Kind::kRead) return change_cached(io);
    if (io.kind == Io::Kind::kSync) return -faults_->sync_error;
    if (io.kind == Io::Kind::kRead) {
      if (faults_->read_error != 0) return -faults_->read_error;
      const ssize_t got = ::pread(fd_, io.memory.data, io.memory.size, offset);
      if (faults_->flipped_reads && got > 0) io.memory.data[got / 2] ^= std::byte{1};
      return faults_->short_reads ? got / 2 : got;
    }
    if (faults_->write_error != 0) return -faults_->write_error;
    const uint64_t number = faults_->writes++;
    size_t size = io.memory.size;
    if (faults_->kill_at_write >= 0 && number >= static_cast<uint64_t>(faults_->kill_at_write)) {
      size = faults_->killed.exchange(true) ? 0 : random_() % (size / 512 + 1) * 512;
    }
    // Not in order: pages of a write reach the disk as they like.
    for (size_t at = 0; at < size; at += 512) {
      const bool last = number == static_cast<uint64_t>(faults_->kill_at_write);
      if (last && random_() % 2 == 0) continue;
      std::byte piece[4096];
      const size_t bytes = std::min<size_t>(512, size - at);
      std::memcpy(piece, io.memory.data + at, bytes);
      if (::pwrite(plain_fd(), piece, bytes, offset + static_cast<off_t>(at)) < 0) return -errno;
      if (!last) {
        // The rest in one go.
        if (::pwrite(plain_fd(), io.memory.data, size, offset) < 0) return -errno;
        break;
      }
    }
    if (faults_->late_write_error != 0) return -faults_->late_write_error;
    return static_cast<int64_t>(io.memory.size);
  }
  int64_t change_cached(const Io& io) {
    const auto size = static_cast<int64_t>(io.memory.size);
    if (faults_->killed) return size;
    if (!cache_) cache_.emplace(plain_fd());
    const bool is_write = io.kind == Io::Kind::kWrite;
    if (is_write && !cache_->write(io.cookie, io.offset, {io.memory.data, io.memory.size})) return -EIO;
    if (faults_->changes++ == faults_->power_cut_at) {
      cut_power();
    } else if (!is_write && !faults_->syncs_nothing) {
      cache_->sync();
    }
    return size;
  }
  void cut_power() {
    if (faults_->killed.exchange(true) || !cache_) return;
    cache_->cut(random_);
  }
  // O_DIRECT takes no half pages.
  int plain_fd() {
    if (plain_ < 0) plain_ = ::open(("/proc/self/fd/" + std::to_string(fd_)).c_str(), O_RDWR | O_CLOEXEC);
    return plain_;
  }

 public:
  ~FaultyQueue() override {
    cut_power();
    if (plain_ >= 0) ::close(plain_);
  }

 private:
  const int fd_;
  int plain_ = -1;
  const std::shared_ptr<Faults> faults_;
  std::mt19937_64 random_;
  std::optional<VolatileCache> cache_;
  std::mutex mutex_;
  std::condition_variable woken_;
  int wakes_ = 0;
  std::vector<IoEnd> ends_;
};

inline std::vector<std::byte> content_of(uint64_t number, size_t size) {
  std::vector<std::byte> bytes(size);
  (void)fill({bytes.data(), bytes.size()}, number);
  return bytes;
}

// Memory that gives away what it is asked to, and takes what comes.
class FakeMemory final : public store::disk::Memory {
 public:
  std::atomic<bool> is_full{false};  // no reservation succeeds
  // Before blocks are offered: called behind the copy of each piece. False: the copy counts as failed.
  std::function<bool(uint64_t number)> copied;

  void offer(uint64_t number, size_t size, uint32_t hits = 1, uint32_t end = 0) {
    const std::lock_guard lock(mutex_);
    auto bytes = content_of(number, size);
    ColdBlock block;
    block.slot = static_cast<uint32_t>(number);
    block.tenant = kTenant;
    block.key = key_of(number);
    block.size = static_cast<uint32_t>(size);
    block.crc32c = crc32c(bytes);
    block.hits = hits;
    block.end = end;
    cold_.push_back(block);
    bodies_[static_cast<uint32_t>(number)] = std::move(bytes);
  }
  void take_cold(uint32_t, const store::disk::ColdWish& wish, std::vector<ColdBlock>& out) override {
    const std::lock_guard lock(mutex_);
    uint64_t bytes = wish.bytes;
    bool takes_large = wish.takes_large;
    while (!cold_.empty()) {
      const bool is_large = cold_.front().size > wish.small_bytes;
      if (is_large ? !std::exchange(takes_large, false) : bytes < cold_.front().size) break;
      bytes -= is_large ? 0 : cold_.front().size;
      out.push_back(cold_.front());
      cold_.pop_front();
    }
  }
  Status copy_out(const ColdBlock& block, uint64_t offset, Slice to) override {
    {
      const std::lock_guard lock(mutex_);
      std::memcpy(to.data, bodies_.at(block.slot).data() + offset, to.size);
    }
    if (copied && !copied(block.slot)) return {Code::kNotFound, {}};
    return Status::ok();
  }
  void end_demotion(const ColdBlock& block, Demotion end) override {
    const std::lock_guard lock(mutex_);
    if (end == Demotion::kLater) return cold_.push_back(block);
    ++ends_[end];
    changed_.notify_all();
  }
  Result<Reservation> reserve(TenantId, const Key& key, uint64_t size) override {
    if (is_full) return {Code::kNoSpace, {}};
    const std::lock_guard lock(mutex_);
    Reservation made;
    made.id = ReservationId{++next_};
    reserved_[next_] = {key, std::vector<std::byte>(size), 0};
    return made;
  }
  Status write(ReservationId id, uint64_t offset, ConstSlice from) override {
    const std::lock_guard lock(mutex_);
    auto& reserved = reserved_.at(static_cast<uint64_t>(id));
    std::memcpy(reserved.bytes.data() + offset, from.data, from.size);
    reserved.written += from.size;
    return Status::ok();
  }
  Code commit(ReservationId id, TenantId, const Key& key, uint32_t crc, uint32_t end,
              const Origin&) override {
    const std::lock_guard lock(mutex_);
    auto reserved = std::move(reserved_.extract(static_cast<uint64_t>(id)).mapped());
    if (reserved.written != reserved.bytes.size()) return Code::kIncomplete;
    if (crc32c(reserved.bytes) != crc) return Code::kChecksumMismatch;
    up_[key] = std::move(reserved.bytes);
    end_of_last_ = end;
    return Code::kOk;
  }
  void abort(ReservationId id) override {
    const std::lock_guard lock(mutex_);
    reserved_.erase(static_cast<uint64_t>(id));
  }
  void written(TenantId, const Key& key, uint64_t) override {
    const std::lock_guard lock(mutex_);
    written_.insert(key);
    changed_.notify_all();
  }
  void lost(TenantId, const Key& key, uint64_t, RemoveReason reason) override {
    const std::lock_guard lock(mutex_);
    lost_[key] = reason;
    changed_.notify_all();
  }
  void log(uint8_t, const char* event, std::string) override {
    const std::lock_guard lock(mutex_);
    events_.insert(event);
    changed_.notify_all();
  }

  template <typename Until>
  bool wait_for(const Until& until, int ms = 20'000) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(ms), [&] { return until(); });
  }
  bool wait_written(size_t count) {
    return wait_for([&] { return written_.size() >= count; });
  }
  bool wait_all_written(uint64_t first, uint64_t count) {
    return wait_for([&] {
      for (uint64_t number = first; number < first + count; ++number) {
        if (!written_.contains(key_of(number))) return false;
      }
      return true;
    });
  }
  bool wait_lost(size_t count) {
    return wait_for([&] { return lost_.size() >= count; });
  }
  bool wait_event(const char* event) {
    return wait_for([&] { return events_.contains(event); });
  }
  size_t event_count(const char* event) {
    const std::lock_guard lock(mutex_);
    return events_.count(event);
  }
  size_t written_count() {
    const std::lock_guard lock(mutex_);
    return written_.size();
  }
  size_t lost_count() {
    const std::lock_guard lock(mutex_);
    return lost_.size();
  }
  std::optional<RemoveReason> reason_of_loss(uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = lost_.find(key_of(number));
    return found == lost_.end() ? std::nullopt : std::optional(found->second);
  }
  bool was_written(uint64_t number) {
    const std::lock_guard lock(mutex_);
    return written_.contains(key_of(number));
  }
  size_t open_reservations() {
    const std::lock_guard lock(mutex_);
    return reserved_.size();
  }
  uint32_t end_of_last() {  // of the block that came up last
    const std::lock_guard lock(mutex_);
    return end_of_last_;
  }
  uint64_t ends(Demotion end) {
    const std::lock_guard lock(mutex_);
    return ends_[end];
  }
  std::vector<std::byte> taken_up(uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = up_.find(key_of(number));
    if (found == up_.end()) return {};
    auto bytes = found->second;
    up_.erase(found);
    return bytes;
  }

 private:
  struct Reserved {
    Key key;
    std::vector<std::byte> bytes;
    uint64_t written = 0;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<ColdBlock> cold_;
  std::map<uint32_t, std::vector<std::byte>> bodies_;
  std::map<uint64_t, Reserved> reserved_;
  std::map<Key, std::vector<std::byte>> up_;
  std::set<Key> written_;
  std::map<Key, RemoveReason> lost_;
  std::map<Demotion, uint64_t> ends_;
  std::multiset<std::string> events_;
  uint64_t next_ = 0;
  uint32_t end_of_last_ = 0;
};

class DiskTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = test_folder();
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    device_.reset();
    std::filesystem::remove_all(folder_);
  }
  DeviceOptions options(uint64_t capacity = 8 * kMiB) {
    DeviceOptions options;
    options.path = folder_.string();
    options.capacity_bytes = capacity;
    options.segment_bytes = 512 << 10;
    options.stall_ms = 60'000;  // a busy machine is no stalled disk
    options.node_id = "node-1";
    if (faulty_) {
      options.open_queue = [faults = faults_](int fd, std::span<const iovec>) {
        return std::make_unique<FaultyQueue>(fd, faults);
      };
    }
    return options;
  }
  Status open(DeviceOptions with) {
    device_.reset();
    memory_ = std::make_unique<FakeMemory>();
    auto opened = Device::open(std::move(with), *memory_);
    if (!opened) return opened.status();
    device_ = std::move(*opened);
    return Status::ok();
  }
  Status open() { return open(options()); }
  // What came up; nothing: a miss.
  std::vector<std::byte> fetched(uint64_t number) {
    auto done = std::make_shared<std::promise<void>>();
    if (!device_->fetch(kTenant, key_of(number), [done] { done->set_value(); })) return {};
    if (done->get_future().wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      ADD_FAILURE() << "a read never ended";
      return {};
    }
    return memory_->taken_up(number);
  }
  // Whether the block came up; a failure when it is not the block.
  bool read(uint64_t number, size_t size) {
    const auto bytes = fetched(number);
    if (bytes.empty()) return false;
    EXPECT_EQ(bytes, content_of(number, size)) << "wrong bytes for " << number;
    return true;
  }
  // Waits until the removal lasts.
  bool remove(uint64_t number) {
    auto done = std::make_shared<std::promise<void>>();
    if (!device_->remove(kTenant, key_of(number), [done] { done->set_value(); })) return false;
    return done->get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  }
  std::string file() const { return (folder_ / "mooncache.ssd").string(); }

  std::filesystem::path folder_;
  bool faulty_ = false;
  std::shared_ptr<Faults> faults_ = std::make_shared<Faults>();
  std::unique_ptr<FakeMemory> memory_ = std::make_unique<FakeMemory>();
  std::unique_ptr<Device> device_;
};

}  // namespace mooncache::test

#include "store/disk/benchmark.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "mooncache/crc32c.h"
#include "mooncache/store.h"
#include "store/disk/device.h"

namespace mooncache {
namespace {

constexpr TenantId kTenant = 1;
constexpr uint64_t kWaitMs = 60'000;  // for a disk that does not do what it is asked
constexpr uint64_t kDroppedMs = 200;
constexpr int kTries = 100'000;  // for a block that is on the disk alone

double seconds(clockid_t clock) {
  timespec now{};
  (void)::clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}
uint64_t now_ms() {
  return static_cast<uint64_t>(seconds(CLOCK_MONOTONIC) * 1e3);
}

Key key_of(uint64_t number) {
  Key key;
  const uint64_t words[] = {number, number * 0x9e3779b97f4a7c15ull};
  std::memcpy(key.bytes.data(), words, sizeof words);
  return key;
}

// What has passed since it was made.
struct Clock {
  double wall_s = seconds(CLOCK_MONOTONIC), cpu_s = seconds(CLOCK_PROCESS_CPUTIME_ID);
  double wall() const { return seconds(CLOCK_MONOTONIC) - wall_s; }
  double cpu() const { return seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu_s; }
};

class RatesRun {
 public:
  RatesRun(const DiskRatesOptions& options, std::unique_ptr<Store> store)
      : options_(options), store_(std::move(store)), content_(options.block_bytes) {
    for (std::byte& byte : content_) byte = static_cast<std::byte>(random_());
    crc_ = crc32c(content_);
  }

  Status run(DiskRates& out) {
    // Once around: what is measured are writes to a file that was written before.
    if (Status filled = put_until(options_.disk_bytes + options_.memory_bytes, kWaitMs); !filled)
      return filled;
    const Clock writes;
    const uint64_t before = count("written_bytes");
    if (Status put = put_until(~uint64_t{0}, options_.write_ms); !put) return put;
    const uint64_t written = count("written_bytes") - before;
    out.written_bytes_per_s = static_cast<double>(written) / writes.wall();
    out.write_cpu_ns_per_kib = writes.cpu() * 1e9 / (static_cast<double>(written) / 1024 + 1);
    out.admitted_bytes = count("admitted_bytes");
    out.written_bytes = count("written_bytes");
    out.encrypted_bytes = count("encrypted_bytes");
    settle();
    if (Status read = read_for(options_.read_ms, out); !read) return read;
    out.read_misses = count("read_misses");
    out.corrupt_blocks = count("corrupt_blocks");
    return Status::ok();
  }

 private:
  uint64_t count(const std::string& name) const {
    for (const auto& [found, value] : store_->stats().disk) {
      if (found == "ssd_" + name) return value;
    }
    return 0;
  }

  Status put_one() {
    const auto reservation = store_->reserve(kTenant, key_of(first_ + next_), options_.block_bytes, now_ms());
    if (!reservation) return reservation.status();
    std::memcpy(store_->writable(reservation->id).data, content_.data(), content_.size());
    if (Status done = store_->commit(reservation->id, crc_, now_ms()); !done) return done;
    ++next_;
    return Status::ok();
  }

  // At the pace of the disk: a put never waits for it, so a block that comes too early would be lost.
  Status put_until(uint64_t admitted, uint64_t for_ms) {
    const uint64_t until_ms = now_ms() + for_ms;
    const uint64_t ahead = options_.memory_bytes - options_.memory_bytes / 16;
    uint64_t seen = 0, seen_ms = now_ms();
    while (now_ms() < until_ms) {
      const uint64_t done = count("admitted_bytes");
      if (done >= admitted) return Status::ok();
      if (std::exchange(seen, done) != done) seen_ms = now_ms();
      // What was dropped all the same is never admitted: it is not waited for.
      if (next_ * options_.block_bytes > done + ahead && now_ms() - seen_ms < kDroppedMs) {
        std::this_thread::sleep_for(std::chrono::microseconds(500));
        continue;
      }
      const uint64_t some = std::max<uint64_t>(1, (4 << 20) / options_.block_bytes);
      for (uint64_t step = 0; step < some; ++step) {
        const Status put = put_one();
        if (!put && put.code != Code::kNoSpace) return put;
        if (!put) break;
      }
    }
    if (admitted != ~uint64_t{0}) return {Code::kDeadlineExceeded, "the disk takes no blocks"};
    return Status::ok();
  }

  void settle() const {
    for (uint64_t last = 0, tries = 0; tries < 100; ++tries) {
      const uint64_t now = count("written_bytes");
      if (now == last) return;
      last = now;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }

  Status read_for(uint64_t for_ms, DiskRates& out) {
    const Clock reads;
    const uint64_t before = count("reads"), bytes = count("read_bytes");
    until_ms_ = now_ms() + for_ms;
    under_way_ = options_.depth;
    for (uint32_t step = 0; step < options_.depth; ++step) ask_next();
    std::unique_lock lock(mutex_);
    const auto limit = std::chrono::milliseconds(for_ms + kWaitMs);
    if (!ended_.wait_for(lock, limit, [&] { return under_way_ == 0; }))
      return {Code::kDeadlineExceeded, "the disk does not answer"};
    lock.unlock();
    out.read_bytes_per_s = static_cast<double>(count("read_bytes") - bytes) / reads.wall();
    out.reads_per_s = static_cast<double>(count("reads") - before) / reads.wall();
    out.read_cpu_ns_per_kib =
        reads.cpu() * 1e9 / (static_cast<double>(count("read_bytes") - bytes) / 1024 + 1);
    return Status::ok();
  }

  // A read that ends is followed by the next one at once, as in a server that has asked ahead.
  void ask_next() {
    const uint64_t kept = std::min(next_, options_.disk_bytes / options_.block_bytes);  // newest ones
    for (int tries = 0; tries < kTries && now_ms() < until_ms_; ++tries) {
      uint64_t number = 0;
      {
        const std::lock_guard lock(mutex_);
        number = next_ - 1 - random_() % kept;
      }
      // False: it is in memory, or the disk has given it up.
      if (store_->fetch(kTenant, key_of(first_ + number), [this] { ask_next(); })) return;
    }
    const std::lock_guard lock(mutex_);
    --under_way_;
    ended_.notify_one();
  }

  const DiskRatesOptions options_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::mt19937_64 random_{std::random_device()()};
  uint32_t under_way_ = 0;
  uint64_t until_ms_ = 0;
  std::unique_ptr<Store> store_;
  std::vector<std::byte> content_;
  uint32_t crc_ = 0;
  const uint64_t first_ = random_();  // no block of an earlier call on the same disk is one of these
  uint64_t next_ = 0;
};

// Memory that gives away small blocks without end, and takes none.
class EndlessMemory final : public store::disk::Memory {
 public:
  explicit EndlessMemory(uint64_t blocks) : blocks_(blocks) {}
  static constexpr uint32_t kBytes = 64;

  void take_cold(uint32_t, const store::disk::ColdWish& wish,
                 std::vector<store::disk::ColdBlock>& out) override {
    constexpr uint64_t kAtOnce = 32'768;
    for (uint64_t step = 0; step < std::min(kAtOnce, wish.bytes / 256) && next_ < blocks_; ++step) {
      store::disk::ColdBlock block;
      block.tenant = kTenant;
      block.key = key_of(next_++);
      block.size = kBytes;
      block.crc32c = crc_;
      block.hits = 1;
      out.push_back(block);
    }
  }
  Status copy_out(const store::disk::ColdBlock&, uint64_t, Slice to) override {
    std::memset(to.data, 0, to.size);
    return Status::ok();
  }
  void end_demotion(const store::disk::ColdBlock&, store::disk::Demotion end) override {
    if (end == store::disk::Demotion::kLater) ++blocks_;  // another one comes in its place
  }
  Result<Reservation> reserve(TenantId, const Key&, uint64_t) override { return {Code::kNoSpace, {}}; }
  Status write(ReservationId, uint64_t, ConstSlice) override { return Status::ok(); }
  Code commit(ReservationId, TenantId, const Key&, uint32_t, uint32_t, const Origin&) override {
    return Code::kNotFound;
  }
  void abort(ReservationId) override {}
  void written(TenantId, const Key&, uint64_t) override { written_.fetch_add(1); }
  void lost(TenantId, const Key&, uint64_t, RemoveReason) override {}
  void log(uint8_t, const char*, std::string) override {}
  uint64_t written_blocks() const { return written_.load(); }

 private:
  const uint32_t crc_ = crc32c(std::vector<std::byte>(kBytes));
  uint64_t blocks_, next_ = 0;  // the device's thread
  std::atomic<uint64_t> written_{0};
};

}  // namespace

Result<DiskRates> disk_rates_benchmark(const DiskRatesOptions& options) {
  if (options.block_bytes == 0 || options.block_bytes > 8ull << 20 || options.depth == 0 ||
      options.memory_bytes < 16 * options.block_bytes || options.disk_bytes < 2 * options.memory_bytes)
    return {Code::kInvalidArgument, "blocks up to 8 MiB, memory for 16 of them, a disk of twice the memory"};
  DiskRates out;
  std::mutex mutex;
  StoreConfig config;
  config.capacity_bytes = options.memory_bytes;
  config.eviction = "lru";
  config.expected_block_bytes = options.block_bytes;
  config.disk.paths = {options.path};
  config.disk.bytes = options.disk_bytes;
  if (options.encrypted) config.disk.keys = {{kTenant, {DiskKey{std::byte{1}}}}};
  config.disk.log = [&](uint8_t, const char*, const std::string& message) {
    const std::lock_guard lock(mutex);
    if (out.queue.empty()) out.queue = message;
  };
  auto store = Store::open(config);
  if (!store) return store.status();
  RatesRun run(options, std::move(*store));
  if (Status done = run.run(out); !done) return done;
  return out;
}

Result<DiskStart> disk_start_benchmark(const DiskStartOptions& options) {
  if (options.records == 0 || options.records > 50'000'000)
    return {Code::kInvalidArgument, "1 to 50 million records"};
  store::disk::DeviceOptions wanted;
  wanted.path = options.path;
  wanted.node_id = "benchmark";
  // A record of 192 bytes, 64 more in the footer, and segments to spare.
  wanted.capacity_bytes = (64ull << 20) + options.records * 320;
  EndlessMemory memory(options.records);
  {
    auto device = store::disk::Device::open(wanted, memory);
    if (!device) return device.status();
    for (const uint64_t until_ms = now_ms() + kWaitMs; memory.written_blocks() < options.records;) {
      if (now_ms() > until_ms) return {Code::kDeadlineExceeded, "the disk takes no blocks"};
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  EndlessMemory empty(0);
  const Clock opening;
  auto device = store::disk::Device::open(wanted, empty);
  DiskStart out;
  out.cpu_s = opening.cpu();
  out.wall_s = opening.wall();
  if (!device) return device.status();
  const auto stats = (*device)->stats();
  out.records = stats.blocks;
  out.index_bytes = stats.index_bytes;
  return out;
}

}  // namespace mooncache

#include "mooncache/probe.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <ctime>
#include <random>
#include <thread>

#include "mooncache/crc32c.h"
#include "probe/grants.h"
#include "transport/rdma.h"

namespace mooncache {
namespace {

using Clock = std::chrono::steady_clock;
constexpr uint64_t kTotalBytesMax = 8ull << 30;  // of one side's buffers, over all threads
constexpr int64_t kStepTimeoutMs = 60'000;
constexpr uint64_t kDurationMaxMs = 3'600'000;

double thread_cpu_s() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::unique_ptr<Transport> transport_for(const ProbeOptions& options, Status& why) {
  if (options.transport == "rdma") {
    auto rdma = std::make_unique<RdmaTransport>(options.rdma);
    why = rdma->availability();
    return rdma;
  }
  auto made = make_transport(options.transport);
  why = made.status();
  return made ? std::move(*made) : nullptr;
}

// One thread's link, its buffers and its extents on the node.
class ProbeLane {
 public:
  ProbeLane(const ProbeOptions& options, uint32_t number) : options_(options), number_(number) {
    memory_.resize(options.block_bytes * options.batch);
    std::mt19937_64 random(number + 1);
    size_t at = 0;
    for (; at + 8 <= memory_.size(); at += 8) {
      const uint64_t word = random();
      std::memcpy(memory_.data() + at, &word, 8);
    }
    for (uint32_t i = 0; i < options.batch; ++i) {
      slices_.push_back({memory_.data() + i * options.block_bytes, options.block_bytes});
      crcs_.push_back(crc32c({slices_[i].data, slices_[i].size}));
    }
  }

  Status open(Transport* transport) {
    const Deadline deadline = Deadline::after_ms(kStepTimeoutMs);
    if (transport == nullptr) {
      grants_ = probe::loopback_grants(link_);
    } else {
      auto link = transport->connect(options_.peer, deadline);
      if (!link) return link.status();
      link_ = std::move(*link);
      const Capabilities& facts = transport->capabilities();
      reusable_ = facts.one_sided;
      auto region = transport->register_region({{memory_.data(), memory_.size()}, MemoryKind::kHost});
      if (region) region_ = *region;
      grants_ = probe::node_grants(*link_, options_.transport == "rdma", number_);
    }
    return options_.direction == Direction::kRead ? open_reads() : Status::ok();
  }

  // One batch from the submission to the last completion.
  Status batch() {
    if (options_.direction == Direction::kWrite && (!reusable_ || extents_.empty())) {
      if (Status status = reserve(); !status) return status;
    }
    if (Status status = move(options_.direction); !status) return status;
    if (options_.direction == Direction::kWrite && !reusable_) return grants_->give_up(extents_);
    return Status::ok();
  }

  // Blocks one after the other, always a batch of them under way, until `end` or `stop`.
  Status stream(Clock::time_point end, const std::atomic<bool>& stop, std::vector<double>& block_us) {
    if (!reusable_) return {Code::kInvalidArgument, "continuous transfers need a one-sided transport"};
    const Direction direction = options_.direction;
    if (extents_.empty()) {
      if (Status status = reserve(); !status) return status;
    }
    std::vector<Clock::time_point> begun(options_.batch, Clock::now());
    transfers_.resize(options_.batch);
    for (uint32_t i = 0; i < options_.batch; ++i) prepare(i, direction);
    size_t under_way = link_->submit(transfers_);
    std::array<Completion, 64> some;
    while (under_way > 0) {
      const size_t got = link_->poll(some, Deadline::after_ms(kStepTimeoutMs));
      if (got == 0) return late();
      const auto now = Clock::now();
      for (size_t i = 0; i < got; ++i) {
        if (Status status = judge(some[i], direction); !status) return status;
        const size_t block = some[i].id - 1;
        block_us.push_back(std::chrono::duration<double, std::micro>(now - begun[block]).count());
        --under_way;
        if (now >= end || stop.load(std::memory_order_relaxed)) continue;
        begun[block] = now;
        under_way += link_->submit(std::span(&transfers_[block], 1));
      }
    }
    return Status::ok();
  }

 private:
  // Blocks with known bytes on the node, and a pin on each.
  Status open_reads() {
    if (Status status = reserve(); !status) return status;
    if (Status status = move(Direction::kWrite); !status) return status;
    auto pinned = grants_->publish(extents_, crcs_);
    if (!pinned) return pinned.status();
    extents_ = std::move(*pinned);
    return Status::ok();
  }

  Status reserve() {
    auto reserved = grants_->reserve(options_.batch, options_.block_bytes);
    if (!reserved) return reserved.status();
    extents_ = std::move(*reserved);
    return Status::ok();
  }

  void prepare(uint32_t block, Direction direction) {
    Transfer& transfer = transfers_[block];
    transfer.id = block + 1;
    transfer.direction = direction;
    transfer.remote = extents_[block];
    transfer.local = std::span(&slices_[block], 1);
    transfer.region = region_;
    transfer.wants_crc = options_.verify;
  }

  Status judge(const Completion& completion, Direction direction) const {
    if (completion.code != Code::kOk)
      return {completion.code,
              "a transfer of the benchmark ended with " + std::string(code_name(completion.code))};
    if (direction == Direction::kRead && completion.checked && completion.crc32c != crcs_[completion.id - 1])
      return {Code::kChecksumMismatch, "a transfer of the benchmark moved other bytes than it should"};
    return Status::ok();
  }

  Status move(Direction direction) {
    transfers_.resize(options_.batch);
    for (uint32_t i = 0; i < options_.batch; ++i) prepare(i, direction);
    const Deadline deadline = Deadline::after_ms(kStepTimeoutMs);
    size_t sent = 0, done = 0;
    std::array<Completion, 64> some;
    while (done < transfers_.size()) {
      sent += link_->submit(std::span(transfers_).subspan(sent));
      const size_t got = link_->poll(some, deadline);
      if (got == 0) return late();
      for (size_t i = 0; i < got; ++i) {
        if (Status status = judge(some[i], direction); !status) return status;
      }
      done += got;
    }
    return Status::ok();
  }

  static Status late() { return {Code::kDeadlineExceeded, "a batch did not end within a minute"}; }

  const ProbeOptions& options_;
  const uint32_t number_;
  std::vector<std::byte> memory_;
  std::vector<Slice> slices_;
  std::vector<uint32_t> crcs_;
  std::vector<RemoteExtent> extents_;
  std::vector<Transfer> transfers_;
  std::unique_ptr<Link> link_;
  std::unique_ptr<probe::Grants> grants_;  // before the link: it speaks on it
  RegionHandle region_ = 0;
  bool reusable_ = true;  // an extent may be written again
};

struct ProbeOutcome {
  Status status;
  uint64_t blocks = 0;
  double cpu_seconds = 0;
  Clock::time_point begun, ended;
  std::vector<double> batch_us;
};

void run_lane(const ProbeOptions& options, ProbeLane& lane, std::barrier<>& start, std::atomic<bool>& stop,
              ProbeOutcome& outcome) {
  for (uint64_t i = 0; i < options.warm_up_batches && outcome.status; ++i) outcome.status = lane.batch();
  start.arrive_and_wait();
  const auto begun = outcome.begun = Clock::now();
  const double cpu_begun = thread_cpu_s();
  const auto end = begun + std::chrono::milliseconds(options.duration_ms);
  outcome.ended = begun;
  if (options.continuous && outcome.status) {
    outcome.status = lane.stream(end, stop, outcome.batch_us);
    outcome.blocks = outcome.batch_us.size();
    outcome.ended = Clock::now();
  }
  while (!options.continuous && outcome.status && !stop.load(std::memory_order_relaxed)) {
    const auto from = outcome.ended;
    outcome.status = lane.batch();
    outcome.ended = Clock::now();
    if (!outcome.status) break;
    outcome.blocks += options.batch;
    outcome.batch_us.push_back(std::chrono::duration<double, std::micro>(outcome.ended - from).count());
    if (outcome.ended >= end) break;
  }
  if (!outcome.status) stop = true;
  outcome.cpu_seconds = thread_cpu_s() - cpu_begun;
}

Status check(const ProbeOptions& options) {
  if (options.block_bytes == 0 || options.batch == 0 || options.batch > 1024)
    return {Code::kInvalidArgument, "a batch has 1 to 1024 blocks of at least one byte"};
  if (options.threads == 0 || options.threads > 64)
    return {Code::kInvalidArgument, "threads must be 1 to 64"};
  if (options.block_bytes > kTotalBytesMax / options.batch / options.threads)
    return {Code::kInvalidArgument, "block size x batch x threads is at most 8 GiB"};
  if (options.duration_ms > kDurationMaxMs)
    return {Code::kInvalidArgument, "a measurement takes an hour at most"};
  return Status::ok();
}

}  // namespace

Result<ProbeResult> probe_transfers(const ProbeOptions& options) {
  if (Status status = check(options); !status) return status;
  std::unique_ptr<Transport> transport;
  if (options.transport != "loopback") {
    Status why;
    transport = transport_for(options, why);
    if (!why) return why;
  }
  std::vector<std::unique_ptr<ProbeLane>> lanes;
  for (uint32_t i = 0; i < options.threads; ++i) {
    lanes.push_back(std::make_unique<ProbeLane>(options, i));
    if (Status status = lanes.back()->open(transport.get()); !status) return status;
  }
  std::vector<ProbeOutcome> outcomes(options.threads);
  std::atomic<bool> stop{false};
  std::barrier<> start(options.threads);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < options.threads; ++i)
    threads.emplace_back([&, i] { run_lane(options, *lanes[i], start, stop, outcomes[i]); });
  for (std::thread& thread : threads) thread.join();

  ProbeResult result;
  Clock::time_point begun = Clock::time_point::max(), ended{};
  for (ProbeOutcome& outcome : outcomes) {
    if (!outcome.status) return outcome.status;
    result.bytes += outcome.blocks * options.block_bytes;
    result.cpu_seconds += outcome.cpu_seconds;
    begun = std::min(begun, outcome.begun);
    ended = std::max(ended, outcome.ended);
    result.batch_us.insert(result.batch_us.end(), outcome.batch_us.begin(), outcome.batch_us.end());
  }
  result.seconds = std::max(std::chrono::duration<double>(ended - begun).count(), 1e-9);
  return result;
}

}  // namespace mooncache

// The disk has work while its thread copies and checks: what was asked for meanwhile begins between two
// copies, and the header of the next segment is there before the segment is needed. Faults meet several
// operations that have begun: each reader is released once, and no bytes are wrong.
#include "store/disk_fixture.h"

namespace mooncache::test {
namespace {

using store::disk::kDataOffset;
using store::disk::kPageBytes;

constexpr uint64_t kSegmentBytes = 512 << 10;  // of DiskTest

// Real operations on the file, in order. Reads end when the test lets them, all of them in one wait(); syncs
// can be kept back, too.
class GatedQueue final : public IoQueue {
 public:
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool holds_reads = false, holds_syncs = false, stale_ends = false, woken = false;
    int64_t read_result = 0;  // instead of the bytes read, when it is not 0
    int header_error = 0;     // errno, of the first page of a segment
    uint64_t begun_reads = 0, ended_syncs = 0, headers = 0;
    std::function<void()> at_write;  // when more than a page begins to be written

    template <typename Change>
    void set(const Change& change) {
      const std::lock_guard lock(mutex);
      change(*this);
      changed.notify_all();
    }
    template <typename Until>
    bool wait_for(const Until& until) {
      std::unique_lock lock(mutex);
      return changed.wait_for(lock, std::chrono::seconds(20), [&] { return until(*this); });
    }
  };

  GatedQueue(int fd, std::shared_ptr<Gate> gate) : fd_(fd), gate_(std::move(gate)) {}

  bool submit(const Io& io) override {
    submitted_.push_back(io);
    return true;
  }
  void begin() override {
    const std::lock_guard lock(gate_->mutex);
    for (const Io& io : std::exchange(submitted_, {})) {
      if (io.kind == Io::Kind::kRead) ++gate_->begun_reads;
      if (is_header(io)) ++gate_->headers;
      if (io.kind == Io::Kind::kWrite && io.memory.size > kPageBytes && gate_->at_write) gate_->at_write();
      begun_.push_back(io);
    }
    gate_->changed.notify_all();
  }
  void wait(std::vector<IoEnd>& ends, int timeout_ms) override {
    begin();
    std::unique_lock lock(gate_->mutex);
    gate_->changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] {
      return gate_->woken ||
             std::any_of(begun_.begin(), begun_.end(), [this](const Io& io) { return !is_held(io); });
    });
    gate_->woken = false;
    std::erase_if(begun_, [&](const Io& io) {
      if (is_held(io)) return false;
      ends.push_back({io.cookie, carry_out(io)});
      if (gate_->stale_ends) ends.push_back({io.cookie + (uint64_t{7} << 32), 4096});
      gate_->ended_syncs += io.kind == Io::Kind::kSync ? 1 : 0;
      return true;
    });
    gate_->changed.notify_all();
  }
  void wake() override {
    gate_->set([](Gate& gate) { gate.woken = true; });
  }
  std::string description() const override { return "a gate of tests"; }

 private:
  bool is_held(const Io& io) const {
    return (io.kind == Io::Kind::kRead && gate_->holds_reads) ||
           (io.kind == Io::Kind::kSync && gate_->holds_syncs);
  }
  static bool is_header(const Io& io) {
    return io.kind == Io::Kind::kWrite && io.memory.size == kPageBytes && io.offset >= kDataOffset &&
           (io.offset - kDataOffset) % kSegmentBytes == 0;
  }
  int64_t carry_out(const Io& io) const {
    const auto offset = static_cast<off_t>(io.offset);
    if (io.kind == Io::Kind::kSync) return 0;
    if (is_header(io) && gate_->header_error != 0) return -gate_->header_error;
    if (io.kind == Io::Kind::kWrite) return ::pwrite(fd_, io.memory.data, io.memory.size, offset);
    const ssize_t got = ::pread(fd_, io.memory.data, io.memory.size, offset);
    return gate_->read_result != 0 ? gate_->read_result : got;
  }

  const int fd_;
  const std::shared_ptr<Gate> gate_;
  std::vector<Io> submitted_, begun_;
};

using Gate = GatedQueue::Gate;

class DiskOverlapTest : public DiskTest {
 protected:
  DeviceOptions gated() {
    DeviceOptions with = options();
    with.open_queue = [gate = gate_](int fd, std::span<const iovec>) {
      return std::make_unique<GatedQueue>(fd, gate);
    };
    return with;
  }
  void fill_disk(uint64_t from, uint64_t count, size_t size) {
    const size_t before = memory_->written_count();
    for (uint64_t i = from; i < from + count; ++i) memory_->offer(i, size);
    ASSERT_TRUE(memory_->wait_written(before + count));
  }
  void fetch(uint64_t number, std::function<void()> also = {}) {
    EXPECT_TRUE(device_->fetch(kTenant, key_of(number), [this, number, also] {
      if (also) also();
      gate_->set([&](Gate&) { ++told_[number]; });
    }));
  }
  void hold_reads() {
    gate_->set([](Gate& gate) {
      gate.holds_reads = true;
      gate.begun_reads = 0;
    });
  }
  // The first blocks, asked for before one of them is answered; all reads have begun, and are still held.
  void ask_at_once(uint64_t count) {
    hold_reads();
    for (uint64_t i = 0; i < count; ++i) fetch(i);
    EXPECT_TRUE(gate_->wait_for([&](const Gate& gate) { return gate.begun_reads >= count; }));
  }
  // Lets the reads end. Whether each of the first blocks was told of its end, once.
  bool let_reads_end(uint64_t count) {
    gate_->set([](Gate& gate) { gate.holds_reads = false; });
    const auto told = [&](const Gate&) {
      return std::all_of(told_.begin(), told_.begin() + static_cast<int64_t>(count),
                         [](int times) { return times > 0; });
    };
    if (!gate_->wait_for(told)) return false;
    device_->close();  // nobody is told later
    return std::all_of(told_.begin(), told_.end(), [](int times) { return times <= 1; });
  }

  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::vector<int> told_ = std::vector<int>(64);  // guarded by the gate's mutex
};

// Eight reads end at once; who gets the first block asks for another one. Its read has begun before the last
// of the eight is told.
TEST_F(DiskOverlapTest, AReadBeginsBetweenTwoCopies) {
  ASSERT_TRUE(open(gated()));
  fill_disk(0, 9, 30'000);
  hold_reads();
  uint64_t begun_at_last = 0;
  for (uint64_t i = 0; i < 8; ++i) {
    fetch(i, [this, i, &begun_at_last] {
      if (i == 0) fetch(8);
      if (i == 7) gate_->set([&](const Gate& gate) { begun_at_last = gate.begun_reads; });
    });
  }
  ASSERT_TRUE(gate_->wait_for([](const Gate& gate) { return gate.begun_reads >= 8; }));
  EXPECT_TRUE(let_reads_end(9));
  EXPECT_EQ(begun_at_last, 9u);
  for (uint64_t i = 0; i < 9; ++i) EXPECT_EQ(memory_->taken_up(i), content_of(i, 30'000)) << i;
}

// Ten blocks go down together. The first of them are being written before the last one is copied.
TEST_F(DiskOverlapTest, AWriteBeginsBetweenTwoCopies) {
  ASSERT_TRUE(open(gated()));
  fill_disk(0, 1, 1'000);
  uint64_t ended_at_first = 0;
  gate_->set([&](Gate& gate) {
    gate.at_write = [&] {
      if (ended_at_first == 0) ended_at_first = memory_->ends(Demotion::kWritten);
    };
  });
  fetch(0, [this] {  // by the disk's thread, so that it finds all of them at its next look
    for (uint64_t i = 1; i <= 10; ++i) memory_->offer(i, 100'000);
  });
  ASSERT_TRUE(memory_->wait_written(11));
  device_->close();
  EXPECT_GT(ended_at_first, 1u);
  EXPECT_LT(ended_at_first, 11u);
}

// No sync is answered any more, and blocks go on into the next segment: its header was confirmed before.
TEST_F(DiskOverlapTest, TheNextSegmentIsOpenBeforeItIsNeeded) {
  ASSERT_TRUE(open(gated()));
  gate_->set([](Gate& gate) { gate.ended_syncs = 0; });
  fill_disk(0, 2, 100'000);
  ASSERT_TRUE(gate_->wait_for([](const Gate& gate) { return gate.headers == 2 && gate.ended_syncs == 2; }));
  gate_->set([](Gate& gate) { gate.holds_syncs = true; });
  fill_disk(2, 6, 100'000);  // five fit into a segment
  gate_->set([](Gate& gate) { gate.holds_syncs = false; });
  ASSERT_TRUE(open());
  EXPECT_EQ(device_->stats().recovered, 8u);
  for (uint64_t i = 0; i < 8; ++i) EXPECT_TRUE(read(i, 100'000)) << i;
}

// What a full file system did to it does not last: the header is written again when the segment is needed.
TEST_F(DiskOverlapTest, AHeaderThatFailedIsWrittenAgain) {
  ASSERT_TRUE(open(gated()));
  fill_disk(0, 1, 1'000);
  gate_->set([](Gate& gate) { gate.header_error = ENOSPC; });
  fill_disk(1, 2, 100'000);
  ASSERT_TRUE(gate_->wait_for([](const Gate& gate) { return gate.headers == 2; }));
  for (int tries = 0; tries < 4000 && device_->stats().no_space == 0; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(device_->stats().no_space, 1u) << "it is not tried again before it is needed";
  gate_->set([](Gate& gate) { gate.header_error = 0; });
  fill_disk(3, 8, 100'000);
  ASSERT_TRUE(open());
  EXPECT_TRUE(read(0, 1'000));
  for (uint64_t i = 1; i < 11; ++i) EXPECT_TRUE(read(i, 100'000)) << i;
}

// Each start finds a segment that was opened ahead, without a record. It is free: eleven starts would not fit
// into fifteen segments otherwise.
TEST_F(DiskOverlapTest, ASegmentThatWasOpenedAheadIsFreeAfterAStart) {
  constexpr uint64_t kStarts = 11;
  for (uint64_t start = 0; start < kStarts; ++start) {
    ASSERT_TRUE(open(gated()));
    gate_->set([](Gate& gate) { gate.headers = 0; });
    fill_disk(2 * start, 2, 100'000);
    ASSERT_TRUE(gate_->wait_for([](const Gate& gate) { return gate.headers == 2; }));
  }
  ASSERT_TRUE(open());
  EXPECT_EQ(device_->stats().recovered, 2 * kStarts);
  for (uint64_t i = 0; i < 2 * kStarts; ++i) EXPECT_TRUE(read(i, 100'000)) << i;
}

TEST_F(DiskOverlapTest, StaleEndsBetweenManyReads) {
  ASSERT_TRUE(open(gated()));
  fill_disk(0, 12, 300'000);
  gate_->set([](Gate& gate) { gate.stale_ends = true; });
  ask_at_once(12);
  EXPECT_TRUE(let_reads_end(12));
  for (uint64_t i = 0; i < 12; ++i) EXPECT_EQ(memory_->taken_up(i), content_of(i, 300'000)) << i;
  EXPECT_EQ(memory_->open_reservations(), 0u);
}

TEST_F(DiskOverlapTest, ManyShortReadsAreMisses) {
  ASSERT_TRUE(open(gated()));
  fill_disk(0, 12, 30'000);
  ask_at_once(12);
  gate_->set([](Gate& gate) { gate.read_result = 4096; });
  EXPECT_TRUE(let_reads_end(12));
  EXPECT_EQ(device_->stats().read_misses, 12u);
  EXPECT_EQ(memory_->open_reservations(), 0u);
}

// The third error is the end of the disk, while the ends of the other nine are still to be looked at.
TEST_F(DiskOverlapTest, ADiskEndsInTheMiddleOfManyReads) {
  ASSERT_TRUE(open(gated()));
  fill_disk(0, 12, 30'000);
  ask_at_once(12);
  gate_->set([](Gate& gate) { gate.read_result = -EIO; });
  EXPECT_TRUE(let_reads_end(12));
  EXPECT_EQ(memory_->event_count("ssd_off"), 1u);
  EXPECT_EQ(memory_->lost_count(), 12u);
  EXPECT_EQ(memory_->open_reservations(), 0u);
}

// Both kinds of queue: an operation that was begun ends once, whatever is submitted behind it.
TEST_F(DiskOverlapTest, WhatWasBegunEndsOnce) {
  constexpr uint64_t kPages = 40;
  for (const bool allow_uring : {true, false}) {
    const int fd = ::open((folder_ / "pages").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_GE(fd, 0);
    {
      const store::disk::AlignedMemory pages(kPages * kPageBytes);
      auto queue = store::disk::open_io_queue(fd, {}, {.allow_uring = allow_uring});
      std::map<uint64_t, int> ended;
      std::vector<IoEnd> ends;
      for (uint64_t i = 0; i < kPages; ++i) {
        const Slice page{pages.data() + i * kPageBytes, kPageBytes};
        (void)fill(page, i);
        ASSERT_TRUE(queue->submit({Io::Kind::kWrite, i * kPageBytes, page, -1, i}));
        if (i % 3 != 0) queue->begin();
        if (i % 16 == 0) queue->wait(ends, 0);
      }
      for (int tries = 0; tries < 4000 && ends.size() < kPages; ++tries) queue->wait(ends, 5);
      for (const IoEnd& end : ends) {
        ++ended[end.cookie];
        EXPECT_EQ(end.result, static_cast<int64_t>(kPageBytes)) << queue->description();
      }
      EXPECT_EQ(ended.size(), kPages) << queue->description();
      EXPECT_EQ(ends.size(), kPages) << queue->description();
    }
    ::close(fd);
  }
}

}  // namespace
}  // namespace mooncache::test
